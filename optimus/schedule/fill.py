"""Schedules encoder work wherever a lane would be idle, with the LLM in its own order.

One event loop simulates all lanes of all classes. Ops of the LLM keep their order. Whenever a lane has no
ready op of the LLM, it starts the most urgent ready encoder op that ends before the LLM is due again:
forwards first, then input gradients, then weight gradients, each in the order in which the LLM needs or
produces them. The LLM is due as in a step without encoders, delayed by how late it was last. The best result
is shortened by local search, lowered and simulated again; that simulation is what counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus.ir.op import Bools, Floats, Ints, Lane, OpKind, Schedule
from optimus.ir.plan import Plan, Program
from optimus.ir.ranks import LLM
from optimus.schedule.llm_timeline import LlmTimeline
from optimus.schedule.local_search import reorder_schedule, shorten_schedule
from optimus.schedule.lower import TrafficKey, build_unordered_schedule
from optimus.schedule.program_table import ProgramTable
from optimus.schedule.schedule_builder import edges_to_csr
from optimus.schedule.simulator import Timeline, list_schedule, simulate_schedule

PATIENCE_SHARE = 1e-5  # of the LLM's step: lanes wait for an LLM op that is late by no more
URGENCY = np.zeros(len(OpKind), np.int64)  # of an encoder's ops: smaller is sooner
URGENCY[[OpKind.BACKWARD, OpKind.INPUT_GRAD]] = 1
URGENCY[OpKind.WEIGHT_GRAD] = 2
MAX_SEARCHED_LINES, MAX_SEARCH_ROUNDS = (
    100_000,
    300,
)  # of the local search: lines of all rounds, and rounds
AFTER_ALL = float(1 << 40)  # a rank above all numbers of microbatches and lines


@dataclass(frozen=True, kw_only=True, eq=False)
class FillResult:
    """Order and times of all lines with encoder work in the LLM's idle time."""

    fill: Fill
    turn: Ints
    timeline: Timeline
    shift_s: float
    late_s: float  # largest delay of an LLM op
    ends_s: Floats  # per class: end of the last encoder op, traffic included

    @property
    def step_s(self) -> float:
        return self.timeline.step_s

    def orders(self) -> list[Program]:
        """Returns the phases of every class in this order."""
        return self.fill.orders(self.turn, self.timeline)


class Fill:
    """List scheduler that runs the encoder work of one header in the idle time of the LLM's step."""

    def __init__(self, header: Plan, base: LlmTimeline, windows: Mapping[str, int] | None = None) -> None:
        """`windows` limits the microbatches of an encoder that a class may keep at a time."""
        self.header = header
        self._lines, unordered = build_unordered_schedule(
            header,
            list(order_encoders_around_llm(header, base.rows_of_llm(header))),
            _traffic_order(header, base),
        )
        window_waits = _window_edges(self._lines, windows or {})
        self.schedule = _in_order(unordered, self._lines, header.launch_s, window_waits)
        llm = header.names.index(LLM)
        self._phases = self._lines.kind <= OpKind.WEIGHT_GRAD
        self._of_llm = self._phases & (self._lines.module == llm)
        self._encoders = np.flatnonzero(self._lines.module < llm)
        self._rank = self._ranks(windows or {})
        self._due_s = np.full(len(self.schedule), np.inf)
        self._due_s[self._of_llm] = base.begins_s(header)
        self._patience_s = PATIENCE_SHARE * base.step_s
        works = np.flatnonzero(self._of_llm & (self.schedule.lane == Lane.COMPUTE))
        _, first = np.unique(self._lines.device[works], return_index=True)
        # LLM compute that does not begin before it is due: the first of every class, or all.
        self._held = works if is_llm_resharded(header) else works[first]

    def schedule_encoders(self, shift_s: float) -> FillResult:
        """Schedules encoder work around an LLM that starts `shift_s` later on every class than without it."""
        held_s, due_s = np.zeros(len(self.schedule)), self._due_s + shift_s
        held_s[self._held] = due_s[self._held]
        timeline, turn = list_schedule(
            self.schedule,
            rank=self._rank,
            due_s=due_s,
            held_s=held_s,
            patience_s=self._patience_s,
            slowdown=self.header.slowdown,
        )
        llm = self._of_llm
        ends_s = np.zeros(self.schedule.num_devices)
        np.maximum.at(ends_s, self.schedule.device[self._encoders], timeline.finish_s[self._encoders])
        return FillResult(
            fill=self,
            turn=turn,
            timeline=timeline,
            shift_s=shift_s,
            late_s=float((timeline.start_s[llm] - self._due_s[llm]).max()),
            ends_s=ends_s,
        )

    def shorten(self, arranged: FillResult) -> FillResult:
        """Shortens a result by local search, which looks ahead; the event loop cannot."""
        rounds = min(1 + MAX_SEARCHED_LINES // len(self.schedule), MAX_SEARCH_ROUNDS)
        turn = shorten_schedule(self.schedule, self._chains(), arranged.turn, rounds=rounds)
        simulated = simulate_schedule(reorder_schedule(self.schedule, turn), slowdown=self.header.slowdown)
        timeline = replace(simulated, start_s=simulated.start_s[turn], finish_s=simulated.finish_s[turn])
        return replace(arranged, turn=turn, timeline=timeline)

    def _chains(self) -> Ints:
        """Returns pairs (line, line before it): the LLM by lane, and each encoder phase by microbatch.

        Microbatches of an encoder pipeline are alike, so the order loses nothing; and the reduce always waits
        for the last microbatch.
        """
        lines = self._lines
        same = np.where(self._of_llm, -1, lines.place), np.where(self._of_llm, self.schedule.lane, lines.kind)
        rows = np.flatnonzero(self._phases)
        columns = [column[rows] for column in (*same, lines.module, lines.device)]
        order = np.lexsort((rows, np.where(self._of_llm, 0, lines.microbatch)[rows], *columns))
        together = np.ones(len(rows) - 1, np.bool_)
        for column in columns:
            together &= column[order][1:] == column[order][:-1]
        pairs: Ints = np.stack([rows[order][1:], rows[order][:-1]], axis=1)[together]
        return pairs

    def _ranks(self, windows: Mapping[str, int]) -> Floats:
        """Returns the priority of every line among ready ones (lower is sooner); -1 if its order is fixed.

        Backwards for which a forward waits come right before it.
        """
        lines, per_llm_microbatch = self._lines, self._lines.header.per_llm_microbatch
        rank = np.full(len(lines), -1.0)
        rank[self.schedule.is_send] = 0.0
        free = np.flatnonzero(self._phases & ~self._of_llm)
        urgency = URGENCY[lines.kind[free]]
        rank[free] = urgency * AFTER_ALL + lines.microbatch[free] / per_llm_microbatch[lines.module[free]]
        for name, window in windows.items():
            number, module = lines.header.names.index(name), self.header.modules[name]
            ahead = window * (1 + max(module.pipelines))  # microbatches of all pipelines
            mine = free[(lines.module[free] == number) & (lines.kind[free] != OpKind.FORWARD)]
            held = mine[lines.microbatch[mine] + ahead < len(module.pipelines)]
            rank[held] = (lines.microbatch[held] + ahead - 0.5) / per_llm_microbatch[number]
        return rank

    def orders(self, turn: Ints, timeline: Timeline) -> list[Program]:
        """Returns the phases of every class by turn, with launches where they must be enqueued."""
        device, place = self._lines.device, self._lines.place
        when = self._with_launches(turn, timeline)
        programs = []
        for number in range(self._lines.header.devices):
            rows = np.flatnonzero(self._phases & (device == number))
            order = np.lexsort((place[rows], when[rows]))
            programs.append(self._lines.program(rows[order]))
        return programs

    def _with_launches(self, turn: Ints, timeline: Timeline) -> Floats:
        """Returns turns in which no launch is queued behind compute that runs when the launch starts.

        A launch of the LLM comes right after the compute whose result it sends.
        """
        when, kind, device = turn.astype(np.float64), self.schedule.kind, self._lines.device
        llm = np.flatnonzero(self._of_llm)
        glued = (kind[llm] == OpKind.LAUNCH) & (self._lines.place[llm] > 0)
        behind = np.maximum.accumulate(np.where(glued, 0, np.arange(len(llm))))  # launch behind launch, too
        launches, senders = llm[glued], llm[behind[glued]]
        others = np.setdiff1d(np.flatnonzero(self._phases & (kind == OpKind.LAUNCH)), launches)
        works = np.flatnonzero(self._phases & (self.schedule.lane == Lane.COMPUTE))
        for class_number in range(self._lines.header.devices):
            moved, computes = others[device[others] == class_number], works[device[works] == class_number]
            computes = computes[np.argsort(turn[computes])]
            at = np.searchsorted(timeline.finish_s[computes], timeline.start_s[moved], side="right")
            behind = at < len(computes)
            moved, runs = moved[behind], computes[at[behind]]
            when[moved] = np.minimum(turn[moved], turn[runs] - 1 + turn[moved] / len(turn))
        self._meet(when, self._phases & ~np.isin(np.arange(len(when)), launches))
        when[launches] = when[senders]
        ops = self._lines.ops
        number = np.repeat(np.arange(len(ops)), np.diff(np.append(ops.first, len(ops.rows))))
        apart = number * float(len(when) + 1)
        held = np.minimum.accumulate((when[ops.rows] + apart)[::-1])[::-1] - apart
        when[ops.rows] = held  # phases of an op in their order: earlier ones come no later
        return when

    def _meet(self, when: Floats, chosen: Bools) -> None:
        """Sets `when` of the chosen lines that meet to that of the last of them."""
        assert self.schedule.meeting is not None
        meeting = self.schedule.meeting
        rows = np.flatnonzero(chosen & (meeting >= 0))
        latest = np.zeros(1 + int(meeting.max(initial=0)))
        np.maximum.at(latest, meeting[rows], when[rows])
        when[rows] = latest[meeting[rows]]


def _window_edges(lines: ProgramTable, windows: Mapping[str, int]) -> Ints:
    """Returns pairs of lines: a forward waits until an earlier microbatch of its class is freed."""
    ops, edges = lines.ops, [np.zeros((0, 2), np.int64)]
    for name, window in windows.items():
        most = Counter(lines.header.plan.modules[name].pipelines).most_common(1)[0][1]
        mine = ops.module == lines.header.names.index(name)
        for device in np.unique(ops.device[mine]) if most > window else ():
            here = np.flatnonzero(mine & (ops.device == device))  # in the order of their microbatches
            forwards = here[ops.kind[here] == OpKind.FORWARD]
            backwards = here[np.isin(ops.kind[here], (OpKind.BACKWARD, OpKind.WEIGHT_GRAD))]
            if len(backwards) == len(forwards) > window:
                waits = ops.rows[ops.first[forwards[window:]]]
                edges.append(np.stack([waits, ops.last[backwards[:-window]]], axis=1))
    return np.concatenate(edges)


def _in_order(schedule: Schedule, lines: ProgramTable, launch_s: float, window_waits: Ints) -> Schedule:
    """Adds waits of every encoder phase for the one before it in its op, since ops run in order.

    But a phase may overtake a launch, which runs alongside it; not in weight gradients, which are not urgent.
    No phase is shorter than the host needs to launch it: the event loop does not model the host.
    """
    ops = lines.ops
    before, after = ops.rows[:-1], ops.rows[1:]
    same = np.ones(len(ops.rows), np.bool_)
    same[ops.first] = False
    late = same[1:] & (lines.module[before] != lines.header.llm)
    late &= (schedule.kind[before] != OpKind.LAUNCH) | (lines.kind[before] == OpKind.WEIGHT_GRAD)
    waits = np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))
    known = np.stack([np.append(waits, after[late]), np.append(schedule.deps, before[late])], axis=1)
    edges = np.concatenate([known, window_waits, _on_one_lane(schedule, lines)])
    dep_offset, deps = edges_to_csr(edges, len(schedule))
    computes = (
        (schedule.lane == Lane.COMPUTE) & (schedule.kind != OpKind.WAIT) & (schedule.kind != OpKind.OPTIMIZER)
    )
    duration_s = np.where(computes, np.maximum(schedule.duration_s, launch_s), schedule.duration_s)
    return replace(schedule, dep_offset=dep_offset, deps=deps, duration_s=duration_s)


def _on_one_lane(schedule: Schedule, lines: ProgramTable) -> Ints:
    """Returns pairs (encoder phase, the one before it in its op on the same lane): lanes keep their order."""
    ops = lines.ops
    number = np.repeat(np.arange(len(ops)), np.diff(np.append(ops.first, len(ops.rows))))
    order = np.lexsort((np.arange(len(ops.rows)), schedule.lane[ops.rows], number))
    rows, number = ops.rows[order], number[order]
    same = (number[1:] == number[:-1]) & (schedule.lane[rows[1:]] == schedule.lane[rows[:-1]])
    same &= lines.module[rows[1:]] != lines.header.llm
    pairs: Ints = np.stack([rows[1:], rows[:-1]], axis=1)[same]
    return pairs


def _traffic_order(header: Plan, base: LlmTimeline) -> dict[TrafficKey, float]:
    """Orders encoder gathers first, by layer; then the LLM's traffic; then encoder reduces, reversed.

    Traffic of an LLM that is gathered or reduced in every microbatch is left out: its times are the LLM's.
    """
    llm = header.names.index(LLM)
    order: dict[TrafficKey, float] = {}
    if not is_llm_resharded(header):
        of_llm = base.traffic_order()
        order = {(llm, kind, stage, place): line for (kind, stage, place), line in of_llm.items()}
    for module, (_, planned) in enumerate(header.encoders.items()):
        for stage, buckets in enumerate(planned.buckets):
            for place in range(len(buckets)):
                order[module, OpKind.UNSHARD, stage, place] = place - len(buckets)
                order[module, OpKind.REDUCE_GRAD, stage, place] = AFTER_ALL - place
    return order


def is_llm_resharded(header: Plan) -> bool:
    """Returns whether the LLM's parameters are gathered, or gradients reduced, in every microbatch."""
    return replace(header, modules={LLM: header.modules[LLM]}).locked


def order_encoders_around_llm(header: Plan, llm_rows: Sequence[Ints]) -> Iterator[Program]:
    """Yields the program of every class: all encoder forwards, the LLM's rows, all encoder backwards."""
    for device in range(header.ranks.num_classes):
        forwards = list(_ops(header, device, (OpKind.FORWARD,)))
        backwards = list(_ops(header, device, (OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)))
        yield Program.of(np.concatenate([*forwards, llm_rows[device], *backwards]))


def _ops(header: Plan, device: int, kinds: tuple[OpKind, ...]) -> Iterator[Ints]:
    """Yields the phases of all encoder ops of these kinds on a class, microbatch by microbatch."""
    ranks = header.ranks
    for number, (name, module) in enumerate(header.encoders.items()):
        stage, pipeline = ranks.stage_of(name, device), ranks.pipeline_of(name, device)
        mine = np.flatnonzero(np.array(module.pipelines) == pipeline)
        own_kinds = [kind for kind in kinds if kind in module.chunks[stage].templates]
        sizes = [len(header.template_of(name, kind, stage, 0)) for kind in own_kinds]
        one = np.array(
            [
                (number, kind, 0, 0, place)
                for kind, size in zip(own_kinds, sizes, strict=True)
                for place in range(size)
            ],
            np.int64,
        ).reshape(-1, 5)
        rows = np.tile(one, (len(mine), 1))
        rows[:, 3] = np.repeat(mine, len(one))
        yield rows


# ---------------------------------------------------------------------------- TP blocks


def expand_orders_to_tp_blocks(
    header: Plan, folded: Plan, orders: Sequence[Program]
) -> tuple[Plan, list[Program]]:
    """Returns the header of all TP blocks with its pipelines, and the orders of all its classes.

    Encoders with a smaller TP size than the LLM run several pipelines side by side in each TP group of the
    LLM. Where every LLM microbatch is split equally over them, scheduling one pipeline is enough: a *folded*
    header has one device class for all TP blocks of a group, and one encoder microbatch for each set of them.
    """
    ranks, across = header.ranks, {}
    modules = dict(header.modules)
    for name, module in header.encoders.items():
        across[name] = ranks.llm.tp // module.layout.tp
        few = np.array(folded.modules[name].pipelines)
        number = np.arange(len(few) * across[name])
        pipelines = few[number // across[name]] * across[name] + number % across[name]
        modules[name] = replace(module, pipelines=tuple(pipelines.tolist()))
    return replace(header, modules=modules), [
        _expand_class(header, folded, orders, device, across) for device in range(ranks.num_classes)
    ]


def _expand_class(
    header: Plan, folded: Plan, orders: Sequence[Program], device: int, across: dict[str, int]
) -> Program:
    """Returns the program of a class: the folded class's phases, on the microbatches of its own pipelines."""
    ranks = header.ranks
    stage, context, position = ranks.coordinates(device)
    rows = orders[folded.ranks.class_at(stage, context, 0)].rows.copy()
    for number, name in enumerate(header.names):
        if name in across:
            block = position * ranks.block // header.modules[name].layout.tp
            mine = rows[:, 0] == number
            rows[mine, 3] = rows[mine, 3] * across[name] + block
    return Program.of(rows)
