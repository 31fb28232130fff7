"""Normalization after the projections of a layer, as in the segmentation networks of Zhu et al. (2019), section 4.1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn


def normalize(module: nn.Module, names: Iterable[str], norm_layer: Callable[[int], nn.Module]) -> None:
    """Replace the named convolutions of a module by the convolution and a normalization of its channels.

    Args:
        module: The layer.
        names: Attributes; those that are None stay None.
        norm_layer: Creates a normalization of a number of channels.
    """
    for name in names:
        if (conv := getattr(module, name)) is not None:
            setattr(module, name, nn.Sequential(conv, norm_layer(conv.out_channels).to(conv.weight)))


def projections(module: nn.Module) -> Iterator[nn.Conv2d | nn.Linear]:
    """Yield a layer's convolutions and linear layers, and reset its normalizations on the way."""
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            yield layer
        elif layer is not module and (reset := getattr(layer, "reset_parameters", None)) is not None:
            reset()
