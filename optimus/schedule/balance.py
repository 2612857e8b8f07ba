"""Cuts layers into virtual stages of even cost: the paper's dynamic program, and the strongest we make."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from optimus.cost.module import PricedLayer
from optimus.job.model import Encoder, Llm
from optimus.program.op import Floats, Kind
from optimus.schedule.inline import (
    ORDERS,
    Cut,
    InlinePipeline,
    Retimer,
    layer_weights,
    order_names,
)
from optimus.schedule.setting import Policy, Setting

LOCAL_SEARCH_STARTS = 3
LOCAL_SEARCH_EVALUATIONS = 150  # per start; a count, not a time, so that results repeat


def smallest_maximum_cut(weights: Floats | Sequence[float], parts: int) -> Cut:
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


def proportional_cut(weights: Floats | Sequence[float], parts: int) -> Cut:
    """Boundaries where the running sum passes equal shares, every part non-empty."""
    running = np.cumsum(weights)
    count = len(running)
    shares = running[-1] * np.arange(1, parts) / parts
    cut = [0]
    for part, share in enumerate(shares, start=1):
        nearest = int(np.argmin(np.abs(running - share))) + 1
        cut.append(min(max(nearest, cut[-1] + 1), count - (parts - part)))
    return (*cut, count)


def stage0_cut(layers: Sequence[PricedLayer], llm: str, parts: int) -> Cut:
    """Encoders in the first virtual stage, the LLM's layers spread evenly: Megatron-LM's default."""
    first = next(place for place, layer in enumerate(layers) if layer.module == llm)
    blocks = len(layers) - first - 2  # without embedding and head
    sizes = [blocks // parts + (1 if part < blocks % parts else 0) for part in range(parts)]
    cut = [0]
    for size in sizes:
        cut.append((cut[-1] or first + 1) + size)
    return (*cut[:-1], len(layers))


@dataclass(frozen=True, kw_only=True)
class _Spec:
    """A pipeline to try, with a step time it cannot beat."""

    bound_s: float
    microbatches: int
    sequences: float
    chunks: int
    order_name: str
    cut: Cut


def strong_pipelines(
    setting: Setting,
    modules: tuple[Encoder | Llm, ...],
    *,
    orders: Collection[str] = ORDERS,
    chunk_counts: Collection[int] | None = None,
    starts: int = LOCAL_SEARCH_STARTS,
    evaluations: int = LOCAL_SEARCH_EVALUATIONS,
) -> list[InlinePipeline]:
    """The fastest pipelines of these modules that fit: every V, order, microbatch size; then local search.

    Specs are tried by their bound, so that most are never built: the rest cannot beat what was found.
    """
    policies = list(setting.policies(modules))
    found: list[InlinePipeline] = []
    for spec in sorted(
        _specs(setting, modules, policies[0], orders, chunk_counts), key=lambda s: (s.bound_s, s.order_name)
    ):
        if len(found) >= starts and spec.bound_s >= found[starts - 1].estimate_s:
            break
        pipeline = _build(setting, modules, policies, spec)
        if pipeline is not None:
            found = sorted([*found, pipeline], key=lambda made: made.estimate_s)
    improved = [improve(start, evaluations) for start in found[:starts]]
    return sorted(improved, key=lambda made: made.estimate_s)


def first_fitting(setting: Setting, modules: tuple[Encoder | Llm, ...]) -> InlinePipeline | None:
    """Some pipeline of these modules that fits, V = 1, with the least recomputation; nothing is timed."""
    policies = list(setting.policies(modules))
    specs = sorted(_specs(setting, modules, policies[0], ORDERS, {1}), key=lambda s: s.bound_s)
    built = (_build(setting, modules, policies, spec) for spec in specs)
    return next((pipeline for pipeline in built if pipeline is not None), None)


def _specs(
    setting: Setting,
    modules: tuple[Encoder | Llm, ...],
    policy: Policy,
    orders: Collection[str],
    chunk_counts: Collection[int] | None,
) -> Iterator[_Spec]:
    """Every V, op order and microbatch size, cut both ways, each with its bound."""
    stages = setting.layout.pp
    most = sum(module.stack.layers for module in modules) // stages
    counts = [chunks for chunks in range(1, most + 1) if chunk_counts is None or chunks in chunk_counts]
    for size, chunks in product(setting.job.layout.limits.microbatch_sequences, counts):
        divided = setting.microbatches(size, multiple_of=1 if chunks == 1 else stages)
        if divided is None:
            continue
        microbatches, sequences = divided
        layers = setting.layers(modules, sequences, policy)
        forward, weights = layer_weights(layers, setting, (Kind.F,)), layer_weights(layers, setting)
        names = order_names(stages=stages, chunks=chunks, microbatches=microbatches)
        for cut in _cuts(weights, stages * chunks) if names else ():
            for name in names:
                if name in orders:
                    # With weight gradients split off, a stage may end after the drain has passed it.
                    drained = forward if name == "zero-bubble" else weights
                    yield _Spec(
                        bound_s=_bound_s(cut, weights, drained, stages, microbatches),
                        microbatches=microbatches,
                        sequences=sequences,
                        chunks=chunks,
                        order_name=name,
                        cut=cut,
                    )


def _bound_s(cut: Cut, weights: Floats, passes: Floats, stages: int, microbatches: int) -> float:
    """No stage ends before its own work and what must pass the stages ahead of it, before or after."""
    busy = np.add.reduceat(weights, cut[:-1]).reshape(-1, stages).sum(axis=0) * microbatches
    ahead = np.add.reduceat(passes, cut[:-1])[:stages]
    return float((busy + np.cumsum(ahead) - ahead).max())


def _cuts(weights: Floats, parts: int) -> list[Cut]:
    return sorted({smallest_maximum_cut(weights, parts), proportional_cut(weights, parts)})


def _build(
    setting: Setting, modules: tuple[Encoder | Llm, ...], policies: Sequence[Policy], spec: _Spec
) -> InlinePipeline | None:
    """The spec with the first policy under which it fits."""
    for policy in policies:
        pipeline = InlinePipeline(
            setting=setting,
            layers=setting.layers(modules, spec.sequences, policy),
            cut=spec.cut,
            order_name=spec.order_name,
            microbatches=spec.microbatches,
            layout=setting.layout.with_(chunks=spec.chunks),
            sequences=spec.sequences,
            policy=policy,
        )
        if pipeline.fits:
            return pipeline
    return None


def improve(start: InlinePipeline, evaluations: int) -> InlinePipeline:
    """Moves one layer between neighbouring virtual stages while the step gets shorter."""
    if evaluations == 0:
        return start
    retimer = Retimer(start)
    cut, best = start.cut, retimer.step_s(start.cut)
    used, found = 1, True
    while found and used < evaluations:
        found = False
        for other in neighbours(cut):
            used += 1
            step_s = retimer.step_s(other)
            if step_s < best * (1 - 1e-9) and start.with_cut(other).fits:
                cut, best, found = other, step_s, True
                break
            if used >= evaluations:
                break
    moved = start.with_cut(cut)
    return moved if moved.estimate_s < start.estimate_s else start


def neighbours(cut: Cut) -> Iterator[Cut]:
    """Cuts that differ in one boundary by one layer."""
    for place in range(1, len(cut) - 1):
        for step in (-1, 1):
            moved = cut[place] + step
            if cut[place - 1] < moved < cut[place + 1]:
                yield (*cut[:place], moved, *cut[place + 1 :])
