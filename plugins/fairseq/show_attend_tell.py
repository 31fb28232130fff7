"""``show_attend_tell``: LSTM with soft attention over the cells of a grid, for the task ``captioning``.

The model of Xu et al. 2015 as in the lecture ("Image Captioning"): the decoder, which is
:class:`attn_plugins.modules.ShowAttendTell`, attends to the stored features directly, which
may be those of the cells of a grid (``tools.caption extract --grid``) or of a detector.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from fairseq.models import register_model, register_model_architecture
from torch import Tensor, nn

from ..modules import Modality, ShowAttendTell
from ..modules.captioning.show_attend_tell import ShowAttendTellState
from .captioner import CaptionerConfig, ModalitiesEncoder, set_sizes
from .region_captioner import RegionCaptionerModel, RegionDecoder
from .registries import forget

forget(__name__)

BASE = {"embed_dim": 512, "hidden_dim": 512, "attention_dim": 512}


@dataclass
class ShowAttendTellConfig(CaptionerConfig):
    """Options of the model ``show_attend_tell``."""

    hidden_dim: Optional[int] = field(default=None, metadata={"help": "channels of the LSTM (base: 512)"})
    attention_dim: Optional[int] = field(
        default=None, metadata={"help": "hidden layer of the attention network (base: 512)"}
    )


class GridEncoder(ModalitiesEncoder):
    """Encoder that passes the features on unchanged."""

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: int) -> None:
        super().__init__(dictionary, embed_tokens, "visual")

    def encode(
        self, src_tokens: Tensor, regions: Optional[Tensor], regions_padding_mask: Optional[Tensor]
    ) -> tuple[Optional[Modality], Optional[Modality]]:
        """Return the regions; attributes are not read."""
        assert regions is not None
        return Modality(regions, regions_padding_mask), None


class ShowAttendTellDecoder(RegionDecoder):
    """Decoder based on :class:`ShowAttendTell`."""

    model = "show_attend_tell"

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: int) -> None:
        super().__init__(cfg, dictionary, embed_tokens, visual_dim)
        self.lstm = ShowAttendTell(cfg.embed_dim, visual_dim, cfg.hidden_dim, cfg.attention_dim, cfg.dropout)

    def advance(
        self, words: Tensor, memory: dict[str, Modality], state: Optional[ShowAttendTellState]
    ) -> tuple[Tensor, dict[str, list[Tensor]], ShowAttendTellState]:
        """Continue after ``state``; see :meth:`StepwiseDecoder.advance`."""
        features, alignment, state = self.lstm(words, *memory["visual"], state)
        return features, {"visual": [alignment]}, state


@register_model("show_attend_tell", dataclass=ShowAttendTellConfig)
class ShowAttendTellModel(RegionCaptionerModel):
    """Show, Attend and Tell captioner; select it by ``--arch`` or hydra's ``model._name``."""

    encoder_type, decoder_type = GridEncoder, ShowAttendTellDecoder
    defaults: ClassVar = {**vars(ShowAttendTellConfig()), **BASE, "fusion": "visual"}
    region_weight = "decoder.lstm.first_hidden.weight"


@register_model_architecture("show_attend_tell", "show_attend_tell_tiny")
def show_attend_tell_tiny(args: Namespace) -> None:
    """Set sizes that train in minutes on a CPU: 64 channels of words, 128 in the LSTM and in the attention."""
    set_sizes(args, {"embed_dim": 64, "hidden_dim": 128, "attention_dim": 128})
