"""Cuts of a model for torch's schedules, searched by replays, as plans of ours are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from benchmarks.paced_torch import PacedPipeline, TorchPipeline
from benchmarks.pacing import PacedClock
from benchmarks.torch_replay import Programs, programs_of
from optimus.engine.torch_private import fake_world
from optimus.planner.systems.layer_partition import neighbours, proportional_cut, smallest_maximum_cut
from optimus.schedule.stage_costs import Cut

MOST = 300  # replays for a schedule; a count, not a time: results repeat
Variant = TypeVar("Variant")


@dataclass(frozen=True, kw_only=True)
class Cuts(Generic[Variant]):
    """Where the search for a cut begins, and what plays one."""

    pipeline: TorchPipeline
    starts: tuple[Cut, ...]
    variant: Callable[[Cut], Variant]
    is_fixed: bool = False  # nothing but `starts` is tried


@dataclass(frozen=True, kw_only=True)
class Chosen(Generic[Variant]):
    """The variant of the best cut, and what ranks play of it."""

    variant: Variant
    programs: Programs


def balanced(weights: Sequence[float], parts: int) -> tuple[Cut, ...]:
    """By seconds, from the front, from the back and by equal shares; and by the number of layers."""
    count, even = len(weights), [1.0] * len(weights)
    found: dict[Cut, None] = {}
    for cut_of in (smallest_maximum_cut, proportional_cut):
        found[cut_of(weights, parts)] = None
        found[tuple(count - place for place in reversed(cut_of(weights[::-1], parts)))] = None
    return (*found, proportional_cut(even, parts))


def choose(cuts: Cuts[Variant], ranks: int, step_s: Callable[[Variant, Programs], float]) -> Chosen[Variant]:
    """By the shortest step."""
    programs = listed(cuts.pipeline, ranks)

    def replayed_s(cut: Cut) -> float:
        return step_s(cuts.variant(cut), programs)

    starts = {cut: replayed_s(cut) for cut in cuts.starts}
    best = min(starts, key=starts.__getitem__)
    if not cuts.is_fixed:
        best = _improved(best, starts[best], replayed_s)
    return Chosen(variant=cuts.variant(best), programs=programs)


def _improved(best: Cut, best_s: float, replayed_s: Callable[[Cut], float]) -> Cut:
    """Layers go to the stage before or behind, one at a time, while the step gets shorter."""
    used, found = 0, True
    seen = {best}
    while found and used < MOST:
        found = False
        for cut in neighbours(best):
            if cut in seen or used >= MOST:
                continue
            seen.add(cut)
            used += 1
            if (seconds := replayed_s(cut)) < best_s * (1 - 1e-9):
                best, best_s, found = cut, seconds, True
                break
    return best


def listed(pipeline: TorchPipeline, ranks: int) -> Programs:
    """By torch, for every rank of a pipeline."""
    with fake_world(0, ranks):
        clock = PacedClock(sleep=lambda seconds: None)
        made = PacedPipeline(pipeline, clock=clock, seconds=lambda kind, stage, microbatch: 0.0)
        return programs_of(pipeline, made.actions())
