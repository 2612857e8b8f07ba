"""Checks the files around the code against what they name: workflow, templates, images, versions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import optimus
from optimus.ir.plan import SCHEMA

ROOT = Path(__file__).parents[1]
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_workflow_runs_the_script_that_every_change_must_pass() -> None:
    steps = _yaml(".github/workflows/ci.yml")["jobs"]["ci"]["steps"]
    assert "bash .ci/run" in [step.get("run") for step in steps]


def test_pre_commit_hooks_call_targets_of_the_makefile() -> None:
    hooks = [hook for repo in _yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert hooks and {hook["entry"].removeprefix("make ") for hook in hooks} <= MAKE_TARGETS


def test_an_issue_template_asks_for_the_json_of_the_gpu_benchmark() -> None:
    form = (ROOT / ".github/ISSUE_TEMPLATE/gpu_result.yml").read_text()
    assert "python -m benchmarks gpu --json" in form
    for template in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        fields = yaml.safe_load(template.read_text())
        if template.name != "config.yml":
            assert {"name", "description", "body"} <= set(fields)
            inputs = [entry["id"] for entry in fields["body"] if entry["type"] != "markdown"]
            assert len(inputs) == len(set(inputs)) > 0


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_images_copy_files_that_exist_and_install_extras_that_exist(image: str) -> None:
    text = (ROOT / f"docker/{image}.Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.+)", text, re.MULTILINE) for name in line.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    extras = re.search(
        r"\[project.optional-dependencies\](.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.S
    )
    assert extras is not None
    known = set(re.findall(r"^(\w+) = \[", extras[1], re.MULTILINE))
    asked = {name for group in re.findall(r"'\.\[(.+?)\]'", text) for name in group.split(",")}
    assert asked and asked <= known
    setup = re.search(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())
    assert setup is not None and f"torch=={setup[1]}" in text


def test_every_dependency_of_ci_is_pinned() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    names = {name.lower().replace("_", "-") for name in pinned}
    text = (ROOT / "pyproject.toml").read_text()
    dev = re.search(r"^dev = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    core = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert dev is not None and core is not None
    asked = {name.lower() for name in re.findall(r'"([\w-]+)>=', dev[1] + core[1])}
    assert asked and asked <= names


def test_the_page_of_promises_lists_all_public_names_and_schemas() -> None:
    page = (ROOT / "docs/promises.md").read_text()
    listed = set(re.findall(r"`(optimus\.[a-z-]+/\d)`", page))
    sources = [*(ROOT / "optimus").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    written = {name for path in sources for name in re.findall(r'"(optimus\.[a-z-]+/\d)"', path.read_text())}
    assert listed == written | {SCHEMA}
    public = set(re.findall(r"`(\w+)`", page)) & set(dir(optimus) + optimus.__all__)
    assert set(optimus.__all__) <= public


def test_versions_agree() -> None:
    version = optimus.__version__
    assert _yaml("CITATION.cff")["version"] == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
