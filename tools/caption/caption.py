r"""Caption pictures by checkpoints of fairseq's task ``captioning``, with fairseq's own loading and search.

::

    python -m tools.caption caption photo.jpg --path checkpoints/own/checkpoint_best.pt \
        --attributes attributes.json --out work_dirs/captions.json

``--path`` names a checkpoint, or several separated by colons, whose word probabilities are averaged (late fusion, the
thesis' ETA_fuse). Regions are extracted by the options stored in the data folder's ``regions.hdf5``. Attributes are
those of ``--attributes``, a file like the data folder's, ``{"photo": [["word", probability], ...]}``, with the
pictures' names without suffix. Models of regions alone (``--fusion visual``, ``show_attend_tell``) need none. IMAGE may
be a folder, for all pictures in it.

OUT gets ``[{"image_id": "photo", "file_name": "photo.jpg", "caption": "..."}]``, COCO's format of results.

Exit code: 0, all pictures have captions; 1, some could not be read or captioned, and are listed; 2, nothing was done.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fairseq import checkpoint_utils, tasks
from fairseq.dataclass.configs import GenerationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.utils import apply_to_sample
from PIL import Image

import attn_plugins.fairseq  # noqa: F401 - registers the task and the models
from attn_plugins.captioning.caption_files import read_attributes
from attn_plugins.fairseq.captioner import CaptionerModel
from attn_plugins.fairseq.captioning_dataset import CaptionedImage, CaptioningDataset
from tools import files, torch_device
from tools.caption.extract import RecordedExtractor
from tools.caption.lists import ListedImage, listed_images
from tools.pictures import open_picture

# Another data folder replaces these options of the training.
FILES = ("splits", "captions", "regions", "attributes", "dictionary")


class Captioner:
    """The models of the options ``--path``, with regions and attributes as in their data folder.

    Raises:
        ValueError: A checkpoint, its data folder, or the recipe of regions is unsuitable, or they do not match.
    """

    def __init__(self, options: argparse.Namespace, device: Any) -> None:
        for name, value in (("--beam", options.beam), ("--max-len", options.max_len)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.device = device
        self.attributes_file = options.attributes
        self.attributes = None if options.attributes is None else read_attributes(options.attributes)
        overrides: dict[str, Any] = dict(results_json=None)
        if options.data is not None:
            overrides.update(dict.fromkeys(FILES), data=str(options.data))
        self.task: Any = None
        self.models: list[Any] = []
        for path in options.path.split(":"):
            self._load(Path(path), overrides)
        fusions = {model.encoder.fusion for model in self.models}
        self.sees_attributes = fusions != {"visual"}
        if self.sees_attributes and self.attributes is None:
            raise ValueError(f"--attributes is needed: the fusion of --path {options.path} is {', '.join(fusions)}")
        self.extractor: RecordedExtractor | None = None
        if fusions != {"semantic"} and self.task.regions is not None:
            self.extractor = RecordedExtractor(self.task.regions, device, options.region_checkpoint)
            self.extractor(Image.new("RGB", (64, 64)))  # report a wrong width once, not for every picture
        search = GenerationConfig(beam=options.beam, max_len_b=options.max_len, lenpen=options.lenpen)
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

    def _task(self, path: Path, cfg: Any, another_folder: bool) -> Any:
        another = f"--path {path} was trained on {cfg.data}; --data takes another folder, and all files from it"
        dictionary = Path(cfg.dictionary or Path(cfg.data) / "dict.txt")
        if another_folder and not dictionary.is_file():  # the task would build one from other captions
            raise ValueError(f"the vocabulary {dictionary} does not exist: {another}")
        try:
            task: Any = tasks.setup_task(cfg)
        except (OSError, ValueError) as error:
            raise ValueError(f"{error}: {another}") from error
        task.has_attributes |= self.attributes is not None
        return task

    def _attributes(self, name: str) -> list[int]:
        """Return the numbers of a picture's most probable attributes."""
        assert self.attributes is not None
        words = [word for word, _ in self.attributes.get(name, [])]
        return self.task.attribute_numbers(name, words, str(self.attributes_file))

    def __call__(self, name: str, picture: Image.Image) -> str:
        """Caption a picture in RGB; raise a ValueError if the dictionary has none of its attributes."""
        dictionary = self.task.dictionary
        attributes = self._attributes(name) if self.sees_attributes else []
        regions = None if self.extractor is None else self.extractor(picture)
        number = 0 if regions is None else len(regions)
        # Without attributes the task passes the end symbol, which carries the batch size.
        image = CaptionedImage("picture", [[]], [""], attributes or [dictionary.eos()], number)
        dataset = CaptioningDataset(
            [image], None if regions is None else SimpleNamespace(features=lambda _: regions), dictionary
        )
        sample = apply_to_sample(lambda tensor: tensor.to(self.device), dataset.collater([dataset[0]]))
        best = self.task.inference_step(self.generator, self.models, sample)[0][0]
        return dictionary.string(best["tokens"].int().cpu())


def pictures_of(given: Sequence[Path]) -> list[ListedImage]:
    """Return the pictures, including those of folders; their ids are their names without suffix.

    Raises:
        ValueError: A folder has no pictures, or two pictures have the same name.
    """
    images: dict[str, ListedImage] = {}
    for path in given:
        for image in listed_images(path) if path.is_dir() else [ListedImage(path.stem, path)]:
            if images.setdefault(str(image.id), image).path != image.path:
                raise ValueError(f"{images[str(image.id)].path} and {image.path} have the same name")
    return list(images.values())


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    for noisy in ("fairseq", "attn_plugins.fairseq"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    pictures = pictures_of(options.images)
    captioner = Captioner(options, torch_device(options.device))
    rows = []
    for image in pictures:
        try:
            caption = captioner(str(image.id), open_picture(image.path))
        except (RuntimeError, ValueError, IndexError) as error:  # BadPicture among them: continue with the others
            print(f"skipped image {image.id}: {error}", file=sys.stderr, flush=True)
        else:
            rows.append(dict(image_id=image.id, file_name=str(image.path), caption=caption))
            print(f"{image.path}: {caption}", flush=True)
    if rows:
        files.write_text(options.out, json.dumps(rows, indent=1) + "\n")
        print(f"{options.out}: {len(rows)} captions")
    return 0 if len(rows) == len(pictures) else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    option = parser.add_argument
    option("images", type=Path, nargs="+", metavar="IMAGE")
    option("--path", required=True, metavar="FILE[:FILE]", help="checkpoints of the captioner")
    option("--attributes", type=Path, metavar="JSON", help="attributes of the pictures, by name without suffix")
    option("--data", type=Path, metavar="DIR", help="data folder, with all its files; default: the one of the training")
    option("--out", type=Path, default=Path("work_dirs/captions.json"), metavar="JSON", help="default %(default)s")
    option("--beam", type=int, default=3, help="default %(default)s")
    option("--max-len", type=int, default=50, metavar="WORDS", help="default %(default)s")
    option("--lenpen", type=float, default=1.0, help="above 1: longer captions, default %(default)s")
    option("--region-checkpoint", type=Path, metavar="FILE", help="where the checkpoint of the regions lies now")
    option("--device", help="default: cuda where there is one, else cpu")
