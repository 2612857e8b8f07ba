"""Cuts an encoder into stages so that its own parameter traffic delays the step least.

Gathers of a stage stand before the LLM's first forward there, reduces behind its last backward; both share
the NIC with the LLM's. Later stages begin later and end earlier: they have room for more layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations

from optimus.cost.priced_layer import PricedLayer
from optimus.planner.context import PlanningContext
from optimus.planner.systems.colocated_plan import split_layers_evenly
from optimus.schedule.llm_timeline import LlmTimeline
from optimus.schedule.pipeline_schedule import price_parameter_traffic


def _split_layers_by_traffic(
    context: PlanningContext, layers: Sequence[PricedLayer], base: LlmTimeline, stages: int
) -> tuple[int, ...]:
    """Inner layers of every stage: single layers are moved while the delay falls."""
    precision = context.job.model.precision
    traffic = [price_parameter_traffic([layer], context.cost_model, precision) for layer in layers]
    gathers = [0.0, *accumulate(part.gather_s for part in traffic)]
    reduces = [0.0, *accumulate(part.reduce_s for part in traffic)]
    edges = [base.edges_s(stage, stages) for stage in range(stages)]

    def delay(counts: tuple[int, ...]) -> tuple[float, float]:
        """By how much gathers delay the beginning and reduces the end; then how uneven the ends are."""
        cuts = [0, *(1 + total for total in accumulate(counts[:-1])), len(layers)]
        lates = [
            gathers[b] - gathers[a] - free for (a, b), (free, _) in zip(pairwise(cuts), edges, strict=True)
        ]
        ends = [
            reduces[b] - reduces[a] + over for (a, b), (_, over) in zip(pairwise(cuts), edges, strict=True)
        ]
        return max(lates) + max(ends), sum(end * end for end in ends)

    counts = split_layers_evenly(len(layers) - 2, stages)
    best = delay(counts)
    while True:
        nearby = [move_layer(counts, a, b) for a, b in permutations(range(stages), 2) if counts[a] > 1]
        found = min(((delay(each), each) for each in nearby), default=(best, counts))
        if found[0] >= best:
            return counts
        best, counts = found


def move_layer(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    """With one layer taken from one stage and given to another."""
    return tuple(count - (at == giver) + (at == taker) for at, count in enumerate(counts))
