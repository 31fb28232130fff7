"""Sizes at which kernels change their ways, and empty axes, by each backend of an operator's table."""

from __future__ import annotations

import math

import pytest

from tests.helpers import triton_checks
from tests.ops.contract_examples import EXAMPLES
from tests.ops.deform_conv.operands import GEOMETRIES as DEFORMED
from tests.ops.test_contract import example
from tests.ops.test_contract_backends import DOUBLE, HALF, ONE_EACH, SINGLE, check, in_triton_marks, plain_backends

pytestmark = pytest.mark.usefixtures("full_float32")
GLOBAL = [
    dict(grid=(4, 6), keys=(8, 8), d=16, dv=8, B=1),
    dict(grid=(5, 5), keys=(1, 65), d=17, dv=33),
    dict(grid=(1, 47), keys=(3, 43), d=40, dv=70, B=1),
    dict(grid=(9, 1), keys=(33, 1), d=1, dv=1),
    dict(grid=(1, 1), keys=(1, 1)),
]
GEOMETRIES = [  # of windows
    dict(map=(6, 7), kernel=(1, 5), stride=(1, 2), options=dict(padding=(0, 2))),
    dict(map=(9, 1), kernel=(5, 3), stride=(2, 3), options=dict(padding=(4, 2), dilation=(2, 2), border="zero")),
    dict(map=(3, 70), kernel=(2, 4), options=dict(padding=(1, 3), border="zero")),
    dict(map=(6, 7), kernel=(3, 3), stride=(2, 2), options=dict(padding=(0, 0), dilation=(1, 3))),
    dict(map=(1, 130), kernel=(3, 9), options=dict(border="exclude")),
    dict(map=(1, 1), kernel=(3, 3)),
    # Wide kernels have one of their own for position logits alone, unless a stride or a dilation is not 1.
    dict(map=(5, 9), kernel=(3, 7)),
    *(dict(map=(5, 9), kernel=(3, 7), stride=stride) for stride in ((2, 1), (1, 2))),
    *(dict(map=(5, 9), kernel=(3, 7), options=dict(dilation=dilation)) for dilation in ((2, 1), (1, 2))),
]
EXTENTS: dict[str, list[dict]] = {
    "global_attention": GLOBAL,
    "global_attention, content": GLOBAL,
    "sequence_attention": [
        dict(T=1, S=1, K=1, d=1, dv=1), dict(T=48, S=48, K=7, d=16, dv=16), dict(T=49, S=65, K=31, d=17, dv=33),
        dict(T=100, S=130, K=259, d=64, dv=70, M=1), dict(T=150, S=197, K=1, d=40, dv=8, M=1),
        dict(T=4, S=210, K=11, d=19, dv=21),
    ],
    "sequence_attention, causal band": [dict(T=49, S=49, K=31), dict(T=100, S=130, K=259, M=2), dict(T=7, S=7, K=5)],
    "sequence_attention, range": [dict(T=33, S=40, K=9), dict(T=5, S=400, K=3)],
    "sequence_attention, segments": [dict(T=1, S=1), dict(T=4, S=70), dict(T=48, S=48, d=16), dict(T=130, S=131)],
    **{n: [dict(g, d=19, dv=18) for g in GEOMETRIES] for n in EXAMPLES if n.startswith("window") and "inside" not in n},
    "criss_cross_attention": [dict(map=map, d=9) for map in ((1, 3), (3, 1), (1, 1), (17, 34))],
    "criss_cross_attention, content": [dict(map=(33, 2), d=16)],
    "deform_conv2d": [*DEFORMED.values(), dict(C=38, map=(1, 4)), dict(B=1, D=3)],
    "deformable_attention": [
        dict(levels=((1, 1),), Q=3), dict(d=5), dict(d=72, Q=2, M=2), dict(levels=((3, 2),), Q=300, K=1, M=2, B=1),
    ],
}  # fmt: skip


def extents_of(name: str, backend: str) -> list:
    """Return cases; those of many channels take seconds by PyTorch's and torchvision's operators, and are slow."""

    def marks(extents: dict) -> list:
        return [pytest.mark.slow] if extents.get("C", 0) >= 70 and backend != "cpu" else []

    return [pytest.param(name, backend, extents, marks=marks(extents)) for extents in EXTENTS[name]]


@pytest.mark.parametrize(
    "name, backend, extents", [case for n in EXTENTS for b in plain_backends(n) for case in extents_of(n, b)], ids=str
)
def test_extents_around_blocks_and_vectors(name, backend, extents):
    dtypes = (SINGLE,) if math.prod(extents.get(n, 1) for n in "TS") > 10000 else (DOUBLE, SINGLE)
    for dtype in dtypes:
        check(example(name, "small", "cpu", dtype, **extents), backend, dtype, times=4)


EMPTY = {
    "global_attention": [dict(d=0), dict(dv=0), dict(M=0), dict(grid=(0, 3))],
    "global_attention, content": [dict(d=0)],
    "sequence_attention": [dict(d=0), dict(dv=0), dict(M=0), dict(T=0)],
    "sequence_attention, range": [dict(T=0), dict(d=0)],
    "window_attention, content": [dict(d=0), dict(d=0, dv=24, kernel=(1, 7)), dict(dv=0)],
    "criss_cross_attention, content": [dict(d=0), dict(dv=0)],
    "deformable_attention": [dict(Q=0), dict(K=0), dict(d=0)],
}


@pytest.mark.parametrize(
    "name, backend, extents",
    [
        *((n, backend, e) for n in EMPTY for backend in plain_backends(n) for e in EMPTY[n]),
        *(pytest.param(n, "triton", e, marks=in_triton_marks(n == "global_attention" or e.get("d") != 0))
          for n in [*ONE_EACH, "window_attention, content"] for e in EMPTY.get(n, ())
          if n != ONE_EACH[2] or "dv" in e),
    ],
    ids=str,
)  # fmt: skip
def test_empty_axes_equal_the_reference(name, backend, extents):
    """Empty widths, heads and queries give the shapes of results, without products the mean."""
    triton = backend == "triton"
    dtype = HALF if triton and name == ONE_EACH[2] else SINGLE
    some = example(name, "tiny", triton_checks.DEVICE if triton else "cpu", dtype, **extents)
    check(some, backend, dtype, times=4)
