"""The folder for fairseq's ``--user-dir``: ``fairseq-train ... --user-dir plugins/fairseq``.

``python -m attn_plugins fairseq-dir`` prints where it lies in an installed package. What it does: the task
``captioning``, the criteria ``self_critical`` and ``doubly_stochastic_cross_entropy`` and the models ``aligned_lstm``,
``conv_captioner``, ``eta_transformer``, ``lstm_captioner``, ``show_attend_tell``, ``spatial_transformer`` and
``spatial_transformer_lm`` are registered, and since ``torch.load`` (>= 2.6) refuses by
default what is no tensor, ``argparse.Namespace``, which fairseq's checkpoints may hold, is declared safe, and so is
what processes that resume send each other with a checkpoint. So ``fairseq-generate`` and ``fairseq-train`` load them
without giving up safe loading. Data sets that fail under numpy 2 are repaired (``numpy2``).

Where the hook of ``attn_plugins.autoload`` is off, fairseq refuses the folder's name and asks for a unique one: a link
to the folder, called otherwise, serves as ``--user-dir`` too.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from omegaconf import AnyNode, DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata

from attn_plugins.fairseq import numpy2

# Importing registers the models, the task and the criterion.
if __name__ == "attn_plugins.fairseq":
    from . import (  # noqa: F401
        aligned_lstm,
        captioning,
        conv_captioner,
        doubly_stochastic,
        eta_transformer,
        lstm_captioner,
        self_critical,
        show_attend_tell,
        spatial_transformer,
        spatial_transformer_lm,
    )
else:  # by a link, as a package of that name
    import attn_plugins.fairseq  # noqa: F401

numpy2.repair()
if hasattr(torch.serialization, "add_safe_globals"):  # torch >= 2.4; older ones load everything
    # Of a checkpoint that several processes resume, the first one sends the others its options and its tensors' places.
    options = [DictConfig, ListConfig, AnyNode, ContainerMetadata, Metadata, defaultdict, dict, list, int, Any]
    torch.serialization.add_safe_globals([argparse.Namespace, distributed_utils._TensorPlaceholder, *options])
    if torch.__version__ >= "2.6":  # by name too, which stays when a `safe_globals` context of others (timm) ends
        torch.serialization.add_safe_globals([(argparse.Namespace, "argparse.Namespace")])
