"""The decoder of Show, Attend and Tell: an LSTM with soft attention over an image's features (Xu et al. 2015).

Shapes: B images, T words, S locations (of a grid, or regions), channels m of a word, n of the LSTM, D of a location.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..common.checks import check_padding_mask, check_sequence, check_source, positive
from ..sequences.alignment_attention import AlignmentAttention


class ShowAttendTellState(NamedTuple):
    """State of step-by-step decoding.

    Attributes:
        hidden: h_t, (B, n).
        cell: c_t, (B, n).
        keys: The locations as projected for the attention's score, (B, S, A).
    """

    hidden: Tensor
    cell: Tensor
    keys: Tensor


class ShowAttendTell(nn.Module):
    """LSTM decoder that attends to the image before each word (Xu et al. 2015, section 3.1 and Eq. 1 to 3, 7).

        α_t = softmax_i f_att(a_i, h_{t-1})           ẑ_t = β_t Σ_i α_{t,i} a_i,  β_t = σ(f_β(h_{t-1}))
        h_t, c_t = LSTM([E y_{t-1}; ẑ_t], h_{t-1}, c_{t-1})
        features_t = E y_{t-1} + L_h h_t + L_z ẑ_t    log p(y_t) ∝ L_o features_t

    f_att is a network with one hidden layer, the lecture's concatenation-based score; h_0 and c_0 are tanh of a linear
    layer applied to the mean of all a_i. The caller provides L_o.

    Args:
        word_dim: m.
        source_dim: D.
        hidden_dim: n.
        attention_dim: A, width of f_att's hidden layer; None for ``hidden_dim``.
        dropout: Dropout probability of the words and of the features.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        word_dim: int = 512,
        source_dim: int = 2048,
        hidden_dim: int = 512,
        attention_dim: int | None = None,
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(word_dim=word_dim, source_dim=source_dim, hidden_dim=hidden_dim)
        if attention_dim is not None:
            positive(attention_dim=attention_dim)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.word_dim, self.source_dim, self.hidden_dim = word_dim, source_dim, hidden_dim
        self.attention = AlignmentAttention("additive", hidden_dim, source_dim, attention_dim, **factory)
        self.first_hidden = nn.Linear(source_dim, hidden_dim, **factory)
        self.first_cell = nn.Linear(source_dim, hidden_dim, **factory)
        self.gate = nn.Linear(hidden_dim, 1, **factory)
        self.cell = nn.LSTMCell(word_dim + source_dim, hidden_dim, **factory)
        self.hidden_output = nn.Linear(hidden_dim, word_dim, **factory)
        self.context_output = nn.Linear(source_dim, word_dim, bias=False, **factory)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        words: Tensor,
        source: Tensor,
        padding_mask: Tensor | None = None,
        state: ShowAttendTellState | None = None,
    ) -> tuple[Tensor, Tensor, ShowAttendTellState]:
        """Process words, attending to the image before each.

        Args:
            words: E y, (B, T, m), the words so far; with ``state`` the next ones.
            source: a, (B, S, D).
            padding_mask: (B, S) bool, True for locations to leave out.
            state: State returned by the previous call; ``reordered`` permutes it for beam search.

        Returns:
            features (B, T, m), α (B, T, S) and the state after the last word.

        Raises:
            ValueError: A shape or a device does not match.
            TypeError: An argument is not a Tensor, or does not have the module's dtype.
        """
        check_sequence("words", words, self.word_dim, self.first_hidden)
        check_source("source", source, self.source_dim, words.shape[0], self.first_hidden)
        check_padding_mask(padding_mask, source.shape[0], source.shape[1], source.device)
        words = self.dropout(words)
        hidden, cell, keys = self.first_state(source, padding_mask) if state is None else state
        features, alignments = [], []
        for word in words.unbind(1):
            context, alignment = self.attention(hidden.unsqueeze(1), source, padding_mask, keys)
            context = torch.sigmoid(self.gate(hidden)) * context.squeeze(1)
            hidden, cell = self.cell(torch.cat((word, context), 1), (hidden, cell))
            features.append(word + self.hidden_output(hidden) + self.context_output(context))
            alignments.append(alignment)
        return (
            self.dropout(torch.stack(features, 1)),
            torch.cat(alignments, 1),
            ShowAttendTellState(hidden, cell, keys),
        )

    def first_state(self, source: Tensor, padding_mask: Tensor | None = None) -> ShowAttendTellState:
        """Compute h_0 and c_0 from the mean of all locations, and the attention's keys."""
        if padding_mask is None:
            mean = source.mean(1)
        else:
            kept = padding_mask.logical_not().unsqueeze(2)
            mean = source.masked_fill(~kept, 0).sum(1) / kept.sum(1).clamp(min=1)
        return ShowAttendTellState(
            torch.tanh(self.first_hidden(mean)), torch.tanh(self.first_cell(mean)), self.attention.project_keys(source)
        )

    def extra_repr(self) -> str:
        return f"{self.word_dim}, source_dim={self.source_dim}, hidden_dim={self.hidden_dim}"
