"""The report of Triton's kernels: its table, and what it says of spills."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.helpers.triton_checks import needs_triton
from tools import triton_report


def rows(case: str, kernel: str = "forward", registers=(90, 90, 90), stack=(0, 0, 0), spills=(0, 0, 0)):
    return [
        {"case": case, "target": target, "kernel": kernel, "dtype": "fp32", "registers": registers[n],
         "stack": stack[n], "spills": spills[n], "shared": 1024, "seconds": 1.0}
        for n, target in enumerate(triton_report.TARGETS)
    ]  # fmt: skip


def test_table_has_a_line_for_three_targets_and_for_all_that_is_alike():
    found = [
        *rows("attention, (2,3), halo, float32", registers=(90, 91, 90)),
        *rows("attention, (2,3), halo, float16"),
        *rows("attention, (2,3), halo, bfloat16"),
        *rows("attention, (4,5), float16"),
        *rows("attention, (4,5), bfloat16", stack=(8, 0, 0)),
    ]
    assert triton_report.table(found)[2:] == [
        "| (2,3), halo | forward | float32 | 90 / 91 / 90 | 0 | 0 | 1024 |",
        "| (2,3), halo | forward | float16, bfloat16 | 90 | 0 | 0 | 1024 |",
        "| (4,5) | forward | float16 | 90 | 0 | 0 | 1024 |",
        "| (4,5) | forward | bfloat16 | 90 | 8 / 0 / 0 | 0 | 1024 |",
    ]


def test_spills_are_counted_within_loops_and_outside():
    none = rows("attention, (2,3), float32")
    outside = rows("attention, (4,5), float32", stack=(8, 0, 16))
    within = rows("attention, (6,7), float32", stack=(0, 24, 0), spills=(0, 3, 0))
    assert triton_report._spills(none) == "No kernel spills within a loop."
    assert triton_report._spills([*none, *outside]).endswith("2 of 6 compilations spill up to 16 bytes.")
    where = "forward of attention, (6,7), float32 for sm_90"
    chosen = "(blocks for 9.0 were chosen by times on an H100)"
    assert triton_report._spills(within) == f"Spills within loops: {where} {chosen}."


COMPILED = """
import torch
from tools.triton_cases import CASES, everywhere
from tools.triton_report import labels, launches, variants

case = CASES["criss_cross_attention, (1,1,97,97), d 64, dv 512, float16"]
names = list(labels(variants(launches(*case()))).values())
assert len(set(names)) == len(names), names
assert "attend (COLUMN)" in names

# Where tensor cores take factors from registers, gradients of queries of half numbers have smaller tiles.
call = everywhere(1, 2, (16, 16), (16, 16), 64, torch.float16, "1000")()
for capability, keys in (80, 32), (90, 64), (100, 64), (120, 32):
    found = variants(launches(*call, capability=capability))
    (constants,) = (dict(each.constants) for each in found if each.kernel == "query_gradients")
    assert constants["ROWS"] * constants["COLUMNS"] == keys, capability
"""


@needs_triton
def test_names_of_variants_and_tiles_of_devices(python):
    python(COMPILED, TRITON_INTERPRET="0", PYTHONPATH=str(Path(__file__).parents[2]))


def test_times_of_kernels_and_of_calls():
    rows = (("a", 80, 0.5), ("a", 80, 0.25), ("a", 90, 0.6), ("b", 80, 0.1))
    found = [dict(case=case, target=target, seconds=seconds) for case, target, seconds in rows]
    text = triton_report._times(found)
    assert "in 0.5 s of a core (median; at most 0.6 s;" in text
    assert "in at most 0.8 s (a)" in text


def test_faults_are_spills_in_loops_where_blocks_were_not_timed_and_long_compilations():
    timed = rows("attention, (2,3), float32", spills=(0, 3, 0))
    untimed = rows("attention, (4,5), float32", spills=(2, 0, 0))
    assert triton_report.faults([*timed, *rows("attention, (6,7), float32")]) == []
    assert triton_report.faults([*timed, *untimed]) == [
        "forward of attention, (4,5), float32 for sm_80 spills within a loop, in 2 instructions"
    ]
    slow = rows("attention, (2,3), float32")[2] | {"seconds": 15.1}
    assert triton_report.faults([slow]) == [
        "forward of attention, (2,3), float32 for sm_100 takes 15.1 s to compile, more than 15"
    ]


@pytest.mark.slow
@needs_triton
def test_no_kernel_of_the_main_shapes_has_a_fault(python):
    """In bfloat16, for 8.0 and 10.0; float32 and 9.0 by the command."""
    python(
        "from tools.triton_report import main; assert main(['--only', 'bfloat16', '--targets', '80', '100']) == 0",
        TRITON_INTERPRET="0",
        PYTHONPATH=str(ROOT),
    )
