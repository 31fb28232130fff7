"""Fixtures of the fairseq tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.fairseq.fairseq_helpers import fairseq, write_text


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Return the folder of the preprocessed toy language pair. The text is in its parent folder."""
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    prefixes = [part for split in ("train", "valid", "test") for part in (f"--{split}pref", folder / split)]
    fairseq("preprocess", "--source-lang=en", "--target-lang=de", *prefixes, "--destdir", folder / "bin")
    return folder / "bin"


@pytest.fixture(scope="session")
def joined(tmp_path_factory) -> Path:
    """Return the toy language pair with a joined dictionary, readable in both directions, and a copy of it as en-fr."""
    from fairseq_cli import preprocess

    folder = tmp_path_factory.mktemp("joined")
    write_text(folder)
    words = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    words += ["-s=en", "-t=de", "--joined-dictionary", f"--destdir={folder / 'bin'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fairseq-preprocess", *words])
        preprocess.cli_main()
    for path in [*folder.joinpath("bin").glob("*.en-de.*"), folder / "bin/dict.de.txt"]:
        shutil.copy(path, path.with_name(path.name.replace("en-de", "en-fr").replace(".de.", ".fr.")))
    return folder / "bin"
