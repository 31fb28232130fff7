"""Packages of each toolkit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Native:
    """Package with extension modules, which must fit the installed torch."""

    requirement: str
    module: str  # also the name of the check that runs the extension modules
    minutes: tuple[int, int] = (1, 4)  # of a compilation with one job
    optional: bool = False  # attn_plugins.mmcv_ext stands in where it is not compiled
    cuda: bool = False  # has CUDA operators, which FORCE_CUDA switches
    configuration: str = ""  # of distutils; {jobs} is the number of parallel compilers


@dataclass(frozen=True)
class Toolkit:
    """One argument of the command, with its packages in the order of their installation."""

    about: str
    checks: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()  # requirements that pip installs with their dependencies
    packages: Mapping[str, str] = field(default_factory=dict)  # others, and the modules that they provide
    native: Native | None = None
    extra: str | None = None  # of attn-plugins, whose requirements are libraries
    oldest_torch: str = "2.1"


# Any build of OpenCV serves, and two of them in one environment overwrite each other.
OPENCV = "opencv-python-headless>=4.5,<5"
OPENCV_BUILDS = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")
# Dependencies that are not installed: numba is for mmdet's corruption benchmark alone, torchaudio for fairseq's speech
# synthesis (and exists only up to torch 2.11).
LEFT_OUT = {*OPENCV_BUILDS, "numba", "torchaudio"}

MM_CHECKS = ("torchvision", "mmcv", "mmdet", "mmseg")
MM_LIBRARIES = (
    *("torchvision", "numpy", "packaging", "pillow", "pyyaml", "matplotlib", "scipy", "shapely", "tqdm", "regex"),
    *("addict", "ftfy", "pycocotools", "prettytable", "rich", "six", "termcolor", "terminaltables", "yapf", OPENCV),
)
ONEDL = Toolkit(
    "mmdetection and mmsegmentation (maintained onedl forks)",
    MM_CHECKS,
    libraries=(*MM_LIBRARIES, "imageio", "scikit-image"),
    packages={
        "onedl-mmengine>=0.10.12,<0.11": "mmengine",
        "onedl-mmdetection>=3.5.1,<3.6": "mmdet",
        "onedl-mmsegmentation>=1.4.2,<1.5": "mmseg",
        "imagecorruptions-imaug>=1.1.5": "imagecorruptions",
        "imaug>=0.4.3": "imgaug",  # which mmdet's lane transforms import
    },
    native=Native("onedl-mmcv>=2.3.6,<2.4", "mmcv", (7, 20), optional=True, cuda=True),
    oldest_torch="2.4",  # stated by onedl-mmcv; under 2.1.2 it compiles, but onedl-mmengine fails to import
)
OPENMMLAB = Toolkit(
    "mmdetection and mmsegmentation (OpenMMLab's own packages)",
    MM_CHECKS,
    libraries=MM_LIBRARIES,
    packages={
        "mmengine>=0.10.7,<0.11": "mmengine",
        "mmdet>=3.3,<3.4": "mmdet",
        "mmsegmentation>=1.2.2,<1.3": "mmseg",
        "setuptools<82": "pkg_resources",  # with which mmengine resolves `_base_ = "mmdet::…"`
    },
    native=Native("mmcv-lite>=2.1,<2.2", "mmcv", optional=True),
)
FAIRSEQ = Toolkit(
    "fairseq",
    ("fairseq",),
    libraries=(
        *("numpy>=1.21.3", "packaging", "regex", "tqdm", "scikit-learn", "cffi", "cython>=3,<4", "bitarray"),
        *("hydra-core==1.3.2", "omegaconf==2.3.0", "sacrebleu>=1.4.12"),
    ),
    # setuptools compiles its six extensions in parallel; with ninja, torch would write one build.ninja for all of them.
    native=Native("fairseq-fixed>=0.12.3", "fairseq", configuration="[build_ext]\nparallel = {jobs}\nuse_ninja =\n"),
)
TOOLKITS = {
    "timm": Toolkit("timm", ("torchvision", "timm"), libraries=("torchvision", "timm>=1.0.20")),
    "mm": ONEDL,
    "fairseq": FAIRSEQ,
    "tools": Toolkit("requirements of the command-line tools", extra="tools"),
    "captioning": Toolkit("requirements of captioning besides fairseq, timm and tools", extra="captioning"),
    "onnx": Toolkit("ONNX export and its runtime", extra="onnx"),
}
