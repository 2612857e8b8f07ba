"""Fills bubbles by list scheduling, op by op, for any header: small, quick, and good where ops are few.

Every stage plays the LLM's ops in their given order. When its next one is not ready, it runs encoder work:
forwards first, each taken by the pipeline that can start it first. Variants differ in how long encoder work
may keep a ready LLM op waiting; whoever calls plays all of them and keeps the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

from optimus.ir.op import OpKind
from optimus.ir.plan import Plan, PlannedModule, Program
from optimus.ir.ranks import LLM
from optimus.schedule.pipelines import Pipeline

KEEPS_WAITING = (0.0, 0.25, 0.5, 1.0, inf)  # share of an encoder op by which it may delay the LLM


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One op of one module; `stage` is that of its own layout."""

    module: str
    kind: OpKind
    stage: int
    chunk: int
    microbatch: int


@dataclass(kw_only=True)
class _State:
    """What has been decided: when ops end, and who is free when."""

    free_s: list[float]
    ends_s: dict[Op, float] = field(default_factory=dict)
    orders: list[list[Op]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)  # LLM ops that each stage has played
    pipelines: dict[str, list[int]] = field(default_factory=dict)
    waiting: list[dict[Op, float]] = field(default_factory=list)  # encoder ops of each stage, when ready


def list_orders(header: Plan, order: Pipeline) -> Iterator[tuple[Plan, list[Program]]]:
    """Arrangements to choose from: the header with its encoder pipelines, and every class's phases."""
    for share in KEEPS_WAITING:
        yield _ListFill(header, order, share).arrange()


class _ListFill:
    """One pass over time. Classes are the LLM's stages: TP ranks all do the same."""

    def __init__(self, header: Plan, order: Pipeline, keeps_waiting: float) -> None:
        assert header.ranks.positions == header.ranks.llm.cp == 1, "one class per stage"
        self.header, self.order, self.keeps_waiting = header, order, keeps_waiting
        stages = header.ranks.llm.pp
        self.state = _State(
            free_s=[0.0] * stages,
            orders=[[] for _ in range(stages)],
            taken=[0] * stages,
            pipelines={name: [-1] * self._count(module) for name, module in header.encoders.items()},
            waiting=[{} for _ in range(stages)],
        )

    def _count(self, module: PlannedModule) -> int:
        return self.header.microbatches * module.pieces

    # ------------------------------------------------------------------------ time

    def arrange(self) -> tuple[Plan, list[Program]]:
        stages = range(len(self.state.free_s))
        while True:
            choices = [(self._next(stage), stage) for stage in stages]
            starts = [(found[0], stage) for found, stage in choices if found is not None]
            if not starts:
                break
            _, stage = min(starts)
            found = choices[stage][0]
            assert found is not None
            self._commit(stage, *found)
        header = self._with_pipelines()
        return header, [self._program(order) for order in self.state.orders]

    def _next(self, stage: int) -> tuple[float, Op] | None:
        """What a stage would start next, and when."""
        free = self.state.free_s[stage]
        llm = self._llm_op(stage)
        llm_s = inf if llm is None else max(free, self._ready(llm))
        best: tuple[float, int, int, int, Op] | None = None
        for op, ready in self._fillers(stage):
            start = max(free, ready)
            late = start + self._seconds(op) - llm_s
            if start >= llm_s or late > self.keeps_waiting * self._seconds(op):
                continue
            rank = (start, _RANK[op.kind], op.microbatch, self._place(op), op)
            if best is None or rank[:4] < best[:4]:
                best = rank
        if best is not None:
            return best[0], best[4]
        if llm is not None and llm_s < inf:
            return llm_s, llm
        return None

    def _place(self, op: Op) -> int:
        return self.header.names.index(op.module)

    def _llm_op(self, stage: int) -> Op | None:
        order, at = self.order[stage], self.state.taken[stage]
        if at == len(order):
            return None
        kind, chunk, microbatch = order[at]
        return Op(module=LLM, kind=kind, stage=stage, chunk=chunk, microbatch=microbatch)

    def _fillers(self, stage: int) -> Iterator[tuple[Op, float]]:
        """Encoder ops that this stage could run, with the time from which it could."""
        yield from self.state.waiting[stage].items()
        for name, module in self.header.encoders.items():
            if self.header.ranks.stage_of(name, stage) == 0 and -1 in self.state.pipelines[name]:
                microbatch = self.state.pipelines[name].index(-1)
                if self._has(module, OpKind.FORWARD, 0):
                    yield Op(module=name, kind=OpKind.FORWARD, stage=0, chunk=0, microbatch=microbatch), 0.0

    # ------------------------------------------------------------------------ what waits for what

    def _seconds(self, op: Op) -> float:
        template = self.header.template_of(op.module, op.kind, op.stage, op.chunk)
        return sum(phase.duration_s for phase in template)

    def _has(self, module: PlannedModule, kind: OpKind, virtual: int) -> bool:
        return kind in module.chunks[virtual].templates

    def _backward(self, name: str, virtual: int) -> OpKind | None:
        module = self.header.modules[name]
        return next(
            (kind for kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD) if self._has(module, kind, virtual)), None
        )

    def _ready(self, op: Op) -> float:
        """When an LLM op has its inputs; never, as long as one of them is not decided."""
        pp, chunks = self.header.ranks.llm.pp, self.header.modules[LLM].chunks
        virtual = op.chunk * pp + op.stage
        if op.kind == OpKind.WEIGHT_GRAD:
            return self._end(self._llm(OpKind.INPUT_GRAD, virtual, op.microbatch))
        if op.kind != OpKind.FORWARD:
            own = self._end(self._llm(OpKind.FORWARD, virtual, op.microbatch))
            if virtual == len(chunks) - 1:
                return own
            kind = self._backward(LLM, virtual + 1)
            assert kind is not None
            return max(own, self._end(self._llm(kind, virtual + 1, op.microbatch)) + chunks[virtual].send_s)
        if virtual:
            before = self._end(self._llm(OpKind.FORWARD, virtual - 1, op.microbatch))
            return before + (chunks[virtual - 1].send_s if pp > 1 else 0.0)
        return max(
            (
                self._end(self._last(name, OpKind.FORWARD, op.microbatch * encoder.pieces + piece))
                + encoder.seam_s
                for name, encoder in self.header.encoders.items()
                for piece in range(encoder.pieces)
            ),
            default=0.0,
        )

    def _end(self, op: Op) -> float:
        return self.state.ends_s.get(op, inf)

    def _llm(self, kind: OpKind, virtual: int, microbatch: int) -> Op:
        chunk, stage = divmod(virtual, self.header.ranks.llm.pp)
        return Op(module=LLM, kind=kind, stage=stage, chunk=chunk, microbatch=microbatch)

    def _last(self, name: str, kind: OpKind, microbatch: int) -> Op:
        stage = self.header.modules[name].layout.pp - 1
        return Op(module=name, kind=kind, stage=stage, chunk=0, microbatch=microbatch)

    # ------------------------------------------------------------------------ decisions

    def _commit(self, stage: int, start: float, op: Op) -> None:
        state = self.state
        end = start + self._seconds(op)
        state.free_s[stage] = state.ends_s[op] = end
        state.orders[stage].append(op)
        if op.module == LLM:
            state.taken[stage] += 1
            self._return_rows(op, end)
            return
        state.waiting[stage].pop(op, None)
        module = self.header.modules[op.module]
        if op.kind == OpKind.FORWARD and op.stage == 0:
            state.pipelines[op.module][op.microbatch] = self.header.ranks.pipeline_of(op.module, stage)
        step = 1 if op.kind == OpKind.FORWARD else -1
        there = op.stage + step
        if op.kind == OpKind.INPUT_GRAD:
            self._wait(stage, replace(op, kind=OpKind.WEIGHT_GRAD), end)
        if op.kind == OpKind.FORWARD and 0 <= there < module.layout.pp:
            self._wait(stage + 1, replace(op, stage=there), end + module.chunks[op.stage].send_s)
        elif op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD) and there >= 0:
            self._wait_backward(op.module, there, op.microbatch, end + module.chunks[there].send_s)

    def _return_rows(self, op: Op, end: float) -> None:
        """Encoder backwards become ready when the LLM's first virtual stage has gone back."""
        if op.stage or op.chunk or op.kind not in (OpKind.BACKWARD, OpKind.INPUT_GRAD):
            return
        for name, encoder in self.header.encoders.items():
            for piece in range(encoder.pieces):
                microbatch = op.microbatch * encoder.pieces + piece
                self._wait_backward(name, encoder.layout.pp - 1, microbatch, end + encoder.seam_s)

    def _wait_backward(self, name: str, stage: int, microbatch: int, ready: float) -> None:
        kind = self._backward(name, stage)
        if kind is not None:
            device = self._device(name, stage, microbatch)
            self._wait(device, Op(module=name, kind=kind, stage=stage, chunk=0, microbatch=microbatch), ready)

    def _wait(self, device: int, op: Op, ready: float) -> None:
        if self._has(self.header.modules[op.module], op.kind, op.stage):
            self.state.waiting[device][op] = ready

    def _device(self, name: str, stage: int, microbatch: int) -> int:
        """The LLM stage on which an encoder stage of a microbatch's pipeline lies."""
        return self.state.pipelines[name][microbatch] * self.header.modules[name].layout.pp + stage

    # ------------------------------------------------------------------------ data

    def _with_pipelines(self) -> Plan:
        modules = {
            name: module if name == LLM else replace(module, pipelines=tuple(self.state.pipelines[name]))
            for name, module in self.header.modules.items()
        }
        return replace(self.header, modules=modules)

    def _program(self, order: list[Op]) -> Program:
        return Program.of(
            [
                (self._place(op), op.kind, op.chunk, op.microbatch, place)
                for op in order
                for place in range(len(self.header.template_of(op.module, op.kind, op.stage, op.chunk)))
            ]
        )


_RANK = {OpKind.FORWARD: 0, OpKind.BACKWARD: 1, OpKind.INPUT_GRAD: 1, OpKind.WEIGHT_GRAD: 2}
