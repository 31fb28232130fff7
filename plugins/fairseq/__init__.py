"""Adapter for fairseq, loaded through its ``--user-dir``: ``fairseq-train ... --user-dir plugins/fairseq``.

``python -m attn_plugins fairseq-dir`` prints the path of this folder in an installed package. Importing it registers
the task ``captioning``, the criterion ``self_critical`` and the models ``aligned_lstm``, ``conv_captioner``,
``eta_transformer``, ``lstm_captioner``, ``show_attend_tell``, ``spatial_transformer`` and ``spatial_transformer_lm``.

``torch.load`` (>= 2.6) accepts only tensors and plain containers by default. This package declares the other types in
fairseq's checkpoints safe (``argparse.Namespace``, and the types that distributed processes exchange when they resume),
so that ``fairseq-generate`` and ``fairseq-train`` work with safe loading. ``numpy2`` repairs data sets that fail under
numpy 2, ``console_log`` the log of the console scripts beside iopath.

If the hook of ``attn_plugins.autoload`` is off, fairseq rejects the folder's name and asks for a unique one. In that
case pass a symbolic link to the folder under another name as ``--user-dir``.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from omegaconf import AnyNode, DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata

from attn_plugins.fairseq import console_log, numpy2

# Importing registers the models, the task and the criterion.
if __name__ == "attn_plugins.fairseq":
    from . import (  # noqa: F401
        aligned_lstm,
        captioning,
        conv_captioner,
        eta_transformer,
        lstm_captioner,
        self_critical,
        show_attend_tell,
        spatial_transformer,
        spatial_transformer_lm,
    )
else:  # imported under another name through a symbolic link
    import attn_plugins.fairseq  # noqa: F401

numpy2.repair()
console_log.repair()
if hasattr(torch.serialization, "add_safe_globals"):  # torch >= 2.4; older versions load all types
    # When several processes resume, the first one sends the options and the tensors' placeholders to the others.
    options = [DictConfig, ListConfig, AnyNode, ContainerMetadata, Metadata, defaultdict, dict, list, int, Any]
    torch.serialization.add_safe_globals([argparse.Namespace, distributed_utils._TensorPlaceholder, *options])
    if torch.__version__ >= "2.6":  # an entry by name survives the end of another library's `safe_globals` (timm)
        torch.serialization.add_safe_globals([(argparse.Namespace, "argparse.Namespace")])
