"""Criss-cross attention in Triton's kernels, interpreted on the CPU where there is no device; what serves and why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_plugins.ops import backend, criss_cross_attention, explain
from attn_plugins.ops.common import triton_launch
from attn_plugins.ops.criss_cross_attention import triton as triton_criss_cross
from attn_plugins.ops.criss_cross_attention.criss_cross_attention import ATTEND
from attn_plugins.ops.criss_cross_attention.operands import Options, Terms
from tests.helpers.triton_checks import DEVICE, TOLERANCES, check, definition, needs_triton, randn

pytestmark = [needs_triton, pytest.mark.sampled(3)]
TAKES = "its kernels take content alone, in float16 and bfloat16"
RECOMPUTE = Options(0.7, True)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def terms(size=(2, 3), *, batch=1, heads=1, d=4, dv=5, dtype=torch.float16) -> Terms:
    query, key = (randn(batch, heads, *size, d, dtype=dtype, seed=seed) for seed in (0, 1))
    return Terms(query, key, randn(batch, heads, *size, dv, dtype=dtype, seed=2), None)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 places and 16 channels: many of them in small maps."""
    for table in (triton_criss_cross.BLOCKS, triton_criss_cross.OTHER_BLOCKS):
        for kernel, blocks in table.items():
            monkeypatch.setitem(table, kernel, blocks._replace(queries=16, keys=16, channels=16))


@pytest.mark.parametrize("size", [(1, 3), (3, 1), (1, 1)])
def test_lines_of_one_place(size):
    check(ATTEND, terms(size), RECOMPUTE)


@pytest.mark.parametrize("size", [(18, 1), (2, 18)])
def test_several_blocks(size, small_blocks):
    check(ATTEND, terms(size, d=17, dv=18), RECOMPUTE)


def results(arguments: Terms, grad_output: Tensor, scale: float = 1.0) -> list[Tensor]:
    """Output and gradients as a user gets them; the backward's thread of a device does not know what is forced."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in arguments]
    with backend("triton"):
        output = criss_cross_attention(*leaves, scale=scale)
        wanted = [t for t in leaves if t is not None]
        return [output, *torch.autograd.grad(output, wanted, grad_output)]


@DTYPES
def test_extreme_logits(dtype):
    query = torch.full((1, 1, 2, 2, 4), 100.0, device=DEVICE, dtype=dtype)
    key = query.clone()
    key[:, :, :, 0] *= 2  # column 0 of the own row, and of column 0 all
    value = randn(1, 1, 2, 2, 3, dtype=dtype)
    with backend("triton"):
        output = criss_cross_attention(query, key, value)
    torch.testing.assert_close(output[:, :, :, 1], value[:, :, :, 0])
    mean = value[:, :, :, 0].mean(2, keepdim=True).expand(1, 1, 2, 3)
    torch.testing.assert_close(output[:, :, :, 0], mean, rtol=1e-2, atol=1e-2)


def test_views_are_read_in_place():
    """Channels-last projections, fused ones, channels first, a crop, a stretched head: all but one without a copy."""
    B, M, H, W, d = 1, 2, 2, 1, 4
    fused = randn(B, H, W, 3 * M * d, dtype=torch.float16)
    views = {
        "projections": [
            randn(B, H, W, M * d, dtype=torch.float16, seed=n).unflatten(-1, (M, d)).permute(0, 3, 1, 2, 4)
            for n in range(3)
        ],
        "fused": [part.unflatten(-1, (M, d)).permute(0, 3, 1, 2, 4) for part in fused.chunk(3, -1)],
        "channels first": [randn(B, M, d, H, W, dtype=torch.float16, seed=n).permute(0, 1, 3, 4, 2) for n in range(3)],
        "crop": [randn(B, M, H + 2, W + 3, d, dtype=torch.float16, seed=n)[:, :, 1:-1, 2:-1] for n in range(3)],
        "stretched": [randn(B, 1, H, W, d, dtype=torch.float16, seed=n).expand(B, M, H, W, d) for n in range(3)],
    }
    for name, tensors in views.items():
        check(ATTEND, Terms(*tensors, None), RECOMPUTE)
        copied = [t.data_ptr() for t in triton_criss_cross._Launches(Terms(*tensors, None), RECOMPUTE).terms]
        kept = [t.data_ptr() for t in tensors]
        assert (copied == kept) == (name != "channels first"), name


def test_overlapping_windows():
    """Places and channels have the same stride; the gradient's channels are contiguous nevertheless."""
    windows = [randn(1, 1, 2, 6, dtype=torch.float16, seed=n).unfold(3, 4, 1) for n in range(3)]
    assert windows[0].stride()[3:] == (1, 1)
    check(ATTEND, Terms(*windows, None), RECOMPUTE)


@pytest.mark.parametrize("batch, d, dv", [(0, 4, 5), (1, 4, 0)])
def test_nothing_in_an_axis(batch, d, dv):
    arguments = terms((2, 2), batch=batch, d=d, dv=dv)
    grad_output = torch.randn_like(arguments.value)
    actual = results(arguments, grad_output, RECOMPUTE.scale)
    expected = definition(ATTEND, arguments, RECOMPUTE, grad_output)
    for ours, theirs in zip(actual, expected):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=1e-3)


def test_a_result_that_was_changed_has_no_gradients():
    """As with PyTorch's own attention: the backward reads the output."""
    leaves = [t.requires_grad_() for t in terms((2, 1))[:3]]
    with backend("triton"):
        output = criss_cross_attention(*leaves)
        output += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.square().sum().backward()


@pytest.mark.parametrize("keeps_output", [True, False])
@pytest.mark.parametrize("first, second", [("triton", "eager"), ("eager", "triton")])
@DTYPES
def test_forward_and_backward_by_different_backends(dtype, first, second, keeps_output):
    """Either keeps what the other reads: the option decides, not who serves."""
    arguments = terms((3, 2), dtype=dtype)
    grad_output = torch.randn_like(arguments.value)
    with backend(first):
        output, *kept = ATTEND._forward(*arguments, *RECOMPUTE)
    with backend(second):
        kept_output = output if keeps_output else None
        grads = ATTEND._backward(grad_output, *arguments, kept_output, *kept, *RECOMPUTE, [True] * 3 + [False])
    expected = definition(ATTEND, arguments, RECOMPUTE, grad_output)
    for ours, theirs in zip((output, *grads[:3]), expected):
        assert (ours.double() - theirs).norm() < TOLERANCES[dtype] * theirs.norm()


# --- what serves --------------------------------------------------------------------------------------------------


def test_explained():
    arguments = terms()
    with backend("triton"):
        assert explain(criss_cross_attention, *arguments).serves == "triton"
    choice = explain(criss_cross_attention, *arguments)
    if DEVICE == "cpu":
        assert choice.serves == "eager"
        assert "are on cpu" in choice.refusals["triton"]
    assert explain(criss_cross_attention, *terms(dtype=torch.float32)).refusals["triton"] == TAKES


def test_refusals():
    arguments, many = terms((1, 1)), randn(1, 1, 1, 1, 1, dtype=torch.float16).expand(2**30, 1, 1, 1, 1)
    position = Terms(None, None, arguments.value, randn(1, 1, 1, 1, 2, dtype=torch.float16))
    for refused in (terms((1, 1), dtype=torch.float32), position):
        with backend("triton"), pytest.raises(ValueError, match=TAKES):
            criss_cross_attention(*refused)
    with backend("triton"):
        kept = triton_criss_cross.refuses(arguments, RECOMPUTE._replace(recompute=False))
        assert kept == "the weights are to be kept"
        for d in (0, 257):
            refused = triton_criss_cross.refuses(terms((1, 1), d=d), RECOMPUTE)
            assert refused == f"its kernels take widths of query and key from 1 to 256, got {d}"
        refused = triton_criss_cross.refuses(Terms(many, many, many, None), RECOMPUTE)
        assert refused == "its kernels might need 2147483648 programs, and a grid has at most 2147483647"


def test_wanted_for_content_alone_in_half_precision_or_where_asked_for(monkeypatch):
    def on_device(dtype: torch.dtype, position: object = None) -> Terms:
        fields = dict(is_cuda=True, dtype=dtype, device=torch.device("cuda:0"))
        return Terms(None, None, type("OnDevice", (), fields), position)

    monkeypatch.setattr(triton_launch, "_refusal", lambda index: None)

    assert triton_criss_cross.wanted(terms((2, 3))) == (DEVICE == "cuda")
    with backend("triton"):
        assert triton_criss_cross.wanted(terms((2, 3)))
    assert triton_criss_cross.wanted(on_device(torch.float16))
    assert triton_criss_cross.wanted(on_device(torch.bfloat16))
    for other in (on_device(torch.float32), on_device(torch.float64), on_device(torch.float16, position=object())):
        assert not triton_criss_cross.wanted(other)
    with backend("eager"):
        assert not triton_criss_cross.wanted(on_device(torch.float16))
    monkeypatch.setattr(triton_launch, "_refusal", lambda index: "Triton is not installed")
    assert not triton_criss_cross.wanted(on_device(torch.float16))


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
@pytest.mark.parametrize("reason", [None, "Triton is not installed"])
def test_dynamo_sees_whether_triton_serves(reason, monkeypatch):
    """Of tensors that hold nothing, as on a CUDA device: the weights are kept where Triton's kernels do not run."""
    torch._dynamo.reset()
    monkeypatch.setattr(triton_launch, "_refusal", lambda index: reason)
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


def test_compiled_in_one_graph():
    torch._dynamo.reset()
    arguments = terms((2, 2))
    leaves = [t.requires_grad_() for t in arguments[:3]]
    grad_output = torch.randn_like(arguments.value)
    expected = results(arguments, grad_output)
    with backend("triton"):
        compiled = torch.compile(lambda *tensors: criss_cross_attention(*tensors), fullgraph=True, backend="aot_eager")
        output = compiled(*leaves)
        actual = [output, *torch.autograd.grad(output, leaves, grad_output)]
    for ours, theirs in zip(actual, expected):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    unforced = compiled(*leaves)  # what the graph keeps it keeps, whoever serves
    gradients = torch.autograd.grad(unforced, leaves, grad_output)
    torch.testing.assert_close(gradients, tuple(expected[1:]), rtol=1e-2, atol=5e-3)


def test_opcheck():
    arguments = [t.requires_grad_() for t in terms((2, 1))[:3]]
    with backend("triton"):
        torch.library.opcheck(torch.ops.attn_plugins.criss_cross_attention, (*arguments, None, *RECOMPUTE))


# --- what is compiled ---------------------------------------------------------------------------------------------

_COMPILE = """
import torch
from attn_plugins.ops.criss_cross_attention.criss_cross_attention import ATTEND
from attn_plugins.ops.criss_cross_attention.operands import Options, Terms
from tests.helpers.triton_checks import compiled_variants
from tests.helpers.triton_compile import compiled, launches, variants

def call(H, W, d, dtype=torch.float16):
    def meta(width):
        return torch.empty(2, H, W, 3, width, device="meta", dtype=dtype).permute(0, 3, 1, 2, 4)
    terms = Terms(meta(d), meta(d), meta(d), None)
    return lambda: (ATTEND, terms, Options(1.0, True))

for d in (32, 24, 5):
    first, *others = [compiled_variants(call(n, m, d)) for n in (1, 16, 17, 97, 128) for m in (31, 33, 64, 96)]
    assert len(first) == 8
    assert all(other == first for other in others)

for variant, kernel in variants(launches(*call(97, 97, 64)(), passes="forward")).items():
    assert compiled(variant, kernel, 90)["stack"] == 0
"""


@pytest.mark.slow
def test_another_size_of_map_compiles_nothing(compiling):
    """And the forward's kernels compile, for a device that is not there."""
    compiling(_COMPILE)


WITHOUT_VALUE = """
import torch
from attn_plugins.ops import backend
from attn_plugins.ops.common import triton_launch
from attn_plugins.ops.criss_cross_attention import triton as triton_criss_cross
from attn_plugins.ops.criss_cross_attention.operands import Options, Terms
from tests.helpers.triton_compile import compiled, variants

def meta(width, dtype=torch.float16):
    return torch.empty(1, 1, 5, 7, *width, dtype=dtype, device="meta")

with backend("triton"), triton_launch.recorded((9, 0)) as recorded:
    terms = Terms(meta([16]), meta([16]), meta([16]), None)
    sums, wanted = meta([], torch.float32), (meta([16]), meta([16]), None, None)
    grads = dict(zip(Terms._fields, wanted))
    triton_criss_cross.backward(meta([16]), terms, Options(1.0, True), meta([16]), meta([0]), sums, grads)
for variant, kernel in variants(recorded).items():
    compiled(variant, kernel, 90)
"""


@pytest.mark.slow
def test_compiles_without_the_gradient_of_values(compiling):
    """Both branches are compiled, also that of the values' channels, which no program takes."""
    compiling(WITHOUT_VALUE)
