"""Helpers of the fairseq tests: stock console commands on a toy language pair, and small models on random batches."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).parents[2]
SMALL = {"embed_dim": 32, "ffn_embed_dim": 16}
WORDS = "the a cat dog bird sees likes finds red blue small big house tree book on in under".split()


def script(command: str) -> str:
    return str(Path(sys.executable).with_name(f"fairseq-{command}"))


def fairseq(command: str, *arguments: Any, check: bool = True, text: str | None = None) -> str:
    """Run a stock fairseq console command from the repository root with ``text`` as its input; return its output."""
    result = subprocess.run(
        [script(command), *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        input=text,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def write_text(folder: Path) -> None:
    """Write a toy language pair of lines of varying length. The target spells every word of the source backwards."""
    draw = random.Random(0)
    for split, lines in (("train", 100), ("valid", 8), ("test", 8)):
        english = [draw.choices(WORDS, k=3 + i % 6) for i in range(lines)]
        folder.joinpath(f"{split}.en").write_text("\n".join(" ".join(line) for line in english) + "\n")
        german = "\n".join(" ".join(word[::-1] for word in line) for line in english)
        folder.joinpath(f"{split}.de").write_text(german + "\n")


def generate(data: Path, checkpoint: Path, *options: Any) -> dict[str, dict[int, str]]:
    """Return the lines of the log by letter and sentence: S source, H hypothesis, A alignment."""
    options = ("--path", checkpoint, *options, "--cpu", "--num-workers=0", "--beam=3", "--min-len=3", "--max-len-b=9")
    log = fairseq("generate", data, "--user-dir", "plugins/fairseq", *options)
    assert "Translated 8 sentences" in log
    lines: dict[str, dict[int, str]] = {letter: {} for letter in "SHA"}
    for line in log.splitlines():
        name, _, text = line.partition("\t")
        letter, _, number = name.partition("-")
        if letter in lines and number.isdigit():
            lines[letter][int(number)] = text.rpartition("\t")[2]
    return lines


class Task:
    """The attributes of a task that fairseq's models read."""

    def __init__(self) -> None:
        from fairseq.data import Dictionary

        self.source_dictionary = self.target_dictionary = Dictionary()
        for word in WORDS:
            self.target_dictionary.add_symbol(word)


def batch(model: Any, lengths: tuple[int, ...] = (6, 4, 2), T: int = 5) -> dict[str, torch.Tensor]:
    """Return a random batch: sources padded on the left, longest first, and targets."""
    words = len(model.encoder.dictionary)
    tokens = torch.randint(4, words, (len(lengths), max(lengths)))
    for row, length in zip(tokens, lengths):
        row[: max(lengths) - length] = model.encoder.dictionary.pad()
    previous = torch.randint(4, words, (len(lengths), T))
    return dict(src_tokens=tokens, src_lengths=torch.tensor(lengths), prev_output_tokens=previous)


def sentence(sample: dict[str, torch.Tensor], b: int) -> dict[str, torch.Tensor]:
    """Return one sentence of a random batch without its padding."""
    alone = {name: x[b : b + 1] for name, x in sample.items()}
    return {**alone, "src_tokens": alone["src_tokens"][:, -int(alone["src_lengths"]) :]}


def padded_right(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch with its sources padded on the right."""
    lengths = sample["src_lengths"].tolist()
    return {**sample, "src_tokens": torch.stack([row.roll(n) for row, n in zip(sample["src_tokens"], lengths)])}


def without_gradient(model: Any) -> list[str]:
    """Return the names of the parameters that have no gradient, or one of zeros."""
    return [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def check_training(model: Any, sample: dict[str, torch.Tensor], lr: float, steps: int = 10) -> None:
    """Check that every parameter gets a gradient, and that a few steps lower the loss of random targets."""
    target = torch.randint(4, len(model.decoder.dictionary), sample["prev_output_tokens"].shape)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    losses = []
    for step in range(steps):
        loss = F.cross_entropy(model(**sample)[0].flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        assert step or without_gradient(model) == []
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3


def build_transformer(**options: Any) -> Any:
    """Build a ``spatial_transformer`` of two layers of 32 channels a side."""
    from attn_plugins.fairseq.spatial_transformer import SpatialTransformerModel, spatial_transformer_tiny

    torch.manual_seed(0)
    sizes = {f"{side}_{n}": size for side in ("encoder", "decoder") for n, size in SMALL.items()}
    args = argparse.Namespace(**{**sizes, **options})
    spatial_transformer_tiny(args)
    return SpatialTransformerModel.build_model(args, Task())


def step_by_step(model: Any, sample: dict[str, torch.Tensor], reorders: dict[int, torch.Tensor]) -> list[Any]:
    """Decode step by step. Return every step's output, and the reordered targets and encoder output of the last."""
    state: dict = {}
    memory = model.encoder(sample["src_tokens"], sample["src_lengths"])
    previous = sample["prev_output_tokens"]
    steps = []
    for t in range(previous.shape[1]):
        if t in reorders:
            model.decoder.reorder_incremental_state_scripting(state, reorders[t])
            memory = model.encoder.reorder_encoder_out(memory, reorders[t])
            previous = previous[reorders[t]]
        steps.append(model.decoder(previous[:, : t + 1], memory, state))
    return [steps, previous, memory]
