"""A step that is not finite, or a spike, changes nothing, and the run goes on or stops as it was told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from faults import ROOT
from policy_worker import LOSS_STEP, NAN_BATCH, SPIKE_STEP, STEPS
from worker_lines import run_cases

import optimus
from optimus.cli.run_ranks import RanksFailed, run_ranks
from optimus.engine.config import RunPolicy, StepMetrics
from optimus.engine.run_policy import PolicyWatch
from optimus.engine.run_section import read_training_config
from optimus.errors import UserError

LEFT_OUT = [NAN_BATCH, LOSS_STEP, SPIKE_STEP]
CASES = ["sharded: two by two", "sharded tp: two stages"]


@pytest.mark.ci("survival")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES)
def test_left_out_steps_change_nothing_on_any_rank(case: str) -> None:
    """The rest is what one process trains that never saw them."""
    (line,) = run_cases("policy_worker.py", [case], timeout_s=170)
    assert line["left_out"] == [LEFT_OUT] * 4
    assert not line["changed"]
    assert line["counts"] == [STEPS - len(LEFT_OUT)]
    assert line["parameters"] <= 1e-12
    assert line["finite_norms"] == [step for step in range(STEPS) if step not in (NAN_BATCH, LOSS_STEP)]


def metrics(step: int, loss: float = 1.0, norm: float = 1.0, *, skipped: int = 1) -> StepMetrics:
    return StepMetrics(
        step=step, loss=loss, gradient_norm=norm, lr=0.1, step_s=1.0, tokens_per_s=1.0, skipped_steps=skipped
    )


@pytest.mark.parametrize(
    ("policy", "loss", "norm", "field"),
    [
        (RunPolicy(), math.nan, math.nan, "loss of step 3"),
        (RunPolicy(), 1.0, math.inf, "gradient_norm of step 3"),
        (RunPolicy(on_nan="skip"), math.nan, math.nan, None),
        (RunPolicy(on_nan="skip", on_spike="stop"), 1.0, 99.0, "gradient_norm of step 3"),
        (RunPolicy(on_spike="skip"), 1.0, 99.0, None),
    ],
)
def test_policies_stop_or_go_on(policy: RunPolicy, loss: float, norm: float, field: str | None) -> None:
    watch = PolicyWatch(policy)
    assert watch.find_stop(metrics(2, skipped=0)) is None
    stop = watch.find_stop(metrics(3, loss, norm))
    assert (None if stop is None else stop.field) == field


def test_too_many_steps_in_a_row_stop_the_run() -> None:
    watch = PolicyWatch(RunPolicy(on_nan="skip", max_skipped=3))
    for step in range(2):
        assert watch.find_stop(metrics(step, math.nan)) is None
    assert watch.find_stop(metrics(2, skipped=0)) is None
    for step in range(3, 5):
        assert watch.find_stop(metrics(step, math.nan)) is None
    stop = watch.find_stop(metrics(5, math.nan))
    assert stop is not None and "run.max_skipped = 3 steps in a row up to step 5" in str(stop)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"on_nan": "rewind"}, "run.on_nan = rewind goes back to a checkpoint"),
        ({"on_spike": "rewind"}, "run.on_spike = rewind goes back to a checkpoint"),
        ({"on_nan": "ignore"}, "run.on_nan = ignore is no policy"),
        ({"spike_factor": 0.5}, "run.spike_factor = 0.5 has to exceed 1"),
        ({"max_skipped": 1.5}, "run.max_skipped = 1.5 is not a whole number"),
    ],
)
def test_policies_that_do_not_exist_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        read_training_config(settings, steps=None)
    assert problem in str(refused.value)


BROKEN = """
import os
if "RANK" in os.environ:
    from dataclasses import replace
    from optimus.engine.synthetic_data import SyntheticDataset
    sample_of = SyntheticDataset.sample
    def sample(self, number, items=None):
        sample = sample_of(self, number, items)
        if number // self.job.workload.sequences_per_step not in (1, 3, 4):
            return sample
        items = {name: tuple(replace(item, inputs=item.inputs * float("nan")) for item in of)
                 for name, of in sample.items.items()}
        return replace(sample, items=items)
    SyntheticDataset.sample = sample
"""


@pytest.mark.ci("survival")
@pytest.mark.timeout(180)
def test_a_run_skips_broken_steps_and_stops_at_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    text = (ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text + "\nrun: {on_nan: skip, max_skipped: 2}\n")
    job = optimus.load_job(tmp_path / "job.yaml")
    summary = optimus.train(job, steps=3, run_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["skipped_steps"]) for line in lines] == [(0, 0), (1, 1), (1, 1), (2, 0)]
    assert [line["loss"] is None for line in lines] == [False, True, True, False]
    assert summary.skipped_steps == 1 and summary.final_loss == lines[3]["loss"]
    with pytest.raises(RanksFailed):
        optimus.train(job, steps=9, run_dir=tmp_path)
    assert "steps in a row up to step 4 were left out" in capfd.readouterr().err


@pytest.mark.ci("survival")
@pytest.mark.timeout(240)
def test_a_run_goes_back_and_leaves_broken_batches_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses are those of a run without the broken batches, also when it is resumed in between."""
    text = (ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml").read_text()
    policy = "\nrun: {on_nan: rewind, max_skipped: 3, checkpoint: {every: 1}}\n"
    (tmp_path / "job.yaml").write_text(text + policy)
    job = optimus.load_job(tmp_path / "job.yaml")
    plan = optimus.plan(job).plan
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    config = read_training_config({}, steps=5, run_dir=whole)
    code, _ = run_ranks(job, plan, replace(config, left_out=(1, 3, 4)))
    assert code == 0
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    optimus.train(job, plan, steps=3, run_dir=broken)
    optimus.train(job, plan, steps=5, run_dir=broken, resume=True)
    assert read_losses(broken) == read_losses(whole)
    assert len(read_losses(whole)) == 5


BROKEN_ONCE = BROKEN.replace(
    "not in (1, 3, 4)", "!= 1 or number in self.__dict__.setdefault('seen', [])"
).replace("        items = {", "        self.__dict__['seen'].append(number)\n        items = {", 1)


@pytest.mark.ci("survival")
@pytest.mark.timeout(180)
def test_a_fault_of_the_machine_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose inputs are broken once is trained again, and the losses are those without the fault."""
    job = optimus.load_job(ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml")
    plan = optimus.plan(job)
    optimus.train(job, plan, steps=3, run_dir=tmp_path / "whole")
    (tmp_path / "sitecustomize.py").write_text(BROKEN_ONCE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    summary = optimus.train(job, plan, steps=3, run_dir=tmp_path / "broken")
    assert summary.skipped_steps == 0 and summary.steps == 3
    assert read_losses(tmp_path / "broken") == read_losses(tmp_path / "whole")


def test_a_step_is_trained_again_once() -> None:
    watch = PolicyWatch(RunPolicy())
    assert watch.wants_retry(metrics(3, math.nan)) and not watch.wants_retry(metrics(3, math.nan))
    assert not watch.wants_retry(metrics(4, 1.0, 99.0))  # a spike


def read_losses(run_dir: Path) -> dict[int, float]:
    """Returns the losses of steps; of one that was trained again, the last."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}
