"""Captions of pictures by checkpoints of fairseq's task ``captioning``, with fairseq's own loading and search.

Regions and attributes of a picture are computed like those of the data folder, by the recipe in its file of regions
and by the attribute detector, and pass through the task's own dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from tools.caption.attributes import AttributeDetector
from tools.caption.recipe import RecordedExtractor
from tools.caption.regions import Regions
from tools.caption.word_attention import WordAttention, word_attention

# Another data folder replaces these options of the training.
FILES = ("splits", "captions", "regions", "attributes", "dictionary")


@dataclass(frozen=True)
class CaptionedPicture:
    """A caption with its scores and attention."""

    caption: str  # its words, separated by spaces
    words: list[str]  # T words
    score: float  # fairseq's, which for ``lenpen`` 1 is the mean log-probability of a word
    log_probabilities: list[float]  # of the T words
    regions: Regions | None  # of the picture; None if no model uses regions
    attributes: list[tuple[str, float]] | None  # passed to the models, with probabilities; None if no model uses any
    unknown: list[str]  # words of the detector that are not in the dictionary and were left out
    attention: list[WordAttention]  # of each model


class _Computed(RegionFeatures):
    """Computed regions of one picture, in place of a file."""

    def __init__(self, own: Regions) -> None:
        self.own = own

    def regions(self, image_id: Any) -> Regions:
        return self.own


class Captioner:
    """One checkpoint, or several whose word probabilities are averaged (late fusion, the thesis' ETA_fuse).

    The arguments are options of ``tools.caption caption``. Without ``data``, folder and files are those of the first
    checkpoint's training; models of regions alone need no ``detector``.

    Raises:
        ValueError: a checkpoint, its data folder, or the recipe of regions is unsuitable, or they do not match.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        data: Path | None = None,
        detector: AttributeDetector | None = None,
        beam: int = 3,
        max_len: int = 50,
        lenpen: float = 1.0,
        device: str = "cpu",
        region_checkpoint: Path | None = None,
        region_config: Path | None = None,
    ) -> None:
        for name, value in (("--beam", beam), ("--max-len", max_len)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
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
            raise ValueError(f"--detector is needed: the fusion of --path {self.paths[0]} is {names}")
        self.extractor: RecordedExtractor | None = None
        if self.sees_regions and self.task.regions is not None:
            self.extractor = RecordedExtractor(self.task.regions, device, region_checkpoint, region_config)
            if region_checkpoint or region_config:
                self.extractor(Image.new("RGB", (64, 64)))  # report a wrong width once, not for every picture
        self.number = self._attribute_number() if self.sees_attributes else 0
        search = GenerationConfig(beam=beam, max_len_b=max_len, lenpen=lenpen)
        self.generator = self.task.build_generator(self.models, search)

    def _load(self, path: Path, overrides: dict[str, Any]) -> None:
        """Add a model; all share the task of the first one, as in ``fairseq-generate``."""
        if not path.is_file():
            raise ValueError(f"--path: {path} does not exist")
        try:
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)
            cfg = convert_namespace_to_omegaconf(state["args"]) if state.get("args") else state["cfg"]
            name, architecture = cfg.task._name, cfg.model._name
        except Exception as error:  # from pickle and zip, and for other dicts
            raise ValueError(f"--path: {path} cannot be read as a fairseq checkpoint: {error!r:.200}") from error
        if name != "captioning":
            raise ValueError(f"--path: {path} is of the task {name}, not captioning")
        if self.task is None:
            self.task = self._task(path, cfg.task, "data" in overrides)
        [model], cfg, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], task=self.task, state=state)
        if not isinstance(model, CaptionerModel):
            raise ValueError(f"--path: {path} is of the model {architecture}, which is not one of our captioners")
        model.to(self.device).eval()
        model.prepare_for_inference_(cfg)
        self.models.append(model)

    def _task(self, path: Path, cfg: Any, another_folder: bool) -> CaptioningTask:
        another = f"--path {path} was trained on {cfg.data}; --data takes another folder, and all files from it"
        dictionary = Path(cfg.dictionary or Path(cfg.data) / "dict.txt")
        if another_folder and not dictionary.is_file():  # the task would build one from other captions
            raise ValueError(f"the vocabulary {dictionary} does not exist: {another}")
        try:
            task = tasks.setup_task(cfg)
        except (OSError, ValueError) as error:
            raise ValueError(f"{error}: {another}") from error
        assert isinstance(task, CaptioningTask)
        task.has_attributes |= self.detector is not None
        return task

    def _attribute_number(self) -> int:
        """Return the number of attributes of an image in the data folder."""
        assert self.detector is not None
        words = self.detector.words
        if not any(self._known(word) for word in words):
            raise ValueError(
                f"the detector's words, such as {words[0]!r}, are not in the vocabulary, which is of other captions"
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
            ValueError: the regions do not fit, or none of the attributes is in the dictionary.
        """
        regions = None if self.extractor is None else self.extractor(picture)
        attributes: list[tuple[str, float]] = []
        if self.detector is not None and self.sees_attributes:
            [pairs] = self.detector.predict([picture], self.number)
            attributes = [(word.lower(), probability) for word, probability in pairs]
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
        """Return a batch of one sample, built by the task."""
        dictionary = self.task.dictionary
        # Without attributes the task passes the end symbol, which carries the batch size.
        numbers = [dictionary.index(word) for word, _ in attributes] or [dictionary.eos()]
        count = 0 if regions is None else len(regions["boxes"])
        image = CaptionedImage("picture", [caption], [""], numbers, count)
        dataset = CaptioningDataset([image], None if regions is None else _Computed(regions), dictionary)
        return apply_to_sample(lambda tensor: tensor.to(self.device), dataset.collater([dataset[0]]))
