"""Fixtures of the fairseq tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.fairseq.fairseq_helpers import write_text


def preprocessed(folder: Path, *options: str) -> Path:
    """Write the toy language pair into a folder and preprocess it into the folder ``bin`` within."""
    from fairseq_cli import preprocess

    write_text(folder)
    words = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    words += ["-s=en", "-t=de", f"--destdir={folder / 'bin'}", *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fairseq-preprocess", *words])
        preprocess.cli_main()
    return folder / "bin"


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Return the folder of the preprocessed toy language pair. The text is in its parent folder."""
    return preprocessed(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def joined(tmp_path_factory) -> Path:
    """Return the toy language pair with a joined dictionary, readable in both directions, and a copy of it as en-fr."""
    folder = preprocessed(tmp_path_factory.mktemp("joined"), "--joined-dictionary")
    for path in [*folder.glob("*.en-de.*"), folder / "dict.de.txt"]:
        shutil.copy(path, path.with_name(path.name.replace("en-de", "en-fr").replace(".de.", ".fr.")))
    return folder
