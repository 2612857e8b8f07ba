"""Systems: what must hold whatever the numbers are, and two levels of detail that must agree."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from busy_time import busy_s
from paper_parts import PAPER_JOBS
from random_plans import bound

from optimus.cost.assumptions import get_preset
from optimus.errors import UserError
from optimus.ir.op import Lane, OpKind
from optimus.ir.planfile import load_plan, save_plan
from optimus.job.job import CurrentRun
from optimus.job.layout import BaselineSystem, CurrentPlacement, Layout, SearchLimits
from optimus.job.read import find_job
from optimus.planner.compare import Comparison, _lower_floor, compare_systems
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.systems.base import simulate_step_s
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.registry import SYSTEMS, load_system, plan_making_systems
from optimus.planner.systems.single_pipeline import BalancedSystem, Stage0System
from optimus.schedule.bubbles import CAUSES, sum_bubbles_by_cause
from optimus.verify.validator import check_plan


@cache
def compared(name: str, on: str | None = None, assumptions: str = "default") -> Comparison:
    """`name` may be followed by the LLM's layout."""
    job, *layouts = name.split()
    return compare_systems(find_job(job, on, layouts), assumptions=assumptions)


# ------------------------------------------------------------------------ op level and kernel level


@pytest.mark.ci
@pytest.mark.parametrize("assumptions", ["paper", "clean", "clean-slack"])
@pytest.mark.parametrize("name", PAPER_JOBS)
def test_kernel_level_and_op_level_agree(name: str, assumptions: str) -> None:
    context, _ = choose_smallest_context(find_job(name), get_preset(assumptions))
    pipelines = LlmPipelines(context)
    for system in (Stage0System(), BalancedSystem()):
        pipeline = system.best_pipeline(pipelines)
        coarse, fine = pipeline.estimate_s, simulate_step_s(pipeline)
        # Ops of a plan are finer: an encoder's backward may hide a reduce of the LLM's.
        assert 0.98 * coarse <= fine <= 1.006 * coarse


@pytest.mark.ci("search")
def test_a_sharded_layout_that_needs_more_than_was_counted_is_no_floor() -> None:
    """Two gathers and two reduces of embedding and head overlap: more than two neighbours of either."""
    job = find_job("internvl3-78b", "h100:512")
    floor = compare_systems(job, names=["llm-only"]).llm_only
    assert floor.fits and floor.memory.total <= job.cluster.gpu.memory_bytes


# ------------------------------------------------------------------------ every system of a job


JOBS = ["paper/A", "paper/small-a100 llm=pp2,tp2"]


@pytest.mark.ci
@pytest.mark.parametrize("name", JOBS)
def test_no_system_at_the_same_layout_is_faster_than_the_floor(name: str) -> None:
    comparison = compared(name)
    for system in comparison.systems.values():
        if system.name not in ("fsdp", "separate-gpus"):  # their LLM has a layout of its own
            assert system.step_s >= comparison.floor_s * (1 - 1e-9), system.name
    assert comparison.floor_1f1b_s >= comparison.floor_s * (1 - 1e-9)


@pytest.mark.parametrize("name", JOBS)
def test_the_strongest_pipeline_is_not_beaten_by_a_weaker_one(name: str) -> None:
    systems = compared(name).systems
    for weaker in ("stage0", "balanced"):
        assert systems["balanced-best"].step_s <= systems[weaker].step_s * (1 + 1e-9)


@pytest.mark.parametrize("name", JOBS)
def test_bubbles_of_every_system_sum_to_the_idle_time(name: str) -> None:
    for system in compared(name).systems.values():
        schedule, timeline = system.schedule, system.timeline
        busy = busy_s(schedule, timeline)
        for device, bubbles in enumerate(sum_bubbles_by_cause(schedule, timeline)):
            assert bubbles.total == pytest.approx(timeline.step_s - busy[device], rel=1e-12)
            assert all(getattr(bubbles, cause) >= -1e-12 for cause in CAUSES)


@pytest.mark.parametrize("name", JOBS)
def test_every_system_does_all_the_work_once(name: str) -> None:
    """Every system runs the same encoder and LLM layers; only splits of pieces may differ."""
    comparison = compared(name)
    for system in comparison.systems.values():
        schedule = system.schedule
        kinds = {OpKind(kind) for kind in np.unique(schedule.kind)}
        assert OpKind.FORWARD in kinds and (
            OpKind.BACKWARD in kinds or {OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD} <= kinds
        )
        assert (schedule.duration_s >= 0).all()
        order = np.lexsort((np.arange(len(schedule)), schedule.device * 8 + schedule.lane))
        order = order[~schedule.is_recv[order]]  # a receive occupies no lane
        lane = (schedule.device * 8 + schedule.lane)[order]
        start, finish = system.timeline.start_s[order], system.timeline.finish_s[order]
        same = lane[1:] == lane[:-1]
        assert (start[1:][same] >= finish[:-1][same] - 1e-12).all()  # one op at a time per lane


def test_memory_names_the_worst_rank() -> None:
    for system in compared("paper/A").systems.values():
        assert system.fits == (system.peak_bytes <= 80e9)
        assert system.worst_rank


def test_all_systems_are_made_for_a_paper_job() -> None:
    """All but fsdp, which has no pipeline: the job states one."""
    assert set(compared("paper/A").systems) == set(SYSTEMS) - {"today", "paper", "optimus", "fsdp"}


@pytest.mark.parametrize("name", JOBS)
def test_plans_of_all_systems_pass_the_check(name: str, tmp_path: Path) -> None:
    systems = compared(name).systems
    assert {"stage0", "balanced", "balanced-best", "three-phase"} <= set(plan_making_systems())
    for system in systems.values():
        if system.name in plan_making_systems():
            assert system.search_result is not None
            plan = bound(system.search_result.plan, system.search_result.context)
            report = check_plan(plan)
            assert report.ok, (system.name, report.violations[0])
            assert report.step_s == pytest.approx(system.step_s, rel=1e-9)
            save_plan(plan, tmp_path / "plan.json")
            read = load_plan(tmp_path / "plan.json")
            assert read.modules == plan.modules and check_plan(read).ok
            assert system.memory.total == pytest.approx(max(held.peak for held in plan.memory))


@pytest.mark.ci("search")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["cpu/tiny-vl", "paper/small-a100"])
def test_optimus_is_no_slower_than_the_systems_that_it_contains(name: str) -> None:
    contained = ("stage0", "balanced", "balanced-best", "three-phase")
    systems = compare_systems(find_job(name), names=[*contained, "optimus"]).systems
    for other in contained:
        if systems[other].fits:
            assert systems["optimus"].step_s <= 1.002 * systems[other].step_s, other


def test_systems_are_registered_under_their_names_and_two_fill_bubbles() -> None:
    assert [load_system(name).name for name in SYSTEMS] == list(SYSTEMS)
    assert [name for name in SYSTEMS if load_system(name).allowed_as == "fill"] == ["paper", "optimus"]


def test_job_files_name_the_systems_of_the_registry() -> None:
    """The words of job files are those by which systems are allowed, and each is the name of a system."""
    words = {load_system(name).allowed_as for name in SYSTEMS} - {None}
    assert words - {"fill"} == set(get_args(BaselineSystem)) <= set(SYSTEMS)
    assert set(get_args(CurrentPlacement)) <= set(SYSTEMS)


# ------------------------------------------------------------------------ assumptions


@pytest.mark.ci("foundation")
def test_slower_assumptions_give_slower_steps() -> None:
    job = find_job("paper/A")
    base = get_preset("default")
    steps = {}
    for label, changed in {
        "base": base,
        "contention": replace(base, residence_slowdown=0.2),
        "launch": replace(base, launch_s=50e-6),
        "slow GPUs": replace(base, efficiency=0.8),
        "TP hidden": replace(base, tp_overlapped_share=0.7),
    }.items():
        comparison = compare_systems(job, names=["stage0"], assumptions=changed)
        steps[label] = comparison.systems["stage0"].step_s
    assert steps["TP hidden"] < steps["base"] < min(steps["contention"], steps["slow GPUs"])
    assert steps["launch"] >= steps["base"]


@pytest.mark.ci("foundation")
def test_paper_preset_exposes_all_parameter_traffic() -> None:
    everything = compared("paper/A", None, "paper").systems["stage0"].bubbles
    first = compared("paper/A", None, "paper-first-chunk").systems["stage0"].bubbles
    assert everything.dp_all_gather > 2 * first.dp_all_gather
    assert everything.dp_reduce_scatter > 2 * first.dp_reduce_scatter


@pytest.mark.ci
def test_a_frozen_encoder_has_no_backward_and_no_gradient_traffic() -> None:
    job = find_job("paper/A")
    vision = job.model.encoders[0]
    frozen = replace(vision, train=False, projector=replace(vision.projector, train=False))
    model = replace(job.model, encoders=(frozen,))
    system = compare_systems(replace(job, model=model), names=["stage0"]).systems["stage0"]
    schedule = system.schedule
    encoder_rows = schedule.module == 0
    compute = (schedule.lane == Lane.COMPUTE) & (schedule.duration_s > 0)
    assert set(schedule.kind[encoder_rows & compute].tolist()) == {OpKind.FORWARD}
    trained = compared("paper/A").systems["stage0"]
    assert system.step_s < trained.step_s and system.memory.total < trained.memory.total


# ------------------------------------------------------------------------ what runs today


TODAY = """\
format: optimus.job/1
model: {use: siglip-so400m-8b}
cluster: {use: h100, gpus: 16}
workload: {sequence_tokens: 4096, sequences_per_step: 64, vision_tokens: {p50: 1000, p95: 2000, max: 4000}}
layout: {llm: {pp: 4, tp: 2}}
today:
  layout: {llm: {pp: 4, tp: 2}, vision: PLACEMENT}
"""


@pytest.mark.ci
@pytest.mark.parametrize("placement", ["stage0", "balanced", "three-phase", "separate-gpus", "fsdp"])
def test_today_runs_on_all_gpus_of_the_job_and_no_more(placement: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(TODAY.replace("PLACEMENT", placement))
    system = compare_systems(find_job(path), names=["today"]).systems["today"]
    assert 0 < system.mfu < 1
    if placement in ("stage0", "balanced"):
        assert "dp2 pp4 tp2;" in system.how
    if placement == "fsdp":
        assert "dp8 pp1 tp2" in system.how


def test_today_runs_the_recipe_that_is_stated(tmp_path: Path) -> None:
    """It takes what a job takes that states the same in its model, its limits and its assumptions."""
    recipe = """
  microbatch_sequences: 2
  schedule: zero-bubble
  recompute: {llm: selective, vision: full}
  tp_overlapped: 0.5
  ep_overlapped: 0.25
  token_dispatcher: flex
"""
    path = tmp_path / "job.yaml"
    path.write_text(TODAY.replace("PLACEMENT", "stage0") + recipe.lstrip("\n"))
    job = find_job(path)
    system = compare_systems(job, names=["today"]).systems["today"]
    model = job.model
    stated = replace(
        job,
        model=replace(
            model,
            encoders=tuple(replace(encoder, recompute="full") for encoder in model.encoders),
            llm=replace(model.llm, recompute="selective"),
        ),
        layout=replace(job.layout, limits=SearchLimits(microbatch_sequences=(2,), deal_items=False)),
    )
    assumptions = replace(
        get_preset("default"),
        tp_overlapped_share=0.5,
        ep_overlapped_share=0.25 * 15 / 16,  # one of 16 microbatches has no other beside it
        token_dispatcher="flex",
    )
    context, _ = choose_smallest_context(stated, assumptions)
    layout = Layout(dp=2, pp=4, tp=2)
    at_layout = replace(context, layout=layout, microbatch_sequences=2)
    expected = Stage0System(chunks=1, order_name="zero-bubble").simulate(LlmPipelines(at_layout))
    assert system.step_s == expected.step_s and system.memory == expected.memory
    assert "zero-bubble" in system.how and "microbatch 2;" in system.how
    assert job.today is not None
    plain = compare_systems(replace(job, today=CurrentRun(llm=job.today.llm)), names=["today"])
    assert plain.systems["today"].step_s != system.step_s


@pytest.mark.parametrize(
    ("placement", "stated", "problem"),
    [
        ("fsdp", "schedule: 1f1b", "is stated, and fsdp has its own"),
        ("stage0", "schedule: interleaved", "is not for chunks 1"),
        ("stage0", "reshard_after_forward: true", "is stated, and stage0 is not sharded"),
        ("stage0", "recompute: {audio: full}", "audio"),
        ("stage0", "tp_overlapped: 1.5", "tp_overlapped"),
        ("stage0", "token_dispatcher: allgather", "token_dispatcher"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(
    placement: str, stated: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{TODAY.replace('PLACEMENT', placement)}  {stated}\n")
    with pytest.raises(UserError, match=problem):
        find_job(path)


@pytest.mark.ci
def test_fsdp_hides_gathers_under_compute() -> None:
    """A step near the busier of compute and the NIC."""
    job = find_job("paper/D")
    system = compare_systems(job, names=["fsdp"]).systems["fsdp"]
    schedule = system.schedule
    compute = schedule.duration_s[schedule.lane == Lane.COMPUTE].sum()
    tp = schedule.duration_s[schedule.lane == Lane.TP].sum()
    network = schedule.duration_s[schedule.lane == Lane.DP].sum()
    assert system.step_s < 1.25 * max(compute + tp, network)


def test_images_are_dealt_out_whole() -> None:
    context, _ = choose_smallest_context(find_job("qwen2.5-vl-72b", "h100:512"), get_preset("default"))
    encoder = context.job.model.encoders[0]
    per_sequence = np.mean([len(s.lengths(encoder.name)) for s in context.job.workload.sequences])
    assert context.busiest_group_sequences(encoder, 2, 1) == 2
    for groups in (3, 8, 64):
        share = context.busiest_group_sequences(encoder, 2, groups)
        assert share * per_sequence == pytest.approx(np.ceil(2 * per_sequence / groups))


def test_pieces_of_one_block_are_as_large_as_they_are_on_average() -> None:
    """Side by side the busiest counts; one after another only their sum does, but none is below an image."""
    context, _ = choose_smallest_context(find_job("qwen2.5-vl-72b", "h100:512"), get_preset("default"))
    encoder = context.job.model.encoders[0]
    images = context.count_images(encoder, 2)
    assert 6 < images < 8 and images % 1
    assert context.sequences_per_piece(encoder, 2, pieces=1, across=4) == 2
    assert context.sequences_per_piece(encoder, 2, pieces=2, across=1) == 1
    assert context.sequences_per_piece(encoder, 2, pieces=4, across=4) == context.busiest_group_sequences(
        encoder, 2, 4
    )
    assert context.sequences_per_piece(encoder, 2, pieces=8, across=4) == pytest.approx(
        context.busiest_group_sequences(encoder, 2, 4) / 2
    )
    assert context.sequences_per_piece(encoder, 2, pieces=64, across=4) == pytest.approx(2 / images)


def test_the_floor_is_at_most_the_llm_of_a_faster_system() -> None:
    """Estimates may choose a slower pipeline for the floor than the one that encoders are placed around."""
    found = compare_systems(find_job("cpu/tiny-vl"), names=["three-phase"])
    ours = found.systems["three-phase"]
    slow = replace(found.llm_only, step_s=1.01 * ours.step_s)
    lowered = _lower_floor(slow, [ours, "does not fit"])
    assert found.floor_s <= lowered.step_s < ours.step_s
    assert _lower_floor(found.llm_only, [ours]) is found.llm_only
