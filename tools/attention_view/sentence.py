"""fairseq's models that have read a sentence: attention within it, within its translation, and between both.

Shapes: M heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_plugins.modules import AlignmentAttention
from attn_plugins.modules.capture import Captured, attention_layers
from tools.attention_view.parts import title_of
from tools.attention_view.view import ViewError, one_line
from tools.logs import quiet
from tools.requires import need

ENCODER, DECODER, ALIGNMENT = "encoder", "decoder", "alignment"
MOST_PIECES = 256  # of a sentence
Weights = Callable[[], tuple[Tensor, dict[str, Tensor]]]  # of all terms (M, T, S), and of each alone


@dataclass
class WordMaps:
    """What a layer attends to.

    Attributes:
        name: Of the layer in its model.
        kind: ``'encoder'``, ``'decoder'`` (self-attention both) or ``'alignment'`` (from the decoder to the encoder).
        weights: (M, T, S), which the layer uses.
        parts: The same of every term of its logits alone, by their titles; none where there is one term.
    """

    name: str
    kind: str
    weights: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Sentence:
    """What a model read and wrote.

    Attributes:
        words: By kind: what queries are called, and what keys are. A query of the decoder is called by the piece that
            its step writes, a key by the piece that was read.
        maps: In the order of the layers.
        unknown: Pieces that the dictionaries lack.
    """

    words: dict[str, tuple[list[str], list[str]]]
    maps: list[WordMaps]
    unknown: list[str]


@dataclass
class Reader:
    """A loaded checkpoint.

    Attributes:
        name: Its file.
        model: In evaluation.
        task: fairseq's, of translation or language modelling.
        pieces: Splits text into pieces, separated by spaces.
    """

    name: str
    model: Any
    task: Any
    pieces: Callable[[str], str]

    @property
    def is_translator(self) -> bool:
        """Whether there is a source."""
        return hasattr(self.model, "encoder")

    def encoded(self, what: str, text: str, dictionary: Any) -> tuple[Tensor, list[str], list[str]]:
        """Numbers of a text's pieces with the end, (N,), the pieces, and those among them that are unknown.

        Raises:
            ViewError: the text has no piece, or too many.
        """
        pieces = self.pieces(text).split()
        if not pieces:
            raise ViewError(f"{what} must have a word at least, got {text!r}")
        if len(pieces) > MOST_PIECES:
            raise ViewError(f"{what} must have at most {MOST_PIECES} pieces, got {len(pieces)}")
        numbers = [dictionary.index(piece) for piece in pieces]
        unknown = [piece for piece, n in zip(pieces, numbers) if n == dictionary.unk()]
        shown = [f"{piece} {dictionary.unk_word}" if piece in unknown else piece for piece in pieces]
        return torch.tensor([*numbers, dictionary.eos()]), [*shown, dictionary.eos_word], unknown

    @torch.no_grad()
    def translate(self, source: Tensor, beam: int) -> Tensor:
        """The best translation of a source (S,) by beam search, of at most 2 S + 10 pieces, with the end: (T,)."""
        from fairseq.sequence_generator import SequenceGenerator

        generator = SequenceGenerator(
            [self.model], self.task.target_dictionary, beam_size=beam, max_len_a=2, max_len_b=10, max_len=MOST_PIECES
        )
        sample = dict(net_input=dict(src_tokens=source[None], src_lengths=torch.tensor([len(source)])))
        return generator.generate([self.model], sample)[0][0]["tokens"]


def load(checkpoint: Path, data: Path | None, sentencepiece: Path | None) -> Reader:
    """Load a checkpoint of ``fairseq-train``.

    Args:
        checkpoint: The file.
        data: fairseq-preprocess's folder with the dictionaries; None: that of the training.
        sentencepiece: The model that splits text into pieces; None: what spaces separate.

    Raises:
        ViewError: one of them is missing, does not fit, or is of a task without sentences.
    """
    need("fairseq")
    with quiet():
        from fairseq import checkpoint_utils, utils
        from fairseq.tasks.language_modeling import LanguageModelingTask
        from fairseq.tasks.translation import TranslationTask

        import attn_plugins.fairseq  # noqa: F401  registers the models

    if not checkpoint.is_file():
        raise ViewError(f"--fairseq must be a checkpoint file, got {checkpoint}")
    pieces = _pieces(sentencepiece)
    overrides = None if data is None else {"data": str(data)}
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint), overrides)
        task = state["cfg"]["task"]
        folder = Path(utils.split_paths(task["data"])[0])
    except Exception as error:  # torch's, pickle's, omegaconf's
        raise ViewError(f"--fairseq {checkpoint} is no checkpoint of fairseq: {one_line(error)}") from error
    languages = [task[name] for name in ("source_lang", "target_lang") if task.get(name)]
    missing = [name for name in (f"dict.{n}.txt" for n in languages) if not (folder / name).is_file()]
    if not languages and not any(folder.glob("dict.*txt")):  # of a language model: dict.txt
        missing = ["dict.*.txt"]
    if not folder.is_dir() or missing:
        given = f"--data {data}" if data is not None else f"the folder of the training, {folder},"
        raise ViewError(
            f"{given} must be fairseq-preprocess's folder with the dictionaries, and "
            f"{'lacks ' + ', '.join(missing) if folder.is_dir() else 'is none'}; --data DIR names another"
        )
    try:
        models, _, made = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], state=state)
    except Exception as error:
        raise ViewError(f"--fairseq {checkpoint} cannot be loaded with {folder}: {one_line(error)}") from error
    if not isinstance(made, (TranslationTask, LanguageModelingTask)):
        raise ViewError(f"--fairseq must be of a task of translation or language modelling, got {task['_name']!r}")
    return Reader(str(checkpoint), models[0].eval(), made, pieces)


def _pieces(sentencepiece: Path | None) -> Callable[[str], str]:
    if sentencepiece is None:
        return str
    if not sentencepiece.is_file():
        raise ViewError(f"--sentencepiece-model must be a file, got {sentencepiece}")
    need("sentencepiece")
    import sentencepiece as spm

    try:
        processor = spm.SentencePieceProcessor(model_file=str(sentencepiece))
    except (OSError, RuntimeError) as error:
        raise ViewError(f"--sentencepiece-model {sentencepiece} is none: {one_line(error)}") from error
    return lambda text: " ".join(processor.encode(text, out_type=str))


def read(reader: Reader, text: str, target: str | None, beam: int, with_parts: bool) -> Sentence:
    """Let a model read a sentence, and write or be given its translation.

    Args:
        reader: The model.
        text: The sentence.
        target: Its translation; None: the model's own.
        beam: Of the search for it.
        with_parts: Whether to compute the weights of every term alone.

    Raises:
        ViewError: the model has no attention that can be shown, or a text does not fit it.
    """
    task, words = reader.task, {}
    if reader.is_translator:
        source, read_pieces, unknown = reader.encoded("the sentence", text, task.source_dictionary)
        words[ENCODER] = read_pieces, read_pieces
        if target is None:
            written = reader.translate(source, beam)
            pieces = [task.target_dictionary[n] for n in written.tolist()]
        else:
            written, pieces, more = reader.encoded("--target", target, task.target_dictionary)
            unknown += more
        words[ALIGNMENT] = pieces, read_pieces
    elif target is not None:
        raise ViewError("--target is for a translation: this is a language model")
    else:
        source = None
        written, pieces, unknown = reader.encoded("the sentence", text, task.target_dictionary)
    words[DECODER] = pieces, [task.target_dictionary.eos_word, *pieces[:-1]]
    with capture(reader.model) as captured, torch.no_grad():
        previous = written.roll(1)[None]
        if source is None:
            reader.model(previous)
        else:
            reader.model(source[None], torch.tensor([len(source)]), previous)
    maps = []
    for name, weights in captured.items():
        whole, parts = weights()
        maps.append(WordMaps(name, kind_of(name), whole, parts if with_parts else {}))
    if not maps:
        raise ViewError(f"{reader.name} has no attention that can be shown: its layers are of another kind")
    return Sentence(words, maps, list(dict.fromkeys(unknown)))


def kind_of(name: str) -> str:
    """What a layer's queries and keys are, by its name."""
    if name.startswith("encoder."):
        return ENCODER
    return DECODER if ".self_attn" in name else ALIGNMENT


def names_of(model: nn.Module) -> list[str]:
    """The attention layers that :func:`capture` looks at."""
    return list(_layers(model))


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Our layers and fairseq's, by the names that fairseq has for them."""
    from fairseq.models.lstm import AttentionLayer
    from fairseq.modules import MultiheadAttention

    ours = attention_layers(model)
    # A layer of ours is the attribute `attention` of what stands for fairseq's.
    return {
        name.removesuffix(".attention"): module
        for name, module in model.named_modules()
        if name in ours or isinstance(module, (AlignmentAttention, AttentionLayer, MultiheadAttention))
    }


@contextmanager
def capture(model: nn.Module) -> Iterator[dict[str, Weights]]:
    """Remember a pass over one sentence through our layers, and through fairseq's own.

    Yields:
        By the name of every layer, in the order of the calls, what computes its weights.
    """
    from fairseq.modules import MultiheadAttention

    captured: dict[str, Weights] = {}
    steps: dict[str, list[Tensor]] = {}

    def keep(name: str, weigh: Callable[..., Any], layer: Any, arguments: Any, keywords: Any) -> None:
        captured[name] = partial(weigh, Captured(name, layer, arguments, keywords))

    def keep_step(name: str, by_batch: bool, layer: Any, arguments: Any, output: Any) -> None:
        alignment = output[1] if by_batch else output[1].t().unsqueeze(1)  # (1, 1, S)
        steps.setdefault(name, []).append(alignment)
        captured[name] = lambda: (torch.cat(steps[name], 1), {})

    with ExitStack() as stack:
        for name, module in _layers(model).items():
            if callable(getattr(module, "attention_maps", None)) or isinstance(module, MultiheadAttention):
                weigh = _stock_weights if isinstance(module, MultiheadAttention) else _our_weights
                hook: Any = partial(keep, name, weigh)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            else:
                hook = partial(keep_step, name, isinstance(module, AlignmentAttention))
                stack.callback(module.register_forward_hook(hook).remove)
        yield captured


def _our_weights(call: Captured) -> tuple[Tensor, dict[str, Tensor]]:
    parts = {title_of(call.layer, name): part[0].float() for name, part in call.parts().items()}
    return call.maps()[0].float(), parts


@torch.no_grad()
def _stock_weights(call: Captured) -> tuple[Tensor, dict[str, Tensor]]:
    layer, keywords = call.layer, {**call.keywords, "need_weights": True, "need_head_weights": True}
    before, layer.skip_embed_dim_check = layer.skip_embed_dim_check, True  # else torch's function averages the heads
    try:
        _, weights = layer.forward(*call.arguments, **keywords)  # no call: hooks shall not see it
    finally:
        layer.skip_embed_dim_check = before
    return weights[:, 0].float(), {}
