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


def test_continuous_integration_is_the_one_of_the_repository():
    assert ".ci/run" in [step.get("run") for step in steps(ROOT / ".github/workflows/ci.yml")]


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


def test_the_citation_has_the_version():
    version = re.search(r'^__version__ = "(.+)"', (ROOT / "plugins/__init__.py").read_text(), re.M)[1]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
