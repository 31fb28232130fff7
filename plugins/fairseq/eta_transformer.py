"""``eta_transformer``: ETA-Transformer for image captioning (thesis, chapter 2), for the task ``captioning``.

The blocks are in :mod:`attn_plugins.modules`; this file adds embeddings, positions, options and fairseq's interfaces.
The semantic encoder and the decoder share word embeddings, and only the decoder has positions.

Shapes: B images, C channels, T words, Sv regions of D channels, Ss attributes, V words of the dictionary.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqIncrementalDecoder, register_model, register_model_architecture
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor, nn

from ..modules import SequenceCache
from ..modules.captioning.entangled_attention import ACTIVATIONS, Modality
from ..modules.captioning.eta_transformer import FUSIONS, DualWayEncoder, MultimodalDecoderBlock, reorder_caches
from .captioner import (
    CaptionerModel,
    EncoderOut,
    ModalitiesEncoder,
    check_task,
    classifier,
    complete,
    embedded,
    modality,
    set_sizes,
    visual_dim_of,
    word_embeddings,
)

Caches = list[dict[str, SequenceCache]]
BASE = {"embed_dim": 512, "layers": 6, "heads": 8, "ffn_dim": 2048}  # thesis, section 2.5.2


@dataclass
class EtaTransformerConfig(FairseqDataclass):
    """Options of the model ``eta_transformer``."""

    # None leaves a size to the architecture, also in hydra.
    embed_dim: Optional[int] = field(
        default=None, metadata={"help": "channels of words and of projected regions (base: 512)"}
    )
    layers: Optional[int] = field(
        default=None, metadata={"help": "blocks in the decoder and in each of the two encoders (base: 6)"}
    )
    heads: Optional[int] = field(default=None, metadata={"help": "heads of every attention (base: 8)"})
    ffn_dim: Optional[int] = field(default=None, metadata={"help": "channels within feed-forward layers (base: 2048)"})
    dropout: float = field(default=0.1, metadata={"help": "dropout of attention weights, residual branches and inputs"})
    fusion: ChoiceEnum(FUSIONS) = field(  # type: ignore[valid-type]
        default="entangled",
        metadata={
            "help": "how the decoder combines regions and attributes: entangled as in the thesis, another fusion of "
            "Table 2.5, or one modality alone"
        },
    )
    gate_activation: ChoiceEnum(sorted(ACTIVATIONS)) = field(  # type: ignore[valid-type]
        default="identity", metadata={"help": "activation f of the gate between both modalities (Table 2.6)"}
    )
    no_encoder: bool = field(default=False, metadata={"help": "omit both encoders (Table 2.4)"})
    share_decoder_input_output_embed: bool = field(
        default=False, metadata={"help": "use the word embeddings as the weights of the classifier"}
    )
    max_target_positions: int = field(default=256, metadata={"help": "maximum words of a caption, including its end"})


class EtaEncoder(ModalitiesEncoder):
    """Separate encoders of regions and attributes; a model of one modality has only that encoder.

    Args:
        cfg: The options.
        dictionary: Dictionary of attributes.
        embed_tokens: The decoder's word embeddings.
        visual_dim: Number of region channels D, or None without regions.
    """

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: Optional[int]) -> None:
        super().__init__(dictionary, embed_tokens, str(cfg.fusion))
        layers = 0 if cfg.no_encoder else cfg.layers
        blocks: Any = DualWayEncoder(visual_dim or 1, cfg.embed_dim, layers, cfg.heads, cfg.ffn_dim, cfg.dropout)
        if self.fusion == "semantic":  # unused blocks would be parameters without a gradient
            blocks.visual = blocks.projection = None
        elif self.fusion == "visual":
            blocks.semantic = None
        self.blocks = blocks

    def encode(
        self, src_tokens: Tensor, regions: Optional[Tensor], regions_padding_mask: Optional[Tensor]
    ) -> tuple[Optional[Modality], Optional[Modality]]:
        """Encode both modalities, or the one that the model reads."""
        if self.fusion == "visual":
            x = self.blocks.dropout(self.blocks.projection(regions))
            return self.blocks.visual(Modality(x, regions_padding_mask)), None
        attributes, padding = self.attributes(src_tokens)
        if self.fusion == "semantic":
            return None, self.blocks.semantic(Modality(self.blocks.dropout(attributes), padding))
        return self.blocks(regions, attributes, regions_padding_mask, padding)


class EtaDecoder(FairseqIncrementalDecoder):
    """Decoder with positions whose blocks attend to both modalities."""

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(dictionary)
        C, pad = cfg.embed_dim, dictionary.pad()
        self.embed_tokens, self.max_target_positions = embed_tokens, cfg.max_target_positions
        self.embed_positions = SinusoidalPositionalEmbedding(C, pad, cfg.max_target_positions + pad + 1)
        self.dropout = nn.Dropout(cfg.dropout)
        options: tuple[Any, ...] = (C, cfg.heads, cfg.ffn_dim, cfg.dropout, str(cfg.fusion), str(cfg.gate_activation))
        self.blocks = nn.ModuleList(MultimodalDecoderBlock(*options) for _ in range(cfg.layers))
        self.output_projection = classifier(cfg, dictionary, embed_tokens)

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
            features_only: Return the features (B, T, C) of the last block instead.
            **kwargs: Ignored.

        Returns:
            Logits (B, T, V) of the tokens that ``incremental_state`` does not hold yet.
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
        """Compute features (B, T, C) of the tokens (B, T) that ``incremental_state`` does not hold yet."""
        if encoder_out is None:
            raise ValueError("encoder_out must be the encoder's output: eta_transformer is not a language model")
        caches = self._caches(incremental_state)
        start = caches[0]["self_attention"].steps if caches and caches[0] else 0
        x = embedded(self.embed_tokens, prev_output_tokens[:, start:])
        x = self.dropout(x + self.embed_positions(prev_output_tokens)[:, start:])
        visual, semantic = (modality(encoder_out, name) for name in ("visual", "semantic"))
        # Padding follows all words, so causal attention never reads it.
        for i, block in enumerate(self.blocks):
            x = block(x, visual, semantic, caches=caches[i] if caches else None)
        return x

    def output_layer(self, features: Tensor, **kwargs: Any) -> Tensor:
        """Compute logits, (B, T, C) -> (B, T, V)."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        """Return the maximum number of words of a caption."""
        return self.max_target_positions

    def _caches(self, state: Optional[dict[str, Any]]) -> Optional[Caches]:
        """Return one cache per block, created in the first step."""
        if state is None:
            return None
        caches = self.get_incremental_state(state, "caches")
        if caches is None:
            caches = {"blocks": [{} for _ in self.blocks]}
            self.set_incremental_state(state, "caches", caches)
        return caches["blocks"]

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Reorder the caches to follow the beam."""
        for caches in self._caches(incremental_state) or ():
            reorder_caches(caches, new_order)


@register_model("eta_transformer", dataclass=EtaTransformerConfig)
class EtaTransformerModel(CaptionerModel):
    """ETA-Transformer captioner; select it by ``--arch`` or hydra's ``model._name``."""

    region_weight = "encoder.blocks.projection.weight"

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "EtaTransformerModel":
        """Build the model for the task's dictionary and region features.

        Raises:
            ValueError: The options are inconsistent or do not fit the task.
        """
        cfg = complete(cfg, {**vars(EtaTransformerConfig()), **BASE})
        check_task(cfg, task, str(cfg.fusion))
        dictionary = task.target_dictionary
        embed_tokens = word_embeddings(dictionary, cfg.embed_dim)
        encoder = EtaEncoder(cfg, dictionary, embed_tokens, visual_dim_of(task))
        model = cls(encoder, EtaDecoder(cfg, dictionary, embed_tokens))
        model.regions_path = getattr(task.regions, "path", None)
        return model


# --- architectures ----------------------------------------------------------------------------------------------------


@register_model_architecture("eta_transformer", "eta_transformer_tiny")
def eta_transformer_tiny(args: Namespace) -> None:
    """Set sizes that train in minutes on a CPU: 2 layers, 64 channels, 4 heads, 128 hidden."""
    set_sizes(args, {"layers": 2, "embed_dim": 64, "heads": 4, "ffn_dim": 128})
