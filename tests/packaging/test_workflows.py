"""The workflows and issue forms refer only to existing files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job.get("steps", [])]


def test_commands_exist():
    for step in [step for workflow in WORKFLOWS for step in steps(workflow)]:
        assert ("run" in step) != ("uses" in step)
        command = step.get("run", "")
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert target in TARGETS
        if command.startswith(".ci/"):
            assert (ROOT / command).is_file()


def test_all_tests_run_weekly():
    """In a job of its own, which no push cancels and which has more time than that of a change."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = {step.get("run"): job for job in workflow["jobs"].values() for step in job["steps"]}
    change, weekly = jobs[".ci/run"], jobs["make test-all"]
    assert "cron" in workflow[True]["schedule"][0]  # YAML reads `on` as true
    assert weekly["if"] == "github.event_name == 'schedule'"
    assert "if" not in change
    assert change["timeout-minutes"] < weekly["timeout-minutes"] <= 360  # the most that a runner gives
    assert "github.event_name" in workflow["concurrency"]["group"]


def test_the_release_reads_the_version_as_setup_does():
    """The workflow's sed expression finds the version."""
    text = (ROOT / ".github/workflows/release.yml").read_text()
    pattern = re.search(r"s/(\^__version__ = .*?)/\\1/p", text)[1].replace(r"\(", "(").replace(r"\)", ")")
    source = (ROOT / "plugins/__init__.py").read_text()
    assert re.search(pattern, source, re.M)


def jobs(name: str) -> dict[str, dict]:
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"]


def test_wheels_of_every_platform_are_checked_before_a_release():
    """Each one by running every operator where it was built, and all of them by twine."""
    wheels = jobs("wheels")
    built = {entry["name"] for entry in wheels["wheel"]["strategy"]["matrix"]["include"]}
    assert built == {"linux-x86_64", "linux-aarch64", "macos-arm64"}
    assert {*wheels["check"]["needs"]} == {"wheel", "source"}  # whose artifacts are all that is published
    commands = [step.get("run", "") for job in wheels.values() for step in job["steps"]]
    assert any("twine check --strict dist/*" in command for command in commands)
    checks = {job: [s["run"] for s in wheels[job]["steps"] if "check_wheel" in s.get("run", "")] for job in wheels}
    assert checks["source"][0].endswith('check_wheel.py" none')
    assert checks["windows"][0].endswith("check_wheel.py none")
    assert 'test-command = "python {project}/tools/check_wheel.py cpu"' in (ROOT / "pyproject.toml").read_text()
    counted = next(command for command in commands if "wc -l" in command)
    assert f"= {len(built) + 1} " in counted


def test_a_trial_cannot_be_published():
    """What may fail on Windows leaves no artifact."""
    windows = jobs("wheels")["windows"]["steps"]
    assert any(step.get("continue-on-error") for step in windows)
    assert not [step for step in windows if "upload-artifact" in step.get("uses", "")]


def test_the_release_is_published_as_the_owners_page_says():
    """By trusted publishing, from one workflow and environment, which PyPI is told on the page."""
    release = jobs("release")
    publish = release["publish"]
    assert publish["needs"] == "wheels"
    assert release["wheels"]["uses"] == "./.github/workflows/wheels.yml"
    assert publish["permissions"]["id-token"] == "write"
    (upload,) = (step for step in publish["steps"] if "gh-action-pypi-publish" in step.get("uses", ""))
    assert "with" not in upload  # no token
    page = (ROOT / "docs/publishing.md").read_text()
    assert f"workflow `release.yml`, environment `{publish['environment']['name']}`" in page


def test_the_citation_has_the_version():
    version = re.search(r'^__version__ = "(.+)"', (ROOT / "plugins/__init__.py").read_text(), re.M)[1]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
