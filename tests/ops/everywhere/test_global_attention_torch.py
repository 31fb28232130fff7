"""Global attention in torch: gradients of both orders, views, compilation, export, autocast, FLOPs, determinism."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from attn_plugins.ops import global_attention, reference
from tests.ops.everywhere.global_operands import ALL, COMBINATIONS, attend, close, gradients, leaves, make


@pytest.mark.parametrize("terms", [t for t in COMBINATIONS if t[0] or t[3]] + [(False, True, True, False)])
def test_gradcheck(terms):
    arguments = leaves(make(terms, B=1, M=2, grid=(2, 3), keys=(2, 2), d=2, dv=2))
    present = [t for t in arguments if t is not None]

    def function(*tensors):
        found = iter(tensors)
        return attend([None if t is None else next(found) for t in arguments])

    assert gradcheck(function, present)
    assert gradgradcheck(function, present, fast_mode=True)


def test_gradgradcheck_of_a_part():
    """Only some inputs need gradients, as with frozen position terms."""
    query, key, value, row, column, key_logits = make(ALL, B=1, M=1, grid=(2, 2), keys=(2, 2), d=2, dv=2)
    query.requires_grad_(), column.requires_grad_()
    assert gradgradcheck(lambda q, c: attend((q, key, value, row, c, key_logits)), (query, column))


@pytest.mark.parametrize("layout", ["heads last", "channels first", "expanded", "sliced"])
def test_strided_inputs(layout):
    arguments = make(dtype=torch.float64)

    def restride(t):
        if layout == "heads last":  # (B, H, W, M, d): a channels-last projection
            return t.transpose(1, -2).contiguous().transpose(1, -2) if t.dim() == 5 else t
        if layout == "channels first":
            return t.transpose(2, -1).contiguous().transpose(2, -1)
        if layout == "sliced":
            return torch.stack([t, torch.zeros_like(t)], -1)[..., 0]
        return t[:, :1].expand_as(t)

    strided = [restride(t) for t in arguments]
    expected = [t.contiguous() for t in strided]
    close(attend(strided), attend(expected))
    inputs = [t.detach().requires_grad_() for t in strided]
    attend(inputs).square().sum().backward()
    for actual, wanted in zip(inputs, gradients(lambda a: attend(a), expected)):
        assert actual.grad.shape == wanted.shape
    plain = leaves(expected)
    attend(plain).square().sum().backward()
    for actual, wanted in zip(inputs, plain):
        close(actual.grad, wanted.grad)


@pytest.mark.parametrize("sizes", [dict(B=0), dict(grid=(0, 3)), dict(M=0)])
def test_empty(sizes):
    inputs = leaves(make(**sizes))
    output = attend(inputs)
    assert output.numel() == 0
    output.sum().backward()
    assert all((t.grad == 0).all() and t.grad.shape == t.shape for t in inputs)


def test_opcheck():
    for terms, broadcast in (((ALL), False), ((True, False, False, False), False), ((False, True, True, True), True)):
        arguments = leaves(make(terms, broadcast=broadcast))
        torch.library.opcheck(torch.ops.attn_plugins.global_attention.default, (*arguments, 0.7))
        output, lse = torch.ops.attn_plugins.global_attention(*arguments, 0.7)
        detached = [None if t is None else t.detach() for t in arguments]
        needs = [t is not None for t in arguments]
        torch.library.opcheck(
            torch.ops.attn_plugins.global_attention_backward.default,
            (torch.ones_like(output).detach(), *detached, output.detach(), lse.detach(), 0.7, needs),
        )


def test_compile_fullgraph():
    torch._dynamo.reset()
    function = torch.compile(lambda *a: attend(a).square(), fullgraph=True, backend="aot_eager", dynamic=True)
    for grid in ((3, 4), (5, 2)):
        inputs, plain = leaves(make(grid=grid)), leaves(make(grid=grid))
        function(*inputs).sum().backward()
        attend(plain).square().sum().backward()
        for actual, wanted in zip(inputs, plain):
            close(actual.grad, wanted.grad)


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, query, key, value, row_logits):
            return global_attention(query, key, value, row_logits=row_logits)

    rows = torch.export.Dim("rows", min=2, max=64)
    example = make((True, True, False, False), dtype=torch.float32)[:4]
    shapes = ({2: rows}, None, None, {2: rows})
    program = torch.export.export(Attention(), example, dynamic_shapes=shapes)
    other = make((True, True, False, False), grid=(6, 4), dtype=torch.float32)[:4]
    torch.testing.assert_close(program.module()(*other), Attention()(*other))


def test_autocast():
    arguments = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend(arguments)
        assert attend([*arguments[:3], arguments[3].bfloat16(), *arguments[4:]]).dtype == torch.bfloat16
    assert output.dtype == torch.bfloat16
    close(output, reference.global_attention(*arguments, 0.7), torch.bfloat16, factor=2)
    inputs = leaves(arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attend(inputs).float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in inputs)


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    inputs = leaves(make())
    pairs = 2 * 2 * 3 * (3 * 4) * (2 * 5)  # two operations, batch, heads, queries, keys
    with FlopCounterMode(display=False) as counter:
        output = attend(inputs)
    assert counter.get_total_flops() == pairs * (4 + 6)
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == pairs * (3 * 4 + 2 * 6)


def test_deterministic():
    arguments = make(B=1, M=2, grid=(20, 9), keys=(8, 9), dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = gradients(attend, arguments), gradients(attend, arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
