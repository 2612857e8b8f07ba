"""Searches the fastest pipelines of a sequence of layers: cut, V, op order and microbatch size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from optimus.compiled import njit_cached
from optimus.cost.priced_layer import PricedLayer
from optimus.errors import DoesNotFit
from optimus.ir.op import Floats, Ints, OpKind
from optimus.job.model import Encoder, Llm
from optimus.planner.context import PlanningContext, RecomputePolicy
from optimus.planner.systems.op_order_search import (
    can_list_schedule,
    greedy_order_candidates,
    search_op_orders,
)
from optimus.planner.systems.pipeline import (
    GREEDY,
    ORDERS,
    PipelineCandidate,
    available_op_orders,
    find_least_recomputed,
)
from optimus.schedule.schedule_builder import CHUNK_OP_KINDS
from optimus.schedule.stage_costs import Cut

STARTS = 4  # pipelines whose cut is improved a little; the best FINALISTS of them further
FINALISTS = 2
EVALUATIONS = 80  # of cuts for each finalist, a fifth for the others; a count, so that results repeat
MAX_GREEDY_SPECS = 12  # that only a greedy order can run, which takes time to search


def minimize_largest_stage(weights: Floats | Sequence[float], parts: int) -> Cut:
    """Cuts layers into parts whose largest sum of weights is smallest, by the paper's dynamic program.

    F(l, m) = min over j of max(F(j, m - 1), sum of weights j+1..l).
    """
    assert parts <= len(weights), f"{parts} virtual stages for {len(weights)} layers"
    return tuple(_minimize_largest_stage(np.asarray(weights, np.float64), parts).tolist())


@njit_cached
def _minimize_largest_stage(weights: Floats, parts: int) -> Ints:
    count = len(weights)
    prefix = np.zeros(count + 1)
    for layer in range(count):
        prefix[layer + 1] = prefix[layer] + weights[layer]
    best, choices = prefix.copy(), np.zeros((parts + 1, count + 1), np.int64)
    best[0] = np.inf
    for part in range(2, parts + 1):
        for end in range(count, -1, -1):  # what is below `end` is still of one part less
            least = np.inf
            for before in range(part - 1, end):  # a part holds at least one layer
                cost = max(best[before], prefix[end] - prefix[before])
                if cost < least:
                    least, choices[part, end] = cost, before
            best[end] = least
    cut = np.zeros(parts + 1, np.int64)
    cut[parts] = count
    for part in range(parts, 1, -1):
        cut[part - 1] = choices[part, cut[part]]
    return cut


def cut_proportionally(weights: Floats | Sequence[float], parts: int) -> Cut:
    """Cuts layers where the running sum of weights passes equal shares; no part is empty."""
    running = np.cumsum(weights)
    count = len(running)
    shares = running[-1] * np.arange(1, parts) / parts
    cut = [0]
    for part, share in enumerate(shares, start=1):
        nearest = int(np.argmin(np.abs(running - share))) + 1
        cut.append(min(max(nearest, cut[-1] + 1), count - (parts - part)))
    return (*cut, count)


def even_chunk_counts(context: PlanningContext) -> set[int]:
    """Returns 1 and every V at which all virtual stages get equally many of the LLM's layers."""
    layers, stages = context.job.model.llm.stack.layers, context.layout.pp
    return {1, *(v for v in range(2, layers // stages + 1) if layers % (v * stages) == 0)}


@dataclass(frozen=True, kw_only=True)
class _Spec:
    """A pipeline to try, with a step time it cannot beat."""

    bound_s: float
    microbatches: int
    sequences: float
    chunks: int
    order_name: str
    cut: Cut


def search_pipelines(
    context: PlanningContext,
    modules: tuple[Encoder | Llm, ...],
    *,
    orders: Collection[str] = ORDERS,
    chunk_counts: Collection[int] | None = None,
    starts: int = STARTS,
    evaluations: int = EVALUATIONS,
) -> list[PipelineCandidate]:
    """Returns the fastest pipelines of these modules that fit, over every V, op order and microbatch size.

    Specs are built in the order of their lower bounds until none can beat the pipelines so far; then a local
    search improves cuts and orders, with `evaluations` times the context's effort.
    """
    evaluations = round(context.effort * evaluations)
    pipelines: list[PipelineCandidate] = []
    kept, greedy_specs = min(starts, FINALISTS), 0
    for spec in sorted(
        _specs(context, modules, orders, chunk_counts), key=lambda s: (s.bound_s, s.order_name)
    ):
        if len(pipelines) >= kept and spec.bound_s >= pipelines[kept - 1].estimate_s:
            break
        greedy_specs += spec.order_name == GREEDY
        if spec.order_name == GREEDY and greedy_specs > MAX_GREEDY_SPECS:
            continue
        pipeline = _build(context, modules, spec)
        if pipeline is not None:
            pipelines = sorted([*pipelines, pipeline], key=_estimate)
    improved = sorted((_improve_cut(start, evaluations // 5) for start in pipelines[:starts]), key=_estimate)
    improved = [_improve_cut(start, evaluations) for start in improved[:FINALISTS]] + improved[FINALISTS:]
    if GREEDY in orders and evaluations:
        improved += sorted(search_op_orders(sorted(improved, key=_estimate)), key=_estimate)[:FINALISTS]
    return sorted(improved, key=_estimate)


def _estimate(pipeline: PipelineCandidate) -> float:
    return pipeline.estimate_s


def first_fitting_pipeline(context: PlanningContext, modules: tuple[Encoder | Llm, ...]) -> PipelineCandidate:
    """Returns a pipeline of V = 1 with the least recomputation that fits, or that needs the least memory.

    Nothing is simulated, and no step is drawn: it is the memory of the mean one.
    """
    specs = sorted(_specs(context, modules, ("1f1b", "zero-bubble"), {1}), key=lambda s: s.bound_s)
    for spec in specs:
        fitting = _least_recomputed(
            context, modules, spec, lambda pipeline: pipeline.mean_bytes <= context.capacity_bytes
        )
        if fitting is not None:
            return fitting
    if not specs:
        raise DoesNotFit(
            f"the batch does not divide into microbatches at {context.layout}",
            "use another sequences_per_step or microbatch_sequences",
        )
    *_, most = context.recompute_policies(modules)
    return min(
        (_pipeline(context, modules, most, spec) for spec in specs), key=lambda pipeline: pipeline.mean_bytes
    )


def _specs(
    context: PlanningContext,
    modules: tuple[Encoder | Llm, ...],
    orders: Collection[str],
    chunk_counts: Collection[int] | None,
) -> Iterator[_Spec]:
    """Yields every V, op order and microbatch size, with both cuts, each with its lower bound."""
    stages, policy = context.layout.pp, next(context.recompute_policies(modules))
    most = sum(module.stack.layers for module in modules) // stages
    counts = [chunks for chunks in range(1, most + 1) if chunk_counts is None or chunks in chunk_counts]
    for size, chunks in product(context.job.layout.limits.microbatch_sequences, counts):
        even = context.microbatches(size, multiple_of=1 if chunks == 1 else stages)
        batch = even or context.microbatches(size)
        if batch is None:
            continue
        microbatches, sequences = batch
        layers = context.layers(modules, sequences, policy)
        seconds = {kind: context.sums(layers).layer_seconds(kind) for kind in CHUNK_OP_KINDS}
        named = available_op_orders(stages=stages, chunks=chunks, microbatches=microbatches)
        unnamed = (GREEDY,) if not named and can_list_schedule(stages, chunks, microbatches) else ()
        names = [name for name in (*named, *unnamed) if name in orders]
        cuts = _cuts(context, layers, stages * chunks) if names else []
        for cut, name in product(cuts, names):
            yield _Spec(
                bound_s=_bound_s(name, cut, seconds, stages, microbatches),
                microbatches=microbatches,
                sequences=sequences,
                chunks=chunks,
                order_name=name,
                cut=cut,
            )


def _bound_s(name: str, cut: Cut, seconds: dict[OpKind, Floats], stages: int, microbatches: int) -> float:
    """Returns the latest stage's work and what must pass the stages ahead of it, before or after."""
    forward, both = seconds[OpKind.FORWARD], seconds[OpKind.FORWARD] + seconds[OpKind.BACKWARD]
    # With weight gradients split off, a stage may end after the drain has passed it.
    split = forward + seconds[OpKind.INPUT_GRAD] + seconds[OpKind.WEIGHT_GRAD], forward
    unsplit = both, both
    variants = {"zero-bubble": [split], GREEDY: [split, unsplit]}.get(name, [unsplit])
    bounds = []
    for weights, passes in variants:
        busy = np.add.reduceat(weights, cut[:-1]).reshape(-1, stages).sum(axis=0) * microbatches
        ahead = np.add.reduceat(passes, cut[:-1])[:stages]
        bounds.append(float((busy + np.cumsum(ahead) - ahead).max()))
    return min(bounds)


def _cuts(context: PlanningContext, layers: tuple[PricedLayer, ...], parts: int) -> list[Cut]:
    """Returns both cuts of these layers, cached by their id (`context.sums` keeps them alive)."""
    known, key = context.cache.cuts, (id(layers), parts)
    if key not in known:
        sums = context.sums(layers)
        weights = sums.layer_seconds(OpKind.FORWARD) + sums.layer_seconds(OpKind.BACKWARD)
        known[key] = sorted({minimize_largest_stage(weights, parts), cut_proportionally(weights, parts)})
    return known[key]


def _build(
    context: PlanningContext, modules: tuple[Encoder | Llm, ...], spec: _Spec
) -> PipelineCandidate | None:
    """Builds the spec with the least recomputation that fits."""
    if spec.order_name != GREEDY:
        return _least_recomputed(context, modules, spec, lambda pipeline: pipeline.fits)
    for policy in context.recompute_policies(modules):
        candidates = list(greedy_order_candidates(_pipeline(context, modules, policy, spec)))
        if candidates:
            return min(candidates, key=_estimate)
    return None


def _least_recomputed(
    context: PlanningContext,
    modules: tuple[Encoder | Llm, ...],
    spec: _Spec,
    fits: Callable[[PipelineCandidate], bool],
) -> PipelineCandidate | None:
    ladders = context.recompute_ladders(modules)
    return find_least_recomputed(ladders, lambda policy: _pipeline(context, modules, policy, spec), fits)


def _pipeline(
    context: PlanningContext, modules: tuple[Encoder | Llm, ...], policy: RecomputePolicy, spec: _Spec
) -> PipelineCandidate:
    return PipelineCandidate(
        context=context,
        layers=context.layers(modules, spec.sequences, policy),
        cut=spec.cut,
        order_name=spec.order_name,
        microbatches=spec.microbatches,
        layout=context.layout.with_(chunks=spec.chunks),
        sequences=spec.sequences,
        policy=policy,
    )


def _improve_cut(start: PipelineCandidate, evaluations: int) -> PipelineCandidate:
    """Moves layers between virtual stages, one at a time, while the step gets shorter."""
    best, used, improved = start, 0, True
    while improved and used < evaluations:
        improved = False
        for cut in _moves(best):
            if used >= evaluations:
                break
            used += 1
            moved = best.with_cut(cut)
            if moved.estimate_s < best.estimate_s * (1 - 1e-9) and moved.fits:
                best, improved = moved, True
                break
    return best


def _moves(pipeline: PipelineCandidate) -> Iterator[Cut]:
    """Yields cuts with one layer moved: from the busiest stages to the idlest, then over every boundary."""
    sums, cut = pipeline.sums, pipeline.cut
    seconds = sums.seconds(OpKind.FORWARD, cut) + sums.seconds(OpKind.BACKWARD, cut)
    seen = {cut}
    for other in chain(_rebalancing_cuts(cut, seconds, pipeline.layout.pp), neighbouring_cuts(cut)):
        if other not in seen:
            seen.add(other)
            yield other


def _rebalancing_cuts(cut: Cut, seconds: Floats, stages: int) -> Iterator[Cut]:
    """Yields cuts in which a busy stage gives a layer and an idle one gets one; all between shift by one."""
    busy = seconds.reshape(-1, stages).sum(axis=0)
    order = np.argsort(busy, kind="stable").tolist()
    for giver, taker in product(order[:-3:-1], order[:3]):
        if busy[giver] <= busy[taker]:
            continue
        for virtual in range(giver, len(seconds), stages):
            below = virtual - (giver - taker) % stages
            for other in (below, below + stages):
                if 0 <= other < len(seconds) and cut[virtual + 1] - cut[virtual] > 1:
                    yield _pass_on(cut, virtual, other)


def _pass_on(cut: Cut, giver: int, taker: int) -> Cut:
    """Returns the cut after every stage from `giver` to `taker` has passed one layer on."""
    low, high, step = (taker, giver, 1) if taker < giver else (giver, taker, -1)
    moved = [place + step for place in cut[low + 1 : high + 1]]
    return (*cut[: low + 1], *moved, *cut[high + 1 :])


def neighbouring_cuts(cut: Cut) -> Iterator[Cut]:
    """Yields cuts that differ in one boundary by one layer."""
    for place in range(1, len(cut) - 1):
        for step in (-1, 1):
            moved = cut[place] + step
            if cut[place - 1] < moved < cut[place + 1]:
                yield (*cut[:place], moved, *cut[place + 1 :])
