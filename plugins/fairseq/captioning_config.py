"""Options of the task ``captioning``."""

# ruff: noqa: UP045  fairseq reads the types of the fields: not as X | None
from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from omegaconf import MISSING


@dataclass
class CaptioningConfig(FairseqDataclass):
    """Options of the task ``captioning``."""

    data: str = field(default=MISSING, metadata={"help": "folder of the files below"})
    splits: Optional[str] = field(
        default=None, metadata={"help": "file with the split of each image, in Karpathy's format (DATA/splits.json)"}
    )
    captions: Optional[str] = field(
        default=None,
        metadata={
            "help": "captions in COCO format, several files separated by colons (DATA/captions.json; if it does not "
            "exist, the captions in the file of splits)"
        },
    )
    regions: Optional[str] = field(
        default=None,
        metadata={
            "help": "region features of all images: DATA/regions.hdf5 (ours and Meshed-Memory Transformer's) or .tsv "
            "(bottom-up-attention)"
        },
    )
    attributes: Optional[str] = field(
        default=None,
        metadata={
            "help": 'attributes of all images, {"image id": [["word", probability], ...]} (DATA/attributes.json)'
        },
    )
    dictionary: Optional[str] = field(
        default=None, metadata={"help": "vocabulary, created if it does not exist (DATA/dict.txt)"}
    )
    min_word_count: int = field(
        default=5, metadata={"help": "minimum number of occurrences in the training captions for a new dictionary"}
    )
    max_attributes: int = field(default=20, metadata={"help": "maximum attributes per image, the most probable ones"})
    oracle_attributes: bool = field(
        default=False,
        metadata={
            "help": "take an image's attributes from its own captions: those of the 1000 most frequent words that "
            "occur in most of its captions"
        },
    )
    one_caption_per_image: bool = field(
        default=False,
        metadata={"help": "use one training sample per image, not per caption (for --criterion self_critical)"},
    )
    results_json: Optional[str] = field(
        default=None,
        metadata={"help": 'fairseq-generate: write [{"image_id", "caption"}, ...] to this file, in COCO format'},
    )
