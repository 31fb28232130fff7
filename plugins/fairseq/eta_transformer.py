"""``eta_transformer``: the ETA-Transformer for image captioning (Thesis, chapter 2), of the task ``captioning``.

The blocks are those of :mod:`attn_plugins.modules`; here are embeddings, positions, options and fairseq's interfaces.
The semantic encoder and the decoder share their word embeddings, and only the decoder has positions.

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
from ..modules.entangled_attention import ACTIVATIONS, Modality
from ..modules.eta_transformer import FUSIONS, DualWayEncoder, MultimodalDecoderBlock, reorder_caches
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


class EtaEncoder(ModalitiesEncoder):
    """Regions and attributes, each through its own encoder; of a model of one modality only that.

    Args:
        cfg: The options.
        dictionary: Of attributes.
        embed_tokens: The decoder's word embeddings.
        visual_dim: D; None: there are no regions.
    """

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: Optional[int]) -> None:
        super().__init__(dictionary, embed_tokens, str(cfg.fusion))
        layers = 0 if cfg.no_encoder else cfg.layers
        blocks: Any = DualWayEncoder(visual_dim or 1, cfg.embed_dim, layers, cfg.heads, cfg.ffn_dim, cfg.dropout)
        if self.fusion == "semantic":  # what nothing reads would be parameters without a gradient
            blocks.visual = blocks.projection = None
        elif self.fusion == "visual":
            blocks.semantic = None
        self.blocks = blocks

    def encode(
        self, src_tokens: Tensor, regions: Optional[Tensor], regions_padding_mask: Optional[Tensor]
    ) -> tuple[Optional[Modality], Optional[Modality]]:
        """Both, or the one that the model reads."""
        if self.fusion == "visual":
            x = self.blocks.dropout(self.blocks.projection(regions))
            return self.blocks.visual(Modality(x, regions_padding_mask)), None
        attributes, padding = self.attributes(src_tokens)
        if self.fusion == "semantic":
            return None, self.blocks.semantic(Modality(self.blocks.dropout(attributes), padding))
        return self.blocks(regions, attributes, regions_padding_mask, padding)


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
        self.output_projection = classifier(cfg, dictionary, embed_tokens)

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
        x = embedded(self.embed_tokens, prev_output_tokens[:, start:])
        x = self.dropout(x + self.embed_positions(prev_output_tokens)[:, start:])
        visual, semantic = (modality(encoder_out, name) for name in ("visual", "semantic"))
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
class EtaTransformerModel(CaptionerModel):
    """Regions and attributes to a caption; ``--arch`` names below, or hydra's ``model._name``."""

    region_weight = "encoder.blocks.projection.weight"

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "EtaTransformerModel":
        """Build the model for the task's dictionary and region features.

        Raises:
            ValueError: the options do not fit each other or the task.
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
    """2 layers, 64 channels, 4 heads, 128 hidden: minutes on a CPU."""
    set_sizes(args, {"layers": 2, "embed_dim": 64, "heads": 4, "ffn_dim": 128})
