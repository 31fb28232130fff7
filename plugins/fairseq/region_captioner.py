"""Captioners whose decoder attends to regions directly, without encoder layers.

Shapes: B images, C channels, T words, Sv regions of D channels, V words of the dictionary.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
from typing import Any, ClassVar, Optional

from torch import Tensor, nn

from ..modules import Modality
from .captioner import CaptionerModel, ModalitiesEncoder, StepwiseDecoder, classifier


class RegionEncoder(ModalitiesEncoder):
    """Encoder that projects regions by a linear layer.

    Args:
        cfg: The options.
        dictionary: Dictionary of the task.
        embed_tokens: The decoder's word embeddings.
        visual_dim: Number of region channels D.
    """

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: int) -> None:
        super().__init__(dictionary, embed_tokens, "visual")
        self.projection = nn.Linear(visual_dim, cfg.embed_dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def encode(
        self, src_tokens: Tensor, regions: Optional[Tensor], regions_padding_mask: Optional[Tensor]
    ) -> tuple[Optional[Modality], Optional[Modality]]:
        """Project the regions; attributes are not read."""
        return Modality(self.dropout(self.projection(regions)), regions_padding_mask), None


class RegionDecoder(StepwiseDecoder):
    """Base class of decoders that return the weights of their attention to regions."""

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: int) -> None:
        super().__init__(cfg, dictionary, embed_tokens)
        self.output_projection = classifier(cfg, dictionary, embed_tokens)


class RegionCaptionerModel(CaptionerModel):
    """Captioner with a :class:`RegionEncoder`. Its ``defaults`` have the fusion ``visual``."""

    encoder_type: ClassVar[Any] = RegionEncoder

    @classmethod
    def check_task(cls, cfg: Any, task: Any) -> None:
        """Check that the task has regions, and that a caption may have a word."""
        if getattr(task, "regions", None) is None:
            raise ValueError(f"{cls.decoder_type.model} needs region features: give --regions")
        super().check_task(cfg, task)
