"""Translations inside packages: finds gettext catalogues and reads (source, target) pairs out of them.

A catalogue is a file ``LANGUAGE/LC_MESSAGES/DOMAIN.po`` or ``.mo`` of an installed package, of a wheel or source
archive (read without unpacking), or below a folder. Where both stand side by side the ``.po`` is read: it alone
tells which translations are fuzzy. Test-suites' catalogues (below ``tests/``) are no real text and are passed over.
"""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NamedTuple

try:
    from babel.messages.mofile import read_mo
    from babel.messages.pofile import read_po
except ImportError as error:
    raise SystemExit("tools.datasets: reading gettext catalogues needs Babel: pip install Babel") from error

CATALOGUE = re.compile(r"(?:^|/)([^/]+)/LC_MESSAGES/[^/]+\.(?:po|mo)$")
TARBALLS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
ARCHIVES = (".whl", ".zip", *TARBALLS)


class Entry(NamedTuple):
    """One source text and what the catalogue says for it, as they stand there."""

    source: str
    target: str
    fuzzy: bool


@dataclass
class Package:
    """The catalogues of one language in one package, archive or folder."""

    name: str
    version: str | None = None
    catalogues: dict[str, bytes] = field(default_factory=dict)  # by path
    languages: set[str] = field(default_factory=set)  # of all catalogues, read or not


def canonical(language: str) -> str:
    """``pt-BR`` and ``pt_br`` are one language."""
    return language.replace("-", "_").lower()


def collect(
    package: Package, files: Iterable[tuple[str, Callable[[], bytes]]], language: str, prefix: str = ""
) -> None:
    """Read the catalogues of ``language`` among ``files``, which are (path, what reads it), into ``package``."""
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
    """The packages of the running interpreter, those without a catalogue too."""
    packages = []
    for distribution in metadata.distributions():
        package = Package(distribution.metadata["Name"], distribution.version)
        located = ((str(file), Path(str(file.locate()))) for file in distribution.files or [])
        collect(package, ((path, at.read_bytes) for path, at in located if at.is_file()), language)
        packages.append(package)
    return packages


def archive(path: Path, language: str) -> Package:
    """A wheel, a zip file or a source archive.

    Raises:
        ValueError: it is damaged.
    """
    stem = next(path.name[: -len(suffix)] for suffix in ARCHIVES if path.name.endswith(suffix))
    name, version, *_ = *stem.split("-"), None  # wheels: name-version-python-abi-platform; others: name-version
    if not path.name.endswith(".whl") and stem.count("-") > 0:
        name, version = stem.rsplit("-", 1)
    package = Package(name, version)
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
    """A folder: its own catalogues as one package, and each archive that lies directly in it as another."""
    files = sorted(file for file in path.rglob("*.[pm]o") if file.is_file())
    package = Package(path.resolve().name)
    located = ((file.relative_to(path).as_posix(), file.read_bytes) for file in files)
    collect(package, located, language, prefix=f"{path.resolve().as_posix()}/")
    archives = sorted(file for file in path.iterdir() if file.name.endswith(ARCHIVES) and file.is_file())
    return [package, *(archive(file, language) for file in archives)]


def named(path: Path, language: str) -> list[Package]:
    """The packages at a wheel, archive or folder.

    Raises:
        ValueError: there is nothing, something else, or a damaged archive.
    """
    if path.is_dir():
        return below(path, language)
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder")
    if not path.name.endswith(ARCHIVES):
        raise ValueError(f"{path} is neither a folder nor one of {', '.join(ARCHIVES)}")
    return [archive(path, language)]


def entries(path: str, content: bytes) -> Iterator[Entry]:
    """The entries of a catalogue; of plural forms, the first with the singular and the last with the plural.

    Obsolete entries and the header are left out. gettext orders the forms from one to many, so that first and last
    fit the two English forms in every language.

    Raises:
        ValueError: the content is no catalogue.
    """
    try:
        file = io.BytesIO(content)
        catalogue = read_mo(file) if path.endswith(".mo") else read_po(file, ignore_obsolete=True, abort_invalid=True)
    except Exception as error:  # Babel documents none of what damaged files raise in it
        raise ValueError(f"{path} is not a readable catalogue: {error}") from error
    for message in catalogue:
        if not message.id:
            continue
        sources = message.id if isinstance(message.id, list | tuple) else (message.id,)
        targets = message.string if isinstance(message.string, list | tuple) else (message.string,)
        forms = ((0, 0), (-1, -1)) if len(sources) > 1 else ((0, 0),)
        for source, target in forms:
            yield Entry(sources[source], targets[target] or "", message.fuzzy)
