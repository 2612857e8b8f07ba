"""Finds the optimum over layer split and op order of a small pipeline with CP-SAT: the baseline's oracle.

Layers are cut into `stages * chunks` non-empty virtual stages, virtual stage v on stage v mod `stages`; each
runs F, I and W of every microbatch. F waits for F of the virtual stage before, I for I of the one after (the
last for its own F), W for its I; a stage runs one op at a time; a send takes `latency`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from random import Random

from ortools.sat.python import cp_model

from optimus.cost.assumptions import get_preset
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.kernel import Kernel
from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Lane, OpKind
from optimus.job.cluster import Link
from optimus.job.layout import Layout, LayoutConstraints, SearchLimits
from optimus.job.model import Encoder, Llm
from optimus.job.read import find_job
from optimus.planner.context import PlanningContext, RecomputePolicy
from optimus.schedule.pipeline_orders import PipelineOp, PipelineOrder
from optimus.schedule.stage_costs import Cut

KINDS = (OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)
Times = tuple[int, int, int]  # of F, I, W


@dataclass(frozen=True, kw_only=True)
class Instance:
    """Layers to cut and order at given p, v, m; times in whole units."""

    stages: int
    chunks: int
    microbatches: int
    layers: tuple[Times, ...]
    encoder_layers: int  # the first of them
    latency: int

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks


def draw(seed: int, *, stages: int, chunks: int, microbatches: int) -> Instance:
    """Uneven layers, those of an encoder cheaper or dearer; every other instance ends with a light one."""
    random = Random(seed)
    count = stages * chunks + random.randint(2, 4)
    encoder_layers = random.randint(1, count // 2)
    scale = random.choice((0.4, 0.7, 1.5, 2.2))

    def layer(mean: float) -> Times:
        forward, inputs, weights = (
            max(1, round(mean * random.uniform(low, high)))
            for low, high in ((0.8, 1.2), (0.7, 1.4), (0.6, 1.2))
        )
        return forward, inputs, weights

    layers = [layer(8 * scale if place < encoder_layers else 8) for place in range(count)]
    if seed % 2:
        layers[-1] = layer(4)
    return Instance(
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        layers=tuple(layers),
        encoder_layers=encoder_layers,
        latency=random.choice((0, 1)),  # never longer than an op, so that sends do not queue
    )


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """A cut and an order that no other beats, if `proven`."""

    makespan: int
    proven: bool
    cut: Cut
    order: PipelineOrder


class ExactModel:
    """The CP-SAT model of an instance. Microbatches are alike, so they keep their order in every op."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._model = model = cp_model.CpModel()
        self._horizon = instance.microbatches * sum(map(sum, instance.layers))
        self._horizon += 2 * instance.virtual_stages * instance.latency
        self._add_cut()
        self._starts: dict[tuple[OpKind, int, int], cp_model.IntVar] = {}
        self._ends: dict[tuple[OpKind, int, int], cp_model.IntVar] = {}
        self._add_ops()
        self._add_waits()
        self._makespan = model.new_int_var(0, self._horizon, "makespan")
        self._add_bounds()
        model.minimize(self._makespan)

    def solve(self, *, seconds: float, workers: int) -> Optimum:
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 0
        status = solver.solve(self._model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        starts = {op: solver.value(start) for op, start in self._starts.items()}
        return Optimum(
            makespan=round(solver.objective_value),
            proven=status == cp_model.OPTIMAL,
            cut=tuple(solver.value(place) for place in self._cut),
            order=_order(self._instance, starts),
        )

    def _add_cut(self) -> None:
        """Adds where each virtual stage begins, and by prefix sums of the layers how long its ops take."""
        model, instance = self._model, self._instance
        count, parts = len(instance.layers), instance.virtual_stages
        self._cut = [
            model.new_int_var(part, count - parts + part, f"cut {part}") for part in range(parts + 1)
        ]
        model.add(self._cut[0] == 0)
        model.add(self._cut[-1] == count)
        self._before: dict[OpKind, list[cp_model.IntVar]] = {}  # time of all layers before a virtual stage
        self._times: dict[OpKind, list[cp_model.IntVar]] = {}
        for place, kind in enumerate(KINDS):
            sums = [0, *accumulate(layer[place] for layer in instance.layers)]
            before = [model.new_int_var(0, sums[-1], f"{kind.word} before {v}") for v in range(parts + 1)]
            for index, sum_before in zip(self._cut, before, strict=True):
                model.add_element(index, sums, sum_before)
            times = [model.new_int_var(0, sums[-1], f"{kind.word} of {v}") for v in range(parts)]
            for virtual, time in enumerate(times):
                model.add(time == before[virtual + 1] - before[virtual])
            self._before[kind], self._times[kind] = before, times
        for here, after in zip(self._cut, self._cut[1:], strict=False):
            model.add(here < after)

    def _add_ops(self) -> None:
        """Every op as an interval; those of a stage do not overlap."""
        model, instance = self._model, self._instance
        intervals: list[list[cp_model.IntervalVar]] = [[] for _ in range(instance.stages)]
        for kind in KINDS:
            for virtual, time in enumerate(self._times[kind]):
                for microbatch in range(instance.microbatches):
                    name = f"{kind.word} {virtual} {microbatch}"
                    start = model.new_int_var(0, self._horizon, f"{name} starts")
                    end = model.new_int_var(0, self._horizon, f"{name} ends")
                    interval = model.new_interval_var(start, time, end, name)
                    intervals[virtual % instance.stages].append(interval)
                    self._starts[kind, virtual, microbatch] = start
                    self._ends[kind, virtual, microbatch] = end
        for of_stage in intervals:
            model.add_no_overlap(of_stage)

    def _add_waits(self) -> None:
        last, latency = self._instance.virtual_stages - 1, self._instance.latency
        for (kind, virtual, microbatch), start in self._starts.items():
            if microbatch:
                self._model.add(start >= self._ends[kind, virtual, microbatch - 1])
            if kind is OpKind.FORWARD and virtual:
                self._model.add(start >= self._ends[OpKind.FORWARD, virtual - 1, microbatch] + latency)
            elif kind is OpKind.INPUT_GRAD and virtual < last:
                self._model.add(start >= self._ends[OpKind.INPUT_GRAD, virtual + 1, microbatch] + latency)
            elif kind is not OpKind.FORWARD:
                done = OpKind.FORWARD if kind is OpKind.INPUT_GRAD else OpKind.INPUT_GRAD
                self._model.add(start >= self._ends[done, virtual, microbatch])

    def _add_bounds(self) -> None:
        """Bounds the makespan by every end, and, so that proofs are quick, by what holds for any order."""
        instance = self._instance
        for end in self._ends.values():
            self._model.add(self._makespan >= end)
        for stage in range(instance.stages):
            own = range(stage, instance.virtual_stages, instance.stages)
            work = sum(self._times[kind][virtual] for kind in KINDS for virtual in own)
            first = self._before[OpKind.FORWARD][stage] + stage * instance.latency
            self._model.add(self._makespan >= first + instance.microbatches * work)


def _order(instance: Instance, starts: dict[tuple[OpKind, int, int], int]) -> PipelineOrder:
    """Ops of every stage by start (no op takes no time)."""
    rows: list[list[tuple[int, PipelineOp]]] = [[] for _ in range(instance.stages)]
    for (kind, virtual, microbatch), start in starts.items():
        chunk, stage = divmod(virtual, instance.stages)
        rows[stage].append((start, PipelineOp(kind, chunk, microbatch)))
    return tuple(tuple(op for _, op in sorted(row)) for row in rows)


# ---------------------------------------------------------------- the same instance for the planner


@dataclass(frozen=True, kw_only=True, eq=False)
class BareSetting(PlanningContext):
    """A setting whose layers are given, not priced: one kernel per op, no memory, no other traffic."""

    bare: tuple[PricedLayer, ...]

    def layers(
        self,
        modules: tuple[Encoder | Llm, ...],
        sequences: float,
        policy: RecomputePolicy,
        layout: Layout | None = None,
        *,
        gather_copies: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[PricedLayer, ...]:
        return self.bare


def bare_setting(instance: Instance) -> BareSetting:
    """Units become seconds."""
    job, layout = find_job("paper/small-a100"), Layout(pp=instance.stages)
    link = Link(bandwidth_bytes_per_s=inf, latency_s=float(instance.latency))
    cluster = replace(job.cluster, gpus=instance.stages, within_node=link, between_nodes=link)
    job = replace(
        job,
        cluster=cluster,
        workload=replace(job.workload, sequences_per_step=instance.microbatches),
        layout=LayoutConstraints(limits=SearchLimits(microbatch_sequences=(1,))),
    )
    encoder, llm = (module.name for module in job.model.modules)
    names = [encoder] * instance.encoder_layers + [llm] * (len(instance.layers) - instance.encoder_layers)
    return BareSetting(
        job=job,
        cost_model=ClusterCostModel(cluster=cluster, assumptions=get_preset("clean")),
        layout=layout,
        microbatch_sequences=1,
        bare=tuple(
            _bare_layer(name, times, layout) for name, times in zip(names, instance.layers, strict=True)
        ),
    )


def _bare_layer(module: str, times: Times, layout: Layout) -> PricedLayer:
    kernels = {kind: (_kernel(kind, time),) for kind, time in zip(KINDS, times, strict=True)}
    return PricedLayer(
        module=module,
        layout=layout,
        kernels={**kernels, OpKind.BACKWARD: (_kernel(OpKind.BACKWARD, times[1] + times[2]),)},
        parameters=0.0,
        activation_bytes=0.0,
        output_bytes=1.0,
        trained=True,
    )


def _kernel(kind: OpKind, time: int) -> Kernel:
    return Kernel(name="compute", kind=kind, lane=Lane.COMPUTE, duration_s=float(time))
