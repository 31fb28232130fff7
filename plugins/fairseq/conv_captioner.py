"""``conv_captioner``: convolutional decoder of ConvS2S with attention to regions.

It belongs to the task ``captioning`` and is the "Convolution" row of the thesis' Table 2.4 (Aneja et al. 2018, after
Gehring et al. 2017). A layer, :class:`attn_plugins.modules.GatedConvBlock`, consists of a causal convolution, a gated
linear unit and attention, and processes all words of a caption in parallel in training. There are no position
embeddings: the zero padding before a caption marks its beginning.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from fairseq.models import register_model, register_model_architecture
from torch import Tensor, nn

from ..modules import GatedConvBlock, Modality
from ..modules.captioning.gated_conv import NormalizedConv1d
from .captioner import CaptionerConfig, set_sizes
from .region_captioner import RegionCaptionerModel, RegionDecoder
from .registries import forget

forget(__name__)

BASE = {"embed_dim": 512, "layers": 3, "kernel_size": 5}


@dataclass
class ConvCaptionerConfig(CaptionerConfig):
    """Options of the model ``conv_captioner``."""

    layers: Optional[int] = field(default=None, metadata={"help": "layers of convolution and attention (base: 3)"})
    kernel_size: Optional[int] = field(
        default=None, metadata={"help": "words that a convolution spans, ending with the current one (base: 5)"}
    )


class ConvCaptionerDecoder(RegionDecoder):
    """Decoder of stacked :class:`GatedConvBlock` layers."""

    model = "conv_captioner"

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: int) -> None:
        super().__init__(cfg, dictionary, embed_tokens, visual_dim)
        if cfg.layers < 1:
            raise ValueError(f"--layers must be at least 1, got {cfg.layers}")
        C, options = cfg.embed_dim, (cfg.kernel_size, cfg.dropout)
        self.input_projection = NormalizedConv1d(C, C, gain=1 - cfg.dropout)
        self.layers = nn.ModuleList(GatedConvBlock(C, *options) for _ in range(cfg.layers))
        self.dropout = nn.Dropout(cfg.dropout)

    def advance(
        self, words: Tensor, memory: dict[str, Modality], state: Optional[tuple[Tensor, ...]]
    ) -> tuple[Tensor, dict[str, list[Tensor]], tuple[Tensor, ...]]:
        """Continue after ``state``; see :meth:`StepwiseDecoder.advance`."""
        words = self.dropout(words)
        x, states, alignments = self.input_projection(words), [], []
        for i, layer in enumerate(self.layers):
            x, alignment, own = layer(x, words, *memory["visual"], None if state is None else state[i])
            states.append(own)
            alignments.append(alignment)
        return self.dropout(x), {"visual": alignments}, tuple(states)


@register_model("conv_captioner", dataclass=ConvCaptionerConfig)
class ConvCaptionerModel(RegionCaptionerModel):
    """Captioner with a convolutional decoder; select it by ``--arch`` or hydra's ``model._name``."""

    decoder_type = ConvCaptionerDecoder
    defaults: ClassVar = {**vars(ConvCaptionerConfig()), **BASE, "fusion": "visual"}


@register_model_architecture("conv_captioner", "conv_captioner_tiny")
def conv_captioner_tiny(args: Namespace) -> None:
    """Set sizes that train in minutes on a CPU: 3 layers of 64 channels, kernel size 5."""
    set_sizes(args, {"embed_dim": 64, "layers": 3, "kernel_size": 5})
