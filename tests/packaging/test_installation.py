"""The install lines and first blocks of README and the site, as printed, in empty environments: ``make test-install``.

One environment for each Python on this machine with the torch that pip installs today, and one with the oldest Python
and torch. They are kept under ``build/install``; remove a folder there to start over. ``build/install/table.md``
records the seconds and result of each step. mmdet and mmsegmentation are installed from the onedl forks and from
OpenMMLab's own packages.

INSTALL_ENVIRONMENTS   environments to test, such as ``3.12 3.10:2.1.2`` (Python, or Python:torch); default: all above
INSTALL_FIRST=1        the first ten minutes of a user of the wheel in ``dist/``: new environments under
                       ``build/install_first``, nothing in pip's cache, no interruption, and no compiler until a
                       toolkit is installed. The oldest torch is then the oldest whose ABI suits the binary.
                       ``make test-wheel`` is its first test.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from packaging.version import Version

pytestmark = [pytest.mark.install, pytest.mark.timeout(0)]

ROOT = Path(__file__).parents[2]
FIRST = os.environ.get("INSTALL_FIRST", "0") == "1"
BUILD = ROOT / ("build/install_first" if FIRST else "build/install")
INSTALL, PYTORCH, TIMM, TRANSFORMERS, MMDET, MMSEG, FAIRSEQ = (
    (ROOT / f"docs/start/{name}.md").read_text()
    for name in ("install", "pytorch", "timm", "transformers", "mmdet", "mmsegmentation", "fairseq")
)
OLDEST_TORCH = "2.10.0" if FIRST else "2.1.2"
# The oldest torch that loads the stand-in for mmcv's operators, and that transformers and fairseq-fixed need; ours and
# timm need 2.1.
OLDEST_FOR = {"mm": "2.5", "transformers": "2.6", "fairseq": "2.1"}


@functools.cache
def interpreters() -> dict[str, str]:
    """Return the working interpreters by version, such as ``'3.12'``. A version manager's shim may not work."""
    paths = {}
    for minor in range(10, 15):
        for candidate in (f"python3.{minor}", *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3"))):
            if path := shutil.which(candidate):
                works = subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0
                if works:
                    paths[f"3.{minor}"] = path
                    break
    return paths


def environments() -> list[str]:
    if given := os.environ.get("INSTALL_ENVIRONMENTS"):
        return given.split()
    there = list(interpreters())
    return [*there, *(f"{there[0]}:{OLDEST_TORCH}" for _ in there[:1] if there[0] == "3.10")]


def block(page: str, language: str, containing: str = "") -> str:
    """Return the first block of a language on a page that contains ``containing``."""
    return next(text for text in re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S) if containing in text)


def all_code(page: str) -> str:
    """Return the Python code of a page in order."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))


def install_line(containing: str) -> str:
    (line,) = (line for line in block(INSTALL, "bash").splitlines() if containing in line)
    return line


class Environment:
    """A virtual environment, a clone to install from, and an empty working folder."""

    def __init__(self, name: str):
        self.python_version, _, self.torch = name.partition(":")
        self.name = name
        self.folder = BUILD / name.replace(":", "-torch")
        self.clone, self.work = self.folder / "attn_plugins", self.folder / "work"
        self.table = BUILD / "table.md"
        if FIRST:
            shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        if not (self.folder / "venv").is_dir():
            subprocess.run([interpreters()[self.python_version], "-m", "venv", self.folder / "venv"], check=True)
            if self.torch:
                self.bash(f"pip install -q 'torch=={self.torch}' 'numpy<2'", record="oldest torch")
        shutil.rmtree(self.clone, ignore_errors=True)
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, tracked.split("\0")):
            if (ROOT / name).is_file():
                (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.clone / name)

    def bash(self, command: str, where: Path | None = None, record: str | None = None, status: int = 0) -> str:
        """Run a command as a user with the activated environment would, appending its output to ``log.txt``."""
        keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        if FIRST:
            keep["PIP_CACHE_DIR"] = str(self.folder / "cache")
        path = f"{self.folder / 'venv/bin'}{os.pathsep}{os.environ['PATH']}"
        began = time.monotonic()
        done = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", command],
            cwd=where or self.work,
            env={**keep, "PATH": path, "VIRTUAL_ENV": str(self.folder / "venv")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.monotonic() - began
        with (self.folder / "log.txt").open("a") as log:
            print(f"$ {command}\n{done.stdout}\n", file=log)
        result = "works" if done.returncode == status else f"status {done.returncode}"
        if record:
            with self.table.open("a") as table:
                print(f"| {self.versions()} | {record} | {seconds:.0f} | {result} |", file=table)
        assert done.returncode == status, f"{command}\n{done.stdout[-4000:]}"
        return done.stdout

    def remove_mm(self) -> None:
        """Remove what an installation of mm has added."""
        added = self.folder / "added.txt"
        if added.is_file():
            self.bash(f"pip uninstall -y {added.read_text()}")
            added.unlink()

    def versions(self) -> str:
        code = "import platform, importlib.metadata as m; print(platform.python_version(), m.version('torch'))"
        words = subprocess.run(
            [self.folder / "venv/bin/python", "-c", code], capture_output=True, text=True
        ).stdout.split()
        return " | ".join(words) if words else f"{self.python_version} | none"

    def python(self, code: str, record: str) -> str:
        (self.work / "block.py").write_text(code)
        return self.bash("python block.py", record=record)

    def older_than(self, torch: str) -> bool:
        return bool(self.torch) and Version(self.torch) < Version(torch)

    def need(self, toolkit: str) -> None:
        if self.older_than(OLDEST_FOR[toolkit]):
            pytest.skip(f"{toolkit} needs torch >= {OLDEST_FOR[toolkit]}")


@pytest.fixture(scope="module", params=environments())
def environment(request) -> Environment:
    return Environment(request.param)


def test_package_and_the_pytorch_block(environment, monkeypatch):
    if FIRST:
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        wheels = sorted((ROOT / "dist").glob("*.whl"))
        assert len(wheels) == 1, "make wheel"
        environment.bash("pip install torch numpy", record="torch")
        environment.bash(f"pip install {wheels[0]}", record="the wheel")
        code = "from attn_plugins.core import library as l; assert l.has_kernel('cpu'), l.failures()"
        environment.bash(f'python -c "{code}"')
    else:
        environment.bash(install_line("pip install ."), environment.clone, record="`pip install .`")
    text = environment.bash("python -m attn_plugins", record="doctor")
    assert text.endswith("all is well\n")
    environment.python(all_code(PYTORCH), record="PyTorch page")


def test_timm(environment):
    environment.bash(install_line("install timm"), record="`install timm`")
    # Before torch 2.5, users have to import our package to register the models, as the page says.
    asked = "import attn_plugins.timm\n" if environment.older_than("2.5") else ""
    environment.python(asked + all_code(TIMM), record="timm page")


# They call nms, roi_align and deformable attention of mmcv.
MODELS = {
    "Faster R-CNN": '_base_ = "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py"\n',
    "Mask2Former": '_base_ = "mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py"\n',
}
# Runs a config as mmdet's and mmseg's training tools do, on made-up pictures and without pretrained weights.
MM = """
import sys
sys.path.insert(0, {clone!r})  # before the package "tests" of mmsegmentation 1.2.2
from mmengine.config import Config
from tests.mm.mm_helpers import demo_batch, dictionaries, training_step, without_downloads

config = without_downloads(Config.fromfile("my_config.py"))
toolkit = config.default_scope
size = (128, 160) if toolkit == "mmdet" else (97, 129)
if toolkit == "mmdet":
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules
else:
    from mmseg.registry import MODELS
    from mmseg.utils import register_all_modules
    config.model.test_cfg, config.model.data_preprocessor.size = dict(mode="whole"), size
    for node in dictionaries(config.model):
        node.pop("pretrained", None)
        if node.get("type") == "SyncBN":  # needs several processes with GPUs
            node["type"] = "BN"
register_all_modules()
config.model.data_preprocessor.pop("batch_augments", None)  # which enlarge the pictures
model = MODELS.build(config.model)
batch = demo_batch(toolkit, size, 2, 19)
training_step(model, config.optim_wrapper, batch)
assert len(model.eval().test_step(batch)) == 2
"""


def train_and_predict(environment: Environment, models: dict[str, str], suffix: str = "") -> None:
    for name, config in models.items():
        (environment.work / "my_config.py").write_text(config)
        environment.python(MM.format(clone=str(environment.clone)), record=f"{name}{suffix}")


@pytest.mark.parametrize("toolkit", ["openmmlab", "mm"])
def test_mm(environment, toolkit):
    """Both package lines without a compiled mmcv, one after the other: their modules have the same names."""
    environment.need("mm")
    environment.remove_mm()
    before = environment.bash("pip list --format=freeze").splitlines()
    line = install_line("install mm").partition("#")[0].strip().replace("install mm", f"install {toolkit}")
    text = environment.bash(line, record=f"`install {toolkit}`")
    assert "attn_plugins stands in for its operators" in text
    after = environment.bash("pip list --format=freeze").splitlines()
    added = {line for line in set(after) - set(before) if not line.startswith("setuptools==")}
    (environment.folder / "added.txt").write_text(" ".join(line.partition("==")[0] for line in added))
    changed = {line for line in set(before) - set(after) if not line.startswith("setuptools==")}
    assert not changed, "only setuptools may change, where it lacks pkg_resources"
    assert sum(line.startswith("opencv-") for line in after) == 1
    train_and_predict(environment, MODELS, f" ({toolkit})")
    blocks = {
        "first block (Faster R-CNN)": block(MMDET, "python"),
        "mmseg block (CCNet)": block(MMSEG, "python"),
        "drop-in block": block(MMDET, "python", "drop_in"),
    }
    train_and_predict(environment, blocks, f" ({toolkit})")
    environment.bash(block(MMDET, "bash").splitlines()[0] + "\nls $MMDET/tools/train.py")
    assert "pip install" not in environment.bash(line, record=f"`install {toolkit}` again")


@pytest.mark.skipif(FIRST, reason="not among the first ten minutes")
@pytest.mark.parametrize("extra", ["mm", "timm", "transformers", "fairseq"])
def test_extras_resolve(environment, extra):
    """pip finds versions of all packages of an extra that fit each other and the installed torch."""
    if extra in OLDEST_FOR:
        environment.need(extra)
    torch = environment.versions().split(" | ")[1]
    (environment.work / "kept.txt").write_text(f"torch=={torch}\n")
    text = environment.bash(
        f"ATTN_PLUGINS_BUILD=none pip install --dry-run -c kept.txt '{environment.clone}[{extra}]'",
        record=f"`pip install --dry-run '.[{extra}]'`",
    )
    assert "Would install" in text


@pytest.mark.skipif(FIRST, reason="not among the first ten minutes")
def test_an_mmcv_that_does_not_run(environment):
    """Its extension, compiled for another torch, is removed, and the stand-in serves."""
    environment.need("mm")
    environment.bash(
        "cd $(python -c 'import mmcv; print(*mmcv.__path__)'); touch _ext.so; "
        "echo mmcv/_ext.so,, >> ../onedl_mmcv-*.dist-info/RECORD"
    )
    text = environment.bash(install_line("install mm"), record="`install mm` over an mmcv that does not run")
    assert "attn_plugins stands in for its operators" in text


def test_fairseq(environment):
    """Run the whole block, with 20 updates instead of 1,500."""
    environment.need("fairseq")
    environment.bash(install_line("install fairseq"), record="`install fairseq`")
    text = block(FAIRSEQ, "bash").replace("--max-update 1500", "--max-update 20")
    assert "--max-update 20" in text
    if environment.older_than("2.5"):  # fairseq then loads no hook, so use the link of another name
        link = 'ln -s "$(python -m attn_plugins fairseq-dir)" attention'
        assert link in INSTALL
        text = f"{link}\n{text.replace('--user-dir plugins/fairseq', '--user-dir attention')}"
    environment.bash(text, environment.clone, record="fairseq block, 20 updates")


def test_transformers(environment):
    """The first block of its page counts replaced layers and compares their detections with the stock ones."""
    environment.need("transformers")
    environment.bash(install_line("install transformers"), record="`install transformers`")
    environment.python(block(TRANSFORMERS, "python"), record="transformers page")
    environment.python("import attn_plugins.transformers.drop_in\n", record="transformers drop-in")
