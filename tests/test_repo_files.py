"""Files around the code (workflow, hooks, image, citation) name its commands and versions."""

import json
import os
import re
from pathlib import Path

import pytest
import tomli
import yaml

from lab import reading
from tests.programs import PYTHON, finished

ROOT = Path(__file__).resolve().parent.parent


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pin(package: str) -> str:
    """Return the line of requirements-test.txt that pins a package."""
    return re.search(rf"^{package}==[\d.]+$", text("requirements-test.txt"), re.MULTILINE)[0]


def project() -> dict:
    return tomli.loads(text("pyproject.toml"))["project"]


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, its arguments) of each line of the Dockerfile."""
    lines = [line for line in text("Dockerfile").splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_workflow_runs_what_ci_runs():
    workflow = yaml.safe_load(text(".github/workflows/ci.yml"))
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run" and os.access(ROOT / ".ci" / "run", os.X_OK)
    assert job["timeout-minutes"] == 90 and "secrets" not in text(".github/workflows/ci.yml")
    (python,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    base = next(arguments for name, arguments in dockerfile() if name == "FROM")
    assert base.startswith(f"python:{python['python-version']}-slim "), (
        "the Dockerfile has the Python of CI"
    )


def test_pre_commit_has_the_ruff_of_ci():
    (local,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert [hook["entry"].split()[:2] for hook in local["hooks"]] == [
        ["ruff", "check"],
        ["ruff", "format"],
    ]
    for hook in local["hooks"]:
        assert hook["language"] == "python" and hook["additional_dependencies"] == [pin("ruff")]


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_has_nothing_to_say(command):
    done = finished(PYTHON, "-m", "ruff", *command, "--no-cache", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_runs_the_two_commands_of_the_readme():
    """The README's first block trains, its second one tests; the last stage is the default."""
    first, second, *_ = re.findall(r"```bash\n(.*?)\n```", text("README.md"), re.DOTALL)
    commands = [json.loads(arguments) for name, arguments in dockerfile() if name == "CMD"]
    assert commands == [[second], [first]]
    stages = [arguments.split(" AS ")[1] for name, arguments in dockerfile() if name == "FROM"]
    assert stages == ["base", "test", "train"]
    installed = [
        arguments.split()[-1]
        for name, arguments in dockerfile()
        if name == "RUN" and arguments.startswith("pip ")
    ]
    assert installed == ["requirements.txt", "requirements-test.txt"]
    # for checkpoints in a bucket, which the manifest of Kubernetes may ask for
    (pin,) = re.findall(r"obstore==[\d.]+", text("Dockerfile"))
    assert pin in text("requirements.txt")
    copied = [arguments.split()[-2] for name, arguments in dockerfile() if name == "COPY"]
    assert all((ROOT / name).exists() for name in copied)


def test_kubernetes_expects_the_image_of_the_dockerfile():
    manifest = text("tools/launch/kubernetes.yaml")
    (folder,) = [arguments for name, arguments in dockerfile() if name == "WORKDIR"]
    (user,) = {arguments for name, arguments in dockerfile() if name == "USER"}
    assert f"workingDir: {folder}\n" in manifest and f"fsGroup: {user}," in manifest


def test_an_image_has_all_that_git_has():
    listing = finished("git", "ls-files")
    if listing.returncode:
        pytest.skip("not a checkout of git, which knows the files")
    excluded = set(text(".dockerignore").splitlines())
    in_root = {name.split("/")[0] for name in listing.stdout.splitlines()}
    assert not in_root & excluded


def test_the_citation_and_the_badges_say_what_the_project_says():
    citation = yaml.safe_load(text("CITATION.cff"))
    assert (
        citation["version"] == project()["version"] and citation["license"] == project()["license"]
    )
    (author,) = citation["authors"]
    assert author["name"].lower() in text("LICENSE").lower()
    badges = re.findall(r"img\.shields\.io/badge/(\S+?)-blue", text("README.md"))
    oldest = project()["requires-python"].removeprefix(">=")
    assert badges == [f"license-{project()['license'].replace('-', '--')}", f"python-{oldest}%2B"]


@pytest.mark.slow
def test_the_types_of_the_reading_core_are_right():
    done = finished(PYTHON, "-m", "mypy", "--no-incremental", *reading.CORE)
    assert done.returncode == 0, done.stdout + done.stderr
