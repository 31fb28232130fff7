"""Small gettext catalogues in their real formats: single files, folders and wheels."""

from __future__ import annotations

import itertools
import struct
import zipfile
from pathlib import Path

HEADER = (
    'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset={}\\n"\n"Plural-Forms: nplurals=2; plural=(n != 1);\\n"\n'
)
NOUNS = {
    "file": "Die Datei", "page": "Die Seite", "list": "Die Liste", "line": "Die Zeile", "task": "Die Aufgabe",
    "message": "Die Nachricht", "language": "Die Sprache", "group": "Die Gruppe", "card": "Die Karte",
    "table": "Die Tabelle",
}  # fmt: skip
VERBS = {
    "deleted": "gelöscht", "saved": "gesichert", "moved": "verschoben", "opened": "geöffnet", "closed": "geschlossen",
    "found": "gefunden", "changed": "geändert", "copied": "kopiert",
}  # fmt: skip
PLACES = {"": "", " by %(user)s": " von %(user)s", " at {time}": " um {time}"}


def sentences(nouns=NOUNS) -> dict[str, str]:
    """Return sentence pairs of a small corpus."""
    return {
        f"The {noun} was {verb}{place}.": f"{NOUNS[noun]} wurde{PLACES[place]} {VERBS[verb]}."
        for noun, verb, place in itertools.product(nouns, VERBS, PLACES)
    }


def po(pairs: dict[str, str], charset: str = "UTF-8") -> bytes:
    """Return a .po file; the texts must need no escapes."""
    body = "".join(f'\nmsgid "{source}"\nmsgstr "{target}"\n' for source, target in pairs.items())
    return (HEADER.format(charset) + body).encode(charset)


def mo(pairs: dict[str, str], charset: str = "UTF-8", order: str = "<") -> bytes:
    """Pack a .mo file by gettext's manual, with its plural forms and contexts (NUL, EOT)."""
    header = f"Content-Type: text/plain; charset={charset}\nPlural-Forms: nplurals=2; plural=(n != 1);\n"
    encoded = sorted((s.encode(charset), t.encode(charset)) for s, t in {"": header, **pairs}.items())
    start = 28 + 16 * len(encoded)
    tables, strings = [b"", b""], b""
    for column in (0, 1):
        for row in encoded:
            tables[column] += struct.pack(f"{order}II", len(row[column]), start + len(strings))
            strings += row[column] + b"\0"
    head = struct.pack(f"{order}7I", 0x950412DE, 0, len(encoded), 28, 28 + 8 * len(encoded), 0, start)
    return head + tables[0] + tables[1] + strings


def folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def wheel(directory: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """Write a wheel that pip accepts."""
    info = f"{name}-{version}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for member, content in {**files, **metadata}.items():
            file.writestr(member, content)
    return path
