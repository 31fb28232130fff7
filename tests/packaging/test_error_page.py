"""The page of error messages: each is raised without attn_plugins, and no longer after the page's two lines.

One process imports torch with our entry point off, and forks a child for each case without and with those lines. Small
packages raise the errors by the statements of the projects. ``tests/extensions/test_offered.py`` shows that with the
entry point ``import torch`` suffices.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from attn_plugins.core import library

PAGE = Path(__file__).parents[2] / "docs/howto/errors.md"
SECTION = re.compile(r"^## (.+)\n((?:(?!^## ).*\n)+)", re.M)


class Case(NamedTuple):
    """The code that shows a message, and the packages that it imports, file by file."""

    code: str
    packages: dict[str, str] = {}


MASK2FORMER = """
try:
    import MultiScaleDeformableAttention as MSDA
except ModuleNotFoundError:
    raise ModuleNotFoundError("Please compile MultiScaleDeformableAttention CUDA op with the following commands:")
"""
GROUNDING_DINO = {
    "groundingdino/__init__.py": "",
    "groundingdino/ms_deform_attn.py": """
import warnings
try:
    from groundingdino import _C
except ImportError:
    warnings.warn("Failed to load custom C++ ops. Running on CPU mode Only!")
def forward(*args):
    return _C.ms_deform_attn_forward
""",
}
DETREX = {
    "detrex/__init__.py": "",
    "detrex/layers.py": """
def ready():
    return True
try:
    from detrex import _C
except ImportError as error:
    missing = error
    def ready():
        extension = "Cannot import 'detrex._C', therefore 'MultiScaleDeformableAttention' is not available"
        raise ImportError(extension) from missing
""",
}
DCN_V2 = """
import _ext as _backend
def forward(*args):
    return _backend.dcn_v2_forward(*args)
"""
BASICSR = {
    **{f"{folder}/__init__.py": "" for folder in ("basicsr", "basicsr/ops")},
    "basicsr/ops/dcn/__init__.py": """
try:
    from . import deform_conv_ext
except ImportError:
    pass
def forward(*args):
    return deform_conv_ext.deform_conv_forward
""",
}
MMDET_1 = {
    **{f"{folder}/__init__.py": "" for folder in ("mmdet", "mmdet/ops")},
    "mmdet/ops/dcn/__init__.py": "from . import deform_conv_cuda",
}
DETECTRON2 = {
    "detectron2/__init__.py": "",
    "detectron2/layers.py": """
def deform_conv():
    return _C.deform_conv_forward
try:
    from detectron2 import _C
except ImportError:
    def deform_conv():
        raise ImportError("detectron2 is not compiled successfully, please build following the instructions!")
""",
}
NATTEN = {"natten/__init__.py": "__version__ = '0.21.7'", "natten/functional.py": "def na2d(): ..."}
BFLOAT16 = """
import torch, torchvision
x, offset, weight = (torch.rand(shape).bfloat16() for shape in ((1, 2, 4, 5), (1, 18, 4, 5), (3, 2, 3, 3)))
torchvision.ops.deform_conv2d(x, offset, weight, padding=1)
"""
MMCV = {"mmcv/__init__.py": "", "mmcv/ops.py": "import importlib\nimportlib.import_module('mmcv._ext').nms"}
DCN_V4 = {"DCNv4/__init__.py": "from . import functions", "DCNv4/functions.py": "from DCNv4 import ext"}

BY_BINARY = "\"deformable_im2col\" not implemented for 'BFloat16'"  # mended by the compiled kernels alone
CASES = {
    "No module named 'mmcv._ext'": Case("import mmcv.ops", MMCV),
    "No module named 'MultiScaleDeformableAttention'": Case(
        "import MultiScaleDeformableAttention as MSDA; MSDA.ms_deform_attn_forward"
    ),
    "Please compile MultiScaleDeformableAttention CUDA op": Case(
        "import mask2former_ops", {"mask2former_ops.py": MASK2FORMER}
    ),
    "name '_C' is not defined": Case(
        "from groundingdino import ms_deform_attn; ms_deform_attn.forward()", GROUNDING_DINO
    ),
    "Failed to load custom C++ ops. Running on CPU mode Only!": Case(
        "import warnings; warnings.simplefilter('error'); import groundingdino.ms_deform_attn", GROUNDING_DINO
    ),
    "Cannot import 'detrex._C', therefore 'MultiScaleDeformableAttention' is not available": Case(
        "from detrex.layers import ready; ready()", DETREX
    ),
    "No module named 'DCNv3'": Case("import DCNv3; DCNv3.dcnv3_forward"),
    "cannot import name 'ext' from partially initialized module 'DCNv4'": Case("import DCNv4", DCN_V4),
    "No module named '_ext'": Case("import dcn_v2", {"dcn_v2.py": DCN_V2}),
    "cannot import name 'deform_conv_cuda'": Case("import mmdet.ops.dcn", MMDET_1),
    "name 'deform_conv_ext' is not defined": Case("import basicsr.ops.dcn as dcn; dcn.forward()", BASICSR),
    "detectron2 is not compiled successfully": Case("from detectron2.layers import *; deform_conv()", DETECTRON2),
    "cannot import name '_C' from 'detectron2'": Case("from detectron2 import _C", DETECTRON2),
    "cannot import name 'natten2dqkrpb' from 'natten.functional'": Case(
        "from natten.functional import natten2dqkrpb", NATTEN
    ),
    BY_BINARY: Case(BFLOAT16),
}
ELSEWHERE = {
    "Failed to build 'mmcv'": "installs packages: tests/packaging/test_install.py, test_installation.py",
    "Failed building wheel for mmcv": "likewise",
    "MMCV==2.2.0 is used but incompatible": "likewise",
    "\"ms_deform_attn_forward_cuda\" not implemented for 'Half'": "a compiled extension and a GPU raise it; "
    "tests/extensions/test_dtypes.py compares ours in half precision",
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64": "needs a Mac; "
    "tests/mm/test_other_devices.py runs nms on a device without float64",
    "Could not load the custom kernel for multi-scale deformable attention": "transformers 4 with nvcc logs it; "
    "tests/transformers/test_sampling.py compares ours",
}

# Runs each of RUNS in a child of one process, which imports once what takes seconds and offers no extension.
RUN = """
import json, os, torch, torchvision, attn_plugins.ops
for codes in RUNS:
    child = os.fork()
    if not child:
        message = ""
        try:
            for code in codes:
                exec(code, {})
        except BaseException as error:
            message = str(error)
        print(json.dumps(message), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def sections() -> list[tuple[list[str], str]]:
    """Return the messages and the text of each section."""
    return [(re.findall("`+(.+?)`+", heading), text) for heading, text in SECTION.findall(PAGE.read_text())]


def lines_of(message: str) -> str:
    """Return the code that the page gives for a message, of two lines."""
    [text] = (text for messages, text in sections() if message in messages)
    [code] = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(code.splitlines()) == 2
    return code


def messages_of(python, runs: list[list[str]], **environment: str) -> list[str]:
    """Return the error that ends each list of codes, '' for none."""
    packages = {name: text for case in CASES.values() for name, text in case.packages.items()}
    done = python(f"RUNS = {runs!r}\n{RUN}", packages=packages, **environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_message_is_raised_here_or_the_reason_is_known():
    listed = [message for messages, _ in sections() for message in messages]
    assert sorted(listed) == sorted([*CASES, *ELSEWHERE])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_the_pages_lines_mend_what_is_raised_without_them(python):
    pytest.importorskip("torchvision")
    cases = {message: case for message, case in CASES.items() if message != BY_BINARY or not library.failures()["cpu"]}
    runs = [[case.code] for case in cases.values()]
    mended = [[lines_of(message), case.code] for message, case in cases.items()]
    shown = messages_of(python, [*runs, *mended], ATTN_PLUGINS_AUTOLOAD="0")
    for message, before, after in zip(cases, shown[: len(runs)], shown[len(runs) :], strict=True):
        assert message in before
        assert after == "", message
