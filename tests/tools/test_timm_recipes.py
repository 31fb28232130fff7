"""``configs/timm`` against the papers' values, by timm's factories and, where it is there, by its ``train.py``."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

timm = pytest.importorskip("timm")

from timm.optim import create_optimizer_v2, optimizer_kwargs  # noqa: E402
from timm.scheduler import create_scheduler_v2  # noqa: E402
from timm.scheduler.scheduler_factory import scheduler_kwargs  # noqa: E402

from tests.helpers.slow_cases import slow_but  # noqa: E402
from tools.demo_quick import write_digits  # noqa: E402
from tools.train.config import load  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "configs/timm"
TABLE = yaml.safe_load((Path(__file__).parent / "paper_values.yaml").read_text(encoding="utf-8"))
FILES = sorted(CONFIGS.glob("*.yaml"))
ROWS = re.findall(r"^\| `(\w+)\.yaml (--model .*?)` \|", (CONFIGS / "README.md").read_text(encoding="utf-8"), re.M)
TRAIN = Path(os.environ.get("TIMM", "none"), "train.py")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_is_the_papers(name):
    row = TABLE[name]
    assert not row["values"].keys() & row["open"].keys()
    ours = vars(load(CONFIGS / f"{name}.yaml")) if "/" in name else read(name)
    values = {"batch": 8 * ours["batch_size"], **ours}
    expected = row["values"] | row["open"]
    assert {key: values[key] for key in expected} == expected


def test_every_recipe_of_the_paper_has_its_row():
    files = {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")}
    assert files - {"image_folder", "tools_train/clips", "tools_train/digits"} == set(TABLE)


def built(name: str, model: torch.nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any, int]:
    """Return the optimizer, the schedule and the number of epochs as ``train.py`` builds them for 8 GPUs."""
    config = read(name)
    lr = config["lr_base"] * 8 * config["batch_size"] / config.get("lr_base_size", 256)
    arguments = Namespace(**{"momentum": 0.9, "lr": lr, **config})
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=arguments), **config.get("opt_kwargs", {}))
    return optimizer, *create_scheduler_v2(optimizer, **scheduler_kwargs(arguments), updates_per_epoch=steps)


RATES = {
    "imagenet_resnet": {0: 0, 2.5: 0.256, 5: 0.512, 29: 0.512, 30: 0.0512, 60: 0.00512, 80: 5.12e-4, 90: 5.12e-5},
    # "adjusted the learning rate decay so that the final learning rate stays the same"
    "imagenet_mnasnet": {0: 0, 5: 0.128 * 0.97465**2, 349.9: 0.256 * 0.97**145},
    "image_folder": {0: 0, 5: 0.4, 52.5: 0.2, 100: 0},
}


@pytest.mark.parametrize("name", RATES)
def test_optimizer_and_schedule(name):
    model = timm.create_model(read(name)["model"], img_size=32, num_classes=10)
    optimizer, scheduler, epochs = built(name, model, steps=10)
    assert epochs == {"imagenet_resnet": 100, "imagenet_mnasnet": 350, "image_folder": 100}[name]
    if name == "imagenet_mnasnet":
        assert type(optimizer).__name__ == "RMSpropTF"
        assert (optimizer.defaults["alpha"], optimizer.defaults["eps"]) == (0.9, 0.001)
    else:
        assert isinstance(optimizer, torch.optim.SGD)
        assert not optimizer.defaults["nesterov"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    free = {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
    assert free >= {name for name in names.values() if name.endswith(("bias", "_rel", "bn1.weight"))}
    assert free & {name for name in names.values() if name.endswith("_rel")}
    assert "conv_stem.weight" not in free
    for epoch, rate in RATES[name].items():
        scheduler.step_update(round(epoch * 10))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=2e-3, abs=1e-9)


@pytest.mark.parametrize(("file", "options"), slow_but(ROWS[::3], ROWS))
def test_a_documented_model_takes_a_step(file, options):
    name, *pairs = options.removeprefix("--model ").replace("--model-kwargs ", "").replace('"', "").split()
    arguments = {}
    for pair in pairs:  # as timm.utils.ParseKwargs reads them
        key, _, text = pair.partition("=")
        try:
            arguments[key] = ast.literal_eval(text)
        except ValueError:
            arguments[key] = text
    size = {"img_size": 32} if name.startswith("aa_") else {}
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **arguments, **size)
    optimizer, scheduler, _ = built(file, model, steps=10)
    scheduler.step_update(25)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4))
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert sum(changed) > 0.5 * len(changed)  # the inner layers of blocks that start as the identity do not change


@pytest.mark.slow
@pytest.mark.skipif(not TRAIN.is_file(), reason="TIMM must be a checkout of timm's repository")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_timms_script_takes_every_option(file, tmp_path):
    write_digits(tmp_path / "digits", 5)
    command = [sys.executable, TRAIN, "-c", file, "--data-dir", tmp_path / "digits", "--output", tmp_path]
    small = "--num-classes 10 --img-size 32 --model-kwargs img_size=32 --device cpu -b 8 --epochs 1 --warmup-epochs 0"
    result = subprocess.run(
        [*map(str, command), *small.split(), "--workers", "0", "--experiment", "run"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    options = subprocess.run([sys.executable, TRAIN, "--help"], capture_output=True, text=True).stdout
    assert not [key for key in yaml.safe_load(file.read_text()) if f"--{key.replace('_', '-')} " not in f"{options} "]
    assert (tmp_path / "run/model_best.pth.tar").is_file()
