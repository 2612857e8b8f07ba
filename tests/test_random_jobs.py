"""Random jobs through planner, lowering and validator: every plan is proved, every refusal is typed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from random_jobs import random_job, random_setting
from random_plans import ROOM_BYTES, bound, random_llm, random_pipeline, random_plan

from optimus.errors import DoesNotFit, UserError
from optimus.ir.plan import Plan
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.paper import PaperSystem, search_paper_plan
from optimus.planner.systems.registry import load_system
from optimus.schedule.plan_claims import compute_device_class_memory
from optimus.verify.validator import check_plan

PIPELINE = 3  # one plan in so many is a pipeline of all modules, cut anywhere
STRATEGY = 33  # one in so many is the paper's; the others are arranged at random
CI, HEAVY = 500, 100_000
CI_PART, HEAVY_PART = 250, 1_000

FOLDED = range(24, 30)  # seeds


def setting_of(seed: int) -> PlanningContext:
    rng = Random(seed)
    return random_setting(rng, random_job(rng))


def made(seed: int) -> Plan | None:
    """The plan of a seed; None if there is none, for a reason that is told."""
    context, rng = setting_of(seed), Random(seed)
    if seed % PIPELINE == 1:
        plan = random_pipeline(rng, context, context.job.model.modules).filled.plan
        return bound(replace(plan, capacity_bytes=ROOM_BYTES), context)
    if (seed + 1) % STRATEGY:
        return random_plan(rng, context)
    try:
        if not context.job.model.encoders:
            return None
        return bound(
            search_paper_plan(context, [random_llm(rng, context, splits=False)]).filled.plan, context
        )
    except (DoesNotFit, UserError):
        return None


def failures(seeds: Iterable[int]) -> Iterator[str]:
    """What went wrong, with the seed to replay it: `list(failures([seed]))`."""
    for seed in seeds:
        try:
            plan = made(seed)
            violations = () if plan is None else check_plan(plan).violations
        except Exception as error:
            yield f"seed {seed}: {type(error).__name__}: {error}"
        else:
            yield from (f"seed {seed}: {violation}" for violation in violations[:1])


def check(first: int, count: int) -> None:
    found = list(failures(range(first, first + count)))
    assert not found, "\n".join(found)


def test_twenty_random_jobs() -> None:
    check(0, 20)


@pytest.mark.ci("plan file")
@pytest.mark.parametrize("first", range(0, CI, CI_PART))
def test_five_hundred_random_jobs(first: int) -> None:
    check(first, CI_PART)


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(CI, HEAVY, HEAVY_PART))
def test_a_hundred_thousand_random_jobs(first: int) -> None:
    check(first, HEAVY_PART)


@pytest.mark.ci("plan file")
@pytest.mark.parametrize("number", [3, 9, 16, 17, 26])
def test_with_the_search_for_the_llm_too(number: int) -> None:
    """It takes most of a strategy's time: few jobs, all of which have a plan."""
    context = setting_of(number)
    (result,) = PaperSystem().candidates(LlmPipelines(context))
    report = check_plan(bound(result.plan, context))
    assert report.ok, f"job {number}: {report.violations[0]}"


def folded_plans(seeds: Iterable[int]) -> Iterator[FilledPlan]:
    """Plans of random jobs whose encoders are narrower than the LLM's TP groups."""
    for seed in seeds:
        pipelines = LlmPipelines(setting_of(seed))
        for name in ("fsdp", "stage0", "balanced", "three-phase", "optimus"):
            with suppress(DoesNotFit, UserError):
                for candidate in islice(load_system(name).candidates(pipelines), 2):
                    result = candidate.search_result()
                    if result is not None and result.filled.folded is not None:
                        yield result.filled


def check_folded(seeds: Iterable[int]) -> int:
    """Compares plans with those in which one device class stands for alike TP blocks; returns how many."""
    plans = list(folded_plans(seeds))
    for filled in plans:
        assert filled.step_s == pytest.approx(filled.lowered.timeline.step_s, rel=1e-9)
        assert filled.compared.schedule.num_devices < filled.lowered.schedule.num_devices
        held = compute_device_class_memory(filled.header, filled.lowered.programs, filled.fixed)
        assert filled.memory == held
    return len(plans)


@pytest.mark.ci("plan file")
def test_alike_tp_blocks_take_as_long_and_hold_as_much_as_one() -> None:
    assert check_folded(FOLDED) >= 5


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(0, 600, 60))
def test_alike_tp_blocks_of_many_jobs_take_as_long_and_hold_as_much_as_one(first: int) -> None:
    assert check_folded(range(first, first + 60)) >= 30
