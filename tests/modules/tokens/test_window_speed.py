"""Where stock's window attention is kept: by version, arithmetic and pass, of fake tensors of a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from attn_plugins.modules.tokens.parts.window_speed import SPEEDUPS, SWITCH, is_slower, stock_is_faster
from tests.helpers.cuda_checks import no_tf32  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.usefixtures("no_tf32"),
    pytest.mark.skipif(
        torch.version.cuda is None or not hasattr(torch, "get_autocast_dtype"),
        reason="a CPU-only torch, or one before 2.4, which makes fake tensors of a GPU only beside one",
    ),
]
HALF, BFLOAT16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Swin in training and in prediction, then Swin V2
NEVER, TF32, IN_HALF = (False,) * 4, (True,) * 4, (False, False, True, False)
CASES = {  # dtype, autocast's, whether TF32 is allowed
    "float32": (FLOAT, None, False, NEVER),
    "TF32": (FLOAT, None, True, TF32),
    "float64": (DOUBLE, None, True, NEVER),
    "float64 under autocast": (DOUBLE, BFLOAT16, True, NEVER),
    "bfloat16": (BFLOAT16, None, False, IN_HALF),
    "float16": (HALF, None, True, IN_HALF),
    "autocast to bfloat16": (FLOAT, BFLOAT16, True, IN_HALF),
    "autocast to float16": (FLOAT, HALF, False, IN_HALF),
}


@pytest.fixture(autouse=True)
def no_switch(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)


@contextlib.contextmanager
def autocast(dtype: torch.dtype | None):
    """CUDA's autocast; ``torch.autocast`` leaves it off where there is no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or HALF)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def fake(dtype: torch.dtype = FLOAT, device: str = "cuda") -> tuple[torch.Tensor, nn.Module]:
    """Return an input without gradients, and a layer that evaluates."""
    with FakeTensorMode():
        return torch.empty(2, 4, device=device, dtype=dtype), nn.Linear(4, 4, device=device, dtype=dtype).eval()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_stock_runs_where_it_was_measured_faster(name, device):
    dtype, cast, tf32, expected = CASES[name]
    torch.backends.cuda.matmul.allow_tf32 = tf32
    x, attn = fake(dtype, device)
    found = []
    with autocast(cast):
        for version in ("Swin", "Swin V2"):
            found += [stock_is_faster(version, x, attn.train())]
            with torch.no_grad():
                found += [stock_is_faster(version, x, attn.eval())]
    assert tuple(found) == (expected if device == "cuda" else NEVER)


@pytest.mark.parametrize(
    "grad, input, parameters, training, expected",
    [
        (True, True, True, False, True),
        (True, False, True, False, True),  # the first layer
        (True, True, False, False, True),  # frozen
        (True, False, False, False, False),
        (False, True, True, False, False),
        (False, False, False, True, True),  # the first call of a reentrant checkpoint
    ],
)
def test_what_counts_as_training(grad, input, parameters, training, expected):
    x, attn = fake(BFLOAT16)
    x.requires_grad_(input)
    attn.requires_grad_(parameters).train(training)
    with torch.set_grad_enabled(grad):
        assert stock_is_faster("Swin V2", x, attn) is expected


def test_a_checkpoint_draws_the_same_twice():
    """Stock and ours draw dropout in different orders of tokens, so both calls of a checkpoint must be of one kind."""
    x, attn = fake(BFLOAT16)
    seen = []

    def call(x):
        seen.append(stock_is_faster("Swin V2", x, attn))
        return x * 2

    torch.utils.checkpoint.checkpoint(call, x.requires_grad_(), use_reentrant=True)
    call(x)
    assert seen == [False, True]  # nothing is drawn in evaluation
    attn.train()
    torch.utils.checkpoint.checkpoint(call, x, use_reentrant=True)
    call(x)
    assert seen[2:] == [True, True]


@pytest.mark.parametrize("value, expected", [("0", False), ("1", True)])
def test_ours_are_forced(monkeypatch, value, expected):
    torch.backends.cuda.matmul.allow_tf32 = True
    monkeypatch.setenv(SWITCH, value)
    assert stock_is_faster("Swin", *fake()) is expected


def test_a_trace_keeps_ours():
    torch.backends.cuda.matmul.allow_tf32 = True
    x, attn = fake()
    seen = []

    def call(y):
        seen.append(stock_is_faster("Swin", x, attn))
        return y + 1

    torch.jit.trace(call, torch.zeros(2), check_trace=False)
    assert seen == [False]
    assert stock_is_faster("Swin", x, attn)


def test_the_limits_follow_the_figures():
    for (version, arithmetic), speedup in SPEEDUPS.items():
        assert is_slower(version, arithmetic, True) == (speedup.training < 1)
        assert is_slower(version, arithmetic, False) == (speedup.prediction < 1)
    assert not is_slower("Swin", None, True)
