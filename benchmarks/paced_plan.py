"""A plan on paced ranks: the engine's own executor, groups and messages, over chunks that sleep."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from benchmarks.draws import Draws
from benchmarks.paced_job import ROWS, WIDTH
from benchmarks.pacing import PacedClock
from optimus.engine.compile import MessageSpecs
from optimus.engine.distributed_optimizer import ShardedBucket
from optimus.engine.executor import Executor
from optimus.engine.p2p import TensorSpec
from optimus.engine.process_groups import make_groups
from optimus.engine.replicated_buckets import ReplicatedBucket
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.models.chunk import ChunkPhase, SegmentedChunk
from optimus.models.segment import Segment, State, WeightGradStore

Row = tuple[int, int, int, int, int]  # module, kind, chunk, microbatch, place: as a line of a program


def drawn_s(
    plan: Plan, draws: Draws, *, module: str, kind: OpKind, virtual: int, microbatch: int, place: int
) -> float:
    """What one phase of one microbatch takes: its mean, which the plan knows, times a draw."""
    template = plan.templates[plan.modules[module].chunks[virtual].templates[kind]]
    factor = draws.factor(
        module=module, kind=kind.word, virtual_stage=virtual, microbatch=microbatch, phase=place
    )
    return template[place].duration_s * factor


@dataclass(frozen=True, kw_only=True)
class Played:
    """One phase that really ran: the line that the executor was at, what it was, when it was over (ideal)."""

    line: int
    row: Row
    end_s: float


class Journal:
    """What a rank played in one step, in the order in which it did; a recorder of the executor."""

    def __init__(self, clock: PacedClock) -> None:
        self._clock, self._line = clock, -1
        self.begun: list[int] = []
        self.played: list[Played] = []

    def reset(self) -> None:
        self.begun, self.played = [], []

    def begin(self, line: int) -> None:
        self._line = line
        self.begun.append(line)

    def end(self, line: int) -> None:
        """Ends are written down by those who spend time."""

    def spent(self, row: Row) -> None:
        self.played.append(Played(line=self._line, row=row, end_s=self._clock.ideal_s))

    def passed(self, row: Row) -> None:
        """Of a line at which nothing runs nobody can tell when it was over."""
        self.played.append(Played(line=self._line, row=row, end_s=math.nan))


class PacedChunk(SegmentedChunk):
    """Every phase does its tiny math and then takes the time that `seconds` says."""

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
    """Adds up what it gets, from the encoder too, and multiplies it by a matrix."""

    def __init__(self, number: int, *, makes_loss: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) * (1 + number / 64))
        self.makes_loss = makes_loss

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        own, *pieces = state
        found = torch.tanh((own + torch.cat(pieces) if pieces else own) @ self.weight)
        return (((found - context) ** 2).sum(),) if self.makes_loss else (found,)


class TinyBatch:
    """Data that differ between microbatches, so that gradients tell if one took the place of another."""

    def __init__(self, plan: Plan) -> None:
        self._pieces = {name: module.pieces for name, module in plan.modules.items()}
        self._data = {
            name: torch.linspace(-1, 1, plan.microbatches * ROWS * WIDTH).reshape(-1, WIDTH) * (1 + at)
            for at, name in enumerate(plan.names)
        }

    def inputs(self, module: str, microbatch: int) -> State:
        rows = ROWS // self._pieces[module]
        return (self._data[module][microbatch * rows : (microbatch + 1) * rows],)

    def context(self, module: str, microbatch: int) -> Tensor:
        return torch.sin(7 * self.inputs(module, microbatch)[0])


class PacedPlan:
    """This rank's part of a plan: made once, then played step by step."""

    def __init__(
        self, plan: Plan, draws: Draws, clock: PacedClock, *, timeout_s: float, sharded: bool = False
    ) -> None:
        self.plan, self._draws, self._clock = plan, draws, clock
        self._free = False  # nothing takes time: for the step in which ranks connect
        self.rank, self.journal = dist.get_rank(), Journal(clock)
        self.chunks = {
            name: tuple(self._chunk(name, chunk) for chunk in range(module.layout.chunks))
            for name, module in plan.modules.items()
        }
        groups = make_groups(plan, self.rank, timeout_s=timeout_s, backend="paced")
        self._batch = TinyBatch(plan)
        self.executor = Executor(
            plan,
            groups,
            self.chunks,
            _shapes(plan),
            device=torch.device("cpu"),
            bucket_type=ShardedBucket if sharded else ReplicatedBucket,
            recorder=self.journal,
        )

    def prepare(self) -> None:
        """One step in which only messages take time."""
        self._free = True
        self.play()
        self._free = False

    def play(self) -> None:
        self.journal.reset()
        self.executor.step(self._batch)

    def _chunk(self, name: str, chunk: int) -> PacedChunk:
        module, ranks = self.plan.modules[name], self.plan.ranks
        virtual = chunk * module.layout.pp + ranks.stage_of(name, ranks.class_of(self.rank))
        at, layers = self.plan.names.index(name), module.chunks[virtual].layers
        ends = name == LLM and virtual == len(module.chunks) - 1
        segments = [TinyStage(virtual * layers + number, makes_loss=ends) for number in range(layers)]

        def seconds(kind: OpKind, microbatch: int, place: int) -> float:
            if self._free:
                return 0.0
            return drawn_s(
                self.plan, self._draws, module=name, kind=kind, virtual=virtual, microbatch=microbatch,
                place=place,
            )  # fmt: skip

        def spent(kind: OpKind, microbatch: int, place: int) -> None:
            self.journal.spent((at, kind, chunk, microbatch, place))

        return PacedChunk([[part] for part in segments], clock=self._clock, seconds=seconds, spent=spent)


def _shapes(plan: Plan) -> MessageSpecs:
    def rows(name: str) -> tuple[TensorSpec, ...]:
        return (TensorSpec(shape=(ROWS // plan.modules[name].pieces, WIDTH), dtype=torch.float32),)

    return MessageSpecs(
        inputs={name: [rows(name)] * len(module.chunks) for name, module in plan.modules.items()},
        rows={name: rows(name) for name in plan.encoders},
    )
