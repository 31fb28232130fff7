"""Which names are offered to whom: extensions of research code that are not compiled."""

from __future__ import annotations

import pytest

from attn_plugins import doctor, mmcv_ext
from attn_plugins.extensions import adet, dcnv2, deform_conv, detectron2, maskrcnn_benchmark, psroi_pooling

CONVOLUTIONS = "deform_conv_backward_input deform_conv_backward_parameters deform_conv_forward".split()
MODULATED = ["modulated_deform_conv_backward", "modulated_deform_conv_forward"]
ATTENTION = ["ms_deform_attn_backward", "ms_deform_attn_forward"]
CUDA = "modulated_deform_conv_cuda_backward modulated_deform_conv_cuda_forward".split()
POOLING = ["deform_psroi_pooling_backward", "deform_psroi_pooling_forward"]
DCNV3 = ["dcnv3_backward", "dcnv3_forward"]
SERVED = {
    "MultiScaleDeformableAttention": ATTENTION,
    "groundingdino._C": ATTENTION,
    "grounding_dino.groundingdino._C": ATTENTION,
    "detrex._C": [*DCNV3, *ATTENTION],
    "adet._C": ATTENTION,
    "DCNv3": DCNV3,
    "DCNv4.ext": ["dcnv4_backward", "dcnv4_forward", "flash_deform_attn_backward", "flash_deform_attn_forward"],
    "deform_conv_cuda": [*(f"{name}_cuda" for name in CONVOLUTIONS), *CUDA],
    "mmdet.ops.dcn.deform_conv_cuda": [*(f"{name}_cuda" for name in CONVOLUTIONS), *CUDA],
    "basicsr.ops.dcn.deform_conv_ext": [*CONVOLUTIONS, *MODULATED],
    "mmdet.ops.dcn.deform_pool_cuda": ["deform_psroi_pooling_cuda_backward", "deform_psroi_pooling_cuda_forward"],
    "mmdet.ops.dcn.deform_pool_ext": POOLING,
    "detectron2._C": [
        *("deform_conv_backward_filter", "deform_conv_backward_input", "deform_conv_forward", *MODULATED),
        *("get_compiler_version", "get_cuda_version", "has_cuda"),
    ],
    "maskrcnn_benchmark._C": [
        *(*CONVOLUTIONS, *MODULATED, *POOLING, "nms", "roi_align_backward", "roi_align_forward", "roi_pool_backward"),
        *("roi_pool_forward", "sigmoid_focalloss_backward", "sigmoid_focalloss_forward"),
    ],
}
PACKAGES = {name.rpartition(".")[0] for name in SERVED if "." in name}
PACKAGE = {
    f"{'/'.join(package.split('.')[:n])}/__init__.py": ""
    for package in PACKAGES
    for n in range(1, package.count(".") + 2)
}
SHOW = f"""
import importlib
for name, functions in {SERVED}.items():
    held = vars(importlib.import_module(name))
    print(name, all(callable(held[function]) for function in functions))
"""
DCN_V2 = """
import torch
from torch.autograd import Function
{IMPORT} as _backend
class _DCNv2(Function):
    @staticmethod
    def forward(ctx, input, offset, mask, weight, bias):
        return _backend.dcn_v2_forward(input, weight, bias, offset, mask, 3, 3, 1, 1, 1, 1, 1, 1, 1)
"""
CONVOLVE = """
import torch, torchvision
shapes = (1, 2, 4, 5), (1, 18, 4, 5), (1, 9, 4, 5), (3, 2, 3, 3), (3,)
input, offset, mask, weight, bias = map(torch.rand, shapes)
wanted = torchvision.ops.deform_conv2d(input, offset, weight, bias, 1, 1, 1, mask)
torch.testing.assert_close(_DCNv2.apply(input, offset, mask, weight, bias), wanted)
"""


def test_offered_from_the_import_of_torch_on(python):
    lines = python(f"import torch\n{SHOW}", packages=PACKAGE).stdout.splitlines()
    assert lines == [f"{name} True" for name in SERVED]


@pytest.mark.slow
def test_offered_by_an_import_where_autoload_is_off(python):
    off = dict(ATTN_PLUGINS_AUTOLOAD="0")
    done = python(f"import torch\n{SHOW}", packages=PACKAGE, check=False, **off)
    assert "No module named 'MultiScaleDeformableAttention'" in done.stderr
    shown = python(f"import attn_plugins.extensions\n{SHOW}", packages=PACKAGE, **off).stdout
    assert len(shown.splitlines()) == len(SERVED)


def test_compiled_ones_take_precedence(python):
    names = [*SERVED, "_ext"]
    compiled = {**PACKAGE, **{f"{name.replace('.', '/')}.py": "x = __file__" for name in names}}
    shown = "\n".join(f"import {name}; print({name}.x)" for name in names)
    shown += "\n# dcn_v2_forward is called:\ndef f(): _ext.dcn_v2_forward"
    assert len(python(f"import torch\n{shown}", packages=compiled).stdout.splitlines()) == len(names)


@pytest.mark.slow
def test_broken_ones_are_not_hidden(python):
    broken = {"MultiScaleDeformableAttention.py": "raise ImportError('undefined symbol')"}
    result = python("import torch, MultiScaleDeformableAttention", packages=broken, check=False)
    assert result.stderr.splitlines()[-1] == "ImportError: undefined symbol"


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder, statement",
    [("", "import _ext"), ("DCNv2/", "from . import _ext"), ("lib/models/DCNv2/", "from lib.models.DCNv2 import _ext")],
)
def test_ext_is_offered_to_code_that_calls_dcn_v2(python, folder, statement):
    """The call may be in a function of the module that imports it."""
    parts = folder.split("/")[:-1]
    packages = {"/".join([*parts[: n + 1], "__init__.py"]): "" for n in range(len(parts))}
    packages[f"{folder}dcn_v2.py"] = DCN_V2.replace("{IMPORT}", statement)
    python(f"from {folder.replace('/', '.')}dcn_v2 import _DCNv2\n{CONVOLVE}", packages=packages)


@pytest.mark.slow
def test_ext_is_not_offered_to_other_code(python):
    """Other packages have an extension of that name as well, and code that does without it."""
    fallback = "try:\n    {}\nexcept ImportError:\n    print('none')\n"
    packages = {
        "other/__init__.py": fallback.format("from . import _ext"),
        "another.py": fallback.format("import _ext"),
    }
    code = "import torch, other, another, importlib.util\nprint(importlib.util.find_spec('_ext'))"
    assert python(code, packages=packages).stdout.split() == ["none", "none", "None"]


DETECTRON2 = {
    "detectron2/__init__.py": "",
    "detectron2/layers.py": "from detectron2 import _C",
    "detectron2/evaluation/__init__.py": "import detectron2.layers\nfrom .coco_evaluation import chosen",
    "detectron2/evaluation/coco_evaluation.py": "try:\n    from .fast_eval_api import chosen\n"
    "except ImportError as error:\n    print(error)\n    chosen = 'pycocotools'",
    "detectron2/evaluation/fast_eval_api.py": "from detectron2 import _C\nchosen = _C.COCOevalAccumulate",
}


@pytest.mark.slow
@pytest.mark.parametrize("first", ["detectron2.layers", "detectron2.evaluation", "detectron2.evaluation.fast_eval_api"])
def test_detectron2_evaluates_with_pycocotools(python, first):
    """It does so where its module of evaluation in C++ has no extension to import; a second import fails as well."""
    code = f"""
import torch
try:
    import {first}
except ImportError: pass
from detectron2.evaluation import chosen
print(chosen)
import detectron2.layers
print(detectron2.layers._C.get_compiler_version(), detectron2.layers._C.has_cuda())
import detectron2.evaluation.fast_eval_api
"""
    done = python(code, packages=DETECTRON2, check=False)
    message = "detectron2.evaluation.fast_eval_api needs detectron2's compiled extension"
    assert done.stdout.splitlines()[-2:] == ["pycocotools", "not compiled: attn_plugins stands in False"]
    assert done.stdout.startswith(message)
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {message}")


@pytest.mark.slow
def test_a_compiled_detectron2_keeps_its_evaluation(python):
    """Even if our module is imported."""
    packages = {**DETECTRON2, "detectron2/_C.py": "COCOevalAccumulate = 'fast'"}
    code = "import attn_plugins.extensions.detectron2\nfrom detectron2.evaluation import chosen; print(chosen)"
    assert python(code, packages=packages).stdout.split() == ["fast"]


@pytest.mark.slow
def test_rotated_boxes_say_that_they_are_not_served(python):
    code = """
import torch, detectron2._C
boxes = torch.rand(2, 5)
for call in (
    lambda: torch.ops.detectron2.nms_rotated(boxes, boxes[:, 0], 0.5),
    lambda: torch.ops.detectron2.box_iou_rotated(boxes, boxes),
    lambda: torch.ops.detectron2.roi_align_rotated_forward(torch.rand(1, 1, 4, 4), torch.rand(1, 6), 1.0, 2, 2, 0),
    lambda: torch.ops.detectron2.roi_align_rotated_backward(boxes, boxes, 1.0, 2, 2, 1, 1, 4, 4, 0),
):
    try:
        call()
    except NotImplementedError as error:
        print(error)
"""
    lines = python(code, packages={"detectron2/__init__.py": ""}).stdout.splitlines()
    assert [line.partition(" needs the compiled extension detectron2._C")[0] for line in lines] == list(
        detectron2.ROTATED
    )


@pytest.mark.parametrize(
    "module, extension, name, served",
    [
        (adet, "adet._C", "bezier_align_forward", "ms_deform_attn_forward"),
        (dcnv2, "_ext of DCNv2", "def_cor_forward", "dcn_v2_forward"),
        (deform_conv, "deform_conv_ext or deform_conv_cuda", "other", "deform_conv_forward_cuda"),
        (detectron2, "detectron2._C", "COCOevalEvaluateImages", "deform_conv_backward_filter"),
        (maskrcnn_benchmark, "maskrcnn_benchmark._C", "ml_nms", "sigmoid_focalloss_forward"),
        (psroi_pooling, "deform_pool_ext or deform_pool_cuda", "other", "deform_psroi_pooling_forward"),
        (mmcv_ext, "mmcv", "knn_forward", "the operators of mmdet and mmsegmentation"),
    ],
)
def test_other_functions_say_what_is_served_and_what_to_do(module, extension, name, served):
    with pytest.raises(NotImplementedError) as raised:
        getattr(module, name)(1, 2, three=3)
    text = str(raised.value)
    assert all(part in text for part in (name, extension, served, "ompile"))
    assert any(command in text for command in ("python -m attn_plugins", "pip install"))
    assert ".md" not in text
    with pytest.raises(AttributeError, match="__other__"):
        module.__other__  # noqa: B018


def test_the_doctor_says_which_serves(monkeypatch, tmp_path, capsys):
    for file in PACKAGE:
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).touch()
    (tmp_path / "groundingdino/_C.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    doctor._extensions(doctor.Report())
    compiled, ours = f"compiled, in {tmp_path / 'groundingdino/_C.py'}", "not compiled: attn_plugins stands in"
    anywhere = "attn_plugins stands in where it is not compiled"
    files = "_ext", "deform_conv_cuda", "deform_conv_ext", "deform_pool_cuda", "deform_pool_ext"
    names = [name for name in SERVED if not name.endswith(files)]
    shown = dict(line.split(maxsplit=1)[1].split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert shown == {
        **dict.fromkeys(("natten", "natten.functional"), ours),
        **{name: compiled if name == "groundingdino._C" else ours for name in names},
        **{f"{file}, in any package": anywhere for file in files},
    }
