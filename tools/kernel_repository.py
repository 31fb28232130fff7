"""Build a repository of deformable attention for Hugging Face's ``kernels`` from this package's sources.

The repository holds, for each kind of device, a folder ``build/torch-<kind>`` of Python alone: the operator with its
Triton kernels and its PyTorch implementation, and the layer ``MultiScaleDeformableAttention`` of transformers. On CPUs
the layer runs the compiled kernels of an installed attn_plugins.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "plugins"
NAME = "deformable-attention"
VERSION = 1  # of the interface: users ask for it, and it is the branch `v1` of the Hub
BACKENDS = ("cpu", "cuda", "metal", "rocm", "xpu")
FIRST = "transformers/sampling.py"  # what it imports is copied
NAMESPACE = "name of this build"
CHANGED = {  # the copies know no binary, and their operators have a name of their own
    "ops/deformable_attention/deformable_attention.py": {
        "from . import cpu, cuda, eager, onnx,": "from . import eager, onnx,",
        "table=[cpu.BACKEND, cuda.BACKEND, triton.BACKEND, eager.BACKEND]": "table=[triton.BACKEND, eager.BACKEND]",
    },
    "core/operator.py": {'NAMESPACE = "attn_plugins"\n': f'NAMESPACE = "{NAMESPACE}"\n'},
}
INIT = '''\
"""Multi-scale deformable attention (Zhu et al. 2021), from attn_plugins."""

from . import layers
from .ops.deformable_attention.deformable_attention import deformable_attention

__all__ = ["deformable_attention", "layers"]
'''
LAYERS = '''\
"""Layers that replace those of transformers."""

from torch import Tensor, nn

from .transformers.sampling import layer as _layer

try:  # its kernels for CPUs are compiled
    from attn_plugins.transformers.sampling import layer as _installed
except ImportError:
    _installed = _layer


class MultiScaleDeformableAttention(nn.Module):
    """Sum of weighted samples from maps of several sizes: see ``deformable_attention``."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: list[tuple],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        shapes = value_spatial_shapes, value_spatial_shapes_list, level_start_index
        layer = _installed if value.device.type == "cpu" else _layer
        return layer(_refuse, self, value, *shapes, sampling_locations, attention_weights, im2col_step)


def _refuse(self, value, shapes, sizes, starts, sampling_locations, attention_weights, im2col_step):
    raise TypeError(
        "value and sampling_locations must have one dtype, float16, bfloat16, float32 or float64, got "
        f"{value.dtype} and {sampling_locations.dtype}; attention_weights have {attention_weights.dtype}"
    )
'''
CARD = """\
---
library_name: kernels
license: apache-2.0
tags: [kernels, deformable-attention, object-detection]
---
# Multi-scale deformable attention

The layer `MultiScaleDeformableAttention` of transformers' Deformable DETR, RT-DETR, Grounding DINO and their relatives,
forward and backward: Triton kernels on GPUs of NVIDIA, AMD and Intel, PyTorch's operations on other devices, and on
CPUs the compiled kernels of attn_plugins where that is installed. Nothing is compiled beforehand.

```python
from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from transformers.models.deformable_detr import modeling_deformable_detr as detr

name = "MultiScaleDeformableAttention"
repository = LayerRepository("OWNER/deformable-attention", layer_name=name, version=1, trust_remote_code=True)
replace_kernel_forward_from_hub(detr.MultiScaleDeformableAttention, name)
with use_kernel_mapping({name: {kind: repository for kind in ("cpu", "cuda", "rocm", "xpu")}}):
    kernelize(model, mode=Mode.TRAINING)
```
"""


def sources(first: str = FIRST) -> dict[str, str]:
    """Return the texts of a file of the package and of all files that it imports from the package, changed, by path."""
    texts: dict[str, str] = {}
    waiting = [first]
    while waiting:
        path = waiting.pop()
        if path in texts:
            continue
        text = (PACKAGE / path).read_text()
        for line, other in CHANGED.get(path, {}).items():
            if text.count(line) != 1:
                raise ValueError(f"{path} must hold {line!r} once, to be changed for the copy")
            text = text.replace(line, other)
        texts[path] = text
        waiting += _imported(path, text)
    return texts


def _imported(path: str, text: str) -> list[str]:
    """Return the files of the package that a file's relative imports name, also those within functions."""
    files = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = Path(path).parents[node.level - 1].joinpath(*(node.module or "").split("."))
        names = [folder.with_suffix(".py"), *(folder / f"{alias.name}.py" for alias in node.names)]
        files += [name.as_posix() for name in names if (PACKAGE / name).is_file()]
    return files


def write(folder: Path) -> list[Path]:
    """Write the repository into ``folder``, in place of one that is there, and return the folders of its builds.

    Raises:
        FileExistsError: The folder holds something else.
    """
    if folder.exists():
        if any(folder.iterdir()) and not (folder / "build/torch-cpu/metadata.json").is_file():
            raise FileExistsError(f"{folder} must be empty or hold a repository that this command wrote")
        shutil.rmtree(folder)
    texts = {"__init__.py": INIT, "layers.py": LAYERS, **sources()}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:12]
    packages = {parent for path in texts for parent in Path(path).parents if parent.name}
    texts |= {(package / "__init__.py").as_posix(): "" for package in packages}
    builds = []
    for backend in BACKENDS:
        build, identity = folder / f"build/torch-{backend}", f"_{NAME.replace('-', '_')}_{backend}_{digest}"
        for path, text in texts.items():
            file = build / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace(NAMESPACE, identity))
        about = {
            "id": identity,
            "name": NAME,
            "version": VERSION,
            "kernels-minver": "0.17.0",
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (build / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
        builds.append(build)
    (folder / "README.md").write_text(CARD)
    shutil.copy(ROOT / "LICENSE", folder)
    return builds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/kernels" / NAME, metavar="FOLDER",
        help="folder of the repository, build/kernels/deformable-attention by default",
    )  # fmt: skip
    folder = parser.parse_args().out
    builds = write(folder)
    size = sum(file.stat().st_size for file in builds[0].rglob("*") if file.is_file())
    print(f"{folder}: {len(builds)} builds of {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
