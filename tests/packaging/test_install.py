"""``python -m attn_plugins install``: detection, plans, and compilation and caching of wheels."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from attn_plugins.install import checks, command, packages, recipes, toolchain, wheels
from attn_plugins.install.packages import InstallError
from attn_plugins.install.recipes import Compiled, Package, Toolkit


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("ATTN_PLUGINS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def is_running(pid: int) -> bool:
    """Return False if the process has ended, even if no one has waited for it."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


class TestPackages:
    def test_pins_are_read_with_their_markers(self, tmp_path):
        file = tmp_path / "pins.txt"
        file.write_text("# versions\nSome_Package==1.2  # why\nother==3; python_version < '3'\nother==4\n")
        assert packages.read_pins([file]) == {"some-package": "1.2", "other": "4"}

    def test_a_range_among_pins_is_named(self, tmp_path):
        (tmp_path / "pins.txt").write_text("numpy>=1\n")
        with pytest.raises(InstallError, match=r"expected lines of the form name==version, found 'numpy>=1'"):
            packages.read_pins([tmp_path / "pins.txt"])

    def test_a_pinned_package_in_another_version_is_not_satisfied(self):
        pytest_package = Package("pytest>=1", "pytest")
        assert packages.is_satisfied(pytest_package, {})
        assert packages.is_satisfied(pytest_package, {"pytest": version("pytest")})
        assert not packages.is_satisfied(pytest_package, {"pytest": "1.0"})
        assert packages.differing({"pytest": "1.0", "no-such": "1.0"}) == {"pytest": "1.0"}

    def test_a_fork_that_brings_the_module_satisfies(self):
        assert packages.is_satisfied(Package("a-fork-of-pytest", "pytest"), {})
        assert not packages.is_satisfied(Package("no-such-package", "no_such_module"), {})

    def test_a_local_version_is_what_its_pin_asks_for(self, monkeypatch):
        monkeypatch.setattr(packages, "installed", lambda: {"torch": "2.13.0+cpu"})
        assert packages.differing({"torch": "2.13.0"}) == {}
        assert packages.differing({"torch": "2.12.0"}) == {"torch": "2.12.0"}

    def test_constraints_keep_what_is_there(self, tmp_path):
        lines = packages.write_constraints(tmp_path / "c.txt", {"pytest": "1.0"}).read_text().splitlines()
        assert "pytest==1.0" in lines
        assert f"packaging=={version('packaging')}" in lines

    def test_dependencies_that_are_left_out(self, monkeypatch):
        asked = [
            "opencv-python",
            "torchaudio>=0.8",
            "no-such-package>=2; python_version > '3'",
            "extra-one; extra == 'x'",
        ]
        monkeypatch.setattr(packages, "requires", lambda name: [*asked, "pytest<1", "packaging"])
        missing, conflicts = packages.dependencies([Package("pytest", "pytest")])
        assert missing == ["no-such-package>=2"]
        assert conflicts == [f"pytest requires pytest<1, but {version('pytest')} stays installed"]

    def test_extras_are_read_from_our_own_metadata(self, monkeypatch):
        if packages.version_of("attn-plugins") is None:
            pytest.skip("attn-plugins was not installed by pip")
        assert packages.missing_of_extra("test") == []
        there = {name: found for name, found in packages.installed().items() if name != "onnxscript"}
        monkeypatch.setattr(packages, "installed", lambda: there)
        assert packages.missing_of_extra("onnx") == ["onnxscript"]

    def test_an_interruption_ends_the_compilers(self, tmp_path):
        """Processes that pip has started must not continue behind the next attempt."""
        started = tmp_path / "started"
        code = (
            "import pathlib, signal; from attn_plugins.install import packages\n"
            "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"  # as the command does
            f"packages.run_logged(['sh', '-c', 'sh -c \"echo $$ > {started}; sleep 600\" & wait'], "
            f"pathlib.Path({str(tmp_path / 'log.txt')!r}))"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 600
        while not (started.is_file() and started.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.05)
        child = int(started.read_text())
        process.terminate()
        process.wait(timeout=600)
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(child)

    def test_a_failing_pip_is_shown_by_the_end_of_its_output(self, tmp_path):
        with pytest.raises(InstallError, match=r"(?s)failed with status.*no-such-command.*in full: "):
            packages.pip(["no-such-command"], tmp_path / "log.txt")


def test_the_search_for_pip_leaves_setuptools_importable():
    """setuptools' hook gives a process that imports pip the standard library's distutils, which setuptools refuses."""
    code = "from attn_plugins.install import packages; packages.need_pip(); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


class TestPlan:
    def test_torch_is_needed_first(self, monkeypatch, capsys):
        monkeypatch.setattr(packages, "version_of", lambda name: None)
        assert command.main(["timm"]) == 1
        assert "torch is not installed: first run `pip install torch`" in capsys.readouterr().err

    def test_a_torch_that_is_too_old_is_refused_before_anything_is_installed(self, monkeypatch, capsys):
        monkeypatch.setattr(packages, "version_of", lambda name: "2.3.1+cu121")
        monkeypatch.setattr(packages, "pip", lambda *arguments: pytest.fail("pip was called"))
        assert command.main(["mm"]) == 1
        assert "mm needs torch >= 2.4, but 2.3.1+cu121 is installed" in capsys.readouterr().err

    def test_a_dry_run_says_what_is_there_and_what_is_to_do(self, monkeypatch, capsys):
        compiled = Compiled("no-such-package", "no_such_module", check="mmcv", cpu_minutes=(8, 20))
        toolkit = Toolkit("a toolkit", ("mmcv",), (Package("pytest", "pytest"),), compiled=compiled)
        monkeypatch.setattr(command, "TOOLKITS", {"mm": toolkit})
        monkeypatch.setenv("MAX_JOBS", "4")
        assert command.main(["mm"], dry_run=True) == 0
        text = capsys.readouterr().out
        assert re.search(r"pytest +installed", text)
        assert re.search(
            rf"no_such_module +to compile against torch {re.escape(version('torch'))}: 2 to 5 minutes", text
        )

    def test_the_command_line(self):
        done = subprocess.run(
            [sys.executable, "-m", "attn_plugins", "install", "mmdet"], capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 2
        assert "invalid choice: 'mmdet'" in done.stderr

    def test_another_distribution_that_does_not_run_stays_and_is_named(self, monkeypatch, capsys):
        """Such a distribution of mmcv belongs to the user; the message says how to remove it."""
        compiled = Compiled("fork-of-pytest", "pytest", check="mmcv", cpu_minutes=(1, 2))
        monkeypatch.setattr(command, "TOOLKITS", {"mm": Toolkit("a toolkit", ("mmcv",), compiled=compiled)})
        monkeypatch.setattr(checks, "CHECKS", {"mmcv": checks.Check("pytest", "mm", lambda: "")})
        monkeypatch.setattr(checks, "run", lambda names: {n: checks.Result(False, "no operators") for n in names})
        assert command.main(["mm"]) == 1
        assert "pip uninstall -y pytest, then run this command again" in capsys.readouterr().err

    def test_a_cv2_that_does_not_import_is_named_with_what_mends_it(self, monkeypatch, tmp_path):
        (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(packages, "opencv_build", lambda builds: "opencv-python")
        with pytest.raises(InstallError, match=r"libGL.so.1.*pip uninstall -y opencv-python && pip install"):
            command.Installation({})._install_opencv()

    def test_every_toolkit_ends_with_known_checks(self):
        for toolkit in recipes.TOOLKITS.values():
            assert toolkit.checks or toolkit.extra
            assert set(toolkit.checks) <= set(checks.CHECKS)
            assert toolkit.compiled is None or toolkit.compiled.check in toolkit.checks
        assert {check.toolkit for check in checks.CHECKS.values()} == {"mm", "timm", "fairseq"}


SETUP = """
import os
from setuptools import Extension, setup
setup(name="tiny-package", version="1.5",
      ext_modules=[Extension("tiny_module", ["a.cpp", "b.cpp"], extra_compile_args=["-std=c++17"])])
"""
SOURCE = """
#include <Python.h>
{check}
int answer();
static PyObject *call(PyObject *, PyObject *) {{ return PyLong_FromLong(answer()); }}
static PyMethodDef methods[] = {{{{"answer", call, METH_NOARGS, ""}}, {{nullptr, nullptr, 0, nullptr}}}};
static PyModuleDef module = {{PyModuleDef_HEAD_INIT, "tiny_module", nullptr, -1, methods}};
PyMODINIT_FUNC PyInit_tiny_module() {{ return PyModule_Create(&module); }}
"""
NEEDS_CXX20 = 'static_assert(__cplusplus > 201703L, "C++20 or later");'


@pytest.mark.skipif(toolchain.missing_compiler() is not None, reason="no C++ compiler")
class TestWheels:
    """A package of two source files that asks for C++17, as mmcv does."""

    package = Compiled("tiny-package>=1.0", "tiny_module", check="mmcv", cpu_minutes=(1, 2))

    @pytest.fixture
    def index(self, monkeypatch, tmp_path):
        """Return a folder from which pip takes the source; build tools come from this environment."""
        folder = tmp_path / "index"
        folder.mkdir()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        monkeypatch.setattr(wheels, "_build_tools", lambda package, log: Path(sysconfig.get_path("purelib")))

        def publish(answer: str = "int answer() { return 42; }", check: str = "") -> None:
            source = tmp_path / "tiny_package-1.5"
            source.mkdir(exist_ok=True)
            for name, text in {"setup.py": SETUP, "a.cpp": SOURCE.format(check=check), "b.cpp": answer}.items():
                (source / name).write_text(text)
            (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.5\n")
            with tarfile.open(folder / "tiny_package-1.5.tar.gz", "w:gz") as archive:
                archive.add(source, source.name)

        return publish

    def build(self, tmp_path) -> Path:
        constraints = tmp_path / "constraints.txt"
        constraints.write_text("tiny-package==1.5\n")
        return wheels.build_wheel(wheels.Target(self.package, cuda=False), constraints, lambda line: None)

    def test_a_wheel_is_compiled_once_and_works(self, index, tmp_path, monkeypatch):
        index()
        wheel = self.build(tmp_path)
        shutil.unpack_archive(wheel, tmp_path / "site", "zip")
        code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import tiny_module as t; print(t.answer())"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "42\n"
        monkeypatch.setattr(wheels, "pip", lambda *arguments: pytest.fail("pip was called again"))
        assert self.build(tmp_path) == wheel
        assert {file.name for file in wheel.parent.iterdir()} == {wheel.name, "c++", "lock", "log.txt"}

    def test_wheels_are_kept_by_torch(self, index, tmp_path, monkeypatch):
        index()
        first = self.build(tmp_path)
        real = wheels.version
        monkeypatch.setattr(wheels, "version", lambda name: "2.9.0" if name == "torch" else real(name))
        assert wheels.Target(self.package, cuda=False).wheel() is None
        assert self.build(tmp_path) != first

    @pytest.mark.parametrize("torch, works", [("2.11.0", False), ("2.12.0", True), ("2.15.0+cu132", True)])
    def test_newer_torch_gets_cxx20(self, index, tmp_path, monkeypatch, torch, works):
        """From 2.12 on, torch's headers need C++20, although the package asks for 17."""
        if not toolchain.compiles_cxx20():
            pytest.skip("the compiler knows no C++20")
        index(check=NEEDS_CXX20)
        real = wheels.version
        monkeypatch.setattr(wheels, "version", lambda name: torch if name == "torch" else real(name))
        if works:
            assert self.build(tmp_path).is_file()
        else:
            with pytest.raises(InstallError, match=r"(?s)C\+\+20 or later"):
                self.build(tmp_path)

    def test_a_compiler_without_cxx20_is_named(self, index, tmp_path, monkeypatch):
        monkeypatch.setattr(wheels.toolchain, "compiles_cxx20", lambda: False)
        real = wheels.version
        monkeypatch.setattr(wheels, "version", lambda name: "2.15.0" if name == "torch" else real(name))
        with pytest.raises(InstallError, match=r"needs a C\+\+20 compiler.*set CXX to GCC >= 11"):
            self.build(tmp_path)

    def test_a_missing_compiler_is_named_before_anything_is_fetched(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setattr(wheels, "pip", lambda *arguments: pytest.fail("pip was called"))
        with pytest.raises(InstallError, match="'no-such-compiler' is not on the PATH"):
            self.build(tmp_path)

    def test_an_interrupted_compilation_resumes_with_its_objects(self, index, tmp_path):
        """A failure keeps the sources, so that a second call continues where the first one ended."""
        index(answer="#error not yet")
        with pytest.raises(InstallError, match="not yet"):
            self.build(tmp_path)
        folder = wheels.Target(self.package, cuda=False).folder
        (source,) = (folder / "source").iterdir()
        (source / "b.cpp").write_text("int answer() { return 43; }")
        assert list(source.glob("build/**/a.o"))
        seen = []
        original, wheels.pip = wheels.pip, lambda *arguments: seen.append(arguments) or original(*arguments)
        try:
            wheel = self.build(tmp_path)
        finally:
            wheels.pip = original
        assert len(seen) == 1, "only the compilation: nothing is downloaded again"
        assert wheel.is_file()
        assert not (folder / "source").exists()

    def test_a_wheel_that_does_not_run_is_forgotten(self, index, tmp_path):
        index()
        wheel = self.build(tmp_path)
        wheels.forget(wheels.Target(self.package, cuda=False))
        assert not wheel.exists()


def test_cuda_is_compiled_where_asked_for(monkeypatch):
    variables = recipes.TOOLKITS["mm"].compiled.environment
    monkeypatch.setenv("FORCE_CUDA", "1")
    assert wheels.compiles_cuda(variables)
    monkeypatch.setenv("FORCE_CUDA", "0")
    assert not wheels.compiles_cuda(variables)
    monkeypatch.delenv("FORCE_CUDA")
    assert not wheels.compiles_cuda({}), "fairseq has no CUDA operators that we need"


@pytest.mark.slow
def test_what_is_there_is_left_alone(capsys):
    """The tests' environment has everything installed, so only the doctor runs."""
    pytest.importorskip("mmcv")
    pytest.importorskip("fairseq")
    before = packages.installed()
    assert command.main(["timm", "mm", "fairseq"]) == 0
    text = capsys.readouterr().out
    assert "done in" not in text
    assert text.endswith("all is well\n")
    assert packages.installed() == before
