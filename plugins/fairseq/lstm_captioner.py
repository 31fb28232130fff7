"""``lstm_captioner``: LSTM with attention to regions, for the task ``captioning``.

The thesis' Table 2.4 compares with an LSTM that its text calls "equipped with visual attention mechanism" (Xu et al.
2015); the table itself cites Karpathy and Fei-Fei (2015) and states no size. This model uses
:class:`attn_plugins.modules.AttendedLSTM`, whose attention to the projected regions feeds the next step.
``show_attend_tell`` is the decoder of Xu et al.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model, register_model_architecture
from torch import Tensor, nn

from ..modules import AttendedLSTM, Modality
from ..modules.sequences.alignment_attention import ALIGNMENT_SCORES
from ..modules.sequences.attended_lstm import AttendedLSTMState
from .captioner import CaptionerConfig, set_sizes
from .region_captioner import RegionCaptionerModel, RegionDecoder
from .registries import forget

forget(__name__)

BASE = {"embed_dim": 512, "layers": 1}


@dataclass
class LSTMCaptionerConfig(CaptionerConfig):
    """Options of the model ``lstm_captioner``."""

    layers: Optional[int] = field(default=None, metadata={"help": "layers of the LSTM (base: 1)"})
    alignment: ChoiceEnum(list(ALIGNMENT_SCORES)) = field(  # type: ignore[valid-type]
        default="additive", metadata={"help": "alignment score of the decoder's state and the regions"}
    )


class LSTMCaptionerDecoder(RegionDecoder):
    """Decoder based on :class:`AttendedLSTM`."""

    model = "lstm_captioner"

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: int) -> None:
        super().__init__(cfg, dictionary, embed_tokens, visual_dim)
        score: Any = str(cfg.alignment)
        self.lstm = AttendedLSTM(cfg.embed_dim, cfg.layers, score, cfg.dropout)

    def advance(
        self, words: Tensor, memory: dict[str, Modality], state: Optional[AttendedLSTMState]
    ) -> tuple[Tensor, dict[str, list[Tensor]], AttendedLSTMState]:
        """Continue after ``state``; see :meth:`StepwiseDecoder.advance`."""
        features, alignment, state = self.lstm(words, *memory["visual"], state)
        return features, {"visual": [alignment]}, state


@register_model("lstm_captioner", dataclass=LSTMCaptionerConfig)
class LSTMCaptionerModel(RegionCaptionerModel):
    """Captioner with an attended LSTM; select it by ``--arch`` or hydra's ``model._name``."""

    decoder_type = LSTMCaptionerDecoder
    defaults: ClassVar = {**vars(LSTMCaptionerConfig()), **BASE, "fusion": "visual"}


@register_model_architecture("lstm_captioner", "lstm_captioner_tiny")
def lstm_captioner_tiny(args: Namespace) -> None:
    """Set sizes that train in minutes on a CPU: one layer of 128 channels."""
    set_sizes(args, {"embed_dim": 128, "layers": 1})
