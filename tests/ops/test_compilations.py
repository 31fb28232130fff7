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
@pytest.mark.parametrize("number", [0, 1])
def test_kernels_compile(compiling, number):
    compiling(f"from tests.ops import triton_compilations as t\nt.kernels_compile(t.NVIDIA[{number}])")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gfx90a", "gfx942", "gfx1100"])
def test_kernels_compile_for_amd(compiling, architecture):
    compiling(f"from tests.ops import triton_compilations as t\nt.all_kernels_compile_for_amd({architecture!r})")


@pytest.mark.slow
def test_a_kernel_compiles_for_amd(compiling):
    compiling("from tests.ops import triton_compilations as t\nt.one_kernel_compiles_for_amd()")
