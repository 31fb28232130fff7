"""VGG with fc6 and fc7 as convolutions: torchvision's fully connected layers, and the training tool."""

from __future__ import annotations

import json

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from timm.models import build_model_with_cfg, register_model
from timm.models.vgg import VGG
from torch import nn
from torchvision.models.vgg import make_layers

from tools.caption.__main__ import main as caption
from tools.caption.attributes import load_detector
from tools.caption.backbones import BadBackbone, VggFc7, from_torchvision, read_weights
from tools.datasets.captioned_scenes import Recipe, build
from tools.pictures import open_picture
from tools.train import attributes as tool

LAYERS = [4, "M", 6, "M", 8, "M"]  # three poolings: a window of 7 cells is 56 pixels
HIDDEN = 4096 // 64


@register_model
def tiny_vgg_of_tests(pretrained=False, **options):
    options["pretrained_cfg"] = timm.get_pretrained_cfg("vgg11")
    return build_model_with_cfg(VGG, "vgg11", pretrained, model_cfg=LAYERS, mlp_ratio=1 / 64, **options)


class FullyConnected(nn.Module):
    """The same network as torchvision builds it: the flattened map, and Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = make_layers(LAYERS, batch_norm=False)
        self.classifier = nn.Sequential(
            nn.Linear(8 * 49, HIDDEN), nn.ReLU(), nn.Dropout(), nn.Linear(HIDDEN, 4096), nn.ReLU(), nn.Dropout(),
            nn.Linear(4096, 5),
        )  # fmt: skip

    def fc7(self, images):
        return self.classifier[:6](self.features(images).flatten(1))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return both networks with the same weights, converted through torchvision's file, and the file."""
    torch.manual_seed(0)
    theirs, file = FullyConnected().eval(), tmp_path_factory.mktemp("weights") / "vgg.pth"
    torch.save(theirs.state_dict(), file)
    ours = VggFc7("tiny_vgg_of_tests", (56, 56)).eval()
    ours.load(file)
    return ours, theirs, file


# The network


@torch.no_grad()
def test_one_window_equals_the_fully_connected_layers(pair):
    ours, theirs, _ = pair
    images = torch.randn(2, 3, 56, 56)
    features = ours(images)
    assert features.shape == (2, 4096, 1, 1)
    assert features.abs().max() > 0.01
    torch.testing.assert_close(features[:, :, 0, 0], theirs.fc7(images), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_larger_image_gives_a_grid_of_windows(pair):
    ours, theirs, _ = pair
    images = torch.randn(2, 3, 72, 88)  # maps of 9 x 11 cells
    cells, maps = theirs.features(images), ours(images)
    assert maps.shape == (2, 4096, 3, 5)
    for row in range(3):
        for column in range(5):
            window = cells[:, :, row : row + 7, column : column + 7]
            expected = theirs.classifier[:6](window.flatten(1))
            torch.testing.assert_close(maps[:, :, row, column], expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_poolings_round_up():
    backbone = VggFc7("tiny_vgg_of_tests", (56, 77)).eval()
    assert backbone(torch.zeros(1, 3, 56, 77)).shape == (1, 4096, 1, 4)  # 77, 39, 20, 10 cells
    with torch.device("meta"):
        vgg16 = VggFc7("vgg16")
        assert vgg16.size == (565, 565)
        assert vgg16.num_features == 4096
        assert vgg16(torch.zeros(1, 3, 565, 565)).shape == (1, 4096, 12, 12)  # Fang et al., Sec. 3
        assert vgg16(torch.zeros(1, 3, 224, 224)).shape == (1, 4096, 1, 1)


@pytest.mark.parametrize("name", ["vgg11", "vgg13", "vgg16", "vgg19", "vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn"])
def test_torchvisions_weights_of_every_vgg_fit(name):
    with torch.device("meta"):
        theirs = getattr(torchvision.models, name)().state_dict()
        wanted = VggFc7(name).model.state_dict()
    converted = from_torchvision(theirs, wanted)
    assert {key: converted[key].shape for key in wanted} == {key: value.shape for key, value in wanted.items()}
    assert set(converted) - set(wanted) == {"classifier.6.weight", "classifier.6.bias"}


def test_dropout_is_vggs_and_of_training_alone(pair):
    ours, _, _ = pair
    images = torch.rand(1, 3, 56, 56)
    ours.train()
    assert [layer.p for layer in ours.modules() if isinstance(layer, nn.Dropout)].count(0.5) == 2
    different = not torch.equal(ours(images), ours(images))
    assert torch.equal(ours.eval()(images), ours(images))
    assert different


def test_weights_that_do_not_fit_are_refused(pair, tmp_path):
    ours, theirs, _ = pair
    state = theirs.state_dict()
    state["classifier.0.weight"] = state["classifier.0.weight"][:, :-49]
    torch.save(state, tmp_path / "narrow.pth")
    with pytest.raises(BadBackbone, match=r"1 of 10 weights, such as pre_logits\.fc1\.weight"):
        ours.load(tmp_path / "narrow.pth")


@pytest.mark.parametrize(
    "name, size, stride, message",
    [
        ("test_resnet", None, None, "fc7: the backbone must be a VGG of timm, such as vgg16, got test_resnet"),
        ("tiny_vgg_of_tests", (48, 64), None, "at least 49 x 49 pixels, 7 x 7 cells for fc6, got 48 x 64"),
        ("tiny_vgg_of_tests", (64, 64), 16, "cannot be built with .*'output_stride': 16"),
    ],
)
def test_bad_arguments(name, size, stride, message):
    if size == (48, 64):
        VggFc7(name, (49, 64))
    with pytest.raises(BadBackbone, match=message):
        VggFc7(name, size, stride)


# Pictures


def test_pictures_keep_their_shape():
    backbone = VggFc7("tiny_vgg_of_tests", (64, 96))
    picture = Image.new("RGB", (30, 40), (200, 100, 50))
    image = backbone.prepare(picture)
    assert image.shape == (3, 64, 96)
    colour = (np.array([200, 100, 50]) / 255 - backbone.mean) / backbone.std
    np.testing.assert_allclose(image[:, :, :48], np.broadcast_to(colour[:, None, None], (3, 64, 48)), atol=1e-5)
    assert (image[:, :, 48:] == 0).all()
    stripes = Image.fromarray(np.tile(np.arange(96, dtype=np.uint8)[None, :, None] * 2, (48, 1, 3)))
    moved, still = backbone.prepare(stripes, (0.25, 0)), backbone.prepare(stripes)
    torch.testing.assert_close(moved[:, :48, 24:], still[:, :48, :-24])
    assert backbone.prepare(Image.new("RGB", (500, 1))).shape == (3, 64, 96)


# The detector and the tool


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes") / "set"
    assert build(folder, Recipe(train=16, val=6, test=2, size=64, seed=2))
    return folder


def test_the_tool_trains_from_torchvisions_weights_and_resumes(pair, scenes, tmp_path, capsys):
    out = tmp_path / "out"
    options = "--backbone tiny_vgg_of_tests --size 72 --batch-size 8 --device cpu --lr 0.002 --epochs 2".split()
    options += ["--weights", str(pair[2]), "--attributes", str(tmp_path / "attributes.json")]
    assert tool.main([str(scenes), str(out), "--fc7", *options]) == 0, capsys.readouterr().err
    rows = json.loads((out / "log.json").read_text())
    assert len(rows) == 2
    assert rows[1]["loss"] < rows[0]["loss"]
    assert read_weights(out / "best.safetensors")[1]["fc7"] == "true"
    written = json.loads((tmp_path / "attributes.json").read_text())
    assert len(written) == 24
    detector = load_detector(out / "best.safetensors")
    assert isinstance(detector.backbone, VggFc7)
    again = detector.predict([open_picture(scenes / "images/000003.jpg")])[0]
    np.testing.assert_allclose([p for _, p in again], [p for _, p in written["3"]], atol=2e-6)
    capsys.readouterr()

    assert tool.main([str(scenes), str(out), "--resume", *options]) == 2
    assert "was trained with --fc7 True, but now it is False" in capsys.readouterr().err
    assert tool.main([str(scenes), str(out), "--resume", "--fc7", *options]) == 0
    # Its convolutions give grid features, as in the thesis' Table 2.4.
    regions = [str(scenes / "images"), str(tmp_path / "regions.npz"), "--device", "cpu", "--grid", "tiny_vgg_of_tests"]
    assert caption(["extract", *regions, "--grid-size", "3", "--checkpoint", str(out / "best.safetensors")]) == 0


def test_vgg16_is_the_default_with_fc7():
    for arguments, name in ((["--fc7"], "vgg16"), ([], "resnet50"), (["--fc7", "--backbone", "vgg19"], "vgg19")):
        options = tool.build_parser().parse_args(["data", "out", *arguments])
        tool.check(options)
        assert options.backbone == name
