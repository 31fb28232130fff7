"""Shared parts of the captioners of the task ``captioning``: embeddings, checks, encoder interface and base model.

Shapes: B images, C channels, T words, Sv regions of D channels, Ss attributes, V words of the dictionary.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
import math
from argparse import Namespace
from typing import Any, Optional

import torch
from fairseq.models import FairseqEncoder, FairseqEncoderDecoderModel
from omegaconf import OmegaConf
from torch import Tensor, nn

from ..modules.captioning.entangled_attention import Modality

EncoderOut = dict[str, list[Tensor]]
MODALITIES = ("visual", "semantic")


class CaptionerModel(FairseqEncoderDecoderModel):
    """Base model of captioners that read regions, attributes or both.

    Attributes:
        regions_path: Path of the region features that the model was built for.
        region_weight: Name of a parameter whose second axis is the regions' channels.
    """

    regions_path: Any = None
    region_weight = "encoder.projection.weight"

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
        named: Description of the model in the error for missing regions.
    """

    def __init__(self, dictionary: Any, embed_tokens: nn.Embedding, fusion: str, named: str = "") -> None:
        super().__init__(dictionary)
        self.fusion, self.embed_tokens, self.named = fusion, embed_tokens, named or f"with --fusion {fusion}"

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
                raise ValueError(f"regions must be in net_input {self.named}")
            regions = regions.to(self.embed_tokens.weight.dtype)  # fairseq-generate --fp16 converts only models
        found: EncoderOut = {}
        for name, modality in zip(MODALITIES, self.encode(src_tokens, regions, regions_padding_mask)):
            found[name] = [] if modality is None else [modality.features]
            mask = None if modality is None else modality.padding_mask
            found[f"{name}_padding_mask"] = [] if mask is None else [mask]
        return found

    def attributes(self, src_tokens: Tensor) -> Modality:
        """Return the attributes' embeddings and padding mask."""
        return Modality(embedded(self.embed_tokens, src_tokens), src_tokens.eq(self.dictionary.pad()))

    def reorder_encoder_out(self, encoder_out: EncoderOut, new_order: Tensor) -> EncoderOut:
        """Reorder the batch to follow the beam."""
        return {name: [x.index_select(0, new_order) for x in parts] for name, parts in encoder_out.items()}

    def max_positions(self) -> int:
        """Return a bound that any number of regions satisfies."""
        return int(1e6)


def complete(options: Any, defaults: dict[str, Any]) -> Namespace:
    """Return all options; those that hydra or a Python caller did not set get their defaults."""
    given: Any = OmegaConf.to_container(options, resolve=True) if OmegaConf.is_config(options) else vars(options)
    return Namespace(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


def set_sizes(args: Namespace, sizes: dict[str, int]) -> None:
    """Set an architecture's sizes for options that are not given."""
    for name, value in sizes.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def check_task(cfg: Any, task: Any, fusion: str) -> None:
    """Check that the task provides the modalities that the model reads.

    Raises:
        ValueError: A modality is missing, or the length limit leaves no room for words.
    """
    if fusion != "semantic" and getattr(task, "regions", None) is None:
        raise ValueError(f"--fusion {fusion} needs region features: give --regions, or --fusion semantic")
    if fusion != "visual" and not getattr(task, "has_attributes", False):
        raise ValueError(f"--fusion {fusion} needs attributes: give --attributes, or --fusion visual")
    if cfg.max_target_positions < 2:
        raise ValueError(f"--max-target-positions must be at least 2, got {cfg.max_target_positions}")


def visual_dim_of(task: Any) -> Optional[int]:
    """Return the number of region channels D, or None if the task has no regions."""
    regions = getattr(task, "regions", None)
    return None if regions is None else regions.feature_dim


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


def modality(encoder_out: EncoderOut, name: str) -> Modality:
    """Return an encoded modality, or an empty one, which a fusion of the other modality does not read."""
    features, mask = encoder_out[name], encoder_out[f"{name}_padding_mask"]
    return Modality(features[0] if features else torch.empty(0), mask[0] if mask else None)


def modalities(encoder_out: EncoderOut) -> dict[str, Modality]:
    """Return the encoded modalities by name."""
    return {name: modality(encoder_out, name) for name in MODALITIES if encoder_out[name]}
