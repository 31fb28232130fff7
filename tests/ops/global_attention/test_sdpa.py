"""Global attention as one dot product: all terms folded into queries and keys for fused attention, as on CUDA."""

import itertools

import pytest
import torch

from attn_plugins.ops import backend, explain, global_attention, reference
from attn_plugins.ops.common import flash
from attn_plugins.ops.common.gradients import fill
from attn_plugins.ops.global_attention import sdpa as folding
from attn_plugins.ops.global_attention.operands import Options, Terms
from tests.ops.global_attention.operands import (
    COMBINATIONS,
    check_against_reference,
    close,
    gradients,
    leaves,
    make,
    masked_arguments,
)

SCALE = Options(0.7)


def folded(arguments):
    """Fold all terms; return the output, and the gradients for an output gradient of ones."""
    terms = Terms(*arguments)
    shape = (*terms.value.shape[:2], *terms.grid())
    output = terms.value.new_empty(*shape, terms.value.shape[4])
    lse = terms.value.new_empty(shape, dtype=torch.float32)
    folding.forward(terms, SCALE, output, lse)
    grads = {name: torch.empty_like(t) for name, t in zip(Terms._fields, arguments)}
    fill(grads, folding.backward(torch.ones_like(output), terms, SCALE, output, lse, grads))
    return output, [*grads.values()]


@pytest.mark.parametrize("scale", [0.7, -0.7, 40**-0.5, 0.0])
def test_content_alone_is_scaled_by_the_kernel(scale):
    """A scaled query would be rounded to half precision, and a logit of 1,000 with it by up to 0.25."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, n, 40, generator=generator).half() for n in (7, 6, 6))
    query = query * 30
    assert explain(global_attention, query, key, value, scale=scale).serves == "sdpa"
    leaves = [t.requires_grad_() for t in (query, key, value)]
    actual = gradients(lambda a: global_attention(*a, scale=scale), leaves)
    exact = [t.detach().double() for t in leaves]
    with backend("reference"):
        expected = global_attention(*exact, scale=scale)
        exact_gradients = gradients(lambda a: global_attention(*a, scale=scale), exact)
    close(global_attention(*leaves, scale=scale), expected, torch.float16)
    for gradient, wanted in zip(actual, exact_gradients):
        assert (gradient - wanted).norm() <= 0.03 * wanted.norm()  # PyTorch's backward rebuilds weights from their sum


@pytest.mark.parametrize("folded_terms", [t for t in COMBINATIONS if any(t)])
def test_folding(folded_terms):
    """Fold all terms into one dot product, which runs on CUDA, here through the CPU's fused attention."""
    for broadcast, dtype in itertools.product((False, True), (torch.float64, torch.float32, torch.float16)):
        arguments = make(folded_terms, broadcast=broadcast, dtype=dtype)
        expected = reference.global_attention(*arguments, 0.7)
        half = dtype == torch.float16
        output = torch.empty_like(expected)
        lse = expected.new_empty(expected.shape[:-1], dtype=torch.float32 if half else dtype)
        folding.forward(Terms(*arguments), SCALE, output, lse)
        close(output, expected, dtype)
        inputs = leaves(arguments)
        grad = torch.randn_like(expected)
        present = [t for t in inputs if t is not None]
        wanted = torch.autograd.grad(reference.global_attention(*inputs, 0.7), present, grad)
        grads = {name: None if t is None else torch.empty_like(t) for name, t in zip(Terms._fields, arguments)}
        fill(grads, folding.backward(grad, Terms(*arguments), SCALE, output, lse, grads))
        for actual, one in zip([g for g in grads.values() if g is not None], wanted):
            close(actual, one, dtype, factor=20 if half else 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masked_keys_when_folded(dtype):
    arguments = masked_arguments(dtype)
    output, grads = folded(arguments)
    close(output, reference.global_attention(*arguments, 0.7), dtype, factor=2)
    assert (output[:, :, 1] == 0).all()
    assert all(g.isfinite().all() for g in grads)


def test_what_is_masked_in_float16_does_not_depend_on_how_low_the_other_logits_are():
    """With row and column logits of -6e4 each, queries are not masked, and masked keys are below them."""
    arguments = masked_arguments(torch.float16)
    for n in (3, 4):
        arguments[n] = arguments[n] - 6e4
    output, grads = folded(arguments)
    close(output, reference.global_attention(*arguments, 0.7), torch.float16, factor=2)
    assert (output[:, :, 1] == 0).all()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("innermost", [("query",), ("key",), ("value",), ("query", "key", "value"), ("output",)])
def test_folding_of_heads_innermost_in_memory(innermost):
    """torch.cat keeps channels-last memory, and the fused kernels ignore the last stride."""

    def laid_out(name: str, *shape: int) -> torch.Tensor:
        tensor = torch.randn(shape, dtype=torch.float64)
        if name in innermost:
            tensor = tensor.contiguous(memory_format=torch.channels_last_3d)
        return tensor.requires_grad_()

    terms = laid_out("query", 2, 4, 1, 6, 48), laid_out("key", 2, 4, 4, 9, 48), laid_out("value", 2, 4, 4, 9, 48)
    grad = laid_out("output", 2, 4, 1, 6, 48)
    results = []
    for name in ("sdpa", "reference"):
        with backend(name):
            output = global_attention(*terms, scale=0.2)
            results.append((output, *torch.autograd.grad(output, terms, grad)))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected)


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
def test_folding_calls_what_cuda_offers():
    """Check names, arguments and shapes of the CUDA calls on tensors without data, which needs no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        terms = Terms(*(t.to("cuda", torch.float16) for t in make(broadcast=True)))
        output, lse = torch.empty(2, 3, 3, 4, 6, device="cuda").half(), torch.empty(2, 3, 3, 4, device="cuda")
        grads = {name: torch.empty_like(t) for name, t in zip(terms._fields, terms)}
        folding.forward(terms, SCALE, output, lse)
        returned = folding.backward(torch.empty_like(output), terms, SCALE, output, lse, grads)
        assert returned.keys() == grads.keys()
        fill(grads, returned)


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
@pytest.mark.parametrize("layout", ["heads outermost", "heads innermost", "crop"])
@pytest.mark.parametrize("cudnn", [False, True])
def test_flash_attention_takes_what_cuda_offers_of_content_alone(cudnn, layout, monkeypatch):
    """Check the calls of flash attention on tensors without data, which needs no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(flash, "_has_flash", lambda index: True)
    monkeypatch.setattr(flash, "_prefers_cudnn", lambda *terms: cudnn)

    def laid_out(tensor):
        if layout == "heads outermost":
            return tensor
        if layout == "crop":
            return tensor.repeat(1, 1, 2, 1, 1)[:, :, ::2]
        return tensor.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)

    with FakeTensorMode():
        content = make((True, False, False, False), d=8, dv=8, dtype=torch.float16)
        terms = Terms(*(None if t is None else laid_out(t.cuda()) for t in content))
        assert folding.is_flash(terms, SCALE)
        assert not folding.is_flash(terms._replace(value=terms.value[..., :6]), SCALE)
        assert not folding.is_flash(Terms(*(None if t is None else t.float() for t in terms)), SCALE)
        output, lse = torch.empty(2, 3, 3, 4, 8, device="cuda").half(), torch.empty(2, 3, 3, 4, device="cuda")
        folding.forward(terms, SCALE, output, lse)
        grads = folding.backward(torch.empty_like(output), terms, SCALE, output, lse, {})
        assert [grad.shape for grad in grads.values()] == [t.shape for t in terms if t is not None]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d, dv", [(16, 16), (64, 64), (16, 32), (20, 20)])
def test_content_alone_on_cuda(d, dv, dtype):
    """Flash attention runs, except for widths that differ or are not multiples of 8."""
    arguments = make((True, False, False, False), grid=(9, 8), keys=(5, 7), d=d, dv=dv, dtype=dtype)
    check_against_reference(tuple(None if t is None else t.cuda() for t in arguments), dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("keys", [(5, 7), (200, 90)])  # the second is too wide to fold
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cuda(dtype, keys, deterministic):
    for broadcast in (False, True):
        arguments = make(B=2, M=2, grid=(6, 7), keys=keys, d=16, dv=16, dtype=dtype, broadcast=broadcast)
        arguments = tuple(t.cuda() for t in arguments)
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        try:
            check_against_reference(arguments, dtype)
        finally:
            torch.use_deterministic_algorithms(False)
