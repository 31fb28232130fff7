"""Fixtures shared by the tests of attention over all keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ops.everywhere.sequence_operands import taking


@pytest.fixture(params=["compiled", "plain"])
def path(request) -> Iterator[str]:
    """Run the test with the compiled kernels, and with their substitute on machines without them."""
    with taking(request.param):
        yield request.param
