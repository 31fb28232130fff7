"""The attention of each word of a caption, against the projections and decoders of the models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

from attn_plugins.modules import MultiheadAttention
from tests.tools.caption_helpers import CAPTIONERS, read, run
from tools.caption.attributes import AttributeDetector, load_detector
from tools.caption.backbones import TimmBackbone
from tools.caption.captioner import Captioner
from tools.caption.word_attention import summary, word_attention
from tools.pictures import open_picture

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def captioner(captioned) -> Captioner:
    folder = captioned.parent
    detector = load_detector(folder / "best.safetensors")
    return Captioner([folder / "entangled.pt"], detector=detector, max_len=6)


@pytest.mark.parametrize("fusion", ["entangled", "stacked-visual"])
def test_weights_are_the_softmax_of_the_queries_with_the_keys(fusion, captioned):
    """Compute the weights from the projections and the inputs of every attention layer for a caption's first words."""
    folder = captioned.parent
    captioner = Captioner([folder / f"{fusion}.pt"], detector=load_detector(folder / "best.safetensors"))
    [model] = captioner.models
    regions = captioner.extractor(open_picture(captioned / "images/000008.jpg"))
    net_input = captioner._sample(regions, [("zero", 0.9), ("two", 0.8)], [5, 6, 7])["net_input"]
    recorded = word_attention(model, net_input)
    calls: dict[str, tuple] = {}
    for name, module in model.decoder.named_modules():
        if isinstance(module, MultiheadAttention):
            module.register_forward_pre_hook(lambda m, inputs, name=name: calls.update({name: (m, *inputs[:2])}))
    short = captioner._sample(regions, [("zero", 0.9), ("two", 0.8)], [5, 6])["net_input"]
    gates, shares = [block.controller for block in model.decoder.blocks], []
    for gate in filter(None, gates):
        gate.gate.register_forward_hook(lambda module, inputs, output: shares.append(torch.sigmoid(output)))
    with torch.no_grad():
        model(**short)
        for layer in range(2):
            places = dict(regions="visual_attention", attributes="semantic_attention")
            for name, place in places.items():
                key = f"blocks.{layer}.entangled.{place}.attention"
                if fusion != "entangled":
                    key = f"blocks.{layer}.attentions.{place.removesuffix('_attention')}.attention"
                module, query, keys = calls[key]
                q, k = module.q_proj(query)[0].unflatten(1, (4, 16)), module.k_proj(keys)[0].unflatten(1, (4, 16))
                for head in range(4):
                    expected = (q[:, head] @ k[:, head].T / math.sqrt(16)).softmax(1)
                    # The row of the preceding word predicts a word; later words have no effect.
                    torch.testing.assert_close(recorded.weights[name][layer, head, :2], expected[:2])
    for name, weights in recorded.weights.items():
        assert weights.shape == (2, 4, 3, 9 if name.startswith("regions") else 2)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
    if fusion == "entangled":
        for layer in range(2):
            torch.testing.assert_close(recorded.visual_share[layer, :2], shares[layer][0].mean(1)[:2])
    else:
        assert recorded.visual_share is None


def test_rows_of_attention_are_of_the_words_beside_them(captioner, captioned):
    answer = captioner(open_picture(captioned / "images/000006.jpg"))
    tokens = [captioner.task.dictionary.index(word) for word in answer.words]
    net_input = captioner._sample(answer.regions, answer.attributes, tokens)["net_input"]
    with torch.no_grad():
        logits = captioner.models[0](**net_input)[0][0]
    expected = logits.log_softmax(1)[range(len(tokens)), tokens]
    np.testing.assert_allclose(answer.log_probabilities, expected, atol=1e-4)
    [attention] = answer.attention
    assert attention.weights["regions"].shape[2] == len(tokens) == len(expected)


@pytest.mark.parametrize("name", CAPTIONERS)
def test_where_a_captioner_without_blocks_looked(name, captioned):
    """Compare with the decoder word by word: the row of a word is that of the step that chose it."""
    folder = captioned.parent
    captioner = Captioner([folder / f"{name}.pt"], detector=load_detector(folder / "best.safetensors"))
    [model] = captioner.models
    regions = captioner.extractor(open_picture(captioned / "images/000007.jpg"))
    tokens = [5, 6, 7, 8]
    net_input = captioner._sample(regions, [("zero", 0.9), ("two", 0.8)], tokens)["net_input"]
    recorded = word_attention(model, net_input)
    assert recorded.visual_share is None
    assert set(recorded.weights) == CAPTIONERS[name]
    previous = net_input.pop("prev_output_tokens")
    memory, state = model.encoder(**net_input), {}
    for t in range(len(tokens)):
        told = model.decoder(previous[:, : t + 1], memory, state)[1]["weights"]
        for key, weights in recorded.weights.items():
            assert weights.shape[:3] == (3 if name == "conv_captioner" else 1, 1, len(tokens))
            torch.testing.assert_close(weights[:, :, t], told[key][:, :, 0], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="model must be a captioner, got Linear"):
        word_attention(torch.nn.Linear(2, 2), net_input)


def test_attributes_that_the_vocabulary_lacks_are_left_out(captioner, captioned, tmp_path):
    words = ["quark", *captioner.detector.words[:2], "gluon"]
    AttributeDetector(TimmBackbone("test_resnet", (64, 64)), words).save(tmp_path / "some.safetensors")
    assert (
        run(captioned, tmp_path, captioned / "images/000006.jpg", options=("--detector", tmp_path / "some.safetensors"))
        == 0
    )
    numbers = read(tmp_path / "000006.json")
    assert len(numbers["attributes"]) + len(numbers["unknown_attributes"]) == 3
    assert {word for word, _ in numbers["attributes"]} <= set(words[1:3])
    assert set(numbers["unknown_attributes"]) <= {"quark", "gluon"}
    for word in numbers["words"]:
        assert len(word["attributes"]) == len(numbers["attributes"])


def test_models_together_show_their_mean(captioner, captioned):
    folder = captioned.parent
    paths = [folder / f"{name}.pt" for name in ("entangled", "other", "visual")]
    picture = open_picture(captioned / "images/000006.jpg")
    answer = Captioner(paths, detector=captioner.detector, max_len=6)(picture)
    shown = summary(answer.attention)
    last = [attention.weights["regions"][-1].mean(0) for attention in answer.attention]
    assert [len(attention.weights["regions"]) for attention in answer.attention] == [2, 3, 2]
    torch.testing.assert_close(shown["regions"], (last[0] + last[1] + last[2]) / 3)
    gates = [attention.visual_share[-1] for attention in answer.attention[:2]]
    torch.testing.assert_close(shown["visual_share"], (gates[0] + gates[1]) / 2)
    of_all = summary(answer.attention[:1], 0)["attributes"]
    torch.testing.assert_close(of_all, answer.attention[0].weights["attributes"].mean((0, 1)))
    with pytest.raises(ValueError, match="--layer must be from 1 to 2, the model's blocks, or all, got 3"):
        summary(answer.attention, 3)
