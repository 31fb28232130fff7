"""Variants of Triton's kernels, and compilation ahead of time, in processes that compile instead of interpreting."""

from __future__ import annotations

import os
from functools import partial

import pytest

from tests.conftest import ROOT
from tests.helpers.triton_checks import DEVICE, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE == "cuda", reason="launches are recorded in a process of their own"),
]


@pytest.fixture
def compiling(python, tmp_path):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return partial(python, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=path)


def test_variants_and_launches(compiling):
    compiling(
        "from tests.ops import triton_compilations as checks\n"
        "checks.launches_are_those_of_triton()\n"
        "checks.no_size_is_compiled_for()\n"
        "checks.large_tensors_have_offsets_of_64_bits()\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(compiling, capability):
    compiling(f"from tests.ops import triton_compilations\ntriton_compilations.kernels_compile({capability})")
