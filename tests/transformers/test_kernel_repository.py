"""The repository for Hugging Face's ``kernels``, loaded from its folder, against transformers' own layer on CPUs."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tools import kernel_repository

PAGE = Path(__file__).parents[2] / "docs/start/transformers.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
NAME = "MultiScaleDeformableAttention"
SHAPES = [(5, 7), (3, 4)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kernels") / "deformable-attention"
    kernel_repository.write(folder)
    return folder


@pytest.fixture(scope="module")
def kernel(repository) -> ModuleType:
    return pytest.importorskip("kernels").get_local_kernel(repository)


@pytest.fixture(params=["its own", "installed"])
def serving(request, kernel, monkeypatch) -> str:
    """Let the layer run the repository's own operator, or that of the installed package."""
    if request.param == "its own":
        monkeypatch.setattr(kernel.layers, "_installed", kernel.layers._layer)
    return request.param


@pytest.fixture
def stock() -> Iterator[type[nn.Module]]:
    """Return transformers' layer, which may be replaced from a repository."""
    modeling = pytest.importorskip("transformers.models.deformable_detr.modeling_deformable_detr")
    layer = getattr(modeling, NAME)
    before = dict(vars(layer))
    pytest.importorskip("kernels").replace_kernel_forward_from_hub(layer, NAME)
    yield layer
    for name in ("kernel_layer_name", "kernel_condition"):
        setattr(layer, name, before[name]) if name in before else delattr(layer, name)


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return values (B, S, M, d), locations (B, Q, M, L, K, 2), some of them beyond the map, and weights."""
    torch.manual_seed(0)
    B, Q, M, L, K, d = 2, 6, 2, len(SHAPES), 3, 8
    tensors = torch.randn(B, 47, M, d), 1.4 * torch.rand(B, Q, M, L, K, 2) - 0.2, torch.rand(B, Q, M, L, K)
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


class Namespaces(TorchDispatchMode):
    """The namespaces of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.namespace)
        return func(*args, **(kwargs or {}))


def attend(layer: nn.Module, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    sizes, starts = torch.tensor(SHAPES), torch.tensor([0, 35])
    return layer(value, sizes, SHAPES, starts, locations, weights, 64)


def kernelized(layer: nn.Module, repository: Path) -> nn.Module:
    import kernels

    local = kernels.LocalLayerRepository(repository, layer_name=NAME)
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping({NAME: {"cpu": local}}, inherit_mapping=False):
        return kernels.kernelize(layer, mode=mode, device="cpu", use_fallback=False)


def test_outputs_and_gradients_are_those_of_transformers(stock, repository, serving, caplog):
    leaves = operands()
    expected = attend(stock(), *leaves)
    actual = attend(kernelized(stock(), repository), *leaves)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, leaves, grad), torch.autograd.grad(expected, leaves, grad))
    with Namespaces() as called:
        attend(kernelized(stock(), repository), *leaves)
    assert ("attn_plugins" in called.names) == (serving == "installed")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_model_predicts_and_trains_as_before_by_the_pages_code(stock, repository, serving):
    from tests.transformers.families import SIZE, _deformable_detr

    torch.manual_seed(0)
    model = _deformable_detr().eval()
    for name, parameter in model.named_parameters():
        if "sampling_offsets" in name:  # not at pixel centres, where derivatives jump
            nn.init.normal_(parameter, std=0.3)
    images = torch.randn(1, 3, *SIZE)

    def run() -> tuple[Tensor, list[Tensor]]:
        logits = model(images).logits
        used = [parameter for parameter in model.parameters() if parameter.requires_grad]
        grads = torch.autograd.grad(logits.square().mean(), used, allow_unused=True)
        return logits.detach(), [grad for grad in grads if grad is not None]

    expected = run()
    layers = [layer for layer in model.modules() if isinstance(layer, stock)]
    [code] = (block for block in BLOCK.findall(PAGE.read_text()) if "LocalLayerRepository" in block)
    exec(code.replace('"build/kernels/deformable-attention"', repr(str(repository))), {"model": model})
    assert [layer.forward.__func__.__module__.split(".")[-1] for layer in layers] == ["layers"] * 3
    torch.testing.assert_close(run(), expected, atol=1e-5, rtol=1e-4)


def test_it_compiles_in_one_graph(stock, repository, serving):
    layer, leaves = kernelized(stock(), repository), operands(torch.float32)
    compiled = torch.compile(lambda *tensors: attend(layer, *tensors), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*leaves), attend(layer, *leaves))


def test_its_triton_kernels_are_the_packages(kernel):
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    values = operands(torch.float32)
    by_triton, by_pytorch = [], []
    for name, results in (("triton", by_triton), ("eager", by_pytorch)):
        with kernel.core.backends.backend(name):
            output = kernel.deformable_attention(values[0], SHAPES, *values[1:])
            results += [output, *torch.autograd.grad(output.square().sum(), values)]
    torch.testing.assert_close(by_triton, by_pytorch, atol=1e-5, rtol=1e-4)


def test_other_dtypes_are_refused_by_name(stock, repository, serving):
    value, locations, weights = operands(torch.float32)
    with pytest.raises(TypeError, match=r"one dtype, .* got torch.float16 and torch.float32"):
        attend(kernelized(stock(), repository), value.half(), locations, weights)


def test_a_build_imports_itself_torch_and_triton_alone(repository):
    for file in (repository / "build/torch-cuda").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                absolute = node.module or ""
            elif isinstance(node, ast.Import):
                absolute = node.names[0].name
            else:
                continue
            assert absolute.split(".")[0] not in ("transformers", "kernels", "torchvision")
            assert not absolute.startswith("attn_plugins") or file.name == "layers.py"


def test_builds_differ_in_their_names_alone(repository):
    folders = [repository / f"build/torch-{backend}" for backend in kernel_repository.BACKENDS]
    files = [
        sorted(file.relative_to(folder) for file in folder.rglob("*.*") if file.suffix != ".pyc" and file.is_file())
        for folder in folders
    ]
    for (first, names), (second, others) in pairwise(zip(folders, files)):
        assert names == others
        differing = {name.name for name in names if (first / name).read_bytes() != (second / name).read_bytes()}
        assert differing == {"metadata.json", "operator.py"}


def test_a_folder_of_something_else_is_kept(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="must be empty"):
        kernel_repository.write(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
