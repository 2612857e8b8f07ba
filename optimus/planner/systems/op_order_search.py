"""Looks for an op order that beats the named ones; for small pipelines, for a cut together with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import combinations
from math import inf
from random import Random

from optimus.ir.op import OpKind
from optimus.planner.systems.pipeline import GREEDY, LONG_STEP, PipelineCandidate
from optimus.schedule.local_search import shorten_pipeline_order
from optimus.schedule.pipeline_orders import PRIORITIES, OpTimes, TimedOrder, list_schedule_pipeline
from optimus.schedule.stage_costs import Cut

LISTED_OPS = 5000  # list scheduling of more takes too long
CAPS = 4  # that are tried until an order fits
SMALL_OPS = 200  # up to here cut and order are searched together
NEAR = 1.05  # and if their step is at most this times the best
# The budgets of that search are counts of ops placed, not seconds, so that results repeat.
EXPLORED_OPS = 60_000  # by list scheduling, cut after cut
SEARCHED_OPS = ((40, 2_000), (10, 8_000), (2, 80_000))  # so many of the best cuts, with so many ops each
SPLIT, WHOLE = (OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD), (OpKind.FORWARD, OpKind.BACKWARD)
Drafts = list[tuple[TimedOrder, Cut]]


def search_op_orders(starts: Sequence[PipelineCandidate]) -> Iterator[PipelineCandidate]:
    """The first of these pipelines, best first, in orders made for its durations; and the first small one."""
    listed = [
        start
        for start in starts
        if can_list_schedule(start.layout.pp, start.layout.chunks, start.microbatches)
    ]
    near = [start for start in listed if start.estimate_s <= NEAR * starts[0].estimate_s]
    small = [start for start in near if _num_ops(start) <= SMALL_OPS][:1]
    for start in listed[:1]:
        if start not in small:
            yield from greedy_order_candidates(start)
    for start in small:
        for kinds in _backward_variants(start):
            yield from _search(start, kinds)


def can_list_schedule(stages: int, chunks: int, microbatches: int) -> bool:
    """Whether list scheduling is worth its time: a long step has small bubbles anyway."""
    few = stages * chunks * microbatches * len(SPLIT) <= LISTED_OPS
    return stages > 1 and few and microbatches <= LONG_STEP * stages


def greedy_order_candidates(start: PipelineCandidate) -> Iterator[PipelineCandidate]:
    """`start` in greedy orders, each with as many activations alive as fit."""
    for kinds in _backward_variants(start):
        found = _most_alive(start, kinds)
        if found is not None:
            yield found[1]


def op_times_at_cut(pipeline: PipelineCandidate, cut: Cut, kinds: Sequence[OpKind]) -> OpTimes:
    """Seconds of the pipeline's ops and sends, were its layers cut so."""
    across = pipeline.context.cost_model.stages_cross_nodes(pipeline.layout)
    return OpTimes(
        stages=pipeline.layout.pp,
        seconds={kind: pipeline.sums.seconds(kind, cut).tolist() for kind in kinds},
        send_s=pipeline.sums.send_s(cut, across_nodes=across).tolist(),
    )


def _backward_variants(pipeline: PipelineCandidate) -> list[tuple[OpKind, ...]]:
    """Kinds of ops: weight gradients split off; or backwards whole, unless the parts never take longer."""
    inputs, weights, whole = (
        pipeline.sums.layer_seconds(kind) for kind in (OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD, OpKind.BACKWARD)
    )
    costs = bool((inputs + weights > whole * (1 + 1e-9)).any())
    return [SPLIT, WHOLE] if costs else [SPLIT]


def step_lower_bound_s(times: OpTimes, microbatches: int) -> float:
    """No order is shorter: a stage waits for its first forward, works, and its last backward goes on."""
    forward, backward = times.seconds[OpKind.FORWARD], times.seconds[times.backward]
    last = times.seconds[OpKind.WEIGHT_GRAD][0] if OpKind.WEIGHT_GRAD in times.seconds else 0.0
    least = sum(forward) + sum(backward) + 2 * sum(times.send_s[:-1]) + last
    for stage in range(times.stages):
        sent = sum(times.send_s[:stage])
        before, after = sum(forward[:stage]) + sent, sum(backward[:stage]) + sent
        own = {kind: microbatches * sum(times.seconds[kind][stage :: times.stages]) for kind in times.seconds}
        passing = own[OpKind.FORWARD] + own[times.backward] + after + last
        least = max(least, before + sum(own.values()), before + passing)
    return least


def sliding_cuts(cut: Cut) -> Iterator[Cut]:
    """Cuts in which one virtual stage gives a layer to another and all between them slide by one."""
    for first, end in combinations(range(1, len(cut)), 2):
        for step in (-1, 1):
            moved = (*cut[:first], *(place + step for place in cut[first:end]), *cut[end:])
            if moved[first - 1] < moved[first] and moved[end - 1] < moved[end]:
                yield moved


def _most_alive(start: PipelineCandidate, kinds: Sequence[OpKind]) -> tuple[int, PipelineCandidate] | None:
    """The largest cap, from none at all downwards, with which a greedy order fits; and the best such."""
    cap, times = start.layout.chunks * start.microbatches, op_times_at_cut(start, start.cut, kinds)
    for _ in range(CAPS):
        made = [_ordered(start, start.cut, draft) for draft in _drafts(times, start.microbatches, cap)]
        fitting = next((pipeline for pipeline in made if pipeline.fits), None)
        if fitting is not None:
            return cap, fitting
        least = min(made, key=lambda pipeline: pipeline.peak_bytes)
        worst = max(least.memories, key=lambda memory: memory.total)
        kept = worst.llm_activations + worst.encoder_activations
        room = kept + start.context.capacity_bytes - worst.total
        if room <= 0:
            break
        cap = max(1, min(cap - 1, int(cap * room / kept)))
    return None


def _drafts(times: OpTimes, microbatches: int, cap: int) -> list[TimedOrder]:
    """Greedy orders by every priority, the shortest first."""
    drafts = [list_schedule_pipeline(times, microbatches, cap=cap, priority=first) for first in PRIORITIES]
    return sorted(drafts, key=lambda draft: draft.step_s)


def _search(start: PipelineCandidate, kinds: Sequence[OpKind]) -> Iterator[PipelineCandidate]:
    """Yields orders of the best cuts, shortened by local search: many with few rounds, then few with many."""
    found = _most_alive(start, kinds)
    if found is None:
        return
    yield found[1]
    drafts = _explore(start, kinds, found[0])
    random, best_s = Random(0), inf
    for count, budget in SEARCHED_OPS:
        shortened: Drafts = []
        for draft, cut in drafts[:count]:
            least = step_lower_bound_s(draft.times, start.microbatches)
            if least < best_s:
                draft = shorten_pipeline_order(
                    draft,
                    rounds=budget // _num_ops(start),
                    random=random,
                    enough_s=least,
                    accept=partial(_fits, start, cut),
                )
                best_s = min(best_s, draft.step_s)
            shortened.append((draft, cut))
        drafts = _by_step(shortened)
    for draft, cut in drafts:
        if _fits(start, cut, draft):  # a greedy order that was not shortened may not
            yield _ordered(start, cut, draft)


def _explore(start: PipelineCandidate, kinds: Sequence[OpKind], cap: int) -> Drafts:
    """Cuts around that of `start` in greedy order, from the best on to its neighbours; the best first."""
    drafts: dict[Cut, TimedOrder] = {}
    waiting: list[tuple[float, Cut]] = []
    budget = EXPLORED_OPS // (_num_ops(start) * len(PRIORITIES))

    def look_at(cut: Cut) -> None:
        drafts[cut] = _drafts(op_times_at_cut(start, cut, kinds), start.microbatches, cap)[0]
        heappush(waiting, (drafts[cut].step_s, cut))

    look_at(start.cut)
    while waiting and len(drafts) < budget:
        for other in sliding_cuts(heappop(waiting)[1]):
            if other not in drafts:
                look_at(other)
    return _by_step([(draft, cut) for cut, draft in drafts.items()])


def _by_step(drafts: Drafts) -> Drafts:
    return sorted(drafts, key=lambda pair: (pair[0].step_s, pair[1]))


def _ordered(start: PipelineCandidate, cut: Cut, draft: TimedOrder) -> PipelineCandidate:
    return replace(start, cut=cut, order_name=GREEDY, explicit_order=draft.order)


def _fits(start: PipelineCandidate, cut: Cut, draft: TimedOrder) -> bool:
    return _ordered(start, cut, draft).fits


def _num_ops(pipeline: PipelineCandidate) -> int:
    """With weight gradients split off."""
    return pipeline.layout.virtual_stages * pipeline.microbatches * len(SPLIT)
