"""``make sanitize`` with a gcc that lacks sanitizers; the real run needs its own build."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_compiler_without_libasan_is_one_clear_error(tmp_path):
    """For a library that it does not find, gcc prints the bare name."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\necho "${1#-print-file-name=}"\n')
    compiler.chmod(0o755)
    result = subprocess.run(
        [ROOT / "tools/sanitize.sh"], env={**os.environ, "CXX": str(compiler)}, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert f"{compiler} finds no libasan.so" in line
    assert "install gcc's sanitizer libraries" in line
