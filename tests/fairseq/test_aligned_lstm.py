"""``aligned_lstm``: both recurrences with every score, against the definition and fairseq's own LSTM."""

from __future__ import annotations

import argparse
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.models.lstm import LSTMModel
from fairseq.sequence_generator import SequenceGenerator

from attn_plugins.fairseq.aligned_lstm import AlignedLSTMModel, aligned_lstm_tiny
from tests.fairseq.fairseq_helpers import Task, batch, check_training, padded_right, sentence, step_by_step

SCORES = ["cosine", "additive", "general", "dot", "scaled-dot"]
RECURRENCES = ["luong", "bahdanau"]
SMALL = dict(encoder_embed_dim=12, decoder_embed_dim=12, decoder_out_embed_dim=12, encoder_hidden_size=8)


def test_checkpoints_load_after_a_context_that_allows_their_options(tmp_path):
    """timm loads checkpoints in such a context; on leaving it, torch forgets options that were allowed before."""
    torch.save({"args": argparse.Namespace(arch="aligned_lstm_tiny")}, tmp_path / "checkpoint.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        pass
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["args"].arch == "aligned_lstm_tiny"


def build(alignment: str, **options) -> AlignedLSTMModel:
    torch.manual_seed(0)
    options = {**SMALL, "criterion": "cross_entropy", "dropout": 0.0, **options}
    args = argparse.Namespace(alignment=alignment, **options)
    aligned_lstm_tiny(args)
    return AlignedLSTMModel.build_model(args, Task())


@torch.no_grad()
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_two_threads_keep_their_own_sources(recurrence):
    """Both wait for each other before their first attention, when the keys of both are projected."""
    model = build("additive", recurrence=recurrence).eval().double()
    samples = [batch(model), batch(model)]
    states = torch.randn(3, 16).double(), torch.randn(6, 3, 16).double(), None
    apart = model.decoder.attention(*states)
    expected = [model(**sample)[0] for sample in samples]
    torch.testing.assert_close(model.decoder.attention(*states), apart)  # the call is over, and so are its keys
    together, started = threading.Barrier(2, timeout=600), threading.local()

    def wait(*_):
        if not hasattr(started, "yes"):
            started.yes = True
            together.wait()

    model.decoder.attention.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda sample: model(**sample)[0], samples))
    for output, alone in zip(outputs, expected):
        torch.testing.assert_close(output, alone)


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("alignment", SCORES)
def test_every_score_trains(alignment, recurrence):
    model = build(alignment, recurrence=recurrence, encoder_layers=2, decoder_layers=2)
    check_training(model, batch(model), lr=0.02)


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("alignment", SCORES)
def test_alignment_belongs_to_the_tokens_given(alignment, recurrence):
    """The alignment of a sentence is the same alone, in a batch padded on the left and in one padded on the right."""
    model = build(alignment, recurrence=recurrence).eval()
    sample = batch(model)
    output, matrix = model(**sample)
    assert matrix.shape == (3, 5, 6)
    torch.testing.assert_close(matrix.sum(2), torch.ones(3, 5))
    right_output, right_matrix = model(**padded_right(sample))
    torch.testing.assert_close(right_output, output)
    for b, length in enumerate(sample["src_lengths"].tolist()):
        alone_output, alone_matrix = model(**sentence(sample, b))
        torch.testing.assert_close(alone_output[0], output[b])
        torch.testing.assert_close(alone_matrix[0], matrix[b, :, 6 - length :])
        torch.testing.assert_close(alone_matrix[0], right_matrix[b, :, :length])
        assert not matrix[b, :, : 6 - length].any()


@torch.no_grad()
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("alignment", SCORES)
def test_step_by_step_equals_the_full_pass_after_reorders(alignment, recurrence):
    """The keys of the source are projected once for all steps of a beam search."""
    model = build(alignment, recurrence=recurrence, encoder_layers=2, decoder_layers=2).eval()
    sample = batch(model)
    steps, previous, memory = step_by_step(model, sample, {2: torch.tensor([2, 0, 0])})
    output, matrix = model.decoder(previous, memory)
    for t in range(2, 5):
        torch.testing.assert_close(steps[t][0][:, 0], output[:, t])
        torch.testing.assert_close(steps[t][1][:, 0], matrix[:, t])
    if alignment == "additive":
        calls: list = []
        model.decoder.attention.attention.score.source.register_forward_hook(lambda *_: calls.append(1))
        generator = SequenceGenerator([model], model.decoder.dictionary, beam_size=3, max_len_b=6, min_len=4)
        hypotheses = generator.generate([model], {"net_input": sample})
        assert len(calls) == 1
        for b, beams in enumerate(hypotheses):
            alone = sentence(sample, b)
            for hypothesis in beams:
                words = [torch.tensor([model.decoder.dictionary.eos()]), hypothesis["tokens"][:-1]]
                matrix = model(**{**alone, "prev_output_tokens": torch.cat(words)[None]})[1][0]
                torch.testing.assert_close(hypothesis["attention"].t()[:, -matrix.shape[1] :], matrix)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("alignment", SCORES)
def test_bahdanau_is_the_lectures_recurrence(alignment, layers):
    """s_t = f(s_{t-1}, y_{t-1}, c_t), with α of s_{t-1}: loops over sentences and steps, by PyTorch's cell."""
    model = build(alignment, recurrence="bahdanau", encoder_layers=layers, decoder_layers=layers).eval()
    for parameter in model.parameters():
        parameter.mul_(3)
    sample, decoder = batch(model), model.decoder
    outputs, matrix = model(**sample)
    source, hiddens, cells, _ = model.encoder(sample["src_tokens"], sample["src_lengths"])
    for b, length in enumerate(sample["src_lengths"].tolist()):
        states = source[6 - length :, b]
        s, memory = list(hiddens[:, b]), list(cells[:, b])
        for t, token in enumerate(sample["prev_output_tokens"][b]):
            y = decoder.embed_tokens.weight[token]
            [context], weights = (x[0] for x in decoder.attention.attention(s[-1][None, None], states[None]))
            x = torch.cat([y, context])
            for layer, cell in enumerate(decoder.layers):
                s[layer], memory[layer] = cell(x, (s[layer], memory[layer]))
                x = s[layer]
            word = torch.tanh(decoder.output.weight @ torch.cat([context, s[-1], y]))
            expected = decoder.fc_out(decoder.additional_fc(word))
            torch.testing.assert_close(outputs[b, t], expected)
            torch.testing.assert_close(matrix[b, t, 6 - length :], weights[0])


def test_both_recurrences_drop_the_same_values():
    """Words, the states of every layer and the features go through dropout, as in fairseq's own LSTM."""
    dropped: dict[str, Counter[str]] = {}
    for recurrence in RECURRENCES:
        model = build("general", recurrence=recurrence, encoder_layers=2, decoder_layers=2)
        counts = dropped[recurrence] = Counter()
        for name in ("dropout_in_module", "dropout_out_module"):
            module = getattr(model.decoder, name)
            module.register_forward_hook(lambda _, args, x, name=name, counts=counts: counts.update({name: x.numel()}))
        model(**batch(model))
    assert dropped["bahdanau"] == dropped["luong"]


def test_general_is_fairseqs_own_lstm():
    """With the same weights, the output equals that of fairseq's ``lstm``, whose score is sᵀ W h."""
    model = build("general").eval()
    args = argparse.Namespace(criterion="cross_entropy", dropout=0.0, encoder_bidirectional=True, **SMALL)
    args.decoder_hidden_size = 16
    stock = LSTMModel.build_model(args, Task()).eval()
    weights = model.state_dict()
    weights["decoder.attention.input_proj.weight"] = weights.pop("decoder.attention.attention.score.weight").t()
    weights["decoder.attention.output_proj.weight"] = weights.pop("decoder.attention.output.weight")
    stock.load_state_dict(weights)
    sample = batch(model)
    torch.testing.assert_close(stock(**sample)[0], model(**sample)[0])


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_adaptive_softmax_and_shared_embeddings(recurrence):
    options = dict(criterion="adaptive_loss", adaptive_softmax_cutoff="8,12", share_all_embeddings=True)
    model = build("scaled-dot", recurrence=recurrence, **options)
    assert model.decoder.adaptive_softmax is not None
    assert model.decoder.embed_tokens is model.encoder.embed_tokens
    features, _ = model(**batch(model))
    assert features.shape == (3, 5, 16)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(alignment="bahdanau"), "--alignment must be one of cosine, .* got 'bahdanau'"),
        (dict(alignment="dot", decoder_hidden_size=12), "--decoder-hidden-size must be twice .* = 16, got 12"),
        (dict(alignment="general", decoder_attention="0"), "--decoder-attention must be on"),
        (dict(alignment="general", encoder_bidirectional=False), "encoder_bidirectional must be True"),
        (dict(alignment="dot", alignment_hidden_size=8), "only with --alignment additive, got 8 with dot"),
        (dict(alignment="additive", alignment_hidden_size=0), "--alignment-hidden-size must be at least 1"),
        (dict(alignment="dot", recurrence="gru"), "--recurrence must be one of luong, bahdanau, got 'gru'"),
        (dict(alignment="dot", encoder_layers=2), "--encoder-layers must match --decoder-layers"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_general_and_additive_take_any_widths(recurrence):
    for alignment in ("general", "additive"):
        model = build(alignment, recurrence=recurrence, decoder_hidden_size=10, decoder_embed_dim=7)
        assert model(**batch(model))[0].shape[:2] == (3, 5)
    with pytest.raises(ValueError, match="not a language model"):
        build("dot", recurrence=recurrence).decoder(torch.tensor([[2]]))
