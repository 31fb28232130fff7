"""The module of ``docs/howto/new-module.md`` keeps what every public module promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.page_module import NAME, OPTIONS, definitions

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# Tests that loop over the modules.
OF_ALL = "every_public", "every_module", "keyword_only", "buffers_follow", "print_differently"


@pytest.mark.slow
def test_all_that_is_asked_of_public_modules():
    """In a process of its own, whose tables have the module before the tests read them; slow tests as well."""
    files = [str(file) for file in sorted(HERE.glob("test_*.py")) if file != Path(__file__)]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "tests.helpers.page_module"]
    chosen = " or ".join((NAME, *OF_ALL))
    done = subprocess.run([*command, "-k", chosen, *files], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:]
    passed = set(re.findall(r"(test_\w+\.py::test_\w+)\S* PASSED", done.stdout))
    by_file = {file: {test for test in passed if test.startswith(file)} for file in ("test_contract", "test_graphs")}
    assert len(by_file["test_contract"]) >= 15
    assert {test.partition("::")[2] for test in by_file["test_graphs"]} >= {
        "test_compiled_in_one_graph_equals_eager", "test_exported_for_another_batch", "test_traced_for_another_batch",
        "test_onnx_from_torchscript_runs_with_another_batch", "test_vmap_of_grad_is_a_loop",
    }  # fmt: skip
    assert passed >= {
        "test_attention_maps.py::test_weights_make_the_output_and_logits_the_weights",
        "test_attention_maps.py::test_a_term_is_what_is_left_without_the_other",
        "test_errors.py::test_a_wrong_argument_is_named", "test_errors.py::test_a_wrong_input_is_named",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_by_the_default_exporter(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    layer = getattr(definitions(), NAME)(**OPTIONS).eval().requires_grad_(False)
    layer.gamma.fill_(0.7)
    x, other = torch.randn(2, 16, 5, 7), torch.randn(3, 16, 5, 7)
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        layer, (x,), tmp_path / "layer.onnx", dynamo=True, dynamic_shapes=({0: batch},), input_names=["x"]
    )
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {"x": other.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), layer(other), rtol=1e-4, atol=1e-5)
