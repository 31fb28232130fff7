"""Options of ``spatial_transformer`` and ``spatial_transformer_lm``, and their checkpoints."""

from __future__ import annotations

import argparse
import logging
import re
from typing import Any

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.models import ARCH_CONFIG_REGISTRY, build_model
from fairseq.tasks import FairseqTask, LegacyFairseqTask
from omegaconf import OmegaConf

from attn_plugins.fairseq.spatial_transformer import SpatialTransformerModel
from attn_plugins.fairseq.spatial_transformer_lm import SpatialTransformerLanguageModel, spatial_transformer_lm_tiny
from attn_plugins.modules import BilateralSelfAttention, DynamicConv1d
from tests.fairseq.fairseq_helpers import Task, batch, without_gradient
from tests.fairseq.fairseq_helpers import build_transformer as build


def build_language_model(**options: Any) -> SpatialTransformerLanguageModel:
    torch.manual_seed(0)
    args = argparse.Namespace(**{"decoder_embed_dim": 32, "dropout": 0.0, **options})
    spatial_transformer_lm_tiny(args)
    return SpatialTransformerLanguageModel.build_model(args, Task())


@pytest.mark.parametrize(
    "options, encoder, decoder",
    [
        (dict(), False, False),
        (dict(encoder_attention="1010", decoder_attention="0100"), True, False),
        (dict(encoder_attention="0001", decoder_attention="none"), False, True),
        (dict(encoder_attention="0010", decoder_attention="none", deformable=True), False, False),
        (dict(encoder_attention="dynamic", decoder_attention="bilateral"), False, True),
        (dict(encoder_attention="bilateral", decoder_attention="1000", deformable=True), True, False),
        (dict(encoder_attention="shaw", decoder_attention="shaw", decoder_positions="absolute"), False, True),
        (dict(encoder_attention="1000", decoder_attention="1000", decoder_positions="none"), True, False),
        (dict(encoder_attention="1000", decoder_attention="1000", no_token_positional_embeddings=True), False, False),
    ],
)
def test_absolute_positions_are_added_where_attention_has_none(options, encoder, decoder):
    model = build(**options)
    assert (model.encoder.embed_positions is not None, model.decoder.embed_positions is not None) == (encoder, decoder)
    assert model.max_positions() == (1024, 1024)
    assert build(**options, max_source_positions=9, max_target_positions=7).max_positions() == (9, 7)


def test_kernel_sizes():
    def sizes(**options):
        model = build(**options)
        kinds = DynamicConv1d, BilateralSelfAttention
        return [
            [m.kernel_size for m in side.modules() if isinstance(m, kinds)] for side in (model.encoder, model.decoder)
        ]

    for kind, expected in (("dynamic", [[31, 31], [31, 31]]), ("bilateral", [[21, 21], [11, 11]])):
        assert sizes(encoder_attention=kind, decoder_attention=kind) == expected
    both = dict(encoder_attention="dynamic", decoder_attention="bilateral", encoder_layers=4, decoder_layers=3)
    assert sizes(**both, encoder_kernel_sizes="3,7,15,31", decoder_kernel_sizes=6) == [[3, 7, 15, 31], [6, 6, 6]]
    kept = dict(encoder_layers_to_keep="0,2,3", decoder_layers_to_keep="1", decoder_kernel_sizes="2,3,4")
    assert sizes(**both, **kept, encoder_kernel_sizes="3,7,15,31") == [[3, 15, 31], [3]]


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("spatial_transformer", (6, 512, 2048, 8)),
        ("spatial_transformer_wmt_en_de", (6, 512, 2048, 8)),
        ("spatial_transformer_iwslt_de_en", (6, 512, 1024, 4)),
        ("spatial_transformer_tiny", (2, 64, 128, 4)),
    ],
)
def test_architectures(name, sizes):
    """Architectures set the sizes for a command-line namespace and for a hydra configuration without sizes."""
    args = argparse.Namespace(arch=name)
    ARCH_CONFIG_REGISTRY[name](args)
    for cfg in (args, OmegaConf.create({"_name": name, "decoder_attention": "0010"})):
        with torch.device("meta"):
            model = build_model(cfg, Task())
        for side, layers in ((model.cfg.encoder, model.encoder.layers), (model.cfg.decoder, model.decoder.layers)):
            assert (side.layers, side.embed_dim, side.ffn_embed_dim, side.attention_heads) == sizes
            assert (len(layers), layers[0].embed_dim, layers[0].fc1.out_features) == sizes[:3]
    assert build(encoder_embed_dim=96, decoder_embed_dim=None).decoder.embed_tokens.embedding_dim == 96


KINDS = ["1111", "dynamic", "bilateral", "shaw", "none"]
FAIRSEQ = [
    dict(encoder_normalize_before=True, decoder_normalize_before=True, layernorm_embedding=True),
    dict(attention_dropout=0.3, activation_dropout=0.2, dropout=0.1, activation_fn="gelu"),
    dict(encoder_layerdrop=0.4, decoder_layerdrop=0.4),
    dict(quant_noise_pq=0.3, quant_noise_pq_block_size=8),
    dict(checkpoint_activations=True),
    dict(offload_activations=True),
    dict(share_all_embeddings=True, no_scale_embedding=True),
    dict(adaptive_softmax_cutoff=[8, 12]),
    dict(
        encoder_learned_pos=True, decoder_learned_pos=True, encoder_positions="absolute", decoder_positions="absolute"
    ),
    dict(decoder_embed_dim=64, decoder_attention_heads=8, decoder_input_dim=48, decoder_output_dim=24),
    dict(scale_attn=True, scale_heads=True, scale_fc=True, scale_resids=True),
    dict(no_cross_attention=True),
]


@pytest.mark.parametrize(
    "options, attention",
    [(options, KINDS[(n + shift) % 5]) for n, options in enumerate(FAIRSEQ) for shift in (0, 2)],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_options_of_fairseqs_transformer(options, attention):
    common = {"encoder_attention": attention, "decoder_attention": attention, "deformable": True}
    model = build(**common, **options)
    sample = batch(model)
    model(**sample)[0].square().mean().backward()
    if "encoder_layerdrop" not in options and "no_cross_attention" not in options:
        assert [name for name in without_gradient(model) if "adaptive_softmax" not in name] == []
    model.eval()
    other = build(**common, **options).eval()
    other.load_state_dict(model.state_dict())
    expected = model(**sample)[0]
    torch.testing.assert_close(other(**sample)[0], expected)


@pytest.mark.parametrize("normalize_before", [False, True])
def test_without_self_attention_nothing_of_it_is_left(normalize_before):
    side = dict(attention="none", normalize_before=normalize_before)
    model = build(**{f"{s}_{name}": value for s in ("encoder", "decoder") for name, value in side.items()}, dropout=0.0)
    assert [name for name, _ in model.named_parameters() if "self_attn" in name] == []
    layer, x = model.encoder.layers[0], torch.randn(5, 2, 32)
    hidden = layer.fc2(layer.fc1(layer.final_layer_norm(x) if normalize_before else x).relu()) + x
    torch.testing.assert_close(layer(x, None), hidden if normalize_before else layer.final_layer_norm(hidden))
    model(**batch(model))[0].square().sum().backward()
    assert without_gradient(model) == []


def test_layerdrop_prunes_to_the_layers_to_keep():
    options = dict(encoder_attention="dynamic", encoder_layers=3, decoder_layers=3, encoder_kernel_sizes="3,5,7")
    keep = dict(encoder_layers_to_keep="0,2", decoder_layers_to_keep="1")
    whole, pruned = build(**options).eval(), build(**options, **keep).eval()
    cfg = OmegaConf.create({"_name": "spatial_transformer", **options, **keep})
    pruned.load_state_dict(whole.state_dict(), model_cfg=cfg)
    assert (cfg.encoder_layers, cfg.decoder_layers, cfg.encoder_kernel_sizes) == (2, 1, "3,7")
    one_side = build(**options, encoder_layers_to_keep="0,2").eval()
    one_cfg = OmegaConf.create({"_name": "spatial_transformer", **options, "encoder_layers_to_keep": "0,2"})
    one_side.load_state_dict(whole.state_dict(), model_cfg=one_cfg)
    again = build(**cfg).eval()  # of the options that the pruned model is saved with
    again.load_state_dict(pruned.state_dict(), model_cfg=cfg)
    whole.encoder.layers = torch.nn.ModuleList([whole.encoder.layers[0], whole.encoder.layers[2]])
    sample = batch(whole)
    torch.testing.assert_close(one_side(**sample)[0], whole(**sample)[0])
    whole.decoder.layers, whole.decoder.num_layers = whole.decoder.layers[1:2], 1
    torch.testing.assert_close(pruned(**sample)[0], whole(**sample)[0])
    torch.testing.assert_close(again(**sample)[0], whole(**sample)[0])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(encoder_attention="011"), "--encoder-attention must be four bits .* got '011'"),
        (dict(cross_attention="dynamic"), "--cross-attention must be four bits, got 'dynamic': .* distance"),
        (dict(cross_self_attention=True), "--cross-self-attention is not supported"),
        (dict(attention_range=4), "--attention-range must be -1 .* odd number, got 4"),
        (
            dict(attention_range=5, encoder_attention="dynamic", decoder_attention="none"),
            "--attention-range applies to self-attention by four bits, got 5 with dynamic and none",
        ),
        (
            dict(encoder_kernel_sizes="7"),
            "--encoder-kernel-sizes applies to dynamic and bilateral, got '7' with .* 1111",
        ),
        (dict(encoder_attention="dynamic", encoder_kernel_sizes="4"), "one positive odd number, or 2 .*, got '4'"),
        (dict(encoder_attention="dynamic", encoder_kernel_sizes="3,5,7"), "2 separated by commas, one per layer"),
        (dict(decoder_attention="bilateral", decoder_kernel_sizes=0), "must be one positive number, .* got 0"),
        (dict(decoder_attention="bilateral", decoder_kernel_sizes="3;5"), "--decoder-kernel-sizes must be one posi"),
        (
            dict(encoder_attention="bilateral", bilateral_outside="same"),
            "--encoder-attention bilateral: outside must be one of .* got 'same'",
        ),
        (dict(encoder_positions="relative"), "--encoder-positions must be one of auto, absolute, none, got 'relative'"),
        (
            dict(decoder_positions="absolute", no_token_positional_embeddings=True),
            "--no-token-positional-embeddings contradicts --decoder-positions absolute",
        ),
        (dict(encoder_attention="shaw", shaw_distance=0), "--shaw-distance must be at least 1, got 0"),
        (dict(encoder_attention="shaw", shaw_vectors="values"), "--shaw-vectors must be one of keys_and_values, keys"),
        (
            dict(encoder_attention="0111", decoder_attention="none", cross_attention="0110", query_key_bias=True),
            "--query-key-bias needs attention whose first bit is set, got 0111, none, 0110",
        ),
        (dict(offset_lr_scale=0.0), "--offset-lr-scale must be positive, got 0.0"),
        (dict(encoder_xformers_att_config="{}"), "--encoder-xformers-att-config is not supported"),
        (
            dict(encoder_attention="dynamic", encoder_layers_to_keep="0,9"),
            "--encoder-layers-to-keep must be layers from 0 to 1, separated by commas, got '0,9'",
        ),
        (dict(encoder_learned_pos=True), "--encoder-learned-pos needs position embeddings: --encoder-positions absol"),
        (
            dict(encoder_attention="0111", decoder_attention="none", no_cross_attention=True, query_key_bias=True),
            "--query-key-bias needs attention whose first bit is set, got 0111, none",
        ),
        (dict(decoder_attention_heads=5), "--decoder-attention-heads must divide --decoder-embed-dim 32, got 5"),
        (dict(encoder_attention_heads=0), "--encoder-attention-heads must divide --encoder-embed-dim 32, got 0"),
        (
            dict(decoder_attention="dynamic", decoder_attention_heads=5),
            "--decoder-attention-heads must divide --decoder-embed-dim 32, got 5",
        ),
        (
            dict(encoder_attention="dynamic", encoder_embed_dim=300),
            "--encoder-embed-dim must be a positive multiple of 16 with --encoder-attention dynamic, got 300",
        ),
        (
            dict(encoder_embed_dim=33, encoder_attention_heads=3),
            "--encoder-embed-dim must be a positive multiple of 2 with --encoder-attention 1111, got 33",
        ),
        (
            dict(decoder_embed_dim=33, decoder_attention_heads=3, decoder_attention="none"),
            "--cross-attention 1111: embed_dim must be even",
        ),
        (dict(attention_dropout=1.5), "--attention-dropout must be at least 0 and below 1, got 1.5"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(shaw_distance=8, decoder_attention="dynamic"), "--shaw-distance 8 .* 1111 and dynamic without --deform"),
        (dict(bilateral_outside="learned", encoder_attention="shaw"), "--bilateral-outside learned has no effect"),
        (dict(offset_lr_scale=0.5), "--offset-lr-scale 0.5 has no effect"),
        (
            dict(attention_dropout=0.1, encoder_attention="dynamic", decoder_attention="none", no_cross_attention=True),
            "--attention-dropout 0.1 has no effect with self-attention by dynamic and none",
        ),
        (dict(offset_lr_scale=0.5, deformable=True), ""),
        (dict(shaw_distance=8, decoder_attention="shaw", attention_dropout=0.1, encoder_attention="dynamic"), ""),
    ],
)
def test_options_without_an_effect_are_reported(options, expected, caplog):
    with caplog.at_level(logging.WARNING, "attn_plugins"):
        build(**options)
    told = [record.message for record in caplog.records]
    assert len(told) == bool(expected)
    assert not expected or re.search(expected, told[0]), told


def translation(kind: type, **options: Any) -> Any:
    """Return a task whose options are in ``cfg``, or in ``args`` of an old-style task, there perhaps as text."""
    vocabulary = Task().target_dictionary
    words = dict.fromkeys(("source_dictionary", "target_dictionary"), vocabulary)
    return type("Translation", (kind,), words)(argparse.Namespace(**options))


def build_for(task: Any, **options: Any) -> SpatialTransformerModel:
    return SpatialTransformerModel.build_model(argparse.Namespace(**options), task)


@pytest.mark.parametrize(
    ("kind", "value"), [(FairseqTask, True), (LegacyFairseqTask, True), (LegacyFairseqTask, "True")]
)
def test_targets_padded_on_the_left_need_no_absolute_place(kind, value):
    task = translation(kind, left_pad_target=value)
    with pytest.raises(ValueError, match=r"--left-pad-target must be False .* got 1001"):
        build_for(task, cross_attention="1001")
    with torch.device("meta"):
        build_for(task, cross_attention="1001", no_cross_attention=True)
        build_for(task, cross_attention="1010")
        build_for(translation(kind, left_pad_target="False"), cross_attention="1001")


def test_what_attention_cannot_give_is_refused():
    for kind in (FairseqTask, LegacyFairseqTask):
        with pytest.raises(ValueError, match="--load-alignments must be left out"):
            build_for(translation(kind, load_alignments=True))
    model = build(attention_dropout=0.1)
    with pytest.raises(
        ValueError, match=r"--retain-dropout cannot retain the --attention-dropout of \w+.layers.0.self_"
    ):
        model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=None)
    build(attention_dropout=0.1).make_generation_fast_(retain_dropout=True, retain_dropout_modules=["Decoder"])
    build().make_generation_fast_(retain_dropout=True, retain_dropout_modules=None)
    with pytest.raises(ValueError, match="full_context_alignment must be False"):
        model.decoder(torch.tensor([[2, 5]]), model.encoder(torch.tensor([[5, 2]])), full_context_alignment=True)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(encoder_attention="0011"), r"unexpected: encoder\.layers\.0.*q_proj\.weight"),
        (dict(deformable=True), r"missing: decoder\.layers\.0\.self_attn\.deformable\.bias, .* \.\.\."),
        (dict(decoder_ffn_embed_dim=24), r"other shapes: decoder\.layers\.0\.fc1\.bias, "),
    ],
)
def test_a_checkpoint_of_other_options_raises(options, message):
    with pytest.raises(ValueError, match=r"the checkpoint does not fit this model \(.*" + message):
        build(**options).load_state_dict(build().state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_language_model(kind):
    """The model trains, is causal, and predicts the same step by step as in one pass."""
    model = build_language_model(decoder_attention=kind, deformable=True, max_target_positions=30)
    assert (model.max_positions(), len(model.decoder.layers)) == (30, 2)
    tokens = torch.randint(4, len(Task().target_dictionary), (2, 7))
    output, _ = model(tokens)
    torch.nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert without_gradient(model) == []
    model.eval()
    changed = tokens.clone()
    changed[:, 4] = (tokens[:, 4] - 3) % 15 + 4
    state: dict = {}
    with torch.no_grad():
        torch.testing.assert_close(model(changed)[0][:, :4], output[:, :4])
        steps = [model(tokens[:, : t + 1], incremental_state=state)[0] for t in range(7)]
    torch.testing.assert_close(torch.cat(steps, 1), output, rtol=1e-4, atol=1e-5)


def test_language_model_has_the_options_of_fairseqs():
    model = build_language_model(
        decoder_attention="bilateral", decoder_layers=3, decoder_layers_to_keep="0,2", decoder_kernel_sizes="3,4,5",
        decoder_normalize_before=True, adaptive_input=True, adaptive_input_cutoff="8", adaptive_softmax_cutoff="8",
        tie_adaptive_weights=True, adaptive_softmax_factor=4, adaptive_input_factor=4, tokens_per_sample=12,
    )  # fmt: skip
    assert [layer.self_attn.attention.kernel_size for layer in model.decoder.layers] == [3, 5]
    assert model.max_positions() == 12
    assert model(torch.tensor([[2, 5]]))[0].shape == (1, 2, 32)
    kept = dict(decoder_layers=3, decoder_layers_to_keep="1")
    cfg = OmegaConf.create({"_name": "spatial_transformer_lm", **kept})
    build_language_model(**kept).load_state_dict(build_language_model(decoder_layers=3).state_dict(), model_cfg=cfg)
    assert cfg.decoder_layers == 1
    model = build_language_model(decoder_attention="dynamic", decoder_embed_dim=48, decoder_attention_heads=5)
    assert model(torch.tensor([[2, 5]]))[0].shape == (1, 2, len(Task().target_dictionary))
    with pytest.raises(ValueError, match="--decoder-kernel-sizes applies to dynamic and bilateral"):
        build_language_model(decoder_kernel_sizes="3")


def test_shaw_takes_its_distance_and_its_vectors():
    """The decoder is causal, so it has no vectors for later keys."""
    both = dict(encoder_attention="shaw", decoder_attention="shaw", shaw_distance=5)
    model = build(**both)
    for side, offsets in ((model.encoder, 11), (model.decoder, 6)):
        attention = side.layers[0].self_attn.attention
        assert attention.key_table.shape == attention.value_table.shape == (1, offsets, 8)
    model = build(**both, shaw_vectors="keys", shaw_per_head=True)
    attention = model.encoder.layers[0].self_attn.attention
    assert (attention.key_table.shape, attention.value_table) == ((4, 11, 8), None)
