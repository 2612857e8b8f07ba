"""Describes a pipeline of layers, cut into virtual stages, and estimates its step and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from optimus.cost.memory import RankMemory, communicator_bytes
from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Floats, OpKind, Schedule
from optimus.ir.ranks import LLM
from optimus.job.layout import Layout
from optimus.job.model import Encoder
from optimus.planner.batch_assignment import BatchAssignment, encoder_bins_on_llm_ranks
from optimus.planner.context import (
    OrderKey,
    PipelineKey,
    PlanningContext,
    RecomputePolicy,
    describe_recompute,
)
from optimus.planner.filled_plan import FilledPlan, SearchResult
from optimus.planner.systems.base import BaseCandidate
from optimus.planner.systems.colocated_plan import ColocatedEncoder, ColocatedPlanBuilder, Sharding
from optimus.planner.worst_step import BinShape
from optimus.schedule.op_times import OpTimeline, OrderColumns, StageSeconds, find_peak_activations, time_ops
from optimus.schedule.pipeline_orders import (
    PipelineOrder,
    build_1f1b_order,
    build_interleaved_1f1b_order,
    build_zero_bubble_order,
    expand_order_to_phases,
)
from optimus.schedule.pipeline_schedule import PipelineSpec
from optimus.schedule.schedule_builder import CHUNK_OP_KINDS
from optimus.schedule.simulator import Timeline
from optimus.schedule.stage_costs import Cut, LayerPrefixSums, StageBytes

Built = TypeVar("Built", bound="PipelineCandidate")

GREEDY = "greedy"
ORDERS = ("1f1b", "interleaved", "zero-bubble", GREEDY)
ROUNDING = 1e-9  # of sums of bytes in another order
SHORT_STEP_ROUNDS = 3  # of pp microbatches: fill and drain a pipeline as a long step does


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineCandidate(BaseCandidate):
    """One pipeline of all `layers`: cut, op order, microbatches and recomputation."""

    context: PlanningContext
    layers: tuple[PricedLayer, ...]
    cut: Cut
    order_name: str
    microbatches: int
    layout: Layout
    sequences: float
    policy: RecomputePolicy
    explicit_order: PipelineOrder | None = None  # where `order_name` alone does not define one
    sharding: Sharding = Sharding.OPTIMIZER

    @cached_property
    def order(self) -> PipelineOrder:
        if self.explicit_order is not None:
            return self.explicit_order
        name, stages, chunks, microbatches = key = self._order_key
        known = self.context.cache.orders
        if key not in known:
            known[key] = build_op_order(name, stages=stages, chunks=chunks, microbatches=microbatches)
        return known[key]

    @property
    def _order_key(self) -> OrderKey:
        return self.order_name, self.layout.pp, self.layout.chunks, self.microbatches

    @cached_property
    def plan(self) -> PipelineSpec:
        chunks = self.context.chunks
        return PipelineSpec(
            order=self.order,
            chunks=[chunks.price(self.layers[a:b]) for a, b in pairwise(self.cut)],
            traffic=self.sums.traffic(self.cut),
            layout=self.layout,
            cost_model=self.context.cost_model,
        )

    @property
    def identity(self) -> object:
        """The fields that tell pipelines of one context apart."""
        order = self.explicit_order or self.order_name
        return self.cut, order, self.microbatches, self.layout, self.policy

    @cached_property
    def _key(self) -> PipelineKey:
        """Cache key: pipelines that share it take as long and need as much memory."""
        self.sums  # noqa: B018  which keeps the layers alive, so that their id stays valid
        return (
            id(self.layers),
            self.cut,
            self.explicit_order or self.order_name,
            self.microbatches,
            self.layout,
        )

    @property
    def sums(self) -> LayerPrefixSums:
        return self.context.sums(self.layers)

    @cached_property
    def filled(self) -> FilledPlan:
        """The plan of this pipeline, with encoder layers in the virtual stages that the cut gives them."""
        known, key = self.context.cache.plans, (self._key, self.sharding, self.dealing_replicas)
        plan = known.get(key)
        if plan is None:
            folded = self._plan(self._plan_builder(folded=True)) if self._folds else None
            plan = known[key] = self._plan(self.builder, folded)
        return plan

    def _plan(self, builder: ColocatedPlanBuilder, folded: FilledPlan | None = None) -> FilledPlan:
        header = builder.header(strategy="")
        return FilledPlan(
            header=header,
            orders=[expand_order_to_phases(header, self.order, d) for d in range(header.ranks.num_classes)],
            fixed=builder.fixed_bytes(),
            estimate_s=self.estimate_s,
            folded=folded,
        )

    @property
    def _folds(self) -> bool:
        """True if ranks of a TP group have encoders of their own, which all do the same."""
        return any(layer.layout.tp < self.layout.tp for layer in self.layers if layer.module != LLM)

    @cached_property
    def builder(self) -> ColocatedPlanBuilder:
        """Builds the header of the plan, and counts the bytes that are there all the time."""
        return self._plan_builder(folded=False)

    def _plan_builder(self, *, folded: bool) -> ColocatedPlanBuilder:
        encoders = [self._encoder(encoder, folded=folded) for encoder in self._encoders]
        return ColocatedPlanBuilder(
            self.context,
            self.only_module(LLM),
            encoders,
            dealing_replicas=self.dealing_replicas,
        )

    @property
    def dealing_replicas(self) -> int:
        """1: every replica encodes the items of its own sequences."""
        return 1

    @property
    def _encoders(self) -> list[Encoder]:
        names = {layer.module for layer in self.layers}
        return [encoder for encoder in self.context.job.model.encoders if encoder.name in names]

    def _encoder(self, encoder: Encoder, *, folded: bool) -> ColocatedEncoder:
        """Returns the layers of an encoder in this pipeline; each block of its ranks takes a piece.

        Folded, the blocks of a TP group are one.
        """
        alone = self.only_module(encoder.name)
        layout = alone.layers[0].layout.with_(chunks=self.layout.chunks)
        if folded:
            layout = layout.with_(dp=layout.dp * layout.tp // self.layout.tp, tp=self.layout.tp)
        pieces = self.layout.cp * self.layout.tp // layout.tp
        splits = any(op.kind == OpKind.INPUT_GRAD for op in self.order[0])
        return ColocatedEncoder(
            encoder=encoder,
            layout=layout,
            layers=alone.layers,
            pieces=pieces,
            pipelines=tuple(range(pieces)) * self.microbatches,
            recompute=dict(self.policy)[encoder.name],
            split_backward=splits and encoder.train,
            pipeline_cut=alone.cut,
        )

    @property
    def order_label(self) -> str:
        """The op order, for readers."""
        return self.order_name

    @property
    def locked(self) -> bool:
        """True if replicas wait for each other in every microbatch."""
        return self.sharding != Sharding.OPTIMIZER

    @property
    def moved_bytes(self) -> float:
        """0: parameters and gradients are kept for the whole step, and counted with the model's states."""
        return 0.0

    def search_result(self) -> SearchResult:
        """Returns the plan of this pipeline."""
        return SearchResult(
            filled=self.filled,
            llm=self.only_module(LLM),
            how=self.describe(),
            considered=1,
            peak_bytes_at_p99=self._peak_bytes_at_p99,
        )

    @property
    def _peak_bytes_at_p99(self) -> float:
        """Memory of the fullest rank of the plan at p99 of steps."""
        ranks, memory = self.filled.header.ranks, self.filled.memory
        stages = [ranks.coordinates(device)[0] for device in range(len(memory))]
        added = self.added_bytes_at_p99
        return max(held.peak + added[stage] for stage, held in zip(stages, memory, strict=True))

    def simulated(self) -> tuple[Schedule, Timeline]:
        """Returns one training step, kernel by kernel, and when its kernels run."""
        return self.filled.compared.schedule, self.filled.compared.timeline

    @property
    def op_timeline(self) -> OpTimeline:
        """One training step, timed with one entry per op."""
        sums, cut, layout = self.sums, self.cut, self.layout
        across = self.context.cost_model.stages_cross_nodes(layout)
        seconds = StageSeconds(
            ops={kind: sums.seconds(kind, cut) for kind in CHUNK_OP_KINDS},
            sends=sums.send_s(cut, across_nodes=across),
            traffic=sums.traffic(cut),
        )
        return time_ops(self.columns, seconds, self.context.cost_model.assumptions)

    @property
    def columns(self) -> OrderColumns:
        """The order as columns; those of named orders are kept."""
        if self.explicit_order is not None:
            return OrderColumns.of(self.explicit_order)
        known, key = self.context.cache.columns, self._order_key
        if key not in known:
            known[key] = OrderColumns.of(self.order)
        return known[key]

    @cached_property
    def estimate_s(self) -> float:
        """Step time, timed op by op, not kernel by kernel: fast, for searching."""
        known = self.context.cache.estimates
        if self._key not in known:
            known[self._key] = self.op_timeline.step_s
        return known[self._key]

    @cached_property
    def compute_s(self) -> list[float]:
        """Seconds of compute on a rank of every stage; a step is no shorter."""
        by_layer = np.array([self.context.chunks.compute_s(layer) for layer in self.layers])
        running = np.concatenate([[0.0], np.cumsum(by_layer)])[list(self.cut)]
        by_stage: Floats = np.diff(running).reshape(-1, self.layout.pp).sum(axis=0)
        return (self.microbatches * by_stage).tolist()  # type: ignore[no-any-return]

    @cached_property
    def seam_times(self) -> tuple[Floats, Floats, float]:
        """Times at which the first virtual stage starts forwards and ends backwards; the step's end."""
        order, timeline = self.columns, self.op_timeline
        entry = (order.chunk == 0) & (np.arange(len(order.kind)) < order.offset[1])
        starts, ends = np.zeros(self.microbatches), np.zeros(self.microbatches)
        forward = entry & (order.kind == OpKind.FORWARD)
        backward = entry & ((order.kind == OpKind.BACKWARD) | (order.kind == OpKind.INPUT_GRAD))
        starts[order.microbatch[forward]] = timeline.start_s[forward]
        ends[order.microbatch[backward]] = timeline.finish_s[backward]
        return starts, ends, timeline.step_s

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        """Memory of one rank of every stage."""
        held = self.stage_bytes
        states = zip(held.parameters.tolist(), held.gradients.tolist(), held.optimizer.tolist(), strict=True)
        return tuple(
            RankMemory(
                parameters=parameters,
                gradients=gradients,
                optimizer=optimizer,
                llm_activations=llm + working,
                encoder_activations=encoders,
                logits=logits,
                communicators=self._communicator_bytes,
                reserve=self.context.job.cluster.reserve_bytes,
            )
            for (parameters, gradients, optimizer), working, (llm, encoders, logits) in zip(
                states, held.working.tolist(), self._peaks.tolist(), strict=True
            )
        )

    @property
    def _peaks(self) -> Floats:
        """Bytes of activations by stage at its peak: of the LLM, of encoders, and logits."""
        if self.explicit_order is not None:
            return self._peaks_in(self.columns)
        known = self.context.cache.peaks
        if self._key not in known:
            known[self._key] = self._peaks_in(self.shortened.columns)
        return known[self._key]

    def _peaks_in(self, order: OrderColumns) -> Floats:
        """Returns the bytes of activations if ops run in this order."""
        held = self.stage_bytes
        return find_peak_activations(order, held.saved, held.recomputed, held.logits)

    def _totals(self, peaks: Floats) -> Floats:
        """Returns the memory of one rank of every stage: `RankMemory.total` of all at once."""
        held, (llm, encoders, logits) = self.stage_bytes, peaks.T
        states = held.parameters + held.gradients + held.optimizer
        activations: Floats = states + (llm + held.working) + encoders + logits
        return activations + self._communicator_bytes + self.context.job.cluster.reserve_bytes

    @cached_property
    def stage_bytes(self) -> StageBytes:
        """Bytes that a rank of every stage holds, and that every chunk saves."""
        return self.sums.stage_bytes(self.cut, self.layout.pp)

    @cached_property
    def _communicator_bytes(self) -> float:
        layout = self.layout
        return communicator_bytes(layout.tp, layout.replica_ranks, min(layout.pp, 2), layout.cp, layout.ep)

    @property
    def fits(self) -> bool:
        """True if every rank stays within a GPU's memory, also at p99 of steps."""
        return self._fits_with(self._peaks)

    def fits_in(self, order: OrderColumns) -> bool:
        """Returns whether the pipeline fits if its ops run in this order."""
        return self._fits_with(self._peaks_in(order))

    def _fits_with(self, peaks: Floats) -> bool:
        """Returns whether ranks with these activations in the mean step fit at p99, counted if need be."""
        capacity, totals = self.context.capacity_bytes, self._totals(peaks)
        if totals.max() > capacity:
            return False
        added = (self._added_bytes(peaks, bounded=bounded) for bounded in (True, False))
        return any((totals + more).max() <= capacity for more in added)

    @property
    def mean_bytes(self) -> float:
        """Memory of the fullest rank in the mean step."""
        return float(self._totals(self._peaks).max())

    @property
    def least_bytes(self) -> float:
        """Memory without what layers need while they run: no less recomputation needs less."""
        held = self.stage_bytes
        peaks = find_peak_activations(self.shortened.columns, held.saved, None, held.logits)
        return float((self._totals(peaks) - held.working).max())

    @cached_property
    def peak_bytes(self) -> float:
        """Memory of the fullest rank at p99 of steps."""
        return float((self._totals(self._peaks) + self.added_bytes_at_p99).max())

    @cached_property
    def added_bytes_at_p99(self) -> list[float]:
        """Bytes that encoder microbatches on a rank of every stage have more at p99 of steps."""
        added: list[float] = self._added_bytes(self._peaks, bounded=False).tolist()
        return added

    def _added_bytes(self, peaks: Floats, *, bounded: bool) -> Floats:
        """Returns what encoder microbatches need more at p99, or a bound on it for which no step is dealt."""
        added, by_encoder = np.zeros(self.layout.pp), self._encoder_bytes
        if not by_encoder:
            return added
        bins_of = self._most_bins if bounded else self._bins_at_p99
        one = np.maximum(sum(saved for saved, _ in by_encoder.values()), 1.0)
        for name, (saved, transient) in by_encoder.items():
            bins = bins_of[name]
            resident = np.minimum(np.ceil(peaks[:, 1] / one - ROUNDING).astype(int), len(bins) - 1)
            added += (bins[resident] - resident) * saved + (bins[1] - 1) * transient
        return added

    @cached_property
    def _encoder_bytes(self) -> dict[str, tuple[Floats, Floats]]:
        return self.sums.encoder_bytes(self.cut, self.layout.pp)

    @cached_property
    def _bins_at_p99(self) -> dict[str, Floats]:
        return self._resident_bins(bounded=False)

    @cached_property
    def _most_bins(self) -> dict[str, Floats]:
        return self._resident_bins(bounded=True)

    def _resident_bins(self, *, bounded: bool) -> dict[str, Floats]:
        """Returns for every encoder by n the load of n bins in a row in a heavy step, or a bound on it."""
        assigned = self.batch_assignment()
        bins_of = {}
        for name in self._encoder_bytes:
            shape = BinShape(
                encoder=name,
                replicas=self.layout.dp,
                microbatches=self.microbatches,
                pipelines=assigned.encoders[name].pipelines,
                dealing_replicas=assigned.dealing_replicas,
                locked=assigned.locked,
            )
            bins_of[name] = self.context.resident_bins_at_p99(
                shape,
                sequences=self.sequences / assigned.encoders[name].bins,
                priced=assigned.encoders[name].priced_sequences,
                bounded=bounded,
            )
        return bins_of

    def batch_assignment(self) -> BatchAssignment:
        """Returns one data-parallel replica's share for every pipeline, in a piece for each encoder block."""
        bins = encoder_bins_on_llm_ranks(
            self.context, self.layers, self.sequences, self.microbatches, self.layout
        )
        return BatchAssignment(
            replicas=self.layout.dp,
            microbatches=self.microbatches,
            encoders=bins,
            dealing_replicas=self.dealing_replicas,
            locked=self.locked,
        )

    def describe(self) -> str:
        """Returns layout, op order, microbatch size and recomputation."""
        size = f"microbatch {self.sequences:.3g}"
        return f"llm {self.layout}; {self.order_name}; {size}; {describe_recompute(self.policy)}"

    def with_cut(self, cut: Cut) -> PipelineCandidate:
        return replace(self, cut=cut)

    @cached_property
    def shortened(self) -> PipelineCandidate:
        """The pipeline with as few microbatches as have the same peak in flight: faster to count."""
        if self.explicit_order is not None:
            return self
        return replace(self, microbatches=min(self.microbatches, SHORT_STEP_ROUNDS * self.layout.pp))

    def only_module(self, module: str) -> PipelineCandidate:
        """Returns the pipeline without the layers of other modules; some virtual stages may be empty."""
        kept = [layer.module == module for layer in self.layers]
        before = [0, *accumulate(kept)]
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if layer.module == module),
            cut=tuple(before[place] for place in self.cut),
            policy=tuple(step for step in self.policy if step[0] == module),
        )


def find_least_recomputed(
    ladders: Sequence[RecomputePolicy],
    build: Callable[[RecomputePolicy], Built],
    fits: Callable[[PipelineCandidate], bool],
    *,
    chosen: RecomputePolicy = (),
) -> Built | None:
    """Returns the pipeline with the least recomputation that fits, tried as `recompute_policies` yields it.

    With the last modules as `chosen`, others are not tried if even the most recomputation leaves too much.
    """
    *others, last = ladders
    for step in last:
        policy = (step, *chosen)
        lightest = build((*(ladder[-1] for ladder in others), *policy))
        if others and lightest.least_bytes <= lightest.context.capacity_bytes:
            found = find_least_recomputed(others, build, fits, chosen=policy)
        else:
            found = None if others or not fits(lightest) else lightest
        if found is not None:
            return found
    return None


def build_op_order(name: str, *, stages: int, chunks: int, microbatches: int) -> PipelineOrder:
    """Builds the op order called `name`."""
    if name == "1f1b":
        return build_1f1b_order(stages=stages, microbatches=microbatches)
    if name == "interleaved":
        return build_interleaved_1f1b_order(stages=stages, chunks=chunks, microbatches=microbatches)
    assert name == "zero-bubble", name
    return build_zero_bubble_order(stages=stages, chunks=chunks, microbatches=microbatches)


def available_op_orders(*, stages: int, chunks: int, microbatches: int) -> tuple[str, ...]:
    """Returns the names of op orders that exist for these counts."""
    if chunks == 1:
        return ("1f1b", "zero-bubble") if stages > 1 and microbatches >= stages else ("1f1b",)
    if stages == 1 or microbatches % stages:
        return ()
    return ("interleaved", "zero-bubble")
