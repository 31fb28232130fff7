"""Fixtures of the fairseq tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fairseq.fairseq_helpers import fairseq, write_text


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """The toy language pair, preprocessed; the text itself lies one folder above."""
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    prefixes = [part for split in ("train", "valid", "test") for part in (f"--{split}pref", folder / split)]
    fairseq("preprocess", "--source-lang=en", "--target-lang=de", *prefixes, "--destdir", folder / "bin")
    return folder / "bin"
