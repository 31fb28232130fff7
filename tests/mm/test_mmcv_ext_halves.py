"""float16 and bfloat16 through every function of the stand-in, as mmcv calls it: computed in float32, rounded once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmcv import ops
from mmdet.models.dense_heads import MaskFormerHead
from mmdet.registry import MODELS
from mmdet.utils import register_all_modules
from mmengine.structures import InstanceData
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from attn_plugins.mmcv_ext import OPERATORS
from tests.mm.mm_helpers import ROOT, upstream
from tests.mm.mmcv_ext_helpers import extension
from tests.mm.test_mmcv_ext import CASES, carafe, leaf, random_boxes


def large_boxes(count: int) -> Tensor:
    """Return boxes whose areas exceed float16."""
    return (20 * random_boxes(count)).to(torch.get_default_dtype())


def on_a_large_map(pool: Callable[..., Tensor], *options: Any) -> tuple:
    rois = torch.cat((torch.zeros(40, 1), 15 * random_boxes(40)), 1).to(torch.get_default_dtype())
    return (leaf(1, 2, 225, 225),), lambda x: pool(x, rois, (7, 5), 0.25, *options)


def masked_conv() -> tuple:
    mask = torch.rand(1, 6, 7) > 0.6
    return (leaf(1, 3, 6, 7), leaf(4, 3, 3, 3), leaf(4)), lambda x, w, b: ops.masked_conv2d(x, mask, w, b, 1)


def sync_bn() -> tuple:
    running = torch.zeros(5, dtype=torch.float32), torch.ones(5, dtype=torch.float32)
    call = lambda x, w, b: ops.sync_bn.SyncBatchNormFunction.apply(x, *running, w, b, 0.2, 1e-3, -1, 1, "default")  # noqa: E731
    return (leaf(4, 5, 6, 7), leaf(5), leaf(5)), call


def lanes() -> tuple:
    start, length, x = torch.rand(30, 4), 72 * torch.rand(30, 1), 800 * torch.rand(30, 1) + 40 * torch.rand(30, 73)
    return (torch.cat((start, length, x), 1)[:, : 5 + 72], torch.rand(30)), lambda b, s: ops.line_nms(b, s, 40.0, 20)


MORE: dict[str, Callable[[], tuple]] = {
    "nms": lambda: ((large_boxes(60), torch.rand(60)), lambda b, s: ops.nms(b, s, 0.3)),
    "soft_nms": lambda: ((large_boxes(60), torch.rand(60)), lambda b, s: ops.soft_nms(b, s, 0.3, method="gaussian")),
    "nms_match": lambda: ((torch.cat((large_boxes(60), torch.rand(60, 1)), 1),), lambda dets: ops.nms_match(dets, 0.3)),
    "bbox_overlaps": lambda: ((large_boxes(6), large_boxes(7)), ops.bbox_overlaps),
    "roi_align-large": lambda: on_a_large_map(ops.roi_align),
    "roi_pool-large": lambda: on_a_large_map(ops.roi_pool),
    "line_nms": lanes,
    "carafe_naive": lambda: carafe(torch.no_grad()(ops.carafe_naive), 2),
    "masked_conv": masked_conv,
    "sync_bn": sync_bn,
}


@contextmanager
def compared_with_float32() -> Iterator[set[str]]:
    """Let mmcv call the stand-in, compare each call with the same numbers in float32, and collect the names."""
    called: set[str] = set()

    def compared(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            before = [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            wide = tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t,
                            tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, (args, kwargs)))  # fmt: skip
            answer, expected = OPERATORS[name](*args, **kwargs), OPERATORS[name](*wide[0], **wide[1])
            for ours, exact in zip(tree_leaves((args, kwargs, answer)), tree_leaves((*wide, expected))):
                if not isinstance(ours, Tensor):
                    assert ours == exact, name
                elif ours.is_floating_point():
                    eps = torch.finfo(ours.dtype).eps
                    # A convolution's products are in half precision, their sums in float32.
                    atol = eps * exact.abs().max().item() if "deform_conv" in name and exact.numel() else 1e-5
                    close = dict(rtol=eps, atol=atol, equal_nan=True, msg=lambda text: f"{name}: {text}")
                    torch.testing.assert_close(ours.float(), exact, **close)
                else:
                    assert torch.equal(ours, exact), name
            assert before == [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            return answer

        return call

    with extension(SimpleNamespace(**{name: compared(name) for name in OPERATORS})):
        yield called


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_function_takes_halves(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with compared_with_float32() as called:
        for name, build in (CASES | MORE).items():
            if name == "sync_bn" and dtype == torch.bfloat16:  # which mmcv itself refuses
                continue
            torch.set_default_dtype(dtype)
            try:
                leaves, call, *_ = build()
            finally:
                torch.set_default_dtype(torch.float32)
            output = call(*leaves)
            for result in [output] if isinstance(output, Tensor) else output:
                assert result.dtype in (dtype, torch.int64)
                if result.requires_grad:
                    result.sum().backward()
    # mmcv's backward of carafe_naive asks for `is_musa` on CPUs; that of carafe calls the same function.
    left_out = {name for name in OPERATORS if name.startswith("sync_bn") and dtype == torch.bfloat16}
    assert called == OPERATORS.keys() - left_out - {"carafe_naive_backward"}


def test_the_pages_code_computes_mask2formers_losses_of_float16_in_float32(monkeypatch) -> None:
    """mmdet counts masks times 12,544 points in the scores' dtype: from 6 masks on, that is infinite in float16."""
    register_all_modules(init_default_scope=False)
    model = upstream("mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco").model
    head = MODELS.build(dict(model.panoptic_head, _scope_="mmdet", train_cfg=model.train_cfg, test_cfg=model.test_cfg))
    monkeypatch.setattr(MaskFormerHead, "loss_by_feat", MaskFormerHead.loss_by_feat)  # to restore it
    stock = head.loss_by_feat
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/troubleshooting.md").read_text(), re.S)
    exec(code, {})
    in_float32 = head.loss_by_feat
    assert in_float32 != stock

    labels = [InstanceData(labels=torch.arange(4), masks=torch.rand(4, 32, 32).gt(0.5).long()) for _ in range(2)]
    outputs = [torch.randn(2, 100, 81).half()], [4 * torch.randn(2, 100, 32, 32).half()]
    losses = []
    for compute, dtype in ((stock, torch.float16), (in_float32, torch.float16), (in_float32, None)):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype or torch.float16, enabled=dtype is not None):
            losses.append(float(compute(*outputs, labels, [{}, {}])["loss_mask"]))
    assert losses[0] in (0, pytest.approx(float("nan"), nan_ok=True))
    assert losses[1] == losses[2] > 1
