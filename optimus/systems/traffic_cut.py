"""Cuts an encoder into stages so that its own parameter traffic delays the step least.

Gathers of a stage stand before the LLM's first forward there, reduces behind its last backward; both share
the NIC with the LLM's. Later stages begin later and end earlier: they have room for more layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from optimus.cost.module import PricedLayer
from optimus.schedule.arrangement import Base
from optimus.schedule.traffic import ParameterTraffic, parameter_traffic
from optimus.systems.colocated import even_counts
from optimus.systems.setting import Setting


def counts_by_traffic(
    setting: Setting, layers: Sequence[PricedLayer], base: Base, stages: int
) -> tuple[int, ...]:
    """Inner layers of every stage: single layers are moved while the delay falls."""
    precision = setting.job.model.precision
    traffic = [parameter_traffic([layer], setting.prices, precision) for layer in layers]
    counts = even_counts(len(layers) - 2, stages)
    best = _delay(counts, traffic, base)
    while True:
        nearby = [moved(counts, a, b) for a, b in permutations(range(stages), 2) if counts[a] > 1]
        found = min(((_delay(each, traffic, base), each) for each in nearby), default=(best, counts))
        if found[0] >= best:
            return counts
        best, counts = found


def moved(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    """With one layer taken from one stage and given to another."""
    return tuple(count - (at == giver) + (at == taker) for at, count in enumerate(counts))


def _delay(counts: tuple[int, ...], traffic: Sequence[ParameterTraffic], base: Base) -> tuple[float, float]:
    """By how much gathers delay the beginning and reduces the end; then how uneven the ends are."""
    first, ends, lates = 0, [], []
    for stage, count in enumerate(counts):
        end = len(traffic) if stage == len(counts) - 1 else first + count + (stage == 0)
        mine = traffic[first:end]
        free_s, over_s = base.edges_s(stage, len(counts))
        lates.append(sum(part.gather_s for part in mine) - free_s)
        ends.append(over_s + sum(part.reduce_s for part in mine))
        first = end
    return max(lates) + max(ends), sum(each * each for each in ends)
