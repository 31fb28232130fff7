"""An LSTM that attends to a source and feeds the result into its next step (Luong et al. 2015).

Shapes: B batch, T words, S entries of the source, C channels, L layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..common.checks import check_padding_mask, check_sequence, check_source, positive
from .alignment_attention import AlignmentAttention, AlignmentScore


class AttendedLSTMState(NamedTuple):
    """State of step-by-step decoding.

    Attributes:
        hidden: h of every layer, (B, L, C).
        cell: c of every layer, (B, L, C).
        attended: ã_t, (B, C).
        keys: The source as projected for the attention's score, (B, S, ·).
    """

    hidden: Tensor
    cell: Tensor
    attended: Tensor
    keys: Tensor


class AttendedLSTM(nn.Module):
    """Stacked LSTM whose last layer's state attends to a source.

        h_t = LSTM([x_t; ã_{t-1}])     ã_t = tanh(W [h_t; Σ_i α_{t,i} s_i]),  α_t = softmax_i score(h_t, s_i)

    The states and ã are zero before the first word.

    Args:
        embed_dim: C, of words, source and states.
        num_layers: L.
        score: Score of :class:`AlignmentAttention`.
        dropout: Dropout probability of the words, of ã, and between layers.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        num_layers: int = 1,
        score: AlignmentScore = "additive",
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(embed_dim=embed_dim, num_layers=num_layers)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.embed_dim, self.num_layers = embed_dim, num_layers
        self.cells = nn.ModuleList(
            nn.LSTMCell(2 * embed_dim if i == 0 else embed_dim, embed_dim, **factory) for i in range(num_layers)
        )
        self.attention = AlignmentAttention(score, embed_dim, **factory)
        self.output = nn.Linear(2 * embed_dim, embed_dim, **factory)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, words: Tensor, source: Tensor, padding_mask: Tensor | None = None, state: AttendedLSTMState | None = None
    ) -> tuple[Tensor, Tensor, AttendedLSTMState]:
        """Process words, attending to the source after each.

        Args:
            words: x, (B, T, C), the words so far; with ``state`` the next ones.
            source: s, (B, S, C).
            padding_mask: (B, S) bool, True for entries to leave out.
            state: State returned by the previous call; ``reordered`` permutes it for beam search.

        Returns:
            ã (B, T, C), α (B, T, S) and the state after the last word.

        Raises:
            ValueError: A shape or a device does not match.
            TypeError: An argument is not a Tensor, or does not have the module's dtype.
        """
        check_sequence("words", words, self.embed_dim, self.output)
        check_source("source", source, self.embed_dim, words.shape[0], self.output)
        check_padding_mask(padding_mask, source.shape[0], source.shape[1], source.device)
        hidden, cell, attended, keys = self._first_state(words, source) if state is None else state
        outputs: list[Tensor] = []
        alignments: list[Tensor] = []
        for word in self.dropout(words).unbind(1):
            hidden, cell = self._layers(torch.cat((word, attended), 1), hidden, cell)
            query = hidden[:, -1:].to(source.dtype)
            context, alignment = self.attention(query, source, padding_mask, keys)
            attended = torch.tanh(self.output(torch.cat((hidden[:, -1], context.squeeze(1)), 1)))
            outputs.append(attended)
            alignments.append(alignment)
        state = AttendedLSTMState(hidden, cell, attended, keys)
        return self.dropout(torch.stack(outputs, 1)), torch.cat(alignments, 1), state

    def _first_state(self, words: Tensor, source: Tensor) -> AttendedLSTMState:
        zeros = words.new_zeros(words.shape[0], self.num_layers, self.embed_dim)
        return AttendedLSTMState(zeros, zeros, zeros[:, 0], self.attention.project_keys(source))

    def _layers(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step of all layers."""
        states = []
        for i, layer in enumerate(self.cells):
            states.append(layer(x if i == 0 else self.dropout(x), (hidden[:, i], cell[:, i])))
            x = states[-1][0]
        return torch.stack([h for h, _ in states], 1), torch.stack([c for _, c in states], 1)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_layers={self.num_layers}"
