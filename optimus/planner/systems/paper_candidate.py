"""The paper's system: encoder layouts beside the LLM's, and its bubble scheduler for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from math import comb

from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM, RankGrid
from optimus.job.layout import Layout
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan, lower_to_plan
from optimus.planner.systems.colocated_plan import ColocatedEncoder, ColocatedPlanBuilder
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.fill_paper import (
    COMPUTE,
    Assigned,
    BubbleFilling,
    DeviceBubbles,
    EncoderPipeline,
    Interchangeable,
    TimedKernel,
    assign_microbatches_by_end_time,
    fill_bubbles,
    subtract_kernels,
)
from optimus.schedule.llm_timeline import FIRST, LAST, LlmTimeline, PlacedEncoderOp, list_template_kernels

MOST_SPLITS = 5_000
Split = tuple[int, ...]


def enumerate_microbatch_splits(microbatches: int, pipelines: int) -> Iterator[Split]:
    """Every way to give each pipeline at least one of the microbatches."""
    for cuts in combinations(range(1, microbatches), pipelines - 1):
        edges = (0, *cuts, microbatches)
        yield tuple(b - a for a, b in pairwise(edges))


def uniform_microbatch_split(microbatches: int, pipelines: int) -> Split:
    """As even as it can be."""
    each, rest = divmod(microbatches, pipelines)
    return tuple(each + (number < rest) for number in range(pipelines))


def candidate_microbatch_splits(
    microbatches: int, pipelines: int, groups: Sequence[int]
) -> tuple[list[Split], bool]:
    """All splits that differ (pipelines of one group are alike), or the uniform one and its neighbours.

    The second value says whether all were taken.
    """
    if comb(microbatches - 1, pipelines - 1) <= MOST_SPLITS:
        splits = enumerate_microbatch_splits(microbatches, pipelines)
        return list(dict.fromkeys(_sorted_in_groups(split, groups) for split in splits)), True
    uniform = uniform_microbatch_split(microbatches, pipelines)
    found = [uniform]
    for giver in range(pipelines):
        for taker in range(pipelines):
            if giver != taker and uniform[giver] > 1:
                split = list(uniform)
                split[giver] -= 1
                split[taker] += 1
                found.append(tuple(split))
    return list(dict.fromkeys(_sorted_in_groups(split, groups) for split in found))[:MOST_SPLITS], False


def _sorted_in_groups(split: Split, groups: Sequence[int]) -> Split:
    """Of splits that only exchange alike pipelines, one: the larger parts first."""
    found = list(split)
    for group in set(groups):
        places = [place for place, own in enumerate(groups) if own == group]
        for place, count in zip(places, sorted((split[p] for p in places), reverse=True), strict=True):
            found[place] = count
    return tuple(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class PaperSchedule:
    """What the scheduler found best for one encoder layout."""

    candidate: PaperCandidate
    split: Split
    forward: BubbleFilling
    backward: BubbleFilling
    all_splits: bool

    @property
    def estimate_s(self) -> float:
        """The paper's own latency: the LLM's step and what does not fit."""
        return self.forward.delay_s + self.candidate.base.step_s + self.backward.delay_s

    def hidden_share(self, *, coarse: bool = False) -> float:
        """Share of encoder work placed inside the LLM's bubbles: the paper's scheduling efficiency."""
        both = self.forward, self.backward
        total = sum(filled.work_s for filled in both)
        return sum(filled.inside_s(coarse=coarse) for filled in both) / total if total else 1.0


class LlmTimelineCache:
    """Timelines of LLM pipelines, each played once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[PipelineCandidate, LlmTimeline]] = {}

    def of(self, llm: PipelineCandidate, header: Plan) -> LlmTimeline:
        if id(llm) not in self._known:
            self._known[id(llm)] = llm, LlmTimeline(header, llm.order)
        return self._known[id(llm)][1]


class PaperCandidate:
    """One LLM pipeline with all encoders in one layout, as the bubble scheduler sees it."""

    def __init__(
        self,
        context: PlanningContext,
        llm: PipelineCandidate,
        layout: Layout,
        recompute: dict[str, str],
        bases: LlmTimelineCache | None = None,
    ) -> None:
        self.context, self.llm, self.layout, self.recompute = context, llm, layout, recompute
        self._bases = bases or LlmTimelineCache()
        names = [encoder.name for encoder in context.job.model.encoders]
        self._ranks = RankGrid(layouts={**dict.fromkeys(names, layout), LLM: llm.layout})
        self.num_pipelines = self._ranks.num_pipelines(names[0]) if names else 0

    def encoders(self, pipelines: Sequence[int]) -> list[ColocatedEncoder]:
        """Every encoder in this layout; one plan is applied to each."""
        context = self.context
        return [
            ColocatedEncoder(
                encoder=encoder,
                layout=self.layout,
                layers=context.encoder_layers(
                    encoder, self.layout, self.llm.sequences, self.recompute[encoder.name]
                ),
                pieces=1,
                pipelines=tuple(pipelines),
                recompute=self.recompute[encoder.name],
            )
            for encoder in context.job.model.encoders
        ]

    def colocated(self, pipelines: Sequence[int]) -> ColocatedPlanBuilder:
        return ColocatedPlanBuilder(self.context, self.llm, self.encoders(pipelines))

    @cached_property
    def header(self) -> Plan:
        """A plan's header; which pipeline runs what is decided later."""
        return self.colocated([0] * self.llm.microbatches).header(strategy="paper")

    @cached_property
    def base(self) -> LlmTimeline:
        """The LLM alone; the same for every encoder layout."""
        return self._bases.of(self.llm, self.header)

    # ------------------------------------------------------------------------ pipelines

    @cached_property
    def first_stages(self) -> list[int]:
        """Of every pipeline: the LLM stage that holds its first stage."""
        name = self.context.job.model.encoders[0].name
        found = [0] * self.num_pipelines
        for device in range(self._ranks.num_classes):
            stage, _, _ = self._ranks.coordinates(device)
            found[self._ranks.pipeline_of(name, device)] = stage - stage % self.layout.pp
        return found

    @cached_property
    def _forward(self) -> list[EncoderPipeline]:
        """Pipelines on the same LLM stages are alike."""
        alike = {
            first: self._pipeline(
                OpKind.FORWARD, [self.base.side(first + s, mirrored=False) for s in self._stages]
            )
            for first in set(self.first_stages)
        }
        return [alike[first] for first in self.first_stages]

    @property
    def _stages(self) -> range:
        return range(self.layout.pp)

    @cached_property
    def _mirrored(self) -> dict[tuple[int, int], EncoderPipeline]:
        return {}

    def _backward(self, moved: Sequence[int]) -> list[EncoderPipeline]:
        """In the mirror, less the bubbles that forwards have taken."""
        found = []
        for number, (first, count) in enumerate(zip(self.first_stages, moved, strict=True)):
            if (first, count) not in self._mirrored:
                sides = [self._left(number, first, stage, count) for stage in self._stages]
                self._mirrored[first, count] = self._pipeline(OpKind.BACKWARD, sides)
            found.append(self._mirrored[first, count])
        return found

    def _left(self, pipeline: int, first: int, stage: int, count: int) -> DeviceBubbles:
        """A stage in the mirror, less what `count` moved forwards of a pipeline have taken."""
        side = self.base.side(first + stage, mirrored=True)
        taken = []
        for number in range(count):
            move = self._forward[pipeline].move(number)
            assert move is not None
            taken += list(zip(self._forward[pipeline].kernels[stage], move.begins_s[stage], strict=True))
        end = self.base.end_s
        kernels = [kernel for kernel, _ in taken[::-1]]
        return subtract_kernels(side, kernels, [end - begin - kernel[1] for kernel, begin in taken[::-1]])

    def _backward_points(self, pipelines: Sequence[int]) -> Assigned:
        """B_i of every pipeline's own microbatches; in the mirror the last comes first."""
        found: list[list[float]] = [[] for _ in range(self.num_pipelines)]
        for pipeline, point in reversed(list(zip(pipelines, self.base.backward_points, strict=True))):
            found[pipeline].append(self.base.end_s - point)
        return Assigned(found)

    def _pipeline(self, kind: OpKind, sides: Sequence[DeviceBubbles]) -> EncoderPipeline:
        """Data flows from the first encoder stage to the last, backward in the mirror too."""
        make = self.context.chunks.make
        encoders = self.encoders([0] * self.llm.microbatches)
        return EncoderPipeline(
            sides=sides,
            kernels=[self.kernels(kind, stage) for stage in self._stages],
            seconds=[sum(make(e.stages[stage]).seconds[kind] for e in encoders) for stage in self._stages],
        )

    def kernels(self, kind: OpKind, stage: int) -> list[TimedKernel]:
        """Of all encoders, as if they were one: beside LLM communication each takes longer."""
        mirrored, stretch = kind != OpKind.FORWARD, 1.0 + self.header.slowdown
        names = [name for name in self.header.modules if name != LLM]
        parts = [
            list_template_kernels(
                self.header.template_of(name, kind, stage, 0), mirrored=mirrored, stretch=stretch
            )
            for name in names
        ]
        return [kernel for part in (parts[::-1] if mirrored else parts) for kernel in part]

    # ------------------------------------------------------------------------ the search over splits

    def best(self, most: int) -> PaperSchedule:
        """The split with the least latency that gives no pipeline more than `most` microbatches.

        Even ones come first; hopeless ones are left early.
        """
        splits, whole = candidate_microbatch_splits(
            self.llm.microbatches, self.num_pipelines, self.first_stages
        )
        fitting = [split for split in splits if max(split) <= most]
        found: PaperSchedule | None = None
        for split in sorted(fitting, key=lambda split: sum(count * count for count in split)):
            delay = None if found is None else found.estimate_s - self.base.step_s
            if delay == 0.0:
                break
            filled = self._schedule(split, delay)
            if filled is not None:
                found = PaperSchedule(
                    candidate=self, split=split, forward=filled[0], backward=filled[1], all_splits=whole
                )
        assert found is not None
        return found

    def _schedule(self, split: Split, most_s: float | None) -> tuple[BubbleFilling, BubbleFilling] | None:
        """Both directions of one split; None if they delay the LLM by `most_s` or more."""
        forward = fill_bubbles(self._forward, Interchangeable(self.base.forward_points), split)
        points = self._backward_points(assign_microbatches_by_end_time(forward.ends_s))
        if most_s is not None:
            # With all bubbles to themselves backwards do no worse than beside moved forwards.
            alone = fill_bubbles(self._backward([0] * len(split)), points, split)
            if forward.delay_s + alone.delay_s >= most_s:
                return None
        backward = fill_bubbles(self._backward(forward.moved), points, split)
        better = most_s is None or forward.delay_s + backward.delay_s < most_s
        return (forward, backward) if better else None

    def plan(self, choice: PaperSchedule) -> FilledPlan:
        """The choice as programs, with what they cost."""
        pipelines, fillers = self.fillers(choice)
        header = _with_pipelines(self.header, pipelines)
        orders = self.base.arrange(header, fillers)
        fixed = self.colocated(pipelines).fixed_bytes()
        return lower_to_plan(header, orders, fixed, estimate_s=choice.estimate_s)

    @cached_property
    def _fixed(self) -> list[Mapping[str, int]]:
        return self.colocated([0] * self.llm.microbatches).fixed_bytes()

    @cached_property
    def traffic_s(self) -> float:
        """Time of the encoders' own gathers and reduces on the busiest stage: the paper leaves it out."""
        modules = [module for name, module in self.header.modules.items() if name != LLM]
        stages = (
            sum(bucket.gather_s + bucket.reduce_s for module in modules for bucket in module.buckets[stage])
            for stage in self._stages
        )
        return max(stages)

    def peak_bytes_bound(self, microbatches: int) -> float:
        """At most what the worst rank holds with so many microbatches of the encoders on a pipeline."""
        modules = [module for name, module in self.header.modules.items() if name != LLM]
        working = self.llm.sums.stage_bytes(self.llm.cut, self.llm.layout.pp).working  # of the LLM
        found = []
        for stage, memory in enumerate(self.llm.memories):
            fixed = self._fixed[self._ranks.class_at(stage, 0, 0)]
            kept = sum(module.chunks[stage % self.layout.pp].saved_activation_bytes for module in modules)
            seam = sum(module.seam_bytes for module in modules) * self.llm.microbatches if stage == 0 else 0
            llm = memory.llm_activations - float(working[stage])  # which are fixed here
            found.append(sum(fixed.values()) + llm + microbatches * kept + seam)
        return max(found)

    def max_microbatches(self, capacity_bytes: float) -> int:
        """As many microbatches of the encoders as fit on one pipeline, of those that there are."""
        counts = range(self.llm.microbatches, 0, -1)
        return next((count for count in counts if self.peak_bytes_bound(count) <= capacity_bytes), 0)

    def fillers(self, choice: PaperSchedule) -> tuple[tuple[int, ...], list[list[PlacedEncoderOp]]]:
        """The pipeline of every microbatch, and where each class's encoder phases go."""
        pipelines = assign_microbatches_by_end_time(choice.forward.ends_s)
        name = self.context.job.model.encoders[0].name
        found: list[list[PlacedEncoderOp]] = []
        for device in range(self._ranks.num_classes):
            pipeline = self._ranks.pipeline_of(name, device)
            mine = [number for number, own in enumerate(pipelines) if own == pipeline]
            stage = self._ranks.stage_of(name, device)
            found.append(
                [
                    *self._forwards(choice.forward, pipeline, stage, mine),
                    *self._backwards(choice.backward, pipeline, stage, mine),
                ]
            )
        return pipelines, found

    def _forwards(
        self, filled: BubbleFilling, pipeline: int, stage: int, mine: list[int]
    ) -> Iterator[PlacedEncoderOp]:
        """What stays before the LLM first, in order, then what was moved."""
        stay = len(mine) - filled.moved[pipeline]
        for place, microbatch in enumerate(mine):
            times = filled.begins_s(pipeline, place - stay, stage) if place >= stay else None
            yield from self._ops(OpKind.FORWARD, stage, microbatch, times, FIRST)

    def _backwards(
        self, filled: BubbleFilling, pipeline: int, stage: int, mine: list[int]
    ) -> Iterator[PlacedEncoderOp]:
        """What was moved first, the deepest first, then what stays behind the LLM."""
        moved = filled.moved[pipeline]
        kernels = self.kernels(OpKind.BACKWARD, stage)
        for place, microbatch in enumerate(mine):
            times = None
            if place < moved:
                begins = filled.begins_s(pipeline, moved - 1 - place, stage)
                spent = [seconds if what == COMPUTE else 0.0 for what, seconds in kernels]
                ends = [self.base.end_s - begin - s for begin, s in zip(begins, spent, strict=True)]
                times = tuple(reversed(ends))
            yield from self._ops(OpKind.BACKWARD, stage, microbatch, times, LAST)

    def _ops(
        self, kind: OpKind, stage: int, microbatch: int, times: tuple[float, ...] | None, otherwise: float
    ) -> Iterator[PlacedEncoderOp]:
        """The op of every encoder for one microbatch."""
        at = 0
        for name in self.header.modules:
            size = len(self.header.template_of(name, kind, stage, 0)) if name != LLM else 0
            if size:
                own = [otherwise] * size if times is None else times[at : at + size]
                yield PlacedEncoderOp(module=name, kind=kind, microbatch=microbatch, times_s=own)
            at += size


def _with_pipelines(plan: Plan, pipelines: tuple[int, ...]) -> Plan:
    """A header in which every encoder's microbatches have their pipelines."""
    modules = {
        name: module if name == LLM else replace(module, pipelines=pipelines)
        for name, module in plan.modules.items()
    }
    return replace(plan, modules=modules)
