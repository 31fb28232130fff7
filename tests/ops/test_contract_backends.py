"""Numbers by each backend of an operator's table, whichever would serve by itself, against the definition in float64.

Triton's kernels are interpreted where there is no device, so that their examples are tiny.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_plugins import ops
from attn_plugins.core import library
from attn_plugins.core.operator import OPERATORS as operators
from attn_plugins.core.operator import Operator
from tests.helpers import triton_checks
from tests.helpers.emulation import NEEDS
from tests.helpers.operator_checks import deterministic_mode
from tests.ops.contract_examples import EXAMPLES, OPERATORS, Example
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.test_contract import BOUNDS, FIRST, Calls, assert_close, differentiate, example, forced, results

pytestmark = pytest.mark.usefixtures("full_float32")
SINGLE, HALF, BRAIN, DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64
ATTEND_IN_TRITON = ["global_attention", "sequence_attention", "criss_cross_attention, content", "window_attention"]
LOGITS_IN_TRITON = [n for n in ATTEND_IN_TRITON if "content" not in n]
ONE_EACH = [*ATTEND_IN_TRITON, "deformable_attention"]  # of Triton's
GLOBAL = ["global_attention"]  # the quickest
IN_TRITON = [n for n in EXAMPLES if n.startswith(("global", "sequence", "window")) or n in ONE_EACH[2:]]
ATTENTION = [n for n in EXAMPLES if "attention" in n and "deformable" not in n and "prefix" not in n]
Row = tuple[str, "str | None", str, torch.dtype]
THERE = {"cpu": library.has_kernel("cpu"), "torchvision": find_spec("torchvision") is not None}


def plain_backends(name: str) -> list[str]:
    """Return backends for CPUs: kernels that are compiled, and the last of the table, which refuses nothing."""
    names = [row.name for row in operators[name.split(",")[0].replace("1d", "2d")].table]
    return [*(n for n in names if THERE.get(n)), names[-1]]


# Of emulated kernels, in small examples.
QUICK = {"deform_conv2d": SINGLE, "deformable_attention": SINGLE, "window_attention": HALF}


def emulated(names: Sequence[str], dtypes: Sequence[torch.dtype], quick: Mapping[str, torch.dtype]) -> list:
    """Return calls by CUDA's kernels in the emulator, in fewer bits as well as in float64, which windows' lack.

    All but the ``quick`` are slow.
    """
    listed = []
    for n in names:
        if n.startswith(("deform", "window")):
            every = dict.fromkeys([*dtypes, SINGLE, HALF] if DOUBLE in dtypes else dtypes)
            own = [dtype for dtype in every if dtype != DOUBLE or n.startswith("deform")]
            for dtype in own:
                marks = [*NEEDS, *([] if quick.get(n) == dtype else [pytest.mark.slow])]
                listed.append(pytest.param(n, EMULATED, "cpu", dtype, marks=marks))
    return listed


def rows(
    names: Sequence[str] = tuple(EXAMPLES),
    dtypes: Sequence[torch.dtype] = (DOUBLE,),
    in_triton: Sequence[str] = (),
    quick: Mapping[str, torch.dtype] | None = None,
    quick_in_triton: Sequence[str] | None = None,
) -> list:
    """Return calls by each backend on CPUs, by the first on a GPU, and by Triton, in float32 where it takes that.

    CUDA's kernels are emulated as well, which takes a minute to compile. In Triton's interpreter all but
    ``quick_in_triton``, if given, are slow.
    """
    listed: list = [(n, backend, "cpu", dtype) for n in names for backend in plain_backends(n) for dtype in dtypes]
    listed += [pytest.param(n, FIRST, "cuda", dtype, marks=pytest.mark.cuda) for n in names for dtype in dtypes]
    listed += emulated(names, dtypes, quick or {})
    for n in in_triton:
        row = n, "triton", triton_checks.DEVICE, HALF if n.startswith("criss_cross") else SINGLE
        listed.append(pytest.param(*row, marks=in_triton_marks(quick_in_triton is None or n in quick_in_triton)))
    return listed


def in_triton_marks(quick: bool) -> list:
    return [triton_checks.needs_triton, *([] if quick else triton_checks.SLOW_INTERPRETED)]


def by_row(*args, **kwargs):
    return pytest.mark.parametrize("name, backend, device, dtype", rows(*args, **kwargs), ids=str)


def drawn(name: str, backend: str | None, device: str, dtype: torch.dtype, size="small", **extents) -> Example:
    if backend == "triton" and device == "cpu" and not extents:
        size, extents = "tiny", {} if name.startswith("criss_cross") else dict(B=2)
        extents |= dict(map=(2, 3)) if name.startswith(("criss_cross", "window")) else {}
    return example(name, size, device, dtype, **extents)


def bound_of(backend: str | None, dtype: torch.dtype) -> float:
    return triton_checks.TOLERANCES[dtype] if backend == "triton" else BOUNDS[dtype]


def check(some: Example, backend: str | None, dtype: torch.dtype, times: float = 1) -> dict[str, Tensor]:
    """Assert that outputs and gradients have the arguments' dtypes and the definition's numbers; return them.

    Of gradients that cancel, as those of a single key's logits, rounding is all that is left.
    """
    exact = some._replace(
        tensors={n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in some.tensors.items()}
    )
    with ops.backend("reference"):
        expected = results(exact)
    with forced(backend):
        actual = results(some)
    assert actual["output"].dtype == dtype
    assert all(actual[n].dtype == t.dtype for n, t in some.floats().items())
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert actual[name].shape == wanted.shape, name
        error, size = (actual[name].cpu().double() - wanted).norm(), max(wanted.norm(), 0.05 * wanted.numel() ** 0.5)
        assert error <= times * bound_of(backend, dtype) * size, name
    return actual


# One of each operator; tests of its own kernels have more.
QUICK_IN_TRITON = [n for n in ONE_EACH if n != "window_attention"] + ["window_attention, position"]
HALVES_IN_TRITON = list(zip(ONE_EACH, (HALF, BRAIN, BRAIN, HALF, HALF)))


@pytest.mark.parametrize(
    "name, backend, device, dtype",
    [
        *rows(dtypes=tuple(BOUNDS), in_triton=IN_TRITON, quick=QUICK, quick_in_triton=QUICK_IN_TRITON),
        *(pytest.param(n, "triton", triton_checks.DEVICE, d, marks=in_triton_marks(quick=False))
          for n, d in HALVES_IN_TRITON),
    ],
    ids=str,
)  # fmt: skip
def test_every_backend_equals_the_reference(name, backend, device, dtype):
    check(drawn(name, backend, device, dtype), backend, dtype)


@by_row(dtypes=(SINGLE, BRAIN))
def test_results_of_many_numbers(name, backend, device, dtype):
    check(example(name, "large", device, dtype), backend, dtype)


@by_row(dtypes=(HALF,))
def test_empty_batches(name, backend, device, dtype):
    check_batch(example(name, device=device, dtype=dtype, B=0), name, 0, backend)


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_shapes_without_data(name, batch):
    check_batch(example(name, device="meta", B=batch), name, batch, FIRST)


def check_batch(some: Example, name: str, batch: int, backend: str | None) -> None:
    leaves = some.leaves()
    with forced(backend):
        output = some.call(**leaves)
        grads = torch.autograd.grad(output.sum(), [leaves[n] for n in some.floats()])
    assert output.shape == example(name, B=2).call(**example(name, B=2).tensors)[:batch].shape
    assert [g.shape for g in grads] == [t.shape for t in some.floats().values()]
    if batch == 0 and not output.is_meta:
        assert not any(g.any() for g in grads)


# --- logits -------------------------------------------------------------------------------------------------------

LEADING = dict(global_attention="row_logits", sequence_attention="position_logits", window_attention="position_logits",
               criss_cross_attention="position_logits")  # fmt: skip
WITH_LOGITS = [n for n in ATTENTION if not any(word in n for word in ("content", "band", "range"))]


@by_row(
    WITH_LOGITS, dtypes=(DOUBLE, SINGLE, HALF, BRAIN), in_triton=LOGITS_IN_TRITON, quick=QUICK, quick_in_triton=GLOBAL
)
def test_masks_and_extreme_logits(name, backend, device, dtype):
    """Fully masked queries return zeros and have no gradients; queries of one key return its value."""
    some = drawn(name, backend, device, dtype, **dict(B=2, M=2, d=8))
    logits = some.tensors[LEADING[name.split(",")[0]]]
    logits[:, :, 1], logits[:, :, 0, ..., 1:] = -math.inf, -math.inf
    for n, place in (("key_logits", (1, 0)), ("outside_logits", (slice(2, 4),)), ("band_logits", (2,))):
        if n in some.tensors:
            some.tensors[n][(0, slice(None), *place)] = -math.inf
    actual = check(some, backend, dtype)
    assert not actual["output"][:, :, 1].any()
    assert not actual.get("query", actual["output"])[:, :, 1].any()
    logits.fill_(3e4)[..., 0] = 6e4
    with ops.backend("reference"):
        expected = some.call(**{n: t.double() if t.is_floating_point() else t for n, t in some.tensors.items()})
    with forced(backend):
        output = some.call(**some.tensors)
    close = dict(rtol=1e-2, atol=2e-2)  # logits of 6e4 in float32 are rounded to 0.004
    torch.testing.assert_close(output.double(), expected, **close)


WITH_CONTENT = [n for n in ATTENTION if "query" in example(n).tensors]


@by_row(WITH_CONTENT, in_triton=ATTEND_IN_TRITON, quick_in_triton=GLOBAL)
def test_scales_of_zero_and_below_equal_the_reference(name, backend, device, dtype):
    """A scale of 0 makes no use of uninitialized memory, which deterministic mode fills with NaN."""
    some = drawn(name, backend, device, dtype)
    for scale in (0.0, -0.5):
        exact = {n: t.double() if t.is_floating_point() else t for n, t in some.tensors.items()}
        with ops.backend("reference"):
            expected = some.call(**exact, scale=scale)
        with forced(backend), deterministic_mode():
            output = some.call(**some.tensors, scale=scale)
        assert_close(dict(output=output), dict(output=expected), bound_of(backend, dtype))


@by_row(WITH_CONTENT, dtypes=(SINGLE,), in_triton=ATTEND_IN_TRITON, quick_in_triton=GLOBAL)
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_nan_is_not_hidden(name, backend, device, dtype):
    some = drawn(name, backend, device, dtype)
    query = some.tensors["query"]
    first = (0, 0) + (0,) * (query.dim() - 3)
    query[(*first, 0)] = math.nan
    with forced(backend):
        output = some.call(**some.tensors)
    assert output[first].isnan().all()
    output[first] = 0
    assert output.isfinite().all()


@by_row(ATTENTION, in_triton=LOGITS_IN_TRITON, quick_in_triton=GLOBAL)
def test_logits_broadcast(name, backend, device, dtype):
    """Logits of size 1 in batch, heads or queries give what expanded ones give; their gradient is the sum."""
    some = drawn(name, backend, device, dtype)
    B, M = some.tensors["value"].shape[:2]
    queries = dict(global_attention=(2, 3), sequence_attention=(2,)).get(name.split(",")[0], ())
    for axes in (
        (0, 1),
        *([] if backend == "triton" else [(0,), (1,)]),
        *([queries] if queries and "query" in some.tensors else []),
    ):
        shared, spread = dict(some.tensors), dict(some.tensors)
        for n, logits in some.tensors.items():
            if "logits" in n and not (axes == queries and n == "key_logits"):
                shared[n] = logits[tuple(slice(1) if axis in axes else slice(None) for axis in range(logits.dim()))]
                spread[n] = shared[n].expand(B, M, *logits.shape[2:])
        expected = results(some._replace(tensors=spread))
        shapes = {n: t.shape for n, t in shared.items()} | dict(output=expected["output"].shape)
        with forced(backend):
            actual = results(some._replace(tensors=shared))
        assert_close(actual, {n: t.sum_to_size(shapes[n]) for n, t in expected.items()}, bound_of(backend, dtype))


# --- layouts and gradients ----------------------------------------------------------------------------------------


def _cropped(t: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(t, [1, 2] * t.dim(), value=torch.nan)
    for axis, size in enumerate(t.shape):
        padded = padded.narrow(axis, 1, size)
    return padded


def _turned(*axes: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.transpose(*axes).contiguous().transpose(*axes)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda t: torch.stack((t, -t), -1).flatten(-2)[..., ::2],
    "crop": _cropped,
    "last two axes exchanged": _turned(-1, -2),
    "heads innermost": _turned(1, -2),
    "channels second": _turned(1, -1),
    "batch innermost": _turned(0, -1),
    "one for all": lambda t: t[:1].expand_as(t),
    "misaligned": lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape),
}
TRITONS = {
    "global_attention": ["crop", "one for all"],
    "sequence_attention": ["heads innermost", "every second"],
    "criss_cross_attention, content": ["crop", "channels second", "misaligned"],
    "window_attention": ["heads innermost", "every second"],
    "deformable_attention": ["crop", "misaligned"],
}


@by_row(in_triton=ONE_EACH, quick_in_triton=GLOBAL)
def test_views_give_what_copies_give(name, backend, device, dtype):
    # Few queries read keys and values in place, unless either is strided; position logits likewise without a mask.
    kept = ["key", "value"] if name.startswith("sequence") and backend == "cpu" else []
    for layout, same in itertools.product(TRITONS[name] if backend == "triton" else LAYOUTS, [None, *kept]):
        some, change = drawn(name, backend, device, dtype, **(dict(T=3) if same else {})), LAYOUTS[layout]
        if same:
            some.tensors.pop("key_padding_mask", None)
        views = {
            n: change(t) if t.is_floating_point() and t.dim() > 1 and n != same else t for n, t in some.tensors.items()
        }
        copies = some._replace(tensors={n: t.contiguous() for n, t in views.items()})
        before = {n: t.clone() for n, t in views.items()}
        leaves = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in views.items()}
        with forced(backend):
            actual = differentiate(some.call, leaves)
        assert_close(actual, results(copies), bound_of(backend, dtype))
        assert all(torch.equal(t, before[n]) for n, t in views.items()), layout


@by_row(in_triton=ONE_EACH, quick=QUICK, quick_in_triton=["criss_cross_attention, content"])
def test_only_wanted_gradients(name, backend, device, dtype):
    some = drawn(name, backend, device, dtype)
    expected = results(some)
    for wanted in list(some.floats())[:: 2 if backend == "triton" else 1]:
        leaves = {n: t.detach().clone().requires_grad_(n == wanted) for n, t in some.tensors.items()}
        with forced(backend), Calls() as recorded:
            actual = differentiate(some.call, leaves)
        assert_close(actual, {n: expected[n] for n in ("output", wanted)}, bound_of(backend, dtype))
        if "prefix_key" not in some.tensors:
            assert sum(g.numel() > 0 for g in recorded.returned) == 1
    with torch.no_grad():
        assert not some.call(**some.leaves()).requires_grad


def definition(operator: Operator, terms: Any, options: Any, grad_output: Tensor) -> list[Tensor | None]:
    """Return output and gradients in float64, by the definition that autograd differentiates."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in terms]
    output = operator.reference(operator.terms(*leaves), options)
    wanted = [t for t in leaves if t is not None]
    gradients = iter(torch.autograd.grad(output, wanted, grad_output.double()))
    return [output.detach(), *(None if t is None else next(gradients) for t in leaves)]


PAIRS = [
    *((n, *pair, SINGLE) for n in OPERATORS if "1d" not in n for pair in (("cpu", "eager"), ("eager", "cpu"))
      if "cpu" in plain_backends(n)),
    *(pytest.param(n, "triton", "eager", HALF, marks=triton_checks.needs_triton) for n in ONE_EACH),
    *(pytest.param(n, "eager", "triton", HALF, marks=in_triton_marks(n in GLOBAL))
      for n in ONE_EACH),
]  # fmt: skip


@pytest.mark.parametrize("name, first, second, dtype", PAIRS, ids=str)
def test_a_backend_differentiates_another(name, first, second, dtype):
    """What the forward keeps does not depend on who serves; some backwards do without the output."""
    device = triton_checks.DEVICE if "triton" in (first, second) else "cpu"
    some = drawn(name, "triton" if device != "cpu" or dtype == HALF else FIRST, device, dtype)
    with forced(first), Calls() as recorded:
        output = some.call(**some.tensors)
    ((forward, args),) = recorded.calls.items()
    operator = operators[forward._opname]
    returned = recorded.returned if isinstance(recorded.returned, tuple) else (recorded.returned,)
    count = len(operator.terms._fields)
    terms, options = operator.terms(*args[:count]), operator.options(*args[count:])
    if name.startswith("criss_cross") and dtype == HALF:  # as where Triton serves
        options = options._replace(recompute=True)
        with forced(first):
            returned = operator._forward(*terms, *options)
    kept, needs = [returned[n] for n in operator._kept], [t is not None for t in terms]
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(returned[0])
    expected = definition(operator, terms, options, grad)
    for result in [kept, [None, *kept[1:]]] if operator._needs_output else [kept]:
        with forced(second):
            grads = operator._backward(grad, *terms, *result, *options, needs)
        for ours, theirs in zip((returned[0], *grads), expected):
            assert theirs is None or (ours.double() - theirs).norm() <= 2 * bound_of("triton", dtype) * theirs.norm()
