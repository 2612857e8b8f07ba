"""Random jobs through planner, lowering and validator: every plan is proved, every refusal is typed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

import pytest
from random_jobs import random_job, random_setting
from random_plans import ROOM_BYTES, bound, random_llm, random_pipeline, random_plan

from optimus.errors import DoesNotFit, UserError
from optimus.ir.plan import Plan
from optimus.planner.context import PlanningContext
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.paper import PaperSystem, search_paper_plan
from optimus.verify.validator import check_plan

PIPELINE = 3  # one plan in so many is a pipeline of all modules, cut anywhere
STRATEGY = 33  # one in so many is the paper's; the others are arranged at random
CI, HEAVY = 500, 100_000
CI_PART, HEAVY_PART = 250, 1_000


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
