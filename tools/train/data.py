"""Images and clips for training and validation, with timm's transforms."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import create_dataset, create_transform
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from tools import need
from tools.clips import is_clip, is_video, open_clip, read_whole
from tools.pictures import open_picture

from .config import Config, ConfigError
from .place import Place


def datasets(config: Config, root: Path) -> tuple[Dataset, Dataset, list[str]]:
    """Return training and validation images, without transforms, and the classes' names.

    Raises:
        ConfigError: a folder is missing or empty, or the halves have different classes.
    """
    if config.dataset in ("folder", "clips"):
        halves = [_folder(root / "train", config, config.frame_sampling), _folder(root / "val", config, "uniform")]
        train, val = (half.classes for half in halves)
        if train != val:
            odd = sorted(set(train) ^ set(val))
            raise ConfigError(f"{root}/train and {root}/val must hold the same classes; not in both: {', '.join(odd)}")
        return halves[0], halves[1], train
    try:
        halves = [
            create_dataset(config.dataset, root=str(root), split=split, is_training=split == "train", download=True)
            for split in ("train", "validation")
        ]
    except Exception as error:
        raise ConfigError(f"dataset {config.dataset!r} cannot be loaded from {root}: {error}") from error
    classes = getattr(halves[0], "classes", None)
    if classes is None:
        raise ConfigError(f"dataset {config.dataset!r} does not list its classes: convert it to folders")
    return halves[0], halves[1], list(classes)


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
        FileNotFoundError: there is no class, or a class has no clips.
    """

    def __init__(self, root: str, frames: int, sampling: str = "uniform") -> None:
        super().__init__(root, loader=partial(open_clip, count=frames, sampling=sampling))  # type: ignore[arg-type]
        self.check = self.loader if sampling == "uniform" else read_whole  # reads every frame that a training may read
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


class ClipTransform:
    """Apply a transform of pictures to all frames of a clip with the same random choices: (T, 3, H, W)."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, frames: list[Any]) -> torch.Tensor:
        seed = int(torch.randint(2**31, ()))
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - used by transforms
        transformed = []
        for frame in frames:
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.default_generator.manual_seed(seed)  # torch.manual_seed also formats a stack trace for GPUs
            transformed.append(self.transform(frame))
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        return torch.stack(transformed)


class Transformed(Dataset):
    """Dataset that applies a transform to images or clips."""

    def __init__(self, dataset: Any, transform: Any) -> None:
        self.dataset, self.transform = dataset, transform
        self.clips = ClipTransform(transform)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.dataset[index]
        if isinstance(image, list):
            return self.clips(image), int(label)
        return self.transform(image.convert("RGB")), int(label)


def training_transform(config: Config, data: dict[str, Any]) -> Any:
    """Return the transform of training images; ``data`` is timm's data configuration."""
    size = data["input_size"]
    if config.crop == "random_resized":
        return create_transform(
            size,
            is_training=True,
            scale=config.scale,
            hflip=config.hflip,
            color_jitter=config.color_jitter or None,
            auto_augment=config.auto_augment,
            re_prob=config.erasing,
            **{name: data[name] for name in ("interpolation", "mean", "std")},
        )
    if config.color_jitter or config.auto_augment or config.erasing:
        raise ConfigError(f"crop {config.crop!r} does not support color_jitter, auto_augment and erasing")
    resize, *rest = _whole(data)
    crop = [transforms.RandomCrop(size[1:], padding=[size[2] // 8, size[1] // 8])] if config.crop == "pad" else []
    flip = [transforms.RandomHorizontalFlip(config.hflip)] if config.hflip else []
    return transforms.Compose([resize, *crop, *flip, *rest])


def validation_transform(config: Config, data: dict[str, Any]) -> Any:
    """Return the transform for validation: the whole image if training uses whole images, else a centre crop."""
    if config.crop == "random_resized":
        names = ("input_size", "crop_pct", "interpolation", "mean", "std")
        return create_transform(**{name: data[name] for name in names})
    return transforms.Compose(_whole(data))


def _whole(data: dict[str, Any]) -> list[Any]:
    resize = transforms.Resize(data["input_size"][1:], transforms.InterpolationMode(data["interpolation"]))
    return [resize, transforms.ToTensor(), transforms.Normalize(data["mean"], data["std"])]


def loaders(config: Config) -> int:
    """Return the number of loading processes: as configured, or this process's share of the machine's cores."""
    if config.workers is not None:
        return config.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class TrainingLoader:
    """Batches of one process's share; the content of an epoch depends only on seed and epoch.

    ``data`` is timm's data configuration.
    """

    def __init__(self, images: Any, config: Config, data: dict[str, Any], place: Place) -> None:
        self.config, self.rank, processes = config, place.rank, place.processes
        dataset = Transformed(images, training_transform(config, data))
        self.generator = torch.Generator()
        self.sampler: DistributedSampler = DistributedSampler(
            dataset, processes, place.rank, shuffle=True, seed=config.seed, drop_last=processes > 1
        )
        self.batches: DataLoader = DataLoader(
            dataset,
            config.share(processes),
            sampler=self.sampler,
            num_workers=loaders(config),
            pin_memory=place.device.type == "cuda",
            drop_last=True,
            generator=self.generator,
        )
        self.steps = len(self.batches) // config.accumulate

    def epoch(self, number: int) -> Any:
        """Return the batches of an epoch, whole steps only."""
        seed = (self.config.seed * 1_000_003 + number) * 4_099 + self.rank
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - used by timm's Mixup
        torch.manual_seed(seed)
        self.generator.manual_seed(seed)
        self.sampler.set_epoch(number)
        for _, batch in zip(range(self.steps * self.config.accumulate), self.batches):
            yield batch


def validation_loader(images: Any, config: Config, data: dict[str, Any], place: Place) -> DataLoader:
    """Return a loader that reads every image once, over all processes together."""
    share = Subset(
        Transformed(images, validation_transform(config, data)), range(place.rank, len(images), place.processes)
    )
    pin = place.device.type == "cuda"
    return DataLoader(share, config.share(place.processes), num_workers=loaders(config), pin_memory=pin)
