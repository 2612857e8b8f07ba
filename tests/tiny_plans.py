"""Small valid plans of any shape, arranged by a greedy simulation on one clock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

from tiny_headers import large_header, tiny_header

from optimus.ir.op import OpKind
from optimus.ir.plan import REGIONS, DeviceClassMemory, Plan, PlanClaims, Program, Template
from optimus.ir.ranks import LLM
from optimus.verify.expected_program import ExpectedProgram, PlanLines, check_line_coverage, input_grad_kind
from optimus.verify.memory_replay import replay_peak_bytes
from optimus.verify.validator import delay_encoders, sum_encoder_seconds_by_region
from optimus.verify.wait_graph import replay_times
from optimus.verify.waits import WaitDerivation

Row = tuple[int, int, int, int, int]


def tiny_plan(rng: Random, *, few: bool = False) -> Plan:
    """A plan that holds every rule; with `few`, of two or three classes and few lines."""
    plan = _Arrangement(tiny_header(rng, few=few), rng).plan()
    return with_claims(plan)


def large_plan(rng: Random, *, microbatches: int, layers: int) -> Plan:
    """A plan of many lines."""
    return with_claims(_Arrangement(large_header(rng, microbatches=microbatches, layers=layers), rng).plan())


def with_claims(plan: Plan) -> Plan:
    """The plan with the claims that its replay gives."""
    lines, asked = PlanLines(plan), ExpectedProgram(plan)
    problems = list(check_line_coverage(lines, asked))
    assert not problems, problems
    derived = WaitDerivation(lines, asked)
    waits = derived.derive()
    played = replay_times(waits)
    assert played.complete
    seconds = sum_encoder_seconds_by_region(derived, waits, played).tolist()
    memory = tuple(
        DeviceClassMemory(fixed={"parameters": 1000}, **alive.peak) for alive in replay_peak_bytes(derived)
    )
    lagged = replay_times(delay_encoders(waits)) if plan.dealing_replicas > 1 else played
    claims = PlanClaims(
        step_s=played.step_s,
        lagged_s=lagged.step_s,
        estimate_s=0.0,
        encoder_s=dict(zip(REGIONS, seconds, strict=True)),
    )
    return replace(plan, claims=claims, memory=memory, capacity_bytes=max(m.peak for m in memory))


# ---------------------------------------------------------------------------- programs


@dataclass(kw_only=True, eq=False)
class _Task:
    """One op on all device classes that run it together."""

    module: str
    kind: OpKind
    virtual: int
    microbatch: int
    classes: list[int]
    seconds: float
    before: list[_Task] = field(default_factory=list)
    start: float = -1.0
    end: float = -1.0
    ready: float = 0.0


class _Arrangement:
    """Starts whatever can start first, on all its classes at once: all orders agree with one clock."""

    def __init__(self, header: Plan, rng: Random) -> None:
        self.header, self.ranks, self.rng = header, header.ranks, rng
        self.number = {name: number for number, name in enumerate(header.names)}
        self.tasks: dict[tuple[str, OpKind, int, int], _Task] = {}
        for name, module in header.modules.items():
            count = header.microbatches * module.microbatches_per_llm_microbatch
            for virtual, chunk in enumerate(module.chunks):
                for microbatch in range(count):
                    for kind, template in chunk.templates.items():
                        self._add(name, kind, virtual, microbatch, header.templates[template])
        for task in self.tasks.values():
            task.before = self._inputs(task)

    def _add(self, name: str, kind: OpKind, virtual: int, microbatch: int, template: Template) -> None:
        module = self.header.modules[name]
        pipeline = module.pipelines[microbatch] if module.pipelines else 0
        classes = [
            device
            for device in range(self.ranks.num_classes)
            if self.ranks.stage_of(name, device) == virtual % module.layout.pp
            and self.ranks.pipeline_of(name, device) == pipeline
        ]
        seconds = 0.001 + sum(phase.duration_s for phase in template)
        key = name, kind, virtual, microbatch
        self.tasks[key] = _Task(
            module=name, kind=kind, virtual=virtual, microbatch=microbatch, classes=classes, seconds=seconds
        )

    def _backward(self, name: str, virtual: int, microbatch: int) -> list[_Task]:
        kind = input_grad_kind(self.header, name, virtual)
        return [] if kind is None else [self.tasks[name, kind, virtual, microbatch]]

    def _inputs(self, task: _Task) -> list[_Task]:
        name, virtual, microbatch, header = task.module, task.virtual, task.microbatch, self.header
        pieces = header.modules[name].microbatches_per_llm_microbatch
        last = len(header.modules[name].chunks) - 1
        if task.kind == OpKind.WEIGHT_GRAD:
            return [self.tasks[name, OpKind.INPUT_GRAD, virtual, microbatch]]
        if task.kind == OpKind.FORWARD:
            if virtual:
                return [self.tasks[name, OpKind.FORWARD, virtual - 1, microbatch]]
            return [
                self.tasks[
                    encoder,
                    OpKind.FORWARD,
                    len(module.chunks) - 1,
                    microbatch * module.microbatches_per_llm_microbatch + piece,
                ]
                for encoder, module in (header.encoders if name == LLM else {}).items()
                for piece in range(module.microbatches_per_llm_microbatch)
            ]
        own = [self.tasks[name, OpKind.FORWARD, virtual, microbatch]]
        if virtual < last:
            return own + self._backward(name, virtual + 1, microbatch)
        return own if name == LLM else own + self._backward(LLM, 0, microbatch // pieces)

    def _play(self) -> list[_Task]:
        free = [0.0] * self.ranks.num_classes
        waiting, order = list(self.tasks.values()), []
        while waiting:
            able = [task for task in waiting if all(other.end >= 0 for other in task.before)]
            for task in able:
                task.ready = max((other.end + 0.5 for other in task.before), default=0.0)
                task.start = max(task.ready, *(free[device] for device in task.classes))
            first = min(task.start for task in able)
            task = self.rng.choice([task for task in able if task.start == first])
            task.end = task.start + task.seconds
            for device in task.classes:
                free[device] = task.end
            waiting.remove(task)
            order.append(task)
        return order

    def plan(self) -> Plan:
        order = self._play()
        mine = [
            [task for task in order if device in task.classes] for device in range(self.ranks.num_classes)
        ]
        early = self._fillers(mine)
        extra = self._transfers(mine)
        programs = tuple(
            Program.of(self._program(device, tasks, early, extra)) for device, tasks in enumerate(mine)
        )
        return replace(self.header, programs=programs)

    def _fillers(self, mine: list[list[_Task]]) -> dict[_Task, _Task]:
        """LLM ops before whose last wait the first phase of the next op of an encoder may stand."""
        pairs: dict[tuple[int, int], int] = defaultdict(int)
        tasks = {id(task): task for task in self.tasks.values()}
        for order in mine:
            for first, second in pairwise(order):
                if first.module == LLM != second.module and second.ready <= first.start:
                    template = self._template(first)
                    if template[-1].kind == OpKind.WAIT and len(self._template(second)) > 1:
                        pairs[id(first), id(second)] += 1
        return {
            tasks[first]: tasks[second]
            for (first, second), count in pairs.items()
            if count == len(tasks[second].classes) and self.rng.random() < 0.7
        }

    def _template(self, task: _Task) -> Template:
        chunk = self.header.modules[task.module].chunks[task.virtual]
        return self.header.templates[chunk.templates[task.kind]]

    def _transfers(self, mine: list[list[_Task]]) -> dict[tuple[int, int], list[tuple[float, int, Row]]]:
        """Lines to stand behind the n-th op of a class, by time and number of the transfer."""
        found: dict[tuple[int, int], list[tuple[float, int, Row]]] = defaultdict(list)
        count = 0

        def transfer(
            maker: _Task, here: int, there: int, name: str, kind: OpKind, at: int, to: int, m: int
        ) -> None:
            nonlocal count
            count += 1
            number, pp = self.number[name], self.header.modules[name].layout.pp
            found[here, mine[here].index(maker)].append((maker.end, count, (number, kind, at // pp, m, 0)))
            gap = max((n for n, task in enumerate(mine[there]) if task.start < maker.end), default=-1)
            if name == LLM or kind == OpKind.SEND_SEAM:  # not behind filler
                while gap >= 0 and mine[there][gap].module != LLM:
                    gap -= 1
            found[there, gap].append((maker.end, count, (number, kind + 1, to // pp, m, 0)))

        for name, kind, virtual, microbatch in self.tasks:
            if kind == OpKind.WEIGHT_GRAD:
                continue
            maker = self.tasks[name, kind, virtual, microbatch]
            layout = self.header.modules[name].layout
            there = virtual + (1 if kind == OpKind.FORWARD else -1)
            for here in maker.classes:
                if layout.pp > 1 and 0 <= there < layout.virtual_stages:
                    step, sent = there - virtual, OpKind.SEND_F if kind == OpKind.FORWARD else OpKind.SEND_B
                    other = self.ranks.next_stage(name, here, step)
                    transfer(maker, here, other, name, sent, virtual, there, microbatch)
                if (
                    name != LLM
                    and kind == OpKind.FORWARD
                    and there == layout.pp
                    and self.ranks.entry_of(here) != here
                ):
                    entry, last = self.ranks.entry_of(here), layout.pp - 1
                    transfer(maker, here, entry, name, OpKind.SEND_SEAM, last, last, microbatch)
                    if input_grad_kind(self.header, name, last) is not None:
                        pieces = self.header.modules[name].microbatches_per_llm_microbatch
                        (back,) = self._backward(LLM, 0, microbatch // pieces)
                        transfer(back, entry, here, name, OpKind.SEND_SEAM_B, last, last, microbatch)
        return found

    def _program(
        self,
        device: int,
        tasks: list[_Task],
        early: dict[_Task, _Task],
        extra: dict[tuple[int, int], list[tuple[float, int, Row]]],
    ) -> list[Row]:
        rows = self._bucket_rows(device, OpKind.UNSHARD)
        rows += [row for _, _, row in sorted(extra[device, -1])]
        begun: set[int] = set()
        for place, task in enumerate(tasks):
            lines = self._rows(task)
            filler = early.get(task)
            if filler is not None and place + 1 < len(tasks) and tasks[place + 1] is filler:
                lines.insert(len(lines) - 1, self._rows(filler)[0])
                begun.add(id(filler))
            rows += lines[1:] if id(task) in begun else lines
            rows += [row for _, _, row in sorted(extra[device, place])]
        rows += self._bucket_rows(device, OpKind.REDUCE_GRAD)
        return [*rows, (self.number["all"], OpKind.OPTIMIZER, 0, 0, 0)]

    def _rows(self, task: _Task) -> list[Row]:
        chunk = task.virtual // self.header.modules[task.module].layout.pp
        return [
            (self.number[task.module], task.kind, chunk, task.microbatch, place)
            for place in range(len(self._template(task)))
        ]

    def _bucket_rows(self, device: int, kind: OpKind) -> list[Row]:
        return [
            (self.number[name], kind, max(bucket.chunk, 0), 0, place)
            for name, module in self.header.modules.items()
            for place, bucket in enumerate(module.buckets[self.ranks.stage_of(name, device)])
        ]
