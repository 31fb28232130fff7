"""Prints the lines of a requirement file that the running environment lacks, by distribution or import name.

``python tools/missing_requirements.py requirements/mm.txt`` is what ``tools/environment.sh`` asks in an
environment of the user's own, where whatever is there already stays, whichever version or fork it is.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement  # pip itself is all that is sure to be there

# Distributions whose module has another name: a fork that brings the same module serves as well.
MODULES = {
    "onedl-mmcv": "mmcv",
    "onedl-mmengine": "mmengine",
    "onedl-mmdetection": "mmdet",
    "onedl-mmsegmentation": "mmseg",
    "opencv-python-headless": "cv2",
    "fairseq-fixed": "fairseq",
}


def is_there(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return name in MODULES and find_spec(MODULES[name]) is not None
    return True


def main() -> None:
    for line in Path(sys.argv[1]).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        wanted = requirement.marker is None or requirement.marker.evaluate()
        if wanted and not is_there(requirement.name):
            print(text)


if __name__ == "__main__":
    main()
