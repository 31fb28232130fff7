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

from tools.fuzz import broken, check
from tools.fuzz.__main__ import main
from tools.fuzz.draw import Draw
from tools.fuzz.operators import OPERATORS, describe, judge, legal_call

ROOT = Path(__file__).parents[2]
OPERATOR = "criss_cross_attention"
# A fault for calls of one width, in a script whose workers have the same fault.
PLANTED = """
import os, signal, sys
from importlib import import_module

from attn_plugins.ops.criss_cross import products
from tools.fuzz.__main__ import main

functional = import_module("attn_plugins.ops.criss_cross.criss_cross_attention")
mix, check = products._mix, functional._check

def wrong_number(result, *arguments, **options):
    mix(result, *arguments, **options)
    if result.shape[-1] == 5:
        result[-1:, -1:, -1:, -1:, -1:] += 0.5

def wrong_message(*arguments):
    try:
        check(*arguments)
    except (ValueError, TypeError):
        raise ValueError("the shapes do not fit")

def wrong_error(*arguments):
    try:
        check(*arguments)
    except ValueError:
        raise RuntimeError("INTERNAL ASSERT FAILED")

def crash(query, key, value, position_logits):
    check(query, key, value, position_logits)
    if value.shape[-1] == 5 and value.shape[0] == 2 and value.device.type == "cpu":
        os.kill(os.getpid(), signal.SIGSEGV)

if FAULT == "wrong_number":
    products._mix = wrong_number
elif FAULT == "no_error":
    functional.finite = lambda name, value: value if isinstance(value, (int, float)) else 1.0
elif FAULT:
    functional._check = globals()[FAULT]
if __name__ == "__main__":
    sys.exit(main(command=[sys.executable, __file__]))
"""


@pytest.fixture
def planted(tmp_path):
    """Run the tool with a fault in criss-cross attention: ``planted("wrong_number", "--calls", "40")``."""

    def run(fault: str, *arguments: str) -> subprocess.CompletedProcess:
        script = tmp_path / f"{fault or 'sound'}.py"
        script.write_text(f"FAULT = {fault!r}\n{PLANTED}")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        return subprocess.run(
            [sys.executable, str(script), OPERATOR, "--seed", "5", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize(
    "fault, words",
    [
        ("wrong_number", r"(output|gradient of \w+) is \S+ at \(.*\), not \S+: \S+ roundings"),
        ("wrong_message", r"the ValueError does not name \w+: the shapes do not fit"),
        pytest.param(
            "wrong_error",
            "RuntimeError instead of ValueError or TypeError: INTERNAL ASSERT FAILED",
            marks=pytest.mark.slow,
        ),
        pytest.param("no_error", r"with scale = .*: no error, but a result of shape \(", marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_found_and_repeated(planted, fault, words):
    result = planted(fault, "--calls", "60", "--workers", "2")
    assert result.returncode == 1, result.stdout + result.stderr
    lines = re.findall(rf"^python -m tools.fuzz {OPERATOR} --seed 5 --only (\d+)  # (.*)$", result.stdout, re.M)
    assert lines
    assert all(re.search(words, said) for _, said in lines), lines
    assert f"{OPERATOR}: 60 calls, seed 5" in result.stdout
    number, said = lines[0]
    again = planted(fault, "--only", number)
    assert again.returncode == 1
    assert OPERATOR in again.stdout
    assert said in again.stdout


def test_a_crash_is_found_and_the_calls_after_it_are_run(planted):
    """Every crashing call is reported; after each, a new worker continues."""

    def crashes(number: int) -> bool:
        shape = legal_call(OPERATOR, 5, number)[1].arguments["value"].shape
        return shape[-1] == 5 and shape[0] == 2

    expected = [number for number in range(60) if crashes(number)]
    assert len(expected) > 1
    result = planted("crash", "--calls", "60", "--workers", "1")
    assert result.returncode == 1
    found = re.findall(r"--only (\d+)  # the process ended, by SIGSEGV", result.stdout.split(f"{OPERATOR}: ")[0])
    assert list(map(int, found)) == expected
    assert planted("crash", "--only", found[0]).returncode == -signal.SIGSEGV


def test_what_is_sound_passes(planted):
    result = planted("", "--calls", "40", "--workers", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.fullmatch(
        rf"{OPERATOR}: 40 calls, seed 5, \d+ s, errors up to \S+ roundings, 0 failures\n", result.stdout
    )


def test_a_worker_that_cannot_start_is_no_success():
    with pytest.raises(RuntimeError, match="a worker ended before its first call, with status 3"):
        main([OPERATOR, "--calls", "4"], command=[sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_call_is_determined_by_its_number(operator):
    def tensors(seed: int, number: int) -> list[torch.Tensor]:
        _, call, grad = legal_call(operator, seed, number)
        return [grad, *call.tensors().values()]

    for number in range(20):
        assert describe(operator, 3, number) == describe(operator, 3, number)
        for a, b in zip(tensors(3, number), tensors(3, number), strict=True):
            assert a.stride() == b.stride()
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert len({describe(operator, seed, number) for seed in range(2) for number in range(20)}) == 40


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_drawn(operator):
    """All dtypes; strided, expanded and empty tensors; arguments absent, present, differentiated and invalid."""
    calls = [legal_call(operator, 0, number) for number in range(300)]
    tensors = [tensor for _, call, _ in calls for tensor in call.tensors().values()]
    arguments = [call.arguments for _, call, _ in calls]
    assert {call.dtype() for _, call, _ in calls} == {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
    }  # fmt: skip
    assert any(not tensor.is_contiguous() for tensor in tensors)
    assert any(tensor.stride(-1) > 1 for tensor in tensors if tensor.dim() and tensor.shape[-1] > 1)
    assert any(0 in tensor.stride() for tensor in tensors)
    assert any(tensor.numel() == 0 for tensor in tensors)
    assert any(buffer.isnan().any() for _, call, _ in calls for buffer in call.buffers)
    floats = {name for _, call, _ in calls for name in call.floats()}
    assert {name for _, call, _ in calls for name in call.differentiated} == floats
    optional = {name for name in floats if any(given[name] is None for given in arguments)}
    required = {"value", "input", "offset", "weight", "sampling_locations", "attention_weights"}
    assert optional >= floats - required
    mistakes = [broken.draw(source, call) for source, call, _ in calls]
    assert {name for name, _ in filter(None, mistakes)} == set(arguments[0])


def test_memory_beside_an_argument_is_watched():
    """Writes outside of a tensor's elements are detected."""
    for number in range(100):
        _, call, grad = legal_call(OPERATOR, 0, number)
        call.backend = None
        found = [buffer for buffer in call.buffers if buffer.isnan().any()]
        if found and grad.numel():
            break
    function = call.function

    def careless(**arguments):
        found[0][found[0].isnan()] = 1
        return function(**arguments)

    assert check.problems(call, grad)[0] == []
    call.function = careless
    assert "an argument, or memory beside it, was written to" in check.problems(call, grad)[0]


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


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["attention"], "no operator named attention; there are window_attention"),
        (["--only", "3"], "--only needs the name of one operator"),
    ],
)
def test_a_wrong_command_line(capsys, arguments, words):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert words in capsys.readouterr().err


def test_shapes_that_broadcast_are_legal():
    """The fuzzer's own definition of a legal call decides which sizes are invalid."""
    source = Draw("window_attention", 0, 0)
    assert source.extent() > 0
    number = next(n for n in range(200) if {"query", "position_logits"} <= set(_tensors("window_attention", n)))
    _, call, _ = legal_call("window_attention", 0, number)
    shapes = {name: tuple(tensor.shape) for name, tensor in call.tensors().items()}
    assert call.legal(shapes)
    logits = shapes["position_logits"]
    assert call.legal({**shapes, "position_logits": (1, 1, *logits[2:])})
    assert not call.legal({**shapes, "position_logits": (*logits[:-1], logits[-1] + 1)})
    assert not call.legal({**shapes, "key": (*shapes["key"][:-1], shapes["key"][-1] + 1)})


def _tensors(operator: str, number: int) -> dict:
    return legal_call(operator, 0, number)[1].tensors()


def test_only_prints_the_call(capsys):
    assert main([OPERATOR, "--only", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(OPERATOR)
    assert "nothing is wrong" in printed
    assert judge(OPERATOR, 0, 2).faults == []
