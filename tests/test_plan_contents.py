"""A header that leaves out what training needs does not pass, even if its programs agree with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from optimus.ir.op import OpKind
from optimus.ir.plan import Bucket, Plan, PlannedModule
from optimus.ir.ranks import LLM
from optimus.job.read import find_job
from optimus.planner.planning import make_plan
from optimus.verify.buckets import check_trained_layers_in_buckets
from optimus.verify.rules import (
    check_gpu_capacity,
    check_recomputation,
    check_seam_gathers,
    check_template_layers,
)
from optimus.verify.validator import check_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Four TP blocks on one stage; encoders and LLM with several replicas."""
    return make_plan(find_job("paper/small-a100", layouts=["llm=pp1,tp4"]), systems=[]).plan


def with_modules(plan: Plan, change: Callable[[PlannedModule], PlannedModule]) -> Plan:
    return replace(plan, modules={name: change(module) for name, module in plan.modules.items()})


def with_buckets(plan: Plan, change: Callable[[Bucket], Bucket | None]) -> Plan:
    def changed(module: PlannedModule) -> PlannedModule:
        stages = (tuple(map(change, stage)) for stage in module.buckets)
        kept = tuple(tuple(bucket for bucket in stage if bucket is not None) for stage in stages)
        return replace(module, buckets=kept)

    return with_modules(plan, changed)


@pytest.mark.ci("plan file")
def test_the_plan_itself_holds(plan: Plan) -> None:
    for check in (
        check_gpu_capacity,
        check_template_layers,
        check_trained_layers_in_buckets,
        check_recomputation,
        check_seam_gathers,
    ):
        assert not list(check(plan))
    assert check_plan(plan).ok


def test_recomputation_that_is_not_stated(plan: Plan) -> None:
    llm = plan.modules[LLM]
    assert llm.regather
    for other in (replace(llm, recomputed=(*llm.recomputed, "out")), replace(llm, regather=False)):
        report = check_plan(replace(plan, modules={**plan.modules, LLM: other}))
        assert not report.rules["coverage"] and report.violations[0].where == LLM


def test_gradients_that_are_never_reduced(plan: Plan) -> None:
    found = list(check_trained_layers_in_buckets(with_buckets(plan, lambda bucket: None)))
    assert any(where.startswith("llm") for where, _ in found)
    assert any(where.startswith("vision") and "is in no bucket" in problem for where, problem in found)
    empty = with_buckets(plan, lambda b: replace(b, chunk=max(b.chunk, 0), end_layer=b.first_layer))
    assert list(check_trained_layers_in_buckets(empty)) == found


def test_forwards_that_do_not_wait_for_parameters(plan: Plan) -> None:
    report = check_plan(with_buckets(plan, lambda bucket: replace(bucket, gates=False)))
    assert not report.rules["data"]
    assert "does not wait for its parameters" in report.violations[0].problem


def test_rows_that_reach_other_ranks_and_are_not_gathered(plan: Plan) -> None:
    name = plan.modules[LLM].chunks[0].templates[OpKind.FORWARD]
    without = tuple(phase for phase in plan.templates[name] if not phase.name.startswith("seam"))
    shift = len(plan.templates[name]) - len(without)
    moved = tuple(
        replace(phase, after=tuple(a - shift for a in phase.after if a >= shift)) for phase in without
    )
    found = list(check_seam_gathers(replace(plan, templates={**plan.templates, name: moved})))
    assert found == [("llm virtual stage 0", "F does not begin with a gather of the seam's rows over tp")]


def test_more_memory_than_the_gpu_has(plan: Plan) -> None:
    report = check_plan(replace(plan, capacity_bytes=100 * plan.capacity_bytes))
    assert not report.rules["memory"] and report.violations[0].where == "capacity_bytes"


def test_templates_of_layers_that_a_chunk_does_not_have(plan: Plan) -> None:
    def fewer(module: PlannedModule) -> PlannedModule:
        return replace(module, chunks=tuple(replace(chunk, layers=1) for chunk in module.chunks))

    report = check_plan(with_modules(plan, fewer))
    assert not report.rules["coverage"] and "names a layer" in report.violations[0].problem
