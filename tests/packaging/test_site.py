"""README and the site's pages: code blocks run or state what they need, and links resolve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"(?:<!-- (tested by|needs): (.*?) -->\n)?^```(python|bash)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"!?\[[^]]*\]\((?!https?:|mailto:)([^)\s]+)\)")


def blocks(page: Path) -> list[tuple[str | None, str, str, str]]:
    """Return (``tested by``, ``needs`` or None, its argument, language, text) of each block."""
    return [(kind or None, what, language, text) for kind, what, language, text in BLOCK.findall(page.read_text())]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code(page: Path) -> str:
    """Return, in order, the Python code of a page that no other test covers."""
    return "\n".join(text for kind, _, language, text in blocks(page) if kind is None and language == "python")


WITH_CODE = [page for page in (README, *PAGES) if code(page)]


def test_shell_blocks_say_what_tests_them_or_what_they_need():
    for page in PAGES:
        for kind, what, language, text in blocks(page):
            if language == "bash":
                assert kind is not None, (name(page), text)
            if kind == "tested by":
                assert (ROOT / what).is_file(), (name(page), what)


# They export, compile or train models, or start processes; README and the first page stay.
SLOW = ("export", "faster", "new-module", "new-toolkit", "pictures", "timm", "transformers", "vit-backbones")
CASES = [pytest.param(page, marks=pytest.mark.slow if page.stem in SLOW else ()) for page in WITH_CODE]


@pytest.mark.parametrize("page", CASES, ids=name)
def test_code_runs(page, tmp_path):
    """Run all blocks of a page in order, as a reader would. Another test covers the config."""
    text = code(page)
    if page == README:
        parts = [text for _, _, language, text in blocks(README) if language == "python"]
        text = "\n".join(part for part in parts if "custom_imports" not in part)
    run(text, tmp_path)


@pytest.mark.slow
def test_code_of_the_export_page_runs_but_for_compilation_and_onnx(tmp_path):
    """The blocks that take seconds, with the model of the first one."""
    first, exported, traced, _, tensorrt = (
        text
        for kind, _, language, text in blocks(ROOT / "docs/howto/export.md")
        if (kind, language) == (None, "python")
    )
    model, compiled, _ = first.partition("compiled = ")
    assert compiled
    run("\n".join((model, exported, traced, tensorrt)), tmp_path)


def run(text: str, folder: Path) -> None:
    (folder / "page.py").write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_readme_is_short_and_has_the_start_pages_config():
    assert len(README.read_bytes()) < 8192
    config = next(text for _, _, _, text in blocks(README) if "custom_imports" in text)
    assert config in (ROOT / "docs/start/mmdet.md").read_text()


def test_links_of_the_repository_lead_somewhere():
    pages = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES, *ROOT.glob("configs/**/README.md")]
    on_the_site_alone = "attention/index.html"
    for page in pages:
        for target in LINK.findall(page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not path.endswith(on_the_site_alone):
                assert file.exists(), (name(page), target)
                assert not anchor or anchor in anchors(file), (name(page), target)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def navigation(node) -> list[str]:
    if isinstance(node, str):
        return [node]
    return [page for value in (node.values() if isinstance(node, dict) else node) for page in navigation(value)]


def test_every_page_is_in_the_navigation():
    listed = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    generated = {page for page in listed if page.startswith(("reference/", "benchmarks/", "notebooks/"))}
    generated |= {"changelog.md", "contributing.md"}
    written = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES}
    assert len(listed) == len(set(listed))
    assert set(listed) - generated == written


def test_every_page_has_a_title_and_a_description_for_search_engines():
    about = yaml.safe_load((ROOT / "tools/site/pages.yaml").read_text())
    assert sorted(about) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in PAGES)
    for page, texts in about.items():
        assert 30 <= len(texts["title"]) <= 95, page
        assert 60 <= len(texts["description"]) <= 160, page
    assert len({texts["title"] for texts in about.values()}) == len(about)


def test_docstrings_become_markdown():
    from tools.site.docstrings import markdown

    text = "Does this; see :class:`.Other` and ``x``::\n\n    a = 1\n\nThen more.\n\n==== ====\na    b\n==== ===="
    assert markdown(text).split("\n") == [
        "Does this; see `Other` and `x`:", "```text", "    a = 1", "```", "", "Then more.", "",
        "```text", "a    b", "```",
    ]  # fmt: skip


def test_every_command_has_help():
    from tools.site.commands import commands

    modules = commands()
    assert {"tools.view", "tools.bench", "tools.caption"} <= set(modules)
    assert not [command for command in modules if ".site" in command]
    files = [ROOT / module.replace(".", "/") for module in modules]
    for file in (path / "__main__.py" if path.is_dir() else path.with_suffix(".py") for path in files):
        assert "parse_args(" in file.read_text(), file  # else `--help` runs it
