"""Convolutions that start at zero, so that what is built on them changes nothing at first."""

from __future__ import annotations

from torch import nn


class _Zero(nn.Module):
    def reset_parameters(self) -> None:
        """Zero weight and bias; what ``nn.Conv2d`` would draw is drawn, so that a seed gives other layers the same."""
        super().reset_parameters()  # type: ignore[misc]
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class ZeroConv1d(_Zero, nn.Conv1d):
    """An ``nn.Conv1d`` whose weight and bias are 0 at first."""


class ZeroConv2d(_Zero, nn.Conv2d):
    """An ``nn.Conv2d`` whose weight and bias are 0 at first."""


class ZeroConv3d(_Zero, nn.Conv3d):
    """An ``nn.Conv3d`` whose weight and bias are 0 at first."""
