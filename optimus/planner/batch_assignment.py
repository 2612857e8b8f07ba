"""How the sequences of a batch reach the encoders of each way to run a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from optimus.cost.module import PricedLayer
from optimus.job.model import Encoder
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan
from optimus.planner.systems.fsdp import Sharded
from optimus.planner.systems.pipeline import InlinePipeline
from optimus.planner.systems.replicated_encoder import SpreadEncoder
from optimus.planner.systems.separate_gpus import SeparateGpus
from optimus.planner.systems.three_phase import ThreePhase

Sharing = Literal["pieces", "busiest", "replica", "all"]


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Into how many bins the images of an LLM microbatch are dealt, and what one bin was priced at.

    `sharing` says which rows of the schedule a bin loads:
      pieces   encoder microbatch `m * bins + b` is bin b of LLM microbatch m
      busiest  encoder microbatch m takes as long as the fullest of its bins
      replica  images of all microbatches of a replica are dealt at once; the fullest bin loads every row
      all      microbatch m of all replicas together, divided evenly
    """

    bins: int
    sharing: Sharing
    priced_sequences: float  # mean sequences whose load one bin (with `all`: all bins) was priced at


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """Every step `replicas` get sequences of their own, cut into `microbatches`.

    Replicas run side by side and the slowest ends the step; where they are `locked`, every layer of each
    waits for all, and microbatch m takes as long as the slowest replica's.
    """

    replicas: int
    microbatches: int
    encoders: Mapping[str, Bins] = field(default_factory=dict)
    locked: bool = False


def find_feeding(way: object, context: PlanningContext) -> Feeding | None:
    """How a way is fed; None if it is not one that is known."""
    encoders = context.job.model.encoders
    if isinstance(way, InlinePipeline):
        return Feeding(
            replicas=way.layout.dp,
            microbatches=way.microbatches,
            encoders={
                e.name: _inline(context, e, way.layers, way.sequences, way.layout.tp) for e in encoders
            },
        )
    if isinstance(way, Sharded):
        return Feeding(
            replicas=way.layout.dp,
            microbatches=way.accumulate,
            encoders={
                e.name: _inline(context, e, way.layers, way.sequences, way.layout.tp) for e in encoders
            },
            locked=True,
        )
    if isinstance(way, ThreePhase):
        replicas = way.llm.layout.dp
        return Feeding(
            replicas=replicas,
            microbatches=way.llm.microbatches,
            encoders={each.encoder.name: _spread(context, each, replicas) for each in way.encoders},
        )
    if isinstance(way, SeparateGpus):
        # Priced at the sequences of its busiest replica, in the LLM too: a mean batch takes what was priced.
        mean = context.job.workload.sequences_per_step / way.llm.microbatches
        whole = Bins(bins=1, sharing="all", priced_sequences=mean)
        return Feeding(
            replicas=way.llm.layout.dp,
            microbatches=way.llm.microbatches,
            encoders={e.name: whole for e in encoders},
        )
    return _filled(way, context) if isinstance(way, FilledPlan) else None


def _inline(
    context: PlanningContext, encoder: Encoder, layers: tuple[PricedLayer, ...], sequences: float, tp: int
) -> Bins:
    """On the ranks of one stage: divided as the LLM is, or whole images dealt to its ranks."""
    layout = next(layer.layout for layer in layers if layer.module == encoder.name)
    if layout.tp == tp:
        return Bins(bins=1, sharing="busiest", priced_sequences=sequences)
    return Bins(bins=tp, sharing="busiest", priced_sequences=context.dealt(encoder, sequences, tp))


def _spread(context: PlanningContext, spread: SpreadEncoder, replicas: int) -> Bins:
    """A replica's images over all its groups: all forwards end before the LLM begins."""
    own = context.dealt(spread.encoder, context.job.workload.sequences_per_step, spread.layout.dp)
    return Bins(bins=spread.layout.dp // replicas, sharing="replica", priced_sequences=own)


def _filled(way: FilledPlan, context: PlanningContext) -> Feeding:
    """Encoder microbatches are pieces of the LLM's, on the same replica."""
    plan = way.plan
    replicas = plan.modules["llm"].layout.dp
    sequences = context.job.workload.sequences_per_step / replicas / plan.microbatches
    found = {}
    for encoder in context.job.model.encoders:
        planned = plan.modules[encoder.name]
        pieces, across = planned.pieces, plan.modules["llm"].layout.tp // planned.layout.tp
        priced = context.piece(encoder, sequences, pieces, across)
        found[encoder.name] = Bins(bins=pieces, sharing="pieces", priced_sequences=priced)
    return Feeding(replicas=replicas, microbatches=plan.microbatches, encoders=found)
