"""A plan from job to file: what is chosen, claimed, proved, printed and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import optimus
from optimus.cli import run
from optimus.cli.flags import NO, OK, USER_ERROR
from optimus.cost.assumptions import get_preset
from optimus.errors import DoesNotFit, UserError
from optimus.ir.binding import list_bound_parts, require_plan_of_job
from optimus.ir.planfile import format_plan, load_plan
from optimus.ir.ranks import LLM
from optimus.job.catalog_files import list_catalog_names
from optimus.job.job import Job
from optimus.job.layout import PartialLayout
from optimus.job.read import find_job
from optimus.planner.compare import compare_systems
from optimus.planner.filled_plan import RejectedLayout
from optimus.planner.layouts import choose_smallest_context, common_encoder_layouts, rank_llm_layouts
from optimus.planner.plan_replay import replay_plan
from optimus.planner.planning import PlanningResult, make_plan
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.paper import PaperSystem

ROOT = Path(__file__).parents[1]
SMALL = "paper/small-a100"
AT = "--layout", "llm=pp1,tp4"  # the search over layouts has tests of its own
CONTRACT = {
    "step_s", "floor_s", "step_over_floor", "floor_1f1b_s", "step_over_floor_1f1b", "bound_s",
    "hidden_share_strict", "hidden_share_placed", "speedup", "worth", "search_s", "peak_memory_bytes",
    "considered", "rejected", "layouts",
}  # fmt: skip


@pytest.fixture(scope="module")
def planned() -> PlanningResult:
    return make_plan(find_job(SMALL, layouts=[AT[1]]), systems=["stage0"])


def small_job(gpus: int = 16, **llm: int) -> Job:
    """The small job with few layers on more GPUs, with a pipeline."""
    job = find_job(SMALL, "a100:16").replace(gpus=gpus)
    modules = {LLM: PartialLayout(**(llm or {"pp": 2, "tp": 2}))}
    vision = job.model.encoders[0]
    model = replace(
        job.model,
        llm=replace(job.model.llm, stack=replace(job.model.llm.stack, layers=4)),
        encoders=(replace(vision, stack=replace(vision.stack, layers=4)),),
    )
    return replace(job, model=model, layout=replace(job.layout, modules=modules))


# ---------------------------------------------------------------- layouts


def test_encoder_layouts_divide_the_llm_s_over_all_gpus() -> None:
    context, _ = choose_smallest_context(find_job("paper/strong-3072"), get_preset("default"))
    found = list(common_encoder_layouts(context, context.layout))
    assert len(found) == 16
    for each in found:
        layout = each.layout if isinstance(each, RejectedLayout) else each
        assert layout.gpus == 3072 and 8 % layout.pp == 0 and 8 % layout.tp == 0


def test_a_stated_encoder_layout_is_kept_and_others_say_why_not() -> None:
    job = find_job("paper/strong-3072", layouts=["vision=pp4,tp8"])
    context, _ = choose_smallest_context(job, get_preset("default"))
    found = list(common_encoder_layouts(context, context.layout))
    assert [str(each) for each in found if not isinstance(each, RejectedLayout)] == ["dp96 pp4 tp8"]
    assert {each.reason.partition(":")[0] for each in found if isinstance(each, RejectedLayout)} == {"stated"}


def test_heads_are_padded_but_none_is_cut() -> None:
    context, _ = choose_smallest_context(find_job(SMALL), get_preset("default"))
    assert context.job.model.encoders[0].stack.attention.heads == 18
    assert "tp4" in str([str(each) for each in common_encoder_layouts(context, context.layout)])
    (vision,) = context.job.model.encoders
    attention = replace(vision.stack.attention, heads=2, kv_heads=2)
    narrow = replace(vision, stack=replace(vision.stack, attention=attention))
    job = replace(context.job, model=replace(context.job.model, encoders=(narrow,)))
    found = common_encoder_layouts(replace(context, job=job), context.layout)
    reasons = [each.reason for each in found if isinstance(each, RejectedLayout)]
    assert reasons == ["divisibility: vision has 2 heads, tp is 4"]


@pytest.mark.ci("plan file")
def test_memory_rejects_with_the_figure() -> None:
    context, _ = choose_smallest_context(find_job("paper/strong-3072"), get_preset("default"))
    (result,) = PaperSystem().candidates(LlmPipelines(context))
    rejected = result.rejected
    memory = [each for each in rejected if each.reason.startswith("memory")]
    assert memory and all("of 80.0 GB" in each.reason for each in memory)
    assert any(each.reason.startswith("microbatches: 16 for") for each in rejected)


# ---------------------------------------------------------------- claims and proof


@pytest.mark.ci("plan file")
def test_a_plan_is_proved_and_its_parts_agree(planned: PlanningResult) -> None:
    assert planned.report.ok and len(planned.report.rules) == 9
    assert planned.report.step_s == pytest.approx(planned.step_s, abs=1e-9)
    assert planned.system.step_s == pytest.approx(planned.step_s, abs=1e-9)
    assert planned.step_s >= planned.bounds.bound_s
    assert planned.speedup["stage0"] == planned.systems["stage0"].step_s / planned.step_s
    assert max(held.peak for held in planned.plan.memory) == pytest.approx(planned.memory.total)
    spent = sum(planned.plan.claims.encoder_s.values())
    assert spent > 0 and planned.plan.claims.estimate_s > 0


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(small_job, id="few layers", marks=pytest.mark.ci("plan file")),
        pytest.param(partial(find_job, SMALL), id=SMALL, marks=pytest.mark.heavy),
    ],
)
def test_bounds_hold_for_every_system(job: Callable[[], Job]) -> None:
    found = make_plan(job(), systems=["balanced-best", "three-phase"])
    # Another layout (fsdp) may be below the floor; at this layout nothing is below the bound.
    for system in found.systems.values():
        least = found.bounds.floor_s if system.name == "llm-only" else found.bounds.bound_s
        assert system.step_s >= least * (1 - 1e-9), system.name


LONG = (
    "paper/B", "paper/C", "paper/D", "paper/strong-1536", "paper/strong-2048", "paper/strong-3072",
    "paper/dual-11-5", "paper/dual-22-5", "paper/dual-22-11",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.heavy if name in LONG else pytest.mark.ci("plan file"))
        for name in list_catalog_names("jobs")
    ],
)
def test_the_validator_s_replay_equals_the_claim_on_every_catalog_job(name: str) -> None:
    """To a nanosecond; every rule holds."""
    job = find_job(name)
    context, _ = choose_smallest_context(job, get_preset("default"))
    (found,) = PaperSystem().candidates(LlmPipelines(context))
    from optimus.ir.binding import flatten_and_hash_parts
    from optimus.verify.validator import check_plan

    fields, hashes = flatten_and_hash_parts(list_bound_parts(job))
    report = check_plan(replace(found.filled.plan, bound_to=fields, hashes=hashes))
    assert report.ok, report.violations[:3]
    assert report.step_s == pytest.approx(found.filled.step_s, abs=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.ci("plan file")) for name in ("paper", "clean-slack")),
        *(pytest.param(name, marks=pytest.mark.heavy) for name in ("clean", "paper-first-chunk")),
    ],
)
def test_every_preset_makes_a_plan_that_holds(name: str) -> None:
    """Gathers and reduces for a whole stage, for chunks, and off the NIC."""
    found = make_plan(small_job(), systems=[], assumptions=name)
    assert found.report.ok, found.report.violations[:3]


@pytest.mark.parametrize(
    "projector_trains",
    [pytest.param(True, marks=pytest.mark.ci("plan file")), pytest.param(False, marks=pytest.mark.heavy)],
)
def test_a_frozen_encoder_and_one_without_anything_to_learn(projector_trains: bool) -> None:
    job = small_job()
    vision = job.model.encoders[0]
    encoder = replace(vision, train=False, projector=replace(vision.projector, train=projector_trains))
    found = make_plan(replace(job, model=replace(job.model, encoders=(encoder,))), systems=[])
    assert found.report.ok, found.report.violations[:3]
    backward = [bool(chunk.templates.keys() - {0}) for chunk in found.plan.modules["vision"].chunks]
    assert backward[-1] == projector_trains and not any(backward[:-1])


# ---------------------------------------------------------------- the file


@pytest.mark.ci("plan file")
def test_a_saved_plan_comes_back_and_plays_the_same(planned: PlanningResult, tmp_path: Path) -> None:
    path = tmp_path / "small.plan.json"
    optimus.save_plan(planned.plan, path)
    plan = optimus.load_plan(path)
    assert format_plan(plan) == format_plan(planned.plan) == path.read_text()
    assert optimus.check(plan).ok and optimus.check(planned).ok
    assert replay_plan(plan).timeline.step_s == pytest.approx(planned.step_s, abs=1e-9)


@pytest.mark.ci("plan file")
def test_two_runs_give_identical_bytes(tmp_path: Path) -> None:
    """In processes of their own, with other hash seeds."""
    texts = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.plan.json"
        at = " ".join(AT)
        words = f"-m optimus plan {SMALL} {at} --system stage0 --no-sure -o {path} --json".split()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]


def test_a_plan_is_bound_to_its_job_and_not_to_how_it_is_run(planned: PlanningResult) -> None:
    job = find_job(SMALL)
    require_plan_of_job(planned.plan, list_bound_parts(job))
    require_plan_of_job(planned.plan, list_bound_parts(replace(job, run={"lr": 1.0})))
    other = replace(job, cluster=replace(job.cluster, gpus=16))
    with pytest.raises(UserError) as caught:
        require_plan_of_job(planned.plan, list_bound_parts(other))
    assert all(part in str(caught.value) for part in ("gpus", "8", "16"))


# ---------------------------------------------------------------- the command


@pytest.mark.ci("plan file")
def test_plan_json_has_the_contract_s_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "a.plan.json", tmp_path / "a.json.gz"
    flags = ["--system", "stage0", "--no-sure", "--trace", str(trace), "--json"]
    assert run(["plan", SMALL, *AT, "-o", str(path), *flags]) == OK
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= CONTRACT and found["schema"] == "optimus.plan-result/1"
    assert trace.stat().st_size > 1000 and found["file"] == str(path)
    assert run(["check", str(path), "--json"]) == OK
    checked = json.loads(capsys.readouterr().out)
    assert checked["ok"] and set(checked) >= {"ok", "rules", "violations"} and not checked["violations"]
    assert run(["simulate", str(path), "--json"]) == OK
    system = json.loads(capsys.readouterr().out)["systems"]["optimus"]
    assert system["step_s"] == pytest.approx(found["step_s"], abs=1e-9)
    assert set(system) >= {"step_s", "step_over_floor", "peak_memory_bytes", "mfu", "bubbles_s"}
    assert run(["diff", str(path), str(path)]) == OK


@pytest.mark.ci("plan file")
def test_plan_prints_what_it_chose_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = "a.plan.json"
    assert run(["plan", SMALL, *AT, "--no-sure", "--system", "stage0", "three-phase", "-o", path]) == OK
    text = capsys.readouterr().out
    for word in (
        "chosen",
        "recommended",
        "idle",
        "bound",
        "claim",
        "on the worst rank",
        "rejected",
        "not modelled",
    ):
        assert word in text
    assert "9 of 9 rules" in text and f"wrote {path}" in text and "next  optimus report" in text


@pytest.mark.ci("plan file")
def test_check_refuses_a_plan_of_another_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.plan.json"
    assert run(["plan", SMALL, *AT, "--no-sure", "--system", "stage0", "-o", str(path)]) == OK
    assert run(["check", str(path), "--job", SMALL]) == OK
    capsys.readouterr()
    assert run(["check", str(path), "--job", SMALL, "--on", "a100:16"]) == NO
    said = capsys.readouterr().out
    assert "NO  binding" in said and "cluster.gpus: the plan was made for 8, the job has 16" in said
    assert run(["check", str(path), "--on", "a100:16"]) == USER_ERROR
    assert "needs --job" in capsys.readouterr().err


def test_a_changed_plan_does_not_pass(
    planned: PlanningResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = format_plan(planned.plan).split("\n")
    at = next(number for number, line in enumerate(lines) if line.startswith('"llm.F 0 '))
    lines[at + 1], lines[at + 2] = lines[at + 2], lines[at + 1]
    path = tmp_path / "changed.plan.json"
    path.write_text("\n".join(lines))
    assert run(["check", str(path)]) == NO
    said = capsys.readouterr().out
    assert "NO  " in said and "of 9 rules do not hold" in said
    assert load_plan(path) is not None


# ---------------------------------------------------------------- the answer is no


@pytest.mark.ci("plan file")
def test_an_impossible_job_says_what_would_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "qwen2.5-vl-72b", "--on", "h100:16"]) == NO
    assert "it fits with 32 GPUs" in capsys.readouterr().err
    assert run(["plan", "qwen2.5-vl-72b", "--on", "h100:16", "--json"]) == NO
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and found["problem"] and "32 GPUs" in found["hint"]
    assert run(["plan", "qwen2.5-vl-72b", "--on", "h100:64", "--layout", "llm=pp1,tp1"]) == NO
    assert "it fits with --layout llm=pp" in capsys.readouterr().err


def test_a_model_without_encoders_has_nothing_to_place() -> None:
    job = find_job(SMALL)
    alone = replace(
        job,
        model=replace(job.model, encoders=()),
        workload=replace(job.workload, sequences=job.workload.sequences),
    )
    with pytest.raises(DoesNotFit, match="has no encoder to place"):
        make_plan(alone)


@pytest.mark.ci("plan file")
def test_a_stated_encoder_layout_asks_for_an_llm_that_it_divides() -> None:
    """Layouts of the LLM that it does not divide are rejected with that reason."""
    ranked = rank_llm_layouts(find_job(SMALL, layouts=["vision=pp2"]), get_preset("default"))
    assert ranked.contexts and all(context.layout.pp % 2 == 0 for context in ranked.contexts)
    odd = [each for each in ranked.rejected if each.layout.pp % 2]
    assert odd and all(each.reason == "stated: vision pp2 does not divide the LLM's pp1" for each in odd)


@pytest.mark.ci("plan file")
def test_recomputation_is_proposed_where_it_is_enough() -> None:
    """Activations of long sequences at one stage: what is stated as kept would fit if recomputed."""
    job = find_job("paper/strong-3072", layouts=["llm=pp8,tp8,chunks1"])
    llm = replace(job.model.llm, recompute="none")
    vision = replace(job.model.encoders[0], recompute="none")
    workload = replace(job.workload, sequence_tokens=4 * job.workload.sequence_tokens)
    limits = replace(job.layout.limits, microbatch_sequences=(4,))
    changed = replace(
        job,
        model=replace(job.model, llm=llm, encoders=(vision,)),
        workload=workload,
        layout=replace(job.layout, limits=limits),
    )
    with pytest.raises(DoesNotFit) as caught:
        make_plan(changed, systems=[])
    assert "recompute: full" in caught.value.hint


def test_wrong_names_are_answered_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", SMALL, "--strategy", "papre"]) == USER_ERROR
    assert "did you mean paper?" in capsys.readouterr().err
    assert run(["plan", SMALL, "-o", "plan.txt"]) == USER_ERROR
    assert ".json" in capsys.readouterr().err
    assert run(["check", "missing.plan.json"]) == USER_ERROR
    assert "hint:" in capsys.readouterr().err
    assert run(["simulate", "missing.plan.json", "--on", "h100:8"]) == USER_ERROR
    assert run(["simulate", "missing.plan.json", "--preset", "paper"]) == USER_ERROR
    assert "--preset does not apply to a plan file" in capsys.readouterr().err
    assert run(["plan", "missing.plan.json"]) == USER_ERROR
    assert "is a plan already" in capsys.readouterr().err


# ---------------------------------------------------------------- what a job allows


def test_only_what_a_job_allows_is_compared() -> None:
    job = small_job(pp=1, tp=2)
    limits = replace(job.layout.limits, allow=("fill", "fsdp"))
    fewer = replace(job, layout=replace(job.layout, limits=limits))
    assert set(compare_systems(fewer).systems) == {"llm-only", "stage0", "fsdp"}
    assert "balanced-best" in compare_systems(fewer, names=["balanced-best"]).systems  # asked for by name


def test_a_job_that_leaves_out_filling_is_not_planned() -> None:
    job = small_job(pp=1, tp=2)
    none = replace(job, layout=replace(job.layout, limits=replace(job.layout.limits, allow=("fsdp",))))
    with pytest.raises(UserError, match=r"layout\.limits\.allow = fsdp leaves out fill, which optimus does"):
        make_plan(none)
