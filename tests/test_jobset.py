"""The example for Kubernetes is a JobSet by JobSet's own schema, and starts what it says it starts."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from optimus.cli.sbatch import SHUTDOWN_S
from optimus.cli.train import TrainCommand
from optimus.environment import NCCL_VARIABLES

EXAMPLE = Path(__file__).parent.parent / "examples" / "jobset.yaml"


def load() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return found


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    (job,) = jobset["spec"]["replicatedJobs"]
    found: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return found


def is_valid(jobset: dict[str, Any]) -> bool:
    """Reads a JobSet by the models of its API: wrong types and missing fields raise, others are lost."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    try:
        read = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(jobset))
    except ValueError:
        return False
    return bool(json.loads(json.dumps(read.to_dict())) == jobset)


@pytest.mark.ci("foundation")
def test_the_example_is_a_jobset_by_its_schema() -> None:
    jobset = load()
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert is_valid(jobset)


@pytest.mark.ci("foundation")
@pytest.mark.parametrize("mistake", ["unknown", "deep", "type", "missing"])
def test_the_schema_sees_mistakes(mistake: str) -> None:
    jobset = load()
    if mistake == "unknown":
        jobset["spec"]["failurePolicy"]["maxRestart"] = jobset["spec"]["failurePolicy"].pop("maxRestarts")
    elif mistake == "deep":
        pod(jobset)["containers"][0]["volumeMounts"][0]["mountpath"] = "/a"
    elif mistake == "type":
        pod(jobset)["terminationGracePeriodSeconds"] = "120"
    else:
        del pod(jobset)["containers"][0]["name"]
    assert not is_valid(jobset)


def test_the_example_starts_ranks_that_find_each_other(tmp_path: Path) -> None:
    jobset = load()
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = pod(jobset)["containers"]
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "JOB_COMPLETION_INDEX": "1",
        "RESTART_ATTEMPT": "3",
    }
    words = [*container["command"], *container["args"]]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    called = done.stdout.splitlines()
    module = called.index("-m")
    options = dict(zip(called[:module:2], called[1:module:2], strict=True))
    name, template = jobset["metadata"]["name"], job["template"]["spec"]
    nodes = int(options.pop("--nnodes"))
    assert nodes == template["parallelism"] == template["completions"] and job["replicas"] == 1
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert options == {
        "--nproc-per-node": str(gpus),
        "--max-restarts": "3",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"{name}-{job['name']}-0-0.{name}:29500",
        "--rdzv-id": "optimus-3",
        "--rdzv-conf": "is_host=0",
    }
    assert called[module + 1 : module + 3] == ["optimus", "train"]
    command = tyro.cli(TrainCommand, args=called[module + 3 :])
    assert command.resume and command.checkpoint_every and command.plan == Path("plan.json")


def test_the_example_has_the_environment_of_nccl() -> None:
    (container,) = pod(load())["containers"]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert {name: values[name] for name in NCCL_VARIABLES} == NCCL_VARIABLES
    shutdown_s, grace_s = (
        int(values["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]),
        pod(load())["terminationGracePeriodSeconds"],
    )
    assert shutdown_s == SHUTDOWN_S < grace_s
