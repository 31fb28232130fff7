"""Shared parts of the captioners of the task ``captioning``: options, embeddings and base classes.

Shapes: B images, C channels, T words, Sv regions of D channels, Ss attributes, V words of the dictionary.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
import math
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqEncoder, FairseqEncoderDecoderModel, FairseqIncrementalDecoder
from omegaconf import OmegaConf
from torch import Tensor, nn

from ..modules.captioning.entangled_attention import Modality
from ..modules.common.sequence_cache import reordered

EncoderOut = dict[str, list[Tensor]]
SEEN = {"visual": "regions", "semantic": "attributes"}  # names of the returned weights, by modality


@dataclass
class CaptionerConfig(FairseqDataclass):
    """Options of every captioner."""

    # None leaves a size to the architecture, also in hydra.
    embed_dim: Optional[int] = field(default=None, metadata={"help": "channels of words (base: 512)"})
    dropout: float = field(default=0.1, metadata={"help": "dropout of words and of layer outputs"})
    share_decoder_input_output_embed: bool = field(
        default=False, metadata={"help": "use the word embeddings as the weights of the classifier"}
    )
    max_target_positions: int = field(default=256, metadata={"help": "maximum words of a caption, including its end"})


class CaptionerModel(FairseqEncoderDecoderModel):
    """Base model of captioners of the task ``captioning``.

    Attributes:
        encoder_type: Class of the encoder, created from the options, the dictionary, the embeddings and the number of
            region channels, which is None without regions.
        decoder_type: Class of the decoder, created from the same.
        defaults: Default values of all options.
        regions_path: Path of the region features that the model was built for.
        region_weight: Name of a parameter whose second axis is the regions' channels.
    """

    encoder_type: ClassVar[Any]
    decoder_type: ClassVar[Any]
    defaults: ClassVar[dict[str, Any]]
    regions_path: Any = None
    region_weight = "encoder.projection.weight"

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "CaptionerModel":
        """Build the model for the task's dictionary and region features.

        Raises:
            ValueError: The options are inconsistent or do not fit the task.
        """
        cfg = complete(cfg, cls.defaults)
        cls.check_task(cfg, task)
        dictionary, regions = task.target_dictionary, getattr(task, "regions", None)
        parts = dictionary, word_embeddings(dictionary, cfg.embed_dim), None if regions is None else regions.feature_dim
        model = cls(cls.encoder_type(cfg, *parts), cls.decoder_type(cfg, *parts))
        model.regions_path = getattr(regions, "path", None)
        return model

    @classmethod
    def check_task(cls, cfg: Any, task: Any) -> None:
        """Check that the task provides the modalities that the model reads, and that a caption may have a word."""
        fusion = str(cfg.fusion)
        if fusion != "semantic" and getattr(task, "regions", None) is None:
            raise ValueError(f"--fusion {fusion} needs region features: give --regions, or --fusion semantic")
        if fusion != "visual" and not getattr(task, "has_attributes", False):
            raise ValueError(f"--fusion {fusion} needs attributes: give --attributes, or --fusion visual")
        if cfg.max_target_positions < 2:
            raise ValueError(f"--max-target-positions must be at least 2, got {cfg.max_target_positions}")

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor],
        prev_output_tokens: Tensor,
        regions: Optional[Tensor] = None,
        regions_padding_mask: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the logits of a batch of the task; for shapes see the encoder and the decoder.

        Args:
            src_tokens: (B, Ss), attributes.
            src_lengths: Unused.
            prev_output_tokens: (B, T), or (kB, T) with k consecutive captions of each image, which is encoded once.
            regions: (B, Sv, D).
            regions_padding_mask: (B, Sv) bool, True for padding; None if there is none.
            **kwargs: Ignored.

        Returns:
            Logits (B, T, V) or (kB, T, V).
        """
        encoder_out = self.encoder(src_tokens, src_lengths, regions, regions_padding_mask)
        images, captions = len(src_tokens), len(prev_output_tokens)
        if captions != images:
            if captions % images:
                raise ValueError(f"prev_output_tokens must have a multiple of {images} rows, got {captions} rows")
            rows = torch.arange(images, device=src_tokens.device).repeat_interleave(captions // images)
            encoder_out = self.encoder.reorder_encoder_out(encoder_out, rows)
        return self.decoder(prev_output_tokens, encoder_out)

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint.

        Raises:
            ValueError: The checkpoint was made with other region features, another dictionary or other options.
        """
        own = self.state_dict()
        for name, axis, what in (
            (self.region_weight, 1, f"channels per region; those of {self.regions_path} have"),
            ("encoder.embed_tokens.weight", 0, "words; the task's dictionary has"),
        ):
            sizes = [weights[name].shape[axis] if name in weights else 0 for weights in (state_dict, own)]
            if sizes[0] != sizes[1] and all(sizes):
                raise ValueError(f"the checkpoint has {sizes[0]} {what} {sizes[1]}")
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            raise ValueError(f"the checkpoint was made with other options than this model: {error}") from error


class ModalitiesEncoder(FairseqEncoder):
    """Base class of encoders; subclasses implement ``encode``.

    Args:
        dictionary: Dictionary of attributes.
        embed_tokens: The decoder's word embeddings.
        fusion: ``visual`` and ``semantic`` models read only that modality.
    """

    def __init__(self, dictionary: Any, embed_tokens: nn.Embedding, fusion: str) -> None:
        super().__init__(dictionary)
        self.fusion, self.embed_tokens = fusion, embed_tokens

    def encode(
        self, src_tokens: Tensor, regions: Optional[Tensor], regions_padding_mask: Optional[Tensor]
    ) -> tuple[Optional[Modality], Optional[Modality]]:
        """Encode regions and attributes; the result is None for a modality that the model does not read."""
        raise NotImplementedError

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,
        regions: Optional[Tensor] = None,
        regions_padding_mask: Optional[Tensor] = None,
    ) -> EncoderOut:
        """Encode a batch.

        Args:
            src_tokens: (B, Ss), attributes.
            src_lengths: Unused.
            regions: (B, Sv, D).
            regions_padding_mask: (B, Sv) bool, True for padding; None if there is none.

        Returns:
            Lists ``visual`` and ``semantic`` of at most one tensor (B, S, C), and ``..._padding_mask`` (B, S).
        """
        if self.fusion != "semantic":
            if regions is None:
                raise ValueError("regions must be in net_input of a model that reads them")
            regions = regions.to(self.embed_tokens.weight.dtype)  # fairseq-generate --fp16 converts only models
        encoder_out: EncoderOut = {}
        for name, modality in zip(SEEN, self.encode(src_tokens, regions, regions_padding_mask)):
            encoder_out[name] = [] if modality is None else [modality.features]
            mask = None if modality is None else modality.padding_mask
            encoder_out[f"{name}_padding_mask"] = [] if mask is None else [mask]
        return encoder_out

    def attributes(self, src_tokens: Tensor) -> Modality:
        """Return the attributes' embeddings and padding mask."""
        return Modality(embedded(self.embed_tokens, src_tokens), src_tokens.eq(self.dictionary.pad()))

    def reorder_encoder_out(self, encoder_out: EncoderOut, new_order: Tensor) -> EncoderOut:
        """Reorder the batch to follow the beam."""
        return {name: [x.index_select(0, new_order) for x in parts] for name, parts in encoder_out.items()}

    def max_positions(self) -> int:
        """Return a bound that any number of regions satisfies."""
        return int(1e6)


class StepwiseDecoder(FairseqIncrementalDecoder):
    """Base class of decoders; subclasses implement ``advance`` and create the ``classifier`` ``output_projection``.

    Args:
        cfg: The options.
        dictionary: Dictionary of captions.
        embed_tokens: The word embeddings.
    """

    model = "a captioner"

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(dictionary)
        self.embed_tokens, self.max_target_positions = embed_tokens, cfg.max_target_positions

    def embed(self, tokens: Tensor, steps: int) -> Tensor:
        """Embed the tokens (B, T) after the first ``steps`` of them, (B, T - steps, C)."""
        return embedded(self.embed_tokens, tokens[:, steps:])

    def start(self) -> Any:
        """Return the state before the first step of step-by-step decoding."""
        return None

    def advance(
        self, words: Tensor, memory: dict[str, Modality], state: Any
    ) -> tuple[Tensor, dict[str, list[Tensor]], Any]:
        """Continue decoding after ``state``: :meth:`start` at first, None for a pass over whole captions.

        Args:
            words: (B, T, C), embedded.
            memory: The encoded modalities.
            state: As ``reorder`` takes it: tensors with the batch as first axis, or nested tuples of them.

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
        steps, state = 0, None
        if incremental_state is not None:
            kept = self.get_incremental_state(incremental_state, "decoder")
            steps, state = (0, self.start()) if kept is None else (kept["steps"], kept["state"])
        # Padding follows all words, so its features do not affect any word.
        features, weights, state = self.advance(self.embed(prev_output_tokens, steps), modalities(encoder_out), state)
        if incremental_state is not None:
            kept = {"steps": prev_output_tokens.shape[1], "state": state}
            self.set_incremental_state(incremental_state, "decoder", kept)
        shown = {SEEN[name]: torch.stack(layers) for name, layers in weights.items()}
        # The key "attn" is not used, because fairseq reads it as weights of src_tokens.
        return (features if features_only else self.output_layer(features)), {"attn": None, "weights": shown}

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

    def reorder(self, state: Any, order: Tensor) -> Any:
        """Return the state with row i of the batch taken from row ``order[i]``."""
        return reordered(state, order)

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Reorder the state to follow the beam."""
        kept = self.get_incremental_state(incremental_state, "decoder")
        if kept is not None:
            state = self.reorder(kept["state"], new_order)
            self.set_incremental_state(incremental_state, "decoder", {"steps": kept["steps"], "state": state})


def complete(options: Any, defaults: dict[str, Any]) -> Namespace:
    """Return all options; those that hydra or a Python caller did not set get their defaults."""
    given: Any = OmegaConf.to_container(options, resolve=True) if OmegaConf.is_config(options) else vars(options)
    return Namespace(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


def set_sizes(args: Namespace, sizes: dict[str, int]) -> None:
    """Set an architecture's sizes for options that are not given."""
    for name, value in sizes.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def word_embeddings(dictionary: Any, embed_dim: int) -> nn.Embedding:
    """Create word embeddings, which ``embedded`` scales to a variance of 1."""
    if embed_dim < 1:
        raise ValueError(f"--embed-dim must be at least 1, got {embed_dim}")
    embed_tokens = nn.Embedding(len(dictionary), embed_dim, dictionary.pad())
    nn.init.normal_(embed_tokens.weight, std=embed_dim**-0.5)
    nn.init.zeros_(embed_tokens.weight[dictionary.pad()])
    return embed_tokens


def classifier(cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> nn.Linear:
    """Create the layer from C channels to the logits of V words, which may share the embeddings' weights."""
    layer = nn.Linear(cfg.embed_dim, len(dictionary), bias=not cfg.share_decoder_input_output_embed)
    if cfg.share_decoder_input_output_embed:
        layer.weight = embed_tokens.weight
    else:
        nn.init.normal_(layer.weight, std=cfg.embed_dim**-0.5)
        nn.init.zeros_(layer.bias)
    return layer


def embedded(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """Return the embeddings of tokens times √C, (B, T) -> (B, T, C)."""
    return math.sqrt(embedding.embedding_dim) * embedding(tokens)


def modalities(encoder_out: EncoderOut) -> dict[str, Modality]:
    """Return the encoded modalities by name."""
    return {
        name: Modality(encoder_out[name][0], next(iter(encoder_out[f"{name}_padding_mask"]), None))
        for name in SEEN
        if encoder_out[name]
    }
