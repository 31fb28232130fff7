"""What the host does for a call: the counter, and limits that a change of the way to the kernels must not pass."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops.common import library
from tools.bench import host

# Operator: ATen operators and functions of Python of a forward, and of one with its backward. PyTorch's own of
# torch.autograd.grad, about 45, are among the latter.
MOST = {
    "deform_conv2d": ((5, 35), (16, 95)),
    "deformable_attention": ((0, 50), (0, 110)),
    "window_attention": ((12, 50), (36, 130)),
}


@pytest.mark.skipif(not library.has_kernel("cpu"), reason="no CPU binary is compiled")
@pytest.mark.parametrize("name", MOST)
def test_calls_stay_cheap(name):
    for run, (aten, python) in zip(host.passes(name).values(), MOST[name]):
        counted = host.count(run, rounds=0)
        assert counted.aten <= aten
        assert 10 < counted.python <= python
        assert counted.us is None


def test_counts():
    x = torch.rand(2, 2)

    def called():
        return x.mul(2).sum()

    counted = host.count(lambda: called(), rounds=2, calls=1)
    assert (counted.python, counted.c, counted.launches) == (
        1,
        2,
        2,
    )  # `called`; `mul` and `sum`, each a launch on CUDA
    assert counted.aten >= 2
    assert counted.us is not None


def test_a_table_is_printed(capsys):
    assert host.main(["deformable_attention"]) == 0
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "| deformable_attention, forward",
        "| deformable_attention, with backward",
    ]
