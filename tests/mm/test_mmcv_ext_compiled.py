"""mmcv's functions of autograd under torch.compile, which traces them where the extension is Python."""

from __future__ import annotations

import pytest
import torch

from tests.mm.mmcv_ext_helpers import stand_in  # noqa: F401 - a fixture
from tests.mm.test_mmcv_ext import CASES, results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", CASES)
def test_compiled_functions_have_eager_gradients(name: str) -> None:
    torch._dynamo.reset()
    leaves, call, _ = CASES[name]()
    compiled = results(leaves, torch.compile(call, backend="eager"))
    torch.testing.assert_close(compiled, results(leaves, call))
