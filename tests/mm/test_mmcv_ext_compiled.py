"""mmcv's functions of autograd under torch.compile, which traces them where the extension is Python."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.slow_cases import slow_but
from tests.mm.mmcv_ext_helpers import stand_in  # noqa: F401 - a fixture
from tests.mm.test_mmcv_ext import CASES, results

# Of functions that are compiled in another case.
VARIANTS = [name for name in CASES if name.startswith("roi_align") and name != "roi_align-avg-0-aligned"]
VARIANTS += ["deform_roi_pool-adaptive", "carafe-groups", "psa_mask-distribute"]
VARIANTS += [name for name in CASES if name.endswith("-weights")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", slow_but([name for name in CASES if name not in VARIANTS], [*CASES]))
def test_compiled_functions_have_eager_gradients(name: str) -> None:
    torch._dynamo.reset()
    leaves, call, _ = CASES[name]()
    compiled = results(leaves, torch.compile(call, backend="eager"))
    torch.testing.assert_close(compiled, results(leaves, call))
