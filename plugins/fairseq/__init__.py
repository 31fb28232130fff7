"""The folder for fairseq's ``--user-dir``: ``fairseq-train ... --user-dir plugins/fairseq``.

``python -m attn_plugins fairseq-dir`` prints where it lies in an installed package. What it does: the task
``captioning``, the criterion ``self_critical`` and the models ``aligned_lstm``, ``eta_transformer``,
``spatial_transformer`` and ``spatial_transformer_lm`` are registered, and since fairseq's checkpoints may hold an
``argparse.Namespace``, which ``torch.load`` (>= 2.6) refuses by default, it is declared safe, so that
``fairseq-generate`` loads them without giving up safe loading.
"""

from __future__ import annotations

import argparse

import torch

# Importing registers the models, the task and the criterion.
from . import (  # noqa: F401
    aligned_lstm,
    captioning,
    eta_transformer,
    self_critical,
    spatial_transformer,
    spatial_transformer_lm,
)

if hasattr(torch.serialization, "add_safe_globals"):  # torch >= 2.4; older ones load everything
    torch.serialization.add_safe_globals([argparse.Namespace])
