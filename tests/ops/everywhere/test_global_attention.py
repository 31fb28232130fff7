"""``ops.global_attention`` against its definition in plain loops, every term present or absent."""

import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from attn_plugins.ops import backend, global_attention, library, reference
from attn_plugins.ops.everywhere import chunks, folding
from attn_plugins.ops.everywhere.operands import GlobalOptions, GlobalTerms

NAMES = ("query", "key", "value", "row_logits", "column_logits", "key_logits")
ALL = (True, True, True, True)
# Which of content, row, column and key terms are there.
COMBINATIONS = list(itertools.product((True, False), repeat=4))
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make(terms=ALL, B=2, M=3, grid=(3, 4), keys=(2, 5), d=4, dv=6, dtype=torch.float64, broadcast=False, seed=0):
    """Random arguments; with ``broadcast``, row logits depend on row offsets alone and column logits on columns."""
    generator = torch.Generator().manual_seed(seed)
    (Hq, Wq), (Hk, Wk) = grid, keys

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    content, row, column, key = terms
    return (
        random(B, M, Hq, Wq, d) if content else None,
        random(B, M, Hk, Wk, d) if content else None,
        random(B, M, Hk, Wk, dv),
        (random(1, M, Hq, 1, Hk) if broadcast else random(B, M, Hq, Wq, Hk)) if row else None,
        (random(B, 1, 1, Wq, Wk) if broadcast else random(B, M, Hq, Wq, Wk)) if column else None,
        (random(1, M, Hk, Wk) if broadcast else random(B, M, Hk, Wk)) if key else None,
    )


def attend(arguments, scale=0.7):
    query, key, value, row_logits, column_logits, key_logits = arguments
    return global_attention(
        query, key, value, row_logits=row_logits, column_logits=column_logits, key_logits=key_logits, scale=scale
    )


def loops(arguments, scale=0.7):
    """Equations 1 and 2, one query and one key at a time."""
    query, key, value, row, column, key_logits = arguments
    B, M, Hk, Wk, dv = value.shape
    shapes = [t.shape[2:4] for t in (query, row, column) if t is not None]
    Hq, Wq = max([s[0] for s in shapes], default=1), max([s[1] for s in shapes], default=1)
    output = torch.zeros(B, M, Hq, Wq, dv, dtype=torch.float64)

    def at(tensor, *index):
        return tensor[tuple(min(i, n - 1) for i, n in zip(index, tensor.shape))]

    for b, m, y, x in itertools.product(range(B), range(M), range(Hq), range(Wq)):
        weights = {}
        for ky, kx in itertools.product(range(Hk), range(Wk)):
            logit = 0.0
            if query is not None:
                logit += scale * float((query[b, m, y, x].double() * key[b, m, ky, kx].double()).sum())
            logit += float(at(row, b, m, y, x)[ky]) if row is not None else 0
            logit += float(at(column, b, m, y, x)[kx]) if column is not None else 0
            logit += float(at(key_logits, b, m, ky, kx)) if key_logits is not None else 0
            weights[ky, kx] = math.exp(logit)
        total = sum(weights.values())
        for (ky, kx), weight in weights.items():
            if weight:
                output[b, m, y, x] += weight / total * value[b, m, ky, kx].double()
    return output


def leaves(arguments):
    return tuple(None if t is None else t.detach().clone().requires_grad_() for t in arguments)


def gradients(function, arguments, seed=1):
    inputs = leaves(arguments)
    output = function(inputs)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)
    present = [t for t in inputs if t is not None]
    return torch.autograd.grad(output, present, weight, allow_unused=True)


def close(actual, expected, dtype=torch.float64, factor=1.0):
    tolerance = TOLERANCE[dtype] * factor
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("terms", COMBINATIONS)
def test_equals_the_definition_in_loops(terms, broadcast):
    arguments = make(terms, broadcast=broadcast)
    expected = loops(arguments)
    close(attend(arguments), expected)
    close(reference.global_attention(*arguments, 0.7), expected)


SCALE = GlobalOptions(0.7)


@pytest.fixture(params=["compiled", "plain"])
def path(request):
    """The compiled kernels, and what stands in for them where there are none."""
    if request.param == "compiled":
        if not library.has_kernel("cpu"):
            pytest.skip("no CPU binary")
        yield request.param
    else:
        with backend("torch"):
            yield request.param


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("terms", COMBINATIONS)
def test_gradients_equal_the_reference(terms, broadcast, dtype, path):
    check_against_reference(make(terms, broadcast=broadcast, dtype=dtype), dtype)


@pytest.mark.parametrize("terms", [ALL, (False, True, True, True), (True, False, True, False)])
@pytest.mark.parametrize("budget", [1, 40, 130, 10**6])
def test_chunks_of_any_size(terms, budget, monkeypatch):
    monkeypatch.setitem(chunks.WORKSPACE, "cpu", budget * 8)
    for broadcast in (False, True):
        with backend("torch"):
            check_against_reference(make(terms, B=3, broadcast=broadcast))


def check_against_reference(arguments, dtype=torch.float64):
    exact = tuple(None if t is None else t.double() for t in arguments)
    half = dtype in (torch.float16, torch.bfloat16)
    expected = gradients(lambda a: reference.global_attention(*a, 0.7), exact)
    for actual, wanted in zip(gradients(attend, arguments), expected):
        assert actual.dtype == dtype
        close(actual, wanted, dtype, factor=20 if half else 4)
    close(attend(arguments), reference.global_attention(*exact, 0.7), dtype, factor=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("d, dv", [(1, 1), (16, 8), (17, 33), (40, 70)])
def test_sizes_around_the_blocks_and_vectors(d, dv, dtype):
    """Widths and numbers of keys below, at and above whole vectors; queries around whole blocks."""
    for grid, keys in (((4, 6), (8, 8)), ((5, 5), (1, 65)), ((1, 47), (3, 43))):
        for terms in (ALL, (True, False, False, False)):
            check_against_reference(make(terms, B=1, M=2, grid=grid, keys=keys, d=d, dv=dv, dtype=dtype), dtype)


def test_chunks_cover_every_query_once():
    for B, M, Hq, Wq, keys, budget in itertools.product((1, 3), (1, 2), (1, 5), (1, 4), (1, 7), (1, 9, 33, 1000)):
        seen = torch.zeros(B, Hq, Wq)
        pieces = list(chunks.chunks(B, M, Hq, Wq, keys, budget))
        for b, h, w in pieces:
            seen[b, h, w] += 1
        assert (seen == 1).all()
        first = seen[pieces[0]].numel()
        assert all(seen[piece].numel() <= first for piece in pieces)
        assert first == 1 or first * M * keys <= budget


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
    """Only some inputs need gradients, as where the position terms are frozen."""
    query, key, value, row, column, key_logits = make(ALL, B=1, M=1, grid=(2, 2), keys=(2, 2), d=2, dv=2)
    query.requires_grad_(), column.requires_grad_()
    assert gradgradcheck(lambda q, c: attend((q, key, value, row, c, key_logits)), (query, column))


@pytest.mark.parametrize("folded_terms", [t for t in COMBINATIONS if any(t)])
def test_folding(folded_terms):
    """What runs on CUDA: all terms folded into one dot product, here through the CPU's fused attention."""
    for broadcast, dtype in itertools.product((False, True), (torch.float64, torch.float32, torch.float16)):
        arguments = make(folded_terms, broadcast=broadcast, dtype=dtype)
        expected = reference.global_attention(*arguments, 0.7)
        half = dtype == torch.float16
        output = torch.empty_like(expected)
        lse = expected.new_empty(expected.shape[:-1], dtype=torch.float32 if half else dtype)
        folding.forward(GlobalTerms(*arguments), SCALE, output, lse)
        close(output, expected, dtype)
        inputs = leaves(arguments)
        grad = torch.randn_like(expected)
        present = [t for t in inputs if t is not None]
        wanted = torch.autograd.grad(reference.global_attention(*inputs, 0.7), present, grad)
        grads = [None if t is None else torch.empty_like(t) for t in arguments]
        folding.backward(grad, GlobalTerms(*arguments), SCALE, output, lse, grads)
        for actual, one in zip([g for g in grads if g is not None], wanted):
            close(actual, one, dtype, factor=20 if half else 4)


def masked_arguments(dtype):
    """Query row 0 sees one key, query row 1 no key at all, the others all keys."""
    arguments = list(make(dtype=dtype))
    arguments[3][:, :, 0, :, 1:] = float("-inf")
    arguments[4][:, :, 0, :, 1:] = float("-inf")
    arguments[3][:, :, 1] = float("-inf")
    return arguments


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_masked_keys(dtype, path):
    arguments = masked_arguments(dtype)
    output = attend(arguments)
    close(output[:, :, 0], arguments[2][:, :, :1, 0].expand_as(output[:, :, 0]), dtype)
    assert (output[:, :, 1] == 0).all()
    assert output.isfinite().all()
    expected = gradients(lambda a: reference.global_attention(*a, 0.7), [t.double() for t in arguments])
    for actual, wanted in zip(gradients(attend, arguments), expected):
        assert actual.isfinite().all()
        close(actual, wanted, dtype, factor=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masked_keys_when_folded(dtype):
    arguments = masked_arguments(dtype)
    output, grads = folded(arguments)
    close(output, reference.global_attention(*arguments, 0.7), dtype, factor=2)
    assert (output[:, :, 1] == 0).all()
    assert all(g.isfinite().all() for g in grads)


def folded(arguments):
    """Output and gradients of ones, all terms folded."""
    terms = GlobalTerms(*arguments)
    shape = (*terms.value.shape[:2], *terms.grid())
    output = terms.value.new_empty(*shape, terms.value.shape[4])
    lse = terms.value.new_empty(shape, dtype=torch.float32)
    folding.forward(terms, SCALE, output, lse)
    grads = [torch.empty_like(t) for t in arguments]
    folding.backward(torch.ones_like(output), terms, SCALE, output, lse, grads)
    return output, grads


def test_what_is_masked_in_float16_does_not_depend_on_how_low_the_other_logits_are():
    """Rows and columns of -6e4 each: a query that sees them is not masked, and a masked key is below them."""
    arguments = masked_arguments(torch.float16)
    for n in (3, 4):
        arguments[n] = arguments[n] - 6e4
    output, grads = folded(arguments)
    close(output, reference.global_attention(*arguments, 0.7), torch.float16, factor=2)
    assert (output[:, :, 1] == 0).all()
    assert all(g.isfinite().all() for g in grads)


def test_masked_without_content():
    """Both factored paths: a fully masked query reads zeros there too."""
    row = torch.zeros(1, 1, 3, 1, 2)
    row[:, :, 1] = float("-inf")
    column = torch.randn(1, 1, 1, 4, 5)
    value = torch.randn(2, 3, 2, 5, 6)
    output = global_attention(None, None, value, row_logits=row, column_logits=column)
    assert output.shape == (2, 3, 3, 4, 6)
    assert (output[:, :, 1] == 0).all()
    assert (output[:, :, 0] != 0).all()
    assert (global_attention(None, None, value, key_logits=torch.full((1, 1, 2, 5), float("-inf"))) == 0).all()


def test_large_logits():
    arguments = [t if i == 2 else t * 1e4 for i, t in enumerate(make(dtype=torch.float32))]
    exact = reference.global_attention(*[t.double() for t in arguments], 0.7)
    output = attend(arguments)
    assert output.isfinite().all()
    close(output, exact, torch.float32, factor=50)  # differences of 1e8 in float32 are off by up to 8
    assert all(g.isfinite().all() for g in gradients(attend, arguments))


def test_nan_is_not_hidden():
    arguments = make(dtype=torch.float32)
    arguments[0][0, 0, 0, 0, 0] = float("nan")
    output = attend(arguments)
    assert output[0, 0, 0, 0].isnan().all()
    assert output[1].isfinite().all()


def test_queries_without_positions_are_not_expanded():
    value = torch.randn(2, 3, 4, 5, 6)
    assert global_attention(None, None, value).shape == (2, 3, 1, 1, 6)
    assert global_attention(None, None, value, key_logits=torch.randn(1, 3, 4, 5)).shape == (2, 3, 1, 1, 6)
    assert global_attention(None, None, value, row_logits=torch.randn(1, 1, 7, 1, 4)).shape == (2, 3, 7, 1, 6)


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


@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (9, 1)])
@pytest.mark.parametrize("keys", [(1, 1), (1, 70), (33, 1)])
def test_thin_maps(grid, keys):
    arguments = make(grid=grid, keys=keys)
    close(attend(arguments), reference.global_attention(*arguments, 0.7))
    expected = gradients(lambda a: reference.global_attention(*a, 0.7), arguments)
    for actual, wanted in zip(gradients(attend, arguments), expected):
        close(actual, wanted)


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


def changed(**replacements):
    arguments = dict(zip(NAMES, make(dtype=torch.float32)))
    return {**arguments, **replacements}


@pytest.mark.parametrize(
    "replacements, error, message",
    [
        (dict(value=torch.randn(2, 3, 5, 6)), ValueError, r"value must have shape \(B, M, Hk, Wk, dv\)"),
        (dict(value=torch.randn(2, 3, 0, 5, 6)), ValueError, "at least one key"),
        (dict(query=None), ValueError, "together"),
        (dict(query=torch.randn(2, 4, 3, 4, 4)), ValueError, "query must have value's batch and heads"),
        (dict(query=torch.randn(2, 3, 3, 4)), ValueError, "query must have shape"),
        (dict(key=torch.randn(2, 3, 2, 5, 3)), ValueError, "key must have shape"),
        (dict(key=torch.randn(2, 3, 5, 2, 4)), ValueError, "key must have shape"),
        (dict(row_logits=torch.randn(2, 3, 3, 4, 5)), ValueError, "row_logits must have shape"),
        (dict(row_logits=torch.randn(2, 2, 3, 4, 2)), ValueError, "row_logits must have shape"),
        (dict(column_logits=torch.randn(2, 3, 3, 4, 2)), ValueError, "column_logits must have shape"),
        (dict(column_logits=torch.randn(3, 4, 5)), ValueError, "column_logits must have shape"),
        (dict(key_logits=torch.randn(2, 3, 10)), ValueError, "key_logits must have shape"),
        (dict(key_logits=torch.randn(2, 3, 1, 5)), ValueError, "key_logits must have shape"),
        (dict(key=torch.randn(2, 3, 2, 5, 4).double()), TypeError, "key must have value's dtype"),
        (dict(value=torch.ones(2, 3, 2, 5, 6, dtype=torch.long)), TypeError, "value must be float16"),
        (dict(row_logits=torch.randn(2, 3, 3, 4, 2, device="meta")), ValueError, "row_logits must be on value's"),
        (dict(value=[1.0]), TypeError, "value must be a Tensor"),
    ],
)
def test_bad_input(replacements, error, message):
    arguments = changed(**replacements)
    tensors = {n: arguments.pop(n) for n in NAMES[:3]}
    with pytest.raises(error, match=message):
        global_attention(tensors["query"], tensors["key"], tensors["value"], **arguments)


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
def test_folding_calls_what_cuda_offers():
    """Without a GPU: names, arguments and shapes of the CUDA calls, on tensors that hold no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        terms = GlobalTerms(*(t.to("cuda", torch.float16) for t in make(broadcast=True)))
        output, lse = torch.empty(2, 3, 3, 4, 6, device="cuda").half(), torch.empty(2, 3, 3, 4, device="cuda")
        grads = [torch.empty_like(t) for t in terms]
        folding.forward(terms, SCALE, output, lse)
        folding.backward(torch.empty_like(output), terms, SCALE, output, lse, grads)
        assert [g.shape for g in grads] == [t.shape for t in terms]


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
@pytest.mark.parametrize("layout", ["heads outermost", "heads innermost", "crop"])
def test_flash_attention_takes_what_cuda_offers_of_content_alone(layout, monkeypatch):
    """Without a GPU, as above."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(folding, "_has_flash", lambda index: True)

    def laid_out(tensor):
        if layout == "heads outermost":
            return tensor
        if layout == "crop":
            return tensor.repeat(1, 1, 2, 1, 1)[:, :, ::2]
        return tensor.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)

    with FakeTensorMode():
        content = make((True, False, False, False), d=8, dv=8, dtype=torch.float16)
        terms = GlobalTerms(*(None if t is None else laid_out(t.cuda()) for t in content))
        assert folding._flash(terms)
        assert not folding._flash(terms._replace(value=terms.value[..., :6]))
        assert not folding._flash(GlobalTerms(*(None if t is None else t.float() for t in terms)))
        output, lse = torch.empty(2, 3, 3, 4, 8, device="cuda").half(), torch.empty(2, 3, 3, 4, device="cuda")
        grads = [None if t is None else torch.empty_like(t) for t in terms]
        folding.forward(terms, SCALE, output, lse)
        folding.backward(torch.empty_like(output), terms, SCALE, output, lse, grads)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d, dv", [(16, 16), (64, 64), (16, 32), (20, 20)])
def test_content_alone_on_cuda(d, dv, dtype):
    """Flash attention, but for widths that differ or are no multiple of 8."""
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


def test_queries_are_the_query_tensors_own():
    """Logits of more positions than the query has would have had it read beyond its end."""
    query, key, value = torch.randn(1, 1, 1, 1, 4), torch.randn(1, 1, 2, 3, 4), torch.randn(1, 1, 2, 3, 4)
    for size in (0, 5):
        with pytest.raises(ValueError, match=r"row_logits must have shape \(1, 1, 1, 1, 2\), positions of query"):
            global_attention(query, key, value, row_logits=torch.randn(1, 1, size, 1, 2))


def test_chunks_of_content_without_a_width():
    terms = [torch.randn(2, 1, 2, 3, width, dtype=torch.float64, requires_grad=True) for width in (0, 0, 5)]
    with backend("torch"):
        output = global_attention(*terms)
        grads = torch.autograd.grad(output.sum(), terms)
    torch.testing.assert_close(output, terms[2].mean((2, 3), keepdim=True).expand_as(output))
    assert [g.shape for g in grads] == [t.shape for t in terms]


@pytest.mark.parametrize("innermost", [("query",), ("key",), ("value",), ("query", "key", "value"), ("output",)])
def test_folding_of_heads_innermost_in_memory(innermost):
    """torch.cat keeps channels-last memory, and the fused kernels do not look at the last stride."""

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
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected)
