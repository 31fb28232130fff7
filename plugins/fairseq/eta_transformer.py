"""``eta_transformer``: ETA-Transformer for image captioning (thesis, chapter 2), for the task ``captioning``.

The blocks are in :mod:`attn_plugins.modules`; this file adds embeddings, positions, options and fairseq's interfaces.
The semantic encoder and the decoder share word embeddings, and only the decoder has positions.

Shapes: B images, C channels, T words, Sv regions of D channels, Ss attributes, V words of the dictionary.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model, register_model_architecture
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor, nn

from ..modules import SequenceCache
from ..modules.captioning.entangled_attention import ACTIVATIONS, Modality
from ..modules.captioning.eta_transformer import FUSIONS, DualWayEncoder, MultimodalDecoderBlock, reorder_caches
from .captioner import CaptionerConfig, CaptionerModel, ModalitiesEncoder, StepwiseDecoder, classifier, set_sizes
from .registries import forget

forget(__name__)

Caches = list[dict[str, SequenceCache]]
UNREAD = Modality(torch.empty(0), None)  # of a fusion of the other modality
BASE = {"embed_dim": 512, "layers": 6, "heads": 8, "ffn_dim": 2048}  # thesis, section 2.5.2


@dataclass
class EtaTransformerConfig(CaptionerConfig):
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


class EtaDecoder(StepwiseDecoder):
    """Decoder with positions whose blocks attend to both modalities."""

    model = "eta_transformer"

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: Optional[int]) -> None:
        super().__init__(cfg, dictionary, embed_tokens)
        if cfg.layers < 1:
            raise ValueError(f"--layers must be at least 1, got {cfg.layers}; --no-encoder omits the encoders")
        C, pad = cfg.embed_dim, dictionary.pad()
        self.embed_positions = SinusoidalPositionalEmbedding(C, pad, cfg.max_target_positions + pad + 1)
        self.dropout = nn.Dropout(cfg.dropout)
        options: tuple[Any, ...] = (C, cfg.heads, cfg.ffn_dim, cfg.dropout, str(cfg.fusion), str(cfg.gate_activation))
        self.blocks = nn.ModuleList(MultimodalDecoderBlock(*options) for _ in range(cfg.layers))
        self.output_projection = classifier(cfg, dictionary, embed_tokens)

    def embed(self, tokens: Tensor, steps: int) -> Tensor:
        """Embed tokens and their positions; see :meth:`StepwiseDecoder.embed`."""
        return self.dropout(super().embed(tokens, steps) + self.embed_positions(tokens)[:, steps:])

    def start(self) -> Caches:
        """Return one empty cache per block."""
        return [{} for _ in self.blocks]

    def advance(
        self, words: Tensor, memory: dict[str, Modality], state: Optional[Caches]
    ) -> tuple[Tensor, dict[str, list[Tensor]], Optional[Caches]]:
        """Continue after ``state``, the blocks' caches; see :meth:`StepwiseDecoder.advance`. It returns no weights."""
        visual, semantic = (memory.get(name, UNREAD) for name in ("visual", "semantic"))
        for i, block in enumerate(self.blocks):
            words = block(words, visual, semantic, caches=None if state is None else state[i])
        return words, {}, state

    def reorder(self, state: Caches, order: Tensor) -> Caches:
        """Reorder the caches in place."""
        for caches in state:
            reorder_caches(caches, order)
        return state


@register_model("eta_transformer", dataclass=EtaTransformerConfig)
class EtaTransformerModel(CaptionerModel):
    """ETA-Transformer captioner; select it by ``--arch`` or hydra's ``model._name``."""

    encoder_type, decoder_type = EtaEncoder, EtaDecoder
    defaults: ClassVar = {**vars(EtaTransformerConfig()), **BASE}
    region_weight = "encoder.blocks.projection.weight"


# --- architectures ----------------------------------------------------------------------------------------------------


@register_model_architecture("eta_transformer", "eta_transformer_tiny")
def eta_transformer_tiny(args: Namespace) -> None:
    """Set sizes that train in minutes on a CPU: 2 layers, 64 channels, 4 heads, 128 hidden."""
    set_sizes(args, {"layers": 2, "embed_dim": 64, "heads": 4, "ffn_dim": 128})
