"""Captioners whose decoder attends to regions and attributes directly, without encoder layers.

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
from ..modules.common.sequence_cache import reordered
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
SEEN = {"visual": "regions", "semantic": "attributes"}  # names of the returned weights


@dataclass
class CaptionerConfig(FairseqDataclass):
    """Options of the captioners without encoder layers."""

    # None leaves a size to the architecture, also in hydra.
    embed_dim: Optional[int] = field(default=None, metadata={"help": "channels of words (base: 512)"})
    dropout: float = field(default=0.1, metadata={"help": "dropout of words and of layer outputs"})
    share_decoder_input_output_embed: bool = field(
        default=False, metadata={"help": "use the word embeddings as the weights of the classifier"}
    )
    max_target_positions: int = field(default=256, metadata={"help": "maximum words of a caption, including its end"})


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


class CaptionerDecoder(FairseqIncrementalDecoder):
    """Base class of decoders; subclasses implement ``advance``.

    Args:
        cfg: The options.
        dictionary: Dictionary of captions.
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
        """Continue decoding after ``state``, which is None at first.

        Args:
            words: (B, T, C), embedded.
            memory: The encoded modalities.
            state: Tensors with the batch as first axis, or nested tuples of them.

        Returns:
            Features (B, T, C), the weights (B, T, S) of each layer by modality, and the new state.
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
        """Compute the logits of the next words.

        Args:
            prev_output_tokens: (B, T), padded on the right.
            encoder_out: Output of the encoder.
            incremental_state: For step-by-step decoding, a dict that is empty at first and passed in every step.
            features_only: Return features (B, T, C) instead of logits.
            **kwargs: Ignored.

        Returns:
            Logits (B, T, V) of the tokens that ``incremental_state`` does not hold yet, and ``weights``: attention
            weights (layers, B, T, S) of ``regions`` and ``attributes``, as far as the model reads them.
        """
        if encoder_out is None:
            raise ValueError(f"encoder_out must be the encoder's output: {self.model} is not a language model")
        kept = None if incremental_state is None else self.get_incremental_state(incremental_state, "decoder")
        steps, state = (0, None) if kept is None else (kept["steps"], kept["state"])
        # Padding follows all words, so its features do not affect any word.
        words = embedded(self.embed_tokens, prev_output_tokens[:, steps:])
        features, weights, state = self.advance(words, modalities(encoder_out), state)
        if incremental_state is not None:
            kept = {"steps": prev_output_tokens.shape[1], "state": state}
            self.set_incremental_state(incremental_state, "decoder", kept)
        shown = {SEEN[name]: torch.stack(layers) for name, layers in weights.items()}
        # The key "attn" is not used, because fairseq reads it as weights of src_tokens.
        return (features if features_only else self.output_layer(features)), {"attn": [None], "weights": shown}

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[EncoderOut] = None,
        incremental_state: Optional[dict[str, Any]] = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute features (B, T, C) of the tokens (B, T) that ``incremental_state`` does not hold yet."""
        return self(prev_output_tokens, encoder_out, incremental_state, features_only=True)[0]

    def output_layer(self, features: Tensor, **kwargs: Any) -> Tensor:
        """Compute logits, (B, T, C) -> (B, T, V)."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        """Return the maximum number of words of a caption."""
        return self.max_target_positions

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Reorder the state to follow the beam."""
        kept = self.get_incremental_state(incremental_state, "decoder")
        if kept is not None:
            state = reordered(kept["state"], new_order)
            self.set_incremental_state(incremental_state, "decoder", {"steps": kept["steps"], "state": state})


class FusingModel(CaptionerModel):
    """Captioner of a :class:`ProjectingEncoder` and a decoder.

    Attributes:
        decoder_type: Class of the decoder, created from the options, the dictionary and the embeddings.
        defaults: Default values of all options.
    """

    decoder_type: ClassVar[type[CaptionerDecoder]]
    defaults: ClassVar[dict[str, Any]]

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> CaptionerModel:
        """Build the model for the task's dictionary and region features.

        Raises:
            ValueError: The options are inconsistent or do not fit the task.
        """
        cfg = complete(cfg, cls.defaults)
        check_task(cfg, task, str(cfg.fusion))
        dictionary = task.target_dictionary
        embed_tokens = word_embeddings(dictionary, cfg.embed_dim)
        encoder = ProjectingEncoder(cfg, dictionary, embed_tokens, visual_dim_of(task))
        model = cls(encoder, cls.decoder_type(cfg, dictionary, embed_tokens))
        model.regions_path = getattr(task.regions, "path", None)
        return model
