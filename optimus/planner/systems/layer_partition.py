"""Cuts layers into virtual stages of even cost: the paper's dynamic program, and the strongest we make."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Floats, OpKind
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
)
from optimus.schedule.schedule_builder import CHUNK_OP_KINDS
from optimus.schedule.stage_costs import Cut

STARTS = 4  # pipelines whose cut is improved a little; the best FINALISTS of them further
FINALISTS = 2
EVALUATIONS = 80  # for each finalist, a fifth for the others; a count, not a time: results repeat
MOST_LISTED = 12  # specs that only a greedy order can run, and that takes time to make


def minimize_largest_stage(weights: Floats | Sequence[float], parts: int) -> Cut:
    """F(l, m) = min over j of max(F(j, m - 1), sum of weights j+1..l): the paper's dynamic program."""
    prefix = np.concatenate([[0.0], np.cumsum(weights)])
    count = len(prefix) - 1
    assert parts <= count, f"{parts} virtual stages for {count} layers"
    best = prefix.copy()
    best[0] = np.inf
    choices = []
    for part in range(2, parts + 1):
        cost = np.maximum(best[:, None], prefix[None, :] - prefix[:, None])
        cost[np.tri(count + 1, k=0, dtype=bool)] = np.inf  # a part holds at least one layer
        choices.append(cost.argmin(axis=0))
        best = cost.min(axis=0)
        best[:part] = np.inf
    cut = [count]
    for choice in reversed(choices):
        cut.append(int(choice[cut[-1]]))
    return (0, *reversed(cut))


def cut_proportionally(weights: Floats | Sequence[float], parts: int) -> Cut:
    """Boundaries where the running sum passes equal shares, every part non-empty."""
    running = np.cumsum(weights)
    count = len(running)
    shares = running[-1] * np.arange(1, parts) / parts
    cut = [0]
    for part, share in enumerate(shares, start=1):
        nearest = int(np.argmin(np.abs(running - share))) + 1
        cut.append(min(max(nearest, cut[-1] + 1), count - (parts - part)))
    return (*cut, count)


def even_chunk_counts(context: PlanningContext) -> set[int]:
    """V such that every virtual stage gets as many of the LLM's layers; and 1."""
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
    """The fastest pipelines of these modules that fit: every V, order, microbatch size; then local search.

    Specs are tried by their bound, so that most are never built: the rest cannot beat what was found.
    """
    policies = list(context.recompute_policies(modules))
    found: list[PipelineCandidate] = []
    kept, listed = min(starts, FINALISTS), 0
    for spec in sorted(
        _specs(context, modules, policies[0], orders, chunk_counts),
        key=lambda s: (s.bound_s, s.order_name),
    ):
        if len(found) >= kept and spec.bound_s >= found[kept - 1].estimate_s:
            break
        listed += spec.order_name == GREEDY
        if spec.order_name == GREEDY and listed > MOST_LISTED:
            continue
        pipeline = _build(context, modules, policies, spec)
        if pipeline is not None:
            found = sorted([*found, pipeline], key=_estimate)
    improved = sorted((_improve_cut(start, evaluations // 5) for start in found[:starts]), key=_estimate)
    improved = [_improve_cut(start, evaluations) for start in improved[:FINALISTS]] + improved[FINALISTS:]
    if GREEDY in orders and evaluations:
        improved += sorted(search_op_orders(sorted(improved, key=_estimate)), key=_estimate)[:FINALISTS]
    return sorted(improved, key=_estimate)


def _estimate(pipeline: PipelineCandidate) -> float:
    return pipeline.estimate_s


def first_fitting_pipeline(context: PlanningContext, modules: tuple[Encoder | Llm, ...]) -> PipelineCandidate:
    """A pipeline of these modules that fits, V = 1, with the least recomputation; nothing is timed.

    If none fits, the one that needs least.
    """
    policies = list(context.recompute_policies(modules))
    specs = sorted(
        _specs(context, modules, policies[0], ("1f1b", "zero-bubble"), {1}), key=lambda s: s.bound_s
    )
    made: list[PipelineCandidate] = []
    for spec, policy in product(specs, policies):
        made.append(_pipeline(context, modules, policy, spec))
        if made[-1].fits:
            return made[-1]
    return min(made, key=lambda pipeline: pipeline.peak_bytes)


def _specs(
    context: PlanningContext,
    modules: tuple[Encoder | Llm, ...],
    policy: RecomputePolicy,
    orders: Collection[str],
    chunk_counts: Collection[int] | None,
) -> Iterator[_Spec]:
    """Every V, op order and microbatch size, cut both ways, each with its bound."""
    stages = context.layout.pp
    most = sum(module.stack.layers for module in modules) // stages
    counts = [chunks for chunks in range(1, most + 1) if chunk_counts is None or chunks in chunk_counts]
    for size, chunks in product(context.job.layout.limits.microbatch_sequences, counts):
        even = context.microbatches(size, multiple_of=1 if chunks == 1 else stages)
        divided = even or context.microbatches(size)
        if divided is None:
            continue
        microbatches, sequences = divided
        layers = context.layers(modules, sequences, policy)
        seconds = {kind: context.sums(layers).layer_seconds(kind) for kind in CHUNK_OP_KINDS}
        named = available_op_orders(stages=stages, chunks=chunks, microbatches=microbatches)
        other = (GREEDY,) if not named and can_list_schedule(stages, chunks, microbatches) else ()
        names = [name for name in (*named, *other) if name in orders]
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
    """No stage ends before its own work and what must pass the stages ahead of it, before or after."""
    forward, whole = seconds[OpKind.FORWARD], seconds[OpKind.FORWARD] + seconds[OpKind.BACKWARD]
    # With weight gradients split off, a stage may end after the drain has passed it.
    split = forward + seconds[OpKind.INPUT_GRAD] + seconds[OpKind.WEIGHT_GRAD], forward
    ways = {"zero-bubble": [split], GREEDY: [split, (whole, whole)]}.get(name, [(whole, whole)])
    bounds = []
    for weights, passes in ways:
        busy = np.add.reduceat(weights, cut[:-1]).reshape(-1, stages).sum(axis=0) * microbatches
        ahead = np.add.reduceat(passes, cut[:-1])[:stages]
        bounds.append(float((busy + np.cumsum(ahead) - ahead).max()))
    return min(bounds)


def _cuts(context: PlanningContext, layers: tuple[PricedLayer, ...], parts: int) -> list[Cut]:
    """Made once for these layers, whose sums keep them: so their id stays their own."""
    known, key = context.cache.cuts, (id(layers), parts)
    if key not in known:
        sums = context.sums(layers)
        weights = sums.layer_seconds(OpKind.FORWARD) + sums.layer_seconds(OpKind.BACKWARD)
        known[key] = sorted({minimize_largest_stage(weights, parts), cut_proportionally(weights, parts)})
    return known[key]


def _build(
    context: PlanningContext,
    modules: tuple[Encoder | Llm, ...],
    policies: Sequence[RecomputePolicy],
    spec: _Spec,
) -> PipelineCandidate | None:
    """The spec with the first policy under which it fits."""
    for policy in policies:
        pipeline = _pipeline(context, modules, policy, spec)
        if spec.order_name == GREEDY:
            listed = list(greedy_order_candidates(pipeline))
            if listed:
                return min(listed, key=lambda made: made.estimate_s)
        elif pipeline.fits:
            return pipeline
    return None


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
    best, used, found = start, 0, True
    while found and used < evaluations:
        found = False
        for cut in _moves(best):
            if used >= evaluations:
                break
            used += 1
            moved = best.with_cut(cut)
            if moved.estimate_s < best.estimate_s * (1 - 1e-9) and moved.fits:
                best, found = moved, True
                break
    return best


def _moves(pipeline: PipelineCandidate) -> Iterator[Cut]:
    """From the busiest stages to the idlest, then over every single boundary."""
    sums, cut = pipeline.sums, pipeline.cut
    seconds = sums.seconds(OpKind.FORWARD, cut) + sums.seconds(OpKind.BACKWARD, cut)
    seen = {cut}
    for other in chain(_rebalancing_cuts(cut, seconds, pipeline.layout.pp), neighbouring_cuts(cut)):
        if other not in seen:
            seen.add(other)
            yield other


def _rebalancing_cuts(cut: Cut, seconds: Floats, stages: int) -> Iterator[Cut]:
    """Cuts in which a busy stage gives a layer and an idle one gets one; those between pass theirs on."""
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
    """The cut after `giver` has given its neighbour a layer, that one the next, up to `taker`."""
    low, high, step = (taker, giver, 1) if taker < giver else (giver, taker, -1)
    moved = [place + step for place in cut[low + 1 : high + 1]]
    return (*cut[: low + 1], *moved, *cut[high + 1 :])


def neighbouring_cuts(cut: Cut) -> Iterator[Cut]:
    """Cuts that differ in one boundary by one layer."""
    for place in range(1, len(cut) - 1):
        for step in (-1, 1):
            moved = cut[place] + step
            if cut[place - 1] < moved < cut[place + 1]:
                yield (*cut[:place], moved, *cut[place + 1 :])
