"""The model ``spatial_transformer`` by fairseq's own console scripts, each a process as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq_helpers import ROOT, WORDS, fairseq

pytest.importorskip("fairseq")

from tools.average_checkpoints import main as average_checkpoints

ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
MIXED = ["--arch=spatial_transformer_tiny", "--encoder-attention=0110", "--decoder-attention=bilateral"]
MIXED += ["--cross-attention=1000", "--deformable", "--encoder-layers=1", "--decoder-layers=2"]
CPU = ["--user-dir=plugins/fairseq", "--cpu", "--num-workers=0"]
RUN = ["--optimizer=adam", "--lr=0.01", "--batch-size=10", "--log-format=simple", "--log-interval=1"]
UPDATES = 8


def script(command: str) -> str:
    return str(Path(sys.executable).with_name(f"fairseq-{command}"))


def train_command(data: Path, folder: Path, *options: Any) -> list[str]:
    parts = [*MIXED, *RUN, "--no-epoch-checkpoints", f"--save-dir={folder}", *options]
    return [script("train"), str(data), *map(str, parts)]


def losses(log: str) -> dict[int, str]:
    """Loss and norm of the gradient by update."""
    lines = re.findall(r"train_inner \| .* loss=([\d.]+),.*num_updates=(\d+),.* gnorm=([\d.]+)", log)
    return {int(update): f"{loss} {norm}" for loss, update, norm in lines}


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"]


def in_one_process(*commands: list[Any], check: bool = True) -> list[str]:
    """Run console scripts one after another in one interpreter; what each of them printed, errors too."""
    code = f"""
import json, runpy, sys, traceback
for command in json.loads(sys.argv[1]):
    sys.argv = [{script("")!r} + command[0], *command[1:]]
    print("=== next", flush=True)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print("exit", end.code, flush=True)
    except Exception as error:
        print("raised", type(error).__name__, error, flush=True)
"""
    import json

    arguments = json.dumps([[str(part) for part in command] for command in commands])
    result = subprocess.run(
        [sys.executable, "-c", code, arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout
    printed = result.stdout.split("=== next\n")[1:]
    assert len(printed) == len(commands)
    for text in printed:
        assert not check or "\nraised" not in text and not re.search(r"^exit [1-9]", text, re.M), text
    return printed


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> tuple[Path, str]:
    """An uninterrupted training from another folder, by absolute path, with loader workers: its folder and its log."""
    folder = tmp_path_factory.mktemp("trained")
    where = subprocess.run(
        [sys.executable, "-m", "attn_plugins", "fairseq-dir"], cwd=folder, capture_output=True, text=True, check=True
    )
    options = [f"--user-dir={where.stdout.strip()}", "--cpu", "--num-workers=2", "--save-interval-updates=4"]
    command = train_command(data, folder, *options, f"--max-update={UPDATES}")
    result = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout + result.stderr


def test_training_logs_every_update(trained):
    assert list(losses(trained[1])) == list(range(1, UPDATES + 1))


def test_generate_translates_every_sentence_and_scores(data, trained):
    folder, _ = trained
    options = ["--path", folder / "checkpoint_last.pt", "--beam=4", "--scoring=sacrebleu", "--remove-bpe"]
    log = fairseq("generate", data, *CPU, *options, "--required-batch-size-multiple=1", "--batch-size=3")
    assert "Translated 8 sentences" in log
    assert re.search(r"Generate test with beam=4: BLEU = [\d.]+", log)
    assert sorted(re.findall(r"^H-(\d+)\t", log, re.M)) == [str(i) for i in range(8)]


LINES = ["the cat sees a dog", "", "xylophone quux", " ".join(["cat"] * 30), "red blue"]


def interactive(data: Path, trained: tuple[Path, str], *options: str) -> subprocess.CompletedProcess:
    command = [script("interactive"), str(data), *CPU[:2], f"--path={trained[0] / 'checkpoint_last.pt'}", *options]
    command += ["-s=en", "-t=de", "--beam=4", "--max-source-positions=20", "--max-len-b=10"]
    text = "".join(f"{line}\n" for line in LINES)
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, input=text, capture_output=True, text=True, timeout=300)


def test_interactive_translates_odd_lines_and_refuses_long_ones(data, trained):
    """fairseq's own: an empty line and unknown words are translated, a line too long ends it with one error."""
    result = interactive(data, trained)
    assert result.returncode != 0
    assert re.findall(r"^S-(\d)\t(.*)$", result.stdout, re.M) == [("0", LINES[0]), ("1", ""), ("2", "<unk> <unk>")]
    assert re.findall(r"^H-(\d)\t-[\d.]+\t", result.stdout, re.M) == ["0", "1", "2"]
    assert re.search(r"invalid \(=\(.*31.*max_positions=\(20, 1024\).*--skip-invalid-size", result.stderr)


def test_interactive_skips_long_lines_where_it_is_told(data, trained):
    result = interactive(data, trained, "--skip-invalid-size-inputs-valid-test", "--buffer-size=5", "--batch-size=2")
    assert result.returncode == 0, result.stderr
    assert sorted(re.findall(r"^H-(\d)\t-[\d.]+\t", result.stdout, re.M)) == ["0", "1", "2", "4"]


def test_a_killed_training_goes_on_where_it_was(data, trained, tmp_path):
    folder, log = trained
    command = train_command(data, tmp_path, *CPU, "--save-interval-updates=4", "--max-update=1000")
    process = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    before = ""
    assert process.stdout is not None
    for line in process.stdout:
        before += line
        if "num_updates=6," in line:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait(60) == -signal.SIGKILL
    command[-1] = f"--max-update={UPDATES}"
    after = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert "Loaded checkpoint" in after.stdout + after.stderr
    whole, resumed = losses(log), losses(after.stdout + after.stderr)
    assert losses(before) == {update: whole[update] for update in range(1, 7)}
    assert min(resumed) in (5, 6, 7)  # it may have been killed after the next checkpoint
    assert resumed == {update: whole[update] for update in range(min(resumed), UPDATES + 1)}
    torch.testing.assert_close(parameters(tmp_path), parameters(folder), rtol=0, atol=0)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def test_two_processes_are_one_with_twice_the_accumulation(data, tmp_path):
    """By fairseq's options alone, and by workers that fairseq spawns, which it does on GPUs only by itself."""
    still = ["--dropout=0", "--max-update=4", "--batch-size=5"]
    ranks = []
    address = f"--distributed-init-method=tcp://localhost:{free_port()}"
    for rank in range(2):
        options = ["--distributed-world-size=2", f"--distributed-rank={rank}", address, "--distributed-no-spawn"]
        command = train_command(data, tmp_path / "two", *CPU, *still, *options, "--distributed-backend=gloo")
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True))
    [log] = in_one_process(
        train_command(data, tmp_path / "one", *CPU, *still, "--update-freq=2")[0:0]
        or ["train", *train_command(data, tmp_path / "one", *CPU, *still, "--update-freq=2")[1:]]
    )
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    torch.testing.assert_close(parameters(tmp_path / "two"), parameters(tmp_path / "one"), rtol=1e-4, atol=1e-5)
