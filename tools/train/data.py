"""Images and clips for training and validation, with timm's transforms."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.data import create_dataset, create_transform
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from tools import need
from tools.clips import is_clip, is_video, open_clip
from tools.pictures import open_picture

from .config import Config, ConfigError


def datasets(config: Config, root: Path) -> tuple[Dataset, Dataset, list[str]]:
    """Return training and validation images, without transforms, and the classes' names.

    Raises:
        ConfigError: A folder is missing or empty, or the halves have different classes.
    """
    if config.dataset not in ("folder", "clips"):
        try:
            halves = [
                create_dataset(config.dataset, root=str(root), split=split, is_training=split == "train", download=True)
                for split in ("train", "validation")
            ]
        except Exception as error:
            raise ConfigError(f"dataset {config.dataset!r} cannot be loaded from {root}: {error}") from error
        return halves[0], halves[1], list(halves[0].classes)
    halves = [_folder(root / "train", config, config.frame_sampling), _folder(root / "val", config, "uniform")]
    train, val = (half.classes for half in halves)
    if train != val:
        odd = sorted(set(train) ^ set(val))
        raise ConfigError(f"{root}/train and {root}/val must hold the same classes; not in both: {', '.join(odd)}")
    return halves[0], halves[1], train


def _folder(path: Path, config: Config, sampling: str) -> ImageFolder:
    if not path.is_dir():
        raise ConfigError(f"--data must hold train/CLASS/… and val/CLASS/…: there is no folder {path}")
    try:
        if config.dataset == "clips":
            return ClipFolder(str(path), config.frames, sampling)
        return ImageFolder(str(path), loader=open_picture)
    except FileNotFoundError as error:  # no classes, or a class without images
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error


class ClipFolder(ImageFolder):
    """``CLASS/*.mp4`` or ``CLASS/CLIP/*.png``: clips as lists of pictures, with the numbers of their classes.

    Args:
        root: The folder of the classes.
        frames: Number of frames to read of a clip.
        sampling: Choice of frames, as in :func:`tools.clips.open_clip`.

    Raises:
        FileNotFoundError: There is no class, or a class has no clips.
    """

    def __init__(self, root: str, frames: int, sampling: str = "uniform") -> None:
        super().__init__(root, loader=partial(open_clip, count=frames, sampling=sampling))  # type: ignore[arg-type]
        if any(is_video(Path(file)) for file, _ in self.samples):
            need("cv2")

    @staticmethod
    def make_dataset(directory: Any, class_to_idx: dict[str, int], *args: Any, **kwargs: Any) -> list[tuple[str, int]]:
        """Return (path, class) of every clip."""
        samples = []
        for name, label in class_to_idx.items():
            clips = [path for path in sorted((Path(directory) / name).iterdir()) if is_clip(path)]
            if not clips:
                raise FileNotFoundError(f"no video and no folder of pictures for the class {name}")
            samples += [(str(path), label) for path in clips]
        return samples


class Transformed(Dataset):
    """Dataset that applies a transform to images, and to all frames of a clip with the same random choices."""

    def __init__(self, dataset: Any, transform: Any) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.dataset[index]
        if not isinstance(image, list):
            return self.transform(image.convert("RGB")), int(label)
        seed, frames = int(torch.randint(2**31, ())), []
        for frame in image:
            random.seed(seed)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs as well
                frames.append(self.transform(frame))
        return torch.stack(frames), int(label)


def transform(config: Config, data: dict[str, Any], training: bool) -> Any:
    """Return the transform of images; ``data`` is timm's data configuration of the model."""
    size = data["input_size"]
    if config.crop == "random_resized":
        names = ("input_size", "interpolation", "mean", "std", *(() if training else ("crop_pct",)))
        more = dict(is_training=True, hflip=config.hflip, color_jitter=None) if training else {}
        return create_transform(**{name: data[name] for name in names}, **more)
    steps: list[Any] = [transforms.Resize(size[1:], transforms.InterpolationMode(data["interpolation"]))]
    if training and config.crop == "pad":
        steps.append(transforms.RandomCrop(size[1:], padding=[size[2] // 8, size[1] // 8]))
    if training and config.hflip:
        steps.append(transforms.RandomHorizontalFlip(config.hflip))
    return transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(data["mean"], data["std"])])


def loader(images: Any, config: Config, data: dict[str, Any], training: bool) -> DataLoader:
    """Return the loader of one half; training batches are full."""
    dataset, batch = Transformed(images, transform(config, data, training)), min(config.batch_size, len(images))
    return DataLoader(dataset, batch, shuffle=training, drop_last=training, num_workers=config.workers)
