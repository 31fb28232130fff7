"""``aligned_lstm``: fairseq's console scripts on it, and every score against the definition of its parts."""

from __future__ import annotations

import argparse
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.models.lstm import LSTMModel
from fairseq.sequence_generator import SequenceGenerator

from attn_plugins.fairseq.aligned_lstm import AlignedLSTMModel, aligned_lstm_tiny
from tests.fairseq.fairseq_helpers import Task, batch, generate, step_by_step, train

SCORES = ["cosine", "additive", "general", "dot", "scaled-dot"]
RECURRENCES = ["luong", "bahdanau"]
SMALL = dict(encoder_embed_dim=12, decoder_embed_dim=12, decoder_out_embed_dim=12, encoder_hidden_size=8)


@pytest.mark.slow
def test_console_scripts_print_alignments(data, tmp_path):
    """They equal those of each sentence alone, computed in Python; a hard one has the most probable words."""
    options = ["--alignment=additive", "--alignment-hidden-size=24", "--recurrence=bahdanau"]
    checkpoint = train(data, tmp_path, "--arch=aligned_lstm_tiny", *options)
    hub = AlignedLSTMModel.from_pretrained(str(tmp_path), checkpoint.name, str(data), print_alignment="soft")
    for kind in ("soft", "hard"):
        lines = generate(data, checkpoint, f"--print-alignment={kind}")
        assert len(lines["A"]) == 8
        for number, line in lines["A"].items():
            source = hub.src_dict.encode_line(lines["S"][number], add_if_not_exist=False).long()
            target = hub.tgt_dict.encode_line(lines["H"][number], add_if_not_exist=False).long()
            previous = torch.cat([target[-1:], target[:-1]])
            matrix = hub.models[0](source[None], torch.tensor([len(source)]), previous[None])[1][0]
            if kind == "hard":  # fairseq omits both ends
                assert line.split() == [f"{i}-{t}" for t, i in enumerate(matrix[:-1, :-1].argmax(1).tolist())]
            else:
                printed = torch.tensor([[float(p) for p in row.split(",")] for row in line.split()])
                torch.testing.assert_close(printed, matrix, rtol=0, atol=2e-5)


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
    expected = [model(**sample)[0] for sample in samples]
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
    sample = batch(model)
    target = torch.randint(4, len(model.decoder.dictionary), sample["prev_output_tokens"].shape)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for step in range(10):
        output, alignment_matrix = model(**sample)
        assert alignment_matrix is None  # fairseq returns it only in evaluation mode
        losses.append(torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        if step == 0:
            without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
            assert without == []
        optimizer.step()
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("alignment", SCORES)
def test_alignment_belongs_to_the_tokens_given(alignment, recurrence):
    """The alignment of a sentence is the same alone, in a batch padded on the left and in one padded on the right."""
    model = build(alignment, recurrence=recurrence).eval()
    sample = batch(model)
    output, matrix = model(**sample)
    lengths = sample["src_lengths"].tolist()
    assert matrix.shape == (3, 5, 6)
    torch.testing.assert_close(matrix.sum(2), torch.ones(3, 5))
    right = sample["src_tokens"].clone()
    for b, length in enumerate(lengths):
        right[b] = right[b].roll(length - 6)
    right_output, right_matrix = model(**{**sample, "src_tokens": right})
    torch.testing.assert_close(right_output, output)
    for b, length in enumerate(lengths):
        alone = {name: x[b : b + 1] for name, x in sample.items()}
        alone["src_tokens"] = alone["src_tokens"][:, 6 - length :]
        alone_output, alone_matrix = model(**alone)
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
        for beams, tokens, length in zip(hypotheses, sample["src_tokens"], (6, 4, 2)):
            for hypothesis in beams:
                previous = torch.cat([torch.tensor([model.decoder.dictionary.eos()]), hypothesis["tokens"][:-1]])
                alone = model(tokens[None, 6 - length :], torch.tensor([length]), previous[None])[1][0]
                torch.testing.assert_close(hypothesis["attention"].t()[:, 6 - length :], alone)


def lstm_step(cell, x, hidden, memory):
    """Compute one LSTM step, gate by gate."""
    gates = cell.weight_ih @ x + cell.bias_ih + cell.weight_hh @ hidden + cell.bias_hh
    i, f, g, o = gates.chunk(4)
    memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
    return o.sigmoid() * memory.tanh(), memory


def score_by_formula(attention, s, h):
    """Compute one pair's score by one of the lecture's five formulas."""
    score = attention.score
    if attention.score_name == "additive":
        return score.vector @ torch.tanh(score.query(s) + score.source(h))
    if attention.score_name == "general":
        return s @ score.weight @ h
    divisor = {"dot": 1, "scaled-dot": len(s) ** 0.5}.get(attention.score_name)
    return s @ h / (s.norm() * h.norm() if divisor is None else divisor)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("alignment", SCORES)
def test_bahdanau_is_the_lectures_recurrence(alignment, layers):
    """s_t = f(s_{t-1}, y_{t-1}, c_t), with α from the scores of s_{t-1}: loops over sentences and steps."""
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
            weights = torch.stack([score_by_formula(decoder.attention.attention, s[-1], h) for h in states]).exp()
            weights = weights / weights.sum()
            context = sum(weight * h for weight, h in zip(weights, states))
            x = torch.cat([y, context])
            for layer, cell in enumerate(decoder.layers):
                s[layer], memory[layer] = lstm_step(cell, x, s[layer], memory[layer])
                x = s[layer]
            word = torch.tanh(decoder.output.weight @ torch.cat([context, s[-1], y]))
            expected = decoder.fc_out(decoder.additional_fc(word))
            torch.testing.assert_close(outputs[b, t], expected)
            torch.testing.assert_close(matrix[b, t, 6 - length :], weights)


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
