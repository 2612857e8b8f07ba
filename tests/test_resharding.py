"""Plans that gather and free parameters layer by layer: what rules refuse, bytes and seconds of traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from dry_run_worker import TRAINING
from engine_cases import SYSTEMS

import optimus
from optimus.cost.assumptions import get_preset
from optimus.engine.rank_dry_run import dry_run_rank
from optimus.ir.op import Communicator, OpKind
from optimus.ir.plan import WHOLE_STAGE, Bucket, Plan, Program, Span
from optimus.ir.ranks import LLM
from optimus.planner.context import PlanningContext
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.planning import make_plan
from optimus.planner.systems.colocated_plan import Sharding
from optimus.planner.systems.fsdp import FsdpCandidate, FsdpSystem
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.schedule.lower import simulate_plan
from optimus.schedule.plan_schedule import build_plan_schedule
from optimus.sensitivity.why_not import explain_layout
from optimus.verify.buckets import check_trained_layers_in_buckets
from optimus.verify.validator import check_plan

BY_NAME = {case.name: case for case in SYSTEMS}
TIED = BY_NAME["fsdp: two ranks, tied"]
Row = list[int]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return TIED.plan


def broken(plan: Plan, change: Callable[[list[Row]], None]) -> set[str]:
    """The rules that a changed program breaks."""
    rows = plan.programs[0].rows.tolist()
    change(rows)
    return {v.rule for v in check_plan(replace(plan, programs=(Program.of(rows),))).violations}


def with_bucket(plan: Plan, place: int, **given: object) -> Plan:
    module = plan.modules[LLM]
    buckets = list(module.buckets[0])
    buckets[place] = replace(buckets[place], **given)  # type: ignore[arg-type]
    return replace(plan, modules={**plan.modules, LLM: replace(module, buckets=(tuple(buckets),))})


def first(rows: list[Row], kind: OpKind, module: int = 1, microbatch: int = 0) -> int:
    return next(at for at, row in enumerate(rows) if (row[0], row[1], row[3]) == (module, kind, microbatch))


def move(kind: OpKind, by: int) -> Callable[[list[Row]], None]:
    """Moves the first such line of the LLM's second microbatch past others."""

    def change(rows: list[Row]) -> None:
        at = first(rows, kind, microbatch=1)
        rows.insert(at + by, rows.pop(at))

    return change


def test_the_plan_holds(plan: Plan) -> None:
    assert check_plan(plan).ok
    spans = {bucket.gathered_per for bucket in plan.modules[LLM].buckets[0]}
    assert spans == {Span.OP, Span.MICROBATCH}
    kinds = {OpKind(kind) for kind in plan.programs[0].kind.tolist()}
    assert {OpKind.UNSHARD, OpKind.UNSHARD_B, OpKind.REDUCE_GRAD} <= kinds


def test_a_gather_behind_its_readers_is_refused(plan: Plan) -> None:
    assert "data" in broken(plan, move(OpKind.UNSHARD_B, 40))
    assert "data" in broken(plan, move(OpKind.UNSHARD, 40))


def test_a_gather_of_what_is_gathered_is_refused(plan: Plan) -> None:
    assert "data" in broken(plan, move(OpKind.UNSHARD_B, -60))


def test_a_gather_or_reduce_that_is_missing_is_refused(plan: Plan) -> None:
    for kind in (OpKind.UNSHARD, OpKind.UNSHARD_B, OpKind.REDUCE_GRAD):
        assert "coverage" in broken(plan, lambda rows, kind=kind: rows.pop(first(rows, kind)))  # type: ignore[misc]


def test_a_reduce_before_its_gradients_is_refused(plan: Plan) -> None:
    assert "data" in broken(plan, move(OpKind.REDUCE_GRAD, -3))


def test_gradients_of_two_microbatches_do_not_mix(plan: Plan) -> None:
    """The last reduce of a microbatch, moved behind the first gradients of the next."""

    def change(rows: list[Row]) -> None:
        at = max(n for n, row in enumerate(rows) if (row[0], row[1], row[3]) == (1, OpKind.REDUCE_GRAD, 0))
        end = max(n for n, row in enumerate(rows) if (row[0], row[1], row[3]) == (1, OpKind.BACKWARD, 1))
        rows.insert(end, rows.pop(at))

    assert "data" in broken(plan, change)


def test_memory_that_is_claimed_too_low_is_refused(plan: Plan) -> None:
    held = plan.memory[0]
    assert held.gathered > 0
    less = replace(plan, memory=(replace(held, gathered=held.gathered - 1),))
    assert {v.rule for v in check_plan(less).violations} == {"memory"}


@pytest.mark.parametrize(
    ("place", "given", "said"),
    [
        (0, {"gathered_per": Span.OP}, "gathered for single ops"),
        (1, {"gathered_per": Span.STEP}, "has buckets gathered_per step and others"),
        (1, {"reduced_per": Span.STEP}, "has buckets reduced_per step and others"),
        (1, {"first_layer": 90, "end_layer": 91}, "gathered for a forward that has no phase of its layers"),
    ],
)
def test_spans_that_make_no_sense_are_refused(
    plan: Plan, place: int, given: dict[str, object], said: str
) -> None:
    report = check_plan(with_bucket(plan, place, **given))
    assert any(said in violation.problem for violation in report.violations), report.violations


def test_gradients_that_are_never_reduced_are_refused(plan: Plan) -> None:
    assert not list(check_trained_layers_in_buckets(plan))
    never = with_bucket(plan, 1, reduced_per=Span.NEVER)
    (problem,) = check_trained_layers_in_buckets(never)
    assert problem == ("llm stage 0 chunk 0 layer 1", "is trained and its gradients are never reduced")


def test_a_bucket_of_the_whole_stage_stands_for_tied_ends_only(plan: Plan) -> None:
    llm = plan.modules[LLM]
    buckets = llm.buckets[0]
    assert [bucket.chunk for bucket in buckets].count(WHOLE_STAGE) == 1
    for place, bucket in enumerate(buckets):
        rest = (buckets[:place] + buckets[place + 1 :], *llm.buckets[1:])
        found = list(
            check_trained_layers_in_buckets(
                replace(plan, modules={**plan.modules, LLM: replace(llm, buckets=rest)})
            )
        )
        ends = [0, llm.chunks[0].layers - 1]
        missing = ends if bucket.chunk == WHOLE_STAGE else [bucket.first_layer]
        where = [f"llm stage 0 chunk 0 layer {layer}" for layer in missing]
        assert found == [(layer, "is trained and is in no bucket") for layer in where]


@pytest.mark.ci("engine")
def test_a_dry_run_counts_the_bytes_that_are_planned() -> None:
    for name in ("two ranks, tied", "four ranks, two encoders", "parameters kept, two ranks"):
        case = BY_NAME[f"fsdp: {name}"]
        memory = dry_run_rank(case.job, case.plan, TRAINING, 0).memory
        for part in ("parameters", "gradients", "optimizer", "gathered"):
            assert memory.counted[part] == memory.planned[part], (name, part)
        assert abs(memory.error) < 0.05


# ---------------------------------------------------------------------------- against closed forms


@pytest.fixture(scope="module")
def context() -> PlanningContext:
    return choose_smallest_context(TIED.job, get_preset("default"))[0]


def candidates(context: PlanningContext) -> list[FsdpCandidate]:
    return list(FsdpSystem().candidates(LlmPipelines(context)))


def test_every_byte_of_traffic_is_in_the_program(context: PlanningContext) -> None:
    """ZeRO-3 gathers twice in a microbatch, but its ends once; ZeRO-2 once in a step; both reduce in each."""
    for candidate in candidates(context):
        plan, schedule = candidate.filled.plan, candidate.filled.lowered.schedule
        moved = {kind: int(schedule.bytes[schedule.kind == kind].sum()) for kind in OpKind}
        buckets = [bucket for module in plan.modules.values() for bucket in module.buckets[0]]
        times = plan.microbatches

        def total(wanted: Callable[[Bucket], bool], of: list[Bucket] = buckets) -> int:
            return sum(bucket.gather_bytes for bucket in of if wanted(bucket))

        per_step = candidate.sharding == Sharding.GRADIENTS
        assert moved[OpKind.UNSHARD] == total(lambda _: True) * (1 if per_step else times)
        assert moved[OpKind.UNSHARD_B] == total(lambda b: b.gathered_per == Span.OP) * times
        assert moved[OpKind.REDUCE_GRAD] == sum(bucket.reduce_bytes for bucket in buckets) * times


def test_the_bound_on_memory_holds(context: PlanningContext) -> None:
    """What decides whether a candidate fits is at least what its plan takes, and not much more."""
    for candidate in candidates(context):
        (bound,), (planned,) = candidate.memories, candidate.filled.memories
        assert planned.total <= bound.total < planned.total + 0.1 * (planned.states + planned.llm_activations)


def test_slow_traffic_is_the_step(context: PlanningContext) -> None:
    """If traffic takes far longer than compute, the NIC is busy from begin to end."""
    for candidate in candidates(context):
        plan = candidate.filled.plan
        slow = {
            name: replace(
                module,
                buckets=tuple(
                    tuple(replace(b, gather_s=1.0, reduce_s=b.reduce_s and 2.0) for b in stage)
                    for stage in module.buckets
                ),
            )
            for name, module in plan.modules.items()
        }
        schedule = build_plan_schedule(replace(plan, modules=slow), plan.programs)
        busy_s = schedule.duration_s[schedule.communicator == Communicator.DP].sum()
        step_s = simulate_plan(plan, schedule).step_s
        # Layers of two microbatches are gathered one after another: the first is not gathered ahead.
        assert busy_s <= step_s < busy_s + 0.01


@pytest.mark.ci("search")
def test_why_a_plan_without_a_pipeline_is_not_one() -> None:
    """The layout of a pipeline is planned by the system that has one, and the answer says so."""
    job = optimus.find_job("cpu/tiny-vl")
    job = replace(job, layout=replace(job.layout, modules={}))
    planned = make_plan(job, strategy="fsdp", systems=())
    reason = explain_layout(planned.plan, "llm=pp2,tp1")
    assert reason.verdict == "slower" and reason.other is not None
    assert reason.other.layouts[LLM].pp == 2
    assert "planned by optimus: fsdp has no pipeline of the LLM" in reason.reason
