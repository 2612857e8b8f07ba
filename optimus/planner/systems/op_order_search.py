"""Searches op orders that beat the named ones; for small pipelines, together with the cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import combinations
from math import inf
from random import Random

from optimus.ir.op import OpKind
from optimus.planner.systems.pipeline import GREEDY, PipelineCandidate
from optimus.schedule.local_search import shorten_pipeline_order
from optimus.schedule.pipeline_orders import PRIORITIES, OpTimes, TimedOrder, list_schedule_pipeline
from optimus.schedule.stage_costs import Cut

MAX_LISTED_OPS = 5000  # list scheduling of more takes too long
LONG_STEP_ROUNDS = 4  # of pp microbatches; a longer step has small bubbles anyway
MAX_CAPS = 4  # on activations alive that are tried until an order fits
SMALL_OPS = 200  # pipelines up to this many ops: cut and order are searched together,
SEARCH_WITHIN = 1.05  # if the step is at most this times the best, or another order may be shorter
# The budgets of that search are counts of ops placed, not seconds, so that results repeat.
EXPLORED_OPS = 60_000  # by list scheduling, cut after cut
LOCAL_SEARCH_OPS = ((40, 2_000), (10, 8_000), (2, 80_000))  # so many of the best cuts, with so many ops each
SPLIT, UNSPLIT = (OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD), (OpKind.FORWARD, OpKind.BACKWARD)
Drafts = list[tuple[TimedOrder, Cut]]


def search_op_orders(starts: Sequence[PipelineCandidate]) -> Iterator[PipelineCandidate]:
    """Yields the best pipeline in orders searched for its durations, the best small ones with new cuts."""
    schedulable = [
        start
        for start in starts
        if can_list_schedule(start.layout.pp, start.layout.chunks, start.microbatches)
    ]
    small: dict[int, PipelineCandidate] = {}  # the best of every number of microbatches
    for start in schedulable:
        near = start.estimate_s <= SEARCH_WITHIN * starts[0].estimate_s
        if _num_ops(start) <= SMALL_OPS and (near or _least_step_s(start) < starts[0].estimate_s):
            small.setdefault(start.microbatches, start)
    for start in schedulable[:1]:
        if start not in small.values():
            yield from greedy_order_candidates(start)
    for start in small.values():
        for kinds in _backward_variants(start):
            yield from _search_cuts(start, kinds)


def can_list_schedule(stages: int, chunks: int, microbatches: int) -> bool:
    """Returns whether list scheduling is worth its time."""
    few = stages * chunks * microbatches * len(SPLIT) <= MAX_LISTED_OPS
    return stages > 1 and few and microbatches <= LONG_STEP_ROUNDS * stages


def greedy_order_candidates(start: PipelineCandidate) -> Iterator[PipelineCandidate]:
    """Yields `start` in greedy op orders, each with as many activations alive as fit."""
    for kinds in _backward_variants(start):
        capped = _largest_cap_that_fits(start, kinds)
        if capped is not None:
            yield capped[1]


def op_times_at_cut(pipeline: PipelineCandidate, cut: Cut, kinds: Sequence[OpKind]) -> OpTimes:
    """Returns the seconds of the pipeline's ops and sends with another cut."""
    across = pipeline.context.cost_model.stages_cross_nodes(pipeline.layout)
    return OpTimes(
        stages=pipeline.layout.pp,
        seconds={kind: pipeline.sums.seconds(kind, cut).tolist() for kind in kinds},
        send_s=pipeline.sums.send_s(cut, across_nodes=across).tolist(),
    )


def _backward_variants(pipeline: PipelineCandidate) -> list[tuple[OpKind, ...]]:
    """Returns kinds of ops: with split backwards, and unsplit unless the parts never take longer."""
    inputs, weights, unsplit = (
        pipeline.sums.layer_seconds(kind) for kind in (OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD, OpKind.BACKWARD)
    )
    split_costs = bool((inputs + weights > unsplit * (1 + 1e-9)).any())
    return [SPLIT, UNSPLIT] if split_costs else [SPLIT]


def _least_step_s(start: PipelineCandidate) -> float:
    """Returns a bound on the step of the pipeline's cut in any order."""
    times = (op_times_at_cut(start, start.cut, kinds) for kinds in _backward_variants(start))
    return min(step_lower_bound_s(each, start.microbatches) for each in times)


def step_lower_bound_s(times: OpTimes, microbatches: int) -> float:
    """Returns a bound on the step: a stage waits for its first forward, works, sends its last backward."""
    forward, backward = times.seconds[OpKind.FORWARD], times.seconds[times.backward]
    last = times.seconds[OpKind.WEIGHT_GRAD][0] if OpKind.WEIGHT_GRAD in times.seconds else 0.0
    least = sum(forward) + sum(backward) + 2 * sum(times.send_s[:-1]) + last
    for stage in range(times.stages):
        sent = sum(times.send_s[:stage])
        before, after = sum(forward[:stage]) + sent, sum(backward[:stage]) + sent
        busy = {
            kind: microbatches * sum(times.seconds[kind][stage :: times.stages]) for kind in times.seconds
        }
        passing = busy[OpKind.FORWARD] + busy[times.backward] + after + last
        least = max(least, before + sum(busy.values()), before + passing)
    return least


def sliding_cuts(cut: Cut) -> Iterator[Cut]:
    """Yields cuts in which one virtual stage gives a layer to another and all between shift by one."""
    for first, end in combinations(range(1, len(cut)), 2):
        for step in (-1, 1):
            moved = (*cut[:first], *(place + step for place in cut[first:end]), *cut[end:])
            if moved[first - 1] < moved[first] and moved[end - 1] < moved[end]:
                yield moved


def _largest_cap_that_fits(
    start: PipelineCandidate, kinds: Sequence[OpKind]
) -> tuple[int, PipelineCandidate] | None:
    """Returns the largest cap on activations alive with which a greedy order fits, and that pipeline."""
    cap, times = start.layout.chunks * start.microbatches, op_times_at_cut(start, start.cut, kinds)
    for _ in range(MAX_CAPS):
        pipelines = [_ordered(start, start.cut, draft) for draft in _drafts(times, start.microbatches, cap)]
        fitting = next((pipeline for pipeline in pipelines if pipeline.fits), None)
        if fitting is not None:
            return cap, fitting
        least = min(pipelines, key=lambda pipeline: pipeline.peak_bytes)
        worst = max(least.memories, key=lambda memory: memory.total)
        kept = worst.llm_activations + worst.encoder_activations
        room = kept + start.context.capacity_bytes - least.peak_bytes
        if room <= 0:
            break
        cap = max(1, min(cap - 1, int(cap * room / kept)))
    return None


def _drafts(times: OpTimes, microbatches: int, cap: int) -> list[TimedOrder]:
    """Returns greedy orders by every priority, the shortest first."""
    drafts = [list_schedule_pipeline(times, microbatches, cap=cap, priority=first) for first in PRIORITIES]
    return sorted(drafts, key=lambda draft: draft.step_s)


def _search_cuts(start: PipelineCandidate, kinds: Sequence[OpKind]) -> Iterator[PipelineCandidate]:
    """Yields the best cuts, their greedy orders improved by local search: many a little, then few a lot."""
    capped = _largest_cap_that_fits(start, kinds)
    if capped is None:
        return
    yield capped[1]
    drafts = _explore(start, kinds, capped[0])
    random, best_s = Random(0), inf
    for count, budget in LOCAL_SEARCH_OPS:
        improved: Drafts = []
        for draft, cut in drafts[:count]:
            least = step_lower_bound_s(draft.times, start.microbatches)
            if least < best_s:
                draft = shorten_pipeline_order(
                    draft,
                    rounds=budget // _num_ops(start),
                    random=random,
                    enough_s=least,
                    accept=start.with_cut(cut).fits_in,
                )
                best_s = min(best_s, draft.step_s)
            improved.append((draft, cut))
        drafts = _by_step(improved)
    for draft, cut in drafts:
        pipeline = _ordered(start, cut, draft)
        if pipeline.fits:  # an order that the local search left alone may not
            yield pipeline


def _explore(start: PipelineCandidate, kinds: Sequence[OpKind], cap: int) -> Drafts:
    """Explores cuts around that of `start` in greedy order, from the best to its neighbours; best first."""
    drafts: dict[Cut, TimedOrder] = {}
    waiting: list[tuple[float, Cut]] = []
    budget = EXPLORED_OPS // (_num_ops(start) * len(PRIORITIES))

    def schedule(cut: Cut) -> None:
        drafts[cut] = _drafts(op_times_at_cut(start, cut, kinds), start.microbatches, cap)[0]
        heappush(waiting, (drafts[cut].step_s, cut))

    schedule(start.cut)
    while waiting and len(drafts) < budget:
        for other in sliding_cuts(heappop(waiting)[1]):
            if other not in drafts:
                schedule(other)
    return _by_step([(draft, cut) for cut, draft in drafts.items()])


def _by_step(drafts: Drafts) -> Drafts:
    return sorted(drafts, key=lambda pair: (pair[0].step_s, pair[1]))


def _ordered(start: PipelineCandidate, cut: Cut, draft: TimedOrder) -> PipelineCandidate:
    return replace(start, cut=cut, order_name=GREEDY, explicit_order=draft.order)


def _num_ops(pipeline: PipelineCandidate) -> int:
    """Returns the ops of a step with split backwards."""
    return pipeline.layout.virtual_stages * pipeline.microbatches * len(SPLIT)
