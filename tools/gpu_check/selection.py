"""Rows that ``measure`` takes unless all are asked for, and their order.

The selection has every operator, forward and with backward, and every module with backward, in float32 and a half type.
On an H100 all rows would take over twenty minutes: 0.9 to 1.2 s each, and 1 to 2.8 s more for each contestant that
torch.compile compiles, whose code came from the caches. Rows of :data:`FIRST` are measured before any other: where
the time is over, no operator or module is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeVar

from .rows import COMPILED, CONTENT_ALONE, OURS_COMPILED

BOTH = ("forward", "forward+backward")
MAIN = ("bfloat16", "float32")
PLAIN_SECONDS, COMPILED_SECONDS = 1.1, 2.0  # of a row, and of each of its compiled contestants, as measured
Peer = TypeVar("Peer")


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


FIRST = (
    Rows("operators", r"window, .* 7x7, content( and position)?", ("bfloat16",), ("forward+backward",)),
    Rows("operators", r"(global|criss-cross|deform_conv2d), .*", ("bfloat16",), ("forward+backward",)),
    Rows("operators", r"sequence, band 21, .* T 1024", ("bfloat16",), ("forward+backward",)),
    Rows("modules", r".*", ("bfloat16",), ("forward+backward",)),
    Rows("deform_conv", r"1-D .*", ("float16",), ("forward+backward",)),
    Rows("deformable_attention", r"encoder, DETR's four levels .*", ("bfloat16",), ("forward+backward",)),
)
SELECTED = (
    *FIRST,
    Rows("operators", r"window, .* 7x7, content( and position)?"),
    Rows("operators", r"(global|criss-cross|deform_conv2d), .*"),
    Rows("operators", r"sequence, band 21, .* T 1024"),
    Rows("modules", r".*", MAIN, ("forward+backward",)),
    Rows("deform_conv", r"2-D \(2,256,50,68\), 1 offset group", ("float32", "TF32", "float16")),
    Rows("deform_conv", r"1-D .*", ("float16", "float32")),
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


# Of these a measured peer is faster than the compiled definition, or the first rows show it.
WITHOUT_COMPILED = re.compile(r"operators: (window|global|sequence|deform_conv2d)|modules: ")


def rank(name: str) -> int:
    """Return 0 for a row that is measured before others, 1 for others of the selection, 2 for the rest."""
    return 0 if _among(name, FIRST) else 1 if _among(name, SELECTED) else 2


def is_selected(name: str) -> bool:
    """Return whether ``measure`` takes the row of this name unless all are asked for."""
    return rank(name) < 2


def peers_of(name: str, peers: Mapping[str, Peer]) -> dict[str, Peer]:
    """Return the peers of a row in the selection.

    Our compiled modules are left out, and beside other than first rows the compiled definition if a peer remains.
    """
    found = {peer: each for peer, each in peers.items() if peer != OURS_COMPILED}
    others = set(found) - {COMPILED, CONTENT_ALONE}
    if rank(name) and others and WITHOUT_COMPILED.match(name):
        found.pop(COMPILED, None)
    return found


def without(name: str) -> list[str]:
    """Return our backends that are not compared in a row of the selection: slow operations, but in first rows."""
    return ["torch"] if rank(name) else []


def estimate(peers: Collection[Collection[str]]) -> float:
    """Return about how many seconds rows of these peers take on an H100, whose compiled code is in the caches."""
    compiled = sum("compiled" in peer or "FlexAttention" in peer for each in peers for peer in each)
    return PLAIN_SECONDS * len(peers) + COMPILED_SECONDS * compiled


def _among(name: str, rows: Collection[Rows]) -> bool:
    return any(name in each for each in rows)
