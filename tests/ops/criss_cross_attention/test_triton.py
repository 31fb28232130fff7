"""Criss-cross attention in Triton's kernels, interpreted on the CPU where there is no device; what serves and why."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_plugins.core import triton_launch
from attn_plugins.ops import backend, criss_cross_attention, explain
from attn_plugins.ops.criss_cross_attention import triton as triton_criss_cross
from attn_plugins.ops.criss_cross_attention.criss_cross_attention import _recomputes
from attn_plugins.ops.criss_cross_attention.operands import Options, Terms
from tests.helpers.triton_checks import DEVICE, SLOW_INTERPRETED, needs_triton, randn
from tests.ops.contract_examples import Example
from tests.ops.test_contract import example
from tests.ops.test_contract_backends import HALF, LAYOUTS, check

pytestmark = needs_triton
TAKES = "its kernels take content alone, in float16 and bfloat16"
RECOMPUTE = Options(0.7, True)


def drawn(size=(2, 3), dtype=HALF, *, B=1, M=1, d=4, dv=5) -> Example:
    return example("criss_cross_attention, content", "tiny", DEVICE, dtype, map=size, B=B, M=M, d=d, dv=dv)


def terms(*args, **kwargs) -> Terms:
    return Terms(*drawn(*args, **kwargs).tensors.values(), None)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 places and 16 channels: many of them in small maps."""
    for table in (triton_criss_cross.BLOCKS, triton_criss_cross.OTHER_BLOCKS):
        for kernel, blocks in table.items():
            monkeypatch.setitem(table, kernel, blocks._replace(queries=16, keys=16, channels=16))


@pytest.mark.parametrize("size", [(1, 3), (3, 1), (1, 1)])
def test_rows_and_columns_of_one_pixel_equal_the_reference(size):
    check(drawn(size), "triton", HALF)


@pytest.mark.parametrize(
    "size", [pytest.param((18, 1), marks=SLOW_INTERPRETED), pytest.param((2, 18), marks=pytest.mark.slow)]
)
def test_several_blocks(size, small_blocks):
    check(drawn(size, d=17, dv=18), "triton", HALF)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_read_in_place(layout):
    """Those with contiguous widths; ``test_contract_backends.py`` compares the results."""
    tensors = [LAYOUTS[layout](t) for t in terms((2, 3), B=2, M=2)[:3]]
    read = triton_criss_cross._Launches(Terms(*tensors, None), RECOMPUTE).terms
    copied = [t.data_ptr() for t in read] != [t.data_ptr() for t in tensors]
    assert copied == (layout in ("every second", "last two axes exchanged", "channels second", "batch innermost"))


def test_a_result_that_was_changed_has_no_gradients():
    """As with PyTorch's own attention: the backward reads the output."""
    leaves = drawn((2, 1)).leaves().values()
    with backend("triton"):
        output = criss_cross_attention(*leaves)
        output += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.square().sum().backward()


# --- what serves --------------------------------------------------------------------------------------------------


def test_explained():
    arguments = terms()
    with backend("triton"):
        assert explain(criss_cross_attention, *arguments).serves == "triton"
    if DEVICE == "cpu":
        assert explain(criss_cross_attention, *arguments).serves == "cpu"
    on_meta = [t.to("meta") for t in arguments[:3]]
    assert "are on meta" in explain(criss_cross_attention, *on_meta).refusals["triton"]
    assert explain(criss_cross_attention, *[t.float() for t in on_meta]).refusals["triton"] == TAKES


def test_calls_that_triton_cannot_compute_are_refused_in_words():
    arguments, many = terms((1, 1)), randn(1, 1, 1, 1, 1, dtype=torch.float16).expand(2**30, 1, 1, 1, 1)
    position = Terms(None, None, arguments.value, randn(1, 1, 1, 1, 2, dtype=torch.float16))
    for refused in (terms((1, 1), dtype=torch.float32), position):
        with backend("triton"), pytest.raises(ValueError, match=TAKES):
            criss_cross_attention(*refused)
    kept = triton_criss_cross.cannot(arguments, RECOMPUTE._replace(recompute=False))
    assert kept == "the weights are to be kept"
    for d in (0, 257):
        refused = triton_criss_cross.cannot(terms((1, 1), d=d), RECOMPUTE)
        assert refused == f"its kernels take widths of query and key from 1 to 256, got {d}"
    refused = triton_criss_cross.cannot(Terms(many, many, many, None), RECOMPUTE)
    assert refused == "its kernels might need 2147483648 programs, and a grid has at most 2147483647"


def test_log_sum_exps_are_kept_for_content_alone_in_half_precision_or_where_asked_for(monkeypatch):
    def on_device(dtype: torch.dtype, position: object = None) -> Terms:
        fields = dict(is_cuda=True, dtype=dtype, device=torch.device("cuda:0"))
        return Terms(None, None, type("OnDevice", (), fields), position)

    monkeypatch.setattr(triton_launch, "_refusal", lambda kind, index: None)

    assert _recomputes(terms((2, 3))) == (DEVICE == "cuda")
    with backend("triton"):
        assert _recomputes(terms((2, 3)))
    assert _recomputes(on_device(torch.float16))
    assert _recomputes(on_device(torch.bfloat16))
    for other in (on_device(torch.float32), on_device(torch.float64), on_device(torch.float16, position=object())):
        assert not _recomputes(other)
    with backend("eager"):
        assert not _recomputes(on_device(torch.float16))
    monkeypatch.setattr(triton_launch, "_refusal", lambda kind, index: "Triton is not installed")
    assert not _recomputes(on_device(torch.float16))


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
@pytest.mark.parametrize("reason", [None, "Triton is not installed"])
def test_dynamo_sees_whether_triton_serves(reason, monkeypatch):
    """Of tensors that hold nothing, as on a CUDA device: the weights are kept where Triton's kernels do not run."""
    torch._dynamo.reset()
    monkeypatch.setattr(triton_launch, "_refusal", lambda kind, index: reason)
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with FakeTensorMode():
        maps = torch.empty(1, 1, 8, 8, 16, device="cuda:0", dtype=torch.bfloat16)
        torch.compile(lambda x: criss_cross_attention(x, x, x), fullgraph=True, backend=keep)(maps)
    (call,) = graphs[0].graph.find_nodes(
        op="call_function", target=torch.ops.attn_plugins.criss_cross_attention.default
    )
    assert call.args[-2:] == (1.0, reason is None)
