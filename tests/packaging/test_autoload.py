"""The hooks of attn_plugins.autoload and import_hooks, each in a fresh interpreter."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
    not any(
        e.value == "attn_plugins_autoload:activate" for e in importlib.metadata.entry_points(group="torch.backends")
    ),
    reason="attn_plugins is not installed, so torch cannot know its entry point",
)
needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")

# A replacement of timm in which our adapter cannot register.
ODD_TIMM = {"timm/__init__.py": "import torch\nfrom . import models\nname = 'odd'", "timm/models.py": "x = 1"}
KNOWN = "print(timm.is_model('attn_resnet50'))"
LOADED = "print('attn_plugins.timm' in sys.modules)"
FINDERS = "print(*(type(f).__name__ for f in sys.meta_path if type(f).__module__.startswith('attn_plugins')))"


@needs_timm
def test_timm_knows_our_models(python):
    """Importing any part of timm imports timm first."""
    result = python(f"import sys\nimport timm.layers\n{LOADED}\nimport timm\n{KNOWN}")
    assert result.stdout.split() == ["True", "True"]
    assert "attn_plugins" not in result.stderr


def test_switched_off(python):
    result = python(f"import sys, timm\n{LOADED}\n{FINDERS}", packages=ODD_TIMM, ATTN_PLUGINS_AUTOLOAD="0")
    assert result.stdout.splitlines() == ["False", ""]
    assert result.stderr == ""


@pytest.mark.slow
@needs_timm
def test_an_import_registers_what_was_switched_off(python):
    result = python(f"import timm, attn_plugins.timm\n{KNOWN}", ATTN_PLUGINS_AUTOLOAD="0")
    assert result.stdout.split() == ["True"]


def test_torch_alone_loads_nothing(python):
    """Every ``import torch`` pays for it: three small modules. Activating again changes nothing.

    The finder leaves when nothing waits for a module.
    """
    code = (
        "import sys, torch\n"
        "print([m for m in sys.modules if m.startswith('attn_plugins')])\n"
        "print([m for m in ('timm', 'fairseq', 'mmengine', 'mmcv') if m in sys.modules])\n"
        "import attn_plugins.autoload as a, attn_plugins.import_hooks as h\n"
        "a.activate()\nprint(sys.meta_path.count(h._finder))\n"
        "h._finder.waiting.clear()\nh.after_import('odd.inner', lambda module: print(module.value))\nimport odd.inner\n"
        "print(sys.meta_path.count(h._finder))"
    )
    packages = {"odd/__init__.py": "", "odd/inner.py": "value = 7"}
    assert python(code, packages=packages).stdout.splitlines() == [
        "['attn_plugins_autoload', 'attn_plugins', 'attn_plugins.import_hooks', 'attn_plugins.autoload']",
        "[]",
        "1",
        "7",
        "0",
    ]


def test_a_failing_adapter_warns_once_and_breaks_nothing(python):
    """Modules keep their loader."""
    code = (
        "import importlib.machinery, inspect, torch, timm, timm.models as m\n"
        "loader = m.__spec__.loader\n"
        "print(timm.name, type(loader) is importlib.machinery.SourceFileLoader, loader is m.__loader__)\n"
        "print('exec_module' in vars(m.__loader__), inspect.getsource(m).strip())"
    )
    result = python(code, packages=ODD_TIMM)
    assert result.stdout.splitlines() == ["odd True True", "False x = 1"]
    assert result.stderr.count("attn_plugins is not available in timm") == 1


@pytest.mark.slow
def test_a_failing_toolkit_fails_as_without_us(python):
    broken = {"timm/__init__.py": "import torch\nfrom . import models", "timm/models.py": "raise KeyError('theirs')"}
    code = f"import sys, torch\ntry:\n    import timm\nexcept KeyError as e: print(e)\n{LOADED}\n{FINDERS}"
    expected = ["'theirs'", "False", "_PostImportFinder _ExtensionFinder"]
    assert python(code, packages=broken).stdout.splitlines() == expected


def test_after_import(python):
    """Callbacks run once, in the order of the calls, immediately if the module is loaded; failures propagate."""
    code = """
import attn_plugins.import_hooks as hooks
for action in (print, lambda module: print(module.value), print):
    hooks.after_import("odd.inner", action)
import odd.inner, odd.inner
hooks.after_import("odd.inner", lambda module: print("again"))
def fail(module):
    raise KeyError("ours")
hooks.after_import("odd.other", fail)
try:
    import odd.other
except KeyError as error:
    print(error)
hooks.after_import("odd.missing", print)
try:
    import odd.missing
except ModuleNotFoundError as error:
    print(error.name)
"""
    packages = {"odd/__init__.py": "", "odd/inner.py": "value = 7", "odd/other.py": ""}
    lines = python(code, packages=packages, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.splitlines()
    assert lines[0].startswith("<module 'odd.inner'")
    assert lines[1:] == ["7", "again", "'ours'", "odd.missing"]


class TestMmcvExtension:
    """``mmcv._ext`` is the compiled one, else :mod:`attn_plugins.mmcv_ext`."""

    packages = {"mmcv/__init__.py": "", "torchvision/__init__.py": ""}
    show = "import mmcv._ext\nprint(mmcv._ext.nms)"

    def test_stands_in_where_there_is_none(self, python):
        pytest.importorskip("torchvision")
        show = "print(e.get_compiler_version(), e.nms.__module__, e.__name__, sep='\\n')"
        code = f"import torch, mmcv, mmcv._ext as e\n{show}"
        result = python(code, packages={"mmcv/__init__.py": ""})
        expected = ["not compiled: attn_plugins stands in", "attn_plugins.mmcv_ext.boxes", "mmcv._ext"]
        assert result.stdout.splitlines() == expected

    @pytest.mark.slow
    def test_a_compiled_one_takes_precedence(self, python):
        result = python(
            f"import torch, mmcv\n{self.show}", packages={**self.packages, "mmcv/_ext.py": "nms = 'compiled'"}
        )
        assert result.stdout.split() == ["compiled"]

    @pytest.mark.slow
    def test_a_broken_one_is_not_hidden(self, python):
        broken = {"mmcv/_ext.py": "raise ImportError('undefined symbol')"}
        result = python(f"import torch, mmcv\n{self.show}", packages={**self.packages, **broken}, check=False)
        assert result.stderr.splitlines()[-1] == "ImportError: undefined symbol"

    @pytest.mark.slow
    def test_absent_when_switched_off_or_without_torchvision(self, python):
        code = f"import sys, torch, mmcv\nsys.modules['torchvision'] = None\n{self.show}"
        for variables in ({"ATTN_PLUGINS_AUTOLOAD": "0"}, {}):
            result = python(code, packages={"mmcv/__init__.py": ""}, check=False, **variables)
            assert result.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'mmcv._ext'"


class TestMmengine:
    """``_base_ = 'mmseg::...'`` looks for mmsegmentation under this name."""

    utils = "MODULE2PACKAGE = {'mmseg': 'mmsegmentation', 'mmdet': 'mmdet'}"
    packages = {"mmengine/__init__.py": "", "mmengine/config/__init__.py": "", "mmengine/config/utils.py": utils}
    mmseg = {"mmseg/__init__.py": "raise ImportError('looking for mmseg must not import it')"}
    distribution = {"mmsegmentation-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: mmsegmentation\nVersion: 1\n"}
    show = "from mmengine.config.utils import MODULE2PACKAGE as m\nprint(m['mmseg'], m['mmdet'])"

    @pytest.mark.slow
    def test_repaired_where_the_distribution_is_missing(self, python):
        """Where torch comes first, :meth:`test_a_stock_config_resolves` shows it."""
        result = python(f"import mmengine.config.utils, torch\n{self.show}", packages={**self.packages, **self.mmseg})
        assert result.stdout.split() == ["mmseg", "mmdet"]

    @pytest.mark.slow
    def test_left_alone_where_the_distribution_is_there_or_without_mmseg(self, python):
        without = "import sys, torch; sys.modules['mmseg'] = None"
        for code, there in ((without, {}), ("import torch", {**self.mmseg, **self.distribution})):
            result = python(f"{code}\n{self.show}", packages={**self.packages, **there})
            assert result.stdout.split() == ["mmsegmentation", "mmdet"]
            assert result.stderr == ""

    def test_a_stock_config_resolves(self, python):
        pytest.importorskip("mmseg")
        code = (
            "import torch\nfrom mmengine.config import Config\n"
            "name = 'pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py'\n"
            "print(Config._get_cfg_path('mmseg::' + name, 'x.py')[0])"
        )
        assert "pspnet_r50-d8_4xb2-40k" in python(code).stdout
