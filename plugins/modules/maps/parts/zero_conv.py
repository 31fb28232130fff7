"""Zero-initialized convolutions, with which added branches initially have no effect."""

from __future__ import annotations

from torch import nn


class _Zero(nn.Module):
    def reset_parameters(self) -> None:
        """Zero weight and bias after the usual random draws, so that a seed initializes other layers alike."""
        super().reset_parameters()  # type: ignore[misc]
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class ZeroConv1d(_Zero, nn.Conv1d):
    """An ``nn.Conv1d`` whose weight and bias are initially 0."""


class ZeroConv2d(_Zero, nn.Conv2d):
    """An ``nn.Conv2d`` whose weight and bias are initially 0."""


class ZeroConv3d(_Zero, nn.Conv3d):
    """An ``nn.Conv3d`` whose weight and bias are initially 0."""
