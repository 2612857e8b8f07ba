"""All modules in one pipeline: layers in model order, cut into virtual stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from optimus.cost.memory import Memory, communicator_bytes, high_water, states
from optimus.cost.module import PricedLayer
from optimus.job.layout import Layout
from optimus.program.op import Floats, Ints, Kind, Lane, Schedule
from optimus.schedule.assemble import BACKWARD, FORWARD, PipelinePlan, assemble
from optimus.schedule.chunk import KINDS
from optimus.schedule.greedy import OpTimes
from optimus.schedule.pipelines import Pipeline, interleaved, one_f_one_b, zero_bubble
from optimus.schedule.setting import Policy, Setting
from optimus.schedule.timeline import evaluate

GREEDY = "greedy"
ORDERS = ("1f1b", "interleaved", "zero-bubble", GREEDY)
LONG_STEP = 4  # rounds of pp microbatches beyond which a step is extrapolated
SHORT_STEP = 3  # rounds that fill and drain a pipeline as a long step does
Cut = tuple[int, ...]  # virtual stage v runs layers[cut[v]:cut[v + 1]]


@dataclass(frozen=True, kw_only=True, eq=False)
class InlinePipeline:
    """One way to run all of `layers` as one pipeline."""

    setting: Setting
    layers: tuple[PricedLayer, ...]
    cut: Cut
    order_name: str
    microbatches: int
    layout: Layout
    sequences: float
    policy: Policy
    listed: Pipeline | None = None  # an op order that `order_name` alone does not say

    @cached_property
    def order(self) -> Pipeline:
        layout = self.layout
        if self.listed is not None:
            return self.listed
        return make_order(
            self.order_name, stages=layout.pp, chunks=layout.chunks, microbatches=self.microbatches
        )

    @cached_property
    def plan(self) -> PipelinePlan:
        chunks = self.setting.chunks
        return PipelinePlan(
            order=self.order,
            chunks=[chunks.make(self.layers[a:b]) for a, b in zip(self.cut, self.cut[1:], strict=False)],
            layout=self.layout,
            prices=self.setting.prices,
            precision=self.setting.job.model.precision,
        )

    def schedule(self) -> Schedule:
        """Kernel by kernel."""
        return assemble(self.plan, self.setting.chunks, kernels=True)

    def op_schedule(self) -> Schedule:
        """Every op as one piece."""
        return assemble(self.plan, self.setting.chunks, kernels=False)

    @cached_property
    def estimate_s(self) -> float:
        """Step time with every op as one piece: fast, for searching.

        A long step is periodic in its middle, so that two short ones give its length.
        """
        stages = self.layout.pp
        if self.listed is None and self.microbatches > LONG_STEP * stages:
            short, longer = (replace(self, microbatches=count * stages).estimate_s for count in (3, 4))
            return longer + (self.microbatches / stages - 4) * (longer - short)
        slowdown = self.setting.prices.assumptions.residence_slowdown
        return evaluate(self.op_schedule(), slowdown=slowdown).step_s

    @cached_property
    def seam_times(self) -> tuple[Floats, Floats, float]:
        """When the first virtual stage starts each forward and ends each backward, and the step's end."""
        schedule = self.op_schedule()
        timeline = evaluate(schedule, slowdown=self.setting.prices.assumptions.residence_slowdown)
        entry = (schedule.device == 0) & (schedule.chunk == 0) & (schedule.lane == Lane.COMPUTE)
        starts, ends = np.zeros(self.microbatches), np.zeros(self.microbatches)
        forward = entry & (schedule.kind == Kind.F)
        backward = entry & ((schedule.kind == Kind.B) | (schedule.kind == Kind.I))
        starts[schedule.microbatch[forward]] = timeline.start_s[forward]
        ends[schedule.microbatch[backward]] = timeline.finish_s[backward]
        return starts, ends, timeline.step_s

    @cached_property
    def memories(self) -> tuple[Memory, ...]:
        """Of one rank of every stage."""
        return tuple(self._memory_of(stage) for stage in range(len(self.order)))

    @property
    def peak_bytes(self) -> float:
        return max(memory.total for memory in self.memories)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.setting.capacity_bytes

    def with_cut(self, cut: Cut) -> InlinePipeline:
        return replace(self, cut=cut)

    @cached_property
    def shortened(self) -> InlinePipeline:
        """A step long enough to fill and drain as this one does: as much in flight, sooner played."""
        return replace(self, microbatches=min(self.microbatches, SHORT_STEP * self.layout.pp))

    def only(self, module: str) -> InlinePipeline:
        """The same pipeline with all other modules' layers left out; some virtual stages may be empty."""
        kept = [layer.module == module for layer in self.layers]
        before = [0, *accumulate(kept)]
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if layer.module == module),
            cut=tuple(before[place] for place in self.cut),
            policy=tuple(step for step in self.policy if step[0] == module),
        )

    def _memory_of(self, stage: int) -> Memory:
        stages, layout, llm = len(self.order), self.layout, self.setting.job.model.llm.name
        ranges = list(zip(self.cut, self.cut[1:], strict=False))[stage::stages]
        held = [layer for a, b in ranges for layer in self.layers[a:b]]
        kept = [_kept(self.layers[a:b], llm) for a, b in ranges]
        llm_bytes, encoder_bytes = high_water(self.shortened.order[stage], kept)
        working = max((layer.working_bytes for layer in held), default=0.0)
        return replace(
            states(held, self.setting.job.model.precision),
            llm_activations=llm_bytes + working,
            encoder_activations=encoder_bytes,
            logits=sum(layer.logits_bytes for layer in held),
            communicators=communicator_bytes(
                layout.tp, layout.replica_ranks, min(layout.pp, 2), layout.cp, layout.ep
            ),
            reserve=self.setting.job.cluster.reserve_bytes,
        )


def _kept(layers: Sequence[PricedLayer], llm: str) -> tuple[float, float]:
    """Activation bytes of a chunk: the LLM's, the encoders'."""
    own = sum(layer.activation_bytes for layer in layers if layer.module == llm)
    return own, sum(layer.activation_bytes for layer in layers) - own


def make_order(name: str, *, stages: int, chunks: int, microbatches: int) -> Pipeline:
    """The op order called `name`."""
    if name == "1f1b":
        return one_f_one_b(stages=stages, microbatches=microbatches)
    if name == "interleaved":
        return interleaved(stages=stages, chunks=chunks, microbatches=microbatches)
    assert name == "zero-bubble", name
    return zero_bubble(stages=stages, chunks=chunks, microbatches=microbatches)


def order_names(*, stages: int, chunks: int, microbatches: int) -> tuple[str, ...]:
    """Op orders that exist for these counts."""
    if chunks == 1:
        return ("1f1b", "zero-bubble") if stages > 1 and microbatches >= stages else ("1f1b",)
    if stages == 1 or microbatches % stages:
        return ()
    return ("interleaved", "zero-bubble")


class LayerTimes:
    """Seconds of the ops and sends of every virtual stage, under any cut of the same layers."""

    def __init__(self, setting: Setting, layers: Sequence[PricedLayer]) -> None:
        single = [setting.chunks.make([layer]) for layer in layers]
        self._prefix = {
            kind: np.concatenate([[0.0], np.cumsum([chunk.seconds[kind] for chunk in single])])
            for kind in KINDS
        }
        prices = setting.prices
        across = prices.stages_cross_nodes(setting.layout)
        self._send_s = np.array([prices.send_s(x.output_bytes, across_nodes=across) for x in layers])

    def seconds(self, kind: Kind, cut: Cut) -> Floats:
        return np.diff(self._prefix[kind][np.array(cut)])

    def send_s(self, cut: Cut) -> Floats:
        """Of what each virtual stage sends to the next."""
        return self._send_s[np.array(cut[1:]) - 1]

    def op_times(self, stages: int, cut: Cut, kinds: Sequence[Kind]) -> OpTimes:
        sends = self.send_s(cut) if stages > 1 else np.zeros(len(cut) - 1)
        return OpTimes(
            stages=stages,
            seconds={kind: self.seconds(kind, cut).tolist() for kind in kinds},
            send_s=sends.tolist(),
        )


class Retimer:
    """Step time of one pipeline under other cuts, without building its graph again.

    Only ops and sends get new times; data-parallel traffic keeps that of the first cut.
    """

    def __init__(self, pipeline: InlinePipeline) -> None:
        pipeline, whole = pipeline.shortened, pipeline.microbatches
        self._left_out = whole - pipeline.microbatches
        self._stages = pipeline.layout.pp
        self._schedule = schedule = pipeline.op_schedule()
        self._slowdown = pipeline.setting.prices.assumptions.residence_slowdown
        self._virtual = schedule.chunk.astype(np.int64) * len(pipeline.order) + schedule.device
        self._compute = {
            kind: np.flatnonzero(schedule.kind == kind) for kind in KINDS
        }
        sends = schedule.kind == Kind.SEND
        self._forward = np.flatnonzero(sends & (schedule.segment == FORWARD))
        self._backward = np.flatnonzero(sends & (schedule.segment == BACKWARD))
    def step_s(self, cut: Cut) -> float:
        duration = self._schedule.duration_s.copy()
        for kind, rows in self._compute.items():
            duration[rows] = self._times.seconds(kind, cut)[self._virtual[rows]]
        sends = self._times.send_s(cut)
        duration[self._forward] = sends[self._virtual[self._forward]]
        duration[self._backward] = sends[self._virtual[self._backward] - 1]
        step_s = evaluate(replace(self._schedule, duration_s=duration), slowdown=self._slowdown).step_s
        return step_s + self._left_out * self._busiest_s(bounds)

    def _busiest_s(self, bounds: Ints) -> float:
        """Seconds of one microbatch on the busiest stage: what each one left out would add."""
        per_op = sum(np.diff(self._prefix[kind][bounds]) for kind, rows in self._compute.items() if len(rows))
        return float(np.asarray(per_op).reshape(-1, self._stages).sum(axis=0).max())


def layer_weights(
    layers: Sequence[PricedLayer], setting: Setting, kinds: tuple[Kind, ...] = (Kind.F, Kind.B)
) -> Floats:
    """Seconds of every layer, forward and backward: what balancing evens out."""
    chunks = (setting.chunks.make([layer]) for layer in layers)
    return np.array([sum(chunk.seconds[kind] for kind in kinds) for chunk in chunks])
