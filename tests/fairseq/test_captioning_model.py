"""The computation of ``eta_transformer`` in every variant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("fairseq")

from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from attn_plugins.fairseq.eta_transformer import EtaTransformerConfig, EtaTransformerModel, eta_transformer_tiny
from attn_plugins.modules.captioning.eta_transformer import FUSIONS, Modality
from attn_plugins.modules.common.capture import attention_layers
from tests.fairseq.captioning_helpers import COLOURS, THINGS, model_of, task_of, write_images

SETTINGS = [
    *(dict(fusion=fusion, no_encoder=no_encoder) for fusion in FUSIONS for no_encoder in (False, True)),
    dict(gate_activation="tanh"),
    dict(share_decoder_input_output_embed=True),
]
every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
D = 5


def words(number: int) -> Dictionary:
    """Return a dictionary of ``number`` words, which includes fairseq's four special ones."""
    dictionary = Dictionary()
    for i in range(number - len(dictionary)):
        dictionary.add_symbol(f"word{i}")
    return dictionary


def task(number: int = 19, D: int = D) -> Any:
    """The attributes of a task that the model reads."""
    regions = SimpleNamespace(feature_dim=D, path="regions.npz")
    return SimpleNamespace(regions=regions, has_attributes=True, target_dictionary=words(number))


def build(of: Any = None, **options: Any) -> EtaTransformerModel:
    """Build a model with two small layers and no dropout."""
    return model_of(of or task(), **options)


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


def test_parameters():
    """The base model has as many parameters as a count from the thesis gives, for 9487 words and 2048 channels."""
    with torch.device("meta"):
        model = EtaTransformerModel.build_model(EtaTransformerConfig(), task(9487, 2048))
    assert model.encoder.embed_tokens is model.decoder.embed_tokens
    parts = [model.encoder.embed_tokens, model.decoder.output_projection, model]
    assert [_parameters(part) for part in parts] == [4_857_344, 4_866_831, 97_477_391]


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_options_of_hydra():
    """Missing options take the size of the base model or of the architecture."""
    given = OmegaConf.create({"fusion": "parallel", "layers": 1, "embed_dim": 8, "ffn_dim": None})
    model = EtaTransformerModel.build_model(given, task())
    assert len(model.decoder.blocks) == 1
    assert model.decoder.blocks[0].fusion == "parallel"
    assert model.decoder.blocks[0].feed_forward.input.weight.shape == (2048, 8)
    args = OmegaConf.structured(EtaTransformerConfig(heads=2))
    eta_transformer_tiny(args)
    assert (args.layers, args.embed_dim, args.heads, args.ffn_dim) == (2, 64, 2, 128)


@every_setting
def test_every_setting_trains(setting):
    model = build(**setting)
    sample = batch()
    target = torch.randint(4, 19, (3, 5))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for step in range(8):
        loss = F.cross_entropy(model(**sample)[0].flatten(0, 1), target.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
        optimizer.step()
    assert losses[-1] < losses[0] - 0.3


@every_setting
def test_steps_are_those_of_the_whole(setting):
    """Steps may start with several words; a beam may reorder the rows and drop some of them."""
    model = build(**setting).double().eval()
    sample = batch(torch.float64, T=6)
    previous = sample.pop("prev_output_tokens")
    reorders = {3: torch.tensor([1, 1, 0]), 5: torch.tensor([2, 0])}
    memory, state = model.encoder(**sample), {}
    for t in (2, 3, 4, 5, 6):
        if t in reorders:
            model.decoder.reorder_incremental_state_scripting(state, reorders[t])
            memory = model.encoder.reorder_encoder_out(memory, reorders[t])
            previous = previous[reorders[t]]
        found = model.decoder(previous[:, :t], memory, state)[0]
        whole = model.decoder(previous[:, :t], memory)[0]
        torch.testing.assert_close(found, whole[:, -found.shape[1] :])
        assert found.shape[1] == (2 if t == 2 else 1)


@every_setting
def test_padding_does_not_matter(setting):
    model = build(**setting).double().eval()
    sample = batch(torch.float64)
    together = model(**sample)[0]
    for row, (n, s) in enumerate(((4, 3), (2, 1), (3, 2))):
        alone = model(
            src_tokens=sample["src_tokens"][row : row + 1, :s],
            src_lengths=None,
            regions=sample["regions"][row : row + 1, :n],
            prev_output_tokens=sample["prev_output_tokens"][row : row + 1],
        )[0]
        torch.testing.assert_close(alone[0], together[row])


def test_it_is_the_blocks_put_together():
    """Embeddings are scaled by sqrt(C) and shared; only the decoder has positions."""
    model = build().double().eval()
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


def test_attributes_and_regions_have_no_order():
    model = build().double().eval()
    sample = batch(torch.float64)
    sample["regions_padding_mask"] = None
    turned = {**sample, "src_tokens": sample["src_tokens"].flip(1), "regions": sample["regions"].flip(1)}
    torch.testing.assert_close(model(**turned)[0], model(**sample)[0])
    sample["prev_output_tokens"][0] = torch.tensor([2, 7, 7, 8, 9])
    first = model(**sample)[0]
    sample["prev_output_tokens"][0] = torch.tensor([2, 7, 8, 7, 9])
    assert not torch.allclose(model(**sample)[0][0, 4], first[0, 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half(dtype):
    """Features keep their stored dtype, because fairseq-generate --fp16 converts only the models."""
    model, sample = build().eval(), batch()
    expected = model(**sample)[0]
    model.to(dtype)
    for features in (torch.float32, torch.float16):
        found = model(**{**sample, "regions": sample["regions"].to(features)})[0]
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)


def test_its_attention_can_be_looked_at():
    names = attention_layers(build())
    assert "decoder.blocks.1.entangled.visual_attention.attention" in names
    assert len(names) == 2 * 2 + 2 * (1 + 4)


@pytest.mark.parametrize("number", [1, 2])
def test_beam_search(number):
    """Results with caches equal those without. An ensemble returns the logarithm of the mean probability."""
    of = task()
    models = [build(of).eval() for _ in range(number)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    sample = {"net_input": batch()}
    found = []
    for cached in (True, False):
        generator = SequenceGenerator(models, of.target_dictionary, beam_size=3, max_len_b=7)
        generator.model.has_incremental = cached
        found.append(generator.generate(models, sample))
    inputs = sample["net_input"]
    inputs["prev_output_tokens"] = None
    for image, (with_cache, without) in enumerate(zip(*found)):
        for one, other in zip(with_cache, without):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            torch.testing.assert_close(one["score"], other["score"])
        best = with_cache[0]["tokens"]
        inputs["prev_output_tokens"] = torch.cat([torch.tensor([2]), best[:-1]]).expand(3, -1)
        mean = torch.stack([model(**inputs)[0][image].softmax(1) for model in models]).mean(0).log()
        torch.testing.assert_close(with_cache[0]["positional_scores"], mean.gather(1, best.unsqueeze(1)).squeeze(1))


def test_captions_come_from_regions_and_attributes(tmp_path):
    """The model memorises eight captions. Another image's regions change the colour, and its attributes the thing."""
    of = task_of(write_images(tmp_path))
    of.load_dataset("train")
    dataset = of.dataset("train")
    firsts = [dataset[2 * i] for i in range(8)]  # the first caption of each image: a COLOUR THING
    model = build(of, embed_dim=32).train()
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    sample = dataset.collater(firsts)
    for _ in range(80):
        loss = F.cross_entropy(model(**sample["net_input"])[0].flatten(0, 1), sample["target"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    generator = SequenceGenerator([model.eval()], of.dictionary, beam_size=1, max_len_b=6)

    def captions(samples: list[dict[str, Any]]) -> list[list[str]]:
        found = generator.generate([model], dataset.collater(samples))
        return [of.dictionary.string(best["tokens"]).split() for best, *_ in found]

    def true(regions_of: dict[str, Any], attributes_of: dict[str, Any]) -> list[str]:
        colour, thing = (dataset.image_ids[s["image"]] - 100 for s in (regions_of, attributes_of))
        return ["a", COLOURS[colour % 4], THINGS[thing // 2 % 5]]

    assert captions(firsts) == [true(s, s) for s in firsts]
    turned = firsts[1:] + firsts[:1]
    swapped = [{**s, "regions": t["regions"]} for s, t in zip(firsts, turned)]
    found, expected = captions(swapped), [true(t, s) for s, t in zip(firsts, turned)]
    assert sum(a == b for a, b in zip(found, expected)) >= 6
    assert expected != [true(s, s) for s in firsts]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_models_that_cannot_be():
    without_regions, without_attributes = task(), task()
    without_regions.regions, without_attributes.has_attributes = None, False
    with pytest.raises(ValueError, match="--fusion entangled needs region features: give --regions, or --fusion sem"):
        build(without_regions)
    with pytest.raises(ValueError, match="--fusion semantic needs attributes: give --attributes, or --fusion visual"):
        build(without_attributes, fusion="semantic")
    assert build(without_regions, fusion="semantic").regions_path is None
    assert build(without_attributes, fusion="visual")
    with pytest.raises(ValueError, match="--max-target-positions must be at least 2, got 1"):
        build(max_target_positions=1)
    with pytest.raises(ValueError, match="num_heads must divide embed_dim = 16, got 3"):
        build(heads=3)


def test_checkpoints_of_another_model():
    state = build().state_dict()
    with pytest.raises(ValueError, match=r"has 5 channels per region; those of regions\.npz have 7"):
        build(task(D=7)).load_state_dict(state)
    with pytest.raises(ValueError, match="has 19 words; the task's dictionary has 23"):
        build(task(23)).load_state_dict(state)
    with pytest.raises(ValueError, match="the checkpoint was made with other options than this model"):
        build(fusion="parallel").load_state_dict(state)


def test_regions_that_are_missing():
    sample = batch()
    del sample["regions"]
    with pytest.raises(ValueError, match="regions must be in net_input with --fusion entangled"):
        build()(**sample)
    with pytest.raises(ValueError, match="eta_transformer is not a language model"):
        build().decoder(sample["prev_output_tokens"])
