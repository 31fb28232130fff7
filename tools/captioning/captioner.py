"""Captions of pictures by fairseq's checkpoints of the task ``captioning``: fairseq loads and searches.

Regions and attributes of a picture are computed as those of the data folder were, by the recipe in its file of regions
and by the attribute detector, and go through the task's own dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import checkpoint_utils, tasks
from fairseq.dataclass.configs import GenerationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.utils import apply_to_sample
from PIL import Image

import attn_plugins.fairseq  # noqa: F401 - registers the task and the models
from attn_plugins.captioning.caption_files import read_attributes
from attn_plugins.captioning.region_features import RegionFeatures
from attn_plugins.fairseq.captioner import CaptionerModel
from attn_plugins.fairseq.captioning import CaptioningTask
from attn_plugins.fairseq.captioning_dataset import CaptionedImage, CaptioningDataset
from tools.captioning.attributes import AttributeDetector
from tools.captioning.region_recipe import RecordedExtractor
from tools.captioning.regions import Regions
from tools.captioning.word_attention import WordAttention, word_attention

# A data folder given anew replaces what these said in training.
FILES = ("splits", "captions", "regions", "attributes", "dictionary")


class BadCaptioner(ValueError):
    """Checkpoints, or files that belong to them, that cannot caption pictures."""


@dataclass(frozen=True)
class Search:
    """Of fairseq's beam search.

    Attributes:
        beam: Its width.
        max_len: Words of a caption at most.
        lenpen: Above 1 for longer captions, below 1 for shorter ones.
    """

    beam: int = 3
    max_len: int = 50
    lenpen: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beam", "max_len"):
            if getattr(self, name) < 1:
                raise BadCaptioner(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class CaptionedPicture:
    """A caption, and how it came about.

    Attributes:
        caption: Its words with spaces between.
        words: T of them.
        score: fairseq's, the mean log-probability of a word for ``lenpen`` 1.
        log_probabilities: T, of each word.
        regions: None: no model looks at regions.
        attributes: Words and probabilities that the models were given; None: no model looks at attributes.
        unknown: Words of the detector that the dictionary does not have, which are left out.
        attention: Of each model.
    """

    caption: str
    words: list[str]
    score: float
    log_probabilities: list[float]
    regions: Regions | None
    attributes: list[tuple[str, float]] | None
    unknown: list[str]
    attention: list[WordAttention]


class _Computed(RegionFeatures):
    """The regions of one picture, in a file's place."""

    def __init__(self, found: Regions) -> None:
        self.found = found

    def regions(self, image_id: Any) -> dict[str, np.ndarray]:
        return self.found


class Captioner:
    """One checkpoint, or several whose word probabilities are averaged (late fusion, the thesis' ETA_fuse).

    Args:
        paths: The checkpoints.
        data: The data folder; None: the one that the first checkpoint was trained on, and the files it was given.
        detector: Of attributes; None: for models that look at regions alone.
        search: Of captions.
        device: Where the networks run.
        region_checkpoint: Weights of the regions' extractor, instead of what the recipe names.
        region_config: Of mmdet, likewise.

    Raises:
        BadCaptioner: a checkpoint is missing or of something else, or its data folder is not such.
        ValueError: the regions' recipe or extractor cannot be used; the models and the data folder do not fit.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        data: Path | None = None,
        detector: AttributeDetector | None = None,
        search: Search = Search(),
        device: str = "cpu",
        region_checkpoint: Path | None = None,
        region_config: Path | None = None,
    ) -> None:
        self.paths, self.detector, self.device = list(paths), detector, device
        overrides: dict[str, Any] = dict(results_json=None)
        if data is not None:
            overrides.update(dict.fromkeys(FILES), data=str(data))
        self.task: Any = None
        self.models: list[Any] = []
        for path in self.paths:
            self._load(path, overrides)
        fusions = {model.encoder.fusion for model in self.models}
        self.sees_regions, self.sees_attributes = fusions != {"semantic"}, fusions != {"visual"}
        if self.sees_attributes and detector is None:
            names = ", ".join(sorted(fusions))
            raise BadCaptioner(f"--detector is needed: the fusion of --path {self.paths[0]} is {names}")
        regions: RegionFeatures | None = self.task.regions if self.sees_regions else None
        self.extractor = (
            None if regions is None else RecordedExtractor(regions, device, region_checkpoint, region_config)
        )
        if self.extractor is not None and (region_checkpoint or region_config):
            self.extractor(Image.new("RGB", (64, 64)))  # of another width: told once, not for every picture
        self.number = self._attribute_number() if self.sees_attributes else 0
        options = GenerationConfig(beam=search.beam, max_len_b=search.max_len, lenpen=search.lenpen)
        self.generator = self.task.build_generator(self.models, options)

    def _load(self, path: Path, overrides: dict[str, Any]) -> None:
        """Add a model; the first one's task is that of all, as in ``fairseq-generate``."""
        if not path.is_file():
            raise BadCaptioner(f"--path: {path} does not exist")
        try:
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)
            cfg = convert_namespace_to_omegaconf(state["args"]) if state.get("args") else state["cfg"]
            name, architecture = cfg.task._name, cfg.model._name
        except Exception as error:  # pickle's, zip's, and of dicts of something else
            raise BadCaptioner(f"--path: {path} cannot be read as a checkpoint of fairseq: {error!r:.200}") from error
        if name != "captioning":
            raise BadCaptioner(f"--path: {path} is of the task {name}, not captioning")
        if self.task is None:
            self.task = self._task(path, cfg.task)
        [model], cfg, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], task=self.task, state=state)
        if not isinstance(model, CaptionerModel):
            raise BadCaptioner(f"--path: {path} is of the model {architecture}, which is no captioner of ours")
        model.to(self.device).eval()
        model.prepare_for_inference_(cfg)
        self.models.append(model)

    def _task(self, path: Path, cfg: Any) -> CaptioningTask:
        another = f"--path {path} was trained on {cfg.data}; --data takes another folder, and all files from it"
        dictionary = Path(cfg.dictionary or Path(cfg.data) / "dict.txt")
        if not dictionary.is_file():  # the task would make one of the captions
            raise BadCaptioner(f"the vocabulary {dictionary} does not exist: {another}")
        try:
            task = tasks.setup_task(cfg)
        except (OSError, ValueError) as error:
            raise BadCaptioner(f"{error}: {another}") from error
        assert isinstance(task, CaptioningTask)
        task.has_attributes |= self.detector is not None
        return task

    def _attribute_number(self) -> int:
        """How many attributes an image of the data folder has."""
        assert self.detector is not None
        words = self.detector.words
        if not any(self._known(word) for word in words):
            raise BadCaptioner(
                f"the detector's words, such as {words[0]!r}, are none of the vocabulary's: it is of other captions"
            )
        number = self.task.cfg.max_attributes
        if self.task.attributes_file is None:
            return number
        return min(number, max(map(len, read_attributes(self.task.attributes_file).values()), default=number))

    def _known(self, word: str) -> bool:
        return self.task.dictionary.index(word.lower()) >= self.task.dictionary.nspecial

    def __call__(self, picture: Image.Image) -> CaptionedPicture:
        """Caption a picture in RGB.

        Raises:
            ValueError: its regions do not fit, or none of its attributes is in the dictionary.
        """
        regions = None if self.extractor is None else self.extractor(picture)
        attributes: list[tuple[str, float]] = []
        if self.detector is not None and self.sees_attributes:
            [found] = self.detector.predict([picture], self.number)
            attributes = [(word.lower(), probability) for word, probability in found]
        known = [pair for pair in attributes if self._known(pair[0])]
        if self.sees_attributes and not known:
            raise ValueError(f"none of its {len(attributes)} attributes is in the dictionary")
        sample = self._sample(regions, known, [])
        best = self.task.inference_step(self.generator, self.models, sample)[0][0]
        tokens = best["tokens"].tolist()[:-1]
        forced = self._sample(regions, known, tokens)["net_input"]
        dictionary = self.task.dictionary
        return CaptionedPicture(
            caption=dictionary.string(best["tokens"].int().cpu()),
            words=[dictionary[token] for token in tokens],
            score=float(best["score"]),
            log_probabilities=best["positional_scores"].tolist()[:-1],
            regions=regions,
            attributes=known if self.sees_attributes else None,
            unknown=[word for word, _ in attributes if not self._known(word)],
            attention=[word_attention(model, forced) for model in self.models],
        )

    def _sample(self, regions: Regions | None, attributes: list[tuple[str, float]], caption: list[int]) -> Any:
        """A batch of one, as the task makes it."""
        dictionary = self.task.dictionary
        # Without attributes the task gives the end, for a batch's size.
        numbers = [dictionary.index(word) for word, _ in attributes] or [dictionary.eos()]
        count = 0 if regions is None else len(regions["boxes"])
        image = CaptionedImage("picture", [caption], [""], numbers, count)
        dataset = CaptioningDataset([image], None if regions is None else _Computed(regions), dictionary)
        return apply_to_sample(lambda tensor: tensor.to(self.device), dataset.collater([dataset[0]]))
