"""The call of the compiled kernels, the same for ``csrc/deformable_attention/cpu.cpp`` and ``cuda.cu``.

They compute in float32, or in float64 for float64 values, and never store the samples. CPUs copy half precision to
float32; on CUDA the kernels read it, locations and weights as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.backends import Gradients
from .operands import Options, Terms


def forward(terms: Terms, options: Options) -> Tensor:
    return torch.ops.attn_plugins.deformable_attention_forward_kernel(*terms, *options)


def backward(
    grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool], deterministic: bool = False
) -> Gradients:
    """Return the gradients; ``deterministic`` chooses the kernel whose sums on CUDA have equal bits in every run."""
    name = f"deformable_attention{'_deterministic' if deterministic else ''}_backward_kernel"
    computed = getattr(torch.ops.attn_plugins, name)(grad_output, *terms, *options, *needs.values())
    return {name: grad for name, grad in zip(needs, computed) if needs[name]}
