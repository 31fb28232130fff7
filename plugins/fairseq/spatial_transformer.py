"""``spatial_transformer``: fairseq's Transformer with a choice of attention at each of its three places.

``--encoder-attention``, ``--decoder-attention`` and ``--cross-attention`` are four bits for the terms ε1 to ε4 of Zhu
et al. (2019). The first two may also be ``dynamic`` (convolution), ``bilateral`` (thesis, section 3.6), ``shaw``
(relative positions of Shaw et al. 2018, for comparison) or ``none``. ``--deformable`` adds a deformable convolution
before each self-attention (Fig. 2c of the paper). The rest is fairseq's Transformer, customised through its build
hooks.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from contextlib import nullcontext
from typing import Any

from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn

from .registries import forget
from .spatial_transformer_attention import IncrementalState, SpatialEncoderAttention, SpatialSelfAttention
from .spatial_transformer_options import SpatialTransformerConfig, checked, pruned_options

forget(__name__)


class SpatialEncoderLayer(TransformerEncoderLayerBase):
    """Encoder layer of fairseq with :class:`SpatialSelfAttention`; ``kernel_size`` is that of this layer, if any."""

    def __init__(self, cfg: TransformerConfig, return_fc: bool = False, kernel_size: int | None = None) -> None:
        self.kernel_size = kernel_size  # set first, because fairseq's constructor builds the attention
        super().__init__(cfg, return_fc)
        _leave_out_empty(self)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        """Build this package's self-attention."""
        return SpatialSelfAttention(cfg, "encoder", self.kernel_size)


class SpatialDecoderLayer(TransformerDecoderLayerBase):
    """Decoder layer of fairseq with this package's attentions; it computes weights only when they are requested."""

    def __init__(self, cfg: TransformerConfig, no_encoder_attn: bool = False, kernel_size: int | None = None) -> None:
        self.kernel_size = kernel_size
        super().__init__(cfg, no_encoder_attn)
        self.need_attn = False
        _leave_out_empty(self)

    def build_self_attention(
        self, embed_dim: int, cfg: TransformerConfig, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        """Build this package's self-attention."""
        return SpatialSelfAttention(cfg, "decoder", self.kernel_size)

    def build_encoder_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        """Build this package's cross-attention."""
        return SpatialEncoderAttention(cfg)

    def make_generation_fast_(self, need_attn: bool = False, **kwargs: Any) -> None:
        """Do nothing: fairseq's method would make every layer compute weights, though those of one are used."""


class SpatialEncoder(TransformerEncoderBase):
    """Encoder of fairseq with :class:`SpatialEncoderLayer`."""

    def __init__(self, cfg: TransformerConfig, dictionary: Any, embed_tokens: nn.Module) -> None:
        self.layers_built = 0
        super().__init__(_of_side(cfg, "encoder"), dictionary, embed_tokens)

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        """Build the next layer."""
        layer = SpatialEncoderLayer(cfg, self.return_fc, cfg.encoder.kernel_sizes[self.layers_built])
        self.layers_built += 1
        return _wrapped(layer, cfg)


class SpatialDecoder(TransformerDecoderBase):
    """Decoder of fairseq with :class:`SpatialDecoderLayer`."""

    def __init__(
        self, cfg: TransformerConfig, dictionary: Any, embed_tokens: nn.Module, no_encoder_attn: bool = False
    ) -> None:
        self.layers_built = 0
        self.need_alignment = True
        super().__init__(_of_side(cfg, "decoder"), dictionary, embed_tokens, no_encoder_attn)

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        """Build the next layer."""
        layer = SpatialDecoderLayer(cfg, no_encoder_attn, cfg.decoder.kernel_sizes[self.layers_built])
        self.layers_built += 1
        return _wrapped(layer, cfg)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: IncrementalState | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute features, without the alignment in training and in generation without ``--print-alignment``."""
        if alignment_layer is None and (self.training or not self.need_alignment):
            alignment_layer = -1  # no layer computes weights
        elif self.training:
            raise ValueError("alignment_layer must be None in training: the alignment has no gradient")
        if encoder_out is not None and incremental_state is None and _unpadded(encoder_out["encoder_padding_mask"]):
            encoder_out = {**encoder_out, "encoder_padding_mask": []}  # an empty mask would slow down every layer
        x, extra = super().extract_features(
            prev_output_tokens, encoder_out, incremental_state, full_context_alignment, alignment_layer, alignment_heads
        )
        if extra["attn"] == [None]:
            extra["attn"] = None  # fairseq's scorer of ensembles adds up whatever a list holds
        return x, extra

    def make_generation_fast_(self, need_attn: Any = False, **kwargs: Any) -> None:
        """Record whether ``--print-alignment`` is given."""
        self.need_alignment = bool(need_attn)


class OwnCheckpoints:
    """Mixin whose error for an incompatible checkpoint fits on one line."""

    def load_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> Any:
        """Load a checkpoint; of a model that ``--...-layers-to-keep`` prunes, ``model_cfg`` then has the options.

        Raises:
            ValueError: The checkpoint belongs to another model.
        """
        kept = pruned_options(model_cfg) if model_cfg is not None else {}
        try:
            with open_dict(model_cfg) if OmegaConf.is_config(model_cfg) else nullcontext():
                for side in ("encoder", "decoder") if kept else ():
                    # fairseq would drop all layers of a side that is not pruned.
                    if hasattr(self, side) and not getattr(model_cfg, f"{side}_layers_to_keep", None):
                        numbers = range(len(getattr(self, side).layers))
                        setattr(model_cfg, f"{side}_layers_to_keep", ",".join(map(str, numbers)))
                result = super().load_state_dict(state_dict, strict, model_cfg, args)  # type: ignore[misc]
                for name, value in kept.items():
                    setattr(model_cfg, name, value)
            return result
        except RuntimeError as error:
            own = self.state_dict()  # type: ignore[attr-defined]
            differ = [name for name in own if name in state_dict and own[name].shape != state_dict[name].shape]
            parts = [("missing:", own.keys() - state_dict.keys()), ("unexpected:", state_dict.keys() - own.keys())]
            differences = [
                f"{what} {', '.join(sorted(names)[:3])}{' ...' if len(names) > 3 else ''}"
                for what, names in (*parts, ("other shapes:", differ))
                if names
            ]
            raise ValueError(
                f"the checkpoint does not fit this model ({'; '.join(differences) or error}): its --arch, "
                "--encoder-attention, --decoder-attention, --cross-attention, --deformable, kernel sizes and "
                "dictionaries must be the same"
            ) from error


@register_model("spatial_transformer", dataclass=SpatialTransformerConfig)
class SpatialTransformerModel(OwnCheckpoints, TransformerModelBase):
    """Transformer of fairseq with a choice of attention; select it by ``--arch`` or hydra's ``model._name``."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add fairseq's options of the Transformer and those of this model."""
        super(TransformerModelBase, cls).add_args(parser)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> SpatialTransformerModel:
        """Build the model from a dataclass, ``DictConfig`` or ``Namespace`` ``cfg``.

        Raises:
            ValueError: The options are inconsistent or do not fit the task.
        """
        cfg = TransformerConfig.from_namespace(checked(cfg, SpatialTransformerConfig))
        if cfg.cross_terms.relative and not cfg.no_cross_attention and _task_sets(task, "left_pad_target"):
            raise ValueError(
                "--left-pad-target must be False with the second or fourth bit of --cross-attention, got "
                f"{cfg.cross_attention}: they count target positions from the left"
            )
        if _task_sets(task, "load_alignments"):
            raise ValueError("--load-alignments must be left out: the alignment of spatial_transformer has no gradient")
        return super().build_model(cfg, task)

    @classmethod
    def build_encoder(cls, cfg: TransformerConfig, src_dict: Any, embed_tokens: nn.Module) -> SpatialEncoder:
        """Build the encoder."""
        return SpatialEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: TransformerConfig, tgt_dict: Any, embed_tokens: nn.Module) -> SpatialDecoder:
        """Build the decoder."""
        return SpatialDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


def _task_sets(task: Any, name: str) -> bool:
    """Return whether a task has an option on: in ``cfg``, or in an old-style task in ``args``, maybe as text."""
    options = [part for part in (getattr(task, "cfg", None), getattr(task, "args", None)) if part is not None]
    return any(str(getattr(part, name, False)) in ("True", "1") for part in options)


def _unpadded(masks: list[Tensor]) -> bool:
    """Return whether nothing is padded, on CPUs; elsewhere False, since looking would wait for the device."""
    return all(mask.device.type == "cpu" and not mask.any() for mask in masks)


def _of_side(cfg: TransformerConfig, side: str) -> TransformerConfig:
    """Set the position embeddings of one side, because fairseq has one switch for both sides."""
    cfg = copy.copy(cfg)
    cfg.no_token_positional_embeddings = getattr(cfg, side).positions == "none" or cfg.no_token_positional_embeddings
    return cfg


def _wrapped(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Apply fairseq's activation checkpointing and parameter sharding if requested."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def _leave_out_empty(layer: Any) -> None:
    """Remove the normalization of an empty self-attention, so that the layer begins with the next sublayer."""
    if layer.self_attn.empty:
        layer.self_attn_layer_norm = nn.Identity()


# --- architectures ----------------------------------------------------------------------------------------------------


@register_model_architecture("spatial_transformer", "spatial_transformer_wmt_en_de")
def spatial_transformer_wmt_en_de(args: Namespace) -> None:
    """Keep the base sizes of ``spatial_transformer``: 6 layers, 512 channels, 8 heads, 2048 hidden."""


@register_model_architecture("spatial_transformer", "spatial_transformer_wmt_en_de_big")
def spatial_transformer_wmt_en_de_big(args: Namespace) -> None:
    """Set the sizes of the big model: 6 layers, 1024 channels, 16 heads, 4096 hidden."""
    default_sizes(args, "encoder", embed_dim=1024, ffn_embed_dim=4096, attention_heads=16)
    default_sizes(args, "decoder", attention_heads=16)


@register_model_architecture("spatial_transformer", "spatial_transformer_iwslt_de_en")
def spatial_transformer_iwslt_de_en(args: Namespace) -> None:
    """Set the IWSLT sizes: 6 layers, 512 channels, 4 heads, 1024 hidden."""
    default_sizes(args, "encoder", ffn_embed_dim=1024, attention_heads=4)
    default_sizes(args, "decoder", attention_heads=4)


@register_model_architecture("spatial_transformer", "spatial_transformer_tiny")
def spatial_transformer_tiny(args: Namespace) -> None:
    """Set sizes that train in minutes on a CPU: 2 layers, 64 channels, 4 heads, 128 hidden."""
    default_sizes(args, "encoder", embed_dim=64, ffn_embed_dim=128, attention_heads=4, layers=2)
    default_sizes(args, "decoder", attention_heads=4, layers=2)


def default_sizes(args: Namespace, side: str, **values: int) -> None:
    """Set an architecture's sizes that the user did not set; other decoder widths follow the encoder's."""
    for name, value in values.items():
        if getattr(args, f"{side}_{name}", None) is None:
            setattr(args, f"{side}_{name}", value)
