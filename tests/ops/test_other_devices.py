"""A device without kernels of this package and without float64, as Apple's GPUs, in processes of their own."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

from tests.conftest import ROOT

try:
    from torch.utils.backend_registration import _DummyBackendModule  # noqa: F401  a device written in Python
except ImportError:
    pytest.skip(f"torch {torch.__version__} has no devices written in Python", allow_module_level=True)


@pytest.fixture
def there(python):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return partial(python, PYTHONPATH=path)


OPERATORS = "checks.operators(); checks.autocast(); checks.few_calls()"
MODULES = [pytest.param(f"checks.modules({others})", marks=pytest.mark.slow) for others in ("", "others=True")]


@pytest.mark.parametrize("code", [OPERATORS, *MODULES])
def test_runs(code, there):
    there(f"from tests.helpers import other_device_checks as checks; {code}")
