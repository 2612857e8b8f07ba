"""Defines a plan in memory, and the measured seconds of user modules that it can be made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from optimus.ir.op import Communicator, Ints, Lane, OpKind
from optimus.ir.ranks import LLM, RankGrid
from optimus.job.layout import Layout
from optimus.job.typed import INT32, INT64, NonNegative, NumberRange, Whole

FORMAT = 5
SCHEMA = f"optimus.plan/{FORMAT}"
WHOLE_STAGE = -1  # `chunk` of a bucket that belongs to all chunks of its stage
MAX_LAYERS = 100_000
Bytes = Annotated[int, NumberRange(least=0, most=INT64)]
Layers = Annotated[int, NumberRange(least=0, most=MAX_LAYERS)]


ALL = "all"  # the module of OPTIMIZER


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Part of an op: compute, the launch of a collective, or the wait for it.

    `after`: phases of the same op that must have ended. A phase without any waits for the op's inputs.
    """

    name: str
    kind: OpKind  # F, R, B, I or W for compute; LAUNCH, WAIT
    layer: Layers  # counted inside the chunk
    duration_s: NonNegative = 0.0  # of a launch: the collective's
    bytes: Bytes = 0
    lane: Lane = Lane.COMPUTE
    communicator: Communicator = Communicator.NONE
    after: tuple[Whole, ...] = ()


Template = tuple[Phase, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedChunk:
    """Virtual stage of a module: its templates, memory and output."""

    templates: Mapping[OpKind, str]  # F and B, or F, I and W; kinds without work are absent, all if empty
    layers: Layers
    saved_activation_bytes: Bytes = 0  # of a microbatch, from its F to its B (or W)
    recomputed_bytes: Bytes = 0  # of a microbatch, from its I to its W; with gradients gathered there
    logits_bytes: Bytes = 0  # of a microbatch, from its F to its B (or I)
    output_bytes: Bytes = 0  # what F sends on, and B sends back
    send_s: NonNegative = 0.0


class Span(IntEnum):
    """Work for which parameters are gathered once, or whose gradients are reduced once."""

    NEVER = 0
    STEP = 1
    MICROBATCH = 2  # its forward and backward
    OP = 3  # its forward, and again its backward


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters that one all-gather unshards and whose gradients one reduce-scatter reduces.

    Parameters gathered for a step stay gathered (ZeRO-1 and 2). Others are freed behind the last phase that
    reads them, in a microbatch or an op (ZeRO-3; FSDP2 calls the latter `reshard_after_forward`).
    """

    chunk: Annotated[int, NumberRange(least=WHOLE_STAGE, most=INT32)]
    first_layer: Layers  # of the chunk
    end_layer: Layers
    gather_s: NonNegative
    gather_bytes: Bytes
    reduce_s: NonNegative
    reduce_bytes: Bytes
    lane: Lane = Lane.DP
    gates: bool = True  # whether forwards of these layers wait for the gather
    gathered_per: Span = Span.STEP
    reduced_per: Span = Span.STEP  # NEVER: frozen


@dataclass(frozen=True, kw_only=True)
class PlannedModule:
    """Module in its layout: chunk c of stage s is `chunks[c * pp + s]`; `buckets[s]` are of stage s.

    Encoder and LLM may be parts of one pipeline. Then an encoder has the LLM's stages and chunks, its layers
    are in the first virtual stages, and the LLM's in the last.
    """

    layout: Layout
    chunks: tuple[PlannedChunk, ...]
    buckets: tuple[tuple[Bucket, ...], ...]
    recompute: str = "none"
    recomputed: tuple[str, ...] = ()  # kernels whose forward runs again in the backward
    regather: bool = False  # TP gathers of inputs are repeated for weight gradients
    microbatches_per_llm_microbatch: int = 1  # of an encoder
    pipelines: tuple[int, ...] = ()  # which pipeline runs each encoder microbatch
    bin_tokens: int = 0  # the most encoder tokens in one encoder microbatch that memory is planned for
    item_cost: tuple[float, float] = (1.0, 0.0)  # of an item: per token, and per square of its tokens
    seam_bytes: int = 0  # of an encoder microbatch, per rank
    seam_s: float = 0.0

    @cached_property
    def virtual_stages(self) -> range:
        """Virtual stages that run something, from the first to the last; chunks outside have no templates."""
        filled = [virtual for virtual, chunk in enumerate(self.chunks) if chunk.templates]
        return range(filled[0], filled[-1] + 1) if filled else range(0)

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """The number of each encoder microbatch among those of its pipeline.

        Buckets are gathered and reduced by turn: replicas of an encoder run other microbatches at a time.
        """
        counts: Counter[int] = Counter()
        turns = []
        for pipeline in self.pipelines:
            turns.append(counts[pipeline])
            counts[pipeline] += 1
        return tuple(turns)

    @property
    def is_fully_sharded(self) -> bool:
        """True if its parameters are gathered or its gradients reduced in every microbatch."""
        buckets = (bucket for own in self.buckets for bucket in own)
        return any(max(bucket.gathered_per, bucket.reduced_per) > Span.STEP for bucket in buckets)

    def turn_of(self, microbatch: int) -> int:
        """Returns the turn of an encoder microbatch; of the LLM's, its number."""
        return self.turns[microbatch] if self.turns else microbatch

    def cost_of(self, tokens: int) -> float:
        """Returns the cost of an image or sound, by which items are dealt to encoder pipelines."""
        return self.item_cost[0] * tokens + self.item_cost[1] * tokens * tokens

    def microbatches_of(self, llm_microbatch: int) -> range:
        """Returns the encoder microbatches that feed a microbatch of the LLM."""
        first = llm_microbatch * self.microbatches_per_llm_microbatch
        return range(first, first + self.microbatches_per_llm_microbatch)


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Lines of one device class in order, as columns."""

    module: Ints  # place in Plan.names; the last is ALL
    kind: Ints
    chunk: Ints
    microbatch: Ints  # of the LLM, or the encoder's own
    place: Ints  # phase of the op, or number of the bucket in its stage

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def of(cls, rows: Any) -> Program:
        """Returns a program of rows (module, kind, chunk, microbatch, place)."""
        columns = np.asarray(rows, np.int32).reshape(-1, 5).T
        return cls(
            module=columns[0], kind=columns[1], chunk=columns[2], microbatch=columns[3], place=columns[4]
        )

    @property
    def rows(self) -> Ints:
        """Array with one row per line."""
        rows: Ints = np.stack([self.module, self.kind, self.chunk, self.microbatch, self.place], axis=1)
        return rows


@dataclass(frozen=True, kw_only=True)
class DeviceClassMemory:
    """Bytes on a rank of one device class: fixed components, and what is alive where the sum peaks."""

    fixed: Mapping[str, int]  # by component
    llm_activations: int
    encoder_activations: int
    seam: int
    gathered: int = 0  # parameters, and gradients to be reduced, of buckets that are not held for a step
    logits: int = 0

    @property
    def peak(self) -> int:
        alive = self.llm_activations + self.encoder_activations + self.seam + self.gathered + self.logits
        return sum(self.fixed.values()) + alive


REGIONS = ("before", "slots", "between", "after")  # where encoder compute lies among a device's LLM ops


@dataclass(frozen=True, kw_only=True)
class PlanClaims:
    """Figures that the planner claims; a check recomputes all but the estimate."""

    step_s: NonNegative
    lagged_s: NonNegative  # a step in which dealt images put every encoder pipeline half a bin behind
    estimate_s: NonNegative  # by the scheduling algorithm
    encoder_s: Mapping[str, NonNegative]  # compute in each of REGIONS, summed over classes, as replayed


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A plan file in memory."""

    name: str  # of the job
    tool: str
    strategy: str
    order: str  # of the LLM's pipeline
    microbatches: int  # of the LLM, per step and replica
    modules: Mapping[str, PlannedModule]  # encoders in model order, then the LLM
    templates: Mapping[str, Template]
    slowdown: float  # compute takes 1 + slowdown times as long while a collective is on its device
    launch_s: float  # host time to launch one op
    capacity_bytes: int
    memory: tuple[DeviceClassMemory, ...]
    claims: PlanClaims
    programs: tuple[Program, ...]  # by device class
    # The plan is bound to flat fields of model, cluster, workload and profile, and a hash of each.
    bound_to: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)
    # Free text and figures for readers; nothing depends on it.
    notes: Mapping[str, Any] = field(default_factory=dict)
    finish_s: tuple[float, ...] = ()  # of every LLM stage: the optimizer
    dealing_replicas: int = 1  # of the LLM: images of each go to the encoder pipelines of all

    @cached_property
    def ranks(self) -> RankGrid:
        return RankGrid(
            layouts={name: module.layout for name, module in self.modules.items()},
            entry_stage=self.entry % self.modules[LLM].layout.pp,
            exit_stages={n: m.virtual_stages[-1] % m.layout.pp for n, m in self.encoders.items()},
        )

    @property
    def entry(self) -> int:
        """The virtual stage of the LLM that takes encoder outputs: its first."""
        return self.modules[LLM].virtual_stages[0]

    @property
    def entry_chunk(self) -> int:
        """The chunk of that virtual stage."""
        return self.entry // self.modules[LLM].layout.pp

    def exit_chunk(self, encoder: str) -> int:
        """Returns the chunk of the last virtual stage of an encoder."""
        module = self.modules[encoder]
        return module.virtual_stages[-1] // module.layout.pp

    @property
    def names(self) -> tuple[str, ...]:
        """Modules by their number in programs."""
        return (*self.modules, ALL)

    @property
    def encoders(self) -> dict[str, PlannedModule]:
        return {name: module for name, module in self.modules.items() if name != LLM}

    @property
    def fully_sharded(self) -> list[str]:
        """Names of the modules of which parameters are gathered or gradients reduced in every microbatch."""
        return [name for name, module in self.modules.items() if module.is_fully_sharded]

    @property
    def locked(self) -> bool:
        """True if replicas wait for each other in every microbatch, because modules are fully sharded."""
        return bool(self.fully_sharded)

    def template_of(self, module: str, kind: OpKind, stage: int, chunk: int) -> Template:
        """Returns the phases of an op; none if there is no work."""
        planned = self.modules[module]
        name = planned.chunks[chunk * planned.layout.pp + stage].templates.get(kind)
        return () if name is None else self.templates[name]


# ---------------------------------------------------------------------------- user modules


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of a stage or block on one microbatch; `weight_s` of `backward_s` can be deferred."""

    forward_s: float
    backward_s: float  # 0 if frozen
    weight_s: float = 0.0
    send_s: float = 0.0  # of its output to another rank
    gather_s: float = 0.0  # of its parameters, if they are sharded over its replicas
    reduce_s: float = 0.0  # of its gradients over them


@dataclass(frozen=True, kw_only=True)
class EncoderBlocks:
    """One encoder as blocks in order; `pieces` are its microbatches in one of the LLM's."""

    blocks: Sequence[Seconds]
    pp: int = 1
    pieces: int = 1
