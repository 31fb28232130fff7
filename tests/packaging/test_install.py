"""``python -m attn_plugins install``: plans, installed packages, and compilation and caching of wheels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from attn_plugins.install import checks, command, packages, recipes, toolchain, wheels
from attn_plugins.install.checks import Result
from attn_plugins.install.packages import Environment, InstallError
from attn_plugins.install.recipes import Native, Toolkit


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("ATTN_PLUGINS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch) -> list[str]:
    """Collect pip commands instead of running them."""
    commands: list[str] = []
    monkeypatch.setattr(
        Environment, "pip", lambda self, text, requirements, *rest: commands.append(f"{text} {' '.join(requirements)}")
    )
    return commands


def is_running(pid: int) -> bool:
    """Return False if the process has ended, even if no one has waited for it."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


class TestEnvironment:
    def environment(self, tmp_path, pins: str = "") -> Environment:
        (tmp_path / "pins.txt").write_text(pins)
        return Environment([tmp_path / "pins.txt"])

    def test_pins_are_read_with_their_markers(self, tmp_path):
        pins = "# versions\nSome_Package==1.2  # why\nother==3; python_version < '3'\nother==4\n"
        assert self.environment(tmp_path, pins).pins == {"some-package": "==1.2", "other": "==4"}

    @pytest.mark.parametrize(
        "pins, there, requirement, has",
        [
            ("", None, ["pytest>=1"], True),
            ("", None, ["pytest>=99999"], True),  # installed packages keep their versions
            (f"pytest=={version('pytest')}", None, ["pytest>=1"], True),
            ("pytest==1.0", None, ["pytest>=1"], False),
            ("torch==2.13.0", {"torch": "2.13.0+cpu"}, ["torch"], True),
            ("torch==2.12.0", {"torch": "2.13.0+cpu"}, ["torch"], False),
            ("", None, ["a-fork-of-pytest", "pytest"], True),  # which provides the module
            ("", None, ["no-such-package", "no_such_module"], False),
            ("", None, ["pytest", "no_such_module"], False),  # from 82 on, setuptools has no pkg_resources
            *(("", {"torch": "2.11.0", build: "4.12"}, [recipes.OPENCV], True) for build in recipes.OPENCV_BUILDS),
        ],
    )
    def test_what_need_not_be_installed(self, tmp_path, monkeypatch, pins, there, requirement, has):
        if there is not None:
            monkeypatch.setattr(packages, "installed", lambda: there)
        assert self.environment(tmp_path, pins).has(*requirement) == has

    @pytest.mark.parametrize(
        "text, words", [(None, "No such file"), ("-r other.txt", "-r other.txt"), ("six=1", "six=1")]
    )
    def test_a_file_that_holds_no_pins(self, tmp_path, text, words):
        file = tmp_path / "pins.txt"
        if text is not None:
            file.write_text(text)
        with pytest.raises(
            InstallError, match=f"(?s)--constraint must be a file of lines name==version, got {file}.*{words}"
        ):
            Environment([file])

    def test_pip_keeps_every_other_version(self, tmp_path, monkeypatch):
        there = {"torch": "2.11.0", "asked": "2.0", "six": "1.0", "odd": "unknown"}
        monkeypatch.setattr(packages, "installed", lambda: there)
        environment = self.environment(tmp_path, "six==1.16")
        written = tmp_path / "constraints.txt"
        pip = "import shutil, sys; shutil.copy(sys.argv[sys.argv.index('-c') + 1], 'WRITTEN')"
        (tmp_path / "pip.py").write_text(pip.replace("WRITTEN", str(written)))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        environment.pip("install", ["asked>=3"])
        assert written.read_text().split() == ["six==1.16", "torch==2.11.0"]
        for path in ("asked-3.0-cp311-cp311-linux_x86_64.whl", "asked-3.0"):  # a wheel, a source folder
            environment.pip("install", [str(tmp_path / path)])
            assert written.read_text().split() == ["six==1.16", "torch==2.11.0"]

    def test_extras_are_read_from_our_own_metadata(self):
        if "attn-plugins" not in packages.installed():
            pytest.skip("attn-plugins was not installed by pip")
        assert packages.requirements_of("onnx") == ["onnx", "onnxscript", "onnxruntime"]

    def test_an_interruption_ends_the_compilers(self, tmp_path):
        """Processes that pip has started must not continue behind the next attempt."""
        started = tmp_path / "started"
        (tmp_path / "pip.py").write_text(
            f"import subprocess; subprocess.run(['sh', '-c', 'echo $$ > {started}; exec sleep 600'])"
        )
        code = (
            "import signal; from attn_plugins.install.packages import Environment\n"
            "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"  # as the command does
            "Environment().pip('install', [])"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, cwd=tmp_path)
        deadline = time.monotonic() + 600
        while not (started.is_file() and started.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.05)
        child = int(started.read_text())
        process.terminate()
        process.wait(timeout=600)
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(child)

    def test_a_failing_pip_is_shown_by_the_end_of_its_output(self):
        with pytest.raises(InstallError, match=r"(?s)failed with status.*no-such-command.*in full: "):
            Environment().pip("no-such-command", [])


def test_nothing_imports_pip():
    """setuptools' hook gives a process that imports pip the standard library's distutils, which setuptools refuses."""
    code = "from attn_plugins.install import command; command.main(['timm'], dry_run=True); import setuptools, sys"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'pip' not in sys.modules"], check=True, timeout=600)


class TestPlan:
    def test_torch_is_needed_first(self, monkeypatch, capsys):
        monkeypatch.setattr(packages, "installed", dict)
        assert command.main(["timm"]) == 1
        assert "torch is not installed: first run `pip install torch`" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "torch, compile, oldest", [("2.3.1+cu121", True, "2.4"), ("2.3.1", False, "2.5"), ("2.4.1", False, "2.5")]
    )
    def test_a_torch_that_is_too_old_is_refused(self, monkeypatch, capsys, pip, torch, compile, oldest):
        """torch 2.5 is the first that loads the stand-in by itself."""
        monkeypatch.setattr(packages, "installed", lambda: {"torch": torch, "numpy": "2.0"})
        monkeypatch.setattr(command, "providers", lambda module: set())
        monkeypatch.setattr(packages, "is_there", lambda module: False)
        monkeypatch.setattr(command, "is_there", lambda module: False)
        assert command.main(["mm"], compile=compile) == 1
        assert f"torch >= {oldest} is needed, but {torch} is installed" in capsys.readouterr().err
        assert pip == []

    def test_a_dry_run_prints_what_will_be_done(self, monkeypatch, capsys, pip):
        native = Native("no-such-package", "no_such_module", (8, 20))
        toolkit = Toolkit("a toolkit", libraries=("pytest", "no-such-library"), native=native)
        monkeypatch.setattr(command, "TOOLKITS", {"timm": toolkit})
        monkeypatch.setenv("MAX_JOBS", "4")
        assert command.main(["timm"], dry_run=True) == 0
        text = capsys.readouterr().out
        assert "to install: no-such-library; other packages" in text
        assert f"no_such_module: not installed; to compile against torch {version('torch')}: 2 to 5 minutes" in text
        assert pip == []

    @pytest.mark.parametrize(
        "options, error",
        [(["mmdet"], "invalid choice: 'mmdet'"), (["mm", "--compile", "--openmmlab"], "not allowed with")],
    )
    def test_the_command_line(self, options, error):
        arguments = [sys.executable, "-m", "attn_plugins", "install", *options]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 2
        assert error in done.stderr


class TestPackageLines:
    """The onedl forks and OpenMMLab's own packages have the same modules."""

    @pytest.fixture
    def there(self, monkeypatch):
        def install(*names: str, binary: bool = False) -> None:
            monkeypatch.setattr(command, "providers", lambda module: set(names))
            monkeypatch.setattr(packages, "has_extension", lambda module: binary)

        return install

    def test_what_is_asked_for_in_an_empty_environment(self, there):
        there()
        assert command.mm_toolkit(False, openmmlab=False) is recipes.ONEDL
        assert command.mm_toolkit(False, openmmlab=True) is recipes.OPENMMLAB

    def test_openmmlabs_packages_are_completed(self, there):
        there("mmengine")
        assert command.mm_toolkit(False, openmmlab=False) is recipes.OPENMMLAB

    def test_openmmlabs_compiled_mmcv_stays(self, there):
        there("mmcv", "mmengine", binary=True)
        assert command.mm_toolkit(compile=True, openmmlab=False) is recipes.OPENMMLAB

    @pytest.mark.parametrize(
        "names, compile, openmmlab, message",
        [
            (["onedl-mmcv"], False, True, "onedl forks are installed. Keep them without --openmmlab, or `pip uninst"),
            (["onedl-mmcv", "mmdet"], False, False, "installed together: `pip uninstall -y mmdet`"),
            (["mmcv-lite"], True, False, "--compile compiles onedl-mmcv, but OpenMMLab's own packages are installed"),
        ],
    )
    def test_a_mixture_is_refused_with_what_to_do(self, there, names, compile, openmmlab, message):
        there(*names)
        with pytest.raises(InstallError, match=message):
            command.mm_toolkit(compile, openmmlab)


def test_options_of_mm_need_mm(capsys):
    assert command.main(["timm"], compile=True) == 1
    assert "--compile and --openmmlab are options of mm, got timm" in capsys.readouterr().err


class TestNative:
    """An mmcv is kept, installed without its extension or compiled, according to its state."""

    @pytest.fixture
    def install(self, monkeypatch, pip, tmp_path):
        """Install a toolkit whose mmcv is in a state; return pip's commands."""

        def run(state: str, compile: bool, *, binary: bool = False, provider: str = "onedl-mmcv") -> list[str]:
            answers = iter([*([] if state == "absent" else [Result(state == "works", "mmcv 2: undefined symbol")])])
            monkeypatch.setattr(checks, "run", lambda names: {"mmcv": next(answers, Result(True, "runs"))})
            monkeypatch.setattr(Environment, "has", lambda self, requirement, module=None: state != "absent")
            monkeypatch.setattr(command, "is_there", lambda module: state != "absent")
            monkeypatch.setattr(command, "providers", lambda module: {provider})
            monkeypatch.setattr(packages, "has_extension", lambda module: binary)
            monkeypatch.setattr(wheels.Target, "build", lambda self, environment: tmp_path / "compiled.whl")
            native = Native("onedl-mmcv>=2", "mmcv", optional=True)
            command.Installation(Environment(), compile).install(Toolkit("", native=native))
            return pip

        return run

    ISOLATED = "install --no-deps --force-reinstall --no-cache-dir --no-binary onedl-mmcv onedl-mmcv>=2"

    @pytest.mark.parametrize(
        "state, compile, binary, done",
        [
            ("works", False, True, None),
            ("works", False, False, None),
            ("works", True, True, None),
            ("absent", False, False, "without torch"),
            ("broken", False, True, "without torch"),  # removes an extension that does not run
            ("absent", True, False, "compiled"),
            ("works", True, False, "compiled"),
            ("broken", True, True, "compiled"),
        ],
    )
    def test_what_is_done(self, install, tmp_path, state, compile, binary, done):
        compiled = f"install --no-deps --force-reinstall {tmp_path / 'compiled.whl'}"
        commands = {None: [], "without torch": [self.ISOLATED], "compiled": [compiled]}
        assert install(state, compile=compile, binary=binary) == commands[done]

    def test_a_distribution_of_others_is_not_replaced(self, install, pip):
        with pytest.raises(InstallError, match=r"undefined symbol. To replace it .* `pip uninstall -y mmcv`"):
            install("broken", compile=False, provider="mmcv")
        assert pip == []

    def test_a_cv2_that_does_not_import_is_named_before_mmcv_is_replaced(self, monkeypatch, tmp_path, pip):
        (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(command, "providers", lambda module: {"opencv-python"})
        monkeypatch.setattr(Environment, "has", lambda *arguments: True)
        with pytest.raises(InstallError, match=r"libGL.so.1.*pip uninstall -y opencv-python && pip install"):
            command.Installation(Environment()).install(recipes.ONEDL)
        assert pip == []

    def test_one_that_still_does_not_run_is_an_error(self, install, monkeypatch):
        monkeypatch.setattr(command.Installation, "_state", lambda self, native: Result(False, ""))
        with pytest.raises(InstallError, match="was installed but does not run"):
            install("broken", compile=False)


@pytest.mark.parametrize("toolkit", [recipes.ONEDL, recipes.OPENMMLAB, recipes.FAIRSEQ], ids=lambda t: t.about)
def test_dependencies_of_packages_installed_without_them_are_listed(toolkit):
    listed = {canonicalize_name(Requirement(text).name) for text in (*toolkit.libraries, *toolkit.packages)}
    for text in (*toolkit.packages, toolkit.native.requirement):
        name = Requirement(text).name
        try:
            stated = map(Requirement, requires(name) or [])
        except PackageNotFoundError:
            continue
        needed = {canonicalize_name(r.name) for r in stated if not r.marker or r.marker.evaluate({"extra": ""})}
        assert needed - listed - recipes.LEFT_OUT <= {"torch", "onedl-mmengine", "mmengine", "opencv-python"}, name


def test_every_toolkit_ends_with_known_checks():
    for toolkit in (*recipes.TOOLKITS.values(), recipes.OPENMMLAB):
        assert toolkit.checks or toolkit.extra
        assert set(toolkit.checks) <= set(checks.CHECKS)
        assert toolkit.native is None or toolkit.native.module in toolkit.checks
    assert {checks.install_command(name).split()[-1] for name in checks.CHECKS} == {"mm", "timm", "fairseq"}


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

    package = Native("tiny-package>=1.0", "tiny_module", configuration="[build_ext]\nparallel = {jobs}\n")

    @pytest.fixture
    def index(self, monkeypatch, tmp_path):
        """Return a folder from which pip takes the source; build tools come from this environment."""
        folder = tmp_path / "index"
        folder.mkdir()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        monkeypatch.setattr(wheels, "_build_tools", lambda environment: Path(sysconfig.get_path("purelib")))

        def publish(answer: str = "int answer() { return 42; }", check: str = "") -> None:
            source = tmp_path / "tiny_package-1.5"
            source.mkdir(exist_ok=True)
            for name, text in {"setup.py": SETUP, "a.cpp": SOURCE.format(check=check), "b.cpp": answer}.items():
                (source / name).write_text(text)
            (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.5\n")
            with tarfile.open(folder / "tiny_package-1.5.tar.gz", "w:gz") as archive:
                archive.add(source, source.name)

        return publish

    def build(self) -> Path:
        return wheels.Target(self.package, cuda=False).build(Environment())

    def test_a_wheel_is_compiled_once_and_works(self, index, tmp_path, monkeypatch):
        index()
        unfit = wheels.Target(self.package, cuda=False).folder / "source" / "tiny_package-0.9"
        unfit.mkdir(parents=True)  # left by the compilation of a version that is not allowed
        wheel = self.build()
        shutil.unpack_archive(wheel, tmp_path / "site", "zip")
        code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import tiny_module as t; print(t.answer())"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "42\n"
        monkeypatch.setattr(Environment, "pip", lambda *arguments: pytest.fail("pip was called again"))
        assert self.build() == wheel
        assert {file.name for file in wheel.parent.iterdir()} == {wheel.name, "c++", "distutils.cfg", "lock"}

    def test_a_pin_decides_which_wheel_fits(self, tmp_path):
        target = wheels.Target(self.package, cuda=False)
        target.folder.mkdir(parents=True)
        wheel = target.folder / "tiny_package-1.5-cp311-cp311-linux_x86_64.whl"
        wheel.touch()
        pins = tmp_path / "pins.txt"
        for pin, expected in (("1.5", wheel), ("1.6", None)):
            pins.write_text(f"tiny_package=={pin}")
            assert target.cached(Environment([pins])) == expected

    def test_wheels_are_kept_by_torch(self, monkeypatch):
        folder, real = wheels.Target(self.package, cuda=False).folder, wheels.version
        monkeypatch.setattr(wheels, "version", lambda name: "2.9.0" if name == "torch" else real(name))
        assert wheels.Target(self.package, cuda=False).folder != folder

    @pytest.mark.parametrize(
        "torch, works", [("2.11.0", False), pytest.param("2.12.0+cu132", True, marks=pytest.mark.slow)]
    )
    def test_newer_torch_gets_cxx20(self, index, tmp_path, monkeypatch, torch, works):
        """From 2.12 on, torch's headers need C++20, although the package asks for 17."""
        index(check=NEEDS_CXX20)
        real = wheels.version
        monkeypatch.setattr(wheels, "version", lambda name: torch if name == "torch" else real(name))
        if works:
            assert self.build().is_file()
        else:
            with pytest.raises(InstallError, match=r"(?s)C\+\+20 or later"):
                self.build()

    def test_a_missing_compiler_is_named_before_anything_is_fetched(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setattr(Environment, "pip", lambda *arguments: pytest.fail("pip was called"))
        with pytest.raises(InstallError, match="'no-such-compiler' is not on the PATH"):
            self.build()

    @pytest.mark.slow
    def test_an_interrupted_compilation_resumes_with_its_objects(self, index, monkeypatch):
        """A failure keeps the sources, so that a second call continues where the first one ended."""
        index(answer="#error not yet")
        with pytest.raises(InstallError, match="not yet"):
            self.build()
        folder = wheels.Target(self.package, cuda=False).folder
        (source,) = (folder / "source").iterdir()
        (source / "b.cpp").write_text("int answer() { return 43; }")
        assert list(source.glob("build/**/a.o"))
        commands, run = [], Environment.pip
        monkeypatch.setattr(
            Environment, "pip", lambda self, text, *rest: commands.append(text.split()[0]) or run(self, text, *rest)
        )
        wheel = self.build()
        assert commands == ["wheel"], "nothing is downloaded again"
        assert wheel.is_file()
        assert not (folder / "source").exists()

    @pytest.mark.slow
    def test_a_cached_wheel_that_does_not_run_is_compiled_again(self, index, monkeypatch, capsys):
        index()
        wheel = self.build()
        wheel.write_text("not a wheel")
        build, built = wheels.Target.build, []
        monkeypatch.setattr(wheels.Target, "build", lambda self, e: built.append(build(self, e)) or built[-1])
        run = Environment.pip
        monkeypatch.setattr(
            Environment, "pip", lambda self, text, *rest: run(self, text, *rest) if "install" not in text else None
        )
        monkeypatch.setattr(checks, "run", lambda names: {"tiny_module": Result(False, "")})
        command.Installation(Environment())._install_wheel(wheels.Target(self.package, cuda=False))
        assert built == [wheel, wheel]
        assert wheel.read_bytes()[:2] == b"PK"

    def test_cuda_home_is_hidden_from_packages_without_cuda(self, monkeypatch, tmp_path):
        """fairseq would compile sources that its source distribution lacks."""
        monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
        target = wheels.Target(self.package, cuda=False)
        target.folder.mkdir(parents=True)
        assert target._variables(tmp_path)["CUDA_HOME"] is None


def test_cuda_is_compiled_where_asked_for(monkeypatch):
    mmcv = recipes.ONEDL.native
    monkeypatch.setenv("FORCE_CUDA", "1")
    assert wheels.compiles_cuda(mmcv)
    monkeypatch.setenv("FORCE_CUDA", "0")
    assert not wheels.compiles_cuda(mmcv)
    monkeypatch.delenv("FORCE_CUDA")
    assert not wheels.compiles_cuda(recipes.FAIRSEQ.native)


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
