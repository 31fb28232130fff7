"""Rows that ``measure`` takes unless all are asked for: every operator and module, and each kind of peer, once.

All rows take over half an hour on an H100. These take minutes, of which a good part compiles peers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

BOTH = ("forward", "forward+backward")
MAIN = ("bfloat16", "float32")


class Rows(NamedTuple):
    """Rows of a part.

    Attributes:
        part: As in :data:`.worker.PARTS`.
        title: Regular expression for all of their names before dtype and pass.
        dtypes: Which dtypes.
        passes: Which passes.
    """

    part: str
    title: str
    dtypes: tuple[str, ...] = MAIN
    passes: tuple[str, ...] = BOTH

    def __contains__(self, name: object) -> bool:
        """Return whether these rows have the one of a name, its part in front."""
        part, _, rest = str(name).partition(": ")
        found = re.fullmatch(rf"{self.title}, (?P<dtype>\w+), (?P<passes>\S+)", rest)
        return (
            part == self.part and found is not None and found["dtype"] in self.dtypes and found["passes"] in self.passes
        )


SELECTED = (
    Rows("operators", r"window, .*7x7, content( and position)?"),
    Rows("operators", r"global, all terms, .*"),
    Rows("operators", r"sequence, band 21, .* T 1024"),
    Rows("operators", r"criss-cross, .*"),
    Rows("operators", r"deform_conv2d, .*"),
    Rows("modules", r".*", ("bfloat16",), ("forward+backward",)),
    Rows("deform_conv", r"2-D \(2,256,50,68\), 1 offset group", ("float32", "TF32", "float16")),
    Rows("deform_conv", r"1-D .*", ("float32",)),
    Rows("deformable_attention", r"encoder, DETR's four levels .*"),
    Rows("deformable_attention", r"decoder, 300 queries .*", ("bfloat16",)),
    Rows("global_attention", r"module 1111, \(1,256,50,84\), .*"),
    Rows("global_attention", r"module 0010, .*", ("bfloat16",)),
    Rows("augmented_conv", r"relative attention, 28x28, .*"),
    Rows("augmented_conv", r"aa_resnet50, .*", ("bfloat16",)),
    Rows("window_attention", r"dynamic convolution 1-D, .*", ("bfloat16",)),
    Rows("window_attention", r"dynamic convolution, .*", ("bfloat16",)),
    Rows("criss_cross", r"module, \(2, 512, 97, 97\)"),
    Rows("sequence_attention", r"causal band, .* T 1024, k 11", ("bfloat16",)),
    Rows("vision_transformers", r"Swin's windows(, shifted)?, .*", ("bfloat16",)),
    Rows("vision_transformers", r"decomposed positions \(SAM\), 64x64, .*", ("bfloat16",)),
    Rows("vision_transformers", r"swin_tiny_patch4_window7_224, .*", ("bfloat16",)),
    Rows("halves", r"(content attention|attention with logits of pairs), .*", ("bfloat16",)),
)


def is_selected(name: str, rows: Collection[Rows] = SELECTED) -> bool:
    """Return whether ``measure`` takes the row of this name unless all are asked for."""
    return any(name in each for each in rows)
