"""The report of compiled CUDA kernels: parsing of the disassembler's output, and tables."""

from __future__ import annotations

import json
import subprocess

import pytest

from attn_plugins.install import toolchain
from tests.conftest import ROOT
from tools.cuda_report import __main__ as command
from tools.cuda_report import sass, work
from tools.cuda_report.table import short, table

USAGE = """
Fatbin elf code:
================
arch = sm_80

Resource usage:
 Common:
  GLOBAL:28 CONSTANT[4]:224
 Function _Z1av:
  REG:40 STACK:16 SHARED:3200 LOCAL:8 CONSTANT[0]:384 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90

Resource usage:
 Function _Z1av:
  REG:41 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:384 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
# A loop 0x10–0xb0 in a loop 0x00–0xd0, a short loop within the inner one, and a jump back from beyond the end.
BODY = [
    "S2R R4, SR_TID.X", "LDG.E.128 R4, [R2.64]", "@P1 LDG.E.U16.CONSTANT R0, [R2.64]", "@!P0 LDG.E R0, [R2.64]",
    "HMMA.16816.F32 R4, R8, R10, R4", "MATCH.ANY R5, R3", "IMAD.MOV.U32 R1, RZ, RZ, R2", "ATOMG.E.ADD.F32 R1, R2, R3",
    "@P2 BRA 0x70", "IMAD R1, R2, R3, R4", "@P3 EXIT", "@!P0 BRA 0x10", "LDG.E.64.SYS R4, [R2.64]", "@P0 BRA 0x0",
    "EXIT", "FADD R1, R1, R1", "BRA 0x10", "BRA 0x110", "NOP",
]  # fmt: skip


def printed(body: list[str]) -> str:
    """Format lines like the disassembler, each instruction followed by the second half of its code."""
    lines = []
    for number, words in enumerate(body):
        lines.append(f"        /*{16 * number:04x}*/         {words:>40} ;      /* 0x00000a00ff017624 */")
        lines.append(f"{' ' * 80}/* 0x000fe400078e00ff */")
    return "\n".join(lines)


CODE = f"""
Fatbin elf code:
================
arch = sm_80
code version = [1,8]

	code for sm_80
		Function : _Z1av
	.headerflags	@"EF_CUDA_SM80"
{printed(BODY)}
		..........

		Function : _Z1bv
{printed(["FADD R1, R1, R1", "EXIT", "BRA 0x20"])}

Fatbin elf code:
================
arch = sm_90

		Function : _Z1av
{printed(BODY[:1] + BODY[14:15])}
"""


def test_resources_by_kernel_and_architecture():
    assert sass.resources(USAGE) == {
        ("_Z1av", "sm_80"): {"registers": 40, "stack": 24, "shared": 3200},
        ("_Z1av", "sm_90"): {"registers": 41, "stack": 0, "shared": 0},
    }


def test_loops_nest_and_no_branch_to_itself_or_from_behind_the_end_is_one():
    (_, _, body), *_ = sass.functions(CODE)
    assert sass.loops(body) == [(0x00, 0xD0), (0x10, 0xB0), (0x70, 0x80)]
    assert not sass.loops(body[9:])


def test_the_hottest_loop_is_innermost_but_for_short_ones():
    rows = sass.kernels(USAGE, CODE)
    assert [(row["kernel"], row["architecture"]) for row in rows] == [
        ("_Z1av", "sm_80"), ("_Z1bv", "sm_80"), ("_Z1av", "sm_90"),
    ]  # fmt: skip
    assert rows[0]["registers"] == 40
    assert rows[0]["loop"] == {
        "instructions": 11, "LDG": 3, "LDG128": 1, "LDG16": 1, "LDG32": 1, "HMMA": 1, "MATCH": 1, "MOV": 1, "ATOM": 1,
    }  # fmt: skip
    assert rows[0]["all"]["instructions"] == 18  # without NOP
    assert rows[0]["all"]["LDG"] == 4
    assert rows[1]["loop"] == {"instructions": 0}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("void attn_plugins::add<__nv_bfloat16, 1>(__nv_bfloat16*, long)", "add<bfloat16, 1>"),
        ("void a::(anonymous namespace)::f<float, a::Team<8, 4> >(a::P<float>)", "f<float, Team<8, 4>>"),
        ("void f<(int)3, __half>(int)", "f<(int)3, half>"),
        ("_Z1av", "_Z1av"),
    ],
)
def test_names(name, expected):
    assert short(name) == expected


def test_tables_leave_out_what_no_kernel_has_and_show_what_changed():
    rows = sass.kernels(USAGE, CODE)
    text = "\n".join(table(rows))
    assert "| `_Z1av` | 40 | 24 | 3200 | 18 | 11 | 1×128 1×32 1×16 | 1 | 1 | 1 | 1 |" in text
    assert "LDL" not in text
    before = json.loads(json.dumps(rows))
    before[0]["loop"] |= {"instructions": 13, "SHFL": 4}
    before[1]["kernel"] = "_Z1cv"
    lines = table(rows, before)
    assert "| `_Z1av` | 40 | 24 | 3200 | 18 | 13 → 11 | 1×128 1×32 1×16 | 1 | 1 | 4 → 0 | 1 | 1 |" in lines
    assert any(line.startswith("| `_Z1bv` (new) |") for line in lines)
    assert "No longer there: `_Z1cv`." in lines


def test_instances_of_other_arguments_are_compared_with_those_that_they_replace():
    before = sass.kernels(USAGE, CODE)[:1] * 5
    names = ["f<half, 16>", "f<half, 32>", "g<half, Team<0, 1, 16>, 1>", "h<half>", "k<half, 4, 1>"]
    before = [row | {"kernel": name} for row, name in zip(before, names)]
    after = ["f<half, 16, true>", "f<half, 16, false>", "g<half, Team<32, 1, 16>, 1>", "h<float>", "k<half, 4, 1>"]
    lines = table([before[0] | {"kernel": name} for name in (*after, "k<half, 4, 2>")], before)
    assert [line.split(" | ")[0] for line in lines[4:-2]] == [
        "| `f<half, 16, false>` (was `f<half, 16>`)",
        "| `f<half, 16, true>` (was `f<half, 16>`)",
        "| `g<half, Team<32, 1, 16>, 1>` (was `g<half, Team<0, 1, 16>, 1>`)",
        "| `h<float>` (new)",
        "| `k<half, 4, 1>`",
        "| `k<half, 4, 2>` (new)",
    ]
    assert lines[-1] == "No longer there: `f<half, 32>`, `h<half>`."


@pytest.mark.parametrize(
    "kernel, unit, number",
    [
        ("sample_kernel<float, 4>", "tap", 2), ("sample_kernel<half, 8>", "tap", 4),
        ("sample_backward_kernel<half, 1>", "tap", 0.25), ("attend_backward_kernel<float, 4>", "tap", 1),
        ("scatter_kernel<half, 2>", "tap", 1), ("scatter_kernel<float, 1>", "tap", 0.5),
        ("window_forward_kernel<float, Team<8, 4, 2>, 4>", "key", 1),
    ],
)  # fmt: skip
def test_taps_of_an_iteration(kernel, unit, number):
    """Of 128 channels: 32 threads have vectors of channels at four pixels, or eight threads at each of four pixels."""
    assert work.units(kernel, unit) == number


def test_instructions_for_a_tap_before_and_after():
    def row(kernel: str, architecture: str, instructions: int, atomics: int, registers: int, stack: int = 0) -> dict:
        counts = {"instructions": instructions, "ATOM": atomics}
        return {"kernel": kernel, "architecture": architecture, "registers": registers, "stack": stack, "loop": counts}

    before = [row("attend_backward_kernel<half, 8>", sm, 260, 32, 100, 8) for sm in ("sm_80", "sm_90")]
    now = [
        row("attend_backward_kernel<half, 1>", "sm_80", 55, 4, 96),
        row("attend_backward_kernel<half, 4>", "sm_90", 104, 4, 70),
        row("scatter_kernel<half, 2>", "sm_90", 200, 1, 60),
        row("window_other", "sm_90", 1, 0, 10, 24),
    ]
    lines = work.summary(now, before)
    assert [line for line in lines if line.startswith("| `")] == [
        "| `deformable_attention`, half, gradients | `attend_backward_kernel<half, 8>` → "
        "`attend_backward_kernel<half, 1>` | tap | 130 → 220 | 1.69 | 16 → 16 | 100 → 96 | 8 → 0 |",
        "| `deform_conv2d`, half, gradients: the input's | `scatter_kernel<half, 2>` | tap | – → 200 | – | – → 1 "
        "| – → 60 | – → 0 |",
        "| `deformable_attention`, half, gradients | `attend_backward_kernel<half, 8>` → "
        "`attend_backward_kernel<half, 4>` | tap | 130 → 104 | 0.80 | 16 → 4 | 100 → 70 | 8 → 0 |",
    ]
    assert work.spilling(now) == "Kernels that spill: `window_other` (sm_90, 24 bytes). No other kernel spills."
    assert work.spilling(now[:3]) == "No kernel spills."


def test_main_kernels_are_in_the_committed_report():
    """The names that the summary looks for are those of kernels, before and now."""
    for name in ("cuda-sass-before", "cuda-sass"):
        rows = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())["rows"]
        names = {(row["kernel"], row["architecture"]) for row in rows}
        for each in work.MAIN:
            for architecture in ("sm_80", "sm_90"):
                now = each.now if isinstance(each.now, str) else each.now[architecture]
                wanted = each.before if name == "cuda-sass-before" else now
                assert wanted is None or (wanted, architecture) in names, wanted


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["nowhere.so"], 1, "nowhere.so does not exist: run ATTN_PLUGINS_BUILD=cuda"),
        (["--compare", "nowhere.json"], 1, "--compare nowhere.json is not a report of this tool (FileNotFoundError)"),
        (["-k", "("], 2, "-k must be a regular expression"),
        (["--out", "page.txt"], 2, "--out must end with .md"),
    ],
)
def test_errors_are_one_line(arguments, status, words, capsys):
    if status == 2:
        with pytest.raises(SystemExit) as raised:
            command.main(arguments)
        assert raised.value.code == 2
    else:
        assert command.main(arguments) == status
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_binary_from_compiler_to_page(tmp_path, capsys):
    home = toolchain.cuda_home()
    if home is None:
        pytest.skip("nvcc is not on the PATH and CUDA_HOME is not set")
    if command.disassembler() is None:
        pytest.skip("there is no cuobjdump: not on the PATH, not beside nvcc, no triton package")
    source = tmp_path / "add.cu"
    source.write_text("""__global__ void add(float* a, const float* b, int n) {
        float sum = 0;
        for (int i = threadIdx.x; i < n; i += 32) sum += b[i] * b[i + n];
        a[threadIdx.x] = sum;
    }""")
    nvcc = [f"{home}/bin/nvcc", "-fatbin", "-gencode=arch=compute_80,code=sm_80", "-o", tmp_path / "add.fatbin", source]
    done = subprocess.run(nvcc, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nvcc cannot compile here: {command.last_line(done.stderr)}")
    page = tmp_path / "page.md"
    assert command.main([str(tmp_path / "add.fatbin"), "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"1 kernels: {page}\n"
    data = json.loads(page.with_suffix(".json").read_text())
    (row,) = data["rows"]
    assert row["kernel"] in ("add", "_Z3addPfPKfi")
    assert row["architecture"] == "sm_80"
    assert row["registers"] >= 8
    assert row["loop"]["LDG"] >= 2
    assert row["loop"]["LDG32"] == row["loop"]["LDG"]
    assert "## sm_80" in page.read_text()
    assert command.main([str(tmp_path / "add.fatbin"), "--compare", str(page.with_suffix(".json"))]) == 0
    assert "→" not in capsys.readouterr().out
