"""The stand-in for mmcv's extension on a device without kernels of this package and without float64."""

from __future__ import annotations

import pytest

from tests.ops.test_other_devices import there  # noqa: F401


def test_suppression(there):  # noqa: F811
    there("from tests.helpers import other_device_checks as checks; checks.suppression()")


@pytest.mark.slow
def test_a_detector(there):  # noqa: F811
    there("from tests.helpers import other_device_checks as checks; checks.detector()")
