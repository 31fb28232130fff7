"""Small data sets for the mm tests, which are skipped without mmdet (on a GPU test machine)."""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("mmdet") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def index_of_configs() -> None:
    """Read the index of upstream's configs once, not for every ``_base_ = "mmdet::…"``, which takes 0.1 s."""
    from mmengine.config import utils

    utils.load = functools.cache(utils.load)


@pytest.fixture(scope="session", autouse=True)
def bases_of_configs() -> None:
    """Read each of upstream's files once, which many configs have as a base."""
    from mmengine.config import Config

    read = Config._file2dict
    kept = functools.cache(read)

    def copied(filename: str, *args: Any, **options: Any) -> Any:
        upstream = ".mim" in Path(filename).parts
        return copy.deepcopy(kept(filename, *args, **options)) if upstream else read(filename, *args, **options)

    Config._file2dict = staticmethod(copied)


@pytest.fixture(scope="module", autouse=True)
def no_log_of_an_earlier_run() -> None:
    """Forget mmengine's loggers: models write to the newest one's file, which fairseq's Hydra closes.

    The new one is silent about every parameter's learning rate.
    """
    from mmengine.logging import MMLogger

    MMLogger._instance_dict.clear()
    MMLogger.get_instance("mmengine").setLevel("WARNING")


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """Return a digits-on-photographs set of 16 training and 4 validation images."""
    from tools.datasets.digits_on_photographs import Recipe, build

    folder = tmp_path_factory.mktemp("data") / "digits"
    assert build(folder, Recipe(train=16, val=4, seed=3))
    return folder


@pytest.fixture
def helen(tmp_path) -> tuple[Path, dict]:
    """Return made-up faces in HELEN's layout, with their labels."""
    from tests.mm.made_up_faces import helen_folder

    return helen_folder(tmp_path)


@pytest.fixture
def lfw(tmp_path) -> tuple[Path, dict]:
    """Return made-up faces in LFW-PL's layout, with their labels."""
    from tests.mm.made_up_faces import lfw_folder

    return lfw_folder(tmp_path)
