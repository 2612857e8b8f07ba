"""Schedules all encoders in one layout into an LLM pipeline's bubbles, by the paper's algorithm.

Forwards are packed into the bubbles of the LLM's timeline, backwards into those of its mirror image, in which
time runs from the end of the step to its begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, pairwise
from math import comb

from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM, RankGrid
from optimus.job.layout import Layout
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan
from optimus.planner.systems.colocated_plan import ColocatedEncoder, ColocatedPlanBuilder
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.fill_paper import (
    COMPUTE,
    BubbleFilling,
    DeviceBubbles,
    EncoderPipeline,
    LatestDelay,
    TimedKernel,
    assign_microbatches_by_end_time,
    fill_bubbles,
    latest_delay_as_assigned,
    latest_delay_in_any_order,
    subtract_kernels_from_bubbles,
)
from optimus.schedule.llm_timeline import FIRST, LAST, LlmTimeline, PlacedEncoderOp, list_template_kernels

MAX_SPLITS = 5_000  # of the microbatches over encoder pipelines, for one layout
Split = tuple[int, ...]  # microbatches of every encoder pipeline
LlmTimelines = dict[int, tuple[PipelineCandidate, LlmTimeline]]  # by id of the pipeline


def enumerate_microbatch_splits(microbatches: int, pipelines: int) -> Iterator[Split]:
    """Yields every split of the microbatches that gives each pipeline at least one."""
    for cuts in combinations(range(1, microbatches), pipelines - 1):
        edges = (0, *cuts, microbatches)
        yield tuple(b - a for a, b in pairwise(edges))


def uniform_microbatch_split(microbatches: int, pipelines: int) -> Split:
    """Returns the most even split; the first pipelines get one more."""
    share, rest = divmod(microbatches, pipelines)
    return tuple(share + (number < rest) for number in range(pipelines))


def candidate_microbatch_splits(
    microbatches: int, pipelines: int, groups: Sequence[int]
) -> tuple[list[Split], bool]:
    """Returns all splits that differ, or if they are too many the uniform one and its neighbours.

    Pipelines of one group are interchangeable. The second value says whether all splits are returned.
    """
    if comb(microbatches - 1, pipelines - 1) <= MAX_SPLITS:
        splits = enumerate_microbatch_splits(microbatches, pipelines)
        return list(dict.fromkeys(_sorted_in_groups(split, groups) for split in splits)), True
    uniform = uniform_microbatch_split(microbatches, pipelines)
    neighbours = [uniform]
    for giver in range(pipelines):
        for taker in range(pipelines):
            if giver != taker and uniform[giver] > 1:
                split = list(uniform)
                split[giver] -= 1
                split[taker] += 1
                neighbours.append(tuple(split))
    distinct = dict.fromkeys(_sorted_in_groups(split, groups) for split in neighbours)
    return list(distinct)[:MAX_SPLITS], False


def _sorted_in_groups(split: Split, groups: Sequence[int]) -> Split:
    """Sorts the counts of interchangeable pipelines, the larger first."""
    counts = list(split)
    for group in set(groups):
        places = [place for place, its_group in enumerate(groups) if its_group == group]
        for place, count in zip(places, sorted((split[p] for p in places), reverse=True), strict=True):
            counts[place] = count
    return tuple(counts)


@dataclass(frozen=True, kw_only=True, eq=False)
class PaperSchedule:
    """The best split of one encoder layout, with both directions packed into bubbles."""

    candidate: PaperCandidate
    split: Split
    forward: BubbleFilling
    backward: BubbleFilling
    all_splits: bool

    @property
    def estimate_s(self) -> float:
        """The paper's latency: the LLM's step and the delays by work that does not fit into bubbles."""
        return self.forward.delay_s + self.candidate.base.step_s + self.backward.delay_s

    def hidden_share(self, *, coarse: bool = False) -> float:
        """Returns the share of encoder work inside the LLM's bubbles: the paper's scheduling efficiency."""
        both = self.forward, self.backward
        total_s = sum(filled.work_s for filled in both)
        return sum(filled.inside_s(coarse=coarse) for filled in both) / total_s if total_s else 1.0


class PaperCandidate:
    """One LLM pipeline with all encoders in one layout, as the paper's bubble scheduler sees them."""

    def __init__(
        self,
        context: PlanningContext,
        llm: PipelineCandidate,
        layout: Layout,
        recompute: dict[str, str],
        timelines: LlmTimelines | None = None,
    ) -> None:
        """`timelines` are shared by candidates, so that each LLM pipeline is simulated once."""
        self.context, self.llm, self.layout, self.recompute = context, llm, layout, recompute
        self._timelines = {} if timelines is None else timelines
        names = [encoder.name for encoder in context.job.model.encoders]
        self._ranks = RankGrid(layouts={**dict.fromkeys(names, layout), LLM: llm.layout})
        self.num_pipelines = self._ranks.num_pipelines(names[0]) if names else 0

    def _place_encoders(self, pipelines: Sequence[int]) -> list[ColocatedEncoder]:
        """Returns every encoder in this layout; `pipelines` runs the microbatches of each."""
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

    def _plan_builder(self, pipelines: Sequence[int]) -> ColocatedPlanBuilder:
        return ColocatedPlanBuilder(self.context, self.llm, self._place_encoders(pipelines))

    @cached_property
    def header(self) -> Plan:
        """The plan's header; microbatches are assigned to pipelines later."""
        return self._plan_builder([0] * self.llm.microbatches).header(strategy="paper")

    @cached_property
    def base(self) -> LlmTimeline:
        """The LLM's own step, the same for every encoder layout."""
        if id(self.llm) not in self._timelines:  # which keeps the pipeline alive, so that its id stays valid
            self._timelines[id(self.llm)] = self.llm, LlmTimeline(self.header, self.llm.order)
        return self._timelines[id(self.llm)][1]

    # ------------------------------------------------------------------------ pipelines

    @cached_property
    def _first_llm_stages(self) -> list[int]:
        """The LLM stage that holds the first stage of every encoder pipeline."""
        name = self.context.job.model.encoders[0].name
        first_stages = [0] * self.num_pipelines
        for device in range(self._ranks.num_classes):
            stage, _, _ = self._ranks.coordinates(device)
            first_stages[self._ranks.pipeline_of(name, device)] = stage - stage % self.layout.pp
        return first_stages

    @cached_property
    def _forward_pipelines(self) -> list[EncoderPipeline]:
        """Encoder pipelines with the bubbles for forwards; those on the same LLM stages are one object."""
        by_first_stage = {
            first: self._build_pipeline(
                OpKind.FORWARD, [self.base.device_bubbles(first + s, mirrored=False) for s in self._stages]
            )
            for first in set(self._first_llm_stages)
        }
        return [by_first_stage[first] for first in self._first_llm_stages]

    @property
    def _stages(self) -> range:
        return range(self.layout.pp)

    @cached_property
    def _mirrored(self) -> dict[tuple[int, int], EncoderPipeline]:
        """Cache of `_backward_pipelines`, by first LLM stage and number of moved forwards."""
        return {}

    def _backward_pipelines(self, moved: Sequence[int]) -> list[EncoderPipeline]:
        """Returns mirrored pipelines without the bubbles that `moved` forwards of each have taken."""
        pipelines = []
        for number, (first, count) in enumerate(zip(self._first_llm_stages, moved, strict=True)):
            if (first, count) not in self._mirrored:
                devices = [self._remaining_bubbles(number, first, stage, count) for stage in self._stages]
                self._mirrored[first, count] = self._build_pipeline(OpKind.BACKWARD, devices)
            pipelines.append(self._mirrored[first, count])
        return pipelines

    def _remaining_bubbles(self, pipeline: int, first: int, stage: int, count: int) -> DeviceBubbles:
        """Returns a stage's mirrored bubbles without those that `count` moved forwards have taken."""
        device = self.base.device_bubbles(first + stage, mirrored=True)
        taken = []
        for number in range(count):
            move = self._forward_pipelines[pipeline].move(number)
            assert move is not None
            kernels = self._forward_pipelines[pipeline].kernels[stage]
            taken += list(zip(kernels, move.begins_s[stage], strict=True))
        taken.reverse()  # as in the mirror, where a kernel begins when it ends in the timeline
        mirrored_begins_s = [self.base.end_s - begin_s - kernel[1] for kernel, begin_s in taken]
        return subtract_kernels_from_bubbles(device, [kernel for kernel, _ in taken], mirrored_begins_s)

    def _backward_points(self, pipelines: Sequence[int]) -> LatestDelay:
        """Returns the paper's B_i of every pipeline's microbatches, mirrored: the last comes first."""
        points_s: list[list[float]] = [[] for _ in range(self.num_pipelines)]
        for pipeline, point in reversed(list(zip(pipelines, self.base.backward_points, strict=True))):
            points_s[pipeline].append(self.base.end_s - point)
        return partial(latest_delay_as_assigned, points_s)

    def _build_pipeline(self, kind: OpKind, devices: Sequence[DeviceBubbles]) -> EncoderPipeline:
        """Builds an encoder pipeline; in the mirror, backwards run from the first stage to the last too."""
        make = self.context.chunks.price
        encoders = self._place_encoders([0] * self.llm.microbatches)
        return EncoderPipeline(
            devices=devices,
            kernels=[self._list_kernels(kind, stage) for stage in self._stages],
            seconds=[sum(make(e.stages[stage]).seconds[kind] for e in encoders) for stage in self._stages],
        )

    def _list_kernels(self, kind: OpKind, stage: int) -> list[TimedKernel]:
        """Returns the kernels of all encoders as if they were one, slowed down as under LLM collectives."""
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

    def search_splits(self, most: int) -> PaperSchedule:
        """Returns the split with the least latency that gives no pipeline more than `most` microbatches.

        Even splits come first; a split is dropped once its delay exceeds that of the best.
        """
        splits, are_all = candidate_microbatch_splits(
            self.llm.microbatches, self.num_pipelines, self._first_llm_stages
        )
        fitting = [split for split in splits if max(split) <= most]
        best: PaperSchedule | None = None
        for split in sorted(fitting, key=lambda split: sum(count * count for count in split)):
            best_delay_s = None if best is None else best.estimate_s - self.base.step_s
            if best_delay_s == 0.0:
                break
            filled = self._fill_both(split, best_delay_s)
            if filled is not None:
                best = PaperSchedule(
                    candidate=self, split=split, forward=filled[0], backward=filled[1], all_splits=are_all
                )
        assert best is not None
        return best

    def _fill_both(self, split: Split, most_s: float | None) -> tuple[BubbleFilling, BubbleFilling] | None:
        """Packs both directions of one split; returns None if they delay the LLM by `most_s` or more."""
        forward = fill_bubbles(
            self._forward_pipelines, partial(latest_delay_in_any_order, self.base.forward_points), split
        )
        points = self._backward_points(assign_microbatches_by_end_time(forward.ends_s))
        if most_s is not None:
            # Backwards that have all bubbles to themselves bound those that share them with moved forwards.
            alone = fill_bubbles(self._backward_pipelines([0] * len(split)), points, split)
            if forward.delay_s + alone.delay_s >= most_s:
                return None
        backward = fill_bubbles(self._backward_pipelines(forward.moved), points, split)
        better = most_s is None or forward.delay_s + backward.delay_s < most_s
        return (forward, backward) if better else None

    def plan(self, choice: PaperSchedule) -> FilledPlan:
        """Lowers a schedule to a plan."""
        pipelines, encoder_ops = self._place_ops(choice)
        header = _with_pipelines(self.header, pipelines)
        orders = self.base.insert_encoder_ops(header, encoder_ops)
        fixed = self._plan_builder(pipelines).fixed_bytes()
        return FilledPlan(header=header, orders=orders, fixed=fixed, estimate_s=choice.estimate_s)

    @cached_property
    def _fixed(self) -> list[Mapping[str, int]]:
        return self._plan_builder([0] * self.llm.microbatches).fixed_bytes()

    @cached_property
    def traffic_s(self) -> float:
        """Time of the encoders' own gathers and reduces on the busiest stage, which the paper leaves out."""
        modules = [module for name, module in self.header.modules.items() if name != LLM]
        stages = (
            sum(bucket.gather_s + bucket.reduce_s for module in modules for bucket in module.buckets[stage])
            for stage in self._stages
        )
        return max(stages)

    def peak_bytes_bound(self, microbatches: int) -> float:
        """Returns an upper bound on a rank's memory with so many microbatches on an encoder pipeline."""
        modules = [module for name, module in self.header.modules.items() if name != LLM]
        working = self.llm.sums.stage_bytes(self.llm.cut, self.llm.layout.pp).working  # of the LLM
        peaks = []
        entry = self.header.ranks.entry_stage
        for stage, memory in enumerate(self.llm.memories):
            fixed = self._fixed[self._ranks.class_at(stage, 0, 0)]
            kept = sum(module.chunks[stage % self.layout.pp].saved_activation_bytes for module in modules)
            seam = (
                sum(module.seam_bytes for module in modules) * self.llm.microbatches if stage == entry else 0
            )
            llm = memory.llm_activations + memory.logits - float(working[stage])  # which `fixed` includes
            peaks.append(sum(fixed.values()) + llm + microbatches * kept + seam)
        return max(peaks)

    def max_microbatches(self, capacity_bytes: float) -> int:
        """Returns how many microbatches fit on one encoder pipeline, at most all."""
        counts = range(self.llm.microbatches, 0, -1)
        return next((count for count in counts if self.peak_bytes_bound(count) <= capacity_bytes), 0)

    def _place_ops(self, choice: PaperSchedule) -> tuple[tuple[int, ...], list[list[PlacedEncoderOp]]]:
        """Returns every microbatch's pipeline, and the timed encoder ops of each device class."""
        pipelines = assign_microbatches_by_end_time(choice.forward.ends_s)
        name = self.context.job.model.encoders[0].name
        ops: list[list[PlacedEncoderOp]] = []
        for device in range(self._ranks.num_classes):
            pipeline = self._ranks.pipeline_of(name, device)
            microbatches = [number for number, runs_on in enumerate(pipelines) if runs_on == pipeline]
            stage = self._ranks.stage_of(name, device)
            ops.append(
                [
                    *self._place_forwards(choice.forward, pipeline, stage, microbatches),
                    *self._place_backwards(choice.backward, pipeline, stage, microbatches),
                ]
            )
        return pipelines, ops

    def _place_forwards(
        self, filled: BubbleFilling, pipeline: int, stage: int, microbatches: list[int]
    ) -> Iterator[PlacedEncoderOp]:
        """Yields forwards that stay before the LLM, then those that moved into its bubbles."""
        stay = len(microbatches) - filled.moved[pipeline]
        for place, microbatch in enumerate(microbatches):
            times = filled.begins_s(pipeline, place - stay, stage) if place >= stay else None
            yield from self._ops(OpKind.FORWARD, stage, microbatch, times, FIRST)

    def _place_backwards(
        self, filled: BubbleFilling, pipeline: int, stage: int, microbatches: list[int]
    ) -> Iterator[PlacedEncoderOp]:
        """Yields backwards that moved into bubbles, the last moved first, then those after the LLM."""
        moved = filled.moved[pipeline]
        kernels = self._list_kernels(OpKind.BACKWARD, stage)
        for place, microbatch in enumerate(microbatches):
            times = None
            if place < moved:
                mirrored_s = filled.begins_s(pipeline, moved - 1 - place, stage)
                compute_s = [seconds if what == COMPUTE else 0.0 for what, seconds in kernels]
                begins_s = [self.base.end_s - at - s for at, s in zip(mirrored_s, compute_s, strict=True)]
                times = tuple(reversed(begins_s))
            yield from self._ops(OpKind.BACKWARD, stage, microbatch, times, LAST)

    def _ops(
        self, kind: OpKind, stage: int, microbatch: int, times: tuple[float, ...] | None, otherwise: float
    ) -> Iterator[PlacedEncoderOp]:
        """Yields the op of every encoder for one microbatch, at `times` or all at `otherwise`."""
        at = 0
        for name in self.header.modules:
            size = len(self.header.template_of(name, kind, stage, 0)) if name != LLM else 0
            if size:
                times_s = [otherwise] * size if times is None else times[at : at + size]
                yield PlacedEncoderOp(module=name, kind=kind, microbatch=microbatch, times_s=times_s)
            at += size


def _with_pipelines(plan: Plan, pipelines: tuple[int, ...]) -> Plan:
    """Returns the header with the pipeline of every encoder microbatch."""
    modules = {
        name: module if name == LLM else replace(module, pipelines=pipelines)
        for name, module in plan.modules.items()
    }
    return replace(plan, modules=modules)
