"""The notebooks: their code, committed outputs and page; those marked slow are run."""

from __future__ import annotations

import ast
import base64
import importlib
import json
import re
from pathlib import Path

import pytest

from tools import notebooks
from tools.site.notebooks import page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
each = pytest.mark.parametrize("file", notebooks.FILES, ids=lambda file: file.stem)


def cells(file: Path, run: bool = True) -> list[dict]:
    """Return the code cells that are run, or those that are not."""
    content = json.loads(file.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in content if cell["cell_type"] == "code"]
    return [cell for cell in code if (notebooks.SKIP not in cell["metadata"].get("tags", [])) == run]


def imported(file: Path) -> list[tuple[str, str]]:
    """Return the modules that a notebook imports, with the names that it imports from them, or ``''``."""
    found = []
    for node in ast.walk(ast.parse("\n".join("".join(cell["source"]) for cell in cells(file)))):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def test_there_are_notebooks():
    assert len(notebooks.FILES) == 2


@each
def test_code_compiles_and_what_it_imports_exists(file):
    for module, name in imported(file):
        there = importlib.import_module(module)
        assert not name or hasattr(there, name) or importlib.import_module(f"{module}.{name}"), (module, name)


@each
def test_committed_outputs_are_those_of_a_run_without_errors(file):
    assert file.stat().st_size < 150_000
    assert [cell["execution_count"] for cell in cells(file)] == list(range(1, len(cells(file)) + 1))
    outputs = [output for cell in cells(file) for output in cell["outputs"]]
    assert outputs
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} == {"stdout"}
    for cell in cells(file, run=False):
        assert cell["execution_count"] is None
        assert not cell["outputs"]
        assert {"install", "download"} & {*cell["metadata"]["tags"]}


@each
def test_links_lead_somewhere(file):
    text, _ = page(file)
    links = [target for target in LINK.findall(text) if target.endswith((".md", ".ipynb"))]
    assert links
    assert all((file.parent / target).is_file() for target in links), links


def test_the_config_is_that_of_the_start_page():
    (file,) = (file for file in notebooks.FILES if file.stem == "mmdet_without_a_compiler")
    code = "\n".join("".join(cell["source"]) for cell in cells(file))
    (config,) = re.findall(r'write_text\("""\n(.*?)"""\)', code, re.S)
    assert f"```python\n{config}```" in (ROOT / "docs/start/mmdet.md").read_text()


def test_a_notebooks_page_holds_text_code_output_and_pictures(tmp_path):
    """Text, code, printed text and pictures; a link to the notebook after the heading."""
    picture = b"\xff\xd8 of a picture"
    shown = {"image/jpeg": base64.b64encode(picture).decode(), "text/plain": ["<Image>"]}
    outputs = [
        dict(output_type="stream", name="stdout", text=["a\n", "b\n"]),
        dict(output_type="display_data", data=shown),
        dict(output_type="execute_result", data={"text/plain": ["3"]}),
    ]
    content = [
        dict(cell_type="markdown", source=["# Title\n", "words"]),
        dict(cell_type="code", source=["1 + 2"], outputs=outputs),
    ]
    (tmp_path / "it.ipynb").write_text(json.dumps(dict(cells=content)))
    text, pictures = page(tmp_path / "it.ipynb")
    assert pictures == {"it-0.jpg": picture}
    link = "[This page as a notebook](it.ipynb); the outputs are those of its last run."
    code = "```python\n1 + 2\n```\n\n```text\na\nb\n```\n\n![output](it-0.jpg)\n\n```text\n3\n```\n"
    assert text == f"# Title\nwords\n\n{link}\n\n{code}"


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        notebooks.main(["no_such_notebook"])
    assert (
        "NAME must be one of detr_on_a_cpu, mmdet_without_a_compiler, got no_such_notebook" in capsys.readouterr().err
    )


@pytest.mark.slow
@each
def test_every_notebook_runs(file):
    """A cell that raises an error, of which some check their results, ends it."""
    executed = notebooks.run(file)
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [bool(cell.execution_count) for cell in code] == [
        notebooks.SKIP not in cell.metadata.get("tags", []) for cell in code
    ]
