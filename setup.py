"""Builds ``attn_plugins`` from ``plugins/`` and its two binaries from ``csrc/``.

``_C`` holds the operator schemas and the CPU kernels, ``_C_cuda`` the CUDA kernels. Both use torch's
stable ABI only: one wheel serves every CPython >= 3.10 and every torch >= 2.10.

Environment variables:
    ATTN_PLUGINS_BUILD   ``auto`` (default): CPU binary always, CUDA binary where nvcc and a GPU are found; on Windows
                         the CPU binary where CXX is ``clang-cl`` (with MSVC's linker), which has not been tried;
                         ``cpu``: CPU binary only; ``cuda``: both, also without a GPU; fail where nvcc is missing;
                         ``none``: pure Python, PyTorch implementations of every operator.
    ATTN_PLUGINS_CPU     ``avx512`` (default), ``avx2`` or ``sse2``: the widest instructions that CPU kernels use where
                         the machine has them (``tools/test_cpu.sh``).
    ATTN_PLUGINS_SANITIZE ``1``: compile with gcc's address and undefined-behavior sanitizers (``tools/sanitize.sh``).
    TORCH_CUDA_ARCH_LIST CUDA targets, default ``8.0;9.0+PTX``: later GPUs compile the PTX when they first run it.
    CUDA_HOME            where nvcc's toolkit lies, if it is not on the PATH.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))
from plugins.install import toolchain  # noqa: E402

TORCH_TARGET_VERSION = "0x020a000000000000"  # the oldest torch whose stable ABI we use: 2.10
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]
CPU_LEVELS = {"avx512": 4, "avx2": 3, "sse2": 1}  # of x86-64
WINDOWS = sys.platform == "win32"
FOLDERS = sorted(file.parent.relative_to(ROOT / "plugins").parts for file in (ROOT / "plugins").rglob("__init__.py"))
PACKAGES = ["".join(f".{name}" for name in names) for names in FOLDERS]


def version() -> str:
    match = re.search(r'^__version__ = "(.+)"', (ROOT / "plugins/__init__.py").read_text(), re.M)
    assert match, "plugins/__init__.py defines no __version__"
    return match.group(1)


def sources(pattern: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob(pattern))


def nvidia_headers() -> list[str]:
    """The CUDA headers that torch's own nvidia packages bring (cuBLAS, cuSPARSE, ... lie only there)."""
    import torch

    site = Path(torch.__file__).parent.parent
    return [str(p) for p in sorted(site.glob("nvidia/cu*/include"))]


def flags(sanitized: bool) -> tuple[list[str], list[str]]:
    """Return the options of the C++ compiler and of the linker."""
    cpu = os.environ.get("ATTN_PLUGINS_CPU", "avx512")
    if cpu not in CPU_LEVELS:
        raise SystemExit(f"ATTN_PLUGINS_CPU must be {', '.join(CPU_LEVELS)}, got {cpu!r}")
    defines = [f"TORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", f"ATTN_CPU_LEVEL={CPU_LEVELS[cpu]}"]
    if WINDOWS:
        cxx = ["/O2", "/std:c++20", "/EHsc", "/DNOMINMAX", "/W3", *(f"/D{define}" for define in defines)]
        return [*cxx, "/clang:-fno-math-errno", "/clang:-fno-trapping-math"], []
    # The link below strips symbols; debug information, which Python's own flags ask for, takes a fifth of the time.
    optimized = [*SANITIZERS, "-O1"] if sanitized else ["-O3", "-g0"]
    cxx = [
        *optimized,
        "-std=c++20",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wall",
        *(f"-D{define}" for define in defines),
    ]
    # A debug-free library is a tenth of the size; the kernels keep no symbols that a user could need.
    link = [] if sys.platform == "darwin" else ["-Wl,--strip-all"]
    return cxx, SANITIZERS if sanitized else link


def extensions(build: str) -> list:
    if WINDOWS and build == "auto":
        if missing := toolchain.missing_compiler():
            print(f"attn_plugins: building no binary: {missing}", file=sys.stderr)
            return []
        build = "cpu"
    if build == "auto" and not toolchain.gpu_visible():
        print(
            "attn_plugins: building the CPU binary only: no GPU is visible here "
            "(ATTN_PLUGINS_BUILD=cuda compiles the CUDA kernels all the same)",
            file=sys.stderr,
        )
        build = "cpu"
    if build != "cpu" and (home := toolchain.cuda_home()):
        os.environ["CUDA_HOME"] = home  # torch.utils.cpp_extension looks once, while it is imported
    try:
        import torch
        from torch.utils.cpp_extension import CppExtension, CUDAExtension
    except ImportError as error:
        raise SystemExit(
            f"attn_plugins: torch cannot be imported ({error}), so the binary cannot be compiled. Install "
            "torch >= 2.10 first or drop --no-build-isolation; for a slow build-free install set "
            "ATTN_PLUGINS_BUILD=none."
        ) from error
    if missing := toolchain.missing_compiler():
        raise SystemExit(
            f"attn_plugins: the binary cannot be compiled: {missing}. To install without it, with slower "
            "PyTorch implementations of every operator, set ATTN_PLUGINS_BUILD=none."
        )
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 10):
        raise SystemExit(
            f"attn_plugins: compiling needs torch >= 2.10, found {torch.__version__}. Drop "
            "--no-build-isolation (pip then compiles with a newer torch of its own), or set "
            "ATTN_PLUGINS_BUILD=none to install without the binary."
        )

    cxx, link = flags(os.environ.get("ATTN_PLUGINS_SANITIZE") == "1")
    headers = sources("*/*.*h")  # .h, .cuh
    common = dict(py_limited_api=True, depends=["setup.py", *headers])
    found = [
        CppExtension(
            "attn_plugins._C",
            ["csrc/schema.cpp", *sources("*/cpu*.cpp")],
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args={"cxx": cxx},
            extra_link_args=link,
            **common,
        )
    ]
    if build == "cpu":
        return found
    cuda_sources = sources("*/cuda*.cu")
    missing = toolchain.missing_for_cuda(torch.version.cuda) or (None if cuda_sources else "there are no CUDA sources")
    if missing:
        if build == "cuda":
            raise SystemExit(f"attn_plugins: ATTN_PLUGINS_BUILD=cuda, but {missing}.")
        print(f"attn_plugins: building the CPU binary only: {missing}", file=sys.stderr)
        return found
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    nvcc = [
        "-O3",
        "-std=c++20",
        "--expt-relaxed-constexpr",
        "-DUSE_CUDA",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
    ]
    # After the toolkit's own headers: torch's packages may be of another minor version than nvcc.
    nvcc += [part for folder in nvidia_headers() for part in ("-isystem", folder)]
    found.append(
        CUDAExtension(
            "attn_plugins._C_cuda",
            cuda_sources,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args={"cxx": [*cxx, "-DUSE_CUDA"], "nvcc": nvcc},
            extra_link_args=link,
            **common,
        )
    )
    return found


def build_arguments() -> dict:
    build = os.environ.get("ATTN_PLUGINS_BUILD", "auto")
    if build not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"ATTN_PLUGINS_BUILD must be auto, cpu, cuda or none, got {build!r}")
    # `sdist` and `egg_info` need no compiler and must not fail for lack of torch.
    compiling = {"build_ext", "bdist_wheel", "editable_wheel", "develop", "install", "build"} & set(sys.argv)
    if build == "none" or not compiling:
        return {}
    found = extensions(build)  # first: it says in words what is missing
    if not found:
        return {}
    from torch.utils.cpp_extension import BuildExtension

    return dict(
        ext_modules=found, cmdclass={"build_ext": BuildExtension}, options={"bdist_wheel": {"py_limited_api": "cp310"}}
    )


setup(
    version=version(),
    packages=[f"attn_plugins{name}" for name in PACKAGES],
    package_dir={"attn_plugins": "plugins"},
    package_data={"attn_plugins": ["py.typed", "install/requirements/*.txt"]},
    zip_safe=False,
    **build_arguments(),
)
