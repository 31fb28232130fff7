"""The fuzzer finds planted faults, survives a crash, and prints a line that reproduces the failure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.fuzz import broken, check, workers
from tools.fuzz.__main__ import main
from tools.fuzz.operators import OPERATORS, legal_call

ROOT = Path(__file__).parents[2]
OPERATOR = "criss_cross_attention"
# Faults for calls of one width and for broken arguments, in a script whose workers have the same faults.
PLANTED = """
import os, signal, sys
from importlib import import_module

from attn_plugins.ops.criss_cross_attention import torch as plain
from tools.fuzz.__main__ import main

functional = import_module("attn_plugins.ops.criss_cross_attention.criss_cross_attention")
mix, check = plain._mix, functional._check

def wrong_number(result, *arguments, **options):
    mix(result, *arguments, **options)
    if result.shape[-1] == 5:
        result[-1:, -1:, -1:, -1:, -1:] += 0.5

def wrong_errors(query, key, value, position_logits):
    try:
        check(query, key, value, position_logits)
    except ValueError as error:
        raise RuntimeError("INTERNAL ASSERT FAILED") if "key" in str(error) else ValueError("the shapes do not fit")
    if value.shape[-1] == 5 and value.shape[0] == 2 and value.device.type == "cpu":
        os.kill(os.getpid(), signal.SIGSEGV)

plain._mix, functional._check = wrong_number, wrong_errors
functional.finite = lambda name, value: value if isinstance(value, (int, float)) else 1.0
if __name__ == "__main__":
    sys.exit(main(command=[sys.executable, __file__]))
"""
FOUND = (
    r"(output|gradient of \w+) is \S+ at \(.*\), not \S+: \S+ roundings",
    r"the ValueError does not name \w+: the shapes do not fit",
    "RuntimeError instead of ValueError or TypeError: INTERNAL ASSERT FAILED",
    r"with scale = .*: no error, but a result of shape \(",
    "the process ended, by SIGSEGV",
)


@pytest.mark.slow
def test_planted_faults_are_found_and_repeated(tmp_path):
    """Also a crash: a new worker runs the calls after it."""
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(script), OPERATOR, "--seed", "5", *arguments]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    def crashes(number: int) -> bool:
        shape = legal_call(OPERATOR, 5, number).arguments["value"].shape
        return shape[-1] == 5 and shape[0] == 2

    result = run("--calls", "60", "--workers", "2")
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{OPERATOR}: 60 calls, seed 5" in result.stdout
    lines = re.findall(rf"^python -m tools.fuzz {OPERATOR} --seed 5 --only (\d+)  # (.*)$", result.stdout, re.M)
    for words in FOUND:
        assert any(re.search(words, said) for _, said in lines), words
    crashed = {int(number) for number, said in lines if "SIGSEGV" in said}
    assert crashed == {number for number in range(60) if crashes(number)}
    assert len(crashed) > 1
    number, said = next(line for line in lines if re.search(FOUND[0], line[1]))
    again = run("--only", number)
    assert again.returncode == 1
    assert OPERATOR in again.stdout
    assert said in again.stdout
    assert run("--only", str(min(crashed))).returncode == -signal.SIGSEGV


def test_what_is_sound_passes(capsys):
    line = rf"{OPERATOR}: 40 calls, seed 5, \d+ s, errors up to \S+ roundings, 0 failures\n"
    for processes in ("2", "0"):
        assert main([OPERATOR, "--seed", "5", "--calls", "40", "--workers", processes]) == 0
        assert re.fullmatch(line, capsys.readouterr().out)
    assert main([OPERATOR, "--only", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(OPERATOR)
    assert "nothing is wrong" in printed


def test_a_worker_that_cannot_start_or_hangs_is_no_success(monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="a worker ended before its first call, with status 3"):
        main([OPERATOR, "--calls", "4"], command=[sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(workers, "HANG", 1)
    hangs = "import time; print('fuzz begins 0', flush=True); time.sleep(60)"
    assert main([OPERATOR, "--calls", "1"], command=[sys.executable, "-c", hangs]) == 1
    assert "--only 0  # the process ended, killed after 1 s without an answer" in capsys.readouterr().out


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_call_is_determined_by_its_number(operator):
    def tensors(seed: int, number: int) -> list[torch.Tensor]:
        call = legal_call(operator, seed, number)
        return [call.grad, *call.tensors().values()]

    def describe(seed: int, number: int) -> str:
        return legal_call(operator, seed, number).describe()

    for number in range(20):
        assert describe(3, number) == describe(3, number)
        for a, b in zip(tensors(3, number), tensors(3, number), strict=True):
            assert a.stride() == b.stride()
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert len({describe(seed, number) for seed in range(2) for number in range(20)}) == 40


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_drawn(operator):
    """All dtypes; strided, expanded and empty tensors; arguments absent, present, differentiated and invalid."""
    calls = [legal_call(operator, 0, number) for number in range(300)]
    tensors = [tensor for call in calls for tensor in call.tensors().values()]
    arguments = [call.arguments for call in calls]
    assert {call.dtype() for call in calls} == {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
    }  # fmt: skip
    assert any(not tensor.is_contiguous() for tensor in tensors)
    assert any(tensor.stride(-1) > 1 for tensor in tensors if tensor.dim() and tensor.shape[-1] > 1)
    assert any(0 in tensor.stride() for tensor in tensors)
    assert any(tensor.numel() == 0 for tensor in tensors)
    assert any(buffer.isnan().any() for call in calls for buffer in call.source.buffers)
    floats = {name for call in calls for name in call.floats()}
    assert {name for call in calls for name in call.differentiated} == floats
    optional = {name for name in floats if any(given[name] is None for given in arguments)}
    required = {"value", "input", "offset", "weight", "sampling_locations", "attention_weights"}
    assert optional >= floats - required
    mistakes = [broken.draw(call) for call in calls]
    assert {name for name, _ in filter(None, mistakes)} == set(arguments[0])


def test_memory_beside_an_argument_is_watched():
    """Writes outside of a tensor's elements are detected."""
    for number in range(100):
        call = legal_call(OPERATOR, 0, number)
        call.backend = None
        poisoned = [buffer for buffer in call.source.buffers if buffer.isnan().any()]
        if poisoned and call.grad.numel():
            break
    function = call.function

    def careless(**arguments):
        poisoned[0][poisoned[0].isnan()] = 1
        return function(**arguments)

    assert check.problems(call)[0] == []
    call.function = careless
    assert "an argument, or memory beside it, was written to" in check.problems(call)[0]


def test_rounding_is_no_fault_and_more_is():
    exact = torch.linspace(0.5, 2, 50, dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        plain = exact.to(dtype)
        assert check.compare(plain, exact, plain, dtype, 1.0)[0] == []
        wrong = plain.clone()
        wrong[7] *= 1 + 100 * torch.finfo(dtype).eps
        ((words),) = check.compare(wrong, exact, plain, dtype, 1.0)[0]
        assert words.startswith("is ")
        assert "at (7,)" in words
    wrong = exact.clone()
    wrong[3] = float("nan")
    assert "not finite" in check.compare(wrong, exact, exact, torch.float64, 1.0)[0][0]
    assert "torch.float32 (50,), not torch.float64 (50,)" in check.compare(
        exact.float(), exact, exact, torch.float64, 1.0
    )[0][0]  # fmt: skip


def test_a_wrong_command_line(capsys):
    for arguments, words in (
        (["attention"], "no operator named attention; there are window_attention"),
        (["--only", "3"], "--only needs the name of one operator"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert words in capsys.readouterr().err
