"""Our convolutions with what mmengine asks of a layer: the toolkits' argument names and ``init_weights``."""

from __future__ import annotations

from typing import Any

from .. import modules


def _offset_groups(options: dict[str, Any]) -> dict[str, Any]:
    """Let ``deform_groups``, the toolkits' name, say ``offset_groups``."""
    if "deform_groups" not in options:
        return options
    if "offset_groups" in options:
        raise ValueError(
            f"deform_groups is another name of offset_groups: give one of them, got deform_groups="
            f"{options['deform_groups']} and offset_groups={options['offset_groups']}"
        )
    options = dict(options)
    options["offset_groups"] = options.pop("deform_groups")
    return options


class DeformableConv2d(modules.DeformableConv2d):
    """:class:`attn_plugins.modules.DeformableConv2d`; ``deform_groups`` may say ``offset_groups``."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **_offset_groups(options))

    def init_weights(self) -> None:
        """Zero the predictor again: ``init_cfg`` rules for Conv2d reach it from the outside."""
        self.zero_offset()


class DeformableConv1d(modules.DeformableConv1d):
    """:class:`attn_plugins.modules.DeformableConv1d`; ``deform_groups`` may say ``offset_groups``."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **_offset_groups(options))

    def init_weights(self) -> None:
        """Zero the predictor again: ``init_cfg`` rules for Conv1d reach it from the outside."""
        self.zero_offset()
