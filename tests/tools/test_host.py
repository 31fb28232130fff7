"""What the host does for a call: the counter, and limits that a change of the way to the kernels must not pass."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain

import pytest
import torch

from attn_plugins.core import library
from tools.bench import host
from tools.bench.host import count

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
    for run, (aten, python) in zip(host.passes_of_operator(name).values(), MOST[name]):
        counted = count(run)
        assert counted.aten <= aten
        assert 10 < counted.python <= python


# Launches, ATen operators and functions of Python of a prediction and of a training step; ResNet-50 itself launches 227
# and 560 kernels by 1,355 and 2,794 operators.
MODELS = {
    "attn0010_dcn_resnet50": ((385, 2500, 5500), (1000, 5900, 8800)),
    "attn1111_resnet50": ((410, 2900, 6600), (1020, 6600, 11100)),
    "aa_resnet50": ((385, 2900, 6400), (980, 6700, 11100)),
}


@pytest.mark.slow
def test_models_stay_cheap():
    pytest.importorskip("timm")
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.helpers.model_launches", *MODELS]
    variables = os.environ | {"TRITON_INTERPRET": "0"}  # where the tests run Triton's kernels, none would be idle
    lines = subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == 2 * len(MODELS)
    for line, most in zip(lines, chain.from_iterable(MODELS.values())):
        counted = [int(word) for word in line.split()]
        if (library.cpu_level() or 0) < 4:  # oneDNN has no bfloat16 there, and PyTorch calls more operators instead
            counted[1] = 0
        assert all(number <= limit for number, limit in zip(counted, most)), line
        assert counted[0] > 300


def test_views_are_no_launches_and_nested_operators_are_one():
    """Views and what calls others do not; an operator within one that launches is a part of it."""
    pytest.importorskip("triton")
    from tests.helpers import model_launches

    x, weight = torch.rand(2, 3, 4, 4), torch.rand(5, 3, 3, 3)
    for call, launches in (
        (lambda: x.transpose(1, 2).flatten(0, 1).unsqueeze(0)[0], 1),  # a copy
        (lambda: x.transpose(1, 2).unsqueeze(0)[0], 0),
        (lambda: x.to(torch.bfloat16), 1),
        (lambda: torch.zeros_like(x), 1),
        (lambda: torch.nn.functional.conv2d(x, weight), 1),
        (lambda: torch.einsum("bchw,oc->bohw", x, weight[:, :, 0, 0]), 2),  # a copy and a product
    ):
        assert model_launches.launches(call) == launches


def test_calls_are_counted():
    x = torch.rand(2, 2)

    def called():
        return x.mul(2).sum()

    counted = count(lambda: called())
    assert (counted.python, counted.c) == (1, 2)  # `mul` and `sum`; `called`; `mul` and `sum`
    assert counted.aten >= 2


def test_a_table_is_printed(capsys):
    assert host.main(["deformable_attention"]) == 0
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "| deformable_attention, forward",
        "| deformable_attention, with backward",
    ]


def test_unknown_names_are_one_error(capsys):
    with pytest.raises(SystemExit):
        host.main(["x"])
    assert "CALL must be any of deform_conv2d, " in capsys.readouterr().err
