"""Parsing of gettext catalogues: made-up .po and .mo files."""

from __future__ import annotations

import pytest

from tests.helpers.made_up_catalogues import HEADER, mo, po

pytest.importorskip("polib", reason="polib is not installed")

from tools.datasets import gettext_catalogues as catalogues


def test_entries_of_po():
    content = HEADER.format("UTF-8") + (
        '\nmsgid "Save"\nmsgstr "Sichern"\n'
        '\n#, fuzzy\n#| msgid "Old"\nmsgid "New"\nmsgstr "Alt"\n'
        '\nmsgid "Unknown"\nmsgstr ""\n'
        '\nmsgctxt "month"\nmsgid "May"\nmsgstr "Mai"\n'
        '\nmsgctxt "verb"\nmsgid "May"\nmsgstr "Darf"\n'
        '\nmsgid ""\n"A long \\"quoted\\"\\n"\n"back\\\\slash\\tö"\n'
        'msgstr "Ein langer \\"zitierter\\"\\nRückwärts\\\\strich\\tö"\n'
        '\nmsgid "%d file"\nmsgid_plural "%d files"\nmsgstr[0] "%d Datei"\nmsgstr[1] "%d Dateien"\n'
        '\n#, fuzzy\n#~| msgid "Before"\n#~ msgid "Gone"\n#~ msgstr "Weg"\n'
    )
    assert set(catalogues.entries("x.po", content.encode())) == {
        ("Save", "Sichern", False),
        ("New", "Alt", True),
        ("Unknown", "", False),
        ("May", "Mai", False),
        ("May", "Darf", False),
        ('A long "quoted"\nback\\slash\tö', 'Ein langer "zitierter"\nRückwärts\\strich\tö', False),
        ("%d file", "%d Datei", False),
        ("%d files", "%d Dateien", False),
    }


@pytest.mark.parametrize("charset", ["UTF-8", "ISO-8859-1"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_entries_of_mo(charset, order):
    content = mo(
        {"Save": "Für später", "month\x04May": "Mai", "%d file\0%d files": "%d Datei\0%d Dateien"}, charset, order
    )
    texts = {(entry.source, entry.target) for entry in catalogues.entries("x.mo", content)}
    assert texts == {
        ("Save", "Für später"), ("May", "Mai"), ("%d file", "%d Datei"), ("%d files", "%d Dateien")
    }  # fmt: skip


def test_other_charsets_marks_and_numbers_of_plural_forms():
    assert [entry.target for entry in catalogues.entries("x.po", po({"Key": "Schlüssel"}, "ISO-8859-1"))] == [
        "Schlüssel"
    ]
    marked = b"\xef\xbb\xbf" + po({"Key": "Schlüssel"})
    assert [entry.target for entry in catalogues.entries("x.po", marked)] == ["Schlüssel"]
    three = (
        po({})
        + b'msgid "%d day"\nmsgid_plural "%d days"\n'
        + 'msgstr[0] "%d день"\nmsgstr[1] "%d дня"\nmsgstr[2] "%d дней"\n'.encode()
    )
    assert [entry.target for entry in catalogues.entries("x.po", three)] == ["%d день", "%d дней"]
    one = po({}) + 'msgid "%d day"\nmsgid_plural "%d days"\nmsgstr[0] "%d 日"\n'.encode()
    assert [entry.target for entry in catalogues.entries("x.po", one)] == ["%d 日", "%d 日"]
