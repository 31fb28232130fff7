"""The GPU check without a GPU: time limits, tests that crash or hang, summaries, tables."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools.gpu_check import machine, memory, processes, testing
from tools.gpu_check.__main__ import main
from tools.gpu_check.check import Stage, reason, summary
from tools.gpu_check.processes import Budget, Done

ROOT = Path(__file__).parents[2]

# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("stages", [["build", "tests", "fuzz", "memory"], ["memory"]])
def test_without_a_gpu_every_stage_says_so(stages, capsys, tmp_path):
    assert main(["check", "--stages", *stages, "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[: 2 * len(stages)] == [line for name in stages for line in (f"=== {name}", machine.NO_DEVICE)]
    assert lines[-1] == f"{stages[-1]}: no device in 0 s. {machine.NO_DEVICE}"
    assert "## memory: no device" in (tmp_path / "check.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_part_says_so(capsys, tmp_path):
    assert main(["measure", "-k", "window_attention|halves", "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("=== ")] == ["=== window_attention", "=== halves"]
    assert all(line.endswith(machine.NO_DEVICE) for line in lines[1::2])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["", "check --stages fly", "check --seconds 0", "measure --jobs 0"])
def test_a_bad_command_line_ends_with_status_2(words, capsys):
    with pytest.raises(SystemExit) as raised:
        main(words.split())
    assert raised.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_checkout_that_is_not_installed_is_importable():
    code = "from tools.gpu_check import machine as m; m.make_importable(); import attn_plugins as a; print(a.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert Path(done.stdout.strip()).resolve() == ROOT / "plugins" / "__init__.py", done.stderr


def test_unusable_binaries_are_rebuilt_and_the_reason_is_reported(tmp_path, monkeypatch):
    log = tmp_path / "log"
    reasons = ["no _C_cuda binary lies here", "it does not load"]
    commands = []

    def run(command, limit, log, environment=None):
        commands.append((command, environment))
        return Done(0 if len(commands) == 1 else 1, 2.0, "error: no nvcc\n")

    monkeypatch.setattr(machine, "run", run)
    monkeypatch.setattr(machine, "binary_failure", lambda log: reasons[-1] if commands else reasons[0])
    assert machine.build(Budget(60), log, (9, 0)) == (False, "compiled in 2 s, but it does not load")
    assert commands[0][0][1:] == [ROOT / "setup.py", "-q", "build_ext", "--inplace"]
    assert commands[0][1] == {"ATTN_PLUGINS_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": "9.0"}
    assert machine.build(Budget(60), log, (9, 0)) == (False, "not compiled: error: no nvcc (it does not load)")
    monkeypatch.setattr(machine, "binary_failure", lambda log: None)
    assert machine.build(Budget(60), log, (9, 0)) == (True, "the binaries load, nothing was compiled")
    assert len(commands) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_reason_why_binaries_do_not_serve_comes_from_a_new_process(tmp_path):
    found = machine.binary_failure(tmp_path / "log")
    assert found is None or "_C_cuda" in found or "CUDA" in found


# --- processes and budgets --------------------------------------------------------------------------------------------


def test_a_process_over_its_limit_is_killed_with_what_it_started(tmp_path):
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('here', flush=True); time.sleep(60)"
    begin = time.monotonic()
    done = processes.run([sys.executable, "-c", code], 1.0, tmp_path / "log")
    assert time.monotonic() - begin < 10
    assert done.status is None
    assert done.last_line() == "here"


def test_output_and_status_of_each_process_in_one_log(tmp_path):
    log = tmp_path / "new" / "log"
    for number in (3, 4):
        done = processes.run([sys.executable, "-c", f"print({number}); raise SystemExit({number})"], 60, log)
        assert (done.status, done.output) == (number, f"{number}\n")
    assert log.read_text() == "3\n4\n"
    assert Done(-11, 1.0, "\n").last_line() == "ended with status -11 and no message"


def test_a_part_of_a_budget_is_never_more_than_what_is_left():
    budget = Budget(100, time.monotonic() - 90)
    assert 9 < budget.part(50).left() <= 10
    assert 2 < budget.part(3).left() <= 3
    assert not budget.over()
    assert Budget(100, time.monotonic() - 98).over()
    assert Budget(100, time.monotonic() - 200).left() == 0


# --- tests in processes -----------------------------------------------------------------------------------------------

FILE = """
import os, time
import pytest

@pytest.mark.parametrize("n", range(3))
def test_fine(n):
    pass

def test_wrong():
    assert 1 + 1 == 3, "sums"

def test_dies():
    os._exit(13)

def test_hangs():
    time.sleep(60)

@pytest.mark.skip(reason="not here")
def test_left_out():
    pass

def test_last():
    pass
"""


@pytest.fixture
def bad_file(tmp_path) -> str:
    path = tmp_path / "test_bad.py"
    path.write_text(FILE)
    return str(path)


def run_file(path: str, tmp_path: Path, names: list[str], **limits) -> dict[str, testing.Result]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = testing.run_tests([f"{path}::{name}" for name in names], 2, Budget(60), tmp_path / "log", scratch, **limits)
    return {name.split("::")[1]: result for name, result in found.items()}


def test_one_that_dies_or_hangs_does_not_spoil_the_rest(bad_file, tmp_path, monkeypatch):
    monkeypatch.setattr(testing, "pytest_command", in_folder(tmp_path))
    names = ["test_fine[0]", "test_wrong", "test_dies", "test_hangs", "test_left_out", "test_last"]
    found = run_file("test_bad.py", tmp_path, names, seconds=4)
    outcomes = {name: result.outcome for name, result in found.items()}
    assert outcomes == {
        "test_fine[0]": "passed", "test_wrong": "failed", "test_dies": "failed", "test_hangs": "failed",
        "test_left_out": "skipped", "test_last": "passed",
    }  # fmt: skip
    assert "sums" in reason(found["test_wrong"].message)
    assert "ended with status 13" in found["test_dies"].message
    assert "took more than 4 s" in found["test_hangs"].message
    assert "not here" in found["test_left_out"].message
    passed, line = testing.summary(found, None)
    assert not passed
    assert line == "2 passed, 3 failed, 1 skipped"


def in_folder(folder: Path):
    """Return pytest's command for tests in another folder than the repository."""
    plain = testing.pytest_command

    def command(*arguments):
        start = ["-o", "addopts=", "--rootdir", folder]
        return plain(*start, *(folder / word if str(word).endswith("test_bad.py") else word for word in arguments))

    return command


def test_a_file_that_does_not_import(tmp_path, monkeypatch):
    (tmp_path / "test_bad.py").write_text("import nothing_of_this_name\n")
    monkeypatch.setattr(testing, "pytest_command", in_folder(tmp_path))
    (result,) = run_file("test_bad.py", tmp_path, ["test_one"]).values()
    assert result.outcome == "failed"
    assert "nothing_of_this_name" in result.message


def test_time_that_is_over_leaves_tests_not_run(bad_file, tmp_path):
    found = testing.run_tests([f"{bad_file}::test_last"], 1, Budget(0), tmp_path / "log", tmp_path)
    assert [result.outcome for result in found.values()] == ["not run"]
    assert testing.summary(found, None) == (False, "1 not run")


@pytest.mark.cuda
def test_collecting_finds_marked_tests_of_this_repository(tmp_path):
    found, problem = testing.collect(Budget(120), tmp_path / "log", tmp_path, ["tests/ops/criss_cross"])
    assert problem is None
    assert found
    assert all(name.startswith("tests/ops/criss_cross/") and "cuda" in name for name in found)


def test_chunks_are_of_one_file_and_begin_with_heavy_ones():
    names = [f"a.py::test[{n}]" for n in range(5)] + [f"b.py::test_compiled[{n}]" for n in range(3)] + ["b.py::test"]
    assert testing.chunks(names, 4) == [["b.py::test_compiled[0]"], ["b.py::test_compiled[1]"],
                                        ["b.py::test_compiled[2]"], names[:4], names[4:5], names[8:]]  # fmt: skip
    assert testing.chunks(names, 31) == [names[5:7], names[7:], names[:5]]


def test_a_test_that_breaks_cuda_is_named_and_the_rest_continues(tmp_path, monkeypatch):
    """In a made-up torch, the device fails from the second test on."""
    (tmp_path / "test_bad.py").write_text(
        "import sys, types\n"
        "spoiled = []\n"
        "class cuda:\n"
        "    is_available = is_initialized = staticmethod(lambda: True)\n"
        "    @staticmethod\n"
        "    def synchronize():\n"
        "        if spoiled: raise RuntimeError('CUDA error: an illegal memory access\\nmore')\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)\n"
        "def test_first(): pass\n"
        "def test_spoils(): spoiled.append(1)\n"
        "def test_third(): assert not spoiled\n"
    )
    monkeypatch.setattr(testing, "pytest_command", in_folder(tmp_path))
    found = run_file("test_bad.py", tmp_path, ["test_first", "test_spoils", "test_third"])
    assert [result.outcome for result in found.values()] == ["passed", "failed", "passed"]
    assert reason(found["test_spoils"].message) == "CUDA error: an illegal memory access"


def test_a_summary_has_a_line_for_each_stage():
    stages = [
        Stage("build", "passed", 3.2, ["done"]),
        Stage("tests", "FAILED", 9.0, ["a", "b"]),
        Stage("fuzz", "no time", 0, []),
    ]
    assert summary(stages) == ["build: passed in 3 s. done", "tests: FAILED in 9 s. b", "fuzz: no time in 0 s. "]


# --- memory checkers --------------------------------------------------------------------------------------------------


def test_kernels_are_found_by_namespace_and_decorator(tmp_path):
    (tmp_path / "kernels.py").write_text(
        "import triton\nfrom triton import jit\n\n@triton.jit\ndef one(x):\n    pass\n\n"
        "@triton.jit(do_not_specialize=['n'])\ndef two(x):\n    pass\n\n"
        "@triton.jit(\n    do_not_specialize=['n'],\n)\ndef three(x):\n    pass\n\n"
        "@jit\ndef four(x):\n    helper(x)\n\n@jit\ndef helper(x):\n    pass\n\ndef five(x):\n    pass\n"
    )
    (tmp_path / "plain.py").write_text("def one(x):\n    return one(x)\n")
    assert memory.our_kernels(tmp_path) == ["attn_plugins", "four", "one", "three", "two"]


def test_our_kernels_are_those_that_are_launched():
    """Triton's kernels are named where they are launched; no function that only other kernels call is among them."""
    pytest.importorskip("triton")
    from tools.triton_cases import CASES
    from tools.triton_report import launches

    cases = [make() for name, make in CASES.items() if name.endswith("bfloat16")]
    launched = {each.kernel.__name__ for case in cases for each in launches(*case)}
    assert set(memory.our_kernels()) == {"attn_plugins", *launched}


INITCHECK = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<4>(int)+0x80
=========     by thread (0,0,0) in block (0,0,0)
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void attn_plugins::sample_kernel<float, 4>(float*)+0x120 in sampling.cuh:57
=========     by thread (3,0,0) in block (1,0,0)
window_attention: 40 calls by cuda
========= ERROR SUMMARY: 2 errors
"""


def test_what_initcheck_says_of_products_of_halves_does_not_count():
    products = INITCHECK.replace("sample_kernel<float, 4>", "sample_backward_kernel<__nv_bfloat16, (int)1>")
    products = products.replace("window_attention", "deform_conv2d").replace("of size 4", "of size 2")
    assert memory.judge("initcheck", "deform_conv2d", Done(0, 1.0, products), products, ["attn_plugins"]).passed
    others = [
        products.replace("__nv_bfloat16", "float"),
        products.replace("(int)1", "(int)4"),
    ]  # a scalar, not a vector
    for other in others:
        assert not memory.judge("initcheck", "deform_conv2d", Done(0, 1.0, other), other, ["attn_plugins"]).passed


def test_the_error_of_a_call_is_reported():
    text = "criss_cross_attention: 9 calls by torch\n1 errors: call 3 by triton: at 49:8:\n= ERROR SUMMARY: 0 errors\n"
    found = memory.judge("memcheck", "criss_cross_attention", Done(1, 1.0, text), text, ["attn_plugins"])
    assert (found.passed, found.line) == (False, "1 errors: call 3 by triton: at 49:8:")


def test_what_initcheck_says_of_other_kernels_does_not_count():
    kernels = ["attn_plugins"]
    done = Done(0, 1.0, INITCHECK)
    found = memory.judge("initcheck", "window_attention", done, INITCHECK, kernels)
    assert not found.passed
    assert found.line.startswith("1 reads of memory that nothing wrote")
    assert "sample_kernel" in found.line
    text = INITCHECK.replace("attn_plugins::", "other::")
    assert memory.judge("initcheck", "window_attention", done, text, kernels) == (
        "initcheck, window_attention", True, "window_attention: 40 calls by cuda",
    )  # fmt: skip


@pytest.mark.parametrize(
    "kernel, ours",
    [
        ("void attn_plugins::f<float>(float*)", True), ("forward", True), ("forward(float*)+0x10", True),
        ("void cudnn::forward_pass(int)+0x80", False), ("fmha_forward+0x80", False), ("void f(forward*)+0x10", False),
        ("void cudnn::forward<float>(int)", False),
    ],
)  # fmt: skip
def test_initcheck_s_kernels_are_told_by_whole_names(kernel, ours):
    text = f"========= Uninitialized __global__ memory read\n=========     at {kernel}+0x80 in forward.cu:3\n"
    assert bool(memory.reports(text, ["attn_plugins", "forward"])) == ours


@pytest.mark.parametrize(
    "status, text, passed, words",
    [
        (0, "f: 3 calls by cuda\n========= ERROR SUMMARY: 0 errors\n", True, "f: 3 calls by cuda"),
        (9, "f: 3 calls by cuda\n========= ERROR SUMMARY: 2 errors\n", False, "ERROR SUMMARY: 2 errors"),
        (1, "ImportError: no torch\n", False, "status 1: ImportError: no torch"),
        (0, "========= Error: no GPU\n", False, "status 0: ========= Error: no GPU"),
        (None, "", False, "not done after 5 s"),
    ],
)
def test_verdicts_of_memcheck(status, text, passed, words):
    assert memory.judge("memcheck", "f", Done(status, 5.0, text), text, ["k"]) == ("memcheck, f", passed, words)


def test_the_checker_watches_our_kernels():
    words = memory.command("checker", "memcheck", "window_attention", 60.0, ["attn_plugins", "one"])
    assert words[:3] == ["checker", "--tool", "memcheck"]
    assert [words[n + 1] for n, word in enumerate(words) if word == "--kernel-name"] == ["kns=attn_plugins", "kne=one"]
    assert "--kernel-name" not in memory.command("checker", "initcheck", "window_attention", 60.0, ["attn_plugins"])


def test_without_the_checker_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.shutil, "which", lambda name: None)
    monkeypatch.setattr(memory.toolchain, "cuda_home", lambda: str(tmp_path))
    (found,) = memory.check_memory(["window_attention"], 1, Budget(9), tmp_path / "log")
    assert not found.passed
    assert "memory was not checked" in found.line


def test_the_checker_of_the_toolkit_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.shutil, "which", lambda name: None)
    monkeypatch.setattr(memory.toolchain, "cuda_home", lambda: str(tmp_path))
    program = tmp_path / "compute-sanitizer" / "compute-sanitizer"
    program.parent.mkdir()
    program.touch()
    assert memory.checker() == str(program)


def test_random_calls_by_every_backend_on_the_cpu():
    from tools.gpu_check.backends import backends_of
    from tools.gpu_check.calls import compute

    done, errors = compute("window_attention", 6, 60.0, "cpu")
    assert not errors
    assert set(done) <= set(backends_of("window_attention"))
    assert done["torch"] == 6


def test_a_call_that_fails_does_not_end_the_others(monkeypatch):
    from tools.gpu_check import calls

    def fail(call, grad, name):
        raise RuntimeError("no luck\nat all")

    monkeypatch.setattr(calls.check, "compute", fail)
    done, errors = calls.compute("window_attention", 2, 60.0, "cpu")
    assert not done
    assert errors[0].endswith(": no luck")
    assert {line.split()[1] for line in errors} == {"0", "1"}


def test_fuzzing_beside_the_reference_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "NUMBER", 3)
    (found,) = memory.fuzz(["criss_cross_attention"], 1, Budget(120), tmp_path / "log", "cpu")
    assert found.passed, found.line
    assert "3 calls" in found.line


def test_files_that_take_the_device_that_is_there_are_collected(tmp_path, monkeypatch):
    (tmp_path / "test_bad.py").write_text("import pytest\nDEVICE = 'cuda'\ndef test_there(): pass\n")
    (tmp_path / "test_other.py").write_text(
        "import pytest\nDEVICE = 'cpu'\ndef test_here(): pass\n@pytest.mark.cuda\ndef test_marked(): pass\n"
    )
    monkeypatch.setattr(testing, "pytest_command", in_folder(tmp_path))
    monkeypatch.setattr(testing, "ROOT", tmp_path)
    found, _ = testing.collect(Budget(60), tmp_path / "log", tmp_path, [str(tmp_path)])
    assert found == ["test_bad.py::test_there", "test_other.py::test_marked"]
