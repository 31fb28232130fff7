"""mmcv's variant of generalized attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..terms.window import window_logits
from .generalized_attention import GeneralizedAttention2d


class MMCVGeneralizedAttention2d(GeneralizedAttention2d):
    """The numerics of mmcv's ``GeneralizedAttention``, from the same state_dict.

    What differs from :class:`GeneralizedAttention2d`: R encodes q - k, with wavelength 1000, half of
    ``position_embedding_dim`` per axis, and is divided by √2; C // M channels per head, also where M does not
    divide C; queries come back from ``q_stride`` by interpolation with half-pixel centres; ``spatial_range`` r is
    a half-range in pixels, any number from 0: key j is in range of the query at pixel p where
    ⌊(p - r) / kv_stride⌋ <= j <= ⌊(p + r + 1) / kv_stride⌋, on maps of any size and channel count (mmcv's own
    mask ends at 84 pixels, needs 256 or 512 channels, and forgets ``q_stride``).

    mmcv's results for '0100', '0110', '1100' and '1110' are wrong (queries transposed, an error where H ≠ W);
    here these four are right.
    """

    wavelength = 1000.0
    offset_sign = -1
    position_factor = 1 / math.sqrt(2)
    windowed = False  # its ranges are not centred on the query

    def check_variant(self) -> None:
        r = self.spatial_range
        if not isinstance(r, int) or r < -1:
            raise ValueError(f"spatial_range must be -1 (all keys) or a half-range of at least 0, got {r!r}")
        if (self.terms[1] or self.terms[3]) and self.position_embedding_dim % 4:
            raise ValueError(
                "position_embedding_dim must be a multiple of 4 (sines and cosines of two axes), "
                f"got {self.position_embedding_dim}"
            )

    def axis_width(self) -> int:
        return self.position_embedding_dim // 2

    def axis_range(self, queries: int, keys: int, device: torch.device) -> Tensor:
        pixel = torch.arange(queries, device=device).unsqueeze(1) * self.q_stride
        key = torch.arange(keys, device=device)
        first = (pixel - self.spatial_range).div(self.kv_stride, rounding_mode="floor")
        last = (pixel + self.spatial_range + 1).div(self.kv_stride, rounding_mode="floor")
        return window_logits((first <= key) & (key <= last))

    def upsample(self, output: Tensor, size: list[int]) -> Tensor:
        return F.interpolate(output, size, mode="bilinear", align_corners=False)
