"""The contract of ``test_contract.py`` for each backend of an operator's table, whichever would serve by itself.

Triton's kernels are interpreted where there is no device, so that their examples are tiny.
"""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops.common import library
from attn_plugins.ops.common.operator import OPERATORS as operators
from tests.helpers.triton_checks import TOLERANCES, needs_triton
from tests.ops import test_contract as contract
from tests.ops.contract_examples import EXAMPLES, Example
from tests.ops.test_contract import BOUNDS, LAYOUTS, every_device, example

pytestmark = pytest.mark.usefixtures("full_float32")
TRITON = [
    name for name in EXAMPLES
    if name.startswith(("global_attention", "sequence_attention")) or name == "criss_cross_attention, content"
]  # fmt: skip
ONE_EACH = ["global_attention", "sequence_attention", "criss_cross_attention, content"]


def _plain_backends(name: str) -> list[str]:
    """Return the CPU's kernels, where they are compiled, and the last of the table, which refuses nothing."""
    names = [row.name for row in operators[name.split(",")[0].replace("1d", "2d")].table]
    return [*(["cpu"] if "cpu" in names and library.has_kernel("cpu") else []), names[-1]]


by_backend = pytest.mark.parametrize("name, backend", [(n, b) for n in EXAMPLES for b in _plain_backends(n)])


def in_triton(name: str, device: str, dtype: torch.dtype = torch.float32) -> tuple[Example, float]:
    """Return an example and the error of Triton's kernels; those of criss-cross attention take halves alone."""
    if name.startswith("criss_cross") and dtype == torch.float32:
        dtype = torch.float16
    size, batch = ("tiny", None if name.startswith("criss_cross") else 2) if device == "cpu" else ("small", 2)
    return example(name, size, device, dtype, batch), TOLERANCES[dtype]


@pytest.mark.sampled(144)
@by_backend
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_results_of_each_backend(name, backend, dtype):
    contract.check_results(example(name, dtype=dtype), backend, BOUNDS[dtype])


@by_backend
def test_empty_batches_of_each_backend(name, backend):
    contract.check_batch(example(name, dtype=torch.float16, batch=0), name, 0, backend)


@pytest.mark.sampled(12, every_value=False)
@needs_triton
@every_device
@pytest.mark.parametrize(
    "name, dtype",
    [(n, dtype) for n in TRITON for dtype in TOLERANCES if dtype.itemsize == 2 or not n.startswith("criss_cross")],
    ids=str,
)
def test_results_of_triton(name, dtype, device):
    some, bound = in_triton(name, device, dtype)
    contract.check_results(some, "triton", bound)


@pytest.mark.sampled(12)
@every_device
@needs_triton
@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_in_triton(name, layout, device):
    some, bound = in_triton(name, device)
    contract.check_views(some, layout, "triton", bound)


@every_device
@needs_triton
@pytest.mark.parametrize("name", ["global_attention", "sequence_attention"])
def test_logits_broadcast_in_triton(name, device):
    some, bound = in_triton(name, device)
    contract.check_broadcast(some, name, "triton", bound)


@every_device
@needs_triton
@pytest.mark.parametrize("name", ONE_EACH)
def test_only_wanted_gradients_in_triton(name, device):
    some, bound = in_triton(name, device)
    contract.check_wanted(some, "triton", bound)
