"""The search over the LLM's layouts: what is stated is kept, reasons are true, and the best is not lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest

from optimus.cost.assumptions import get_preset
from optimus.errors import DoesNotFit
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.job.read import find_job
from optimus.planner.compare import compare_systems
from optimus.planner.layouts import COMPARE_AT_MOST, enumerate_llm_layouts, rank_llm_layouts

SMALL = "paper/small-a100"
DEFAULT = get_preset("default")


def stated(job: Job, layout: Layout) -> Job:
    """The job with nothing left open."""
    words = f"llm=dp{layout.dp},pp{layout.pp},tp{layout.tp},cp{layout.cp}"
    return replace(job, layout=find_job(SMALL, layouts=[words]).layout)


def test_every_layout_uses_all_gpus_and_keeps_what_is_stated() -> None:
    job = find_job("qwen2.5-vl-72b", "h100:96", ["llm=tp4"])
    found = list(enumerate_llm_layouts(job))
    assert all(layout.gpus == 96 and layout.tp == 4 for layout in found)
    assert {layout.pp for layout in found} == {1, 2, 3, 4, 6, 8, 12}
    assert {layout.cp for layout in found} == {1, 2}  # 8,192 tokens: no less than 4,096 on a rank
    assert len(found) == len(set(found))


def test_a_stated_layout_is_not_searched() -> None:
    ranked = rank_llm_layouts(find_job(SMALL, layouts=["llm=pp2,tp2"]), DEFAULT)
    assert [str(context.layout) for context in ranked.contexts] == ["dp2 pp2 tp2"]
    assert ranked.rejected == () and ranked.considered == 1


def test_every_layout_is_kept_or_rejected_with_a_reason() -> None:
    job = find_job(SMALL)
    ranked = rank_llm_layouts(job, DEFAULT)
    kept = [context.layout for context in ranked.contexts]
    assert sorted(map(str, (*kept, *(each.layout for each in ranked.rejected)))) == sorted(
        map(str, enumerate_llm_layouts(job))
    )
    assert 1 <= len(kept) <= 2 * COMPARE_AT_MOST
    assert {each.reason.partition(":")[0] for each in ranked.rejected} <= {"memory", "slower", "batch"}


def steps_of_all(job: Job, name: str) -> Iterator[tuple[str, float]]:
    """Each layout stated, and what the system then takes; inf where it does not fit."""
    for layout in enumerate_llm_layouts(job):
        try:
            systems = compare_systems(stated(job, layout), names=[name]).systems
        except DoesNotFit:
            continue
        fits = name in systems and systems[name].fits
        yield str(layout), systems[name].step_s if fits else inf


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["balanced-best", "three-phase", "optimus"])
def test_no_layout_beats_the_one_that_was_found(name: str) -> None:
    """Against looking at every layout in full."""
    job = find_job(SMALL)
    steps = dict(steps_of_all(job, name))
    found = compare_systems(job, names=[name]).systems[name]
    assert len(steps) >= 8 and sum(step < inf for step in steps.values()) >= 4
    assert found.step_s <= 1.03 * min(steps.values())


@pytest.mark.ci("search")
def test_layouts_rejected_as_slower_are() -> None:
    """The LLM alone, with everything tried there, does not beat the floor of the search."""
    job = find_job(SMALL)
    ranked = rank_llm_layouts(job, DEFAULT)
    floor_s = compare_systems(job, names=["llm-only"]).floor_s
    slower = [each.layout for each in ranked.rejected if each.reason.startswith("slower")]
    assert slower
    for layout in slower:
        assert compare_systems(stated(job, layout), names=["llm-only"]).floor_s >= floor_s
