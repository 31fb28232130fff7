"""Translations inside packages: search of gettext catalogues and reading of their (source, target) pairs.

A catalogue is a file ``LANGUAGE/LC_MESSAGES/DOMAIN.po`` or ``.mo`` of an installed package, of a wheel or source
archive (read without unpacking), or below a folder. If both exist, the ``.po`` is read, because only it marks fuzzy
translations. Catalogues of test suites (below ``tests/``) contain no real text and are skipped.
"""

from __future__ import annotations

import re
import tarfile
import zipfile
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import polib

CATALOGUE = re.compile(r"(?:^|/)([^/]+)/LC_MESSAGES/[^/]+\.(?:po|mo)$")
NAME_VERSION = re.compile(r"(.+?)-(\d[^-]*)")  # a wheel's name continues with -python-abi-platform
SUFFIXES = (".po", ".mo")
TARBALLS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
ARCHIVES = (".whl", ".zip", *TARBALLS)


class Entry(NamedTuple):
    """One source text and its translation, unchanged."""

    source: str
    target: str
    fuzzy: bool


@dataclass
class Package:
    """Catalogues of one language in one package, archive or folder."""

    name: str
    version: str | None = None
    catalogues: dict[str, bytes] = field(default_factory=dict)  # by path
    languages: set[str] = field(default_factory=set)  # of all catalogues, including unread ones


def canonical(language: str) -> str:
    """Return a language's canonical name: ``pt-BR`` and ``pt_br`` are the same language."""
    return language.replace("-", "_").lower()


def collect(
    package: Package, files: Iterable[tuple[str, Callable[[], bytes]]], language: str, prefix: str = ""
) -> None:
    """Read the catalogues of ``language`` among ``files``, pairs (path, reader), into ``package``."""
    for path, read in files:
        match = CATALOGUE.search(prefix + path)
        if match and "tests" not in PurePosixPath(path).parts:
            package.languages.add(match[1])
            if canonical(match[1]) == canonical(language):
                package.catalogues[path] = read()
    for path in [path for path in package.catalogues if path.endswith(".mo")]:
        if path[:-3] + ".po" in package.catalogues:
            del package.catalogues[path]


def installed(language: str) -> list[Package]:
    """Return the packages of the running interpreter, including those without catalogues."""
    packages = []
    for distribution in metadata.distributions():
        package = Package(distribution.metadata["Name"] or "unnamed", distribution.version)
        files = {
            file.as_posix(): Path(str(file.locate())) for file in distribution.files or [] if file.suffix in SUFFIXES
        }
        collect(package, ((path, file.read_bytes) for path, file in files.items() if file.is_file()), language)
        packages.append(package)
    return packages


def archive(path: Path, language: str) -> Package:
    """Read a wheel, a zip file or a source archive; raise a ValueError if the archive is damaged."""
    stem = next(path.name.removesuffix(suffix) for suffix in ARCHIVES if path.name.endswith(suffix))
    match = NAME_VERSION.match(stem)
    package = Package(match[1], match[2]) if match else Package(stem)
    try:
        if path.name.endswith(TARBALLS):
            with tarfile.open(path) as tar:
                members = (m for m in tar if m.isfile())
                collect(package, ((m.name, lambda m=m: tar.extractfile(m).read()) for m in members), language)
        else:
            with zipfile.ZipFile(path) as file:
                collect(package, ((n, lambda n=n: file.read(n)) for n in file.namelist()), language)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a readable archive: {error}") from error
    return package


def below(path: Path, language: str) -> list[Package]:
    """Read a folder: its own catalogues as one package, and each archive directly in it as another."""
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    package = Package(path.resolve().name)
    located = ((file.relative_to(path).as_posix(), file.read_bytes) for file in files)
    collect(package, located, language, prefix=f"{path.resolve().as_posix()}/")
    archives = sorted(file for file in path.iterdir() if file.name.endswith(ARCHIVES) and file.is_file())
    return [package, *(archive(file, language) for file in archives)]


def named(path: Path, language: str) -> list[Package]:
    """Return the packages of a wheel, archive or folder.

    Raises:
        ValueError: the path does not exist, is of another kind, or is a damaged archive.
    """
    if path.is_dir():
        return below(path, language)
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder")
    if not path.name.endswith(ARCHIVES):
        raise ValueError(f"{path} is neither a folder nor one of {', '.join(ARCHIVES)}")
    return [archive(path, language)]


def entries(path: str, content: bytes) -> Iterator[Entry]:
    """Yield the entries of a catalogue; for plural forms, the first with the singular and the last with the plural.

    Obsolete entries and the header are left out. gettext orders the forms from one to many, so that the first and the
    last match the two English forms in every language.

    Raises:
        ValueError: the content is not a catalogue.
    """
    try:
        if path.endswith(".mo"):
            catalogue = polib.mofile(content)
        else:
            catalogue = polib.pofile(content.removeprefix(BOM_UTF8).decode(polib.detect_encoding(content)))
    except Exception as error:  # polib does not document its errors for damaged files
        raise ValueError(f"{path} is not a readable catalogue: {error}") from error
    for entry in catalogue:
        if entry.obsolete:
            continue
        fuzzy = getattr(entry, "fuzzy", False)  # a .mo file has no flags
        if entry.msgid_plural:
            forms = [entry.msgstr_plural[n] for n in sorted(entry.msgstr_plural)] or [""]
            yield Entry(entry.msgid, forms[0], fuzzy)
            yield Entry(entry.msgid_plural, forms[-1], fuzzy)
        else:
            yield Entry(entry.msgid, entry.msgstr, fuzzy)
