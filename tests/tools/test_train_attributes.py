"""The attribute detector: noisy-OR in plain loops, training on drawn pictures, the file that the captioner reads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.captioned_pictures import draw
from tools.caption.attributes import AttributeDetector, load_detector, noisy_or, noisy_or_loss
from tools.caption.backbones import TimmBackbone, read_weights
from tools.pictures import open_picture
from tools.train import attributes as tool
from tools.train.attribute_data import average_precision, frequent_words, labels

ROOT = Path(__file__).parents[2]
SMALL = "--backbone test_resnet --no-pretrained --size 64 --batch-size 8 --device cpu --lr 0.01".split()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return draw(tmp_path_factory.mktemp("pictures") / "set", 36)


@pytest.fixture(scope="module")
def trained(pictures, tmp_path_factory) -> Path:
    """Train for 8 epochs; the attributes are in the data folder."""
    out = tmp_path_factory.mktemp("trained") / "out"
    assert tool.main([str(pictures), str(out), *SMALL, "--epochs", "8"]) == 0
    return out


# The noisy-OR


def test_noisy_or_is_one_minus_the_product_over_the_cells():
    logits = torch.randn(3, 4, 2, 5, dtype=torch.float64) * 3
    log_p, log_not = noisy_or(logits)
    targets = torch.randint(0, 2, (3, 4))
    total = 0.0
    for b in range(3):
        for k in range(4):
            product = 1.0
            for z in logits[b, k].flatten().tolist():
                product *= 1 - 1 / (1 + np.exp(-z))
            assert log_p[b, k].item() == pytest.approx(np.log(1 - product), rel=1e-9)
            assert log_not[b, k].item() == pytest.approx(np.log(product), rel=1e-9)
            total -= np.log(1 - product) if targets[b, k] else np.log(product)
    assert noisy_or_loss(logits, targets).item() == pytest.approx(total / 12, rel=1e-9)


def test_gradients_are_those_of_the_formula():
    logits = (torch.randn(2, 3, 2, 2, dtype=torch.float64) * 4).requires_grad_()
    targets = torch.randint(0, 2, (2, 3))
    assert torch.autograd.gradcheck(lambda z: noisy_or_loss(z, targets), logits)
    across = torch.tensor([-16.0, -14.0, -8.0, -6.5, 0.5, 18.0], dtype=torch.float64).view(1, 6, 1, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: torch.stack(noisy_or(z)), across)  # on both sides of each threshold


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [-1e4, -200.0, -100.0, -15.0, -7.0, 0.0, 15.0, 100.0, 1e4])
def test_loss_and_gradients_are_finite_and_right_at_saturation(value, dtype):
    logits = torch.full((1, 2, 3, 3), value, dtype=dtype, requires_grad=True)
    log_p, log_not = noisy_or(logits)
    assert log_p.dtype == torch.float32
    z = logits[0, 0, 0, 0].item()
    s = 9 * (z + np.log1p(np.exp(-z)) if z > 0 else np.log1p(np.exp(z)))
    expected = np.log(9) + z if z < -30 else np.log(-np.expm1(-s))
    np.testing.assert_allclose(log_p.detach().numpy(), expected, rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(log_not.detach().numpy(), -s, rtol=2e-6, atol=1e-38)
    noisy_or_loss(logits, torch.tensor([[0, 1]])).backward()
    assert logits.grad.isfinite().all()
    if z < -30:  # a word that is missed entirely still has a gradient: its cells share a gradient of 1
        np.testing.assert_allclose(logits.grad[0, 1].float().sum(), -0.5, rtol=1e-2)


def test_a_detector_begins_with_the_words_frequencies():
    detector = AttributeDetector(TimmBackbone("test_resnet", (64, 64)), ["a", "cat", "dog"]).eval()
    torch.nn.init.zeros_(detector.head.classifier.weight)
    logits = detector(torch.randn(2, 3, 64, 64))
    detector.start_at(torch.tensor([0.02, 0.5, 0.97]), logits[0, 0].numel())
    p = noisy_or(detector(torch.randn(2, 3, 64, 64)))[0].exp()
    torch.testing.assert_close(p, torch.tensor([[0.02, 0.5, 0.97]]).expand(2, 3))


def test_words_and_labels():
    captions = [[["a", "cat"], ["a", "red", "cat"]], [["a", "dog"]]]
    assert frequent_words(captions, 3) == ["a", "cat", "dog"]
    assert frequent_words(captions, 9, least=2, skip=["a"]) == ["cat"]
    targets = labels(captions, ["cat", "dog", "a"])
    assert targets.tolist() == [[1, 0, 1], [0, 1, 1]]
    precision = average_precision(np.array([[0.1, 0.2, 0.3], [0.2, 0.1, 0.3]]), np.array([[1, 0, 0], [0, 1, 0]]))
    assert precision.tolist()[:2] == [0.5, 0.5]
    assert np.isnan(precision[2])  # a word that describes no image


# The tool


def test_training_lowers_the_loss_and_keeps_the_best(trained):
    rows = json.loads((trained / "log.json").read_text())
    assert [row["epoch"] for row in rows] == list(range(1, 9))
    assert rows[-1]["loss"] < 0.95 * rows[0]["loss"]
    best = max(rows, key=lambda row: row["map"])
    _, metadata = read_weights(trained / "best.safetensors")
    assert json.loads(metadata["map"]) == best["map"]
    assert json.loads(metadata["epoch"]) == best["epoch"]


def test_attributes_are_what_the_captioning_task_reads(trained, pictures):
    from attn_plugins.captioning.caption_files import Problems, read_attributes, read_splits

    written = read_attributes(pictures / "attributes.json")
    assert set(written) == {str(n) for n in range(1, 37)}
    captions = read_splits([pictures / "captions.json"], pictures / "splits.json", Problems(False))["train"]
    counts = frequent_words(captions.values(), 1000, least=5)
    for pairs in written.values():
        assert len(pairs) == 11
        assert {word for word, _ in pairs} <= set(counts)
        assert all(0 <= p <= 1 for _, p in pairs)
    assert json.loads((pictures / "attributes.json").read_text())["3"] == [[word, p] for word, p in written["3"]]
    detector = load_detector(trained / "best.safetensors")
    again = detector.predict(open_picture(pictures / "images/000003.jpg"))
    assert {word for word, _ in again} == {word for word, _ in written["3"]}
    np.testing.assert_allclose([p for _, p in again], [p for _, p in written["3"]], atol=2e-6)
    few = trained / "few.json"
    options = ["--predict", "--top", "3", "--device", "cpu", "--attributes", str(few)]
    assert tool.main([str(pictures), str(trained), *options]) == 0
    assert {i: own[:3] for i, own in json.loads((pictures / "attributes.json").read_text()).items()} == json.loads(
        few.read_text()
    )


def test_an_interrupted_training_resumes_to_the_same_weights(trained, pictures, tmp_path, monkeypatch, capsys):
    out, epoch = tmp_path / "out", tool.Training._epoch

    def interrupted(self, number):
        if number == 2:
            raise KeyboardInterrupt
        return epoch(self, number)

    arguments = [str(pictures), str(out), *SMALL, "--epochs", "8", "--attributes", str(out / "attributes.json")]
    with monkeypatch.context() as patch:
        patch.setattr(tool.Training, "_epoch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tool.main(arguments)
    assert tool.main(arguments) == 2
    assert "--resume continues it" in capsys.readouterr().err
    assert tool.main([*arguments, "--resume", "--lr", "0.1"]) == 2
    assert "was trained with --lr 0.01, but now it is 0.1" in capsys.readouterr().err
    assert tool.main([*arguments, "--resume"]) == 0
    assert (out / "attributes.json").read_bytes() == (pictures / "attributes.json").read_bytes()
    ends = [torch.load(folder / "last.pth", weights_only=True)["detector"] for folder in (out, trained)]
    assert ends[0].keys() == ends[1].keys()
    for key in ends[0]:
        torch.testing.assert_close(ends[0][key], ends[1][key])


def test_missing_and_broken_pictures(pictures, tmp_path, capsys):
    folder = tmp_path / "set"
    shutil.copytree(pictures, folder)
    (folder / "images/000002.jpg").unlink()
    arguments = [str(folder), str(tmp_path / "out"), *SMALL, "--epochs", "1"]
    assert tool.main(arguments) == 2
    assert "1 of 36 images have no picture, such as image 2: " in capsys.readouterr().err
    shutil.copy(pictures / "images/000001.jpg", folder / "images/000002.jpg")
    (folder / "images/000035.jpg").write_text("no picture")
    assert tool.main([*arguments, "--workers", "1"]) == 2
    assert "train attributes: image 35: " in capsys.readouterr().err
    assert tool.main([*arguments, "--resume", "--skip-invalid-samples"]) == 0
    assert "skipped image 35: " in capsys.readouterr().err
    assert set(json.loads((folder / "attributes.json").read_text())) == {str(n) for n in range(1, 37)} - {"35"}


def test_bad_input_is_reported(pictures, trained, tmp_path, capsys):
    split = json.loads((pictures / "splits.json").read_text())
    for row in split["images"]:
        row["split"] = {"train": "training"}.get(row["split"], row["split"])
    (tmp_path / "others.json").write_text(json.dumps(split))
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "other.pth")
    weighted = [option for option in SMALL if option != "--no-pretrained"]
    for options, message in [
        (
            [*SMALL, "--splits", str(tmp_path / "others.json")],
            "has no image with captions in train or restval; its parts",
        ),
        ([*SMALL, "--min-word-count", "9999"], "no word is left"),
        ([*SMALL, "--images", str(tmp_path)], "has none of the 36 pictures"),
        ([*SMALL, "--backbone", "no_such_net"], "must be a model of timm, got 'no_such_net'"),
        ([*SMALL, "--shift", "0.7"], "--shift must be from 0 to 0.5, got 0.7"),
        ([*weighted, "--weights", str(tmp_path / "other.pth")], "other.pth does not fit test_resnet"),
        (
            [*weighted, "--weights", str(trained / "best.safetensors"), "--backbone", "resnet18"],
            "holds a test_resnet, but",
        ),
        ([*SMALL, "--lr", "1e30", "--epochs", "2"], "the loss is"),
        ([*SMALL, "--lr", "0"], "--lr must be above 0, got 0.0"),
        ([*SMALL, "--device", "gpu"], "--device must be one that torch finds here, such as cpu, got 'gpu'"),
    ]:
        assert tool.main([str(pictures), str(tmp_path / "out"), *options]) == 2
        assert message in capsys.readouterr().err
    assert tool.main([str(tmp_path), str(tmp_path / "out"), *SMALL]) == 2
    assert "has no splits.json; python -m tools.caption splits creates it" in capsys.readouterr().err


@pytest.mark.slow
def test_captions_of_the_splits_file_and_no_fairseq(pictures, tmp_path):
    """A user with timm but without fairseq needs only Karpathy's file."""
    shutil.copytree(pictures, tmp_path / "set", ignore=shutil.ignore_patterns("attributes.json"))
    (tmp_path / "set/captions.json").unlink()
    code = "import sys\nfor name in ('fairseq', 'mmdet', 'mmengine', 'mmcv'): sys.modules[name] = None\n"
    code += "from tools.train import attributes as tool\nsys.exit(tool.main(sys.argv[1:]))\n"
    arguments = [str(tmp_path / "set"), str(tmp_path / "out"), *SMALL, "--epochs", "1"]
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr
    assert len(json.loads((tmp_path / "set/attributes.json").read_text())) == 36
