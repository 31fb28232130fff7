"""One engine replaces layers of all packages: names, copies, tracers, compiled code, errors, and the way back."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from accelerate import FullyShardedDataParallelPlugin, infer_auto_device_map
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import prepare_fx
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.ops import DeformConv2d

from attn_plugins import replacement
from attn_plugins.core import library
from attn_plugins.replacement import accelerate, is_replaced, restore
from tests.helpers.verdicts import Watch

SWIN = dict(img_size=64, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(2, 4), num_classes=3)
SAM = dict(img_size=64, embed_dim=16, depth=2, num_heads=2, window_size=3, global_attn_indexes=(1,), num_classes=3)
VIT = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3)


class Offsets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset, self.conv = nn.Conv2d(3, 18, 3, padding=1), DeformConv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x, self.offset(x))


def created(name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = timm.create_model(name, **options)
        for key, parameter in model.named_parameters():
            if "norm" in key and key.endswith("weight"):  # 0 at initialization in Swin V2's blocks
                nn.init.ones_(parameter)
        return model.eval()

    return build


# A model, the class name of its replaced layers, and whether torch.fx traces the stock model.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "swin": (created("swin_tiny_patch4_window7_224", SWIN), "SwinTransformerBlock", True),
    "swinv2": (created("swinv2_tiny_window8_256", SWIN), "SwinTransformerV2Block", True),
    "sam": (created("samvit_base_patch16", SAM), "Attention", False),
    "torchvision": (lambda: Offsets().eval(), "DeformConv2d", False),
}
NAMES = [*MODELS]


def picture() -> Tensor:
    return torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_names_and_the_way_back(name):
    build, kind, _ = MODELS[name]
    model, stock = build(), build()
    names = accelerate(model)
    before = [set(vars(part)) for part in stock.modules()]
    layers = [model.get_submodule(path) for path in names]
    assert names
    for layer, path in zip(layers, names):
        replaced = stock.get_submodule(path)
        assert isinstance(layer, type(replaced))
        assert type(layer) is not type(replaced)
        assert type(layer).__name__ == type(replaced).__name__ == kind
        assert (type(layer).__module__, type(layer).__qualname__) == (type(replaced).__module__, kind)
    assert repr(model) == repr(stock)
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[kind]
    )
    plugin.set_auto_wrap_policy(model)
    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {type(layers[0])}
    sizes = {"cpu": 1 << 14, "disk": 1 << 30}
    assert infer_auto_device_map(model, sizes, [kind]) == infer_auto_device_map(stock, sizes, [kind])
    assert restore(model) == names
    assert [type(part) for part in model.modules()] == [type(part) for part in stock.modules()]
    assert [set(vars(part)) for part in model.modules()] == before
    assert restore(model) == []
    assert b"attn_plugins" not in pickle.dumps(model)
    assert accelerate(model) == names


@pytest.mark.parametrize("name, protocol", [("swin", 0), ("sam", 2), ("torchvision", 5)])
def test_copies_of_a_compiled_layer_compute_with_their_own_weights(name, protocol):
    model = MODELS[name][0]()
    layer = model.get_submodule(accelerate(model)[-1])
    layer.compile(backend="eager")
    expected = model(picture())
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model, protocol))
    for parameter in model.parameters():
        parameter.data.zero_()
    for clone in copies:
        same(clone(picture()), expected)
        assert [is_replaced(type(m)) for m in clone.modules()] == [is_replaced(type(m)) for m in model.modules()]


def test_copies_of_a_compiled_vit_layer():
    model = created("vit_tiny_patch16_224", dict(VIT, attn_layer="attn1111"))()
    x = torch.rand(2, 3, 32, 32)
    model.blocks[1].attn.compile(backend="eager")
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), torch.load(file, weights_only=False)
    for parameter in model.parameters():
        parameter.data.zero_()
    for clone in copies:
        assert type(clone.blocks[1].attn) is type(model.blocks[1].attn)
        same(clone(x), expected)


def test_a_class_derived_by_the_user_is_copied_as_such():
    model = nn.Sequential(DeformConv2d(3, 4, 3))
    accelerate(model)
    global Own
    Own = type("Own", (type(model[0]),), {"__module__": __name__})
    model[0].__class__ = Own
    assert type(copy.deepcopy(model)[0]) is Own


@pytest.mark.parametrize(
    "name, way_back", [pytest.param("swin", False, marks=pytest.mark.slow), ("swin", True), ("torchvision", False)]
)
def test_compiled_code_is_discarded(name, way_back):
    model = MODELS[name][0]().double()  # so that bits show who computes
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    x = picture().double()
    if way_back:
        accelerate(model)
    compiled = torch.compile(model, backend="eager")
    before = compiled(x)
    assert restore(model) if way_back else accelerate(model)
    assert torch.equal(compiled(x), model(x))
    assert not torch.equal(model(x), before)


@pytest.mark.parametrize("name", NAMES)
def test_scripts_are_stocks(name):
    model = MODELS[name][0]()
    stock = torch.jit.script(model)(picture())
    accelerate(model)
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(picture()), stock)
    assert is_replaced(type(next(m for m in model.modules() if is_replaced(type(m)))))


def targets(model: nn.Module) -> list[str]:
    """Return what the nodes of a graph call."""
    return [str(node.target) for node in torch.fx.symbolic_trace(model).graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("name", [name for name, (_, _, traced) in MODELS.items() if traced])
def test_torch_fx(name):
    """Graphs, torchvision's feature extraction and quantization see the stock layers."""
    model = MODELS[name][0]()
    layers = ["layers.0.blocks.0.attn.proj", "layers.1.blocks.0.mlp.fc1"]
    x = picture()
    stock = [targets(model), create_feature_extractor(model, layers)(x)]
    accelerate(model)
    assert targets(model) == stock[0]
    for path, features in create_feature_extractor(model, layers)(x).items():
        assert torch.equal(features, stock[1][path])
    with warnings.catch_warnings(action="ignore"):
        same(prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping(), (x,))(x), model(x))


OWN = {
    "vit_tiny_patch16_224": dict(VIT, attn_layer="attn1111"),
    "attn_swin_tiny_patch4_window7_224": SWIN,
    "attn1111_resnet50": dict(num_classes=3),
    "dcn_resnet50": dict(num_classes=3),
    "aa_resnet34": dict(num_classes=3),
}


@pytest.mark.parametrize("name", OWN)
def test_our_layers_are_one_node(name):
    """Stock networks with layers of ours are traced by torch.fx as with their own ones."""
    model = created(name, OWN[name])()
    x = torch.rand(1, 3, *model.patch_embed.img_size) if hasattr(model, "patch_embed") else torch.rand(1, 3, 64, 64)
    traced = torch.fx.symbolic_trace(model)
    same(traced(x), model(x))
    modules = dict(traced.named_modules())
    called = {type(modules[node.target]).__module__ for node in traced.graph.nodes if node.op == "call_module"}
    assert any(module.startswith("attn_plugins.") for module in called)


def test_our_layers_cannot_be_scripted():
    model = created("vit_tiny_patch16_224", dict(VIT, attn_layer="attn1111", dynamic_img_size=True))()
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script is not supported by ViTAttention_1111 .*: use torch"):
        torch.jit.script(model)


TORCH_ALONE = """
import sys, torch, torchvision
traced = torch.jit.load(sys.argv[1])
x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
torch.testing.assert_close(traced(x), torch.load(sys.argv[2]), rtol=1e-4, atol=1e-5)
assert not any(name.startswith("attn_plugins.ops") for name in sys.modules)
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["swin", pytest.param("torchvision", marks=pytest.mark.slow)])
def test_traced_files_need_no_attn_plugins(name, tmp_path):
    model = MODELS[name][0]()
    accelerate(model)
    with torch.no_grad():
        torch.jit.trace(model, picture()).save(tmp_path / "traced.pt")
        torch.save(model(picture()), tmp_path / "output.pt")
    files = [str(tmp_path / file) for file in ("traced.pt", "output.pt")]
    subprocess.run([sys.executable, "-c", TORCH_ALONE, *files], check=True)


def test_what_is_seen_instead():
    """The error names copies of classes that are known elsewhere."""
    fork = type("SwinTransformerBlock", (nn.Linear,), {"__module__": "fork.swin"})
    with pytest.raises(ValueError, match=r"model must contain layers to accelerate: .*; Linear has none"):
        accelerate(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"Sequential has fork\.swin\.SwinTransformerBlock, which is not one of them"):
        accelerate(nn.Sequential(fork(1, 1)))


def test_a_class_that_other_code_has_patched(monkeypatch):
    model = MODELS["torchvision"][0]()
    monkeypatch.setattr(DeformConv2d, "forward", lambda self, x, offset: x)
    with pytest.raises(RuntimeError, match=r"forward of DeformConv2d is .*, not torchvision's; nothing was replaced"):
        accelerate(model)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_stock_runs_where_no_kernel_serves(device, monkeypatch):
    """On other devices, and on CPUs where nothing was compiled."""
    model = MODELS["torchvision"][0]()
    accelerate(model)
    x = picture()
    served = model(x)
    if device == "cpu":
        monkeypatch.setitem(library.failures(), "cpu", "there is no _C binary")
    replacement._known_kernels.cache_clear()
    try:
        with Watch("attn_plugins") as ours:
            found = model.to(device)(x.to(device))
    finally:
        replacement._known_kernels.cache_clear()
    assert not ours.seen
    assert found.shape == served.shape
    if device == "cpu":
        same(found, served)


DROP_IN = """
import pickle, sys
import attn_plugins
attn_plugins.drop_in()
attn_plugins.drop_in()
toolkits = ("timm", "torchvision", "transformers", "mmcv", "mmdet", "segment_anything")
assert not [name for name in toolkits if name in sys.modules]
import timm, torch
from mmcv.cnn.bricks.generalized_attention import GeneralizedAttention
from torchvision.models.swin_transformer import ShiftedWindowAttention
from torchvision.ops import DeformConv2d, deform_conv2d
from transformers import Swinv2Config, Swinv2Model
from tests.helpers.verdicts import Watch

def runs_ours(call, *given):
    with torch.no_grad(), Watch("attn_plugins") as watch:
        call(*given)
    return watch.seen

timms = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=16, depths=(1, 1),
                          num_heads=(2, 4))
config = Swinv2Config(image_size=32, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=4)
cases = [
    (timms, torch.rand(1, 3, 64, 64)),
    (ShiftedWindowAttention(16, [4, 4], [0, 0], 2), torch.rand(1, 8, 8, 16)),
    (DeformConv2d(2, 3, 1), torch.rand(1, 2, 5, 6), torch.rand(1, 2, 5, 6)),
    (Swinv2Model(config).eval(), torch.rand(1, 3, 32, 32)),
    (GeneralizedAttention(16, num_heads=2), torch.rand(1, 16, 5, 6)),
]
for model, *given in cases:
    assert runs_ours(model, *given), model
    assert b"attn_plugins" not in pickle.dumps(model), model
print("RESULT", len(cases))
"""


def test_drop_in_for_all_packages():
    """It imports none, and serves those that are imported later; classes and pickles stay stock's."""
    done = subprocess.run([sys.executable, "-c", DROP_IN], capture_output=True, text=True)
    assert done.stdout.split()[-2:] == ["RESULT", "5"], done.stderr[-4000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels serve on the device that is there")
@pytest.mark.parametrize("device", ["mps", "xpu", "cuda"])
def test_a_device_without_kernels_is_named_once(device, monkeypatch, recwarn):
    monkeypatch.setattr(library, "failures", lambda: {"cpu": None, "cuda": "there is none"})
    replacement._known_kernels.cache_clear()
    try:
        assert [replacement._has_kernels(name, 0) for name in (device, device, "cpu")] == [False, False, True]
    finally:
        replacement._known_kernels.cache_clear()
    words = [str(warning.message).partition(" here")[0] for warning in recwarn]
    assert words == [f"attn_plugins has no kernels for {device}"]


def test_a_replaced_function_is_called_by_keywords():
    from transformers.models.mask2former import modeling_mask2former as stock

    from attn_plugins.transformers.places import DEFORMABLE

    (place,) = [place for place in DEFORMABLE if place.module == stock.__name__]
    given = dict(
        value=torch.rand(2, 20, 2, 8),
        value_spatial_shapes=[(4, 5)],
        sampling_locations=torch.rand(2, 3, 2, 1, 4, 2),
        attention_weights=torch.rand(2, 3, 2, 1, 4),
    )
    ours = replacement.replacement(place, stock.multi_scale_deformable_attention, place.supports)
    with Watch("attn_plugins") as watch:
        found = ours(**given)
    assert watch.seen
    same(found, stock.multi_scale_deformable_attention(**given))
