"""Parts of each toolkit, in the order of their installation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Package:
    """Distribution, and a module that is present if it or a fork is installed."""

    requirement: str
    module: str


@dataclass(frozen=True)
class Compiled(Package):
    """Package whose extension modules must be compiled against the installed torch.

    Args:
        check: Check of :mod:`~attn_plugins.install.checks` that runs the extension modules.
        environment: Variables for the compilation; variables that are already set take precedence.
        cpu_minutes: Minimum and maximum compilation time with one job.
        tools: Build requirements besides setuptools, wheel, packaging and ninja.
    """

    check: str
    cpu_minutes: tuple[int, int]
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    tools: tuple[str, ...] = ()


@dataclass(frozen=True)
class Toolkit:
    """One argument of the command.

    Args:
        about: Display name.
        libraries: Packages that pip installs with their dependencies.
        packages: Packages installed without dependencies, which follow later, apart from :data:`LEFT_OUT`.
        compiled: Package compiled last.
        opencv: True if a build of OpenCV is needed.
        extra: Extra of attn-plugins whose requirements pip installs.
        oldest_torch: Minimum torch version of the packages.
        checks: Checks run at the end, in this order.
    """

    about: str
    checks: tuple[str, ...] = ()
    libraries: tuple[Package, ...] = ()
    packages: tuple[Package, ...] = ()
    compiled: Compiled | None = None
    opencv: bool = False
    extra: str | None = None
    oldest_torch: str = "2.1"


# Dependencies that pip would add but that are handled elsewhere or not needed.
LEFT_OUT = {
    "opencv-python": "cv2 comes from the installed build, else from opencv-python-headless",
    "opencv-python-headless": "the same",
    "numba": "imagecorruptions needs it only for mmdet's corruption benchmark",
    "torchaudio": "fairseq needs it only for speech synthesis, and it exists only up to torch 2.11",
}
OPENCV_BUILDS = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")
OPENCV = "opencv-python-headless>=4.5,<5"
TORCHVISION = Package("torchvision", "torchvision")

TOOLKITS: dict[str, Toolkit] = {
    "timm": Toolkit(
        about="timm", libraries=(TORCHVISION, Package("timm>=1.0.20", "timm")), checks=("torchvision", "timm")
    ),
    # Maintained forks of OpenMMLab's packages. mmdet's lane transforms import imaug.
    "mm": Toolkit(
        about="mmdetection and mmsegmentation",
        libraries=(TORCHVISION,),
        packages=(
            Package("onedl-mmengine>=0.10.12,<0.11", "mmengine"),
            Package("onedl-mmdetection>=3.5.1,<3.6", "mmdet"),
            Package("onedl-mmsegmentation>=1.4.2,<1.5", "mmseg"),
            Package("imagecorruptions-imaug>=1.1.5", "imagecorruptions"),
            Package("imaug>=0.4.3", "imaug"),
        ),
        compiled=Compiled(
            "onedl-mmcv>=2.3.6,<2.4",
            "mmcv",
            check="mmcv",
            cpu_minutes=(7, 20),
            environment=MappingProxyType({"MMCV_WITH_OPS": "1", "FORCE_CUDA": "0"}),
        ),
        opencv=True,
        oldest_torch="2.4",  # stated by onedl-mmcv; under 2.1.2 it compiles, but onedl-mmengine fails to import
        checks=("torchvision", "mmcv", "mmdet", "mmseg"),
    ),
    "fairseq": Toolkit(
        about="fairseq",
        libraries=(Package("numpy>=1.21.3", "numpy"),),
        compiled=Compiled(
            "fairseq-fixed>=0.12.3", "fairseq", check="fairseq", cpu_minutes=(2, 6), tools=("cython>=3,<4",)
        ),
        checks=("fairseq",),
    ),
    "tools": Toolkit(about="requirements of the command-line tools", extra="tools"),
    "captioning": Toolkit(about="requirements of captioning besides fairseq, timm and tools", extra="captioning"),
    "onnx": Toolkit(about="ONNX export and its runtime", extra="onnx"),
}


def install_command(toolkit: str) -> str:
    """Return the command that installs or repairs ``toolkit``."""
    return f"python -m attn_plugins install {toolkit}"
