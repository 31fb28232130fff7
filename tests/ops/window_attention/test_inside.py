"""Windows that stay inside the map, as neighborhood attention has them, against plain loops and by every backend."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_plugins.ops import reference, window_attention
from attn_plugins.ops.window_attention.operands import first_keys
from tests.helpers import triton_checks
from tests.helpers.emulation import NEEDS
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.test_contract import BOUNDS, assert_close, example, forced, results
from tests.ops.test_contract_backends import check, plain_backends

BOTH, CONTENT, POSITION = (f"window_attention{terms}" for terms in ("", ", content", ", position"))
DOUBLE, SINGLE, HALF, BRAIN = torch.float64, torch.float32, torch.float16, torch.bfloat16
# Maps that are the window and wider, that the dilation does not divide, of one row, of more than a vector's queries.
GEOMETRIES = [
    dict(map=(3, 3), kernel=(3, 3)),
    dict(map=(5, 9), kernel=(5, 3)),
    dict(map=(7, 20), kernel=(3, 7), dilation=(2, 1)),
    dict(map=(7, 19), kernel=(3, 5), dilation=(1, 3)),
    dict(map=(11, 13), kernel=(3, 3), dilation=(3, 4)),
    dict(map=(1, 40), kernel=(1, 13)),
    dict(map=(9, 1), kernel=(9, 1)),
    dict(map=(14, 15), kernel=(7, 7), dilation=(2, 2)),
    dict(map=(2, 70), kernel=(1, 9), dilation=(2, 7)),
    dict(map=(4, 9), kernel=(4, 2), dilation=(1, 3)),
]
EVERY = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)


def drawn(name: str, geometry: dict, device="cpu", dtype=SINGLE, **sizes):
    options = dict(border="inside", dilation=geometry.get("dilation", 1))
    map, kernel = geometry["map"], geometry["kernel"]
    return example(name, "small", device, dtype, map=map, kernel=kernel, stride=(1, 1), options=options, **sizes)


def first_of_the_window(index: int, size: int, kernel: int, dilation: int) -> int:
    """Follow Hassani and Shi 2022: the neighbors are those of the query's own residue, nearest first."""
    own = list(range(index % dilation, size, dilation))
    place = own.index(index)
    nearest = max(0, min(place - kernel // 2, len(own) - kernel))
    return own[nearest]


def by_loops(query: Tensor, key: Tensor, value: Tensor, position_logits: Tensor, kernel, dilation) -> Tensor:
    query, key, value, position = (t.numpy() for t in (query, key, value, position_logits))
    B, M, H, W, _ = value.shape
    output = np.zeros_like(value)
    for b, m, y, x in itertools.product(range(B), range(M), range(H), range(W)):
        top = first_of_the_window(y, H, kernel[0], dilation[0])
        left = first_of_the_window(x, W, kernel[1], dilation[1])
        taps = [(top + i * dilation[0], left + j * dilation[1]) for i in range(kernel[0]) for j in range(kernel[1])]
        logits = [0.7 * query[b, m, y, x] @ key[b, m, r, c] + position[b, 0, y, x, t]
                  for t, (r, c) in enumerate(taps)]  # fmt: skip
        weights = np.exp(logits) / np.exp(logits).sum()
        output[b, m, y, x] = sum(weight * value[b, m, r, c] for weight, (r, c) in zip(weights, taps))
    return torch.from_numpy(output)


@EVERY
def test_reference_is_the_definition(geometry):
    some = drawn(BOTH, geometry, dtype=DOUBLE, B=1, M=2)
    dilation = geometry.get("dilation", (1, 1))
    with forced("reference"):
        output = some.call(**some.tensors)
    torch.testing.assert_close(output, by_loops(**some.tensors, kernel=geometry["kernel"], dilation=dilation))


@pytest.mark.parametrize("kernel", [1, 3, 4, 5, 7, 9, 11, 13])
@pytest.mark.parametrize("dilation", [1, 2, 3, 5])
def test_first_keys(kernel, dilation):
    for size in (kernel * dilation, kernel * dilation + 1, kernel * dilation + 2 * dilation - 1, 100):
        expected = [first_of_the_window(n, size, kernel, dilation) for n in range(size)]
        assert first_keys(size, kernel, dilation).tolist() == expected


EAGER = [pytest.param("eager", name, marks=pytest.mark.slow) for name in (CONTENT, POSITION)]
KERNEL = [("cpu", name) for name in (BOTH, CONTENT, POSITION) if "cpu" in plain_backends(BOTH)]


@EVERY
@pytest.mark.parametrize("backend, name", [*KERNEL, ("eager", BOTH), *EAGER])
def test_backends_for_cpus(backend, name, geometry):
    for dtype in (DOUBLE, SINGLE, BRAIN):
        check(drawn(name, geometry, dtype=dtype, d=19, dv=18), backend, dtype, times=4)


INTERPRETED = [pytest.mark.slow] if triton_checks.DEVICE == "cpu" else []


def rows(every: bool) -> list:
    """Return calls of kernels for GPUs: emulated, interpreted, and on a GPU where there is one."""
    emulated = [*NEEDS, *([pytest.mark.slow] if every else [])]
    return [
        pytest.param(BOTH, EMULATED, "cpu", marks=emulated),
        pytest.param(BOTH, "triton", triton_checks.DEVICE, marks=[triton_checks.needs_triton, *INTERPRETED]),
        pytest.param(BOTH, None, "cuda", marks=pytest.mark.cuda),
    ]


@pytest.mark.parametrize("name, backend, device", rows(every=False))
def test_backends_for_gpus(name, backend, device):
    check(drawn(name, GEOMETRIES[4], device, B=1, M=1, d=3, dv=2), backend, SINGLE, times=4)


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("name, backend, device", rows(every=True))
def test_every_geometry_on_gpus(name, backend, device, dtype, geometry):
    interpreted = backend == "triton" and device == "cpu"  # slowly
    for terms in (name,) if interpreted else (name, CONTENT, POSITION):
        sizes = dict(M=1, d=4, dv=4) if interpreted else dict(M=2, d=16, dv=16)
        check(drawn(terms, geometry, device, dtype, B=1, **sizes), backend, dtype, times=4)


@pytest.mark.parametrize("which", ["query", "key", "value", "gradient", "position_logits"])
@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("backend", plain_backends(BOTH))
def test_infinity_and_nan_reach_only_their_windows(backend, bad, which):
    some = drawn(BOTH, dict(map=(7, 21), kernel=(3, 5), dilation=(1, 2)), dtype=SINGLE, B=1, M=1)
    factor = torch.ones_like(some.call(**some.tensors))
    some.tensors.get(which, factor)[0, 0, 1, 3, 1] = bad
    some = some._replace(call=lambda call=some.call, **tensors: call(**tensors) * factor)
    with forced("reference"):
        expected = results(some)
    with forced(backend):
        actual = results(some)
    for name, wanted in expected.items():
        assert wanted.isfinite().any()
        assert torch.equal(actual[name].isfinite(), wanted.isfinite()), name
        torch.testing.assert_close(actual[name][wanted.isfinite()], wanted[wanted.isfinite()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", plain_backends(BOTH))
def test_a_masked_window_has_no_keys(backend):
    some = drawn(BOTH, GEOMETRIES[1])
    some.tensors["position_logits"][0, 0, 2, 3] = -math.inf
    assert not check(some, backend, SINGLE)["output"][0, :, 2, 3].any()


def test_a_map_of_one_window_is_global_attention():
    """Wherever the query is; the window's keys are all keys."""
    some = drawn(BOTH, dict(map=(5, 7), kernel=(5, 7)), dtype=DOUBLE)
    query, key, value, position = (some.tensors[n] for n in ("query", "key", "value", "position_logits"))
    logits = query.flatten(2, 3) @ key.flatten(2, 3).mT * 0.7 + position.flatten(2, 3)
    expected = (logits.softmax(-1) @ value.flatten(2, 3)).view_as(value)
    torch.testing.assert_close(some.call(**some.tensors), expected)


def test_sequences_are_maps_of_one_row():
    some = drawn(BOTH, dict(map=(1, 21), kernel=(1, 5), dilation=(1, 3)))
    flat = [t.squeeze(2) for t in some.tensors.values()]
    output = window_attention(*flat, 5, dilation=3, border="inside", scale=0.7)
    torch.testing.assert_close(output, some.call(**some.tensors).squeeze(2), rtol=0, atol=0)


def test_threads_change_nothing():
    some, before = drawn(BOTH, dict(map=(20, 40), kernel=(7, 7), dilation=(2, 2)), d=32, dv=24), torch.get_num_threads()
    expected = results(some)
    try:
        torch.set_num_threads(3)
        assert_close(results(some), expected, 0)
    finally:
        torch.set_num_threads(before)


def test_weights_on_the_map_are_the_windows():
    windows = reference.Windows((5, 7), (5, 7), (3, 3), (1, 1), (1, 1), (2, 1)[::-1], torch.device("cpu"), "inside")
    assert windows.inside.all()
    assert windows.rows[0].tolist() == [0, 1, 2]
    assert windows.columns[6].tolist() == [2, 4, 6]


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(stride=2), r"stride must be 1 and padding None if border is 'inside', got \(2, 2\) and None"),
        (dict(padding=1), r"stride must be 1 and padding None if border is 'inside', got \(1, 1\) and 1"),
        (dict(kernel_size=7), r"at least kernel_size \* dilation = 7 keys along each axis .*, got \(5, 9\)"),
        (dict(dilation=2), r"at least kernel_size \* dilation = 6 keys along each axis .*, got \(5, 9\)"),
        (dict(query=torch.zeros(1, 1, 4, 9, 3)), r"query must have the positions of value, \(5, 9\), .*, got \(4, 9\)"),
    ],
    ids=str,
)
def test_unsuitable_arguments_raise(change, words):
    x = torch.zeros(1, 1, 5, 9, 3)
    given = dict(query=x, key=x, value=x, position_logits=None, kernel_size=3, border="inside") | change
    with pytest.raises(ValueError, match=words):
        window_attention(**given)


def test_logits_without_queries_have_the_positions_of_the_keys():
    x = torch.zeros(1, 1, 5, 9, 3)
    with pytest.raises(ValueError, match=r"position_logits must have the positions of value, \(5, 9\)"):
        window_attention(None, None, x, x.new_zeros(1, 1, 4, 9, 9), 3, border="inside")


def test_a_tolerance_that_would_see_a_neighbor():
    """The bounds of this file are far below the difference that one tap makes."""
    some = drawn(BOTH, GEOMETRIES[1])
    other = some.call(**some.tensors, border="exclude")
    assert (some.call(**some.tensors) - other).norm() > 100 * BOUNDS[SINGLE] * other.norm()
