"""An LSTM that attends to one or more sources and feeds the result into its next step (Luong et al. 2015).

Shapes: B batch, T words, S entries of a source (regions, attributes), C channels, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..captioning.entangled_attention import Modality
from ..common.checks import check_padding_mask, check_sequence, check_source, positive
from .alignment_attention import AlignmentAttention, AlignmentScore


class AttendedLSTMState(NamedTuple):
    """State of step-by-step decoding.

    Attributes:
        hidden: h of every layer, (B, L, C).
        cell: c of every layer, (B, L, C).
        attended: ã_t, (B, C).
        keys: Each source as projected for its attention's score, (B, S, ·).
    """

    hidden: Tensor
    cell: Tensor
    attended: Tensor
    keys: tuple[Tensor, ...]


class AttendedLSTM(nn.Module):
    """Stacked LSTM whose last layer's state attends to every source.

        h_t = LSTM([x_t; ã_{t-1}])     c^m_t = Σ_i α^m_{t,i} s^m_i,  α^m_t = softmax_i score(h_t, s^m_i)
        ã_t = tanh(W [h_t; c^1_t; …])

    h, c and ã are zero before the first word. Each source has its own attention.

    Args:
        embed_dim: C, of words, sources and states.
        sources: Names of the sources, such as ``("visual", "semantic")``.
        num_layers: L.
        score: Score of :class:`AlignmentAttention`.
        dropout: Dropout probability of the words, of ã, and between layers.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        sources: Sequence[str] = ("visual",),
        num_layers: int = 1,
        score: AlignmentScore = "additive",
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(embed_dim=embed_dim, num_layers=num_layers)
        check_source_names(sources)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.embed_dim, self.num_layers = embed_dim, num_layers
        self.cells = nn.ModuleList(
            nn.LSTMCell(2 * embed_dim if i == 0 else embed_dim, embed_dim, **factory) for i in range(num_layers)
        )
        self.attentions = nn.ModuleDict({name: AlignmentAttention(score, embed_dim, **factory) for name in sources})
        self.output = nn.Linear((1 + len(sources)) * embed_dim, embed_dim, **factory)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, words: Tensor, sources: Mapping[str, Modality], state: AttendedLSTMState | None = None
    ) -> tuple[Tensor, dict[str, Tensor], AttendedLSTMState]:
        """Process words, attending to all sources after each.

        Args:
            words: x, (B, T, C), the words so far; with ``state`` the next ones.
            sources: Sources (B, S, C) by name, with padding masks; names that the module does not have are ignored.
            state: State returned by the previous call; ``reordered`` permutes it for beam search.

        Returns:
            ã (B, T, C), α of each source (B, T, S) and the state after the last word.

        Raises:
            ValueError: a source is missing, or a shape or a device does not match.
            TypeError: an argument is not a Tensor, or does not have the module's dtype.
        """
        check_sequence("words", words, self.embed_dim, self.output)
        check_sources(sources, tuple(self.attentions), self.embed_dim, words.shape[0], self.output)
        hidden, cell, attended, keys = self._first_state(words, sources) if state is None else state
        outputs: list[Tensor] = []
        alignments: dict[str, list[Tensor]] = {name: [] for name in self.attentions}
        for word in self.dropout(words).unbind(1):
            hidden, cell = self._layers(torch.cat((word, attended), 1), hidden, cell)
            seen = [hidden[:, -1]]
            for name, key in zip(self.attentions, keys):
                query, (features, mask) = seen[0].unsqueeze(1), sources[name]
                context, alignment = self._attention(name)(query.to(features.dtype), features, mask, key)
                seen.append(context.squeeze(1))
                alignments[name].append(alignment)
            attended = torch.tanh(self.output(torch.cat(seen, 1)))
            outputs.append(attended)
        weights = {name: torch.cat(steps, 1) for name, steps in alignments.items()}
        return self.dropout(torch.stack(outputs, 1)), weights, AttendedLSTMState(hidden, cell, attended, keys)

    def _attention(self, name: str) -> AlignmentAttention:
        attention = self.attentions[name]
        assert isinstance(attention, AlignmentAttention)
        return attention

    def _first_state(self, words: Tensor, sources: Mapping[str, Modality]) -> AttendedLSTMState:
        zeros = words.new_zeros(words.shape[0], self.num_layers, self.embed_dim)
        keys = tuple(self._attention(name).project_keys(sources[name].features) for name in self.attentions)
        return AttendedLSTMState(zeros, zeros, zeros[:, 0], keys)

    def _layers(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step of all layers."""
        states = []
        for i, layer in enumerate(self.cells):
            states.append(layer(x if i == 0 else self.dropout(x), (hidden[:, i], cell[:, i])))
            x = states[-1][0]
        return torch.stack([h for h, _ in states], 1), torch.stack([c for _, c in states], 1)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_layers={self.num_layers}"


def check_source_names(names: Sequence[str]) -> None:
    """Raise a ValueError unless there is at least one name and all are distinct."""
    if isinstance(names, str) or not names or len(set(names)) != len(names):
        raise ValueError(f"sources must be one name or more, each once, such as ('visual', 'semantic'), got {names!r}")


def check_sources(
    sources: Mapping[str, Modality], names: Sequence[str], channels: int, batch: int, child: nn.Module | Tensor
) -> None:
    """Check that all sources ``names`` are present, each (batch, S, channels) with its padding mask."""
    for name in names:
        if name not in sources:
            raise ValueError(f"sources must have {', '.join(names)}, got {', '.join(sources) or 'none'}")
        features, mask = sources[name]
        check_source(f"sources[{name!r}]", features, channels, batch, child)
        check_padding_mask(mask, batch, features.shape[1], features.device)
