"""``aligned_lstm``: fairseq's LSTM encoder-decoder with one of the lecture's five alignment scores (``--alignment``).

The encoder is bidirectional, h_i = [h→_i; h←_i]. ``--recurrence`` selects the decoder state that is aligned:

============ ================================== ================== ===========================
recurrence   state                              scores             word, from
============ ================================== ================== ===========================
``luong``    s_t = f(s_{t-1}, y_{t-1}, a_{t-1}) of s_t and h_i     a_t = tanh(W [c_t; s_t])
``bahdanau`` s_t = f(s_{t-1}, y_{t-1}, c_t)     of s_{t-1} and h_i tanh(W [c_t; s_t; y_{t-1}])
============ ================================== ================== ===========================

c_t = Σ_i α_{t,i} h_i. ``luong`` (Luong et al. 2015, with input feeding) is the recurrence of fairseq's ``lstm``, which
uses the score ``general``; ``bahdanau`` (Bahdanau et al. 2015, Eq. 4 to 6) is that of the lecture. With several layers,
s is the state of the last layer, and the first layer reads y_{t-1} and c_t. ``fairseq-generate --print-alignment soft``
(or ``hard``) prints α_{t,i} (or its argmax) of each target token.

Shapes: B sentences, T target tokens, S source tokens, C channels; fairseq stores states as (S, B, C).
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
from fairseq import utils
from fairseq.models import register_model, register_model_architecture
from fairseq.models.lstm import Linear, LSTMCell, LSTMDecoder, LSTMEncoder, LSTMModel, base_architecture
from torch import Tensor, nn

from ..modules import AlignmentAttention
from ..modules.sequences.alignment_attention import ALIGNMENT_SCORES, AlignmentScore
from .registries import forget

forget(__name__)

IncrementalState = dict[str, dict[str, Tensor | None]]
Recurrence = Literal["luong", "bahdanau"]
RECURRENCES: tuple[Recurrence, ...] = get_args(Recurrence)
# Projected keys of the call in progress, for attention that fairseq's decoder calls without them.
_KEYS: ContextVar[Tensor | None] = ContextVar("alignment keys", default=None)


@register_model("aligned_lstm")
class AlignedLSTMModel(LSTMModel):
    """LSTM encoder-decoder with selectable alignment score and recurrence; extends the options of ``lstm``."""

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        """Add the options of ``lstm`` and of the alignment."""
        LSTMModel.add_args(parser)
        parser.add_argument(
            "--alignment",
            choices=list(ALIGNMENT_SCORES),
            help="alignment score of decoder and encoder states; cosine, dot and scaled-dot need "
            "--decoder-hidden-size to be twice --encoder-hidden-size (default: additive)",
        )
        parser.add_argument(
            "--alignment-hidden-size",
            type=int,
            metavar="N",
            help="hidden layer of the additive score (default: the decoder's hidden size)",
        )
        parser.add_argument(
            "--recurrence",
            choices=list(RECURRENCES),
            help="state whose alignment gives c_t: luong: s_t, with input feeding; bahdanau: s_{t-1}, and c_t is an "
            "input of s_t (default: luong)",
        )

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> AlignedLSTMModel:
        """Build the model with the checks and embeddings of ``lstm``.

        Raises:
            ValueError: The options are inconsistent.
        """
        aligned_lstm(args)  # a checkpoint or Python caller may lack some options
        _check(args)
        stock = LSTMModel.build_model(args, task)
        encoder = AlignedLSTMEncoder(
            task.source_dictionary,
            embed_dim=args.encoder_embed_dim,
            hidden_size=args.encoder_hidden_size,
            num_layers=args.encoder_layers,
            dropout_in=args.encoder_dropout_in,
            dropout_out=args.encoder_dropout_out,
            bidirectional=args.encoder_bidirectional,
            pretrained_embed=stock.encoder.embed_tokens,
            max_source_positions=stock.encoder.max_source_positions,
        )
        luong = args.recurrence == "luong"
        layer = (AlignmentLayer if luong else AlignmentContext)(
            args.alignment, args.decoder_hidden_size, encoder.output_units, args.alignment_hidden_size
        )
        cutoff = utils.eval_str_list(args.adaptive_softmax_cutoff, type=int)
        decoder = (AlignedLSTMDecoder if luong else BahdanauLSTMDecoder)(
            layer,
            task.target_dictionary,
            embed_dim=args.decoder_embed_dim,
            hidden_size=args.decoder_hidden_size,
            out_embed_dim=args.decoder_out_embed_dim,
            num_layers=args.decoder_layers,
            dropout_in=args.decoder_dropout_in,
            dropout_out=args.decoder_dropout_out,
            encoder_output_units=encoder.output_units,
            pretrained_embed=stock.decoder.embed_tokens,
            share_input_output_embed=args.share_decoder_input_output_embed,
            adaptive_softmax_cutoff=cutoff if args.criterion == "adaptive_loss" else None,
            max_target_positions=stock.decoder.max_target_positions,
        )
        return cls(encoder, decoder)


class AlignedLSTMEncoder(LSTMEncoder):
    """LSTM encoder of fairseq whose outputs are in the order of the source tokens.

    fairseq pads sources on the left, but its LSTM moves them to the right. Without this correction, the alignment
    columns of every sentence shorter than the longest in its batch would be shifted.
    """

    def forward(self, src_tokens: Tensor, src_lengths: Tensor, enforce_sorted: bool = True) -> tuple[Tensor, ...]:
        """Encode (B, S) tokens.

        Returns:
            Outputs (S, B, C), final hidden and cell states (layers, B, C), padding mask (S, B).
        """
        outputs, hiddens, cells, _ = super().forward(src_tokens, src_lengths, enforce_sorted)
        padding = src_tokens.eq(self.padding_idx)
        ahead = padding.cumprod(1).sum(1, keepdim=True)
        position = torch.arange(src_tokens.shape[1], device=src_tokens.device)
        index = (position - ahead).remainder(src_tokens.shape[1])
        outputs = outputs.gather(0, index.t().unsqueeze(2).expand_as(outputs))
        return outputs, hiddens, cells, padding.t()


class AlignmentContext(nn.Module):
    """Adapter of :class:`AlignmentAttention` to fairseq's shapes."""

    def __init__(
        self, score: AlignmentScore, query_channels: int, source_channels: int, hidden_channels: int | None
    ) -> None:
        super().__init__()
        self.attention = AlignmentAttention(score, query_channels, source_channels, hidden_channels)

    def project_keys(self, source: Tensor) -> Tensor:
        """Project the source (S, B, C) to keys (S, B, ·); scores without a projection return ``source`` itself."""
        return self.attention.project_keys(source)

    def forward(self, state: Tensor, source: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend from s (B, C_s) to h (S, B, C_h) with a mask (S, B); returns c_t (B, C_h) and α_t (S, B)."""
        keys = _KEYS.get()
        keys = self.project_keys(source) if keys is None else keys
        mask = None if key_padding_mask is None else key_padding_mask.t()
        context, alignment = self.attention(state.unsqueeze(1), source.transpose(0, 1), mask, keys.transpose(0, 1))
        return context.squeeze(1), alignment.squeeze(1).t()


class AlignmentLayer(AlignmentContext):
    """Output layer tanh(W [c_t; s_t]) with the interface of the attention in fairseq's LSTM decoder."""

    def __init__(
        self, score: AlignmentScore, query_channels: int, source_channels: int, hidden_channels: int | None
    ) -> None:
        super().__init__(score, query_channels, source_channels, hidden_channels)
        self.output = Linear(source_channels + query_channels, query_channels, bias=False)

    def forward(self, state: Tensor, source: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map s_t (B, C_s), h (S, B, C_h) and a mask (S, B) to a_t (B, C_s) and α_t (S, B)."""
        context, alignment = super().forward(state, source, key_padding_mask)
        return torch.tanh(self.output(torch.cat([context, state], 1))), alignment


class AlignedLSTMDecoder(LSTMDecoder):
    """LSTM decoder of fairseq with an :class:`AlignmentLayer`; the source's keys are projected once per sentence."""

    def __init__(self, attention: AlignmentContext, dictionary: Any, **options: Any) -> None:
        super().__init__(dictionary, attention=False, **options)
        self.attention = attention

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: tuple[Tensor, ...] | None = None,
        incremental_state: IncrementalState | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return features (B, T, C) and, in evaluation mode, the alignment (B, T, S)."""
        if encoder_out is None:
            raise ValueError("encoder_out must be the encoder's output: aligned_lstm is not a language model")
        source = encoder_out[0]
        cached = self.get_incremental_state(incremental_state, "alignment_keys")
        keys = self.attention.project_keys(source) if cached is None else cached["keys"]
        token = _KEYS.set(keys)
        try:
            features = self.decode(prev_output_tokens, encoder_out, incremental_state)
        finally:
            _KEYS.reset(token)
        # Set last, because fairseq's decoder treats a non-empty state as a later step.
        if incremental_state is not None and keys is not source:
            self.set_incremental_state(incremental_state, "alignment_keys", {"keys": keys})
        return features

    def decode(
        self, prev_output_tokens: Tensor, encoder_out: tuple[Tensor, ...], incremental_state: IncrementalState | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence; returns the same as ``extract_features``."""
        return super().extract_features(prev_output_tokens, encoder_out, incremental_state)

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Reorder the cached keys to follow the beam; fairseq reorders the encoder's output."""
        super().reorder_incremental_state(incremental_state, new_order)
        cached = self.get_incremental_state(incremental_state, "alignment_keys")
        if cached is not None:
            keys = {"keys": cached["keys"].index_select(1, new_order)}
            self.set_incremental_state(incremental_state, "alignment_keys", keys)


class BahdanauLSTMDecoder(AlignedLSTMDecoder):
    """LSTM decoder with s_t = f(s_{t-1}, y_{t-1}, c_t), where c_t is the context of s_{t-1} (Bahdanau et al. 2015)."""

    def __init__(self, attention: AlignmentContext, dictionary: Any, **options: Any) -> None:
        super().__init__(attention, dictionary, **options)
        embedded, context = self.embed_tokens.embedding_dim, self.encoder_output_units
        self.layers[0] = LSTMCell(embedded + context, self.hidden_size)  # input c_t instead of tanh(W [c_t; s_t])
        self.output = Linear(context + self.hidden_size + embedded, self.hidden_size, bias=False)

    def decode(
        self, prev_output_tokens: Tensor, encoder_out: tuple[Tensor, ...], incremental_state: IncrementalState | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the steps one by one, because c_t needs s_{t-1}."""
        source, _, _, key_padding_mask = encoder_out
        if incremental_state:
            prev_output_tokens = prev_output_tokens[:, -1:]
            hiddens, cells, _ = self.get_cached_state(incremental_state)
        else:
            hiddens, cells = self._first_states(encoder_out)
        features, alignments = [], []
        for word in self.dropout_in_module(self.embed_tokens(prev_output_tokens)).unbind(1):
            context, alignment = self.attention(hiddens[-1], source, key_padding_mask)
            x = torch.cat([word, context], 1)
            for i, cell in enumerate(self.layers):
                hiddens[i], cells[i] = cell(x, (hiddens[i], cells[i]))
                x = self.dropout_out_module(hiddens[i])
            features.append(torch.tanh(self.output(torch.cat([context, hiddens[-1], word], 1))))
            alignments.append(alignment)
        state = {"prev_hiddens": torch.stack(hiddens), "prev_cells": torch.stack(cells), "input_feed": None}
        self.set_incremental_state(incremental_state, "cached_state", state)
        x = self.dropout_out_module(torch.stack(features, 1))
        if hasattr(self, "additional_fc") and self.adaptive_softmax is None:
            x = self.dropout_out_module(self.additional_fc(x))
        wanted = not self.training and self.need_attn
        return x, torch.stack(alignments).permute(2, 0, 1) if wanted else None

    def _first_states(self, encoder_out: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """Return s_0 and its cells from the final encoder states of both directions, as in fairseq's ``lstm``."""
        hiddens, cells = list(encoder_out[1]), list(encoder_out[2])
        if self.encoder_hidden_proj is not None:
            hiddens = [self.encoder_hidden_proj(h) for h in hiddens]
            cells = [self.encoder_cell_proj(c) for c in cells]
        return hiddens, cells


def _check(args: Namespace) -> None:
    if args.recurrence not in RECURRENCES:
        raise ValueError(f"--recurrence must be one of {', '.join(RECURRENCES)}, got {args.recurrence!r}")
    if args.alignment not in ALIGNMENT_SCORES:
        raise ValueError(f"--alignment must be one of {', '.join(ALIGNMENT_SCORES)}, got {args.alignment!r}")
    if not utils.eval_bool(args.decoder_attention):
        raise ValueError("--decoder-attention must be on for aligned_lstm; without attention use --arch lstm")
    if not args.encoder_bidirectional:
        raise ValueError("encoder_bidirectional must be True: the encoder of aligned_lstm is bidirectional")
    width = 2 * args.encoder_hidden_size
    if args.alignment in ("cosine", "dot", "scaled-dot") and args.decoder_hidden_size != width:
        raise ValueError(
            f"--alignment {args.alignment} needs states of equal width: --decoder-hidden-size must be twice "
            f"--encoder-hidden-size (both directions) = {width}, got {args.decoder_hidden_size}; "
            "general and additive accept any"
        )
    hidden = args.alignment_hidden_size
    if hidden is not None and (hidden < 1 or args.alignment != "additive"):
        raise ValueError(
            f"--alignment-hidden-size must be at least 1, and only with --alignment additive, got {hidden} with "
            f"{args.alignment}"
        )


@register_model_architecture("aligned_lstm", "aligned_lstm")
def aligned_lstm(args: Namespace) -> None:
    """Set the base sizes: 256 channels per direction, 512 in the decoder, one layer, 512 in all embeddings."""
    args.alignment = getattr(args, "alignment", "additive")
    args.alignment_hidden_size = getattr(args, "alignment_hidden_size", None)
    args.recurrence = getattr(args, "recurrence", "luong")
    args.criterion = getattr(args, "criterion", None)  # set by the command line; hydra stores it elsewhere
    args.encoder_bidirectional = getattr(args, "encoder_bidirectional", True)
    args.encoder_hidden_size = getattr(args, "encoder_hidden_size", 256)
    args.decoder_hidden_size = getattr(args, "decoder_hidden_size", 2 * args.encoder_hidden_size)
    base_architecture(args)


@register_model_architecture("aligned_lstm", "aligned_lstm_tiny")
def aligned_lstm_tiny(args: Namespace) -> None:
    """Set sizes that train in minutes on a CPU: 32 channels per direction, 64 in the decoder and the embeddings."""
    for name in ("encoder_embed_dim", "decoder_embed_dim", "decoder_out_embed_dim"):
        setattr(args, name, getattr(args, name, 64))
    args.encoder_hidden_size = getattr(args, "encoder_hidden_size", 32)
    aligned_lstm(args)
