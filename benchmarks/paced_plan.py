"""Runs a plan on paced ranks over chunks that sleep, and replays it.

The executor, groups and messages are the engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from benchmarks.paced_backend import PacedNetwork
from benchmarks.paced_clock import Draws, PacedClock, PacedLink
from benchmarks.paced_job import ROWS, WIDTH, bucket
from optimus.engine.buckets import ReplicatedBucket
from optimus.engine.executor import Executor
from optimus.engine.p2p import BatchMessageSpecs, TensorSpec
from optimus.engine.process_groups import make_process_groups
from optimus.engine.sharded_bucket import ShardedBucket
from optimus.ir.op import COMPUTE_OPS, Floats, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.models.chunk import SegmentedChunk
from optimus.models.phase_order import ChunkPhase
from optimus.models.segment import Segment, State, WeightGradStore
from optimus.schedule.plan_schedule import build_plan_schedule
from optimus.schedule.simulator import simulate_schedule

Row = tuple[int, int, int, int, int]  # module, kind, chunk, microbatch, place: as a line of a program


def drawn_s(
    plan: Plan, draws: Draws, *, module: str, kind: OpKind, virtual: int, microbatch: int, place: int
) -> float:
    """Returns the seconds of one phase: its mean, which the plan knows, times a draw."""
    template = plan.templates[plan.modules[module].chunks[virtual].templates[kind]]
    factor = draws.factor(
        module=module, kind=kind.word, virtual_stage=virtual, microbatch=microbatch, phase=place
    )
    return template[place].duration_s * factor


@dataclass(frozen=True, kw_only=True)
class PhaseEnd:
    """One phase that ran: the executor's line, the row of the phase, and its ideal end."""

    line: int
    row: Row
    end_s: float


class PhaseRecorder:
    """Recorder of the executor: lines begun and phases run in one step, in their order."""

    def __init__(self, clock: PacedClock) -> None:
        self._clock, self._line = clock, -1
        self.begun: list[int] = []
        self.phase_ends: list[PhaseEnd] = []

    def reset(self) -> None:
        self.begun, self.phase_ends = [], []

    def begin(self, line: int) -> None:
        self._line = line
        self.begun.append(line)

    def end(self, line: int) -> None:
        """Records nothing: phases record their own end."""

    def spent(self, row: Row) -> None:
        self.phase_ends.append(PhaseEnd(line=self._line, row=row, end_s=self._clock.ideal_s))

    def passed(self, row: Row) -> None:
        """Records a line at which nothing runs, and whose end is unknown."""
        self.phase_ends.append(PhaseEnd(line=self._line, row=row, end_s=math.nan))


class PacedChunk(SegmentedChunk):
    """Chunk whose phases compute something tiny and then take the time that `seconds` returns."""

    def __init__(
        self,
        layers: list[list[Segment]],
        *,
        clock: PacedClock,
        seconds: Callable[[OpKind, int, int], float],  # of kind, microbatch and place
        spent: Callable[[OpKind, int, int], None],
    ) -> None:
        super().__init__(layers)
        self._clock, self._seconds, self._spent = clock, seconds, spent

    def phases(self, kind: OpKind, microbatch: int) -> list[ChunkPhase]:
        return [
            replace(phase, run=partial(self._paced, phase.run, kind, microbatch, place))
            for place, phase in enumerate(super().phases(kind, microbatch))
        ]

    def _paced(self, run: Callable[[], None], kind: OpKind, microbatch: int, place: int) -> None:
        run()
        self._clock.compute(self._seconds(kind, microbatch, place))
        self._spent(kind, microbatch, place)


class TinyStage(Segment):
    """Adds its input and the encoder's output, and multiplies the sum by a matrix."""

    def __init__(self, number: int, *, makes_loss: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) * (1 + number / 64))
        self.makes_loss = makes_loss

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        hidden, *pieces = state
        output = torch.tanh((hidden + torch.cat(pieces) if pieces else hidden) @ self.weight)
        return (((output - context) ** 2).sum(),) if self.makes_loss else (output,)


class TinyBatch:
    """Batch whose microbatches differ, so that gradients reveal swapped ones."""

    def __init__(self, plan: Plan) -> None:
        self._pieces = {name: module.microbatches_per_llm_microbatch for name, module in plan.modules.items()}
        self._data = {
            name: torch.linspace(-1, 1, plan.microbatches * ROWS * WIDTH).reshape(-1, WIDTH) * (1 + at)
            for at, name in enumerate(plan.names)
        }

    def count_tokens(self, name: str, microbatch: int) -> int:
        return ROWS // self._pieces[name]

    def inputs(self, module: str, microbatch: int) -> State:
        rows = self.count_tokens(module, microbatch)
        return (self._data[module][microbatch * rows : (microbatch + 1) * rows],)

    def context(self, module: str, microbatch: int) -> Tensor:
        return torch.sin(7 * self.inputs(module, microbatch)[0])


class PacedPlan:
    """One rank of a plan over chunks that sleep."""

    def __init__(
        self, plan: Plan, draws: Draws, network: PacedNetwork, *, timeout_s: float, sharded: bool = False
    ) -> None:
        self.plan, self._draws, self._clock = plan, draws, network.clock
        self._is_free = False  # phases take no time: for the step in which ranks connect
        self.rank, self.recorder = dist.get_rank(), PhaseRecorder(network.clock)
        self.chunks = {
            name: tuple(self._chunk(name, chunk) for chunk in range(module.layout.chunks))
            for name, module in plan.modules.items()
        }
        groups = make_process_groups(plan, self.rank, timeout_s=timeout_s, backend="paced")
        self._batch = TinyBatch(plan)
        self.executor = Executor(
            plan,
            groups,
            self.chunks,
            _shapes(plan),
            device=torch.device("cpu"),
            bucket_type=ShardedBucket if sharded else ReplicatedBucket,
            recorder=self.recorder,
        )

    def prepare(self) -> None:
        """Runs a step in which only transfers take time."""
        self._is_free = True
        self.step()
        self._is_free = False

    def step(self) -> None:
        for parameter in chain.from_iterable(each.parameters for each in self.executor.buckets):
            parameter.grad = None
        self.recorder.reset()
        self.executor.step(self._batch)

    def traffic(self) -> None:
        """Returns nothing: plans know the transfers of tiny tensors."""

    def _chunk(self, name: str, chunk: int) -> PacedChunk:
        module, ranks = self.plan.modules[name], self.plan.ranks
        virtual = chunk * module.layout.pp + ranks.stage_of(name, ranks.class_of(self.rank))
        at, layers = self.plan.names.index(name), module.chunks[virtual].layers
        ends = name == LLM and virtual == len(module.chunks) - 1
        segments = [TinyStage(virtual * layers + number, makes_loss=ends) for number in range(layers)]

        def seconds(kind: OpKind, microbatch: int, place: int) -> float:
            if self._is_free:
                return 0.0
            return drawn_s(
                self.plan, self._draws, module=name, kind=kind, virtual=virtual, microbatch=microbatch,
                place=place,
            )  # fmt: skip

        def spent(kind: OpKind, microbatch: int, place: int) -> None:
            self.recorder.spent((at, kind, chunk, microbatch, place))

        return PacedChunk([[part] for part in segments], clock=self._clock, seconds=seconds, spent=spent)


def _shapes(plan: Plan) -> BatchMessageSpecs:
    spec = (TensorSpec(shape=(ROWS, WIDTH), dtype=torch.float32),)
    return BatchMessageSpecs(
        inputs={name: [spec] * len(module.chunks) for name, module in plan.modules.items()},
        rows=dict.fromkeys(plan.encoders, spec),
        tokens_per_row=dict.fromkeys(plan.encoders, (1, 1)),
    )


# ---------------------------------------------------------------------------- replay

BucketTraffic = Literal["sharded", "replicated", "none"]
# Passes around the ring, by op.
PASSES: Mapping[BucketTraffic, Mapping[int, int]] = {
    "sharded": {OpKind.UNSHARD: 1, OpKind.REDUCE_GRAD: 1},
    "replicated": {OpKind.UNSHARD: 0, OpKind.REDUCE_GRAD: 2},
    "none": {OpKind.UNSHARD: 0, OpKind.REDUCE_GRAD: 0},
}
TOLERANCE_S = 1e-6  # ideal times are exact up to sums of floats


@dataclass(frozen=True, kw_only=True)
class PlanReplay:
    """Ends of the step and of every line, by device class; gathers and reduces of the busiest class."""

    step_s: float
    ends_s: tuple[Floats, ...]
    traffic_s: float


def replay_plan(
    plan: Plan, draws: Draws, link: PacedLink, *, traffic: BucketTraffic = "replicated"
) -> PlanReplay:
    """Simulates the coupled graph of the programs with drawn durations and the links' times."""
    schedule = build_plan_schedule(plan, plan.programs)
    device = schedule.device
    seconds = schedule.duration_s.copy()  # of sends, as the planner knows the links
    moves_s = np.zeros(len(plan.programs))
    rows = np.concatenate([program.rows for program in plan.programs]).tolist()
    for at, (number, kind, chunk, microbatch, place) in enumerate(rows):
        if kind in (OpKind.UNSHARD, OpKind.REDUCE_GRAD):
            name, passes = plan.names[number], PASSES[traffic][kind]
            moved = _bucket_at(plan, name, int(device[at]), place)
            replicas = plan.modules[name].layout.dp
            seconds[at] = link.collective_s([moved], ranks=replicas, passes=passes) if passes else 0.0
            moves_s[device[at]] += seconds[at]
        elif kind in COMPUTE_OPS:
            name = plan.names[number]
            virtual = chunk * plan.modules[name].layout.pp + plan.ranks.stage_of(name, int(device[at]))
            seconds[at] = drawn_s(
                plan, draws, module=name, kind=OpKind(kind), virtual=virtual, microbatch=microbatch,
                place=place,
            )  # fmt: skip
    timeline = simulate_schedule(replace(schedule, duration_s=seconds))
    ends = np.flatnonzero(np.diff(device, prepend=-1, append=-1))
    return PlanReplay(
        step_s=timeline.step_s,
        ends_s=tuple(timeline.finish_s[a:b] for a, b in pairwise(ends.tolist())),
        traffic_s=float(moves_s.max()),
    )


def _bucket_at(plan: Plan, name: str, device: int, place: int) -> torch.Tensor:
    """Returns the bucket that one line gathers or reduces."""
    module = plan.modules[name]
    planned = module.buckets[plan.ranks.stage_of(name, device)][place]
    return bucket(planned.end_layer - planned.first_layer, module.layout.dp)


def find_faults(
    plan: Plan,
    replay: PlanReplay,
    begun: Sequence[Sequence[int]],
    phase_ends: Sequence[Sequence[PhaseEnd]],
    *,
    start_s: float,
    lost_s: float,
) -> tuple[str, ...]:
    """Describes how a step differs from its program and its replay; lists have one entry per rank.

    `lost_s`, summed over all hosts, explains late phases, and early ones too: where one rank is late on a
    shared lane, transfers of others come earlier.
    """
    out_of_order, early_s, late_s = 0, 0.0, 0.0
    for rank, (lines, phases) in enumerate(zip(begun, phase_ends, strict=True)):
        device = plan.ranks.class_of(rank)
        out_of_order += count_out_of_order(plan, device, lines, phases)
        for phase in phases:
            gap_s = phase.end_s - start_s - float(replay.ends_s[device][phase.line])
            early_s, late_s = max(early_s, -gap_s - lost_s), max(late_s, gap_s - lost_s)
    faults = []
    if out_of_order:
        faults.append(f"{out_of_order} lines ran out of program order")
    if early_s > TOLERANCE_S:
        faults.append(f"an op ended {early_s:.4f} s before everything it waits for allows")
    if late_s > TOLERANCE_S:
        faults.append(f"an op was {late_s:.4f} s late, which no lateness of the host explains")
    return tuple(faults)


def count_out_of_order(plan: Plan, device: int, lines: Sequence[int], phases: Sequence[PhaseEnd]) -> int:
    """Returns how many lines and phases of a rank did not run in the order of its program."""
    program = plan.programs[device].rows
    recorded = [
        tuple(row)
        for row in program.tolist()
        if row[1] <= OpKind.WEIGHT_GRAD and not _is_launch(plan, device, row)
    ]
    return (
        _differences(range(len(program)), list(lines))
        + _differences(recorded, [phase.row for phase in phases])
        + sum(tuple(program[phase.line].tolist()) != phase.row for phase in phases)
    )


def _is_launch(plan: Plan, device: int, row: Sequence[int]) -> bool:
    """Tells if a line only launches a collective."""
    module, kind, chunk, _, place = row
    name = plan.names[module]
    template = plan.template_of(name, OpKind(kind), plan.ranks.stage_of(name, device), chunk)
    return template[place].kind == OpKind.LAUNCH


def _differences(expected: Sequence[object], actual: Sequence[object]) -> int:
    return abs(len(expected) - len(actual)) + sum(a != b for a, b in zip(expected, actual, strict=False))
