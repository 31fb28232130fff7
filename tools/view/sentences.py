"""Attention of fairseq models on a sentence: within it, within its translation, and between both.

Shapes: M heads, T queries, S keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_plugins.modules import AlignmentAttention
from attn_plugins.modules.common.capture import Captured, attention_layers
from tools import need
from tools.logs import quiet

from .maps import ViewError, title_of
from .models import refusing

ENCODER, DECODER, ALIGNMENT = "encoder", "decoder", "alignment"
MOST_PIECES = 256  # maximum in a sentence
Weights = Callable[[], tuple[Tensor, dict[str, Tensor]]]  # weights of all terms (M, T, S), and of each term alone


@dataclass
class WordMaps:
    """Attention maps of a layer."""

    name: str  # in its model
    kind: str  # encoder, decoder (self-attention both) or alignment (from the decoder to the encoder)
    weights: Tensor  # (M, T, S), as the layer uses them
    parts: dict[str, Tensor] = field(default_factory=dict)  # of every term of the logits alone, by title, if several


@dataclass
class Sentence:
    """A sentence as read and written by a model."""

    # By kind, the labels of queries and keys: for a decoder the pieces that its steps write, and those that it read.
    words: dict[str, tuple[list[str], list[str]]]
    maps: list[WordMaps]  # in the order of the layers
    unknown: list[str]  # pieces missing from the dictionaries


@dataclass
class Reader:
    """A loaded checkpoint."""

    name: str  # of the file
    model: Any  # in evaluation mode
    task: Any  # fairseq's, translation or language modelling
    pieces: Callable[[str], str]  # splits text into pieces, separated by spaces

    @property
    def is_translator(self) -> bool:
        """Whether the model has a source language."""
        return hasattr(self.model, "encoder")

    def encoded(self, what: str, text: str, dictionary: Any) -> tuple[Tensor, list[str], list[str]]:
        """Return the indices (N,) of a text's pieces with the end symbol, the pieces, and the unknown among them."""
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
        """Return the best translation (T,) of a source (S,) by beam search, at most 2 S + 10 pieces with the end."""
        from fairseq.sequence_generator import SequenceGenerator

        generator = SequenceGenerator(
            [self.model], self.task.target_dictionary, beam_size=beam, max_len_a=2, max_len_b=10, max_len=MOST_PIECES
        )
        sample = dict(net_input=dict(src_tokens=source[None], src_lengths=torch.tensor([len(source)])))
        return generator.generate([self.model], sample)[0][0]["tokens"]


def load(checkpoint: Path, data: Path | None, sentencepiece: Path | None) -> Reader:
    """Load a checkpoint of ``fairseq-train``, with the dictionaries of ``data`` or of the folder of its training."""
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
    with refusing(f"--fairseq {checkpoint} is not a fairseq checkpoint"):  # torch, pickle or omegaconf
        state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint), overrides)
        task = state["cfg"]["task"]
        folder = Path(utils.split_paths(task["data"])[0])
    languages = [task[name] for name in ("source_lang", "target_lang") if task.get(name)]
    missing = [name for name in (f"dict.{n}.txt" for n in languages) if not (folder / name).is_file()]
    if not languages and not any(folder.glob("dict.*txt")):  # dict.txt is that of a language model
        missing = ["dict.*.txt"]
    if not folder.is_dir() or missing:
        given = f"--data {data}" if data is not None else f"the folder of the training, {folder},"
        raise ViewError(
            f"{given} must be fairseq-preprocess's folder with the dictionaries, and "
            f"{'lacks ' + ', '.join(missing) if folder.is_dir() else 'is no folder'}; --data DIR names another"
        )
    with refusing(f"--fairseq {checkpoint} cannot be loaded with {folder}"):
        models, _, made = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], state=state)
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

    with refusing(f"--sentencepiece-model {sentencepiece} cannot be loaded", (OSError, RuntimeError)):
        processor = spm.SentencePieceProcessor(model_file=str(sentencepiece))
    return lambda text: " ".join(processor.encode(text, out_type=str))


def read(reader: Reader, text: str, target: str | None, beam: int, with_parts: bool) -> Sentence:
    """Run a model on a sentence and a given translation, or on the model's own."""
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
    """Return the kind of a layer's queries and keys, given its name."""
    if name.startswith("encoder."):
        return ENCODER
    return DECODER if ".self_attn" in name else ALIGNMENT


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return our and fairseq's attention layers by fairseq's names."""
    from fairseq.models.lstm import AttentionLayer
    from fairseq.modules import MultiheadAttention

    ours = attention_layers(model)
    # Our layer is the attribute `attention` of the module that replaces fairseq's.
    return {
        name.removesuffix(".attention"): module
        for name, module in model.named_modules()
        if name in ours or isinstance(module, (AlignmentAttention, AttentionLayer, MultiheadAttention))
    }


@contextmanager
def capture(model: nn.Module) -> Iterator[dict[str, Weights]]:
    """Record a forward pass of one sentence through our layers and fairseq's own.

    Yields:
        For every layer by name, in the order of the calls, a function that computes its weights.
    """
    from fairseq.modules import MultiheadAttention

    captured: dict[str, Weights] = {}
    steps = defaultdict[str, list[Tensor]](list)

    def keep(name: str, weigh: Callable[..., Any], layer: Any, arguments: Any, keywords: Any) -> None:
        captured[name] = partial(weigh, Captured(name, layer, arguments, keywords))

    def keep_step(name: str, by_batch: bool, layer: Any, arguments: Any, output: Any) -> None:
        alignment = output[1] if by_batch else output[1].t().unsqueeze(1)  # (1, 1, S)
        steps[name].append(alignment)
        captured[name] = lambda: (torch.cat(steps[name], 1), {})

    with ExitStack() as stack:
        for name, module in layers_of(model).items():
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
    before = layer.skip_embed_dim_check
    layer.skip_embed_dim_check = True  # otherwise torch's function averages the heads
    try:
        _, weights = layer.forward(*call.arguments, **keywords)  # not a call of the module: hooks must not run
    finally:
        layer.skip_embed_dim_check = before
    return weights[:, 0].float(), {}
