"""Captioners whose decoder attends to regions and attributes as they come, without an encoder's layers.

Shapes: B images, C channels, T words, Sv regions of D channels, Ss attributes, V words of the dictionary.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn

from ..modules import Modality
from ..modules.sequence_cache import reordered
from .captioner import (
    CaptionerModel,
    EncoderOut,
    ModalitiesEncoder,
    check_task,
    classifier,
    complete,
    embedded,
    modalities,
    visual_dim_of,
    word_embeddings,
)

SOURCES = {"visual": ("visual",), "semantic": ("semantic",), "parallel": ("visual", "semantic")}  # by --fusion
SEEN = {"visual": "regions", "semantic": "attributes"}  # what each is called where weights are shown


@dataclass
class CaptionerConfig(FairseqDataclass):
    """Options of the captioners without an encoder of their own."""

    # None leaves a size to the architecture, in hydra too.
    embed_dim: Optional[int] = field(default=None, metadata={"help": "channels of words (base: 512)"})
    dropout: float = field(default=0.1, metadata={"help": "of words and of what layers give"})
    share_decoder_input_output_embed: bool = field(
        default=False, metadata={"help": "classify by the word embeddings, without weights of the classifier's own"}
    )
    max_target_positions: int = field(default=256, metadata={"help": "words of a caption at most, with its end"})


@dataclass
class FusingConfig(CaptionerConfig):
    """Options of those that have a choice of what to look at."""

    fusion: ChoiceEnum(list(SOURCES)) = field(  # type: ignore[valid-type]
        default="visual", metadata={"help": "what the decoder attends to: regions, attributes, or each by itself"}
    )


class ProjectingEncoder(ModalitiesEncoder):
    """Regions after a linear layer, and attributes as they are embedded: what the decoder attends to.

    Args:
        cfg: The options; ``fusion`` is ``visual``, ``semantic`` or ``parallel``.
        dictionary: Of attributes.
        embed_tokens: The decoder's word embeddings.
        visual_dim: D; None: there are no regions.
    """

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: Optional[int]) -> None:
        super().__init__(dictionary, embed_tokens, str(cfg.fusion))
        self.projection = None if self.fusion == "semantic" else nn.Linear(visual_dim or 1, cfg.embed_dim)
        self.dropout = nn.Dropout(cfg.dropout)

    def encode(
        self, src_tokens: Tensor, regions: Optional[Tensor], regions_padding_mask: Optional[Tensor]
    ) -> tuple[Optional[Modality], Optional[Modality]]:
        """Both, or the one that the model reads."""
        visual = semantic = None
        if self.projection is not None:
            visual = Modality(self.dropout(self.projection(regions)), regions_padding_mask)
        if self.fusion != "visual":
            features, padding = self.attributes(src_tokens)
            semantic = Modality(self.dropout(features), padding)
        return visual, semantic


class CaptionerDecoder(FairseqIncrementalDecoder):
    """Words, and what was seen before each, to the logits of the next one; ``advance`` is a model's own.

    Args:
        cfg: The options.
        dictionary: Of captions.
        embed_tokens: The word embeddings.
    """

    model = "a captioner"

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(dictionary)
        self.embed_tokens, self.max_target_positions = embed_tokens, cfg.max_target_positions
        self.output_projection = classifier(cfg, dictionary, embed_tokens)

    def advance(
        self, words: Tensor, memory: dict[str, Modality], state: Any
    ) -> tuple[Tensor, dict[str, list[Tensor]], Any]:
        """Continue after ``state``, None at first.

        Args:
            words: (B, T, C), embedded.
            memory: The encoder's output.
            state: Tensors whose first axis is the batch, or tuples of such.

        Returns:
            Features (B, T, C), the weights of each modality, (B, T, S) of each layer, and the state.
        """
        raise NotImplementedError

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[EncoderOut] = None,
        incremental_state: Optional[dict[str, Any]] = None,
        features_only: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The logits of the next words.

        Args:
            prev_output_tokens: (B, T), padded on the right.
            encoder_out: The encoder's.
            incremental_state: For decoding step by step: the same dict, empty at first, in every step.
            features_only: Give (B, T, C) instead.

        Returns:
            (B, T, V), of the tokens that ``incremental_state`` has not seen, and ``weights``: of ``regions`` and
            ``attributes``, (layers, B, T, S) each, those that the model reads.
        """
        if encoder_out is None:
            raise ValueError(f"encoder_out must be the encoder's output: {self.model} is no language model")
        kept = None if incremental_state is None else self.get_incremental_state(incremental_state, "decoder")
        steps, state = (0, None) if kept is None else (kept["steps"], kept["state"])
        # Padding is behind all words: what becomes of it no word sees.
        words = embedded(self.embed_tokens, prev_output_tokens[:, steps:])
        features, weights, state = self.advance(words, modalities(encoder_out), state)
        if incremental_state is not None:
            kept = {"steps": prev_output_tokens.shape[1], "state": state}
            self.set_incremental_state(incremental_state, "decoder", kept)
        shown = {SEEN[name]: torch.stack(layers) for name, layers in weights.items()}
        # "attn" would be fairseq's, which takes it for weights of src_tokens.
        return (features if features_only else self.output_layer(features)), {"attn": [None], "weights": shown}

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[EncoderOut] = None,
        incremental_state: Optional[dict[str, Any]] = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B, T) -> (B, T, C), of the tokens that ``incremental_state`` has not seen."""
        return self(prev_output_tokens, encoder_out, incremental_state, features_only=True)[0]

    def output_layer(self, features: Tensor, **kwargs: Any) -> Tensor:
        """(B, T, C) -> (B, T, V)."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        """Words of a caption at most."""
        return self.max_target_positions

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Follow the beam."""
        kept = self.get_incremental_state(incremental_state, "decoder")
        if kept is not None:
            state = reordered(kept["state"], new_order)
            self.set_incremental_state(incremental_state, "decoder", {"steps": kept["steps"], "state": state})


class FusingModel(CaptionerModel):
    """A :class:`ProjectingEncoder` and a decoder.

    Attributes:
        decoder_type: Of the options, the dictionary and the embeddings.
        defaults: Of all options.
    """

    decoder_type: ClassVar[type[CaptionerDecoder]]
    defaults: ClassVar[dict[str, Any]]

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> CaptionerModel:
        """Build the model for the task's dictionary and region features.

        Raises:
            ValueError: the options do not fit each other or the task.
        """
        cfg = complete(cfg, cls.defaults)
        check_task(cfg, task, str(cfg.fusion))
        dictionary = task.target_dictionary
        embed_tokens = word_embeddings(dictionary, cfg.embed_dim)
        encoder = ProjectingEncoder(cfg, dictionary, embed_tokens, visual_dim_of(task))
        model = cls(encoder, cls.decoder_type(cfg, dictionary, embed_tokens))
        model.regions_path = getattr(task.regions, "path", None)
        return model
