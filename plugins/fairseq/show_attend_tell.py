"""``show_attend_tell``: an LSTM with soft attention over the cells of a grid, of the task ``captioning``.

Xu et al. 2015, as the lecture has it ("Image Captioning"): the decoder is :class:`attn_plugins.modules.ShowAttendTell`,
and what it attends to are the features as they are in the file. The criterion ``doubly_stochastic_cross_entropy`` has
the paper's regularisation. Any regions serve, a grid's cells (``extract_regions --grid``) or those of a detector.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.models import register_model, register_model_architecture
from torch import Tensor, nn

from ..modules import Modality, ShowAttendTell
from ..modules.show_attend_tell import ShowAttendTellState
from .captioner import (
    CaptionerModel,
    ModalitiesEncoder,
    check_task,
    complete,
    set_sizes,
    visual_dim_of,
    word_embeddings,
)
from .plain_captioner import CaptionerConfig, CaptionerDecoder

BASE = {"embed_dim": 512, "hidden_dim": 512, "attention_dim": 512}


@dataclass
class ShowAttendTellConfig(CaptionerConfig):
    """Options of the model."""

    hidden_dim: Optional[int] = field(default=None, metadata={"help": "channels of the LSTM (base: 512)"})
    attention_dim: Optional[int] = field(
        default=None, metadata={"help": "hidden layer of the attention's network (base: 512)"}
    )


class GridEncoder(ModalitiesEncoder):
    """The features as they are."""

    def encode(
        self, src_tokens: Tensor, regions: Optional[Tensor], regions_padding_mask: Optional[Tensor]
    ) -> tuple[Optional[Modality], Optional[Modality]]:
        """Regions alone."""
        assert regions is not None
        return Modality(regions, regions_padding_mask), None


class ShowAttendTellDecoder(CaptionerDecoder):
    """Words through :class:`ShowAttendTell`."""

    model = "show_attend_tell"

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, visual_dim: int) -> None:
        super().__init__(cfg, dictionary, embed_tokens)
        self.lstm = ShowAttendTell(cfg.embed_dim, visual_dim, cfg.hidden_dim, cfg.attention_dim, cfg.dropout)

    def advance(
        self, words: Tensor, memory: dict[str, Modality], state: Optional[ShowAttendTellState]
    ) -> tuple[Tensor, dict[str, list[Tensor]], ShowAttendTellState]:
        """As :class:`CaptionerDecoder` has it."""
        features, alignment, state = self.lstm(words, *memory["visual"], state)
        return features, {"visual": [alignment]}, state


@register_model("show_attend_tell", dataclass=ShowAttendTellConfig)
class ShowAttendTellModel(CaptionerModel):
    """Regions to a caption; ``--arch`` names below, or hydra's ``model._name``."""

    region_weight = "decoder.lstm.first_hidden.weight"

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "ShowAttendTellModel":
        """Build the model for the task's dictionary and region features.

        Raises:
            ValueError: the options do not fit each other or the task.
        """
        cfg = complete(cfg, {**vars(ShowAttendTellConfig()), **BASE})
        visual_dim = visual_dim_of(task)
        if visual_dim is None:
            raise ValueError("show_attend_tell needs region features: give --regions")
        check_task(cfg, task, "visual")
        dictionary = task.target_dictionary
        embed_tokens = word_embeddings(dictionary, cfg.embed_dim)
        encoder = GridEncoder(dictionary, embed_tokens, "visual", "of show_attend_tell")
        model = cls(encoder, ShowAttendTellDecoder(cfg, dictionary, embed_tokens, visual_dim))
        model.regions_path = getattr(task.regions, "path", None)
        return model


@register_model_architecture("show_attend_tell", "show_attend_tell_tiny")
def show_attend_tell_tiny(args: Namespace) -> None:
    """64 channels of words, 128 of the LSTM and of the attention: minutes on a CPU."""
    set_sizes(args, {"embed_dim": 64, "hidden_dim": 128, "attention_dim": 128})
