"""Every captioner as a fairseq model, alone and in ensembles."""

from __future__ import annotations

import argparse
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("fairseq")

from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

import attn_plugins.fairseq  # noqa: F401 - registers the captioners
from attn_plugins.modules import Modality
from attn_plugins.modules.captioning.eta_transformer import FUSIONS
from attn_plugins.modules.common.capture import attention_layers
from tests.fairseq.captioning_helpers import SIZES, captioner_of
from tests.fairseq.fairseq_helpers import check_training

D = 5
SETTINGS = [
    ("show_attend_tell", {}),
    ("show_attend_tell", dict(share_decoder_input_output_embed=True)),
    ("lstm_captioner", {}),
    ("conv_captioner", {}),
    ("lstm_captioner", dict(alignment="general", layers=1)),
    *(("eta_transformer", dict(fusion=fusion, no_encoder=n % 2 > 0)) for n, fusion in enumerate(FUSIONS)),
    ("eta_transformer", dict(no_encoder=True, gate_activation="tanh", share_decoder_input_output_embed=True)),
]
every_setting = pytest.mark.parametrize(
    ("name", "setting"), SETTINGS, ids=["-".join([n, *map(str, s.values())]) for n, s in SETTINGS]
)
every_captioner = pytest.mark.parametrize("name", SIZES)


def task(number: int = 19, D: int = D) -> Any:
    """The attributes of a task that the models read."""
    dictionary = Dictionary()
    for i in range(number - len(dictionary)):
        dictionary.add_symbol(f"word{i}")
    regions = SimpleNamespace(feature_dim=D, path="regions.hdf5")
    return SimpleNamespace(regions=regions, has_attributes=True, target_dictionary=dictionary)


def batch(dtype: torch.dtype = torch.float32, T: int = 5) -> dict[str, Any]:
    """Return a batch of three images with 4, 2, 3 regions and 3, 1, 2 attributes."""
    counts, lengths = torch.tensor([4, 2, 3]), torch.tensor([3, 1, 2])
    tokens = torch.randint(4, 19, (3, 3)).masked_fill(torch.arange(3) >= lengths.unsqueeze(1), 1)
    return dict(
        src_tokens=tokens,
        src_lengths=lengths,
        regions=torch.randn(3, 4, D, dtype=dtype),
        regions_padding_mask=torch.arange(4) >= counts.unsqueeze(1),
        prev_output_tokens=torch.cat([torch.full((3, 1), 2), torch.randint(4, 19, (3, T - 1))], 1),
    )


def shown(name: str) -> set[str]:
    """Return the inputs for which the model returns attention weights."""
    return set() if name == "eta_transformer" else {"regions"}


# --- computation ------------------------------------------------------------------------------------------------------


@every_setting
def test_every_setting_trains(name, setting):
    check_training(captioner_of(task(), name, **setting), batch(), lr=0.02)


@every_setting
def test_step_by_step_equals_the_full_pass_after_reorders(name, setting):
    """Steps may start with several words; a beam may reorder the rows and drop some of them."""
    model = captioner_of(task(), name, **setting).double().eval()
    sample = batch(torch.float64, T=6)
    previous = sample.pop("prev_output_tokens")
    reorders = {3: torch.tensor([1, 1, 0]), 5: torch.tensor([2, 0])}
    memory, state = model.encoder(**sample), {}
    for t in (2, 3, 4, 5, 6):
        if t in reorders:
            model.decoder.reorder_incremental_state_scripting(state, reorders[t])
            memory = model.encoder.reorder_encoder_out(memory, reorders[t])
            previous = previous[reorders[t]]
        logits, extra = model.decoder(previous[:, :t], memory, state)
        whole, whole_extra = model.decoder(previous[:, :t], memory)
        new = logits.shape[1]
        assert new == (2 if t == 2 else 1)
        torch.testing.assert_close(logits, whole[:, -new:], rtol=1e-11, atol=1e-11)
        assert set(extra["weights"]) == shown(name)
        for key, weights in extra["weights"].items():
            torch.testing.assert_close(weights, whole_extra["weights"][key][:, :, -new:], rtol=1e-11, atol=1e-11)


@every_setting
def test_padding_does_not_matter(name, setting):
    model = captioner_of(task(), name, **setting).double().eval()
    sample = batch(torch.float64)
    together = model(**sample)[0]
    for row, (n, s) in enumerate(((4, 3), (2, 1), (3, 2))):
        alone, extra = model(
            src_tokens=sample["src_tokens"][row : row + 1, :s],
            src_lengths=None,
            regions=sample["regions"][row : row + 1, :n],
            prev_output_tokens=sample["prev_output_tokens"][row : row + 1],
        )
        torch.testing.assert_close(alone[0], together[row])
        for weights in extra["weights"].values():
            assert weights.shape[1:] == (1, 5, n)
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64))


@pytest.mark.parametrize("name", ["show_attend_tell", "lstm_captioner", "conv_captioner"])
def test_it_is_the_module_with_embeddings_and_a_classifier(name):
    model = captioner_of(task(), name).double().eval()
    sample, decoder = batch(torch.float64), model.decoder
    C = decoder.embed_tokens.embedding_dim
    words = F.embedding(sample["prev_output_tokens"], decoder.embed_tokens.weight) * C**0.5
    if name == "show_attend_tell":
        features = decoder.lstm(words, sample["regions"], sample["regions_padding_mask"])[0]
    else:
        projection = model.encoder.projection
        source = sample["regions"] @ projection.weight.T + projection.bias, sample["regions_padding_mask"]
        if name == "lstm_captioner":
            features = decoder.lstm(words, *source)[0]
        else:
            features = decoder.input_projection(words)
            for layer in decoder.layers:
                features = layer(features, words, *source)[0]
    expected = features @ decoder.output_projection.weight.T + decoder.output_projection.bias
    torch.testing.assert_close(model(**sample)[0], expected)
    memory = model.encoder(*(sample[key] for key in ("src_tokens", "src_lengths", "regions", "regions_padding_mask")))
    torch.testing.assert_close(decoder.extract_features(sample["prev_output_tokens"], memory), features)


def test_eta_transformer_is_the_blocks_put_together():
    """Embeddings are scaled by sqrt(C) and shared; only the decoder has positions."""
    model = captioner_of(task(), "eta_transformer").double().eval()
    sample = batch(torch.float64)
    C, encoder, decoder = 16, model.encoder, model.decoder
    attributes = F.embedding(sample["src_tokens"], decoder.embed_tokens.weight) * C**0.5
    regions = sample["regions"] @ encoder.blocks.projection.weight.T + encoder.blocks.projection.bias
    visual = encoder.blocks.visual(Modality(regions, sample["regions_padding_mask"]))
    semantic = encoder.blocks.semantic(Modality(attributes, sample["src_tokens"] == 1))
    x = F.embedding(sample["prev_output_tokens"], decoder.embed_tokens.weight) * C**0.5
    # fairseq counts positions from 2, one above the padding index.
    angles = torch.arange(2, 7).double().unsqueeze(1) * 10000 ** -(torch.arange(C // 2).double() / (C // 2 - 1))
    x = x + torch.cat([angles.sin(), angles.cos()], 1)
    for block in decoder.blocks:
        x = block(x, visual, semantic)
    expected = x @ decoder.output_projection.weight.T + decoder.output_projection.bias
    torch.testing.assert_close(model(**sample)[0], expected, rtol=1e-5, atol=1e-5)  # positions are in float32
    names = attention_layers(model)
    assert "decoder.blocks.1.entangled.visual_attention.attention" in names
    assert len(names) == 2 * 2 + 2 * (1 + 4)


@pytest.mark.parametrize("name, dtype", zip(SIZES, [torch.bfloat16, torch.float16] * 2))
def test_half_precision_is_near_float32_for_features_of_either_dtype(name, dtype):
    """Features keep their stored dtype, because fairseq-generate --fp16 converts only the models."""
    model, sample = captioner_of(task(), name).eval(), batch()
    expected = model(**sample)[0]
    model.to(dtype)
    for features in (torch.float32, torch.float16):
        logits = model(**{**sample, "regions": sample["regions"].to(features)})[0]
        assert logits.dtype == dtype
        torch.testing.assert_close(logits.float(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@every_captioner
def test_images_are_encoded_once(name):
    """Decoding k captions per image in one call equals k separate calls."""
    model, inputs = captioner_of(task(), name), batch()
    previous = torch.randint(4, 16, (6, 4))
    logits = model(**{**inputs, "prev_output_tokens": previous})[0]
    for k in range(2):
        torch.testing.assert_close(logits[k::2], model(**{**inputs, "prev_output_tokens": previous[k::2]})[0])
    with pytest.raises(ValueError, match="multiple of 3 rows, got 4 rows"):
        model(**{**inputs, "prev_output_tokens": previous[:4]})


# Calls of dropout for five words, beside those within blocks: of words, sources, layers of an LSTM, and features.
DROPOUTS = [
    ("show_attend_tell", {}, {"decoder.lstm.dropout": 2}),
    ("lstm_captioner", {}, {"encoder.dropout": 1, "decoder.lstm.dropout": 1 + 5 + 1}),
    ("conv_captioner", {}, {"encoder.dropout": 1, "decoder.dropout": 2}),
    *(("eta_transformer", dict(fusion=fusion), {"encoder.blocks.dropout": sources, "decoder.dropout": 1})
      for fusion, sources in (("entangled", 2), ("visual", 1), ("semantic", 1))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fusion", "expected"), DROPOUTS)
def test_dropout_reaches_words_sources_layers_and_features(name, fusion, expected):
    model, calls = captioner_of(task(), name, dropout=0.1, **fusion), dict.fromkeys(expected, 0)
    for part in calls:
        model.get_submodule(part).register_forward_hook(lambda *_, part=part: calls.update({part: calls[part] + 1}))
    model.train()(**batch())
    assert calls == expected
    if name == "conv_captioner":
        assert model.decoder.input_projection.gain == 0.9


@pytest.mark.parametrize("names", [*([name] for name in SIZES), list(SIZES)], ids="-".join)
def test_beam_search_with_caches_equals_that_without(names):
    """Results with caches equal those without. An ensemble returns the logarithm of the mean probability."""
    of = task()
    models = [captioner_of(of, name).eval() for name in names]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    sample = {"net_input": batch()}
    hypotheses = []
    for cached in (True, False):
        generator = SequenceGenerator(models, of.target_dictionary, beam_size=3, max_len_b=7)
        generator.model.has_incremental = cached
        hypotheses.append(generator.generate(models, sample))
    inputs = sample["net_input"]
    for image, (with_cache, without) in enumerate(zip(*hypotheses)):
        for one, other in zip(with_cache, without):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            torch.testing.assert_close(one["score"], other["score"])
        best = with_cache[0]["tokens"]
        inputs["prev_output_tokens"] = torch.cat([torch.tensor([2]), best[:-1]]).expand(3, -1)
        mean = torch.stack([model(**inputs)[0][image].softmax(1) for model in models]).mean(0).log()
        torch.testing.assert_close(with_cache[0]["positional_scores"], mean.gather(1, best.unsqueeze(1)).squeeze(1))


# --- options and checkpoints ------------------------------------------------------------------------------------------


# Counted layer by layer, of 9487 words and 512 channels; eta_transformer's are the thesis', of 2048 channels.
PARAMETERS = dict(show_attend_tell=14_449_936, lstm_captioner=14_186_767, conv_captioner=19_699_471)
PARAMETERS["eta_transformer"] = 97_477_391 - 1536 * 512


@every_captioner
def test_base_and_tiny_models_have_the_documented_sizes(name):
    """Base and tiny models have the documented sizes; options that hydra omits take the base model's size."""
    kind = MODEL_REGISTRY[name]
    assert ARCH_MODEL_REGISTRY[name] is ARCH_MODEL_REGISTRY[f"{name}_tiny"] is kind
    with torch.device("meta"):
        model = kind.build_model(OmegaConf.create({"dropout": 0.2, "embed_dim": None}), task(D=2048))
        largest = kind.build_model(argparse.Namespace(), task(9487, 512))
    assert sum(parameter.numel() for parameter in largest.parameters()) == PARAMETERS[name]
    assert model.decoder.embed_tokens.weight.shape == (19, 512)
    assert model.encoder.embed_tokens is model.decoder.embed_tokens
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.2}
    if name == "conv_captioner":
        assert len(model.decoder.layers) == 3
        assert model.decoder.layers[0].conv.direction.shape == (1024, 512, 5)
    args = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[name](embed_dim=24))
    ARCH_CONFIG_REGISTRY[f"{name}_tiny"](args)
    assert args.embed_dim == 24
    assert all(args[size] for size in SIZES[name])


@every_captioner
def test_checkpoints_load_and_those_of_other_options_raise(name):
    model, sample = captioner_of(task(), name).eval(), batch()
    other = captioner_of(task(), name).eval()
    state = {key: tensor * 1.5 for key, tensor in model.state_dict().items()}
    before = other(**sample)[0]
    for loaded in (model, other):
        loaded.load_state_dict(copy.deepcopy(state))
    assert torch.equal(other(**sample)[0], model(**sample)[0])
    assert not torch.equal(other(**sample)[0], before)
    with pytest.raises(ValueError, match=r"has 5 channels per region; those of regions\.hdf5 have 7"):
        captioner_of(task(D=7), name).load_state_dict(state)
    with pytest.raises(ValueError, match="has 19 words; the task's dictionary has 23"):
        captioner_of(task(23), name).load_state_dict(state)
    more = {"show_attend_tell": "hidden_dim"}.get(name, "layers")
    with pytest.raises(ValueError, match="the checkpoint was made with other options than this model"):
        captioner_of(task(), name, **{more: 3}).load_state_dict(state)


@every_captioner
def test_options_that_contradict_the_data_raise(name):
    without_regions, without_attributes = task(), task()
    without_regions.regions, without_attributes.has_attributes = None, False
    eta = name == "eta_transformer"
    needs = "--fusion entangled" if eta else name
    with pytest.raises(ValueError, match=f"{needs} needs region features: give --regions"):
        captioner_of(without_regions, name)
    visual = {"fusion": "visual"} if eta else {}
    assert captioner_of(without_attributes, name, **visual).regions_path == "regions.hdf5"
    if name != "show_attend_tell":
        with pytest.raises(ValueError, match=r"must be (at least 1|a positive int), got 0"):
            captioner_of(task(), name, layers=0)
    if eta:
        for fusion in ("semantic", "parallel"):
            with pytest.raises(ValueError, match=f"--fusion {fusion} needs attributes: give --attributes, or"):
                captioner_of(without_attributes, name, fusion=fusion)
        assert captioner_of(without_regions, name, fusion="semantic").regions_path is None
        with pytest.raises(ValueError, match="num_heads must divide embed_dim = 16, got 3"):
            captioner_of(task(), name, heads=3)
    with pytest.raises(ValueError, match="--max-target-positions must be at least 2, got 1"):
        captioner_of(task(), name, max_target_positions=1)
    with pytest.raises(ValueError, match="--embed-dim must be at least 1, got 0"):
        captioner_of(task(), name, embed_dim=0)


@every_captioner
def test_missing_inputs_raise(name):
    model, sample = captioner_of(task(), name), batch()
    del sample["regions"]
    with pytest.raises(ValueError, match="regions must be in net_input of a model that reads them"):
        model(**sample)
    with pytest.raises(ValueError, match=f"{name} is not a language model"):
        model.decoder(sample["prev_output_tokens"])
