"""Compares what `optimus plan --for engine` claims of a job with a dry run of its plan."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from optimus.cli import run
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.planfile import load_plan
from optimus.job.catalog_files import list_catalog_names
from optimus.job.own_layers import find_untrainable
from optimus.job.read import load_model

SMALL = "cpu/tiny-vl"
MAX_OVER_COUNTED = 0.10
MAX_UNDER_COUNTED = 0.005  # where several encoder backwards hold a recomputed layer at once: docs/limits.md
# Of models: GPUs, sequences of a step, images of a sequence, LLM tokens of an image.
# Memory is planned for the mean batch: all sequences are alike. Images are squares that windows divide, since
# attention on CPUs copies windows of unequal length.
MODELS = {
    "siglip-so400m-8b": (8, 16, 20, 169),
    "qwen2.5-vl-72b": (64, 64, 4, 784),
    "internvl3-78b": (64, 64, 13, 256),
}
Result = dict[str, Any]


def write_job(model: str, folder: Path) -> str:
    """Writes a job file for a model of the catalog on H100s."""
    gpus, sequences, images, tokens = MODELS[model]
    total = images * tokens
    path = folder / "job.yaml"
    path.write_text(
        "format: optimus.job/1\n"
        f"name: {model}\n"
        f"model: {{use: {model}}}\n"
        f"cluster: {{use: h100, gpus: {gpus}}}\n"
        "workload:\n"
        "  sequence_tokens: 8192\n"
        f"  sequences_per_step: {sequences}\n"
        f"  vision_tokens: {{p50: {total}, p95: {total}, max: {total}, item: {tokens}}}\n"
    )
    return str(path)


def check_agreement(job: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Result:
    """Plans a job for the engine, steps the fullest rank, and compares; returns the dry run."""
    file = str(folder / "a.plan.json")
    assert run(["plan", job, "--for", "engine", "--no-sure", "--json", "-o", file]) == 0
    planned, plan = json.loads(capsys.readouterr().out), load_plan(Path(file))
    held = [device.peak for device in plan.memory]
    fullest = held.index(max(held))
    rank = next(rank for rank in range(plan.ranks.world) if plan.ranks.class_of(rank) == fullest)
    words = ["train", job, "--dry-run", "--quiet", "--json", "--rank", str(rank), "--plan", file]
    assert run(words) == 0, "the rank fits"
    stepped: Result = json.loads(capsys.readouterr().out)
    assert planned["recommended"] == planned["strategy"]
    for key in ("job", "strategy", "step_s", "layouts"):
        assert stepped[key] == planned[key], key
    assert (stepped["world"], stepped["device_class"]) == (plan.ranks.world, fullest)
    check_program(stepped, plan, fullest)
    memory = stepped["memory"]
    needed = memory["planned_bytes"]["peak"] + sum(memory["planned_only_bytes"].values())
    assert needed == pytest.approx(planned["peak_memory_bytes"], rel=1e-6)
    under = MAX_UNDER_COUNTED if recomputes_encoder(stepped, plan) else 0.0
    assert -under <= memory["error"] <= MAX_OVER_COUNTED, memory
    return stepped


def recomputes_encoder(stepped: Result, plan: Plan) -> bool:
    """Tells whether the rank recomputes layers of an encoder in its backward."""
    verbs = stepped["program"]["verbs"]
    recomputed = (name for name, module in plan.encoders.items() if module.recompute != "none")
    return any(
        {OpKind.BACKWARD.word, OpKind.INPUT_GRAD.word} & set(verbs.get(name, {})) for name in recomputed
    )


def check_program(stepped: Result, plan: Plan, device: int) -> None:
    """Lines of the rank are those of the plan, and its communicators have the sizes of the layouts."""
    program = plan.programs[device]
    assert stepped["program"]["lines"] == len(program)
    lines = zip(program.module.tolist(), program.kind.tolist(), strict=True)
    counts = Counter((plan.names[module], OpKind(kind).word) for module, kind in lines)
    verbs = stepped["program"]["verbs"]
    assert {(name, verb): times for name in verbs for verb, times in verbs[name].items()} == counts
    groups = {group["axis"]: group["size"] for group in stepped["communicators"]}
    for name, module in plan.modules.items():
        for axis in ("tp", "cp"):
            assert groups.get(f"{name}.{axis}", 1) == getattr(module.layout, axis), (name, axis)


@pytest.mark.ci("engine")
def test_plan_and_dry_run_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a plan `train` runs the same."""
    stepped = check_agreement(SMALL, tmp_path, capsys)
    assert run(["train", SMALL, "--dry-run", "--quiet", "--json", "--rank", str(stepped["rank"])]) == 0
    assert json.loads(capsys.readouterr().out) == stepped


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("job", list_catalog_names("jobs"))
def test_plan_and_dry_run_agree_for_every_job(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_agreement(job, tmp_path, capsys)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", MODELS)
def test_plan_and_dry_run_agree_for_every_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_agreement(write_job(model, tmp_path), tmp_path, capsys)


def test_every_model_that_the_engine_runs_is_compared() -> None:
    models = list_catalog_names("models")
    assert set(MODELS) == {name for name in models if find_untrainable(load_model(name)) is None}
