"""Task ``captioning``: region features and attributes of images, with captions in COCO format.

The data folder holds ``splits.json`` (in Karpathy's format), ``captions.json`` (COCO format; by default the captions of
``splits.json``), ``regions.hdf5`` (or ``.h5``, ``.tsv``) and ``attributes.json``; each has an option for another path.
A model may do without regions or without attributes. Images of the split ``test`` may have no captions: they can be
captioned, not scored. The first process writes a missing ``dict.txt`` atomically: the words that occur at least
``--min-word-count`` times in the training captions. Delete it to rebuild it.
"""

# ruff: noqa: UP045  fairseq reads the types of the fields: not as X | None
import json
import logging
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from fairseq.data import Dictionary
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask, register_task

from ..captioning import files
from ..captioning.caption_files import SPLITS, Captions, ImageId, Words, described_by, read_attributes, read_splits
from ..captioning.region_features import RegionFeatures
from .captioning_config import CaptioningConfig
from .captioning_dataset import CaptionedImage, CaptioningDataset
from .registries import forget

forget(__name__)

logger = logging.getLogger(__name__)
MANY_UNKNOWN = 0.25  # share of a split's words; rare words are 1 % in COCO and more in a small set
UNSUPPORTED = {  # options of generation
    "print_alignment": "whose sources are not sentences",
    "replace_unk": "whose sources are not sentences",
    "retain_dropout": "whose models apply dropout in training only",
}
ORACLE_WORDS = 1000  # the thesis uses the most frequent words as labels (section 2.5.2)


@register_task("captioning", dataclass=CaptioningConfig)
class CaptioningTask(FairseqTask):
    """Image captioning.

    Attributes:
        regions: The region features, or None.
        has_attributes: Whether the images have attributes.
    """

    cfg: CaptioningConfig

    def __init__(self, cfg: CaptioningConfig) -> None:
        super().__init__(cfg)
        for name in ("min_word_count", "max_attributes"):
            if getattr(cfg, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(cfg, name)}")
        if cfg.oracle_attributes and cfg.attributes is not None:
            raise ValueError(f"--oracle-attributes replaces --attributes: give one of them, got {cfg.attributes}")
        regions = self._path("regions", "regions.hdf5", "regions.h5", "regions.tsv", "regions.npz")  # npz for its error
        self.regions = None if regions is None else RegionFeatures(regions)
        self.attributes_file = None if cfg.oracle_attributes else self._path("attributes", "attributes.json")
        self.has_attributes = cfg.oracle_attributes or self.attributes_file is not None
        if self.regions is None and not self.has_attributes:
            raise ValueError(f"{cfg.data} has neither regions nor attributes: give --regions, --attributes or both")
        self.dictionary = self._dictionary()
        self._results: dict[ImageId, str] | None = None

    @classmethod
    def setup_task(cls, cfg: CaptioningConfig, **kwargs: Any) -> "CaptioningTask":
        """Create the task from its options.

        Raises:
            FileNotFoundError: A file does not exist.
            ValueError: An option is out of range, or a file is invalid.
        """
        return cls(cfg)

    @property
    def source_dictionary(self) -> Dictionary:
        """Dictionary of attributes, the same as that of captions."""
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        """Dictionary of captions."""
        return self.dictionary

    @cached_property
    def captions(self) -> dict[str, Captions]:
        """Captions of every image, by the split names of the file."""
        splits = self._path("splits", "splits.json", needed=True)
        assert splits is not None
        if self.cfg.captions is None:
            captions = list(filter(None, [self._path("captions", "captions.json")]))
        else:
            captions = [Path(path) for path in self.cfg.captions.split(":")]
        for path in captions:
            if not path.is_file():
                raise FileNotFoundError(f"--captions: {path} does not exist")
        return read_splits(captions, splits, SPLITS["test"])

    def captions_of(self, split: str) -> Captions:
        """Return the captions of every image of ``train`` (with Karpathy's ``restval``), ``valid`` or ``test``.

        Raises:
            ValueError: The split does not exist or has no image.
        """
        if split not in SPLITS:
            raise ValueError(f"the subset must be one of {', '.join(SPLITS)}, got {split!r}")
        parts = [self.captions.get(name, {}) for name in SPLITS[split]]
        images = {image_id: captions for part in parts for image_id, captions in part.items()}
        if not images:
            raise ValueError(f"no image is in split {' or '.join(SPLITS[split])}; there are {', '.join(self.captions)}")
        return images

    def _path(self, option: str, *names: str, needed: bool = False) -> Optional[Path]:
        """Return the path of ``option``, or the first of ``names`` that exists in the data folder."""
        given = getattr(self.cfg, option)
        folder = Path(self.cfg.data)
        if not folder.is_dir():
            raise FileNotFoundError(f"the data folder {folder} does not exist")
        path = Path(given) if given is not None else next(filter(Path.is_file, (folder / name for name in names)), None)
        if path is None and needed:
            format_of_splits = "; it gives each image its split, in the format of Karpathy's dataset_coco.json"
            how = format_of_splits if option == "splits" else ""
            raise FileNotFoundError(f"--{option}: {folder} has no {' or '.join(names)}{how}")
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"--{option}: {path} does not exist")
        return path

    @property
    def _dictionary_path(self) -> Path:
        return Path(self.cfg.dictionary or Path(self.cfg.data) / "dict.txt")

    def _dictionary(self) -> Dictionary:
        path = self._dictionary_path
        if not path.is_file():
            dictionary = Dictionary()
            for captions in self.captions_of("train").values():
                for word in (word for caption in captions for word in caption):
                    dictionary.add_symbol(word)
            dictionary.finalize(self.cfg.min_word_count, padding_factor=1)
            if len(dictionary) == dictionary.nspecial:
                raise ValueError(f"--min-word-count {self.cfg.min_word_count}: no word occurs that often")
            try:
                files.write(path, lambda partial: dictionary.save(str(partial)))
            except OSError as error:  # such as a read-only folder
                logger.warning(
                    "words are counted at every start: %s cannot be written (%s); --dictionary takes another path",
                    path,
                    error,
                )
        if path.is_file():
            dictionary = Dictionary.load(str(path))
        logger.info("%s: %d words", path, len(dictionary) - dictionary.nspecial)
        return dictionary

    def load_dataset(self, split: str, combine: bool = False, task_cfg: Any = None, **kwargs: Any) -> None:
        """Load the captions and attributes of a split; region features are read on demand.

        Raises:
            FileNotFoundError: A file does not exist.
            ValueError: A file or a sample is invalid.
        """
        captions = self.captions_of(split)
        self._check_dictionary(split, captions)
        images = [self._image(image_id, words) for image_id, words in captions.items()]
        dataset = CaptioningDataset(
            images, self.regions, self.dictionary, training=split == "train", one_caption=self.cfg.one_caption_per_image
        )
        self.datasets[split] = dataset
        logger.info("%s: %d images, %d samples", split, len(images), len(dataset))
        if bare := sum(not image.captions for image in images):
            logger.info("%s: %d images have no captions: they can only be captioned", split, bare)

    def _check_dictionary(self, split: str, captions: Captions) -> None:
        """Warn when many words are unknown, which suggests a dictionary made from other captions."""
        words = Counter(word for own in captions.values() for caption in own for word in caption)
        known = sum(n for word, n in words.items() if self.dictionary.index(word) >= self.dictionary.nspecial)
        if not words:
            return
        share = 1 - known / words.total()
        logger.info("%s: %.1f %% of the words are not in the dictionary", split, 100 * share)
        if share > MANY_UNKNOWN:
            logger.warning(
                "%.0f %% of the words of %s are not in %s: if it was made from other captions, delete it to rebuild it",
                100 * share,
                split,
                self._dictionary_path,
            )

    def _image(self, image_id: ImageId, words: list[Words]) -> CaptionedImage:
        """Convert the words of an image to numbers.

        Raises:
            ValueError: The image has no regions, or no attributes that are in the dictionary.
        """
        count = 0 if self.regions is None else self.regions.count(image_id)
        if self.regions is not None and count == 0:
            raise ValueError(f"{self.regions.path}: image {image_id} has no regions: remove it from the splits")
        numbers = [[self.dictionary.index(word) for word in caption] for caption in words]
        references = [" ".join(caption) for caption in words]
        return CaptionedImage(image_id, numbers, references, self._attributes(image_id, words), count)

    def _attributes(self, image_id: ImageId, captions: list[Words]) -> list[int]:
        if not self.has_attributes:
            return [self.dictionary.eos()]  # the batch size is read from the attributes
        if self.attributes_file is None:
            words, where = described_by(captions, self._oracle_vocabulary, self.cfg.max_attributes), "its captions"
        else:
            words = [word for word, _ in self._attribute_words.get(str(image_id), [])]
            where = str(self.attributes_file)
        return self.attribute_numbers(image_id, words, where)

    def attribute_numbers(self, image_id: ImageId, words: list[str], where: str) -> list[int]:
        """Return the numbers of an image's first attributes in the dictionary; others are left out.

        Raises:
            ValueError: None of ``words``, which are from ``where``, is in the dictionary.
        """
        numbers = [self.dictionary.index(word) for word in words]
        numbers = [number for number in numbers if number >= self.dictionary.nspecial]
        if not numbers:
            raise ValueError(f"{where}: image {image_id} has no attribute that is in the dictionary")
        return numbers[: self.cfg.max_attributes]

    @cached_property
    def _attribute_words(self) -> dict[str, list[tuple[str, float]]]:
        assert self.attributes_file is not None
        return read_attributes(self.attributes_file)

    @cached_property
    def _oracle_vocabulary(self) -> dict[str, int]:
        """The most frequent words, which come first in the dictionary, and their counts."""
        first = self.dictionary.nspecial
        last = min(len(self.dictionary), first + ORACLE_WORDS)
        return {self.dictionary[i]: self.dictionary.count[i] for i in range(first, last)}

    def filter_indices_by_size(
        self, indices: Any, dataset: Any, max_positions: Any = None, ignore_invalid_inputs: bool = False
    ) -> Any:
        """Filter samples by size, and name the first image whose sample is too large."""
        ignored = dataset.filter_indices_by_size(indices, max_positions)[1]
        if ignored:
            regions, words = dataset.size(ignored[0])
            message = (
                f"{len(ignored)} samples are too large: image {dataset.image_id(ignored[0])} has {regions} regions and "
                f"a caption of {words} words including its end; the limit is {max_positions}"
            )
            if not ignore_invalid_inputs:  # set in training
                raise ValueError(message)
            logger.warning("skipped: %s", message)
        return super().filter_indices_by_size(indices, dataset, max_positions, True)

    def build_generator(self, models: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
        """Build fairseq's generator.

        Raises:
            ValueError: An option does not apply to captioning, or the results would be the references.
        """
        for option, why in UNSUPPORTED.items():
            if getattr(args, option, None):
                raise ValueError(f"--{option.replace('_', '-')} is not supported by the task captioning, {why}")
        if self.cfg.results_json is not None and getattr(args, "score_reference", False):
            raise ValueError("--results-json needs generated captions: leave out --score-reference")
        if self.cfg.results_json is not None:
            self._results = {}
        return super().build_generator(models, args, *more, **kwargs)

    def inference_step(
        self, generator: Any, models: Any, sample: dict[str, Any], prefix_tokens: Any = None, constraints: Any = None
    ) -> Any:
        """Generate captions, and keep the best ones for ``--results-json``."""
        if isinstance(generator, SequenceScorer):
            self._check_captions(sample)
        generated = super().inference_step(generator, models, sample, prefix_tokens, constraints)
        if self._results is not None:
            for image_id, hypotheses in zip(sample["image_ids"], generated):
                caption = self.dictionary.string(hypotheses[0]["tokens"].int().cpu())
                self._results[image_id] = caption
        return generated

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Any:
        """Compute the loss of a batch.

        Raises:
            ValueError: The images have no captions.
        """
        self._check_captions(sample)
        return super().valid_step(sample, model, criterion)

    def _check_captions(self, sample: dict[str, Any]) -> None:
        if sample["target"] is None:
            raise ValueError(f"images such as {sample['image_ids'][0]} have no captions: they can only be captioned")

    def get_batch_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Return fairseq's iterator; with ``--results-json``, it writes the file after a complete pass."""
        batches = super().get_batch_iterator(*args, **kwargs)
        if self.cfg.results_json is not None and "next_epoch_itr" not in vars(batches):  # fairseq keeps its iterators
            original = batches.next_epoch_itr
            batches.next_epoch_itr = lambda *a, **k: _Pass(original(*a, **k), self._write_results)
        return batches

    def build_dataset_for_inference(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: fairseq-interactive reads sentences.

        Raises:
            ValueError: Always.
        """
        raise ValueError("fairseq-interactive reads sentences, not images: use fairseq-generate or tools.caption")

    def _write_results(self) -> None:
        results, self._results = self._results, None
        if results:
            path = Path(self.cfg.results_json or "")
            entries = [{"image_id": image_id, "caption": caption} for image_id, caption in results.items()]
            entries.sort(key=lambda entry: (isinstance(entry["image_id"], str), entry["image_id"]))
            text = json.dumps(entries) + "\n"
            files.write(path, lambda partial: partial.write_text(text, encoding="utf-8"))
            logger.info("%d captions are in %s", len(results), path)


class _Pass:
    """Iterator over batches that calls a function at the end."""

    def __init__(self, batches: Any, at_end: Any) -> None:
        self.batches, self.at_end = batches, at_end

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches
        self.at_end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)
