"""What each toolkit consists of, and in which order it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Package:
    """A distribution, and the module that shows that it, or a fork of it, is installed."""

    requirement: str
    module: str


@dataclass(frozen=True)
class Compiled(Package):
    """A package whose extension modules must be compiled against the installed torch.

    Args:
        check: the check of :mod:`~attn_plugins.install.checks` that runs its extension modules.
        environment: variables for the compilation; those that are set already win.
        cpu_minutes: the least and the greatest time it takes, divided by the number of jobs.
        tools: build requirements beside setuptools, wheel, packaging and ninja.
    """

    check: str
    cpu_minutes: tuple[int, int]
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    tools: tuple[str, ...] = ()


@dataclass(frozen=True)
class Toolkit:
    """One argument of the command.

    Args:
        about: the name that a person reads.
        libraries: installed by pip with their dependencies.
        packages: installed without their dependencies, which follow, apart from :data:`LEFT_OUT`.
        compiled: compiled last.
        opencv: True where a build of OpenCV is needed.
        extra: an extra of attn-plugins whose requirements pip installs.
        oldest_torch: the first torch that its packages run under.
        checks: run at the end, in this order.
    """

    about: str
    checks: tuple[str, ...] = ()
    libraries: tuple[Package, ...] = ()
    packages: tuple[Package, ...] = ()
    compiled: Compiled | None = None
    opencv: bool = False
    extra: str | None = None
    oldest_torch: str = "2.1"


# Dependencies that pip would add and that are handled otherwise, or not needed.
LEFT_OUT = {
    "opencv-python": "cv2 comes from whichever build is there, else from opencv-python-headless",
    "opencv-python-headless": "the same",
    "numba": "imagecorruptions needs it for mmdet's corruption benchmark alone",
    "torchaudio": "fairseq needs it for speech synthesis alone, and it exists up to torch 2.11 only",
}
OPENCV_BUILDS = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")
OPENCV = "opencv-python-headless>=4.5,<5"
TORCHVISION = Package("torchvision", "torchvision")

TOOLKITS: dict[str, Toolkit] = {
    "timm": Toolkit(
        about="timm", libraries=(TORCHVISION, Package("timm>=1.0.20", "timm")), checks=("torchvision", "timm")
    ),
    # The maintained line of OpenMMLab's packages. imaug is imported by mmdet's lane transforms.
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
        oldest_torch="2.4",  # onedl-mmcv states it; under 2.1.2 it compiles, and onedl-mmengine does not import
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
    "tools": Toolkit(about="what the command-line tools need", extra="tools"),
    "captioning": Toolkit(about="what captioning needs beside fairseq, timm and tools", extra="captioning"),
    "onnx": Toolkit(about="ONNX export and its runtime", extra="onnx"),
}


def mend(toolkit: str) -> str:
    """The command that installs or repairs ``toolkit``."""
    return f"python -m attn_plugins install {toolkit}"
