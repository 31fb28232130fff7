"""Checks on a device without kernels and float64 (:mod:`.other_device`), for processes of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from attn_plugins import ops
from tests.helpers import other_device
from tests.helpers.cuda_checks import floating, randomized
from tests.helpers.module_inputs import inputs
from tests.helpers.other_device import CALLS, DEVICE, back, elsewhere
from tests.helpers.public_modules import MODULES, VARIANTS
from tests.ops.contract_examples import EXAMPLES
from tests.ops.test_contract import differentiate, example


def close(name: str, actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Compare results relative to the greatest number of all, since the gradients of some biases are zero."""
    greatest = max(t.abs().max() for t in expected if t is not None and t.numel())
    for one, two in zip(actual, expected, strict=True):
        assert (one is None) == (two is None), name
        if one is not None and two is not None and two.numel():
            assert (back(one) - two).abs().max() <= 1e-4 * greatest, name


def operators() -> None:
    """Every operator, forward and backward, with and without ``grid_sample`` and its backward on the device."""
    for kernels in ((), ("grid_sampler_2d",), ("grid_sampler_2d", "grid_sampler_2d_backward")):
        registered = other_device.has(*kernels)
        for name in EXAMPLES if not kernels else [name for name in EXAMPLES if name.startswith("deform")]:
            some = example(name, "tiny", "cpu", torch.float32)
            with ops.backend("reference"):
                expected = differentiate(some.call, some.leaves())
            actual = differentiate(some.call, elsewhere(some.leaves()))
            close(name, [*actual.values()], [*expected.values()])
        registered._destroy()


def modules(others: bool = False) -> None:
    """Every module, forward and backward, and its maps of attention; with ``others``, the rest of the variants."""
    quick = [*MODULES, "NonLocal2d, concatenation"]
    for name in [name for name in VARIANTS if name not in quick] if others else quick:
        module = randomized(VARIANTS[name]()).eval()
        expected = _results(module, inputs(name))
        moved = other_device.move(copy.deepcopy(module))
        close(name, _results(moved, elsewhere(inputs(name))), expected)
        if hasattr(module, "attention_maps") and getattr(module, "dv", 1):
            try:
                maps = module.attention_maps(*inputs(name)[0], **inputs(name)[1])
            except ValueError:
                continue  # modes without a softmax
            args, kwargs = elsewhere(inputs(name))
            close(name, floating(moved.attention_maps(*args, **kwargs)), floating(maps))


def _results(module: torch.nn.Module, arguments: Any) -> list[Tensor | None]:
    args, kwargs = arguments
    leaves = floating([*args, *kwargs.values()])
    for leaf in leaves:
        leaf.requires_grad_()
    outputs = floating(module(*args, **kwargs))
    total = sum(output.square().sum() for output in outputs)
    grads = torch.autograd.grad(total, [*leaves, *module.parameters()], allow_unused=True)
    return [*outputs, *grads]


def autocast() -> None:
    """The dtypes of operators are those of the CPU."""
    for name in EXAMPLES:
        if "padding" not in name:
            some = example(name, "tiny", "cpu", torch.float32)
            with torch.autocast("cpu", torch.bfloat16):
                dtype = some.call(**some.tensors).dtype
            with torch.autocast(DEVICE, torch.bfloat16):
                assert some.call(**elsewhere(some.tensors)).dtype == dtype, name


def few_calls() -> None:
    """Where ``grid_sample`` serves, forward and backward take a tenth of the definition's calls."""
    counts = []
    for kernels in ((), ("grid_sampler_2d", "grid_sampler_2d_backward")):
        registered = other_device.has(*kernels)
        for name in ("deformable_attention", "deform_conv2d"):
            leaves = elsewhere(example(name, "small", "cpu", torch.float32).leaves())
            CALLS.clear()
            differentiate(example(name, "small", "cpu", torch.float32).call, leaves)
            counts.append(CALLS.total())
        registered._destroy()
    print(counts)
    assert counts[2] < counts[0] / 10
    assert counts[3] < counts[1] / 3


def suppression() -> None:
    """The stand-in's ``nms`` for mmcv, which every detector with boxes calls."""
    from attn_plugins.mmcv_ext.boxes import nms

    boxes = torch.rand(40, 4) * 20
    boxes[:, 2:] += boxes[:, :2]
    scores = torch.rand(40)
    kept = nms(elsewhere(boxes), elsewhere(scores), 0.3, 0)
    assert torch.equal(back(kept), nms(boxes, scores, 0.3, 0))


def detector() -> None:
    """RetinaNet of mmdet on the stand-in for mmcv's extension: a training step and a prediction."""
    from typing import Union
    from unittest.mock import patch

    from mmengine.registry import MODELS
    from mmengine.structures import instance_data

    from tests.mm import test_mmcv_ext_models as models

    config, model = models.build("mmdet::retinanet/retinanet_r50_fpn_1x_coco", small=True)
    batch, preprocessor = models.inputs("mmdet", config), MODELS.build(config.model.data_preprocessor)

    def prepared(model: torch.nn.Module, batch: dict, training: bool) -> dict:
        data = preprocessor(copy.deepcopy(batch), training)
        return dict(inputs=elsewhere(data["inputs"]), data_samples=[s.to(DEVICE) for s in data["data_samples"]])

    losses, grads = models.train(model, batch)
    predictions = models.predict(model, batch)
    model.zero_grad()
    other_device.move(model)
    index = Union[instance_data.IndexType, other_device.Elsewhere]  # noqa: UP007  mmengine knows CPU's and CUDA's
    with patch.object(models, "prepared", prepared), patch.object(instance_data, "IndexType", index):
        there = models.train(model, batch)
        close("predictions", models.predict(model, batch), predictions)
    assert all(abs(there[0][name] - loss) < 1e-3 * (1 + abs(loss)) for name, loss in losses.items())
    close("gradients", [there[1][name] for name in grads], [*grads.values()])
