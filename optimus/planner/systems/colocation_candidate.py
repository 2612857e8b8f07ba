"""Places encoders on the GPUs of one LLM pipeline: the plan header, a memory bound, and the lowered plan."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from optimus.cost.memory import transient_bytes
from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Floats, OpKind
from optimus.ir.plan import Plan, Program
from optimus.ir.ranks import LLM
from optimus.job.layout import Layout
from optimus.job.model import Encoder
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan, RejectedLayout
from optimus.planner.systems.colocated_plan import ColocatedEncoder, ColocatedPlanBuilder
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.planner.worst_step import BinShape
from optimus.schedule.fill import (
    Fill,
    FillResult,
    expand_orders_to_tp_blocks,
    order_encoders_around_llm,
)
from optimus.schedule.llm_timeline import LlmTimeline
from optimus.schedule.lower import lower_to_programs
from optimus.schedule.pipeline_orders import expand_order_to_phases

LOWER_TWO_UP_TO_LINES = 20_000  # program lines up to which two plans are lowered and the replay decides
SMALL_LINES = 2_000  # program lines up to which other assignments are tried and candidates are replayed
MAX_UNFOLDED_LINES = 400_000  # program lines up to which whole microbatches are tried where pieces waste time
SHIFT_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)  # of the LLM's own step: how much later the LLM begins
MAX_PADDING_RATIO = 1.2  # images that pieces have time for, over those that there are


@dataclass(frozen=True, kw_only=True)
class EncoderPlacement:
    """Layout and microbatches of one encoder on the LLM's GPUs.

    A piece is one encoder microbatch; `pieces` of them make up one LLM microbatch.
    """

    layout: Layout
    recompute: str
    pieces: int = 1
    layers_per_stage: tuple[int, ...] = ()  # inner layers; as even as they can be if left out
    split_backward: bool = True  # into input and weight gradients
    window: int = 0  # LLM microbatches whose encoder activations may be resident at a time; 0: all
    reverse_pipelines: bool = False  # the last encoder pipeline gets the first microbatch


class ColocationCandidate:
    """One LLM pipeline with encoders placed on its GPUs, ready to be scheduled.

    A TP group of the LLM holds several blocks of an encoder whose tp is smaller. If every block has a piece
    of every microbatch, all blocks do the same, and they are folded: one is scheduled for all.
    """

    def __init__(
        self,
        context: PlanningContext,
        llm: PipelineCandidate,
        placements: Mapping[str, EncoderPlacement],
        find_base: Callable[[ColocationCandidate], LlmTimeline] | None = None,
    ) -> None:
        self.context, self.llm, self.placements = context, llm, placements
        self.folded = all(c.pieces % (llm.layout.tp // c.layout.tp) == 0 for c in placements.values())
        assert self.folded or self._may_unfold
        self._find_base = find_base  # the timeline of the same pipeline with other encoder layouts

    @cached_property
    def header(self) -> Plan:
        return self._scheduled.header(strategy="optimus")

    @cached_property
    def base(self) -> LlmTimeline:
        """The LLM's own step."""
        return LlmTimeline(self.header, self.llm.order) if self._find_base is None else self._find_base(self)

    @cached_property
    def _scheduled(self) -> ColocatedPlanBuilder:
        """Modules as they are scheduled: one block for all of a TP group, if they are alike."""
        return self._plan_builder(folded=True) if self.folded else self._unfolded

    @cached_property
    def _unfolded(self) -> ColocatedPlanBuilder:
        """Modules with every block by itself."""
        return self._plan_builder(folded=False)

    def _plan_builder(self, *, folded: bool) -> ColocatedPlanBuilder:
        encoders = self.context.job.model.encoders
        return ColocatedPlanBuilder(
            self.context,
            self.llm,
            [self._encoder(encoder, folded=folded) for encoder in encoders],
            dealing_replicas=self.context.dealing_replicas(self.llm.layout.dp),
        )

    def _encoder(self, encoder: Encoder, *, folded: bool) -> ColocatedEncoder:
        chosen, llm = self.placements[encoder.name], self.llm
        across = llm.layout.tp // chosen.layout.tp if folded else 1
        layout = chosen.layout.with_(dp=chosen.layout.dp // across, tp=chosen.layout.tp * across)
        pieces, num_pipelines = chosen.pieces // across, layout.dp // llm.layout.dp
        pipelines = [number % num_pipelines for number in range(llm.microbatches * pieces)]
        if chosen.reverse_pipelines:
            pipelines = [num_pipelines - 1 - pipeline for pipeline in pipelines]
        return ColocatedEncoder(
            encoder=encoder,
            layout=layout,
            layers=self.context.encoder_layers(
                encoder, chosen.layout, self._sequences_per_piece(encoder), chosen.recompute
            ),
            pieces=pieces,
            pipelines=tuple(pipelines),
            recompute=chosen.recompute,
            layers_per_stage=chosen.layers_per_stage,
            split_backward=chosen.split_backward and encoder.train,
        )

    def _blocks(self, encoder: Encoder) -> int:
        """Returns the blocks of the encoder in a TP group of the LLM."""
        return self.llm.layout.tp // self.placements[encoder.name].layout.tp

    def _sequences_per_piece(self, encoder: Encoder) -> float:
        pieces = self.placements[encoder.name].pieces
        return self.context.sequences_per_piece(encoder, self.llm.sequences, pieces, self._blocks(encoder))

    @cached_property
    def fill(self) -> Fill:
        windows = {each.encoder.name: self._pipeline_window(each) for each in self._scheduled.encoders}
        return Fill(self.header, self.base, windows)

    def _pipeline_window(self, encoder: ColocatedEncoder, window: int | None = None) -> int:
        """Returns how many microbatches of one encoder pipeline may be resident at a time."""
        chosen = self.placements[encoder.encoder.name].window if window is None else window
        return -(-(chosen or self.llm.microbatches) * encoder.pieces // (1 + max(encoder.pipelines)))

    def plan(self, arranged: FillResult) -> FilledPlan:
        """Lowers the faster of a schedule and its tightened form; of many lines, the faster by estimate."""
        both = [arranged, self.fill.shorten(arranged)]
        if len(self.fill.schedule) > LOWER_TWO_UP_TO_LINES:
            both = [min(both, key=lambda each: each.step_s)]
        return min(map(self.lowered, both), key=lambda plan: (not plan.fits, plan.step_s))

    def best_shifted(self) -> FilledPlan:
        """Returns the fastest plan, by replay, over a few shifts of the LLM."""
        arranged = (self.fill.schedule_encoders(share * self.base.step_s) for share in SHIFT_SHARES)
        return min(map(self.plan, arranged), key=lambda plan: plan.step_s)

    def step_s(self, arranged: FillResult) -> float:
        """Returns the step time by which candidates are compared.

        `fill` does not model launches by the host, so that small jobs are replayed with them.
        """
        if not self.header.launch_s or len(self.fill.schedule) > SMALL_LINES:
            return arranged.step_s
        return lower_to_programs(self.header, arranged.orders()).timeline.step_s

    def lowered(self, arranged: FillResult) -> FilledPlan:
        """Lowers a schedule for all blocks and replays it."""
        return self._lower(arranged.orders(), arranged.step_s)

    def lower_around_llm(self, estimate_s: float) -> FilledPlan:
        """Lowers all encoder forwards, then the LLM, then all encoder backwards."""
        header = self.header
        llm_rows = [
            expand_order_to_phases(header, self.llm.order, device, modules=(LLM,)).rows
            for device in range(header.ranks.num_classes)
        ]
        return self._lower(list(order_encoders_around_llm(header, llm_rows)), estimate_s)

    def _lower(self, orders: list[Program], estimate_s: float) -> FilledPlan:
        plan = FilledPlan(
            header=self.header, orders=orders, fixed=self._scheduled.fixed_bytes(), estimate_s=estimate_s
        )
        unfolded = self._unfolded.header(strategy="optimus")
        if not self.folded or unfolded.ranks.num_classes == plan.header.ranks.num_classes:
            return plan
        header, orders = expand_orders_to_tp_blocks(unfolded, self.header, orders)
        fixed = self._unfolded.fixed_bytes()
        return FilledPlan(header=header, orders=orders, fixed=fixed, estimate_s=estimate_s, folded=plan)

    @property
    def fits(self) -> bool:
        return self.peak_bytes_bound <= self.context.capacity_bytes

    @cached_property
    def peak_bytes_bound(self) -> float:
        """Bound on a rank's memory at p99 of steps, with as many encoder microbatches as windows allow."""
        return self._peak_bytes_bound()

    def peak_bytes_at_p99(self, filled: FilledPlan) -> float:
        """Returns the memory of a lowered plan's fullest rank at p99 of steps."""
        ranks, peaks = filled.header.ranks, []
        for device, held in enumerate(filled.memory):
            added = 0.0
            for encoder in self._unfolded.encoders:
                stage = ranks.stage_of(encoder.encoder.name, device)
                size = sum(encoder.activation_bytes[stage])
                added += self._added_at_p99(encoder, stage, ceil(held.encoder_activations / max(size, 1)))
            peaks.append(held.peak + added)
        return max(peaks)

    def _added_at_p99(self, encoder: ColocatedEncoder, stage: int, resident: int) -> float:
        """Returns the bytes that `resident` microbatches of one encoder have more at p99 of steps."""
        bins, layers = self._bins_at_p99[encoder.encoder.name], encoder.stages[stage]
        resident = min(resident, len(bins) - 1)
        saved = sum(encoder.activation_bytes[stage])
        return float((bins[resident] - resident) * saved + (bins[1] - 1) * transient_bytes(layers))

    @cached_property
    def _bins_at_p99(self) -> dict[str, Floats]:
        """By encoder and n: load of n microbatches in a row at p99 of steps, as multiples of a priced one."""
        llm = self.llm
        return {
            placed.encoder.name: self.context.resident_bins_at_p99(
                BinShape(
                    encoder=placed.encoder.name,
                    replicas=llm.layout.dp,
                    microbatches=llm.microbatches,
                    pipelines=placed.pipelines,
                    dealing_replicas=self._unfolded.dealing_replicas,
                    locked=llm.locked,
                ),
                sequences=llm.sequences / placed.pieces,
                priced=self._sequences_per_piece(placed.encoder),
            )
            for placed in self._unfolded.encoders
        }

    @property
    def widest_window(self) -> int:
        """The largest window, below all LLM microbatches, with which every rank fits; 0 if none does."""
        windows = range(1, self.llm.microbatches)
        return bisect_right(windows, self.context.capacity_bytes, key=self._peak_bytes_bound)

    def _peak_bytes_bound(self, window: int | None = None) -> float:
        """Returns the bound with `window` for all encoders, or with the windows of the placements."""
        peaks = []
        for stage, microbatches in self._microbatches_by_rank:
            held = self._bytes_by_stage[stage]
            for encoder, count in zip(self._scheduled.encoders, microbatches, strict=True):
                encoder_stage = stage % encoder.layout.pp
                resident = min(count, self._pipeline_window(encoder, window))
                held += resident * sum(encoder.activation_bytes[encoder_stage])
                held += self._added_at_p99(encoder, encoder_stage, resident)
                takes_rows = stage == self._scheduled.ranks.entry_stage
                held += round(encoder.layers[-1].output_bytes) * len(encoder.pipelines) if takes_rows else 0
            peaks.append(held)
        return max(peaks)

    @cached_property
    def _microbatches_by_rank(self) -> set[tuple[int, tuple[int, ...]]]:
        """Distinct pairs of an LLM stage and the microbatches of every encoder that a rank there runs."""
        ranks = self._scheduled.ranks
        counts = {each.encoder.name: Counter(each.pipelines) for each in self._scheduled.encoders}
        return {
            (ranks.coordinates(d)[0], tuple(counts[name][ranks.pipeline_of(name, d)] for name in counts))
            for d in range(ranks.num_classes)
        }

    @cached_property
    def _bytes_by_stage(self) -> list[float]:
        """Bytes of a rank of every LLM stage without encoder activations."""
        llm = self.llm
        working = llm.stage_bytes.working
        return [
            sum(self._unfolded.fixed_bytes_of(stage).values())
            + held.llm_activations
            + held.logits
            - float(working[stage])
            + llm.moved_bytes
            for stage, held in enumerate(llm.memories)
        ]

    @property
    def _may_unfold(self) -> bool:
        """True if all encoders have one tp: blocks of a wider one's TP group could order ops differently."""
        return len({chosen.layout.tp for chosen in self.placements.values()}) == 1

    @property
    def assignment_changes(self) -> list[dict[str, Any]]:
        """Fields of all placements to change, where another assignment of microbatches may be faster.

        Whole microbatches on parallel pipelines need fewer launches than pieces, which counts in a small job,
        and are even where there are fewer images than blocks. In reverse, later stages get more of them.
        """
        lines = len(self.fill.schedule)
        small = lines <= SMALL_LINES
        blocks = max(map(self._blocks, self.context.job.model.encoders))
        uneven = self._padding_ratio > MAX_PADDING_RATIO and blocks * lines <= MAX_UNFOLDED_LINES
        if not (small or uneven) or not self._may_unfold:
            return []
        in_pieces = any(chosen.pieces > 1 for chosen in self.placements.values())
        several_pipelines = any(max(module.pipelines) for module in self.header.encoders.values())
        changes: list[dict[str, Any]] = [{"pieces": 1}] if in_pieces else []
        if small and (in_pieces or several_pipelines):
            changes.append({"reverse_pipelines": True})
        return changes

    def placements_in_more_pieces(self, counts: Sequence[int]) -> Iterator[Mapping[str, EncoderPlacement]]:
        """Yields placements with so many pieces in every block, as far as its images allow, fewest first."""
        last = self.placements
        for place in range(len(counts)):
            more = {e.name: self._in_pieces(e, counts[: place + 1]) for e in self.context.job.model.encoders}
            if more != last:
                yield more
                last = more

    def _in_pieces(self, encoder: Encoder, counts: Sequence[int]) -> EncoderPlacement:
        """Returns the placement with the last of these counts for which the busiest block has images."""
        chosen, blocks = self.placements[encoder.name], self._blocks(encoder) if self.folded else 1
        busiest = self.context.busiest_group_sequences(encoder, self.llm.sequences, blocks)
        images = self.context.count_images(encoder, busiest) + 1e-9
        count = max((count for count in counts if count <= images), default=0)
        return replace(chosen, pieces=max(chosen.pieces, blocks * count))

    @property
    def _padding_ratio(self) -> float:
        """Images that all pieces have time for, over those that there are: the busiest sets the time."""
        return max(
            self.placements[e.name].pieces * self._sequences_per_piece(e) / self.llm.sequences
            for e in self.context.job.model.encoders
        )

    def reject_for_memory(self, needed_bytes: float, mean_bytes: float | None = None) -> RejectedLayout:
        """Returns the rejection of this candidate because it needs more memory than a GPU has."""
        reason = f"memory: {needed_bytes / 1e9:.1f} of {self.context.capacity_bytes / 1e9:.1f} GB"
        if mean_bytes is not None:
            reason += f" at p99 of the data, {mean_bytes / 1e9:.1f} at its mean"
        return replace(self.reject(reason), peak_bytes=needed_bytes)

    def reject(self, reason: str) -> RejectedLayout:
        """Returns the rejection of this candidate, under the first encoder's layout."""
        layout = next(iter(self.placements.values())).layout
        return RejectedLayout(layout=layout, reason=reason, module=self.context.encoder_names)

    @property
    def encoder_s(self) -> float:
        """Traffic and compute of the encoders on their busiest stages."""
        total_s = 0.0
        for encoder in self._scheduled.encoders:
            microbatches = len(encoder.pipelines) / (1 + max(encoder.pipelines))
            total_s += max(self._stage_s(layers, encoder.kinds, microbatches) for layers in encoder.stages)
        return total_s

    @cached_property
    def work_s(self) -> float:
        """Compute of LLM and encoders on the busiest stage: no schedule takes less."""
        totals = list(self.llm.compute_s)
        for encoder in self._scheduled.encoders:
            microbatches = len(encoder.pipelines) // (1 + max(encoder.pipelines))
            stages = [sum(map(self.context.chunks.compute_s, layers)) for layers in encoder.stages]
            totals = [
                total + microbatches * stages[stage % len(stages)] for stage, total in enumerate(totals)
            ]
        return max(totals)

    @property
    def forwards_ahead_s(self) -> float:
        """Seconds of the encoder forwards that may be resident before the LLM starts, at most."""
        total_s = 0.0
        for encoder in self._scheduled.encoders:
            own = -(-len(encoder.pipelines) // (1 + max(encoder.pipelines)))
            resident = min(own, self._pipeline_window(encoder)) + len(encoder.stages) - 1
            total_s += max(self._stage_s(layers, (OpKind.FORWARD,), resident) for layers in encoder.stages)
        return total_s

    def _stage_s(self, layers: Sequence[PricedLayer], kinds: Sequence[OpKind], microbatches: float) -> float:
        """Returns the seconds of these layers for their microbatches, and of their parameter traffic."""
        seconds = self.context.chunks.price(layers).seconds
        traffic = self.context.parameter_traffic(layers)
        return traffic.gather_s + traffic.reduce_s + microbatches * sum(seconds[kind] for kind in kinds)
