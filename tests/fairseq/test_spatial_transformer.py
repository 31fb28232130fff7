"""The computation of ``spatial_transformer`` for every kind of attention."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("fairseq")

from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer.transformer_legacy import tiny_architecture
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer

from attn_plugins.fairseq.spatial_transformer import SpatialTransformerModel
from attn_plugins.modules import MultiheadSpatialAttention
from tests.fairseq.fairseq_helpers import (
    Task,
    batch,
    build_transformer,
    check_training,
    padded_right,
    sentence,
    step_by_step,
)
from tests.helpers.slow_cases import slow_but

BITS = [f"{number:04b}" for number in range(16)]
KINDS = ["1111", "dynamic", "bilateral", "shaw", "none"]
# Each kind, also with the deformable unit, and each option that changes what a position sees.
SETTINGS = [
    *(dict(kind=kind, deformable=n % 2 > 0) for n, kind in enumerate(BITS)),
    *(dict(kind=kind, deformable=deformable) for kind in KINDS for deformable in (False, True)),
    dict(kind="1111", attention_range=3),
    dict(kind="0010", attention_range=3, deformable=True),
    dict(kind="dynamic", encoder_kernel_sizes="3,5", decoder_kernel_sizes="2,3"),
    dict(kind="bilateral", encoder_kernel_sizes="3", decoder_kernel_sizes="2", bilateral_outside="learned"),
    dict(kind="bilateral", decoder_kernel_sizes="3,2", bilateral_outside="-inf"),
    dict(kind="bilateral", encoder_kernel_sizes=3, bilateral_smoothing="zscore", bilateral_outside="mean"),
    dict(kind="shaw", shaw_distance=2, shaw_vectors="keys"),
    dict(kind="shaw", shaw_distance=1, shaw_per_head=True),
]
EACH_TERM = ["0000", "0001", "0010", "0100", "1000", "1111"]  # other sums of terms are slow
QUICK = [setting for setting in SETTINGS if setting["kind"] in EACH_TERM or setting["kind"] not in BITS]
settings = pytest.mark.parametrize("setting", slow_but(QUICK, SETTINGS), ids=lambda s: "-".join(map(str, s.values())))


def build(kind: str = "1111", **options: Any) -> SpatialTransformerModel:
    """Build a model of one kind of attention, without positions in the cross-attention of kinds other than bits."""
    kinds = dict(encoder_attention=kind, decoder_attention=kind, cross_attention=kind if kind in BITS else "1010")
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    return build_transformer(**{**kinds, **heads, "dropout": 0.0, **options})


def build_trained(setting: dict[str, Any], **options: Any) -> SpatialTransformerModel:
    """Build a float64 model in evaluation mode without zero parameters, whose offsets reach over several words."""
    model = build(**setting, **options).eval().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" not in name:
                scale = 10.0 if "conv_offset" in name else 0.1
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    return model


@settings
def test_every_setting_trains(setting):
    model = build(**setting)
    check_training(model, batch(model), lr=0.01, steps=6)


@torch.no_grad()
@settings
def test_step_by_step_equals_the_full_pass_after_reorders(setting):
    """The batch size changes as sentences end. No position sees the future, in a full pass of more words either."""
    model = build_trained(setting)
    sample = batch(model, T=6)
    reorders = {1: torch.tensor([2, 0, 1]), 2: torch.tensor([2, 0, 0, 1]), 4: torch.tensor([3, 1])}
    steps, previous, memory = step_by_step(model, sample, reorders)
    output, extra = model.decoder(previous, memory)
    assert output.std() > 0.05
    for t in range(4, 6):
        torch.testing.assert_close(steps[t][0][:, 0], output[:, t])
        torch.testing.assert_close(steps[t][1]["attn"][0][:, 0].float(), extra["attn"][0][:, t].float())
    for t in (1, 4):
        changed = previous.clone()
        changed[:, t:] = (changed[:, t:] - 3) % 15 + 4
        other = model.decoder(changed, memory)[0]
        torch.testing.assert_close(other[:, :t], output[:, :t])
        assert not torch.isclose(other[:, t], output[:, t]).all(1).any()


@torch.no_grad()
@settings
def test_padding_changes_no_other_token(setting):
    """Compare sources and targets padded on either side with each sentence alone.

    Positions in cross-attention refuse targets padded on the left.
    """
    model = build_trained(setting)
    sample, pad = batch(model), model.encoder.dictionary.pad()
    right, left = (F.pad(sample["prev_output_tokens"], sides, value=pad) for sides in ((0, 3), (3, 0)))
    outputs = [model(**sample)[0], model(**padded_right(sample))[0]]
    outputs.append(model(**{**sample, "prev_output_tokens": right})[0][:, :5])
    if not model.cfg.cross_terms.relative:
        outputs.append(model(**{**sample, "prev_output_tokens": left})[0][:, 3:])
    for b in range(3):
        expected = model(**sentence(sample, b))[0][0]
        for output in outputs:
            torch.testing.assert_close(output[b], expected)


@torch.no_grad()
@pytest.mark.parametrize("normalize_before, biases", [(False, True), (True, True), (False, False)])
def test_query_and_key_content_is_fairseqs_transformer(normalize_before, biases):
    """'1000' with absolute positions is fairseq's ``transformer``; its q and k biases need ``--query-key-bias``."""
    options = dict(encoder_normalize_before=normalize_before, decoder_normalize_before=normalize_before)
    model = build_trained(dict(kind="1000"), **options, query_key_bias=biases)
    args = argparse.Namespace(
        **{name: value for name, value in vars(model.cfg).items() if isinstance(value, (int, float))}
    )
    for side in ("encoder", "decoder"):
        for name, value in vars(getattr(model.cfg, side)).items():
            setattr(args, f"{side}_{name}", value)
    tiny_architecture(args)
    stock = TransformerModel.build_model(args, Task()).eval().double()
    weights = {name.replace("_attn.attention.", "_attn."): value for name, value in model.state_dict().items()}
    for name in stock.state_dict():
        if not biases and name.endswith(("q_proj.bias", "k_proj.bias")):
            weights[name] = torch.zeros(32)
    stock.load_state_dict(weights)
    sample = batch(model)
    (expected, expected_extra), (output, extra) = stock(**sample), model(**sample)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)  # fairseq computes softmax in float32
    torch.testing.assert_close(extra["attn"][0].float(), expected_extra["attn"][0].float())


@pytest.mark.parametrize("kind", KINDS)
def test_quantization_noise_reaches_every_projection(kind):
    model = build(kind, cross_attention="1111", deformable=True, quant_noise_pq=0.5)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    before = {name: layer.weight.clone() for name, layer in layers.items()}
    model.train()(**batch(model))
    noisy = {name for name, layer in layers.items() if not torch.equal(layer.weight, before[name])}
    assert noisy == {name for name in layers if "output_projection" not in name}


@torch.no_grad()
@pytest.mark.parametrize("order", [1, -1], ids=["ours first", "stock first"])
def test_references_scored_by_an_ensemble_with_stock(order):
    """``fairseq-generate --score-reference --path A:B``: fairseq's scorer adds up what the models return."""
    ours = build_trained(dict(kind="0110")).float()
    args = argparse.Namespace(dropout=0.0)
    tiny_architecture(args)
    models = [ours, TransformerModel.build_model(args, Task()).eval()]
    sample = {"net_input": batch(ours), "target": torch.randint(4, 20, (3, 5))}
    expected = torch.stack([model(**sample["net_input"])[0].softmax(-1) for model in models]).mean(0)
    expected = expected.gather(2, sample["target"].unsqueeze(2)).squeeze(2).log()
    ours.make_generation_fast_(need_attn=False)
    scored = SequenceScorer(ours.decoder.dictionary).generate(models[::order], sample)
    for hypotheses, scores in zip(scored, expected):
        torch.testing.assert_close(hypotheses[0]["positional_scores"], scores, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_alignment_is_computed_where_it_is_asked_for(monkeypatch):
    calls, maps = [], MultiheadSpatialAttention.attention_maps
    monkeypatch.setattr(
        MultiheadSpatialAttention, "attention_maps", lambda *a, **k: calls.append(a[0]) or maps(*a, **k)
    )
    model = build_trained(dict(kind="0111"))
    sample = batch(model)
    first, last = (layer.encoder_attn.attention for layer in model.decoder.layers)
    matrix = model(**sample)[1]["attn"][0]
    assert calls == [last]
    torch.testing.assert_close(matrix.sum(2).float(), torch.ones(3, 5))
    assert not matrix[1, :, :2].any()
    assert matrix[1, :, 2:].all()
    inputs = {}
    first.register_forward_pre_hook(lambda _, args: inputs.update(query=args[0], key=args[1]))
    one_head = model(**sample, alignment_layer=0, alignment_heads=1)[1]["attn"][0]
    assert calls[1:] == [first]
    mask = model.encoder(sample["src_tokens"])["encoder_padding_mask"][0]
    every_head = maps(first, inputs["query"], inputs["key"], key_padding_mask=mask)
    torch.testing.assert_close(one_head.float(), every_head[:, 0].float())
    query, key = (inputs[name].transpose(0, 1) for name in ("query", "key"))
    mean = model.decoder.layers[0].encoder_attn(query, key, key_padding_mask=mask, need_weights=True)[1]
    torch.testing.assert_close(mean, every_head.mean(1))
    calls.clear()
    model.make_generation_fast_(need_attn=False)
    assert model(**sample)[1]["attn"] is None
    model = build(kind="1111")
    assert model(**sample)[1]["attn"] is None
    assert calls == []
    with pytest.raises(ValueError, match="alignment_layer must be None in training"):
        model(**sample, alignment_layer=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["1111", "dynamic", "bilateral", "none"])
def test_beam_search_scores_are_those_of_the_full_pass(kind):
    model = build_trained(dict(kind=kind, deformable=True))
    sample = batch(model)
    generator = SequenceGenerator([model], model.decoder.dictionary, beam_size=3, max_len_b=6, min_len=3)
    hypotheses = generator.generate([model], {"net_input": sample})
    for b, beams in enumerate(hypotheses):
        assert len({tuple(h["tokens"].tolist()) for h in beams}) == 3
        alone = sentence(sample, b)
        for hypothesis in beams:
            target = hypothesis["tokens"]
            alone["prev_output_tokens"] = torch.cat([torch.tensor([model.decoder.dictionary.eos()]), target[:-1]])[None]
            output, extra = model(**alone)
            scores = output.log_softmax(-1)[0].gather(1, target[:, None])[:, 0]
            torch.testing.assert_close(hypothesis["positional_scores"], scores.float(), rtol=1e-4, atol=1e-5)
            attention = hypothesis["attention"].t()[:, -alone["src_tokens"].shape[1] :]
            torch.testing.assert_close(attention.float(), extra["attn"][0][0].float())


@pytest.mark.parametrize(("options", "scale"), [({}, 0.1), (dict(offset_lr_scale=0.5), 0.5)])
def test_offsets_learn_slowly(options, scale):
    model = build(deformable=True, **options)
    bound = math.sqrt(6 / (3 * 32 + 3 * 32))  # Glorot's
    for layer in (*model.encoder.layers, *model.decoder.layers):
        assert layer.self_attn.deformable.offset_scale == scale
        assert 0.95 * bound < layer.self_attn.deformable.weight.abs().max() <= bound


@pytest.mark.parametrize("kind", ["1111", "bilateral", "shaw"])
def test_attention_dropout_reaches_every_attention(kind):
    model = build(kind, attention_dropout=0.25)
    dropouts = [part.dropout for part in model.modules() if isinstance(getattr(part, "dropout", None), float)]
    assert dropouts == [0.25] * 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", slow_but(["dynamic"], ["1111", "bilateral", "dynamic", "shaw"]))
def test_traced_for_another_batch(kind):
    """fairseq's models have exported methods, for which ``torch.jit`` reads the annotations of every module's class."""

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(kind).eval().requires_grad_(False)

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return self.model(*tensors)[0]

    model, words = Scores(), torch.randint(4, 8, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    lengths = torch.full((3,), 5)
    traced = torch.jit.trace(model, (words[0, :2], lengths[:2], words[1, :2]), check_trace=False)
    torch.testing.assert_close(traced(words[0], lengths, words[1]), model(words[0], lengths, words[1]))
