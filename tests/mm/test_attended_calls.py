"""The map that tokens come from belongs to a call: threads, calls within calls, and checkpointed backward passes."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.mm.test_attended import build, exchanged, opened, ours, outputs

WIDE, TALL = (64, 128), (128, 64)  # maps of as many tokens


@pytest.fixture(scope="module")
def model():
    model = opened(build(ours())).eval()
    with torch.no_grad():
        for layer in exchanged(model).values():
            layer.row_table.weight.mul_(10)
            layer.column_table.weight.mul_(10)
    return model


def run(model, size):
    return outputs(model, size=size)[0]


def test_threads_and_calls_within_calls_keep_their_maps(model):
    expected = {size: run(model, size) for size in (WIDE, TALL)}
    results, encoded, resume = {}, threading.Event(), threading.Event()

    def pause(module, inputs, keywords):
        if threading.current_thread() is other and not encoded.is_set():
            encoded.set()
            assert resume.wait(600)
        elif "inner" not in results and threading.current_thread() is not other:
            results["inner"] = None
            results["inner"] = run(model, WIDE)  # while the call of TALL is between its positions and its layers

    other = threading.Thread(target=lambda: results.update(other=run(model, WIDE)))
    handle = model.encoder.register_forward_pre_hook(pause, with_kwargs=True)
    try:
        other.start()
        assert encoded.wait(600)
        results["outer"] = run(model, TALL)
    finally:
        resume.set()
        other.join()
        handle.remove()
    torch.testing.assert_close(results["other"], expected[WIDE])
    torch.testing.assert_close(results["inner"], expected[WIDE])
    torch.testing.assert_close(results["outer"], expected[TALL])


@pytest.mark.parametrize("use_reentrant, by_method", [(True, False), (False, False), (True, True)])
def test_checkpointed_layers_find_the_map_of_their_call_again(model, use_reentrant, by_method, monkeypatch):
    """As fairscale's ``checkpoint_wrapper`` does it: the layer's ``forward`` is run again in the backward pass."""

    tables = [layer.row_table.weight for layer in exchanged(model).values()]
    leaves = [p for p in model.parameters() if p.requires_grad]

    def gradients():
        for parameter in leaves:
            parameter.grad = None
        (run(model, WIDE).pow(2).sum() + 2 * run(model, TALL).pow(2).sum()).backward()
        return [table.grad for table in tables]

    expected = gradients()
    if by_method:  # as mmdet's semi-supervised wrapper calls a detector's loss
        monkeypatch.setattr(type(model), "__call__", lambda self, *inputs, mode: self._forward(*inputs))
    for layer in model.encoder.layers:
        monkeypatch.setattr(layer, "forward", partial(checkpoint, layer.forward, use_reentrant=use_reentrant))
    for gradient, wanted in zip(gradients(), expected):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
        assert wanted.any()


def test_weights_and_logits_of_an_earlier_call_are_on_its_map(model):
    (layer, *_) = exchanged(model).values()
    inputs = {}
    handle = layer.register_forward_pre_hook(lambda m, args, given: inputs.update(given), with_kwargs=True)
    with torch.no_grad():
        run(model, WIDE)
        handle.remove()
        tokens = inputs["query"], inputs["key"]
        expected = layer.token_weights(*tokens), layer.token_logits(*tokens)
        run(model, TALL)
        torch.testing.assert_close((layer.token_weights(*tokens), layer.token_logits(*tokens)), expected)
