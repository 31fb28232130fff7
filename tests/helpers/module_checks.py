"""Checks shared by the tests of several modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def check_maps_that_do_not_fit(build: Callable[[], nn.Module]) -> None:
    """Check the errors for maps of wrong shapes; ``build`` makes a float64 module for maps of 6 channels."""
    for shape in ((1, 5, 4, 4), (6, 4, 4), (1, 6, 0, 4)):
        with pytest.raises(ValueError, match=r"x must have shape \(B, 6, H, W\) with at least one pixel"):
            build()(torch.randn(shape, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"x must have the module's dtype torch.float64, got torch.float32"):
        build()(torch.randn(1, 6, 4, 4))


def check_dropout(module: nn.Module, without: nn.Module, x: Tensor) -> None:
    """Check that self-attention (three heads of two channels) drops weights with probability 0.4, only in training."""
    torch.testing.assert_close(module.eval()(x), without(x))
    module.train()
    torch.manual_seed(3)
    output = module(x)
    torch.manual_seed(3)
    weights = F.dropout(module.attention_maps(x), 0.4)
    value = module.v_proj(x).unflatten(2, (3, 2)).transpose(1, 2)
    torch.testing.assert_close(output, module.out_proj((weights @ value).transpose(1, 2).flatten(2)))
