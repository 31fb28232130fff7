"""Layers keep the memory format of their input; the conversions that make this possible."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.modules.maps import memory_format
from attn_plugins.modules.maps.memory_format import in_format_of, to_channels_last
from tests.helpers.memory_format_checks import FORMATS, has_format

# --- the conversions ----------------------------------------------------------------------------------------------

# (B, C, H, W), with images both above and below the size for the copy by transposed matrices
SHAPES = [(2, 3, 4, 5), (3, 65, 61, 67), (1, 512, 32, 32), (0, 4, 5, 6), (2, 1, 520, 600), (2, 270_000, 1, 1)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("few_threads", [0, 1 << 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_conversions_equal_pytorchs(shape, dtype, few_threads, monkeypatch):
    monkeypatch.setattr(memory_format, "_FEW_THREADS", few_threads)
    x = torch.randn(shape).to(dtype)
    last = to_channels_last(x)
    assert torch.equal(last, x)
    assert last.stride() == x.contiguous(memory_format=torch.channels_last).stride()
    back = in_format_of(x, last)
    assert torch.equal(back, x)
    assert back.stride() == last.contiguous().stride()


def test_what_has_the_format_is_not_copied():
    x = torch.randn(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    assert to_channels_last(last) is last
    assert in_format_of(x, x) is x
    assert in_format_of(last, last) is last
    for ambiguous in (torch.randn(2, 1, 4, 5), torch.randn(2, 3, 1, 1)):  # both formats at once counts as contiguous
        assert to_channels_last(ambiguous) is ambiguous
        assert in_format_of(ambiguous, x) is x
        assert has_format(in_format_of(ambiguous, last), "contiguous")


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 512, 32, 32)])
def test_gradients_have_the_format_of_what_was_converted(shape):
    x = torch.randn(shape)
    for kind, layout in FORMATS.items():
        source = x.contiguous(memory_format=layout).requires_grad_()
        other = x if kind == "channels_last" else x.contiguous(memory_format=torch.channels_last)
        weight = torch.randn(shape).contiguous(memory_format=FORMATS[kind])
        converted = in_format_of(other, source)
        (grad,) = torch.autograd.grad((converted * weight).square().sum(), source, create_graph=True)
        assert has_format(grad, kind)
        torch.testing.assert_close(grad, 2 * x * weight.square())
        (second,) = torch.autograd.grad(grad.sum(), source)
        torch.testing.assert_close(second, 2 * weight.square())


def test_a_strided_view_is_converted():
    x = torch.randn(2, 8, 9, 10)
    for view in (x[:, ::2], x[:, :, 1:], x[..., ::3], x.transpose(2, 3), x[:1].expand(3, -1, -1, -1)):
        assert torch.equal(to_channels_last(view), view)
        assert to_channels_last(view).is_contiguous(memory_format=torch.channels_last)
        assert in_format_of(x, view).is_contiguous()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_and_batched_gradients():
    """Under ``torch.func`` a map has no format, and no copy is made."""
    x, weight = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(3, 1, 1, dtype=torch.float64)

    def converted(x):
        return memory_format.add_scaled(x, weight.sum(), in_format_of(x, to_channels_last(x.square() * weight)))

    jacobian = torch.autograd.functional.jacobian(converted, x)
    torch.testing.assert_close(torch.func.jacrev(converted)(x), jacobian)
    torch.testing.assert_close(torch.func.jacfwd(converted)(x), jacobian)
    torch.testing.assert_close(torch.autograd.functional.jacobian(converted, x, vectorize=True), jacobian)
    torch.testing.assert_close(torch.vmap(converted)(x[:, None]), converted(x)[:, None])
