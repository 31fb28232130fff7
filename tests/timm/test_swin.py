"""``attn_swin_*`` and ``attn_swinv2_*``: timm's weights and outputs, and features that timm's Swin lacks."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

import attn_plugins.timm  # noqa: F401 - registers the models
from attn_plugins.timm.swin import WIDTHS, SwinAttention
from tests.helpers.slow_cases import slow_but

NAMES = {f"attn_swin_{size}_patch4_window7_224": f"swin_{size}_patch4_window7_224" for size in WIDTHS} | {
    f"attn_swinv2_{size}_window8_256": f"swinv2_{size}_window8_256" for size in WIDTHS
}
V1, V2 = "attn_swin_tiny_patch4_window7_224", "attn_swinv2_tiny_window8_256"
SMALL = dict(img_size=(40, 64), window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5)


def build(name: str, **options) -> nn.Module:
    """Build a small model in which every parameter has an effect."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, "drop_path_rate": 0.0, **options}).double().eval()
    for key, parameter in model.named_parameters():
        if "norm" in key and key.endswith("weight"):  # 0 at initialization in V2's blocks
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() == 1 or "table" in key or "cpb_mlp" in key:
            nn.init.normal_(parameter, std=0.3)
    return model


def picture(size=(40, 64)) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", slow_but([name for name in NAMES if "_tiny" in name], NAMES))
def test_timms_weights_and_configuration_fit(name):
    with torch.device("meta"):
        ours, stock = timm.create_model(name), timm.create_model(NAMES[name])
    shapes = [{key: (t.shape, t.dtype) for key, t in model.state_dict().items()} for model in (ours, stock)]
    assert shapes[0] == shapes[1]
    cfg = timm.get_pretrained_cfg(name)
    theirs = timm.get_pretrained_cfg(NAMES[name])
    for field in ("input_size", "pool_size", "crop_pct", "interpolation", "mean", "std", "first_conv", "classifier"):
        assert getattr(cfg, field) == getattr(theirs, field)
    assert {type(m.attn) for m in ours.modules() if hasattr(m, "attn")} == {SwinAttention}


@pytest.mark.parametrize("name", [V1, V2])
def test_numbers_and_gradients_are_timms(name):
    stock, ours = build(NAMES[name]), build(name)
    torch.manual_seed(3)
    ours.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(ours.state_dict(), strict=True)
    results = []
    for model in (stock, ours):
        output = model(picture())
        output.square().sum().backward()
        results.append({"output": output, **{key: p.grad for key, p in model.named_parameters()}})
    for key, expected in results[0].items():
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(results[1][key], expected, rtol=1e-4, atol=1e-6 * scale, msg=key)


@pytest.mark.parametrize("name", [V1, V2])
def test_the_draw_is_timms(name):
    drawn, expected = [], []
    for found, kind in ((drawn, name), (expected, NAMES[name])):
        torch.manual_seed(0)
        state = timm.create_model(kind, **SMALL).state_dict()
        found += [(key, state[key].std()) for key in sorted(state) if state[key].numel() > 1]
    torch.testing.assert_close(dict(drawn), dict(expected))


@pytest.mark.parametrize(
    "name, position",
    slow_but(
        [(V2, "none"), (V1, "bilateral"), (V2, "relative")],
        [(V2, "none"), *((name, kind) for name in (V1, V2) for kind in ("relative", "bilateral"))],
    ),
)
def test_other_positions_and_no_shift(name, position, tmp_path):
    """Such models differ, and load timm's weights where they fit."""
    stock, options = stock_and_file(name, tmp_path)
    ours = build(name, position=position)
    tables = {key for key in stock.state_dict() if "relative_position_bias_table" in key or "cpb_mlp" in key}
    assert set(stock.state_dict()) - set(ours.state_dict()) == tables
    loaded, plain = (timm.create_model(name, **options, position=p).double().eval() for p in (position, "none"))
    assert not close(loaded(picture()), stock(picture()))
    for key in set(stock.state_dict()) - tables:
        torch.testing.assert_close(loaded.state_dict()[key], stock.state_dict()[key], rtol=1e-6, atol=1e-6, msg=key)
    layers = [m for m in loaded.modules() if isinstance(m, SwinAttention)]
    assert position == "none" or not any(layer.gate.any() for layer in layers)
    if position == "bilateral":
        assert {(m.kernel_size, m.outside, m.smoothing) for m in layers} == {(5, "learned", "zscore")}
    torch.testing.assert_close(loaded(picture()), plain(picture()))
    still = build(name, position=position, shift=False)
    still.load_state_dict(ours.state_dict())
    assert not close(still(picture()), ours(picture()))
    assert {m.shift_size for m in still.modules() if isinstance(m, SwinAttention)} == {(0, 0)}
    assert len({m.shift_size for m in ours.modules() if isinstance(m, SwinAttention)}) > 1


def stock_and_file(name: str, tmp_path, **options) -> tuple[nn.Module, dict]:
    """Return timm's model, and the options that build ours from its weights."""
    stock = build(NAMES[name], **options)
    file = tmp_path / "stock.pth"
    torch.save({"state_dict": stock.state_dict()}, file)
    return stock, dict(SMALL, drop_path_rate=0.0, checkpoint_path=str(file), **options)


@pytest.mark.parametrize("name", [V1, V2])
@pytest.mark.parametrize(
    "options",
    [dict(position="table+bilateral", kernel_size=3, outside="zero"), dict(position="table+relative")],
    ids=str,
)
def test_what_is_added_to_the_table_starts_as_timms(name, options, tmp_path):
    stock, ours = stock_and_file(name, tmp_path)
    model = timm.create_model(name, **ours, **options).double().eval()
    assert close(model(picture()), stock(picture()))
    for module in model.modules():
        if isinstance(module, SwinAttention):
            nn.init.ones_(module.gate)
    assert not close(model(picture()), stock(picture()))
    model(picture()).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", [V1, V2])
def test_centred_windows(name, tmp_path):
    """timm's weights load strictly, even if timm shrinks the window to the map. No window is shifted."""
    stock, ours = stock_and_file(name, tmp_path, window_size=5, always_partition=True)
    model = timm.create_model(name, **ours, window="centred").double().eval()
    model.load_state_dict(stock.state_dict(), strict=True)
    layers = [m for m in model.modules() if isinstance(m, SwinAttention)]
    assert {(m.window, m.window_size, m.shift_size) for m in layers} == {("centred", (5, 5), (0, 0))}
    assert not close(model(picture()), stock(picture()))
    small = timm.create_model(name, **dict(SMALL, window_size=9), window="centred")
    assert {m.window_size for m in small.modules() if isinstance(m, SwinAttention)} == {(9, 9)}
    model.set_input_size(img_size=(48, 80))
    assert model(picture((48, 80))).shape == (2, 5)
    model.set_input_size(img_size=(48, 80), window_size=3)
    assert {m.window_size for m in layers} == {(3, 3)}
    assert model(picture((48, 80))).shape == (2, 5)
    with pytest.raises(ValueError, match=r"window_size must be odd for window='centred', got \(4, 4\)"):
        model.set_input_size(img_size=(64, 96), window_size=4)
    assert model(picture((48, 80))).shape == (2, 5), "a refused size changes nothing"


@pytest.mark.parametrize("name", [V1, V2])
def test_without_shift_it_is_timms_without(name):
    stock, ours = build(NAMES[name]), build(name, shift=False)
    ours.load_state_dict(stock.state_dict())
    for module in stock.modules():
        if hasattr(module, "shift_size"):
            module.shift_size, module.attn_mask = (0, 0), None
    torch.testing.assert_close(ours(picture()), stock(picture()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [V1, V2])
def test_set_input_size_changes_windows_as_in_timm(name):
    """set_input_size changes windows, shifts and tables as in timm; the model takes pictures of any size."""
    ours, still = (build(name, strict_img_size=False, shift=shift) for shift in (True, False))
    stock = build(NAMES[name], strict_img_size=False)
    stock.load_state_dict(ours.state_dict())
    assert close(ours(picture((52, 36))), stock(picture((52, 36))))
    for model in (ours, stock, still):
        model.set_input_size(img_size=(48, 80), window_size=6)
    assert close(ours(picture((48, 80))), stock(picture((48, 80))))
    for model, shifted in ((ours, True), (still, False)):
        layers = [m for m in model.modules() if isinstance(m, SwinAttention)]
        assert {m.window_size for m in layers} == {(6, 6)}
        assert ({m.shift_size for m in layers} != {(0, 0)}) == shifted


@pytest.mark.slow
@torch.no_grad()
def test_a_trace_of_bilateral_windows_serves_other_sizes():
    """Their masks, unlike those of tables alone, are one for each group of windows."""
    model = build(V1, strict_img_size=False, position="table+bilateral", kernel_size=3)
    for module in model.modules():
        if isinstance(module, SwinAttention):
            nn.init.ones_(module.gate)
    traced = torch.jit.trace(model, picture((64, 64)), check_trace=False)
    assert close(traced(picture((52, 68))), model(picture((52, 68))))


def test_checkpoints_of_other_windows():
    """Tables are interpolated as by timm's filter."""
    from attn_plugins.timm.swin import _filter

    square = dict(img_size=64)
    stock = build(NAMES[V1], window_size=6, **square)
    ours, expected = build(V1, **square), build(NAMES[V1], **square)
    expected.load_state_dict(
        timm.models.swin_transformer.checkpoint_filter_fn(stock.state_dict(), expected), strict=True
    )
    ours.load_state_dict(_filter(stock.state_dict(), ours), strict=True)
    assert close(ours(picture((64, 64))), expected(picture((64, 64))))


def test_features_checkpointing_dropout_and_copies():
    model = build(V1)
    features = timm.create_model(V1, features_only=True, **{k: v for k, v in SMALL.items() if k != "num_classes"})
    assert [tuple(f.shape) for f in features(picture().float())] == [(2, 10, 16, 16), (2, 5, 8, 32)]
    expected = model(picture())
    assert close(copy.deepcopy(model)(picture()), expected)
    model.set_grad_checkpointing()
    model.train()(picture()).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    dropped = build(V1, attn_drop_rate=0.5, proj_drop_rate=0.5)
    assert [(m.dropout, m.proj_drop.p) for m in dropped.modules() if isinstance(m, SwinAttention)] == [(0.5, 0.5)] * 4
    dropped.load_state_dict(model.state_dict())
    assert close(dropped(picture()), expected)
    assert not close(dropped.train()(picture()), expected)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(position="sine"), "position must be one of table, relative, bilateral, .*, none, got 'sine'"),
        (dict(window="centered"), "window must be one of partition, centred, got 'centered'"),
        (dict(window="centred"), r"window_size must be odd for window='centred', got \(4, 4\)"),
        (dict(head_dim=4), "head_dim must be None: the 2 heads share the 16 channels, got a width of 4"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model(V1, **SMALL, **options)
