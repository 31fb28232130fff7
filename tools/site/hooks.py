"""Hooks of mkdocs: pages from docstrings, from ``--help``, from ``benchmarks/`` and from notebooks."""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.site import commands, notebooks, reference  # noqa: E402
from tools.view.page import page_of  # noqa: E402

# Files of the repository that are pages of the site under another name.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{f"plugins/{name}/__init__.py": f"reference/{name}.md" for name in reference.TITLES},
}
_ABOUT: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "tools/site/pages.yaml").read_text())
_PICTURE = re.compile(r"(!\[[^]]*\]\()\.\./((?:\.\./)*benchmarks/)")  # of benchmarks/, which the site has within docs/
_LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def on_pre_build(config: Any) -> None:
    """Let mkdocstrings find the package by its import name, without an installation."""
    link = ROOT / "build/site_sources/attn_plugins"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to("../../plugins")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages: dict[str, str | bytes] = {f"reference/{name}.md": text for name, text in reference.pages().items()}
    pages["reference/commands.md"] = commands.page()
    for page in sorted((ROOT / "benchmarks").glob("*.md")):
        pages[f"benchmarks/{page.name}"] = _outside(page.read_text().replace("](../docs/", "](../"), "benchmarks/")
    for data in sorted(path for kind in ("json", "svg") for path in (ROOT / "benchmarks").glob(f"*.{kind}")):
        pages[f"benchmarks/{data.name}"] = data.read_text()
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        pages[PAGES[name]] = _outside((ROOT / name).read_text(), "")
    kept = json.loads((ROOT / "docs/attention.json").read_text())  # from one call of tools.view
    pages["attention/index.html"] = page_of(**kept)
    for notebook in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        pages[f"notebooks/{notebook.stem}.md"], pictures = notebooks.page(notebook)
        pages |= {f"notebooks/{name}": content for name, content in pictures.items()}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links from ``docs/`` to files of the repository, which work there, into links to their pages on the site."""
    source = ROOT / "docs" / page.file.src_path
    if not source.exists():  # generated
        return markdown

    markdown = _PICTURE.sub(r"\1\2", markdown)

    def link(match: re.Match[str]) -> str:
        target, mark, anchor = match[2].partition("#")
        path = (source.parent / target).resolve()
        if path.suffix == ".ipynb":
            return f"[{match[1]}]({target.removesuffix('.ipynb')}.md{mark}{anchor})"
        if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "docs"):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        name = PAGES.get(name, name)
        if name not in files.src_uris:
            return _path(match[1], path) if path.exists() else match[0]
        there = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{match[1]}]({there}{mark}{anchor})"

    return _LINK.sub(link, markdown)


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """Set what search engines show of a page; the navigation keeps its heading."""
    if page.file.src_uri in _ABOUT:
        page.title = page.title  # fixed, since mkdocs otherwise takes it from the next line
        page.meta |= _ABOUT[page.file.src_uri]
    return context


def _outside(text: str, folder: str) -> str:
    """Replace links to files that are not pages by their text and the file's path."""

    def link(match: re.Match[str]) -> str:
        words, target = match[1], match[2].partition("#")[0]
        path = (ROOT / folder / target).resolve()
        on_site = (ROOT / "docs" / folder / target).resolve().exists() or path.parent.name == folder.rstrip("/")
        if on_site or not path.exists():  # mkdocs reports broken links
            return match[0]
        return _path(words, path)

    return _LINK.sub(link, text)


def _path(words: str, path: Path) -> str:
    """Return the words of a link, and the file's path unless they contain it."""
    where = path.relative_to(ROOT).as_posix()
    return f"{words} (`{where}`)" if where not in words else words
