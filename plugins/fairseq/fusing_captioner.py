"""Captioners whose decoder attends to regions and attributes directly, without encoder layers.

Shapes: B images, C channels, T words, Sv regions of D channels, Ss attributes, V words of the dictionary.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from torch import Tensor, nn

from ..modules import Modality
from .captioner import CaptionerConfig, CaptionerModel, ModalitiesEncoder, StepwiseDecoder, classifier

SOURCES = {"visual": ("visual",), "semantic": ("semantic",), "parallel": ("visual", "semantic")}  # by --fusion


@dataclass
class FusingConfig(CaptionerConfig):
    """Options of captioners with a choice of modalities."""

    fusion: ChoiceEnum(list(SOURCES)) = field(  # type: ignore[valid-type]
        default="visual", metadata={"help": "what the decoder attends to: regions, attributes, or both in parallel"}
    )


class ProjectingEncoder(ModalitiesEncoder):
    """Encoder that projects regions by a linear layer and embeds attributes.

    Args:
        cfg: The options; ``fusion`` is ``visual``, ``semantic`` or ``parallel``.
        dictionary: Dictionary of attributes.
        embed_tokens: The decoder's word embeddings.
        visual_dim: Number of region channels D, or None without regions.
    """

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: Optional[int]) -> None:
        super().__init__(dictionary, embed_tokens, str(cfg.fusion))
        self.projection = None if self.fusion == "semantic" else nn.Linear(visual_dim or 1, cfg.embed_dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def encode(
        self, src_tokens: Tensor, regions: Optional[Tensor], regions_padding_mask: Optional[Tensor]
    ) -> tuple[Optional[Modality], Optional[Modality]]:
        """Encode both modalities, or the one that the model reads."""
        visual = semantic = None
        if self.projection is not None:
            visual = Modality(self.dropout(self.projection(regions)), regions_padding_mask)
        if self.fusion != "visual":
            features, padding = self.attributes(src_tokens)
            semantic = Modality(self.dropout(features), padding)
        return visual, semantic


class CaptionerDecoder(StepwiseDecoder):
    """Base class of decoders that return the weights of their attention to regions and attributes."""

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: Optional[int]) -> None:
        super().__init__(cfg, dictionary, embed_tokens)
        self.output_projection = classifier(cfg, dictionary, embed_tokens)


class FusingModel(CaptionerModel):
    """Captioner with a :class:`ProjectingEncoder`."""

    encoder_type = ProjectingEncoder
