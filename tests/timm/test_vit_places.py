"""The grid of tokens belongs to a call of a model: in threads, nested calls, repeated blocks, copies and graphs."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from timm.layers import set_reentrant_ckpt
from timm.models._features_fx import create_feature_extractor
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from attn_plugins.modules import capture_attention
from attn_plugins.timm.token_grids import _record, _wrap
from tests.helpers.small_vits import build, layers_of, open_gates, picture

WIDE, TALL = (48, 64), (64, 48)  # equally many tokens


@pytest.fixture(params=["vit", "naflex"])
def model(request) -> nn.Module:
    naflex = dict(name="naflexvit_base_patch16_gap", img_size=None, dynamic_img_size=None, init_values=1.0)
    return open_gates(build(**(naflex if request.param == "naflex" else dict(dynamic_img_size=True))))


@torch.no_grad()
def outputs(model: nn.Module) -> tuple[Tensor, Tensor]:
    wide, tall = model(picture(*WIDE)), model(picture(*TALL))
    assert (wide - tall).abs().max() > 1e-3
    return wide, tall


@torch.no_grad()
def test_a_paused_thread_keeps_its_grid(model):
    wide, tall = outputs(model)
    reached, resume, main = threading.Event(), threading.Event(), threading.get_ident()

    def pause(module: nn.Module, inputs: tuple) -> None:
        if threading.get_ident() != main:
            reached.set()
            assert resume.wait(600)

    model.norm_pre.register_forward_pre_hook(pause)
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(torch.inference_mode()(model), picture(*WIDE))
        assert reached.wait(600)
        torch.testing.assert_close(model(picture(*TALL)), tall)
        resume.set()
        torch.testing.assert_close(paused.result(), wide)


# timm passes keyword arguments to NaFlexVit's blocks, which reentrant checkpointing refuses.
@pytest.mark.parametrize("model, reentrant", [("vit", False), ("vit", True), ("naflex", False)], indirect=["model"])
def test_gradient_checkpointing_of_several_sizes(model, reentrant):
    """A block is repeated with the grid of its own tokens: here a grid, the same turned, and one of more tokens."""
    model.train()
    gradients = []
    set_reentrant_ckpt(reentrant)
    try:
        for checkpointing in (False, True):
            model.set_grad_checkpointing(checkpointing)
            model.zero_grad()
            loss = sum(model(picture(*size)).square().sum() for size in (WIDE, TALL, (64, 64)))
            with ThreadPoolExecutor(1) as pool:  # as on CUDA, where backward passes have their own threads
                pool.submit(loss.backward).result()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    finally:
        set_reentrant_ckpt(False)
    torch.testing.assert_close(*gradients)


def test_gradient_checkpointing_that_copies_its_input():
    """The grid is lost, which is an error and not another grid."""
    model = open_gates(build(dynamic_img_size=True)).train()
    model.set_grad_checkpointing()
    set_reentrant_ckpt(True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            loss = model(picture(*WIDE)).sum() + model(picture(*TALL)).sum()
        with pytest.raises(ValueError, match=r"grid of x \(2, 13, 32\) is unknown.* use_reentrant=False"):
            loss.backward()
    finally:
        set_reentrant_ckpt(False)


# Modules whose hooks call the model again.
HOOKED = ("patch_embed", "pos_drop", "norm_pre", "blocks.0", "blocks.0.norm1", "blocks.0.attn", "blocks.1.attn.qkv")


@pytest.mark.parametrize("name, replaces", [*((name, n % 2 > 0) for n, name in enumerate(HOOKED)), ("blocks.0", False)])
@torch.no_grad()
def test_a_hook_that_calls_the_model_again(name, replaces):
    model = open_gates(build(dynamic_img_size=True))
    wide, tall = outputs(model)
    inner: list[Tensor] = []

    def again(module: nn.Module, inputs: tuple, *output: Tensor) -> Tensor | None:
        before.remove()
        after.remove()
        inner.append(model(picture(*TALL)))
        with pytest.raises(RuntimeError, match="stop"):
            failing(model, "blocks.1.mlp", picture(*TALL))
        model.forward_intermediates(picture(*TALL), [0], stop_early=True)
        changed = [x.clone() for x in output or inputs]
        return changed[0] if replaces else None

    for kind in ("pre_hook", "hook"):
        module = model.get_submodule(name)
        before = after = getattr(module, f"register_forward_{kind}")(again)
        torch.testing.assert_close(model(picture(*WIDE)), wide)
    assert len(inner) == 2
    torch.testing.assert_close(inner, [tall, tall])


def failing(model: nn.Module, name: str, x: Tensor) -> None:
    """Call a model with an error in a module."""

    def fail(module: nn.Module, inputs: tuple) -> None:
        raise RuntimeError("stop")

    with model.get_submodule(name).register_forward_pre_hook(fail):
        model(x)


@torch.no_grad()
def test_calls_that_end_early_change_nothing_later(model):
    wide, tall = outputs(model)
    for name in ("norm_pre", "blocks.0", "blocks.0.norm1", "blocks.1.mlp", "norm") * 20:
        with pytest.raises(RuntimeError, match="stop"):
            failing(model, name, picture(*WIDE))
        model.forward_intermediates(picture(*WIDE), [0], stop_early=True)
    torch.testing.assert_close(outputs(model), (wide, tall))
    assert len(_record.entries) <= 64
    assert not any(isinstance(part, Tensor) for entry in _record.entries for part in entry)


@torch.no_grad()
def test_a_copy_and_its_original_call_each_other():
    model = open_gates(build(dynamic_img_size=True))
    wide, tall = outputs(model)
    twin, inner = copy.deepcopy(model), []
    model.blocks[1].norm1.register_forward_hook(lambda *call: inner.append(twin(picture(*TALL))))
    torch.testing.assert_close(model(picture(*WIDE)), wide)
    torch.testing.assert_close(inner[0], tall)
    assert not twin.blocks[1].norm1._forward_hooks
    assert len(twin.patch_embed._forward_hooks) == len(model.patch_embed._forward_hooks) == 1


def test_models_of_one_size_have_no_hooks_and_a_class_is_wrapped_once():
    wrapped = VisionTransformer.__init__
    _wrap(VisionTransformer)
    assert VisionTransformer.__init__ is wrapped
    model = build()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_maps_of_an_earlier_call(model):
    """A layer's input keeps its grid after other calls; other tensors have none."""
    with capture_attention(model) as captured:
        model(picture(*WIDE))
    x, maps = captured["blocks.1.attn"].arguments[0], captured["blocks.1.attn"].maps()
    model(picture(*TALL))
    assert captured["blocks.1.attn"].size == (3, 4)
    torch.testing.assert_close(captured["blocks.1.attn"].maps(), maps)
    torch.testing.assert_close(layers_of(model)[1].attention_maps(x.detach()), maps)
    some = layers_of(model)[1].attention_maps(x.detach(), queries=torch.tensor([[2, 1], [0, 3]]))
    torch.testing.assert_close(some, maps[:, :, [2, 0], [1, 3]])
    with pytest.raises(ValueError, match=r"grid of x .* is unknown: x must be the tensor that the model passed"):
        layers_of(model)[1](x.clone())


@torch.no_grad()
def test_features_by_fx():
    model = open_gates(build(dynamic_img_size=True))
    extractor = create_feature_extractor(model, ["blocks.1"])
    for size in (WIDE, TALL, (32, 64)):
        (features,) = extractor(picture(*size)).values()
        expected = model.forward_intermediates(picture(*size), [1], output_fmt="NLC", return_prefix_tokens=True)[1][0]
        torch.testing.assert_close(features, torch.cat(expected[::-1], 1))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [(1,), (0,), (0, 1)])
@torch.no_grad()
def test_compiled_blocks(compiled):
    torch._dynamo.reset()
    model = open_gates(build(dynamic_img_size=True))
    expected = outputs(model)
    for number in compiled:
        model.blocks[number].compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(outputs(model), expected)
    with ThreadPoolExecutor(1) as pool:
        torch.testing.assert_close(pool.submit(outputs, model).result(), expected)


@pytest.mark.slow
def test_compiled_gradient_checkpointing():
    torch._dynamo.reset()
    model = open_gates(build(dynamic_img_size=True)).train()
    gradients = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        sum(call(picture(*size)).square().sum() for size in (WIDE, TALL)).backward()
        gradients.append([p.grad for p in model.parameters()])
        model.set_grad_checkpointing()
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_exported():
    model = open_gates(build(dynamic_img_size=True))
    wide, tall = outputs(model)
    for size, expected in ((WIDE, wide), (TALL, tall)):
        exported = torch.export.export(model, (picture(*size),)).module()
        torch.testing.assert_close(exported(picture(*size)), expected, rtol=1e-4, atol=1e-4)
