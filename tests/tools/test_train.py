"""The small trainer, run from its command line on digits and on drawn clips."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

timm = pytest.importorskip("timm")
pytest.importorskip("sklearn")

from tools.clips import open_clip, sampled, segments, strided  # noqa: E402
from tools.demo_quick import write_digits  # noqa: E402
from tools.pictures import BadPicture  # noqa: E402
from tools.train.__main__ import main, optimization  # noqa: E402
from tools.train.checkpoint import read_weights  # noqa: E402
from tools.train.config import Config, ConfigError, load  # noqa: E402
from tools.train.data import Transformed, datasets, transform  # noqa: E402
from tools.train.model import create_model  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "configs/timm/tools_train"
DIGITS, CLIPS = CONFIGS / "digits.yaml", CONFIGS / "clips.yaml"
TINY = [
    "model_args={embed_dim: 32, depth: 1, num_heads: 2, class_token: false, global_pool: avg}",
    "input_size=[32, 48]",
]
TINY += ["frames=4", "crop=none", "workers=0", "epochs=1", "batch_size=4"]


def run(config: Path, data: Path, output: Path, *changes: str) -> int:
    options = [part for change in changes for part in ("--set", change)]
    return main([str(config), "--data", str(data), "--output", str(output), "--device", "cpu", *options])


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "set"
    write_digits(folder, 20)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Draw clips of 8 frames of 32×48 pixels: a bright square that moves left or right."""
    root = tmp_path_factory.mktemp("clips") / "set"
    for half, count in (("train", 4), ("val", 2)):
        for name, step in (("left", -4), ("right", 4)):
            for n in range(count):
                (folder := root / half / name / f"{n}").mkdir(parents=True)
                for t in range(8):
                    pixels = np.full((32, 48, 3), 20 + 5 * n, np.uint8)
                    x = 20 + step * (t - 4)
                    pixels[8 + n : 16 + n, x : x + 8] = 250
                    Image.fromarray(pixels).save(folder / f"{t}.png")
    return root


@pytest.fixture
def clips(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "clips"))


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_it_learns_and_its_weights_load_into_timm(digits, tmp_path):
    assert run(DIGITS, digits, tmp_path / "one", "epochs=5", "batch_size=16", "workers=0", "lr=0.02") == 0
    one = list(csv.DictReader((tmp_path / "one/log.csv").open()))
    assert [row["epoch"] for row in one] == list("12345")
    assert float(one[-1]["train_loss"]) < 0.8 * float(one[0]["train_loss"])
    best = max(float(row["top1"]) for row in one)
    assert best > 25  # of ten classes

    weights = tmp_path / "one/best.safetensors"
    tensors, metadata = read_weights(weights)
    config = load(DIGITS)
    options = dict(config.model_args, img_size=16, num_classes=10)
    model = timm.create_model(config.model, checkpoint_path=str(weights), **options).eval()
    assert all(torch.equal(tensors[key], value) for key, value in model.state_dict().items())
    facts = dict(input_size=(3, 16, 16), interpolation="bilinear", mean=(0.5,) * 3, std=(0.5,) * 3)
    facts.update(timm.data.resolve_data_config({"input_size": (3, 16, 16)}, model=model))
    validation = Transformed(datasets(config, digits)[1], transform(config, facts, training=False))
    with torch.no_grad():
        images, labels = (torch.stack([torch.as_tensor(one[n]) for one in validation]) for n in (0, 1))
        right = (model(images).argmax(1) == labels).double().mean()
    assert 100 * float(right) == pytest.approx(best)
    assert metadata["classes"].startswith('["eight", "five"')


def test_a_seed_repeats_a_training(digits, tmp_path):
    rows = []
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        changes = ["epochs=1", "workers=0", "model_args.width=1", "model_args.num_heads=1", f"seed={seed}"]
        assert run(DIGITS, digits, tmp_path / name, *changes) == 0
        (row,) = csv.DictReader((tmp_path / name / "log.csv").open())
        rows.append({**row, "seconds": "0"})
    assert rows[0] == rows[1] != rows[2]


def test_padded_crops_shift_by_an_eighth():
    facts = dict(input_size=(3, 16, 16), interpolation="bilinear", mean=(0.0,) * 3, std=(1.0,) * 3)
    step = transform(load(DIGITS), facts, training=True)
    (crop,) = [part for part in step.transforms if isinstance(part, transforms.RandomCrop)]
    assert (crop.size, crop.padding) == ((16, 16), [2, 2])
    assert not any(isinstance(part, transforms.RandomCrop) for part in transform(load(DIGITS), facts, False).transforms)
    cifar = transform(load(CONFIGS / "cifar100_wide_resnet28_10.yaml"), {**facts, "input_size": (3, 32, 32)}, True)
    assert [part.padding for part in cifar.transforms if isinstance(part, transforms.RandomCrop)] == [[4, 4]]


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param("cifar100_aa_wide_resnet28_10", (), marks=pytest.mark.slow),
        ("cifar100_wide_resnet28_10", ("attn_layer=se", "attn_args.rd_divisor=1")),
        pytest.param("cifar100_wide_resnet28_10", ("attn_layer=ge", "attn_args.use_mlp=false"), marks=pytest.mark.slow),
    ],
)
def test_cifar_recipes(name, attention, digits, tmp_path):
    """On digits instead of CIFAR, at a small size."""
    config = load(CONFIGS / f"{name}.yaml")
    model = torch.nn.Linear(2, 2)
    optimizer, scheduler = optimization(config, model, 10)
    for epoch, share in ((0, 0.0), (12.5, 0.5), (25, 1.0), (262.5, 0.5), (500, 0.0)):  # linear to 25, then cosine
        scheduler.step_update(round(10 * epoch))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(config.lr * share)
    assert not optimizer.defaults["nesterov"]
    small = [
        "dataset=folder",
        "model_args.depth=10",
        "model_args.width=5",
        "epochs=1",
        "workers=0",
        "input_size=[16,16]",
    ]
    assert run(CONFIGS / f"{name}.yaml", digits, tmp_path, *small, *(f"model_args.{a}" for a in attention)) == 0


def test_offsets_learn_at_a_tenth_of_the_rate():
    model = create_model(Config("dcn_resnet50", {"layers": [1, 1, 1, 1]}), 10)
    optimizer, _ = optimization(Config("dcn_resnet50", lr=0.1), model, 10)
    assert sorted({group["initial_lr"] for group in optimizer.param_groups}) == pytest.approx([0.01, 0.1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("epoch=3", "'epoch'"),
        ("epochs=many", "'many' .*could not be converted to Integer"),
        ("crop=big", "crop must be one of random_resized, pad, none, got 'big'"),
        ("workers=-1", "workers must be at least 0, got -1"),
        ("model=aa_resnet51", "model must be a model of timm, got 'aa_resnet51': did you mean aa_resnet50, "),
        ("model_args.kapa=1", "model aa_wide_resnet28_10 with .*kapa"),
        ("dataset=torch/none", "dataset 'torch/none' cannot be loaded from"),
        ("dataset=clips", "no video and no folder of pictures for the class eight"),
        ("lr=1e12", "the loss is .* at epoch 1, step .*: reduce lr"),
        ("lr=.nan", "lr must be at least 0, got nan"),
        ("warmup=1", "warmup must be from 0 to below 1, got 1.0"),
        ("clip_grad=-1", "clip_grad must be above 0, or null for no limit, got -1.0"),
        ("optimizer=none", "optimizer 'none': "),
        ("init_std={heigth: 0.1}", "init_std must name parameters of the model, such as .*, got 'heigth'"),
    ],
)
def test_bad_settings(digits, tmp_path, capsys, change, words):
    assert run(DIGITS, digits, tmp_path / "out", "workers=0", "warmup=0", "batch_size=8", change) == 2
    error = capsys.readouterr().err
    assert re.search(f"^train: .*{words}", error)
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_not_kept(digits, tmp_path, capsys):
    assert run(DIGITS, digits, tmp_path / "out", "epochs=1", "workers=0", "warmup=0", "batch_size=999", "lr=1e36") == 2
    assert "the validation loss is nan after epoch 1: reduce lr" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_bad_data(digits, tmp_path, capsys):
    def error_of(root: Path, config: Path = DIGITS) -> str:
        assert run(config, root, tmp_path / "out", "epochs=1", "workers=1") == 2
        return capsys.readouterr().err

    assert f"there is no folder {tmp_path / 'nowhere/train'}" in error_of(tmp_path / "nowhere")
    copy = Path(shutil.copytree(digits, tmp_path / "copy"))
    broken = next((copy / "train/two").iterdir())
    broken.write_bytes(b"")
    assert f"train: {broken} cannot be read" in error_of(copy)
    shutil.rmtree(copy / "val/zero")
    assert "not in both: zero" in error_of(copy)
    (tmp_path / "list.yaml").write_text("- a\n")
    for config in (tmp_path / "list.yaml", tmp_path / "none.yaml"):
        assert f"train: CONFIG {config}: " in error_of(digits, config)
    with pytest.raises(SystemExit):
        main([str(DIGITS), "--data", str(digits), "--device", "gpu"])
    assert "--device must be one that torch finds here, such as cpu, got 'gpu'" in capsys.readouterr().err


# --- clips ------------------------------------------------------------------------------------------------------------


def test_frames_are_spread_over_the_clip(clips):
    assert sampled(100, 4) == [12, 37, 62, 87]
    assert sampled(3, 5) == [0, 0, 1, 2, 2]
    whole = [np.asarray(frame) for frame in open_clip(clips / "train/left/0", 8)]
    assert [frame.shape for frame in whole] == [(32, 48, 3)] * 8
    assert not any(np.array_equal(a, b) for a, b in pairwise(whole))
    assert all(np.array_equal(a, b) for a, b in zip(open_clip(clips / "train/left/0", 4), whole[1::2], strict=True))


def test_random_frames():
    torch.manual_seed(0)
    drawn = [segments(12, 4) for _ in range(200)]
    for part in range(4):
        assert {frames[part] for frames in drawn} == set(range(3 * part, 3 * part + 3))
    drawn = [strided(16, 4) for _ in range(500)]
    strides = [{b - a for a, b in pairwise(frames)} for frames in drawn]
    assert all(len(steps) == 1 for steps in strides)
    assert set.union(*strides) == {1, 2, 3, 4, 5}
    assert max(frames[-1] for frames in drawn) == 15
    assert {tuple(strided(3, 1)) for _ in range(50)} == {(0,), (1,), (2,)}


def test_videos_are_read_in_rgb(tmp_path):
    cv2 = pytest.importorskip("cv2")
    video = cv2.VideoWriter(str(tmp_path / "red.mp4"), cv2.VideoWriter_fourcc(*"mp4v"), 8, (48, 32))
    for t in range(8):
        video.write(np.full((32, 48, 3), (0, 0, 100 + 20 * t), np.uint8))  # BGR
    video.release()
    frames = [np.asarray(frame).mean((0, 1)) for frame in open_clip(tmp_path / "red.mp4", 4)]
    np.testing.assert_allclose([frame[0] for frame in frames], [120, 160, 200, 240], atol=12)
    assert max(max(frame[1:]) for frame in frames) < 40


def test_unreadable_clips_raise(tmp_path):
    pytest.importorskip("cv2")
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    for name, size in (("0.png", (8, 8)), ("1.png", (8, 9))):
        Image.new("RGB", size).save(tmp_path / "mixed" / name)
    for name, reason in (
        ("text.mp4", "it is no video that OpenCV decodes"), ("empty", "it holds no picture"),
        ("mixed", r"its pictures differ in size, \[\(8, 8\), \(8, 9\)\]"), ("none.mp4", "there is no such file"),
    ):  # fmt: skip
        with pytest.raises(BadPicture, match=f"{name} cannot be read as a clip: {reason}"):
            open_clip(tmp_path / name, 2)


def test_videos_without_opencv(tmp_path, monkeypatch):
    for split in ("train", "val"):
        (tmp_path / split / "one").mkdir(parents=True)
        (tmp_path / split / "one/0.mp4").touch()
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(SystemExit, match="not installed: cv2; pip install"):
        run(CLIPS, tmp_path, tmp_path / "out")


def test_all_frames_pass_the_same_random_transform():
    """Equal frames stay equal, and clips differ."""
    facts = dict(input_size=(3, 32, 48), interpolation="bilinear", mean=(0.5,) * 3, std=(0.5,) * 3)
    step = transform(Config("any", dataset="clips", crop="random_resized", hflip=0.5), facts, training=True)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8))
    torch.manual_seed(0)
    drawn = [Transformed([([picture] * 3, 2)], step)[0] for _ in range(4)]
    assert all((clip.shape, label) == ((3, 3, 32, 48), 2) for clip, label in drawn)
    assert all(torch.equal(clip[0], clip[2]) for clip, _ in drawn)
    assert not any(torch.equal(a, b) for (a, _), (b, _) in pairwise(drawn))


@pytest.mark.parametrize("pattern", ["divided", "space"])
def test_clips_train(clips, pattern, tmp_path, capsys):
    settings = [*TINY, f"model_args.pattern={pattern}"]
    status = run(CLIPS, clips, tmp_path / "out", *settings)
    if pattern == "space":  # without time_embed
        assert status == 2
        assert "init_std must name parameters of the model, such as pos_embed, " in capsys.readouterr().err
        assert run(CLIPS, clips, tmp_path / "out", *settings, "init_std={time_embed: 0}") == 2
        return
    assert status == 0
    assert "2 classes, 32×48 pixels; 8 + 4 clips" in capsys.readouterr().out
    metadata = read_weights(tmp_path / "out/best.safetensors")[1]
    assert (metadata["frames"], metadata["input_size"]) == ("4", "[32, 48]")


def test_parameters_are_drawn_by_their_deviation():
    args = dict(embed_dim=32, depth=1, num_heads=2)
    config = Config("timesformer_small_patch16_224", args, {"time_embed": 0.5}, "clips", 8, input_size=(32, 48))
    model = create_model(config, 4)
    assert model.time_embed.shape[1] == 8
    assert float(model.time_embed.detach().std()) == pytest.approx(0.5, rel=0.15)
    with pytest.raises(ConfigError, match=r"'clips' needs a model of clips, timesformer_base_.*, got aa_resnet34"):
        create_model(Config("aa_resnet34", dataset="clips"), 4)
