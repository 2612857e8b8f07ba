"""One way to lay encoders beside an LLM pipeline: its header, what it holds at most, and its plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.job.layout import Layout
from optimus.job.model import Encoder
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan, RejectedLayout, lower_to_plan
from optimus.planner.systems.colocated_plan import ColocatedEncoder, ColocatedPlanBuilder
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.fill import Fill, FillResult, expand_to_all_tp_blocks
from optimus.schedule.llm_timeline import LlmTimeline
from optimus.schedule.lower import lower_to_programs
from optimus.schedule.pipeline_schedule import price_parameter_traffic

FEW_LINES = 20_000  # up to here two plans are lowered
SMALL_LINES = 2_000  # up to here other deals are tried, and trials replayed
MANY_LINES = 400_000  # up to here whole microbatches are, where pieces waste
SHIFT_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)  # of the LLM's own step: how much later the LLM begins
WASTED = 1.2  # times what all images need


@dataclass(frozen=True, kw_only=True)
class EncoderPlacement:
    """How one encoder lies beside the LLM."""

    layout: Layout
    recompute: str
    pieces: int = 1
    counts: tuple[int, ...] = ()
    split: bool = True  # gradients of weights apart from those of inputs
    window: int = 0  # LLM microbatches that an encoder may be ahead of its own backwards; 0: all
    backwards: bool = False  # the last pipeline gets the first microbatch


class ColocationCandidate:
    """One LLM pipeline with encoders beside it, ready to be arranged.

    Blocks of a TP group are folded if each has a piece of every microbatch: all of them do the same.
    """

    def __init__(
        self,
        context: PlanningContext,
        llm: PipelineCandidate,
        beside: Mapping[str, EncoderPlacement],
        find_base: Callable[[ColocationCandidate], LlmTimeline] | None = None,
    ) -> None:
        self.context, self.llm, self.beside = context, llm, beside
        self.folded = all(c.pieces % (llm.layout.tp // c.layout.tp) == 0 for c in beside.values())
        assert self.folded or self._may_unfold
        self._find_base = find_base  # of the same pipeline beside other encoder layouts

    @cached_property
    def header(self) -> Plan:
        return self._scheduled.header(strategy="optimus")

    @cached_property
    def base(self) -> LlmTimeline:
        """The LLM's own step."""
        return LlmTimeline(self.header, self.llm.order) if self._find_base is None else self._find_base(self)

    @cached_property
    def _scheduled(self) -> ColocatedPlanBuilder:
        """What is arranged: one block for all of a TP group, if they are alike."""
        return self._colocated(folded=True) if self.folded else self._whole

    @cached_property
    def _whole(self) -> ColocatedPlanBuilder:
        """Every block by itself."""
        return self._colocated(folded=False)

    def _colocated(self, *, folded: bool) -> ColocatedPlanBuilder:
        encoders = self.context.job.model.encoders
        return ColocatedPlanBuilder(
            self.context, self.llm, [self._encoder(e, folded=folded) for e in encoders]
        )

    def _encoder(self, encoder: Encoder, *, folded: bool) -> ColocatedEncoder:
        chosen, llm = self.beside[encoder.name], self.llm
        across = llm.layout.tp // chosen.layout.tp if folded else 1
        layout = chosen.layout.with_(dp=chosen.layout.dp // across, tp=chosen.layout.tp * across)
        pieces, pipelines = chosen.pieces // across, layout.dp // llm.layout.dp
        dealt = [number % pipelines for number in range(llm.microbatches * pieces)]
        return ColocatedEncoder(
            encoder=encoder,
            layout=layout,
            layers=self.context.encoder_layers(
                encoder,
                chosen.layout,
                self._piece(encoder),
                chosen.recompute,
            ),
            pieces=pieces,
            pipelines=tuple(pipelines - 1 - each if chosen.backwards else each for each in dealt),
            recompute=chosen.recompute,
            counts=chosen.counts,
            split=chosen.split and encoder.train,
        )

    def _across(self, encoder: Encoder) -> int:
        """Blocks of the encoder in a TP group of the LLM."""
        return self.llm.layout.tp // self.beside[encoder.name].layout.tp

    def _piece(self, encoder: Encoder) -> float:
        pieces = self.beside[encoder.name].pieces
        return self.context.piece(encoder, self.llm.sequences, pieces, self._across(encoder))

    @cached_property
    def fill(self) -> Fill:
        return Fill(self.header, self.base, {name: self._window(name) for name in self.beside})

    def _window(self, name: str, window: int | None = None) -> int:
        """Microbatches of one encoder pipeline that may be kept at a time."""
        module = self.header.modules[name]
        window = (self.beside[name].window if window is None else window) or self.llm.microbatches
        return -(-window * module.microbatches_per_llm_microbatch // (1 + max(module.pipelines)))

    def plan(self, arranged: FillResult) -> FilledPlan:
        """The faster of an arrangement and what looking ahead makes of it; of many lines, by the estimate."""
        both = [arranged, self.fill.tightened(arranged)]
        if len(self.fill.schedule) > FEW_LINES:
            both = [min(both, key=lambda each: each.step_s)]
        return min(map(self.lowered, both), key=lambda plan: (not plan.fits, plan.step_s))

    def best_shifted(self) -> FilledPlan:
        """Returns the fastest plan, by replay, over a few shifts of the LLM."""
        arranged = (self.fill.arrange(share * self.base.step_s) for share in SHIFT_SHARES)
        return min(map(self.plan, arranged), key=lambda plan: plan.step_s)

    def step_s(self, arranged: FillResult) -> float:
        """By which trials are compared: the loop knows no host, so that small jobs with one are replayed."""
        if not self.header.launch_s or len(self.fill.schedule) > SMALL_LINES:
            return arranged.step_s
        return lower_to_programs(self.header, arranged.orders()).timeline.step_s

    def lowered(self, arranged: FillResult) -> FilledPlan:
        """For all blocks, lowered and replayed."""
        header, orders = self.header, arranged.orders()
        if self.folded:
            header, orders = expand_to_all_tp_blocks(self._whole.header(strategy="optimus"), header, orders)
        return lower_to_plan(header, orders, self._whole.fixed_bytes(), estimate_s=arranged.step_s)

    @cached_property
    def most_bytes(self) -> float:
        """At most what a rank holds: all its encoder microbatches at once."""
        return self._most_bytes()

    @property
    def widest_window(self) -> int:
        """The most LLM microbatches, less than all, of which all encoders may keep something; 0: none."""
        windows = range(1, self.llm.microbatches)
        return bisect_right(windows, self.context.capacity_bytes, key=self._most_bytes)

    def _most_bytes(self, window: int | None = None) -> float:
        """With this window, or with those that are chosen."""
        llm, ranks, found = self.llm, self.header.ranks, []
        working = llm.sums.stage_bytes(llm.cut, llm.layout.pp).working
        for device in range(ranks.num_classes):
            stage, _, _ = ranks.coordinates(device)
            held = llm.memories[stage].llm_activations - float(working[stage])
            for name, module in self.header.encoders.items():
                mine = module.pipelines.count(ranks.pipeline_of(name, device))
                mine = min(mine, self._window(name, window))
                chunk = module.chunks[ranks.stage_of(name, device)]
                # Gradients of weights may wait, and with them what was made again for them.
                held += mine * (chunk.saved_activation_bytes + chunk.recomputed_bytes)
                held += module.seam_bytes * len(module.pipelines) if stage == 0 else 0
            found.append(held + sum(self._whole.fixed_of(stage).values()))
        return max(found)

    @property
    def _may_unfold(self) -> bool:
        """No TP group of an encoder spans several blocks: two of them could not agree who goes first."""
        return len({chosen.layout.tp for chosen in self.beside.values()}) == 1

    @property
    def other_deals(self) -> list[dict[str, Any]]:
        """Changes of all encoders that may be worth a try.

        Whole microbatches for pipelines side by side launch less than pieces do, which counts in a small job,
        and are even where there are fewer images than blocks. Dealt backwards, later stages get more of them.
        """
        small, lines = len(self.fill.schedule) <= SMALL_LINES, len(self.fill.schedule)
        across = max(map(self._across, self.context.job.model.encoders))
        uneven = self._wasted > WASTED and across * lines <= MANY_LINES
        if not (small or uneven) or not self._may_unfold:
            return []
        cut = any(chosen.pieces > 1 for chosen in self.beside.values())
        several = any(max(module.pipelines) for module in self.header.encoders.values())
        found: list[dict[str, Any]] = [{"pieces": 1}] if cut else []
        return [*found, {"backwards": True}] if small and (cut or several) else found

    @property
    def may_cut(self) -> bool:
        """Whether the busiest block of any encoder has images enough for twice as many pieces."""
        llm, context = self.llm, self.context
        found = []
        for encoder in context.job.model.encoders:
            blocks = self._across(encoder) if self.folded else 1
            images = context.images(encoder, context.dealt(encoder, llm.sequences, blocks))
            found.append(images >= 2 * self.beside[encoder.name].pieces // blocks)
        return any(found)

    @property
    def _wasted(self) -> float:
        """What blocks have time for, over what there is: the busiest sets the pace of all."""
        sequences = self.llm.sequences
        return max(
            self.beside[e.name].pieces * self._piece(e) / sequences for e in self.context.job.model.encoders
        )

    @property
    def fits(self) -> bool:
        return self.most_bytes <= self.context.capacity_bytes

    def too_large(self, needs: float) -> RejectedLayout:
        """Why this is not taken."""
        reason = f"memory: {needs / 1e9:.1f} of {self.context.capacity_bytes / 1e9:.1f} GB"
        return replace(self.refused(reason), peak_bytes=needs)

    def refused(self, reason: str) -> RejectedLayout:
        """For a reason; named by the first encoder's layout."""
        layout = next(iter(self.beside.values())).layout
        return RejectedLayout(layout=layout, reason=reason, module=self.context.encoder_names)

    @property
    def encoder_s(self) -> float:
        """Traffic and compute of the encoders on their busiest stage: what cannot all be hidden."""
        found = 0.0
        for each in self._scheduled.encoders:
            share = len(each.pipelines) / (1 + max(each.pipelines))
            found += max(self._stage_s(layers, each.kinds, share) for layers in each.stages)
        return found

    def _stage_s(self, layers: Sequence[PricedLayer], kinds: Sequence[OpKind], microbatches: float) -> float:
        """Seconds of these layers for their microbatches, and of their traffic."""
        seconds = self.context.chunks.make(layers).seconds
        traffic = price_parameter_traffic(layers, self.context.cost_model, self.context.job.model.precision)
        return traffic.gather_s + traffic.reduce_s + microbatches * sum(seconds[kind] for kind in kinds)
