"""Clips for training and validation: folders of videos or of frames, and transforms shared by all frames."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.datasets import ImageFolder

from tools import need
from tools.clips import is_clip, is_video, open_clip, read_whole


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
        found = []
        for name, label in class_to_idx.items():
            clips = [path for path in sorted((Path(directory) / name).iterdir()) if is_clip(path)]
            if not clips:
                raise FileNotFoundError(f"no video and no folder of pictures for the class {name}")
            found += [(str(path), label) for path in clips]
        return found


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
