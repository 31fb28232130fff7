"""``spatial_transformer_lm``: fairseq's ``transformer_lm`` with the self-attention of ``spatial_transformer``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel

from .registries import forget
from .spatial_transformer import OwnCheckpoints, SpatialDecoder, default_sizes
from .spatial_transformer_options import SpatialTransformerLMConfig, checked

forget(__name__)


@register_model("spatial_transformer_lm", dataclass=SpatialTransformerLMConfig)
class SpatialTransformerLanguageModel(OwnCheckpoints, TransformerLanguageModel):
    """Decoder without cross-attention, with ``--decoder-attention`` and other options of ``spatial_transformer``."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> SpatialTransformerLanguageModel:
        """Build the model with the checks and embeddings of ``transformer_lm``.

        Raises:
            ValueError: The options are inconsistent.
        """
        args = checked(args, SpatialTransformerLMConfig, ("decoder",))
        layers, args.decoder_layers, args.decoder_layers_to_keep = len(args.decoder_kernel_sizes), 0, None
        stock = super().build_model(args, task)  # without layers; this also completes args
        args.decoder_layers = layers
        cfg = TransformerConfig.from_namespace(args)
        return cls(SpatialDecoder(cfg, task.target_dictionary, stock.decoder.embed_tokens, no_encoder_attn=True))


@register_model_architecture("spatial_transformer_lm", "spatial_transformer_lm_tiny")
def spatial_transformer_lm_tiny(args: Namespace) -> None:
    """Set sizes that train in minutes on a CPU: 2 layers, 64 channels, 4 heads, 128 hidden."""
    default_sizes(args, "decoder", embed_dim=64, ffn_embed_dim=128, attention_heads=4, layers=2)
