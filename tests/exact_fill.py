"""Finds the best order of encoder work beside a fixed LLM order with CP-SAT: the oracle of our scheduler.

An instance is a real header of a small job: kernels of a layer that follow each other are one phase, encoder
work is stretched to a share of the LLM's, and every duration is a whole number of `UNIT_S`. The integers of
the model are the durations that are played: nothing is rounded between the two.

The model is the coupled graph of all lines: a lane plays one at a time, who meets starts together, everybody
waits for what it needs. The LLM's phases keep their order on each lane, phases of one op too. All else is
free: encoder phases, messages, parameter traffic, and when the LLM begins. That is no less freedom than our
scheduler has, so that the optimum is never above what it can reach.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from optimus.cost.assumptions import get_preset
from optimus.ir.op import Ints, Lane, OpKind, Schedule
from optimus.ir.plan import Bucket, Phase, Plan, PlannedModule, Template
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import LayoutConstraints, PartialLayout, SearchLimits
from optimus.job.read import find_job
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.systems.colocated_plan import encoder_layout_on_llm_gpus
from optimus.planner.systems.colocation_candidate import ColocationCandidate, EncoderPlacement
from optimus.planner.systems.colocation_search import ColocationSearch, ScheduledCandidate
from optimus.planner.systems.llm_only import build_llm_pipeline
from optimus.schedule.fill import FillResult
from optimus.schedule.llm_timeline import LlmTimeline
from optimus.schedule.plan_schedule import build_plan_schedule
from optimus.schedule.program_table import ProgramTable
from optimus.schedule.simulator import Timeline

UNIT_S = 1e-5  # an op of an instance takes some hundred of them, a step some thousand
DP = 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Describes an instance; `share` is encoder work over LLM work."""

    stages: int
    chunks: int
    microbatches: int
    share: float
    encoder_stages: int
    encoder_layers: int  # of each of its stages
    tp: int = 1
    pieces: int = 1
    split: bool = True
    order: str = "interleaved"
    assumed: str = "clean"

    def __str__(self) -> str:
        parts = [f"pp{self.stages} v{self.chunks} m{self.microbatches} tp{self.tp} {self.order}"]
        parts += [f"share {self.share:.1f} encoder pp{self.encoder_stages} x{self.encoder_layers}"]
        parts += ["I+W" if self.split else "B", self.assumed]
        return ", ".join(parts) + (f", {self.pieces} pieces" if self.pieces > 1 else "")


class Instance(ColocationCandidate):
    """A trial whose durations are whole units."""

    def __init__(self, shape: Shape) -> None:
        context = _setting(shape)
        llm = build_llm_pipeline(context, chunks=shape.chunks, order_name=shape.order)
        layout = encoder_layout_on_llm_gpus(llm.layout, pp=shape.encoder_stages, tp=shape.tp)
        (name,) = (encoder.name for encoder in context.job.model.encoders)
        placements = EncoderPlacement(
            layout=layout, recompute="none", pieces=shape.pieces, split_backward=shape.split
        )
        super().__init__(context, llm, {name: placements}, None)
        self.header = on_grid(self.header, shape.share)
        self.base = LlmTimeline(self.header, llm.order)

    def lowered(self, arranged: FillResult) -> FilledPlan:
        """Keeps the durations of the header."""
        fixed = self._plan_builder(folded=True).fixed_bytes()
        return FilledPlan(
            header=self.header, orders=arranged.orders(), fixed=fixed, estimate_s=arranged.step_s
        )

    def ours(self) -> FillResult:
        """The best of the shifts that the search tries."""
        return ColocationSearch(self.context, self.llm)._search_shift(ScheduledCandidate.of(self)).arranged

    def starts(self, filled: FilledPlan) -> Ints:
        """When every line of the fill begins in a plan, in units."""
        lines = ProgramTable.of(self.fill._lines.header, filled.plan.programs)
        when = dict(zip(_keys(lines), filled.lowered.timeline.start_s.tolist(), strict=True))
        return np.array([round(when[key] / UNIT_S) for key in _keys(self.fill._lines)])

    def replayed(self, starts: Ints) -> FilledPlan:
        """The plan in which everything has its turn by when it starts."""
        turn = np.empty(len(starts), np.int64)
        turn[np.lexsort((np.arange(len(starts)), starts))] = np.arange(len(starts))
        start_s = starts.astype(np.float64) * UNIT_S
        finish_s = start_s + self.fill.schedule.duration_s
        timeline = Timeline(start_s=start_s, finish_s=finish_s, step_s=float(finish_s.max()))
        return self.lowered(replace(self.fill.schedule_encoders(0.0), turn=turn, timeline=timeline))


def _keys(lines: ProgramTable) -> Iterator[tuple[int, ...]]:
    """Returns what tells a line from all others."""
    columns = (lines.device, lines.module, lines.kind, lines.chunk, lines.microbatch, lines.place)
    return zip(*(column.tolist() for column in columns), strict=True)


def _setting(shape: Shape) -> PlanningContext:
    """A ViT and a GPT of few layers; few tokens to choose from, so that the head is small beside a layer."""
    job: Job = find_job("paper/small-a100")
    (encoder,) = job.model.encoders
    llm = replace(job.model.llm, vocab=2048)
    encoder_layers = shape.encoder_stages * shape.encoder_layers
    model = replace(
        job.model,
        encoders=(replace(encoder, stack=replace(encoder.stack, layers=encoder_layers)),),
        llm=replace(llm, stack=replace(llm.stack, layers=shape.stages * shape.chunks)),
    )
    layout = PartialLayout(dp=DP, pp=shape.stages, cp=1, ep=1, tp=shape.tp)
    job = replace(
        job,
        model=model,
        cluster=replace(job.cluster, gpus=DP * shape.stages * shape.tp),
        workload=replace(job.workload, sequences_per_step=2 * DP * shape.microbatches),
        layout=LayoutConstraints(modules={LLM: layout}, limits=SearchLimits(microbatch_sequences=(2,))),
    )
    return choose_smallest_context(job, get_preset(shape.assumed))[0]


# ---------------------------------------------------------------------------- whole units


def on_grid(header: Plan, share: float) -> Plan:
    """The header with fewer, rounded phases, and encoders whose work and traffic is `share` of the LLM's."""
    stretch = share * work_s(header, {LLM}) / work_s(header, set(header.encoders))
    factors = {name: 1.0 if name == LLM else stretch for name in header.modules}
    of_template = {
        template: factors[name]
        for name, module in header.modules.items()
        for chunk in module.chunks
        for template in chunk.templates.values()
    }
    return replace(
        header,
        templates={name: _rounded(_joined(t), of_template[name]) for name, t in header.templates.items()},
        modules={name: _rounded_module(found, factors[name]) for name, found in header.modules.items()},
    )


def work_s(header: Plan, names: set[str]) -> float:
    """Compute of all microbatches in these modules."""
    seconds = {
        name: sum(phase.duration_s for phase in template if phase.lane == Lane.COMPUTE)
        for name, template in header.templates.items()
    }
    return sum(
        header.microbatches * module.microbatches_per_llm_microbatch * seconds[template]
        for name, module in header.modules.items()
        if name in names
        for chunk in module.chunks
        for template in chunk.templates.values()
    )


def units(seconds: float) -> int:
    """How many units these are; what takes time takes one at least."""
    return max(round(seconds / UNIT_S), int(seconds > 0))


def _grid_s(seconds: float) -> float:
    return units(seconds) * UNIT_S


def _joined(template: Template) -> Template:
    """Compute that follows compute of its layer, and that nobody else waits for, as one phase."""
    waited: dict[int, int] = defaultdict(int)
    for phase in template:
        for other in phase.after:
            waited[other] += 1
    found: list[Phase] = []
    place: dict[int, int] = {}
    for number, phase in enumerate(template):
        works = phase.kind not in (OpKind.LAUNCH, OpKind.WAIT)
        last = found[-1] if found else None
        follows = phase.after == (number - 1,) and waited[number - 1] == 1
        if last and works and follows and last.kind == phase.kind and last.layer == phase.layer:
            found[-1] = replace(last, duration_s=last.duration_s + phase.duration_s)
        else:
            found.append(replace(phase, after=tuple(sorted({place[other] for other in phase.after}))))
        place[number] = len(found) - 1
    return tuple(found)


def _rounded(template: Template, factor: float) -> Template:
    return tuple(replace(phase, duration_s=_grid_s(phase.duration_s * factor)) for phase in template)


def _rounded_module(module: PlannedModule, factor: float) -> PlannedModule:
    def bucket(found: Bucket) -> Bucket:
        gather_s, reduce_s = _grid_s(found.gather_s * factor), _grid_s(found.reduce_s * factor)
        return replace(found, gather_s=gather_s, reduce_s=reduce_s)

    return replace(
        module,
        chunks=tuple(replace(chunk, send_s=_grid_s(chunk.send_s)) for chunk in module.chunks),
        buckets=tuple(tuple(map(bucket, stage)) for stage in module.buckets),
        seam_s=_grid_s(module.seam_s),
    )


# ---------------------------------------------------------------------------- the model


@dataclass(frozen=True, kw_only=True, eq=False)
class Optimum:
    """An order that no other beats, if `proven`; else nothing is shorter than `bound`."""

    makespan: int
    bound: int
    proven: bool
    starts: Ints  # of every line


def _coupled(lines: ProgramTable) -> Schedule:
    """Everything that lines wait for, and no more: but for the LLM's, their order is open."""
    devices = range(lines.header.devices)
    programs = [lines.program(np.flatnonzero(lines.device == d)) for d in devices]
    return build_plan_schedule(lines.header.plan, programs, ordered=False)


class ExactFill:
    """The CP-SAT model of an instance."""

    def __init__(self, instance: Instance, most: int) -> None:
        """`most`: no schedule that takes longer is looked for."""
        self._lines, self._most = instance.fill._lines, most
        self._schedule = _coupled(self._lines)
        self._model = cp_model.CpModel()
        self._takes = [units(seconds) for seconds in self._schedule.duration_s.tolist()]
        self._starts = self._add_starts()
        self._add_lanes()
        for before, after in {*self._waits(), *self._in_order(), *self._alike()}:
            self._model.add(self._starts[after] >= self._starts[before] + self._takes[before])
        self._makespan = self._model.new_int_var(0, most, "makespan")
        for start, takes in zip(self._starts, self._takes, strict=True):
            self._model.add(self._makespan >= start + takes)
        self._model.minimize(self._makespan)

    def __len__(self) -> int:
        return len(self._takes)

    def solve(self, hint: Ints, *, limit: float, workers: int = 1) -> Optimum:
        """From starts that are known; `limit` is in CP-SAT's own time, the same on every machine."""
        hinted = {
            start.index: (start, value) for start, value in zip(self._starts, hint.tolist(), strict=True)
        }
        for start, value in hinted.values():
            self._model.add_hint(start, value)
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = limit
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 0
        status = solver.solve(self._model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        return Optimum(
            makespan=round(solver.objective_value),
            bound=round(solver.best_objective_bound),
            proven=status == cp_model.OPTIMAL,
            starts=np.array([solver.value(start) for start in self._starts]),
        )

    def _add_starts(self) -> list[cp_model.IntVar]:
        """One variable for each line; lines that meet share it."""
        meeting = self._schedule.meeting
        assert meeting is not None
        shared: dict[int, cp_model.IntVar] = {}
        found = []
        for line, met in enumerate(meeting.tolist()):
            key = met if met >= 0 else -1 - line
            if key not in shared:
                shared[key] = self._model.new_int_var(0, self._most, f"start {line}")
            found.append(shared[key])
        return found

    def _add_lanes(self) -> None:
        """One line at a time. One that takes no time does not stand inside another either."""
        intervals: dict[tuple[int, int], list[cp_model.IntervalVar]] = defaultdict(list)
        lanes = zip(self._schedule.device.tolist(), self._schedule.lane.tolist(), strict=True)
        for line, lane in enumerate(lanes):
            interval = self._model.new_fixed_size_interval_var(
                self._starts[line], self._takes[line], f"line {line}"
            )
            intervals[lane].append(interval)
        for of_lane in intervals.values():
            self._model.add_no_overlap(of_lane)

    def _waits(self) -> Iterator[tuple[int, int]]:
        """Data. A reduce waits for all gradients of its layer: which is the last is not known before."""
        schedule, lines = self._schedule, self._lines
        for line in range(len(schedule)):
            for other in schedule.deps_of(line).tolist():
                yield other, line
        header = lines.header
        layer = header.layer[lines.phase]
        made = (
            (lines.kind > OpKind.FORWARD) & (lines.kind <= OpKind.WEIGHT_GRAD) & (lines.module < header.llm)
        )
        for line in np.flatnonzero((lines.kind == OpKind.REDUCE_GRAD) & (lines.module < header.llm)).tolist():
            module, device = int(lines.module[line]), int(lines.device[line])
            stage = int(header.stage[module, device])
            bucket = header.plan.modules[header.names[module]].buckets[stage][int(lines.place[line])]
            mine = made & (lines.module == module) & (lines.device == device)
            mine &= (layer >= bucket.first_layer) & (layer < bucket.end_layer)
            for other in np.flatnonzero(mine).tolist():
                yield other, line

    def _in_order(self) -> Iterator[tuple[int, int]]:
        """On each lane, all of the LLM's phases, and those of each op of encoders."""
        lines = self._lines
        same: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for line in lines.phases.tolist():
            key: tuple[int, ...] = int(lines.device[line]), int(lines.lane[line])
            if lines.module[line] < lines.header.llm:
                key += int(lines.module[line]), int(lines.kind[line]), int(lines.microbatch[line])
            same[key].append(line)  # lines of an op stand in order
        for found in same.values():
            yield from pairwise(found)

    def _alike(self) -> Iterator[tuple[int, int]]:
        """Microbatches of an encoder pipeline keep their order: they are alike, and the LLM's keep theirs.

        Starts of a phase could be dealt anew, the earliest to the first microbatch: every wait still holds.
        """
        lines = self._lines
        same: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for line in np.flatnonzero(
            (lines.kind <= OpKind.WEIGHT_GRAD) & (lines.module < lines.header.llm)
        ).tolist():
            key = (lines.device[line], lines.module[line], lines.kind[line], lines.place[line])
            same[key].append((int(lines.microbatch[line]), line))
        for found in same.values():
            yield from pairwise(line for _, line in sorted(found))
