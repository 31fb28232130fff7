"""The classifier's trainer, run from its command line on generated pictures."""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import islice, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

timm = pytest.importorskip("timm")

from tools.datasets import image_folders  # noqa: E402
from tools.train.__main__ import main  # noqa: E402
from tools.train.checkpoint import read_weights  # noqa: E402
from tools.train.config import ConfigError, load  # noqa: E402
from tools.train.model import create_model  # noqa: E402
from tools.train.trainer import create_scheduler  # noqa: E402

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs/timm").glob("*.yaml"))
SMALL = ["--set", "workers=0", "--set", "batch_size=8"]


def subset(source: Path, target: Path, train: int, val: int) -> Path:
    """Return the first images of every class."""
    for folder in source.glob("*/*"):
        copy = target / folder.relative_to(source)
        copy.mkdir(parents=True)
        for file in sorted(folder.iterdir())[: {"train": train, "val": val}[folder.parent.name]]:
            shutil.copy(file, copy)
    return target


@pytest.fixture(scope="module")
def every_digit(tmp_path_factory) -> Path:
    everything = tmp_path_factory.mktemp("digits") / "all"
    assert image_folders.main(["digits", str(everything)]) == 0
    return everything


@pytest.fixture(scope="module")
def digits(every_digit, tmp_path_factory) -> Path:
    """Return a sixth of the digits: 240 for training, 60 for validation."""
    return subset(every_digit, tmp_path_factory.mktemp("digits") / "sixth", 24, 6)


@pytest.fixture(scope="module")
def ten_digits(every_digit, tmp_path_factory) -> Path:
    """Return one digit per class for training and for validation."""
    return subset(every_digit, tmp_path_factory.mktemp("digits") / "ten", 1, 1)


def rows(folder: Path) -> list[dict[str, float]]:
    with open(folder / "log.csv") as file:
        return [{k: float(v) for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def run(digits: Path, output: Path, *arguments: str, config: str = "digits") -> int:
    return main(
        [str(ROOT / f"configs/timm/{config}.yaml"), "--data", str(digits), "--output", str(output), *SMALL, *arguments]
    )


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("trained")
    assert run(digits, output, "--epochs", "6", "--tensorboard", "--set", "ema=0.9") == 0
    return output


def test_it_learns_and_leaves_its_files(trained):
    log = rows(trained)
    assert [row["epoch"] for row in log] == [1, 2, 3, 4, 5, 6]
    assert log[-1]["train_loss"] < 0.7 * log[0]["train_loss"]
    assert log[-1]["top1"] > 40  # of ten classes
    assert log[-1]["top5"] >= log[-1]["top1"]
    names = {file.name for file in trained.iterdir()}
    assert names == {"log.csv", "best.safetensors", "last.safetensors", "state.pt", "tensorboard"}
    assert any((trained / "tensorboard").iterdir())


def test_the_weights_load_into_timm_and_evaluate_the_same(trained, digits, capsys):
    tensors, metadata = read_weights(trained / "best.safetensors")
    assert metadata["model"] == "aa_wide_resnet28_10"
    options = dict(depth=10, width=2, nu=0.25, kappa=0.25, num_heads=4, min_key_dim_per_head=8, img_size=16)
    weights = str(trained / "best.safetensors")
    model = timm.create_model("aa_wide_resnet28_10", num_classes=10, checkpoint_path=weights, **options)
    assert all(torch.equal(tensors[key], value) for key, value in model.state_dict().items())
    capsys.readouterr()
    assert run(digits, trained, "--evaluate", str(trained / "best.safetensors")) == 0
    best = max(row["top1"] for row in rows(trained))
    assert f"top-1 {best:.2f} %" in capsys.readouterr().out


def test_a_training_starts_from_weights_of_another_model(trained, ten_digits, tmp_path, capsys):
    weights = trained / "last.safetensors"
    changes = ["--set", f"init={weights}", "--set", "model_args.nu=0.0", "--set", "lr=1e-9", "--set", "weight_decay=0"]
    assert run(ten_digits, tmp_path / "plain", "--epochs", "1", *changes) == 0
    before, after = read_weights(weights)[0], read_weights(tmp_path / "plain/last.safetensors")[0]
    shared = [name for name, tensor in before.items() if name in after and after[name].shape == tensor.shape]
    assert f"{len(shared)} of {len(after)} tensors of the model start from {weights}" in capsys.readouterr().out
    assert 0 < len(shared) < len(after)
    learned = [name for name in shared if name.endswith(("weight", "bias"))]
    assert all(torch.allclose(before[name], after[name], atol=1e-5) for name in learned)
    for wrong, words in (
        (tmp_path / "none", "init must be weights in safetensors"),
        (weights, "has no parameter of a name"),
    ):
        model = ["--model", "vit_tiny_patch16_224"] if wrong == weights else []
        options = ["--set", f"init={wrong}", *(["--set", "model_args={}", "--set", "input_size=224"] if model else [])]
        assert run(ten_digits, tmp_path / "wrong", "--epochs", "1", *model, *options) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes(every_digit, tmp_path, capsys):
    """Two processes leave out the same images, and together evaluate every other one once, as one process does."""
    few_digits = subset(every_digit, tmp_path / "few", 8, 3)  # do not fill the batches of one process or of two
    next((few_digits / "train/two").iterdir()).write_bytes(b"")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "tools.train", "configs/timm/digits.yaml", "--data", str(few_digits), "--output",
        str(tmp_path / "out"), "--epochs", "2", "--device", "cpu", *SMALL, "--set", "batch_size=256", "--skip-broken",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr
    log = rows(tmp_path / "out")
    assert [row["epoch"] for row in log] == [1, 2]
    assert log[1]["train_loss"] < log[0]["train_loss"]
    assert result.stdout.count("left out 1 of 110 images") == result.stdout.count("epoch 2/2: loss") == 1
    assert "batch_size 256 is more than the 78 images of an epoch: training with batch_size" in result.stdout
    assert len((tmp_path / "out/broken.txt").read_text().splitlines()) == 1
    options = ["--evaluate", str(tmp_path / "out/last.safetensors"), "--device", "cpu"]
    assert run(few_digits, tmp_path / "none", *options) == 0
    alone = capsys.readouterr().out
    assert f"top-1 {log[1]['top1']:.2f} %" in alone
    assert f"loss {log[1]['val_loss']:.4f}" in alone


@pytest.mark.sampled(4, every_value=False)
@pytest.mark.parametrize("config", [c for c in CONFIGS if load(c).dataset != "clips"], ids=lambda file: file.stem)
def test_a_config_trains_and_infers(config, ten_digits, tmp_path):
    size = "16" if "imagenet" not in config.stem and "image" not in config.stem else "64"
    changes = ["dataset=folder", "epochs=1", "batch_size=5", "workers=0", f"input_size={size}"]
    if "vit" in config.stem:
        changes.append(f"model_args.img_size={size}")
    if "cifar" in config.stem:
        changes += ["model_args.depth=10", "model_args.width=5"]
    if "mnasnet" not in config.stem:  # the CPU's convolutions in bfloat16 are slow, so only one model, the MnasNet
        changes += ["precision=float32"]
    arguments = [str(config), "--data", str(ten_digits), "--output", str(tmp_path / "out")]
    assert main([*arguments, *(part for change in changes for part in ("--set", change))]) == 0
    (row,) = rows(tmp_path / "out")
    assert math.isfinite(row["train_loss"])
    assert 0 <= row["top1"] <= row["top5"] <= 100


def test_schedules():
    """The papers' learning rates over time, with steps of a tenth of an epoch."""

    def course(name: str, epochs: list[float]) -> list[float]:
        config = load(ROOT / f"configs/timm/{name}.yaml")
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], config.scaled_lr())
        scheduler = create_scheduler(config, optimizer, 10)
        rates = []
        for epoch in epochs:
            scheduler.step_update(round(epoch * 10))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    lr = 0.128 * 1024 / 256
    assert course("imagenet_aa_resnet50", [0, 2.5, 5, 29, 30, 60, 80, 90]) == pytest.approx(
        [0, lr / 2, lr, lr, lr / 10, lr / 100, lr / 1000, lr / 10000]
    )
    assert course("cifar100_aa_wide_resnet28_10", [0, 12.5, 25, 262.5]) == pytest.approx([0, 0.1, 0.2, 0.1])
    assert course("cifar100_wide_resnet28_10", [25]) == pytest.approx([0.8])
    # "adjusted the learning rate decay so that the final learning rate stays the same"
    (final,) = course("imagenet_aa_mnasnet_100", [349.9])
    assert final == pytest.approx(0.256 * 0.97**145, rel=2e-3)


def test_offsets_learn_at_a_tenth_of_the_rate(ten_digits, tmp_path):
    options = ["--model", "dcn_resnet50", "--epochs", "1", "--set", "model_args={'layers': [1, 1, 1, 1]}"]
    assert run(ten_digits, tmp_path / "out", *options, "--set", "input_size=32") == 0
    state = torch.load(tmp_path / "out/state.pt", weights_only=True)
    rates = {group["initial_lr"] for group in state["parts"]["optimizer"]["param_groups"]}
    assert len(rates) == 2
    assert min(rates) == pytest.approx(max(rates) / 10)


def test_a_diverging_training_stops_and_keeps_what_it_has(digits, tmp_path, capsys):
    assert run(digits, tmp_path, "--lr", "1e12", "--epochs", "2", "--set", "warmup=0") == 2
    assert "the loss is" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--set", "epoch=3"], "unknown key 'epoch': did you mean 'epochs'?"),
        (["--set", "epochs"], "--set must be KEY=VALUE, got 'epochs'"),
        (["--set", "epochs=many"], "epochs must be int, got 'many'"),
        (["--set", "schedule=linear"], "schedule must be one of cosine, multistep, exponential, got 'linear'"),
        (["--set", "schedule=multistep"], "schedule 'multistep' needs milestones"),
        (["--set", "hflip=2"], "hflip must be from 0 to 1, got 2.0"),
        (["--set", "batch_size=7", "--set", "accumulate=2"], "batch_size 7 must be a multiple"),
        (["--set", "batch_size=7", "--set", "mixup=0.2"], "batch_size / processes / accumulate must be even for mixup"),
        (["--set", "workers=-1"], "workers must be at least 0, got -1"),
        (["--set", "epochs=[1"], "--set epochs must be a value in YAML, got '[1'"),
        (["--set", "lr.x=1"], "--set lr.x: lr has no keys of its own"),
        (["--device", "gpu"], "--device must be one that torch finds here, such as cpu, got 'gpu': Expected one of"),
        (["--device", "cuda:99"], "--device must be one that torch finds here, such as cpu, got 'cuda:99': "),
        (["--set", "precision=float16", "--device", "cpu"], "precision 'float16' needs a GPU"),
        (["--set", "model_args.kapa=1"], "model aa_wide_resnet28_10 with .*kapa"),
        (["--set", "model_args.nu=3"], "nu must be from 0 to 1, got 3"),
        (["--set", "model_args.pretrained=true"], "No pretrained weights exist for aa_wide_resnet28_10"),
        (["--model", "aa_resnet51"], "model must be a model of timm, got 'aa_resnet51': did you mean aa_resnet50, "),
        (["--set", "erasing=0.5"], "crop 'pad' does not support"),
        (
            ["--evaluate", "nothing.safetensors"],
            "--evaluate must be weights in safetensors, got nothing.safetensors: No such",
        ),
    ],
)
def test_bad_arguments(digits, tmp_path, capsys, arguments, words):
    assert run(digits, tmp_path / "out", *arguments) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train: ")]
    assert re.search(words if ".*" in words else re.escape(words), error)
    assert not (tmp_path / "out").exists()


def test_bad_data(digits, tmp_path, capsys):
    def error_of(root: Path) -> str:
        assert run(root, tmp_path / "out", "--epochs", "1") == 2
        return capsys.readouterr().err

    assert f"there is no folder {tmp_path / 'nowhere/train'}" in error_of(tmp_path / "nowhere")
    copy = tmp_path / "copy"
    shutil.copytree(digits, copy)
    shutil.rmtree(copy / "val/zero")
    assert "not in both: zero" in error_of(copy)
    (copy / "val/zero").mkdir()
    assert "no valid file for the classes zero" in error_of(copy)


def test_a_training_is_not_overwritten_nor_mixed_with_another(trained, digits, capsys):
    before = (trained / "log.csv").read_bytes()
    assert run(digits, trained, "--epochs", "6", "--set", "ema=0.9") == 2
    assert "holds a training already: add --resume" in capsys.readouterr().err
    assert run(digits, trained, "--epochs", "6", "--set", "ema=0.9", "--resume", "--set", "seed=7") == 2
    assert "was trained with seed = 0, but now it is 7" in capsys.readouterr().err
    weights = str(trained / "best.safetensors")
    assert run(digits, trained, "--evaluate", weights, "--set", "model_args.width=5") == 2
    assert "does not fit aa_wide_resnet28_10" in capsys.readouterr().err
    assert run(digits, trained, "--evaluate", weights, "--model", "resnet18", "--set", "model_args={}") == 2
    assert "--evaluate must be weights of resnet18, but" in capsys.readouterr().err
    assert (trained / "log.csv").read_bytes() == before


def test_a_config_file_that_is_none(tmp_path):
    for text, words in (("- a\n- b\n", "must hold keys and values"), ("a: [", "is not YAML")):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(ConfigError, match=words):
            load(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "y.yaml")
    with pytest.raises(ConfigError, match="no model is given"):
        load(None)


def test_placed_digits(monkeypatch):
    """Upright digits are the plain ones enlarged, in the same halves; deformed ones have other sizes."""
    own = list(image_folders.digits())[:40]
    monkeypatch.setattr(image_folders, "digits", lambda: iter(own))
    upright = list(image_folders.placed_digits(False, 2, 0))
    assert [(half, name) for half, name, _ in upright[::2]] == [(half, name) for half, name, _ in own]
    for (_, _, pixels), (_, _, image) in zip(own, upright[::2]):
        assert image.shape == (128, 128, 3)
        rows, columns = (np.flatnonzero(image[..., 0].max(axis) > 60) for axis in (1, 0))
        assert max(np.ptp(rows), np.ptp(columns)) <= 60  # of 50 pixels, and interpolated
        assert image.astype(float).mean() == pytest.approx(pixels.astype(float).mean() * (50 / 128) ** 2, rel=0.1)
    areas = [(image > 60).mean() for _, _, image in image_folders.placed_digits(True, 2, 0)]
    assert max(areas) > 4 * min(areas)
    again = list(image_folders.placed_digits(False, 2, 0))
    assert all((one == other).all() for (_, _, one), (_, _, other) in zip(upright, again))


def test_arrangements():
    """The class is what stands beside the 0 and above or below it; the halves share no sample of a digit."""
    known = {half: {} for half in ("train", "val")}
    for half, name, pixels in image_folders.digits():
        known[half][pixels.tobytes()] = image_folders.CLASSES.index(name)
    images = list(image_folders.arrangements(2, 1, 0))
    assert Counter((half, name) for half, name, _ in images) == {
        (half, a + b): 4 * count for half, count in (("train", 2), ("val", 1)) for a, b in permutations("123", 2)
    }
    for half, name, image in images:
        corners = [image[top : top + 16 : 2, left : left + 16 : 2] for top in (32, 80) for left in (32, 80)]
        shown = [known[half][corner.tobytes()] for corner in corners]
        zero = shown.index(0)
        assert name == f"{shown[(1, 0, 3, 2)[zero]]}{shown[(2, 3, 0, 1)[zero]]}"
        assert (image_folders.arranged(corners) == image).all()
    again = list(image_folders.arrangements(2, 1, 0))
    assert all((one == other).all() for (_, _, one), (_, _, other) in zip(images, again))


def test_only_positions_tell_arrangements_apart():
    """Attention alone without positions gives all orders of the same digits the same logits."""
    samples = [pixels for _, _, pixels in islice(image_folders.digits(), 4)]
    images = np.stack([image_folders.arranged([samples[n] for n in order]) for order in permutations(range(4))])
    x = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255
    for position in ("none", "relative"):
        changes = [f"model_args.position={position}", "model_args.zero_init_last=false"]
        model = create_model(load(ROOT / "configs/timm/arrangements.yaml", changes), 6).double().eval()
        with torch.no_grad():
            logits = model(x)
        assert torch.allclose(logits, logits[:1], rtol=1e-9, atol=0) == (position == "none")


@pytest.mark.parametrize("apart", [(11, 15), (25, 28)])
def test_only_attention_tells_the_marked_digit(apart, monkeypatch):
    """In the other digit's line the square marks that one, and convolutions see no difference between the pictures."""
    draw = image_folders.arranged
    monkeypatch.setattr(image_folders, "arranged", lambda *placed: placed)
    known = {pixels.tobytes(): (half, name) for half, name, pixels in image_folders.digits()}
    models = {}
    for kind in ("none", "cc"):
        changes = [f"model_args.attention_type={kind}", "model_args.zero_init_last=false"]
        models[kind] = create_model(load(ROOT / "configs/timm/marked_digits.yaml", changes), 10).double().eval()
    torch.nn.init.ones_(models["cc"].layer3[0].attention.gamma.scale)
    for half, name, (parts, corners) in image_folders.marked(1, 1, apart, 0):
        assert [known[part.tobytes()] == (half, name) for part in parts[1:]] == [True, False]
        line = int(corners[0][0] != corners[1][0])  # the axis that square and digit share
        steps = np.abs(corners[1:] - corners[0]) // 4
        assert steps[0, line] == 0
        assert steps[1, line] >= 6
        assert all(apart[0] <= step <= apart[1] for step in steps[:, 1 - line])
        moved = np.array(corners)
        moved[0, line] = corners[2][line]
        images = torch.from_numpy(np.stack([draw(parts, corners), draw(parts, moved)])).permute(0, 3, 1, 2)
        for kind, model in models.items():
            with torch.no_grad():
                one, other = model(images.double() / 255)
            assert torch.allclose(one, other, rtol=1e-9, atol=0) == (kind == "none")


def test_crops_keep_their_halves_apart(tmp_path, capsys):
    """Training crops do not overlap the columns that validation crops come from."""
    assert image_folders.main(["crops", str(tmp_path / "a"), "--train", "3", "--val", "2", "--side", "16"]) == 0
    assert image_folders.main(["crops", str(tmp_path / "b"), "--train", "3", "--val", "2", "--side", "16"]) == 0
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.png"))
    assert len(files) == 11 * 5
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    assert np.asarray(Image.open(tmp_path / "a" / files[0])).shape == (16, 16, 3)
    wide = np.tile(np.arange(1000)[None, :, None], (300, 1, 3))
    shown = {"train": [], "val": []}
    with pytest.MonkeyPatch.context() as patch:
        columns = (wide * 255 // 1000).astype(np.uint8)  # brightness encodes the column
        patch.setattr(image_folders, "photographs", lambda: [columns] * len(image_folders.PHOTOGRAPHS))
        for half, _, crop in image_folders.crops(20, 20, 16, 0):
            shown[half] += [crop.min(), crop.max()]
    assert max(shown["train"]) < min(shown["val"])
    with pytest.raises(SystemExit, match="2"):
        image_folders.main(["digits", str(tmp_path / "a")])
    assert "exists already" in capsys.readouterr().err
