"""The four terms of Transformer attention and their selection by ``attention_type`` (Zhu et al. 2019, Eq. 2)."""

from __future__ import annotations

from typing import NamedTuple


class AttentionTerms(NamedTuple):
    """The four bits of an ``attention_type``.

    Attributes:
        content: ε1 = q·k, query content and key content.
        content_position: ε2 = q·R[k - q], query content and relative position.
        saliency: ε3 = u·k, key content alone.
        position: ε4 = v·R[k - q], relative position alone.
    """

    content: bool
    content_position: bool
    saliency: bool
    position: bool

    @property
    def relative(self) -> bool:
        """Whether a term uses relative positions, so that R is projected (ε2, ε4)."""
        return self.content_position or self.position

    @property
    def queries(self) -> bool:
        """Whether a term uses projected queries (ε1, ε2)."""
        return self.content or self.content_position

    @property
    def keys(self) -> bool:
        """Whether a term uses projected keys (ε1, ε3)."""
        return self.content or self.saliency


def parse_attention_type(attention_type: str) -> AttentionTerms:
    """Parse four bits, ε1 to ε4: ``'0110'`` is ``AttentionTerms(False, True, True, False)``.

    Raises:
        ValueError: ``attention_type`` is anything else.
    """
    if not isinstance(attention_type, str) or len(attention_type) != 4 or set(attention_type) - {"0", "1"}:
        raise ValueError(f"attention_type must be a string of four bits such as '1111', got {attention_type!r}")
    return AttentionTerms(*(bit == "1" for bit in attention_type))
