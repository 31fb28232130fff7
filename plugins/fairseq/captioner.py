"""What all captioners of the task ``captioning`` share: embeddings, checks, the model around encoder and decoder.

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

from ..modules.entangled_attention import Modality

EncoderOut = dict[str, list[Tensor]]
MODALITIES = ("visual", "semantic")


class CaptionerModel(FairseqEncoderDecoderModel):
    """Regions, attributes or both to a caption.

    Attributes:
        regions_path: Of the region features that it is built for.
        region_weight: A parameter whose second axis has the regions' channels.
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
        """Logits of a batch of the task; shapes as of encoder and decoder.

        Args:
            prev_output_tokens: (B, T), or (kB, T), k captions of each image in turn: images are encoded once.

        Returns:
            (B, T, V) or (kB, T, V).
        """
        encoder_out = self.encoder(src_tokens, src_lengths, regions, regions_padding_mask)
        images, captions = len(src_tokens), len(prev_output_tokens)
        if captions != images:
            if captions % images:
                raise ValueError(f"prev_output_tokens must be of a multiple of {images} images, got {captions} rows")
            rows = torch.arange(images, device=src_tokens.device).repeat_interleave(captions // images)
            encoder_out = self.encoder.reorder_encoder_out(encoder_out, rows)
        return self.decoder(prev_output_tokens, encoder_out)

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As fairseq's.

        Raises:
            ValueError: the checkpoint is of other region features, another dictionary or other options.
        """
        own = self.state_dict()
        for name, axis, what in (
            (self.region_weight, 1, f"channels a region; those of {self.regions_path} have"),
            ("encoder.embed_tokens.weight", 0, "words; the task's dictionary has"),
        ):
            sizes = [weights[name].shape[axis] if name in weights else 0 for weights in (state_dict, own)]
            if sizes[0] != sizes[1] and all(sizes):
                raise ValueError(f"the checkpoint is of {sizes[0]} {what} {sizes[1]}")
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            raise ValueError(f"the checkpoint is of other options than this model: {error}") from error


class ModalitiesEncoder(FairseqEncoder):
    """The encoder's interface; ``encode`` is a model's own.

    Args:
        dictionary: Of attributes.
        embed_tokens: The decoder's word embeddings.
        fusion: ``visual`` and ``semantic`` models read that modality alone.
        named: What the error calls a model that lacks its regions.
    """

    def __init__(self, dictionary: Any, embed_tokens: nn.Embedding, fusion: str, named: str = "") -> None:
        super().__init__(dictionary)
        self.fusion, self.embed_tokens, self.named = fusion, embed_tokens, named or f"with --fusion {fusion}"

    def encode(
        self, src_tokens: Tensor, regions: Optional[Tensor], regions_padding_mask: Optional[Tensor]
    ) -> tuple[Optional[Modality], Optional[Modality]]:
        """What becomes of regions and attributes; None for what the model does not read."""
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
            src_lengths: Not needed.
            regions: (B, Sv, D).
            regions_padding_mask: (B, Sv) bool, True for padding; None: there is none.

        Returns:
            ``visual`` and ``semantic``, (B, S, C) each, and ``..._padding_mask``, (B, S), as lists of one or none.
        """
        if self.fusion != "semantic":
            if regions is None:
                raise ValueError(f"regions must be in net_input {self.named}")
            regions = regions.to(self.embed_tokens.weight.dtype)  # fairseq-generate --fp16 converts models alone
        found: EncoderOut = {}
        for name, modality in zip(MODALITIES, self.encode(src_tokens, regions, regions_padding_mask)):
            found[name] = [] if modality is None else [modality.features]
            mask = None if modality is None else modality.padding_mask
            found[f"{name}_padding_mask"] = [] if mask is None else [mask]
        return found

    def attributes(self, src_tokens: Tensor) -> Modality:
        """The embeddings of attributes, and which are padding."""
        return Modality(embedded(self.embed_tokens, src_tokens), src_tokens.eq(self.dictionary.pad()))

    def reorder_encoder_out(self, encoder_out: EncoderOut, new_order: Tensor) -> EncoderOut:
        """Follow the beam."""
        return {name: [x.index_select(0, new_order) for x in parts] for name, parts in encoder_out.items()}

    def max_positions(self) -> int:
        """Any number of regions."""
        return int(1e6)


def complete(options: Any, defaults: dict[str, Any]) -> Namespace:
    """All options; what hydra or a Python caller has not given has its default."""
    given: Any = OmegaConf.to_container(options, resolve=True) if OmegaConf.is_config(options) else vars(options)
    return Namespace(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


def set_sizes(args: Namespace, sizes: dict[str, int]) -> None:
    """Give an architecture's sizes to what the command line has not given."""
    for name, value in sizes.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def check_task(cfg: Any, task: Any, fusion: str) -> None:
    """Check that the task has what the model reads.

    Raises:
        ValueError: it has not, or captions would have no words.
    """
    if fusion != "semantic" and getattr(task, "regions", None) is None:
        raise ValueError(f"--fusion {fusion} needs region features: give --regions, or --fusion semantic")
    if fusion != "visual" and not getattr(task, "has_attributes", False):
        raise ValueError(f"--fusion {fusion} needs attributes: give --attributes, or --fusion visual")
    if cfg.max_target_positions < 2:
        raise ValueError(f"--max-target-positions must be at least 2, got {cfg.max_target_positions}")


def visual_dim_of(task: Any) -> Optional[int]:
    """D; None: the task has no regions."""
    regions = getattr(task, "regions", None)
    return None if regions is None else regions.feature_dim


def word_embeddings(dictionary: Any, embed_dim: int) -> nn.Embedding:
    """Of the dictionary's words, which ``embedded`` brings to a variance of 1."""
    if embed_dim < 1:
        raise ValueError(f"--embed-dim must be at least 1, got {embed_dim}")
    embed_tokens = nn.Embedding(len(dictionary), embed_dim, dictionary.pad())
    nn.init.normal_(embed_tokens.weight, std=embed_dim**-0.5)
    nn.init.zeros_(embed_tokens.weight[dictionary.pad()])
    return embed_tokens


def classifier(cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> nn.Linear:
    """From C channels to the logits of V words, by the embeddings where they are shared."""
    layer = nn.Linear(cfg.embed_dim, len(dictionary), bias=not cfg.share_decoder_input_output_embed)
    if cfg.share_decoder_input_output_embed:
        layer.weight = embed_tokens.weight
    else:
        nn.init.normal_(layer.weight, std=cfg.embed_dim**-0.5)
        nn.init.zeros_(layer.bias)
    return layer


def embedded(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """√C times the embeddings, (B, T) -> (B, T, C)."""
    return math.sqrt(embedding.embedding_dim) * embedding(tokens)


def modality(encoder_out: EncoderOut, name: str) -> Modality:
    """A fusion that looks at the other one alone does not read it."""
    features, mask = encoder_out[name], encoder_out[f"{name}_padding_mask"]
    return Modality(features[0] if features else torch.empty(0), mask[0] if mask else None)


def modalities(encoder_out: EncoderOut) -> dict[str, Modality]:
    """Those that the encoder gives, by name."""
    return {name: modality(encoder_out, name) for name in MODALITIES if encoder_out[name]}
