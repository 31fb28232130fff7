"""``eta_transformer``: the ETA-Transformer for image captioning (Thesis, chapter 2), of the task ``captioning``.

The blocks are those of :mod:`attn_plugins.modules`; here are embeddings, positions, options and fairseq's interfaces.
The semantic encoder and the decoder share their word embeddings, and only the decoder has positions.

Shapes: B images, C channels, T words, Sv regions of D channels, Ss attributes, V words of the dictionary.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
import math
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import (
    FairseqEncoder,
    FairseqEncoderDecoderModel,
    FairseqIncrementalDecoder,
    register_model,
    register_model_architecture,
)
from fairseq.modules import SinusoidalPositionalEmbedding
from omegaconf import OmegaConf
from torch import Tensor, nn

from ..modules import SequenceCache
from ..modules.entangled_attention import ACTIVATIONS, Modality
from ..modules.eta_transformer import FUSIONS, DualWayEncoder, MultimodalDecoderBlock, reorder_caches

EncoderOut = dict[str, list[Tensor]]
Caches = list[dict[str, SequenceCache]]
BASE = {"embed_dim": 512, "layers": 6, "heads": 8, "ffn_dim": 2048}  # the thesis' (section 2.5.2)


@dataclass
class EtaTransformerConfig(FairseqDataclass):
    """Options of the model."""

    # None leaves a size to the architecture, in hydra too.
    embed_dim: Optional[int] = field(
        default=None, metadata={"help": "channels of words and of what regions are projected to (base: 512)"}
    )
    layers: Optional[int] = field(
        default=None, metadata={"help": "blocks of the decoder, and of each of both encoders (base: 6)"}
    )
    heads: Optional[int] = field(default=None, metadata={"help": "heads of every attention (base: 8)"})
    ffn_dim: Optional[int] = field(default=None, metadata={"help": "channels within feed-forward layers (base: 2048)"})
    dropout: float = field(default=0.1, metadata={"help": "of attention weights, of what layers add, of inputs"})
    fusion: ChoiceEnum(FUSIONS) = field(  # type: ignore[valid-type]
        default="entangled",
        metadata={
            "help": "how the decoder looks at regions and attributes: the thesis' way, one of Table 2.5's others, or "
            "at one of the two alone"
        },
    )
    gate_activation: ChoiceEnum(sorted(ACTIVATIONS)) = field(  # type: ignore[valid-type]
        default="identity", metadata={"help": "f of the gate between both (Table 2.6)"}
    )
    no_encoder: bool = field(default=False, metadata={"help": "leave both encoders out (Table 2.4)"})
    share_decoder_input_output_embed: bool = field(
        default=False, metadata={"help": "classify by the word embeddings, without weights of the classifier's own"}
    )
    max_target_positions: int = field(default=256, metadata={"help": "words of a caption at most, with its end"})


class EtaEncoder(FairseqEncoder):
    """Regions and attributes, each through its own encoder; of a model of one modality only that.

    Args:
        cfg: The options.
        dictionary: Of attributes.
        embed_tokens: The decoder's word embeddings.
        visual_dim: D; None: there are no regions.
    """

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: Optional[int]) -> None:
        super().__init__(dictionary)
        self.fusion, self.embed_tokens = str(cfg.fusion), embed_tokens
        layers = 0 if cfg.no_encoder else cfg.layers
        blocks: Any = DualWayEncoder(visual_dim or 1, cfg.embed_dim, layers, cfg.heads, cfg.ffn_dim, cfg.dropout)
        if self.fusion == "semantic":  # what nothing reads would be parameters without a gradient
            blocks.visual = blocks.projection = None
        elif self.fusion == "visual":
            blocks.semantic = None
        self.blocks = blocks

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
        visual = semantic = None
        if self.fusion != "semantic":
            if regions is None:
                raise ValueError(f"regions must be in net_input with --fusion {self.fusion}")
            regions = regions.to(self.embed_tokens.weight.dtype)  # fairseq-generate --fp16 converts models alone
        attributes = _embedded(self.embed_tokens, src_tokens)
        padding = src_tokens.eq(self.dictionary.pad())
        if self.fusion == "visual":
            x = self.blocks.dropout(self.blocks.projection(regions))
            visual = self.blocks.visual(Modality(x, regions_padding_mask))
        elif self.fusion == "semantic":
            semantic = self.blocks.semantic(Modality(self.blocks.dropout(attributes), padding))
        else:
            visual, semantic = self.blocks(regions, attributes, regions_padding_mask, padding)
        found: EncoderOut = {}
        for name, modality in (("visual", visual), ("semantic", semantic)):
            found[name] = [] if modality is None else [modality.features]
            mask = None if modality is None else modality.padding_mask
            found[f"{name}_padding_mask"] = [] if mask is None else [mask]
        return found

    def reorder_encoder_out(self, encoder_out: EncoderOut, new_order: Tensor) -> EncoderOut:
        """Follow the beam."""
        return {name: [x.index_select(0, new_order) for x in parts] for name, parts in encoder_out.items()}

    def max_positions(self) -> int:
        """Any number of regions."""
        return int(1e6)


class EtaDecoder(FairseqIncrementalDecoder):
    """Words, with positions, through blocks that look at both modalities, to the logits of the next word."""

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(dictionary)
        C, pad = cfg.embed_dim, dictionary.pad()
        self.embed_tokens, self.max_target_positions = embed_tokens, cfg.max_target_positions
        self.embed_positions = SinusoidalPositionalEmbedding(C, pad, cfg.max_target_positions + pad + 1)
        self.dropout = nn.Dropout(cfg.dropout)
        options: tuple[Any, ...] = (C, cfg.heads, cfg.ffn_dim, cfg.dropout, str(cfg.fusion), str(cfg.gate_activation))
        self.blocks = nn.ModuleList(MultimodalDecoderBlock(*options) for _ in range(cfg.layers))
        self.output_projection = nn.Linear(C, len(dictionary), bias=not cfg.share_decoder_input_output_embed)
        if cfg.share_decoder_input_output_embed:
            self.output_projection.weight = embed_tokens.weight
        else:
            nn.init.normal_(self.output_projection.weight, std=C**-0.5)
            nn.init.zeros_(self.output_projection.bias)

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
            features_only: Give (B, T, C), of the last block.

        Returns:
            (B, T, V), of the tokens that ``incremental_state`` has not seen.
        """
        features = self.extract_features(prev_output_tokens, encoder_out, incremental_state)
        return (features if features_only else self.output_layer(features)), {"attn": [None]}

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[EncoderOut] = None,
        incremental_state: Optional[dict[str, Any]] = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B, T) -> (B, T, C), of the tokens that ``incremental_state`` has not seen."""
        if encoder_out is None:
            raise ValueError("encoder_out must be the encoder's output: eta_transformer is no language model")
        caches = self._caches(incremental_state)
        start = caches[0]["self_attention"].steps if caches and caches[0] else 0
        x = _embedded(self.embed_tokens, prev_output_tokens[:, start:])
        x = self.dropout(x + self.embed_positions(prev_output_tokens)[:, start:])
        visual, semantic = (_modality(encoder_out, name) for name in ("visual", "semantic"))
        # Padding is behind all words, where causal attention does not look.
        for i, block in enumerate(self.blocks):
            x = block(x, visual, semantic, caches=caches[i] if caches else None)
        return x

    def output_layer(self, features: Tensor, **kwargs: Any) -> Tensor:
        """(B, T, C) -> (B, T, V)."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        """Words of a caption at most."""
        return self.max_target_positions

    def _caches(self, state: Optional[dict[str, Any]]) -> Optional[Caches]:
        """One of each block, made in the first step."""
        if state is None:
            return None
        caches = self.get_incremental_state(state, "caches")
        if caches is None:
            caches = {"blocks": [{} for _ in self.blocks]}
            self.set_incremental_state(state, "caches", caches)
        return caches["blocks"]

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Follow the beam."""
        for caches in self._caches(incremental_state) or ():
            reorder_caches(caches, new_order)


@register_model("eta_transformer", dataclass=EtaTransformerConfig)
class EtaTransformerModel(FairseqEncoderDecoderModel):
    """Regions and attributes to a caption; ``--arch`` names below, or hydra's ``model._name``."""

    regions_path: Any = None

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "EtaTransformerModel":
        """Build the model for the task's dictionary and region features.

        Raises:
            ValueError: the options do not fit each other or the task.
        """
        cfg = _complete(cfg)
        regions = getattr(task, "regions", None)
        fusion = str(cfg.fusion)
        if fusion != "semantic" and regions is None:
            raise ValueError(f"--fusion {fusion} needs region features: give --regions, or --fusion semantic")
        if fusion != "visual" and not getattr(task, "has_attributes", False):
            raise ValueError(f"--fusion {fusion} needs attributes: give --attributes, or --fusion visual")
        if cfg.max_target_positions < 2:
            raise ValueError(f"--max-target-positions must be at least 2, got {cfg.max_target_positions}")
        dictionary = task.target_dictionary
        embed_tokens = nn.Embedding(len(dictionary), cfg.embed_dim, dictionary.pad())
        nn.init.normal_(embed_tokens.weight, std=cfg.embed_dim**-0.5)
        nn.init.zeros_(embed_tokens.weight[dictionary.pad()])
        visual_dim = None if regions is None else regions.feature_dim
        model = cls(EtaEncoder(cfg, dictionary, embed_tokens, visual_dim), EtaDecoder(cfg, dictionary, embed_tokens))
        model.regions_path = getattr(regions, "path", None)
        return model

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
            ("encoder.blocks.projection.weight", 1, f"channels a region; those of {self.regions_path} have"),
            ("encoder.embed_tokens.weight", 0, "words; the task's dictionary has"),
        ):
            sizes = [weights[name].shape[axis] if name in weights else 0 for weights in (state_dict, own)]
            if sizes[0] != sizes[1] and all(sizes):
                raise ValueError(f"the checkpoint is of {sizes[0]} {what} {sizes[1]}")
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            raise ValueError(f"the checkpoint is of other options than this model: {error}") from error


def _complete(options: Any) -> Namespace:
    """All options; what hydra or a Python caller has not given has its default."""
    given: Any = OmegaConf.to_container(options, resolve=True) if OmegaConf.is_config(options) else vars(options)
    values: dict[str, Any] = {**vars(EtaTransformerConfig()), **BASE}
    values.update({name: value for name, value in given.items() if value is not None})
    return Namespace(**values)


def _embedded(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    return math.sqrt(embedding.embedding_dim) * embedding(tokens)


def _modality(encoder_out: EncoderOut, name: str) -> Modality:
    """A fusion that looks at the other one alone does not read it."""
    features, mask = encoder_out[name], encoder_out[f"{name}_padding_mask"]
    return Modality(features[0] if features else torch.empty(0), mask[0] if mask else None)


# --- architectures ----------------------------------------------------------------------------------------------------


@register_model_architecture("eta_transformer", "eta_transformer_tiny")
def eta_transformer_tiny(args: Namespace) -> None:
    """2 layers, 64 channels, 4 heads, 128 hidden: minutes on a CPU."""
    for name, value in {"layers": 2, "embed_dim": 64, "heads": 4, "ffn_dim": 128}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
