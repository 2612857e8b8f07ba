"""One recommendation: its rule by hand, the same words everywhere, and a plan that keeps to the job."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_jobs import random_job
from test_batches import few_layers, uneven

import optimus
from optimus.cli import run
from optimus.cli.flags import OK, USER_ERROR
from optimus.cli.plan import suggest_run_command
from optimus.cost.assumptions import get_preset
from optimus.errors import DoesNotFit, UserError
from optimus.exporters import targets
from optimus.ir.planfile import load_plan
from optimus.job.catalog_files import list_catalog_names
from optimus.job.job import CurrentRun, Job
from optimus.job.layout import Layout, PartialLayout
from optimus.job.model import Model
from optimus.job.own_layers import find_untrainable
from optimus.job.read import find_job, load_model
from optimus.job.targets import TARGETS, restrict_to_target
from optimus.planner.compare import compare_systems, is_around_sharded_llm
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.systems.fsdp import FsdpCandidate, list_fsdp_candidates
from optimus.planner.systems.llm_only import LlmOnlySystem, LlmPipelines
from optimus.planner.systems.registry import SYSTEMS, is_allowed, load_system
from optimus.planner.systems.today import TodaySystem
from optimus.sensitivity import perturb
from optimus.sensitivity.batch_steps import BatchStepTimes
from optimus.sensitivity.recommend import (
    RecommendedPlan,
    compare_to_recommend,
    plan_job,
    plan_recommended,
    recommend,
)
from optimus.sensitivity.recommendation import (
    NEARLY_FULL,
    Recommendation,
    choose_simplest,
    compute_excess,
    list_robust,
)
from optimus.sensitivity.win_rate import PerturbedSteps, unperturbed_cost_model

BATCHES = 6
SYSTEMS_OF_TARGETS = {
    **targets.SYSTEMS,
    "engine": ("fsdp", "stage0", "balanced", "balanced-best", "three-phase", "optimus"),
}


@pytest.fixture(scope="module")
def job() -> Job:
    return uneven(few_layers())


@pytest.fixture(scope="module")
def planned(job: Job) -> RecommendedPlan:
    return plan_job(job, batches=BATCHES)


def with_means(recommendation: Recommendation, means: dict[str, float]) -> Recommendation:
    """Replaces the mean steps of a recommendation; the fastest is first, as `recommend` has it."""
    drawn = {
        name: BatchStepTimes(system=name, dealing="drawn", steps_s=np.full(2, mean), simulations=2)
        for name, mean in sorted(means.items(), key=lambda item: item[1])
    }
    return replace(recommendation, drawn=drawn, planned=tuple(drawn), sure=None)


def test_the_simplest_of_the_fastest_is_recommended(planned: RecommendedPlan) -> None:
    drawn = planned.recommendation.drawn
    means = {name: steps.mean_s for name, steps in drawn.items() if load_system(name).makes_plan}
    systems, capacity = planned.comparison.systems, planned.comparison.context.capacity_bytes
    assert all(systems[name].peak_bytes < NEARLY_FULL * capacity for name in means)
    sure = planned.recommendation.sure
    assert sure is not None
    steps_s = {name: sure.perturbed.steps_s[sure.perturbed.same_as.get(name, name)] for name in means}
    fastest_s = [min(steps_s[name][model] for name in means) for model in range(sure.of)]
    excess = {name: sum(steps / fastest_s) / sure.of for name, steps in steps_s.items()}
    robust = {name: means[name] for name in means if excess[name] <= min(excess.values()) + 0.02}
    close = [name for name in robust if means[name] <= 1.02 * min(robust.values())]
    assert planned.recommendation.name == min(close, key=list(SYSTEMS).index)
    assert planned.plan.strategy == planned.recommendation.name
    assert planned.report.ok and planned.system.fits
    assert list(drawn) == sorted(drawn, key=lambda name: drawn[name].mean_s)


def test_what_optimus_contains_is_never_faster_and_nothing_is_below_the_floor(
    planned: RecommendedPlan,
) -> None:
    systems = planned.comparison.systems
    assert {"fsdp", "stage0", "balanced", "balanced-best", "three-phase"} <= set(systems)
    for name, system in systems.items():
        assert system.step_s >= planned.floor_s, name
        if system.fits and name not in ("llm-only", "separate-gpus"):
            assert systems["optimus"].step_s <= system.step_s, name


def test_reasons_follow_from_the_steps(planned: RecommendedPlan) -> None:
    systems = {
        name: replace(planned.comparison.systems[name], overlapped_step_s=seconds)
        for name, seconds in (("fsdp", 1.1), ("optimus", 0.99), ("balanced-best", 1.2))
    }
    base = replace(planned.recommendation, name="fsdp", systems=systems)
    near = with_means(base, {"fsdp": 1.01, "optimus": 1.0, "balanced-best": 1.1})
    assert near.fastest == "optimus" and near.next_best == "balanced-best"
    assert near.filling_speedup == pytest.approx(1.01)
    assert near.reasons[0] == (
        "optimus takes 1 s, 1.0% less, within the 2% in which the simpler system is recommended"
    )
    assert near.reasons[1] == "the next best, balanced-best, takes 1.1 s, 8.9% longer"
    assert (
        near.reasons[2] == "filling bubbles (optimus) takes 1.0% less time than fsdp (not worth it below 2%)"
    )
    overlapped = "if 70% of your TP traffic is overlapped already, optimus takes"
    assert near.reasons[3] == f"{overlapped} 10.0% less at the mean of the data"
    alone = with_means(base, {"fsdp": 1.0, "optimus": 1.0, "balanced-best": 1.1})
    assert alone.next_best == "balanced-best"
    assert alone.reasons[0] == "the next best, balanced-best, takes 1.1 s, 10.0% longer"
    assert alone.reasons[1] == "filling bubbles (optimus) gains nothing here (not worth it below 2%)"
    worth = with_means(replace(base, name="optimus"), {"fsdp": 1.25, "optimus": 1.0})
    overlapped = "also with 70% of the TP traffic overlapped already: 10.0% less time"
    assert (
        worth.reasons[1]
        == f"filling bubbles (optimus) takes 20.0% less time than fsdp (worth it, {overlapped})"
    )
    hidden = {n: replace(s, overlapped_step_s=1.2 if n == "optimus" else 1.0) for n, s in systems.items()}
    lost = with_means(replace(base, name="optimus", systems=hidden), {"fsdp": 1.25, "optimus": 1.0})
    assert (
        "(worth it, but not with 70% of the TP traffic overlapped already: 20.0% more time)" in lost.sentence
    )
    peak = systems["fsdp"].peak_bytes
    full = replace(near, capacity_bytes=peak / 0.96)
    assert full.memory_share > NEARLY_FULL
    assert full.reasons[-1] == "fsdp needs 96% of the memory, which leaves little room"
    assert "memory, which" not in replace(near, capacity_bytes=peak / 0.94).sentence


SHARES = st.dictionaries(st.sampled_from(list(SYSTEMS)), st.floats(0.5, 1.0), min_size=1)


def perturbed_steps(steps_s: dict[str, list[float]]) -> PerturbedSteps:
    """Returns steps under as many cost models as a system has steps."""
    models = (unperturbed_cost_model(get_preset("default")),) * len(next(iter(steps_s.values())))
    steps = {name: np.array(values) for name, values in steps_s.items()}
    return PerturbedSteps(margin=1.02, parameters=(), models=models, steps_s=steps, same_as={})


@given(SHARES, st.data())
def test_simplicity_wins_among_those_that_are_close_and_leave_memory(
    shares: dict[str, float], data: st.DataObject
) -> None:
    """The rule, said another way: what is simpler than the choice is slower, or leaves less memory."""
    excess = {name: data.draw(st.floats(0.0, 0.1)) for name in shares}
    means_s = {name: data.draw(st.floats(1.0, 1.1)) for name in shares}
    least, order = min(excess.values()), list(SYSTEMS).index
    chosen = choose_simplest(means_s, shares, excess)
    assert excess[chosen] <= least + 0.02 + 1e-6
    for name, share in shares.items():
        is_full = share > NEARLY_FULL and share > shares[chosen]
        is_ruled_out = excess[name] > least + 0.02 - 1e-6
        assert is_ruled_out or means_s[chosen] <= 1.02 * means_s[name] + 1e-6, name
        is_slower = any(
            means_s[name] > 1.02 * means_s[other] - 1e-6
            for other in shares
            if excess[other] <= least + 0.02 + 1e-6
        )
        assert order(name) >= order(chosen) or is_full or is_slower or is_ruled_out, name
        assert shares[chosen] <= NEARLY_FULL or share >= shares[chosen] or is_slower or is_ruled_out, name


def test_the_share_over_the_fastest_is_the_mean_over_cost_models() -> None:
    """A system that is a little faster as things are known, and much slower where they are otherwise."""
    means_s, shares = {"fsdp": 1.0, "stage0": 1.03}, {"fsdp": 0.5, "stage0": 0.5}
    perturbed = perturbed_steps({"fsdp": [1.0, 1.2, 1.3], "stage0": [1.05, 1.0, 1.0]})
    excess = compute_excess(means_s, perturbed)
    assert excess == pytest.approx({"fsdp": 0.5 / 3, "stage0": 0.05 / 3})
    assert choose_simplest(means_s, shares, excess) == "stage0"
    alone = compute_excess(means_s, None)
    assert alone == {"fsdp": 0.0, "stage0": 0.0} == compute_excess(means_s, replace(perturbed, models=()))
    assert choose_simplest(means_s, shares, alone) == "fsdp"


def test_a_faster_system_is_not_passed_over_for_a_simpler_one_beyond_the_margin() -> None:
    """Cost models rule neither out: what is assumed decides, as where half of them hide TP traffic."""
    means_s, shares = {"balanced-best": 1.05, "optimus": 1.0}, {"balanced-best": 0.5, "optimus": 0.5}
    steps = {"balanced-best": [1.05, 1.05, 1.0, 1.0], "optimus": [1.0, 1.0, 1.01, 1.01]}
    excess = compute_excess(means_s, perturbed_steps(steps))
    assert excess["balanced-best"] - excess["optimus"] == pytest.approx(0.02)
    assert choose_simplest(means_s, shares, excess) == "optimus"
    assert choose_simplest({**means_s, "balanced-best": 1.02}, shares, excess) == "balanced-best"


def test_what_is_passed_over_is_said(planned: RecommendedPlan) -> None:
    systems = planned.comparison.systems
    peak = systems["fsdp"].peak_bytes
    roomy = replace(systems["balanced-best"], peak_bytes=0.5 * peak)
    base = replace(
        planned.recommendation,
        name="balanced-best",
        systems={**systems, "balanced-best": roomy},
        capacity_bytes=peak / 0.97,
    )
    slower = with_means(base, {"balanced-best": 1.0, "fsdp": 1.01, "optimus": 1.0})
    assert "fsdp is simpler, but needs 97.0% of the memory, more than 95%" in slower.reasons
    faster = with_means(base, {"balanced-best": 1.01, "fsdp": 1.0, "optimus": 1.01})
    assert faster.reasons[0] == "fsdp takes 1 s, 1.0% less, but needs 97.0% of the memory, more than 95%"
    perturbed = perturbed_steps({"fsdp": [1.1, 1.1, 1.0], "balanced-best": [1.0, 1.0, 1.0]})
    two = with_means(base, {"balanced-best": 1.0, "fsdp": 1.01})
    doubtful = replace(two, capacity_bytes=2 * peak, sure=perturbed.win_rate("balanced-best"))
    why = "takes 6.7% more in the mean of 3 perturbed cost models"
    assert doubtful.passed_over == {"fsdp": why}
    assert f"fsdp is simpler, but {why}" in doubtful.reasons
    filled = with_means(base, {"optimus": 0.97, "fsdp": 0.96, "balanced-best": 1.0})
    perturbed = perturbed_steps(
        {"fsdp": [1.2, 1.1], "optimus": [1.2, 1.1], "balanced-best": [1.0, 1.0]},
    )
    filled = replace(filled, capacity_bytes=2 * peak, sure=perturbed.win_rate("balanced-best"))
    why = "takes 15.0% more in the mean of 2 perturbed cost models"
    assert filled.reasons[0] == f"fsdp takes 0.96 s, 4.0% less, but {why}"
    assert f"filling bubbles (optimus) takes 3.0% less time than balanced-best, but {why}" in filled.reasons
    fastest = with_means(base, {"optimus": 0.95, "fsdp": 0.96, "balanced-best": 1.0})
    fastest = replace(fastest, capacity_bytes=2 * peak, sure=perturbed.win_rate("balanced-best"))
    assert fastest.reasons[0] == f"optimus takes 0.95 s, 5.0% less, but {why}"
    assert "filling bubbles (optimus) is not worth that" in fastest.reasons


def test_a_plan_around_a_pipeline_stands_for_one_around_a_sharded_llm(
    planned: RecommendedPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes less in the mean of the cost models, though more as costs are assumed."""
    comparison = planned.comparison
    pipeline = replace(comparison.systems["balanced"], name="optimus")
    sharded = replace(comparison.systems["optimus"])
    assert not is_around_sharded_llm(pipeline) and is_around_sharded_llm(sharded)
    systems = {"optimus": sharded, "balanced-best": comparison.systems["balanced-best"]}
    two = replace(comparison, systems=systems, on_pipelines={"optimus": pipeline})
    monkeypatch.setattr(perturb, "MOST_OF_FULL_SHARDING", 9.0)
    chosen = recommend(two, batches=BATCHES, draws=100)
    alone = recommend(replace(two, on_pipelines={}), batches=BATCHES, draws=100)
    assert chosen.excess["optimus"] < alone.excess["optimus"]
    assert chosen.systems["optimus"].schedule is pipeline.schedule
    assert set(chosen.sharded) == {"optimus"} and chosen.sharded["optimus"][1] > 0
    assert any("optimus is that around a pipeline of the LLM" in reason for reason in chosen.reasons)
    assert alone.systems["optimus"].schedule is sharded.schedule and not alone.sharded
    plan = plan_recommended(two, chosen, strategy="optimus")
    assert plan.report.ok and plan.step_s == pytest.approx(pipeline.step_s)
    sure = recommend(two, batches=BATCHES, draws=0)
    faster = min((pipeline, sharded), key=lambda system: system.step_s)
    assert sure.systems["optimus"].schedule is faster.schedule, "as costs are assumed"


def test_systems_around_pipelines_are_faster_than_what_they_contain() -> None:
    seed = 37  # its optimus is around a sharded LLM
    job = random_job(Random(seed))
    job = replace(job, layout=replace(job.layout, modules={}))
    compared = compare_systems(job, names=("balanced-best", "optimus"), also_on_pipelines=True)
    assert is_around_sharded_llm(compared.systems["optimus"])
    other = compared.on_pipelines["optimus"]
    assert not is_around_sharded_llm(other) and other.fits
    assert compared.systems["optimus"].step_s < other.step_s < compared.systems["balanced-best"].step_s


@pytest.mark.ci("search")
def test_all_of_the_table_is_in_the_file_that_a_terminal_redirects_it_to(tmp_path: Path) -> None:
    """The first rows are printed beside a progress bar, which redirects what goes to its terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "optimus", "plan", "cpu/tiny-vl", "--no-sure", "-o", "a.plan.json"]
    output = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, text=True, check=True
    )
    os.close(theirs)
    os.close(ours)
    for row in ("job ", "llm-only (floor)", "three-phase", "optimus ", "recommended"):
        assert any(line.strip().startswith(row.strip()) for line in output.stdout.split("\n")), row


@pytest.mark.ci("search")
def test_a_pipeline_is_weighed_where_a_contained_system_is_faster_sharded() -> None:
    """`fsdp` takes 1.8875 s, and is the plan of `optimus`; around a pipeline that takes 1.8888 s."""
    job = find_job("siglip-so400m-8b", "h100:512")
    names = "fsdp", "three-phase", "optimus"
    compared = compare_systems(job, names=names, also_on_pipelines=True)
    assert compared.systems["optimus"].step_s == compared.systems["fsdp"].step_s
    other = compared.on_pipelines["optimus"]
    assert compared.systems["fsdp"].step_s < other.step_s < compared.systems["three-phase"].step_s
    assert not is_around_sharded_llm(other)


def test_the_next_command_runs_the_plan_or_makes_one_that_runs() -> None:
    dense, many, path = load_model("siglip-so400m-8b"), load_model("omni-3"), Path("a.json")

    def suggest(model: Model, layout: Layout, target: str | None = None) -> str:
        return suggest_run_command("JOB", " --on h100:8", target, model=model, layout=layout, plan=path)[0]

    layout = Layout(dp=8)
    assert suggest(dense, layout) == "optimus train JOB --plan a.json --on h100:8"
    assert suggest(dense, layout.with_(cp=2)) == suggest(dense, layout, "engine") == suggest(dense, layout)
    assert suggest(dense, layout.with_(ep=2)) == "optimus plan JOB --on h100:8 --for engine"
    assert suggest(many, layout) == "optimus plan JOB --on h100:8 --for megatron"
    assert suggest(many, layout, "bridge") == "optimus export a.json --to bridge"


def test_the_sentence_names_layouts_and_memory_at_p99(planned: RecommendedPlan) -> None:
    words = planned.recommendation.sentence.split(":")[0]
    layouts = {name: str(module.layout) for name, module in planned.plan.modules.items()}
    assert words.startswith(f"run {planned.plan.strategy} on llm {layouts['llm']}")
    assert all(layout in words for layout in layouts.values())
    at_p99 = planned.search_result.peak_bytes_at_p99
    assert at_p99 is not None
    assert f"{max(at_p99, planned.memory.total) / 1e9:.1f} of" in planned.recommendation.sentence


def test_the_same_words_in_terminal_json_and_plan_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.plan.json"
    words = ["plan", "cpu/tiny-vl", "-o", str(path)]
    assert run(words) == OK
    text = " ".join(capsys.readouterr().out.split())
    notes = load_plan(path).notes
    for part in notes["recommendation"].split("; "):
        assert part in text
    assert run([*words, "--json"]) == OK
    result = json.loads(capsys.readouterr().out)
    assert result["recommendation"] == notes["recommendation"]
    assert result["recommended"] == notes["recommended"] == result["strategy"]
    assert {n: s["mean_s"] for n, s in result["drawn"].items()} == pytest.approx(
        {n: s["mean_s"] for n, s in notes["drawn"].items()}
    )
    assert result["sure"]["of"] == 200 and result["sure"]["holds"] <= 200
    assert result["first_table_s"] > 0
    assert run([*words, "--no-sure", "--json"]) == OK
    unsure = json.loads(capsys.readouterr().out)
    assert unsure["sure"] is None and "perturbed" not in unsure["recommendation"]
    assert unsure["recommended"] == result["recommended"]


def test_another_system_is_planned_where_it_is_asked_for(
    planned: RecommendedPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = plan_recommended(planned.comparison, planned.recommendation, strategy="stage0")
    assert other.plan.strategy == "stage0" and other.recommendation is planned.recommendation
    path = tmp_path / "b.plan.json"
    assert run(["plan", "cpu/tiny-vl", "--strategy", "balanced", "--no-sure", "-o", str(path)]) == OK
    assert "balanced, as --strategy asks" in capsys.readouterr().out
    assert load_plan(path).strategy == "balanced"


def test_a_stated_layout_is_kept(job: Job) -> None:
    """fsdp has no pipeline: a job that states one is neither advised nor bounded by it."""
    stated = replace(job, layout=replace(job.layout, modules={"llm": PartialLayout(pp=2, tp=2)}))
    comparison = compare_to_recommend(stated)
    assert "fsdp" not in comparison.systems
    assert comparison.llm_only.search_result is not None
    assert comparison.llm_only.search_result.plan.modules["llm"].layout.pp == 2
    named = compare_to_recommend(stated, systems=["stage0", "fsdp"])
    assert "fsdp" in named.systems, "it is compared where it is named"
    recommendation = recommend(named, batches=BATCHES, draws=0)
    assert recommendation.name != "fsdp" and "fsdp" not in recommendation.planned
    with pytest.raises(UserError, match="is stated, and fsdp cannot have it"):
        plan_job(stated, strategy="fsdp")
    narrow = replace(job, layout=replace(job.layout, modules={"llm": PartialLayout(pp=1, tp=2)}))
    sharded = compare_to_recommend(narrow, strategy="fsdp", systems=[]).systems["fsdp"].search_result
    assert sharded is not None and sharded.plan.modules["llm"].layout.tp == 2
    assert {c.layout.tp for c in LlmOnlySystem().candidates(LlmPipelines(sharded.context))} == {2}


def test_the_library_plans_the_recommended_system() -> None:
    planned = optimus.plan(find_job("cpu/tiny-vl"), draws=0)
    assert planned.plan.strategy == planned.recommendation.name
    assert planned.plan.notes["recommended"] == planned.recommendation.name


def test_a_trainer_gets_only_what_it_runs(job: Job) -> None:
    assert set(TARGETS) == set(SYSTEMS_OF_TARGETS), "what is exported can be planned for, and the reverse"
    for target, systems in SYSTEMS_OF_TARGETS.items():
        restricted = restrict_to_target(job, target)
        allowed = {n for n in SYSTEMS if load_system(n).makes_plan and is_allowed(n, restricted)}
        assert allowed - {"paper"} == set(systems), target
    long = replace(job, layout=replace(job.layout, modules={"llm": PartialLayout(cp=2)}))
    assert restrict_to_target(long, "megatron").layout.of("llm").cp == 2
    assert restrict_to_target(long, "engine").layout.of("llm").cp == 2
    stack = job.model.llm.stack
    both_ways = replace(job.model.llm, stack=replace(stack, attention=replace(stack.attention, causal=False)))
    with pytest.raises(UserError, match="is stated, and the engine of Optimus does not run it"):
        restrict_to_target(replace(long, model=replace(long.model, llm=both_ways)), "engine")
    assert restrict_to_target(long, "bridge").layout.of("llm").cp == 2
    qwen25 = find_job("qwen2.5-vl-72b", "h100:64", ["llm=cp2"])
    with pytest.raises(UserError, match="is stated, and Megatron Bridge does not run it"):
        restrict_to_target(qwen25, "bridge")
    assert restrict_to_target(find_job("qwen2.5-vl-72b", "h100:64"), "bridge").layout.of("llm").cp == 1
    assert restrict_to_target(find_job("qwen3-vl-235b", "h100:256"), "bridge").layout.of("llm").cp is None
    single = restrict_to_target(job, "engine").layout.of("llm")
    assert single.ep == 1 and single.tp == job.layout.of("llm").tp
    with pytest.raises(UserError, match="is not a trainer"):
        restrict_to_target(job, "nemo")
    planned = plan_job(restrict_to_target(job, "megatron"), draws=0, batches=2)
    assert set(planned.comparison.systems) == {"llm-only", "fsdp", "stage0"}


@pytest.mark.parametrize("name", list_catalog_names("models"))
def test_a_model_that_the_engine_refuses_is_refused_by_its_plan_too(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = find_untrainable(load_model(name))
    if refused is None:
        assert restrict_to_target(find_job(name, "h100:64"), "engine").model.name == name
        return
    for words in (["plan", name, "--on", "h100:64", "--for", "engine"], ["train", name, "--on", "h100:64"]):
        assert run(words) == USER_ERROR
        assert str(refused) in capsys.readouterr().err
    restrict_to_target(find_job(name, "h100:64"), "megatron")


def test_images_are_split_over_tensor_parallel_ranks_only_for_trainers_that_do() -> None:
    small = find_job("siglip-so400m-8b", "h100:8", ["llm=pp1,tp4"])
    for target, tp in (("engine", 1), ("megatron", 4), ("bridge", 4), ("torchtitan", 4)):
        restricted = restrict_to_target(small, target)
        context, _ = choose_smallest_context(restricted, get_preset("default"))
        vision = restricted.model.encoders
        policy = next(iter(context.recompute_policies(vision)))
        layout = context.layout.with_(dp=2, pp=1, tp=4)
        assert context.layers(vision, 1, policy, layout)[0].layout.tp == tp, target


@pytest.mark.parametrize("target", TARGETS)
def test_images_are_dealt_only_for_trainers_that_do(target: str) -> None:
    varied = find_job("siglip-so400m-8b", "h100:8", ["llm=pp1,tp2"])
    restricted = restrict_to_target(varied, target)
    context, _ = choose_smallest_context(restricted, get_preset("default"))
    plan = next(iter(list_fsdp_candidates(context, restricted.model.modules)))
    deals = target == "engine"
    assert plan.dealing_replicas == plan.builder.dealing_replicas == (4 if deals else 1)
    assert plan.batch_assignment().dealing_replicas == plan.dealing_replicas
    assert plan.layout.dp == 4 and plan.filled.plan.dealing_replicas == plan.dealing_replicas


def test_a_batch_that_no_replicas_share_evenly_is_not_for_fsdp() -> None:
    """No trainer runs it, and searches around a sharded LLM do not find it either."""
    job = find_job("siglip-so400m-8b", "h100:8")
    odd = replace(job, workload=replace(job.workload, sequences_per_step=3))
    compared = compare_systems(odd, names=("balanced", "fsdp", "optimus"))
    assert compared.missing["fsdp"].startswith("3 sequences do not divide into dp 8 or 4 or 2")
    plans = [system.search_result for system in compared.systems.values()]
    assert all(plan is None or plan.llm.layout.dp in (1, 3) for plan in plans)


def test_today_deals_nothing() -> None:
    """Though what it runs is otherwise a plan of `fsdp`, of which the search keeps one."""
    context, _ = choose_smallest_context(
        find_job("siglip-so400m-8b", "h100:8", ["llm=pp1,tp2"]), get_preset("default")
    )
    plan = next(iter(list_fsdp_candidates(context, context.job.model.modules)))
    dealt = plan.filled
    today = CurrentRun(llm=PartialLayout(tp=2), placement="fsdp", microbatch_sequences=int(plan.sequences))
    current = replace(context, job=replace(context.job, today=today))
    same = [
        candidate
        for candidate in TodaySystem().candidates(LlmPipelines(current))
        if isinstance(candidate, FsdpCandidate) and candidate.sharding == plan.sharding
    ]
    assert len(same) == 1 and same[0].layers is plan.layers
    assert same[0].batch_assignment().dealing_replicas == same[0].filled.header.dealing_replicas == 1
    assert plan.batch_assignment().dealing_replicas == dealt.header.dealing_replicas == 4


# ---------------------------------------------------------------------------- random jobs

FEW, CI, HEAVY = 4, 40, 1_000
HEAVY_PART = 50
ON_FEWER_GPUS = 139  # a seed: the LLM of separate-gpus, on fewer GPUs than others', is the floor
NO_IMAGES = 562  # a seed: encoders without items, whose parameters no op reads, and a sharded LLM


def launches_left_out_s(name: str, planned: RecommendedPlan) -> float:
    """Launches of receives, which `separate-gpus` is simulated without; they count in steps of 1 ms."""
    if name != "separate-gpus":
        return 0.0
    llm = planned.comparison.systems[name].candidate.llm_pipeline
    assert llm is not None
    schedule = LlmOnlySystem().simulate_candidate(llm).schedule
    receives = np.bincount(schedule.device[schedule.is_recv], minlength=1).max()
    return float(receives) * planned.comparison.context.cost_model.assumptions.launch_s


def random_failures(seeds: Iterable[int]) -> Iterator[str]:
    """Yields promises that random jobs break, with their seeds; every second job states no layout."""
    for seed in seeds:
        job = random_job(Random(seed))
        if seed % 2:
            job = replace(job, layout=replace(job.layout, modules={}))
        try:
            planned = plan_job(job, draws=0, batches=2)
        except (DoesNotFit, UserError):
            continue
        except Exception as error:
            yield f"seed {seed}: {type(error).__name__}: {error}"
            continue
        yield from (f"seed {seed}: {what}" for what in broken_promises(planned))


def broken_promises(planned: RecommendedPlan) -> Iterator[str]:
    systems, recommendation = planned.comparison.systems, planned.recommendation
    if not planned.report.ok:
        yield str(planned.report.violations[0])
    if planned.plan.strategy != recommendation.name or not planned.system.fits:
        yield f"{planned.plan.strategy} is planned, {recommendation.name} recommended"
    robust = list_robust(recommendation.excess)
    fastest_s = min(recommendation.drawn[name].mean_s for name in robust)
    if recommendation.name not in robust or recommendation.steps.mean_s > 1.02 * fastest_s:
        yield f"{recommendation.name} is beyond the margin"
    if not planned.comparison.llm_only.fits:
        yield f"the floor needs {planned.comparison.llm_only.memory.total / 1e9:.1f} GB"
    if planned.comparison.floor_1f1b_s < planned.floor_s:
        yield f"1F1B is below the floor: {planned.comparison.floor_1f1b_s} s of {planned.floor_s}"
    for name, system in systems.items():
        if system.step_s + launches_left_out_s(name, planned) < (1 - 1e-9) * planned.floor_s:
            yield f"{name} is below the floor: {system.step_s} s of {planned.floor_s}"
        contained = system.fits and name in load_system("optimus").contains
        if contained and "optimus" in systems and systems["optimus"].step_s > 1.002 * system.step_s:
            yield f"optimus is slower than {name}"


def test_promises_hold_for_a_few_random_jobs() -> None:
    assert not list(random_failures(range(FEW)))


@pytest.mark.ci("search")
def test_promises_hold_for_random_jobs() -> None:
    assert not list(random_failures([*range(FEW, CI), ON_FEWER_GPUS, NO_IMAGES]))


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(CI, HEAVY, HEAVY_PART))
def test_promises_hold_for_a_thousand_random_jobs(first: int) -> None:
    assert not list(random_failures(range(first, min(first + HEAVY_PART, HEAVY))))
