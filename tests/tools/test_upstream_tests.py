"""``python -m tools.upstream_tests`` on small sources: whose failure a failure is, and the page."""

import re
from collections import Counter

import pytest

pytest.importorskip("mmdet", reason="mmdet is not installed")

from tools.upstream_tests import __main__ as upstream
from tools.upstream_tests.__main__ import main

TESTS = """
import pytest
from mmengine.registry import MODELS
import mmcv.cnn, mmcv.ops


def test_of_ours():
    assert hasattr(MODELS.get("DCNv2").forward, "attn_plugins_stock")

def test_of_stock():
    assert not hasattr(MODELS.get("DCNv2").forward, "attn_plugins_stock")

@pytest.mark.parametrize("a", ["b-c", "d[e]"])
def test_broken(a):
    assert a == "f | g"

def test_left_out():
    pytest.skip("no device")
"""


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    (folder / "tests/test_models/test_necks").mkdir(parents=True)
    (folder / "tests/test_models/test_necks/test_small.py").write_text(TESTS)
    (folder / "mmdet").mkdir()
    (folder / "mmdet/version.py").write_text("__version__ = '3.3.9'\n")
    return folder


@pytest.mark.slow
def test_a_failure_is_ours_if_it_passes_without_us(sources, tmp_path, capsys):
    page = tmp_path / "page.md"
    before = sorted(sources.rglob("*"))
    assert main(["--mmdet", str(sources), "--page", str(page)]) == 1
    assert sorted(sources.rglob("*")) == before
    text = page.read_text()
    assert "`make test-upstream MMDET=path`, with the sources of mmdet 3.3.9." in text
    assert "| mmdet's models with the drop-in | 1 | 3 | 2 | 0 | 1 | 1 |" in text
    file = "tests/test_models/test_necks/test_small.py"
    assert re.search(rf"^\* `{file}::test_of_stock`: ours; `.*assert", text, re.M)
    assert f"* `{file}`, 2 of its cases: fails without us as well" in text
    assert "test_of_stock`: ours" in capsys.readouterr().out


def test_a_file_that_is_not_imported_without_us(monkeypatch, tmp_path):
    """pytest runs none of the tests that it is given if it does not find one of them."""

    def run(root, tests, project, environment):
        assert tests == ["tests/a.py", "tests/b.py"]
        return upstream.Outcome(Counter(), {"tests/a.py": "collection failure", "tests/b.py::test_1": ""})

    monkeypatch.setattr(upstream, "run", run)
    failures = dict.fromkeys(("tests/a.py::TestA::test", "tests/b.py::test_1", "tests/b.py::test_2"), "")
    suite = next(suite for suite in upstream.SUITES if suite.without)
    reasons = upstream.judge(tmp_path, suite, upstream.Outcome(Counter(), failures))
    assert list(reasons.values()) == [upstream.STOCK, upstream.STOCK, upstream.OURS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "give the sources of at least one project"), (["--timm", "."], "must be a folder with tests/test_models.py")],
)
def test_bad_input_is_one_error(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
