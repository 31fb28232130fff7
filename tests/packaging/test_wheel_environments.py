"""The wheel in ``dist/`` in empty environments, without a compiler: ``make wheel && make test-wheel``.

One environment for each Python on this machine with the newest torch that pip installs, and one with the oldest torch
whose ABI suits the binary. They are removed afterwards. ``build/install/wheel.md`` records the seconds of each step.

WHEEL_ENVIRONMENTS   environments to test, such as ``3.12 3.11:2.10.0`` (Python, or Python:torch); default: all above
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.packaging.test_installation import interpreters

pytestmark = [pytest.mark.install, pytest.mark.timeout(0)]

ROOT = Path(__file__).parents[2]
PYTORCH = (ROOT / "docs/start/pytorch.md").read_text()
OLDEST = "2.10.0"


def environments() -> list[str]:
    if given := os.environ.get("WHEEL_ENVIRONMENTS"):
        return given.split()
    there = list(interpreters())
    return [*there, *(f"{there[-1]}:{OLDEST}" for _ in there[:1])]


@pytest.fixture(scope="module", params=environments())
def environment(request, tmp_path_factory) -> Path:
    """Create an environment with the wheel installed."""
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    assert len(wheels) == 1, "make wheel"
    version, _, torch = request.param.partition(":")
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([interpreters()[version], "-m", "venv", folder], check=True)
    pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(folder, *pip, f"torch=={torch}" if torch else "torch", "numpy", record="torch")
    run(folder, *pip, str(wheels[0]), record="the wheel")
    return folder


def record_seconds(environment: Path, name: str, seconds: float) -> None:
    """Add a row to the table."""
    code = "import platform, importlib.metadata as m; print(platform.python_version(), '|', m.version('torch'))"
    versions = subprocess.run([environment / "bin/python", "-c", code], capture_output=True, text=True).stdout.strip()
    table = ROOT / "build/install/wheel.md"
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("a") as out:
        print(f"| {versions} | {name} | {seconds:.0f} |", file=out)


def run(environment: Path, *arguments: str, record: str = "") -> str:
    """Run Python with only the environment on the PATH and return its output."""
    began = time.monotonic()
    keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "CC", "CXX")}
    done = subprocess.run(
        [environment / "bin/python", *arguments],
        cwd=environment, env={**keep, "PATH": str(environment / "bin")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if record:
        record_seconds(environment, record, time.monotonic() - began)
    return done.stdout


def test_the_doctor_is_well_and_the_binary_loads(environment):
    text = run(environment, "-m", "attn_plugins", record="doctor")
    print(text)
    assert text.endswith("all is well\n")
    code = "from attn_plugins.ops.common import library as l; assert l.has_kernel('cpu'), l.failures()"
    run(environment, "-c", code)


def test_the_page_of_pytorch(environment):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PYTORCH, re.M | re.S))
    run(environment, "-c", code, record="PyTorch page")
