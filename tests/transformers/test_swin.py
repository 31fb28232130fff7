"""``accelerate``: windows of transformers' Swin, Swin V2 and relatives on our operator, in layers and in models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.replacement import fits
from attn_plugins.transformers import accelerate, swin
from tests.helpers.replacement import COLUMNS, C, Called, Layer, cells, drawn, rand
from tests.helpers.verdicts import Watch, printed, verdict

transformers = pytest.importorskip("transformers")

FAMILIES = {place.layer.removesuffix("Layer"): place for place in swin.PLACES}
ROWS = {
    "Swin": "`accelerate`, transformers' Swin",
    "Swinv2": "`accelerate`, transformers' Swin V2, Swin2SR",
    "Swin2SR": "`accelerate`, transformers' Swin V2, Swin2SR",
    "DonutSwin": "`accelerate`, transformers' Swin of Donut, CLAP, MaskFormer",
    "ClapAudio": "`accelerate`, transformers' Swin of Donut, CLAP, MaskFormer",
    "MaskFormerSwin": "`accelerate`, transformers' Swin of Donut, CLAP, MaskFormer",
}
ALWAYS = {"Swin", "DonutSwin", "ClapAudio"}  # families whose layers can be asked never to shrink their windows
SIZES = [(8, 12), (7, 9), (4, 6)]  # whole windows, padding, and a map that one window covers along one axis


def configured(name: str, **options: Any) -> Any:
    given: dict[str, Any] = dict(window_size=4, num_heads=[2, 2], depths=[2, 2], qkv_bias=True, **options)
    if name == "ClapAudio":
        given = dict(given, num_attention_heads=given.pop("num_heads"))
    elif name != "Swin2SR":
        given["image_size"] = 32
    given |= {"patch_embeds_hidden_size" if name == "ClapAudio" else "embed_dim": C}
    config = getattr(transformers, f"{name}Config")(**given)
    config._attn_implementation = "sdpa" if name == "Swin" else "eager"
    return config


def layer(name: str, shift: int = 2, size: tuple[int, int] = (7, 9), **options: Any) -> nn.Module:
    """Return a layer with drawn parameters and what its model passes."""
    kind = getattr(importlib.import_module(FAMILIES[name].module), f"{name}Layer")
    given: dict[str, Any] = {"always_partition": True} if name in ALWAYS else {}
    module = kind(configured(name, **options), C, (32, 32), 2, shift_size=shift)
    return drawn(Called(module, input_dimensions=size, **given))


def ours(model: nn.Module) -> nn.Module:
    assert accelerate(model, onednn=False)
    return model


def tokens(size: tuple[int, int] = (7, 9), B: int = 2) -> Tensor:
    return rand(B, size[0] * size[1], C)


def computed(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    output = module(x)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output, *torch.autograd.grad((output * weights).sum(), [x, *module.parameters()])]


def runs_ours(module: Callable[..., Any], *args: Any, **options: Any) -> bool:
    with Watch("sequence_attention") as watch:
        module(*args, **options)
    return watch.seen


SLOW = ("ClapAudio", "MaskFormerSwin", "Swin2SR")


@pytest.mark.parametrize("name, column", cells(ROWS, slow=SLOW, quick={"non-finite inputs": ()}))
def test_each_cell_of_the_table_is_what_happens(name, column):
    matrix = Layer(partial(layer, name), ours, lambda: (tokens(),), "sequence_attention")
    assert verdict(matrix, COLUMNS[column]) == printed(ROWS[name])[column]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_stay(name, shift, size):
    x = tokens(size, 3).double()
    stock, replaced = (layer(name, shift, size).double() for _ in range(2))
    # A weight behind stock's mask of -100 is at most e^(20 - 100), 0 to the last digit of the others.
    for found, expected in zip(computed(ours(replaced), x), computed(stock, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert runs_ours(replaced, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision(name, dtype):
    size = (8, 12)  # whole windows: stock's V2 makes NaN of padding in float16
    x = tokens(size)
    exact = layer(name, size=size).double()(x.double())
    expected = layer(name, size=size).to(dtype)(x.to(dtype))
    found = ours(layer(name, size=size).to(dtype))(x.to(dtype))
    assert found.dtype == dtype
    assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_autocast(name):
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = ours(layer(name))(tokens()), layer(name)(tokens())
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dropped", ["attention_probs_dropout_prob", "hidden_dropout_prob", "drop_path_rate"])
@pytest.mark.parametrize("name", FAMILIES)
def test_dropout(name, dropped):
    """Weights are dropped by the stock code; other dropout draws the same numbers as in stock."""
    stock, replaced = layer(name, **{dropped: 0.5}).train(), ours(layer(name, **{dropped: 0.5}).train())
    results = []
    for module in (stock, replaced):
        torch.manual_seed(3)
        results.append(module(tokens()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert runs_ours(replaced, tokens()) == (dropped != "attention_probs_dropout_prob")


# --- models -----------------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # class, config, options
    "swin": ("SwinModel", "Swin", {}),
    "swin backbone": ("SwinBackbone", "Swin", dict(out_features=["stage1", "stage2"])),
    "donut": ("DonutSwinModel", "DonutSwin", {}),
    "maskformer": ("MaskFormerSwinBackbone", "MaskFormerSwin", dict(out_features=["stage1", "stage2"])),
    "swin v2": ("Swinv2Model", "Swinv2", dict(pretrained_window_sizes=[6, 3])),
    "swin2sr": ("Swin2SRModel", "Swin2SR", {}),
}


def model(name: str, **options: Any) -> nn.Module:
    kind, config, given = MODELS[name]
    found = getattr(transformers, kind, None) or getattr(importlib.import_module(FAMILIES[config].module), kind)
    torch.manual_seed(0)
    configuration = configured(config, **given, drop_path_rate=0.0)
    for key, value in options.items():
        setattr(configuration, key, value)
    return drawn(found(configuration))


def picture(size: tuple[int, int] = (44, 36)) -> Tensor:
    return rand(2, 3, *size)


def states(result: Any) -> list[Tensor]:
    """Return the outputs of a model or of a backbone."""
    return [*result.feature_maps] if hasattr(result, "feature_maps") else [result.last_hidden_state]


@pytest.mark.parametrize("name", MODELS)
def test_whole_models(name):
    stock, replaced, x = model(name).double(), model(name).double(), picture().double()
    names = accelerate(replaced, onednn=False)
    assert len(names) == 4
    results = []
    for module in (stock, replaced):
        outputs = states(module(x))
        sum((output * output.detach().cos()).sum() for output in outputs).backward()
        results.append([*outputs, *(p.grad for p in module.parameters() if p.grad is not None)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert runs_ours(replaced, x)


def test_claps_audio_model():
    config = configured("ClapAudio", spec_size=32, num_mel_bins=8, hidden_size=2 * C, enable_fusion=False)
    torch.manual_seed(0)
    replaced = drawn(transformers.ClapAudioModel(config))
    x = rand(2, 1, 32, 8)
    expected = replaced(x).last_hidden_state
    assert len(accelerate(replaced, onednn=False)) == 4
    torch.testing.assert_close(replaced(x).last_hidden_state, expected, rtol=1e-4, atol=1e-5)
    assert runs_ours(replaced, x)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "swin backbone"])
def test_attention_weights_are_stocks(name):
    options = {"_attn_implementation": "eager"} if name == "swin" else {}
    stock, replaced = model(name, **options), ours(model(name, **options))
    for given in (dict(output_attentions=True), dict(output_attentions=True, output_hidden_states=True)):
        found, expected = (module(picture(), **given) for module in (replaced, stock))
        assert len(found.attentions) == len(expected.attentions) > 0
        for a, b in zip(found.attentions, expected.attentions, strict=True):
            assert torch.equal(a, b)
        assert not runs_ours(replaced, picture(), **given)
    hidden = [module(picture(), output_hidden_states=True).hidden_states for module in (replaced, stock)]
    for a, b in zip(*hidden, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation, serves", [("sdpa", True), ("eager", False), ("own", False)])
def test_swin_by_another_implementation_is_stocks(implementation, serves):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("own", lambda *args, **options: sdpa_attention_forward(*args, **options))
    replaced = ours(model("swin", _attn_implementation=implementation))
    assert runs_ours(replaced, picture()) == serves


def test_gradient_checkpointing_stays():
    replaced, x = model("swin").double().train(), picture().double()
    names = accelerate(replaced, onednn=False)
    parameters = [p for key, p in replaced.named_parameters() if "encoder" in key]
    plain = torch.autograd.grad(replaced(x).last_hidden_state.square().sum(), parameters)
    replaced.gradient_checkpointing_enable()
    output = replaced(x).last_hidden_state.square().sum()
    calls: list[nn.Module] = []
    for name in names:
        replaced.get_submodule(name).mlp.register_forward_pre_hook(lambda part, _: calls.append(part))
    again = torch.autograd.grad(output, parameters)
    assert len(set(calls)) == len(names)  # the forward runs again within the backward
    for found, expected in zip(again, plain, strict=True):
        torch.testing.assert_close(found, expected)


def test_layers_of_other_versions_stay():
    """Before 5.24, layers took head masks as well, and their arguments had other places."""

    def forward(self, hidden_states, input_dimensions, head_mask=None, output_attentions=False): ...

    module = layer("Swinv2").layer
    earlier = type("Swinv2Layer", (type(module),), {"forward": forward, "__module__": type(module).__module__})
    assert fits(FAMILIES["Swinv2"], type(module))
    assert not fits(FAMILIES["Swinv2"], earlier)
