"""Related jobs get related answers: what must not matter does not, and one more option never hurts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

import pytest
from random_jobs import random_job

from optimus.cost import compute
from optimus.cost.assumptions import get_preset
from optimus.errors import DoesNotFit, UserError
from optimus.ir.ranks import LLM
from optimus.job.cluster import FLAT, Cluster, Link
from optimus.job.job import Job
from optimus.job.layout import PartialLayout
from optimus.job.workload import Workload
from optimus.planner import filled_plan
from optimus.planner.compare import Comparison, compare_systems
from optimus.planner.systems import colocated_plan
from optimus.planner.systems.registry import default_baselines, is_allowed
from optimus.schedule import op_phases

EXACT = 1e-9
SEARCHED = 2e-3  # of a step: what a search over more may lose by its limits on evaluations
UNROUNDED_DIGITS = 17  # plans state picoseconds: half of one may be another, and ties another order
ROUNDING = op_phases, colocated_plan, filled_plan  # modules that round seconds
REORDERED = 0.01  # of the best step: pipelines run encoders in the model's order, which moves their cuts
FEW, CI, HEAVY = (2, 5, 7), (1, 3, 9, 10), 400  # seeds; each job is compared with five or more others
HEAVY_PART = 25
RENAMED = {"vision": "zoom", "audio": "array"}


def compare(job: Job, launch_s: float | None = None) -> Comparison | None:
    """All systems of a job; None if it cannot run."""
    assumed = get_preset("default")
    names = default_baselines(job) + (["optimus"] if is_allowed("optimus", job) else [])
    try:
        return compare_systems(
            job, names=names, assumptions=assumed if launch_s is None else replace(assumed, launch_s=launch_s)
        )
    except (DoesNotFit, UserError):
        return None


def fitting_steps(comparison: Comparison) -> dict[str, float]:
    return {name: system.step_s for name, system in comparison.systems.items() if system.fits}


def best_s(comparison: Comparison) -> float:
    return min(s for name, s in fitting_steps(comparison).items() if name != "llm-only")


def differences(
    one: Comparison | None, other: Comparison | None, *, factor: float = 1.0, within: float = EXACT
) -> Iterator[str]:
    """Yields systems whose steps are not `factor` times those of `one`."""
    if one is None or other is None:
        if one is not other:
            yield "only one of them can run"
        return
    if set(one.systems) != set(other.systems):
        yield f"{sorted(one.systems)} and {sorted(other.systems)}"
    for name in set(one.systems) & set(other.systems):
        ratio = other.systems[name].step_s / one.systems[name].step_s
        if abs(ratio / factor - 1) > within:
            yield f"{name}: {ratio} of the step"


def broken_relations(job: Job) -> Iterator[str]:
    """Yields relations that do not hold between a job and those derived from it."""
    base = compare(job)
    yield from (f"renamed: {what}" for what in differences(base, compare(rename(job))))
    flat = replace(job, cluster=replace(job.cluster, gpu=replace(job.cluster.gpu, curves=FLAT)))
    yield from (f"speeds doubled: {what}" for what in differences(*at_both_speeds(flat), factor=0.5))
    if base is None:
        return
    encoders = tuple(reversed(job.model.encoders))
    reordered = compare(replace(job, model=replace(job.model, encoders=encoders)))
    if reordered is None or abs(best_s(reordered) / best_s(base) - 1) > REORDERED:
        yield f"encoders reordered: {reordered and best_s(reordered)} s, not {best_s(base)}"
    yield from options_that_hurt(job, base)
    yield from stated_differently(job, base)


def at_both_speeds(job: Job) -> tuple[Comparison | None, Comparison | None]:
    """Compares systems on the job's cluster, and where kernels, links, memory and hosts are twice as fast."""
    launch_s, latency_s = get_preset("default").launch_s, compute.MEMORY_KERNEL_LATENCY_S
    with pytest.MonkeyPatch.context() as patch:
        for module in ROUNDING:
            patch.setattr(module, "SECONDS_DIGITS", UNROUNDED_DIGITS)
        slow = compare(job)
        patch.setattr(compute, "MEMORY_KERNEL_LATENCY_S", latency_s / 2)
        return slow, compare(replace(job, cluster=double_speeds(job.cluster)), launch_s=launch_s / 2)


def rename(job: Job) -> Job:
    """Returns the job with other names everywhere, and a source of its figures."""
    encoders = tuple(replace(each, name=RENAMED[each.name]) for each in job.model.encoders)
    sequences = tuple(
        replace(each, items=tuple((RENAMED[name], lengths) for name, lengths in each.items))
        for each in job.workload.sequences
    )
    workload: Workload = replace(job.workload, sequences=sequences)
    cluster = replace(job.cluster, name="another", gpu=replace(job.cluster.gpu, source="a data sheet"))
    model = replace(job.model, name="another", encoders=encoders)
    return replace(job, name="another", model=model, workload=workload, cluster=cluster)


def double_speeds(cluster: Cluster) -> Cluster:
    """Returns a cluster that computes and sends twice as fast, with as much memory."""

    def twice(link: Link) -> Link:
        return replace(
            link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s, latency_s=link.latency_s / 2
        )

    gpu = replace(
        cluster.gpu,
        peak_flops=2 * cluster.gpu.peak_flops,
        memory_bandwidth_bytes_per_s=2 * cluster.gpu.memory_bandwidth_bytes_per_s,
    )
    return replace(
        cluster, gpu=gpu, within_node=twice(cluster.within_node), between_nodes=twice(cluster.between_nodes)
    )


def options_that_hurt(job: Job, base: Comparison) -> Iterator[str]:
    """Yields systems without which the best is better, and a microbatch size that makes it worse."""
    limits = job.layout.limits
    for word in limits.allow:
        allow = tuple(each for each in limits.allow if each != word)
        fewer = compare(replace(job, layout=replace(job.layout, limits=replace(limits, allow=allow))))
        if fewer is not None and best_s(base) > (1 + EXACT) * best_s(fewer):
            yield f"{word} makes the best worse: {best_s(base) / best_s(fewer)}"
    sizes = tuple(sorted({*limits.microbatch_sequences, 1, 2}))
    more = compare(
        replace(job, layout=replace(job.layout, limits=replace(limits, microbatch_sequences=sizes)))
    )
    if more is None:
        yield f"with microbatches of {sizes} it cannot run"
    elif best_s(more) > (1 + SEARCHED) * best_s(base):
        yield f"microbatches of {sizes} make the best worse: {best_s(more) / best_s(base)}"


def stated_differently(job: Job, base: Comparison) -> Iterator[str]:
    """Yields systems that take longer at the layout they chose if the job states it."""
    steps = {name: s for name, s in fitting_steps(base).items() if name in ("balanced-best", "optimus")}
    for name, step_s in steps.items():
        result = base.systems[name].search_result
        if result is None or result.llm.locked:  # a sharded LLM has no pipeline whose layout could be stated
            continue
        layout = result.llm.layout
        stated = PartialLayout(**{axis: getattr(layout, axis) for axis in ("dp", "pp", "cp", "ep", "tp")})
        modules = {**job.layout.modules, LLM: stated}
        again = compare(replace(job, layout=replace(job.layout, modules=modules)))
        if again is None or abs(again.systems[name].step_s / step_s - 1) > SEARCHED:
            found = "cannot run" if again is None else f"takes {again.systems[name].step_s} s, not {step_s}"
            yield f"{name} at its own layout {layout}, stated, {found}"


def failures(seeds: Iterable[int]) -> Iterator[str]:
    """Yields relations that do not hold, with the seed; every second job states no layout."""
    for seed in seeds:
        job = random_job(Random(seed))
        if seed % 2:
            job = replace(job, layout=replace(job.layout, modules={}))
        yield from (f"seed {seed}: {what}" for what in broken_relations(job))


def test_related_jobs_get_related_answers() -> None:
    assert not list(failures(FEW))


@pytest.mark.ci("search")
def test_more_related_jobs_get_related_answers() -> None:
    assert not list(failures(CI))


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(0, HEAVY, HEAVY_PART))
def test_two_thousand_related_jobs_get_related_answers(first: int) -> None:
    assert not list(failures(range(first, min(first + HEAVY_PART, HEAVY))))
