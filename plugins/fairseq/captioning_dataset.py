"""Dataset of the ``captioning`` task: an image's regions and attributes with one of its captions per sample.

Shapes: B samples, Sv regions, Ss attributes, D channels per region, T words including the end.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils

from ..captioning.caption_files import ImageId
from ..captioning.region_features import RegionFeatures


@dataclass
class CaptionedImage:
    """One image of the dataset.

    Attributes:
        image_id: Id in the caption files.
        captions: Word numbers of each caption, without the end; none of an image that is to be captioned.
        references: Text of each caption, including words that are not in the dictionary.
        attributes: Word numbers of the attributes.
        regions: Number of regions.
    """

    image_id: ImageId
    captions: list[list[int]]
    references: list[str]
    attributes: list[int]
    regions: int


class Ragged:
    """Integer rows of unequal lengths, stored in two arrays that workers can share, unlike lists."""

    def __init__(self, rows: Iterable[Sequence[int]]) -> None:
        values, lengths = array("i"), [0]
        for row in rows:
            values.extend(row)
            lengths.append(len(row))
        self.values = torch.tensor(values, dtype=torch.int32)
        self.offsets = np.cumsum(lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of all rows."""
        return np.diff(self.offsets)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.values[self.offsets[i] : self.offsets[i + 1]].long()


class CaptioningDataset(FairseqDataset):
    """Captioning samples, ordered by the number of regions, then of words.

    Args:
        images: All images of a split.
        regions: The images' region features, or None.
        dictionary: Dictionary of captions and attributes.
        training: Use every caption as a sample, in another order each epoch; otherwise every image, with its first
            caption as target.
        one_caption: Use one sample per image in training too.
    """

    def __init__(
        self,
        images: Sequence[CaptionedImage],
        regions: RegionFeatures | None,
        dictionary: Dictionary,
        training: bool = False,
        one_caption: bool = False,
    ) -> None:
        super().__init__()
        self.regions, self.dictionary, self.training = regions, dictionary, training
        self.image_ids = [image.image_id for image in images]
        self.references = [image.references for image in images]
        end = [dictionary.eos()]
        own = [image.captions or [[]] for image in images]
        self.described = all(image.captions for image in images)
        self.captions = Ragged(caption + end for captions in own for caption in captions)
        self.attributes = Ragged(image.attributes for image in images)
        counts = [len(captions) for captions in own]
        self.image_of = np.repeat(np.arange(len(images)), counts)
        firsts = np.cumsum([0, *counts[:-1]])[: len(images)]
        self.samples = np.arange(len(self.image_of)) if training and not one_caption else firsts
        self.lengths = self.captions.lengths[self.samples]
        self.region_counts = np.array([image.regions for image in images], np.int64)[self.image_of[self.samples]]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        caption = int(self.samples[index])
        image = int(self.image_of[caption])
        features = None if self.regions is None else self.regions.features(self.image_ids[image])
        return dict(
            id=index,
            image=image,
            regions=None if features is None else torch.from_numpy(features),
            attributes=self.attributes[image],
            target=self.captions[caption],
        )

    def collater(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collate samples into a batch.

        Returns:
            ``net_input``: ``src_tokens`` (B, Ss) attributes and ``src_lengths`` (B,), ``regions`` (B, Sv, D),
            ``regions_padding_mask`` (B, Sv), or None without padding, ``prev_output_tokens`` (B, T).
            ``target`` (B, T), ``id``, ``image_ids``, ``references`` and the counts that fairseq needs. Padding is on
            the right. If images of the dataset have no captions, ``target`` is None and ``references`` are missing.
        """
        if not samples:
            return {}
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        target = data_utils.collate_tokens([sample["target"] for sample in samples], pad)
        net_input = dict(
            src_tokens=data_utils.collate_tokens([sample["attributes"] for sample in samples], pad),
            src_lengths=torch.tensor([len(sample["attributes"]) for sample in samples]),
            prev_output_tokens=data_utils.collate_tokens(
                [sample["target"] for sample in samples], pad, eos, move_eos_to_beginning=True
            ),
        )
        if self.regions is not None:
            counts = torch.tensor([len(sample["regions"]) for sample in samples])
            net_input["regions"] = torch.nn.utils.rnn.pad_sequence([sample["regions"] for sample in samples], True)
            mask = torch.arange(int(counts.max())) >= counts.unsqueeze(1)
            net_input["regions_padding_mask"] = mask if mask.any() else None
        batch = dict(
            id=torch.tensor([sample["id"] for sample in samples]),
            nsentences=len(samples),
            ntokens=int(target.ne(pad).sum()),
            net_input=net_input,
            target=target if self.described else None,
            image_ids=[self.image_ids[sample["image"]] for sample in samples],
        )
        if self.described:
            batch["references"] = [self.references[sample["image"]] for sample in samples]
        return batch

    def image_id(self, index: int) -> ImageId:
        """Return the image id of a sample."""
        return self.image_ids[self.image_of[self.samples[index]]]

    def num_tokens(self, index: int) -> int:
        """Return the size that ``--max-tokens`` limits: the larger of the numbers of regions and words."""
        return max(self.size(index))

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Return ``num_tokens`` of many samples."""
        return np.maximum(self.region_counts[indices], self.lengths[indices])

    def size(self, index: int) -> tuple[int, int]:
        """Return the numbers of regions and of words, including the end."""
        return int(self.region_counts[index]), int(self.lengths[index])

    def ordered_indices(self) -> np.ndarray:
        """Sort samples by regions, then words; in training, the order of ties is random."""
        indices = np.arange(len(self))
        if self.training:
            np.random.shuffle(indices)  # noqa: NPY002  fairseq seeds this generator
        return indices[np.lexsort((self.lengths[indices], self.region_counts[indices]))]

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> Any:
        """Batch with a multiple of 1, because some fairseq releases silently drop samples for a larger multiple."""
        return super().batch_by_size(indices, max_tokens, max_sentences)
