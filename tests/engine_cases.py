"""Small jobs in many layouts, for comparing what the engine computes with one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from random_plans import bound

from benchmarks.without_tp_slots import remove_tp_slots
from optimus.cost.assumptions import get_preset
from optimus.data.dealing import MAX_REPLICAS
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.attention import Attention, Rope
from optimus.job.job import Job
from optimus.job.layout import Layout, LayoutConstraints, PartialLayout, SearchLimits
from optimus.job.model import Encoder, Llm, Mlp, Model, Projector, Stack
from optimus.job.read import load_cluster
from optimus.job.workload import CAPACITY_SIGMAS, PackedSequence, Workload
from optimus.planner.context import PlanningContext
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.planning import make_plan
from optimus.planner.systems.colocated_plan import Sharding
from optimus.planner.systems.colocation_candidate import ColocationCandidate, EncoderPlacement
from optimus.planner.systems.fsdp import FsdpCandidate, FsdpSystem, list_fsdp_candidates
from optimus.planner.systems.llm_only import LlmPipelines, build_llm_pipeline
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.planner.systems.pipeline_search import search_pipelines
from optimus.planner.systems.single_pipeline import BalancedSystem, Stage0System
from optimus.planner.systems.three_phase import ThreePhaseCandidate, list_three_phase_candidates

TOKENS = 24
SEQUENCES = {
    "even": (((4, 4), (4,), (2,)),),
    "uneven": (((4, 2), (2,), ()), ((6,), (), (4,)), ((), (4, 2), (2,)), ((2, 2, 2), (2,), (2,))),
    "rare": (((), (), ()), ((4,), (4,), (2,)), ((), (), ())),
    # One of eight sequences has most of the images; one image has most of its tokens. Half are text alone.
    "tail": (
        *(((), (), ()),) * 4,
        *(((2,), (2,), ()),) * 2,
        ((4, 2), (), (2,)),
        ((12, 2, 2), (4,), (2,)),
    ),
}
NAMES = ("vision", "audio", "video")


def stack(
    hidden: int, layers: int, *, dropout: bool = False, gated: bool = True, **attention: object
) -> Stack:
    return Stack(
        hidden=hidden,
        layers=layers,
        attention=Attention(**{"heads": 4, "kv_heads": 2, "head_dim": hidden // 4, **attention}),  # type: ignore[arg-type]
        mlp=Mlp(width=2 * hidden, gated=gated, bias=not gated),
        dropout=dropout,
        norm="rmsnorm" if gated else "layernorm",
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan to run. `encoders` gives pp, pieces and, if it is not 1, tp of each.

    `frozen` are encoders that only run forward.
    """

    name: str
    ranks: int
    pp: int
    tp: int = 1
    cp: int = 1
    microbatches: int = 4
    sequences: int = 1  # in a microbatch
    chunks: int = 1
    order: str = "1f1b"
    encoders: tuple[tuple[int, ...], ...] = ((1, 1),)
    frozen: tuple[str, ...] = ()
    frozen_trunk: tuple[str, ...] = ()
    frozen_llm: bool = False
    images: str = "uneven"
    tied: bool = False
    dropout: bool = False
    plain: bool = False  # LayerNorm, biases, learned positions, plain MLP
    windows: bool = False
    sections: bool = False  # multimodal rotary
    recompute: Literal["none", "selective", "full"] = "none"
    preset: str = "default"
    segments: bool = False  # each segment is played for itself, also where nothing stands between them
    layers: int = 4
    cut: tuple[int, ...] = ()  # of the LLM's layers and ends at virtual stages
    width: int = 16  # of encoders; the LLM is twice as wide
    tokens: int = TOKENS  # of a sequence; images grow with it
    window: int = 0  # LLM microbatches of which encoders may keep something
    split: bool = True  # gradients of encoders' weights are made apart, where ours plans
    slots: bool = True  # work of encoders may stand between a launch and its wait
    odd: bool = False  # as many heads and columns as do not go round
    strategy: str = "fill"  # or one that `optimus plan` knows, which chooses layouts of encoders itself
    zero: int = Sharding.OPTIMIZER  # what the LLM's replicas share, and with fsdp also those of encoders
    small_encoders: bool = True  # every TP rank of a pipeline's stage may have a copy of an encoder
    sharded: bool = False  # masters in parts on replicas
    clip: float = 0.0  # of the gradient's norm
    dtype: str = "float64"
    seed: int = 0
    dealing: int = MAX_REPLICAS  # the most replicas that deal images to each other
    sigmas: float = CAPACITY_SIGMAS  # room of a step for more images than the mean
    varied: bool = False  # videos among the images, and packed documents

    @property
    def system(self) -> str:
        """Name of the system whose plan it is."""
        return "optimus" if self.strategy == "fill" else self.strategy

    def _encoder(self, name: str) -> Encoder:
        attention: dict[str, Any] = {"kv_heads": 4 if self.tp > 2 else 2}
        if self.odd:
            attention |= {"heads": 3, "kv_heads": 3}
        if self.windows and name == "vision":
            attention |= {"window_tokens": 16, "full_layers": (1,)}
        return Encoder(
            name=name,
            modality="audio" if name == "audio" else "vision",
            stack=stack(self.width, 4, dropout=self.dropout, gated=not self.plain, causal=False, **attention),
            projector=Projector(
                widths=(2 * self.width,) * 2, merge=2 if name == "audio" else 4, train=name not in self.frozen
            ),
            patch_inputs=12,
            positions=256 * (self.tokens // TOKENS) if self.plain else 0,
            train=name not in self.frozen + self.frozen_trunk,
            recompute="none" if self.strategy == "fill" else self.recompute,
        )

    @cached_property
    def job(self) -> Job:
        names = NAMES[: len(self.encoders)]
        llm = Llm(
            stack=stack(
                2 * self.width,
                self.layers,
                dropout=self.dropout,
                gated=not self.plain,
                bias=self.plain,
                kv_heads=4 if self.tp > 2 else 2,
                rope=Rope(sections=(1, 1, 2) if self.sections else ()),
            ),
            vocab=45 if self.odd else 48,
            tied=self.tied,
            positions=self.tokens if self.plain else 0,
            train=not self.frozen_llm,
            recompute="none" if self.strategy == "fill" else self.recompute,
        )
        sequences = []
        for lengths in SEQUENCES[self.images]:
            times = self.tokens // TOKENS
            longer = [tuple(times * length for length in own) for own in lengths]
            items = tuple(zip(names, longer, strict=False))
            text = self.tokens - sum(sum(own) for _, own in items)
            sequences.append(PackedSequence(text=text, items=items))
        dp = self.ranks // self.pp // self.tp // self.cp
        return Job(
            name=self.name,
            model=Model(name="tiny", encoders=tuple(map(self._encoder, names)), llm=llm),
            cluster=replace(load_cluster("h100:8"), gpus=self.ranks),
            workload=Workload(
                sequence_tokens=self.tokens,
                sequences_per_step=dp * self.microbatches * self.sequences,
                sequences=tuple(sequences),
            ),
            layout=LayoutConstraints(
                modules={LLM: PartialLayout(dp=dp, pp=self.pp, cp=self.cp, ep=1, tp=self.tp)},
                limits=SearchLimits(microbatch_sequences=(self.sequences,)),
            ),
        )

    def _candidate(self, context: PlanningContext) -> PipelineCandidate | ThreePhaseCandidate:
        """Returns what another system than ours runs: its first candidate, without a search."""
        if self.strategy == "three-phase":
            llm = build_llm_pipeline(context, chunks=self.chunks, order_name=self.order)
            return min(list_three_phase_candidates(context, llm), key=lambda each: each.estimate_s)
        if self.strategy == "balanced-best":
            return search_pipelines(context, self.job.model.modules, starts=1, evaluations=0)[0]
        if self.strategy == "fsdp":
            return self._select_sharded(FsdpSystem(tp=self.tp).candidates(LlmPipelines(context)))
        by_rule = {"stage0": Stage0System, "balanced": BalancedSystem}[self.strategy]
        return by_rule(chunks=self.chunks).best_pipeline(LlmPipelines(context))

    def _select_sharded(self, candidates: Iterable[FsdpCandidate]) -> FsdpCandidate:
        """Returns the candidate with the case's microbatches and sharding."""
        return next(c for c in candidates if (c.sequences, c.sharding) == (self.sequences, self.zero))

    def _llm(self, context: PlanningContext) -> PipelineCandidate:
        """Returns the LLM alone, around which encoders are placed."""
        if self.zero > Sharding.OPTIMIZER:
            return self._select_sharded(list_fsdp_candidates(context, (self.job.model.llm,)))
        llm = build_llm_pipeline(context, chunks=self.chunks, order_name=self.order, recompute=self.recompute)
        return llm.with_cut(self.cut) if self.cut else llm

    @cached_property
    def plan(self) -> Plan:
        if self.strategy == "paper":
            return make_plan(self.job, strategy=self.strategy, assumptions=self.preset, systems=()).plan
        context, _ = choose_smallest_context(self.job, get_preset(self.preset))
        if self.strategy != "fill":
            return bound(self._candidate(context).filled.plan, context)
        placements = {}
        for name, (pp, pieces, *rest) in zip(NAMES[: len(self.encoders)], self.encoders, strict=True):
            tp = rest[0] if rest else 1
            placements[name] = EncoderPlacement(
                layout=Layout(dp=self.ranks // pp // tp, pp=pp, tp=tp),
                pieces=pieces,
                recompute=self.recompute,
                window=self.window,
                split_backward=self.split
                and (self.window > 0 or self.tp > 1),  # both kinds of backward are run
            )
        candidate = ColocationCandidate(context, self._llm(context), placements)
        plan = bound(candidate.plan(candidate.fill.schedule_encoders(0.0)).plan, context)
        return plan if self.slots else remove_tp_slots(plan).plan


CASES = [
    Case(name="two ranks", ranks=2, pp=2),
    Case(name="one stage, two replicas", ranks=2, pp=1),
    Case(name="interleaved", ranks=2, pp=2, chunks=2, order="interleaved"),
    Case(name="first virtual stage empty", ranks=2, pp=2, chunks=2, order="interleaved", cut=(0, 0, 2, 4, 6)),
    Case(name="zero-bubble", ranks=2, pp=2, order="zero-bubble", segments=True),
    Case(name="zero-bubble interleaved", ranks=2, pp=2, chunks=2, order="zero-bubble", layers=6),
    Case(name="encoder pipeline of two", ranks=2, pp=2, encoders=((2, 1),)),
    Case(name="two encoders", ranks=2, pp=2, encoders=((1, 1), (2, 1))),
    Case(name="three encoders", ranks=2, pp=2, segments=True, encoders=((1, 1), (2, 2), (1, 2))),
    Case(name="frozen encoder", ranks=2, pp=2, frozen=("vision",)),
    Case(
        name="frozen trunk, trained projector",
        ranks=2,
        pp=2,
        segments=True,
        frozen_trunk=("vision",),
        encoders=((2, 1),),
    ),
    Case(name="frozen llm", ranks=2, pp=2, frozen_llm=True),
    Case(name="rare images", ranks=2, pp=2, images="rare"),
    Case(name="tied", ranks=2, pp=2, tied=True),
    Case(name="tied in one stage", ranks=2, pp=1, tied=True),
    Case(name="dropout", ranks=2, pp=2, dropout=True),
    Case(name="pieces", ranks=2, pp=2, segments=True, encoders=((1, 2),), sequences=2),
    Case(name="plain", ranks=2, pp=2, segments=True, plain=True),
    Case(name="windows and sections", ranks=2, pp=2, segments=True, windows=True, sections=True),
    Case(name="recompute", ranks=2, pp=2, segments=True, recompute="full", dropout=True),
    Case(name="selective", ranks=2, pp=2, segments=True, recompute="selective", dropout=True),
    Case(name="selective, layers in one piece", ranks=2, pp=2, recompute="selective", plain=True),
    Case(name="selective, split", ranks=4, pp=2, recompute="selective", order="zero-bubble"),
    Case(
        name="selective, attention again", ranks=4, pp=2, recompute="selective", preset="paper", segments=True
    ),
    Case(name="one bucket for a stage", ranks=4, pp=2, preset="clean"),
    Case(name="recompute, all traffic at the ends", ranks=4, pp=2, preset="paper", recompute="full"),
    Case(name="paper", ranks=2, pp=2, strategy="paper", microbatches=8),
    Case(name="paper, two by two, two encoders", ranks=4, pp=2, strategy="paper", encoders=((1, 1), (1, 1))),
    Case(name="paper, four stages", ranks=4, pp=4, strategy="paper", images="rare", microbatches=8, layers=8),
    Case(name="four stages", ranks=4, pp=4, encoders=((2, 1),)),
    Case(name="four stages, encoder on each", ranks=4, pp=4, encoders=((1, 1),), microbatches=8),
    Case(name="two by two", ranks=4, pp=2, encoders=((1, 2),), images="rare", sequences=2),
    Case(name="four replicas, images stay", ranks=4, pp=1, images="rare", microbatches=1, dealing=1),
    Case(
        name="two by two interleaved",
        ranks=4,
        pp=2,
        chunks=2,
        order="interleaved",
        encoders=((2, 1), (1, 1)),
    ),
    Case(
        name="zero-bubble, tied, dropout, two encoders",
        segments=True,
        ranks=4,
        pp=4,
        order="zero-bubble",
        tied=True,
        dropout=True,
        encoders=((4, 1), (2, 2)),
        layers=6,
    ),
    Case(name="four replicas", ranks=4, pp=1, tied=True, dropout=True, images="rare"),
    Case(
        name="eight: pp 4, encoder pp 2",
        ranks=8,
        pp=4,
        segments=True,
        encoders=((2, 2),),
        sequences=2,
        tied=True,
    ),
    Case(
        name="eight: pp 2 interleaved, three encoders",
        ranks=8,
        pp=2,
        chunks=2,
        order="interleaved",
        encoders=((1, 1), (2, 1), (1, 2)),
        frozen=("audio",),
        images="rare",
    ),
    Case(
        name="eight: pp 8 zero-bubble",
        ranks=8,
        pp=8,
        order="zero-bubble",
        microbatches=8,
        encoders=((4, 1), (1, 1)),
        layers=8,
        dropout=True,
    ),
    Case(name="eight: two by four, all one bucket", ranks=8, pp=2, encoders=((1, 1), (2, 2)), preset="clean"),
    Case(name="eight replicas", ranks=8, pp=1, tied=True, dropout=True, images="rare", encoders=((1, 1),)),
    Case(name="eight: recompute, frozen trunk", ranks=8, pp=4, recompute="full", frozen_trunk=("vision",)),
    Case(name="eight: frozen llm", ranks=8, pp=2, frozen_llm=True, encoders=((2, 1), (1, 1))),
]
# The same with masters in parts on replicas, and gradients clipped.
SHARDED = [
    replace(case, name=f"sharded: {case.name}", sharded=True, clip=0.05) for case in CASES if case.ranks >= 4
]
HALF = [
    replace(case, name=case.name.replace("sharded", "bf16"), dtype="bfloat16")
    for case in SHARDED
    if case.name.removeprefix("sharded: ")
    in ("two by two interleaved", "zero-bubble, tied, dropout, two encoders", "four replicas")
]


def _measured(name: str, **given: Any) -> Case:
    """Large enough that tensors count and names, tables and single numbers do not."""
    fixed = {
        "images": "even",
        "dtype": "bfloat16",
        "sharded": True,
        "width": 96,
        "tokens": 768,
        "microbatches": 8,
    }
    return Case(name=f"measured: {name}", **{**fixed, **given})


# For comparing bytes: in bf16, as plans are priced.
MEASURED = [
    _measured("two stages", ranks=2, pp=2),
    _measured("plain layers", ranks=2, pp=2, plain=True),
    _measured("selective", ranks=2, pp=2, recompute="selective", layers=8),
    _measured("full", ranks=2, pp=2, recompute="full", layers=12, microbatches=16),
    _measured("zero-bubble", ranks=2, pp=2, order="zero-bubble", layers=6),
    _measured("interleaved", ranks=2, pp=2, chunks=2, order="interleaved", layers=8),
    _measured("two encoders, one in a pipeline", ranks=2, pp=2, encoders=((1, 1), (2, 1))),
    _measured("pieces", ranks=2, pp=2, encoders=((1, 2),)),
    _measured("frozen encoder", ranks=2, pp=2, frozen=("vision",), layers=8),
    _measured("frozen LLM", ranks=2, pp=2, frozen_llm=True),
    _measured("two by two", ranks=4, pp=2, tied=True),
    _measured("four stages", ranks=4, pp=4, encoders=((2, 1),), layers=8),
    _measured("eight", ranks=8, pp=4, chunks=2, order="interleaved", layers=8),
]
WINDOWED = [
    _measured(f"window of {window}, {count} microbatches", ranks=2, pp=2, window=window, microbatches=count)
    for window, count in ((4, 8), (4, 32), (0, 8), (0, 16))
]


def _dealt(name: str, **given: Any) -> Case:
    fixed = {"images": "tail", "sigmas": -0.5, "varied": True, "microbatches": 2}
    return Case(name=f"dealt: {name}", **{**fixed, **given})


# Heavy-tailed images dealt over replicas; what is heavier than usual is carried to the next step.
DEALT = [
    _dealt("four replicas", ranks=4, pp=1, sections=True),
    _dealt("four, in pairs", ranks=4, pp=1, dealing=2, sequences=2),
    _dealt("two by two interleaved, two encoders", ranks=4, pp=2, chunks=2, order="interleaved",
           encoders=((2, 1), (1, 2))),
    _dealt("two by two zero-bubble, three pieces", ranks=4, pp=2, order="zero-bubble", encoders=((1, 3),),
           sequences=2, segments=True),
    _dealt("tp 2 x dp 2", ranks=4, pp=1, tp=2, encoders=((1, 2),)),
    _dealt("tp 2 x dp 2, encoder too", ranks=4, pp=1, tp=2, encoders=((1, 1, 2),), dropout=True),
    _dealt("eight replicas", ranks=8, pp=1, microbatches=1, tied=True),
    _dealt("eight: pp 2 x dp 4, frozen encoder beside one that learns", ranks=8, pp=2, frozen=("audio",),
           encoders=((1, 1), (2, 1))),
    _dealt("eight: pp 4 x dp 2, encoder pp 2", ranks=8, pp=4, encoders=((2, 2),), microbatches=4),
    _dealt("eight: pp 2 x tp 2 x dp 2, three encoders", ranks=8, pp=2, tp=2, windows=True,
           encoders=((1, 2), (2, 1, 2), (1, 2))),
    _dealt("eight: tp 4 x dp 2", ranks=8, pp=1, tp=4, encoders=((1, 2, 2),), recompute="selective"),
    _dealt("eight: pp 2 x dp 4, recomputed", ranks=8, pp=2, recompute="full", dropout=True, dealing=2),
    _dealt("sixteen replicas in groups of eight", ranks=16, pp=1, microbatches=1),
    _dealt("sixteen: pp 4 x tp 2 x dp 2", ranks=16, pp=4, tp=2, encoders=((2, 1, 2),), layers=6,
           order="zero-bubble"),
    _dealt("sixteen: pp 2 x tp 2 x dp 4, two encoders", ranks=16, pp=2, tp=2, encoders=((1, 2), (2, 1, 2))),
    _dealt("sixteen: pp 2 x dp 8, frozen trunk", ranks=16, pp=2, frozen_trunk=("vision",),
           encoders=((1, 2),)),
]  # fmt: skip
# The same samples in the same steps under four layouts, and dealt inside a replica, in pairs and in fours.
CURVES = [
    replace(case, name=f"{case.name}, dealt by {dealing}", dealing=dealing, sigmas=0.0, images="tail")
    for case in (
        Case(name="eight replicas", ranks=8, pp=1, microbatches=2),
        Case(name="pp 2 x dp 4", ranks=8, pp=2, encoders=((2, 2),)),
        Case(name="pp 2 x dp 4 zero-bubble interleaved", ranks=8, pp=2, chunks=2, order="zero-bubble"),
        Case(name="tp 2 x dp 4", ranks=8, pp=1, tp=2, encoders=((1, 2),)),
    )
    for dealing in (1, 2, 4)
]


def _system(strategy: str, name: str, **given: Any) -> Case:
    return Case(name=f"{strategy}: {name}", strategy=strategy, **given)


def _fsdp(name: str, **given: Any) -> Case:
    return _system("fsdp", name, **{"zero": Sharding.PARAMETERS, **given}, pp=1, sharded=True, clip=0.05)


def _filled_fsdp(name: str, **given: Any) -> Case:
    zero = {"zero": Sharding.PARAMETERS, **given}
    return Case(name=f"optimus, llm sharded: {name}", **zero, pp=1, sharded=True, clip=0.05)


# Other systems than bubble filling: encoder layers in the LLM's pipeline, or all before and after it. And
# encoders placed around an LLM that is fully sharded.
SYSTEMS = [
    _filled_fsdp("two ranks, tied, in two pieces", ranks=2, tied=True, encoders=((1, 2),)),
    _filled_fsdp("four ranks, two encoders", ranks=4, encoders=((1, 1), (1, 2)), dropout=True, images="rare"),
    _filled_fsdp("four ranks, frozen trunk", ranks=4, frozen_trunk=("vision",), window=1, plain=True),
    _filled_fsdp("four ranks, frozen llm", ranks=4, frozen_llm=True),
    _filled_fsdp("four: tp 2 x dp 2", ranks=4, tp=2, tied=True, segments=True, encoders=((1, 1, 2), (1, 2))),
    _filled_fsdp("parameters kept, four: tp 2 x dp 2", ranks=4, tp=2, zero=2, encoders=((1, 2),)),
    _filled_fsdp("parameters kept, eight, dealt", ranks=8, zero=2, images="tail", sigmas=-0.5, varied=True),
    _filled_fsdp("eight: tp 2 x dp 4, dealt", ranks=8, tp=2, images="tail", sigmas=-0.5, varied=True),
    _system("stage0", "two stages", ranks=2, pp=2, tied=True),
    _system("stage0", "interleaved, two encoders", ranks=4, pp=2, chunks=2, layers=8, encoders=((1, 1),) * 2),
    _system("stage0", "four stages, frozen trunk", ranks=4, pp=4, frozen_trunk=("vision",), layers=8),
    _system("stage0", "tp 2", ranks=4, pp=2, tp=2, dropout=True, images="rare"),
    _system("stage0", "two by two, recomputed", ranks=4, pp=2, sharded=True, clip=0.05, recompute="full"),
    _system("balanced", "four stages, tied", ranks=4, pp=4, tied=True, dropout=True),
    _system(
        "balanced", "four stages, three encoders", ranks=4, pp=4, encoders=((1, 1),) * 3, frozen=("audio",)
    ),
    _system(
        "balanced", "interleaved", ranks=4, pp=2, chunks=4, layers=8, plain=True, sharded=True, clip=0.05
    ),
    _system("balanced", "tp 2", ranks=4, pp=2, tp=2, encoders=((1, 1),) * 2, layers=6),
    _system("balanced", "tp 2, encoder too", ranks=4, pp=2, tp=2, small_encoders=False, layers=6, tied=True),
    _system("balanced", "frozen llm", ranks=2, pp=2, frozen_llm=True, windows=True, sections=True),
    _system("balanced", "eight: pp 4 x dp 2 interleaved", ranks=8, pp=4, chunks=2, layers=8, tied=True),
    _system("balanced-best", "two stages", ranks=2, pp=2, layers=8, microbatches=8),
    _system("balanced-best", "four stages, two encoders", ranks=4, pp=4, encoders=((1, 1),) * 2, layers=8),
    _system("balanced-best", "frozen trunk", ranks=4, pp=4, frozen_trunk=("vision",), layers=6, tied=True),
    _system("balanced-best", "eight: pp 4 x tp 2", ranks=8, pp=4, tp=2, layers=8, sharded=True, clip=0.05),
    _fsdp("two ranks, tied", ranks=2, tied=True),
    _fsdp("two ranks, one microbatch, recomputed", ranks=2, microbatches=1, recompute="full"),
    _fsdp("four ranks, two encoders", ranks=4, encoders=((1, 1),) * 2, dropout=True, images="rare"),
    _fsdp("four ranks, frozen trunk", ranks=4, frozen_trunk=("vision",), microbatches=2, plain=True),
    _fsdp("four ranks, frozen llm", ranks=4, frozen_llm=True, recompute="selective"),
    _fsdp("four ranks, frozen encoder", ranks=4, frozen=("vision",), encoders=((1, 1),) * 2, sections=True),
    _fsdp("four: tp 2 x dp 2", ranks=4, tp=2, tied=True, segments=True),
    _fsdp("four: tp 2 x dp 2, encoder too", ranks=4, tp=2, small_encoders=False, recompute="full"),
    _fsdp("parameters kept, two ranks", ranks=2, zero=2, tied=True),
    _fsdp("parameters kept, four: tp 2 x dp 2", ranks=4, tp=2, zero=2, frozen_trunk=("vision",)),
    _fsdp("eight ranks, three encoders", ranks=8, encoders=((1, 1),) * 3, microbatches=2, odd=True),
    _system("three-phase", "two stages", ranks=2, pp=2),
    _system("three-phase", "two by two, two encoders", ranks=4, pp=2, encoders=((1, 1),) * 2, sequences=2),
    _system("three-phase", "tp 2, three microbatches", ranks=4, pp=2, tp=2, microbatches=3, tied=True),
    _system("three-phase", "eight: pp 4 x dp 2", ranks=8, pp=4, layers=8, images="tail", microbatches=8),
]

# Every system that runs, and sequences split over ranks, on 16 ranks.
SIXTEEN = [
    _system("stage0", "sixteen: pp 4 x tp 2 x dp 2, two encoders", ranks=16, pp=4, tp=2, layers=8, tied=True,
            encoders=((1, 1),) * 2),
    _system("balanced", "sixteen: pp 4 x dp 4 interleaved, frozen trunk", ranks=16, pp=4, chunks=2, layers=8,
            frozen_trunk=("vision",), sharded=True, clip=0.05),
    _system("balanced-best", "sixteen: pp 4 x tp 2 x dp 2", ranks=16, pp=4, tp=2, layers=8, dropout=True,
            images="rare", sharded=True, clip=0.05),
    _system("three-phase", "sixteen: pp 4 x tp 2 x dp 2, two encoders", ranks=16, pp=4, tp=2, layers=8,
            images="tail", encoders=((1, 1),) * 2),
    _fsdp("sixteen: tp 2 x dp 8, two encoders", ranks=16, tp=2, encoders=((1, 1),) * 2, microbatches=2),
    _fsdp("sixteen: tp 4 x dp 4, encoder too, recomputed", ranks=16, tp=4, small_encoders=False, tied=True,
          microbatches=2, recompute="full"),
    _system("paper", "sixteen: pp 4 x tp 2 x dp 2, two encoders", ranks=16, pp=4, tp=2, layers=8,
            encoders=((1, 1),) * 2),
    Case(name="optimus: sixteen: pp 4 x tp 2 x dp 2 interleaved, two encoders", ranks=16, pp=4, tp=2,
         chunks=2, order="interleaved", layers=8, encoders=((2, 1, 2), (4, 2)), sharded=True, clip=0.05),
    Case(name="optimus: sixteen: pp 2 x tp 2 x dp 4 zero-bubble, dealt", ranks=16, pp=2, tp=2, layers=6,
         order="zero-bubble", encoders=((1, 2),), images="tail", sigmas=-0.5, varied=True, microbatches=2),
    Case(name="optimus: sixteen: cp 2 x tp 2 x pp 2 x dp 2, dealt", ranks=16, pp=2, cp=2, tp=2, images="tail",
         sigmas=-0.5, varied=True, microbatches=2, encoders=((2, 1, 2),), sharded=True, clip=0.05),
    Case(name="optimus: sixteen: cp 4 x pp 4 zero-bubble", ranks=16, pp=4, cp=4, layers=6,
         order="zero-bubble", encoders=((4, 1), (1, 2)), tied=True),
    _system("balanced", "sixteen: cp 2 x pp 4 x dp 2", ranks=16, pp=4, cp=2, layers=8, sections=True),
    _system("three-phase", "sixteen: cp 2 x tp 2 x pp 4", ranks=16, pp=4, cp=2, tp=2, layers=8, varied=True),
]  # fmt: skip


def _tp(name: str, **given: Any) -> Case:
    return Case(name=f"tp: {name}", **given)


TP = [
    _tp("two", ranks=2, pp=1, tp=2, encoders=((1, 2),)),
    _tp("two, encoder too", ranks=2, pp=1, tp=2, encoders=((1, 1, 2),), segments=True),
    _tp("two stages", ranks=4, pp=2, tp=2, encoders=((1, 2),), tied=True),
    _tp("two stages, no slots", ranks=4, pp=2, tp=2, encoders=((1, 2),), tied=True, slots=False),
    _tp("two stages, encoder too", ranks=4, pp=2, tp=2, encoders=((2, 1, 2),), dropout=True),
    _tp("two replicas", ranks=4, pp=1, tp=2, encoders=((1, 2),), images="rare", sequences=2),
    _tp("one piece for unequal blocks", ranks=4, pp=2, tp=2, encoders=((1, 1),), microbatches=8),
    _tp("zero-bubble", ranks=4, pp=2, tp=2, encoders=((1, 2),), order="zero-bubble", plain=True),
    _tp("full", ranks=4, pp=2, tp=2, encoders=((1, 1, 2),), recompute="full", dropout=True),
    _tp("full, split", ranks=4, pp=2, tp=2, recompute="full", order="zero-bubble", encoders=((1, 2),)),
    _tp("selective", ranks=4, pp=2, tp=2, encoders=((1, 2),), recompute="selective", plain=True),
    _tp(
        "selective, split",
        ranks=4,
        pp=2,
        tp=2,
        encoders=((1, 1, 2),),
        recompute="selective",
        order="zero-bubble",
    ),
    _tp("attention again", ranks=4, pp=2, tp=2, encoders=((1, 2),), recompute="selective", preset="paper"),
    _tp("all exposed", ranks=4, pp=2, tp=2, encoders=((1, 1, 2),), preset="paper", split=False),
    _tp("four", ranks=4, pp=1, tp=4, encoders=((1, 2, 2),), tied=True, dropout=True),
    _tp("four, no slots", ranks=4, pp=1, tp=4, encoders=((1, 4),), slots=False),
    _tp("odd numbers", ranks=4, pp=1, tp=4, encoders=((1, 2, 2),), odd=True, plain=True),
    _tp("two encoders", ranks=4, pp=2, tp=2, encoders=((1, 2), (2, 1, 2))),
    _tp("frozen encoder", ranks=4, pp=2, tp=2, encoders=((1, 2),), frozen=("vision",)),
    _tp("frozen trunk", ranks=4, pp=2, tp=2, encoders=((1, 1, 2),), frozen_trunk=("vision",)),
    _tp("frozen llm", ranks=4, pp=2, tp=2, encoders=((1, 2),), frozen_llm=True),
    _tp("interleaved", ranks=4, pp=2, tp=2, encoders=((1, 2),), chunks=2, order="interleaved"),
    _tp("windows and sections", ranks=4, pp=2, tp=2, encoders=((1, 1, 2),), windows=True, sections=True),
    _tp(
        "eight: pp 2 x tp 2 x dp 2, two encoders",
        ranks=8,
        pp=2,
        tp=2,
        encoders=((2, 2), (1, 1, 2)),
        images="rare",
        tied=True,
    ),
    _tp("eight: pp 2 x tp 4", ranks=8, pp=2, tp=4, encoders=((1, 2, 2),), order="zero-bubble", layers=6),
    _tp(
        "eight: pp 4 x tp 2, interleaved, frozen encoder beside one that learns",
        ranks=8,
        pp=4,
        tp=2,
        chunks=2,
        order="interleaved",
        layers=8,
        microbatches=8,
        encoders=((2, 2), (1, 2)),
        frozen=("audio",),
    ),
    _tp("eight: tp 4 x dp 2", ranks=8, pp=1, tp=4, encoders=((1, 4),), dropout=True, images="rare"),
    _tp(
        "sixteen: pp 4 x tp 2 x dp 2",
        ranks=16,
        pp=4,
        tp=2,
        encoders=((2, 1, 2),),
        order="zero-bubble",
        layers=6,
    ),
    _tp(
        "sixteen: pp 2 x tp 4 x dp 2",
        ranks=16,
        pp=2,
        tp=4,
        encoders=((1, 2, 2), (2, 4)),
        recompute="selective",
        tied=True,
    ),
    _tp("sixteen: pp 4 x tp 4", ranks=16, pp=4, tp=4, encoders=((1, 4),), recompute="full", slots=False),
]
# The same with masters in parts on replicas, and gradients clipped: to their norm every number counts once.
TP_SHARDED = [
    replace(case, name=f"sharded {case.name}", sharded=True, clip=0.05)
    for case in TP
    if case.ranks >= 4 and case.slots
]


def _cp(name: str, **given: Any) -> Case:
    return Case(name=f"cp: {name}", **given)


# Sequences split over ranks, in two chunks for each.
CP = [
    _cp("two", ranks=2, pp=1, cp=2),
    _cp("cp 2 x dp 2, rare images", ranks=4, pp=1, cp=2, dealing=1, images="rare", dropout=True, tied=True),
    _cp("cp 2 x dp 2, dealt", ranks=4, pp=1, cp=2, images="tail", sigmas=-0.5, varied=True, microbatches=2),
    _cp("cp 2 x pp 2", ranks=4, pp=2, cp=2, tied=True, encoders=((2, 1),)),
    _cp("cp 2 x pp 2 interleaved, two encoders, pieces", ranks=4, pp=2, cp=2, chunks=2, order="interleaved",
        encoders=((2, 2), (1, 3)), frozen=("audio",), sequences=2, varied=True),
    _cp("cp 2 x pp 2 zero-bubble, documents", ranks=4, pp=2, cp=2, order="zero-bubble", varied=True,
        sections=True, encoders=((1, 2),)),
    _cp("cp 2 x tp 2", ranks=4, pp=1, cp=2, tp=2, encoders=((1, 2),), varied=True, sections=True),
    _cp("cp 2 x tp 2, zero-bubble, recomputed", ranks=4, pp=1, cp=2, tp=2, order="zero-bubble",
        recompute="full", encoders=((1, 1, 2),), dropout=True),
    _cp("cp 2 x tp 2, selective, plain", ranks=4, pp=1, cp=2, tp=2, recompute="selective", plain=True,
        images="rare"),
    _cp("cp 2 x pp 2, recomputed, frozen trunk", ranks=4, pp=2, cp=2, recompute="full", windows=True,
        frozen_trunk=("vision",)),
    _cp("cp 2 x pp 2, frozen llm", ranks=4, pp=2, cp=2, frozen_llm=True, encoders=((1, 2),)),
    _cp("cp 4", ranks=4, pp=1, cp=4, encoders=((1, 3),), varied=True, sections=True, dropout=True),
    _cp("cp 4, one microbatch", ranks=4, pp=1, cp=4, microbatches=1, sequences=4, segments=True),
    _cp("eight: cp 2 x tp 2 x pp 2", ranks=8, pp=2, cp=2, tp=2, encoders=((2, 1, 2),), varied=True,
        sections=True),
    _cp("eight: cp 2 x tp 2 x pp 2 zero-bubble, two encoders", ranks=8, pp=2, cp=2, tp=2, layers=6,
        order="zero-bubble", encoders=((1, 2), (2, 1, 2)), tied=True, dropout=True),
    _cp("eight: cp 4 x tp 2", ranks=8, pp=1, cp=4, tp=2, encoders=((1, 4),), images="rare"),
    _cp("eight: cp 4 x pp 2 interleaved", ranks=8, pp=2, cp=4, chunks=2, order="interleaved", varied=True,
        encoders=((2, 1),)),
    _cp("eight: cp 2 x tp 2 x dp 2, dealt", ranks=8, pp=1, cp=2, tp=2, images="tail", sigmas=-0.5,
        varied=True, microbatches=2, encoders=((1, 2),)),
    _cp("eight: cp 2 x pp 2 x dp 2, dealt", ranks=8, pp=2, cp=2, images="tail", sigmas=-0.5, varied=True,
        microbatches=2, encoders=((2, 2), (1, 2))),
    _cp("stage0", ranks=4, pp=2, cp=2, strategy="stage0", tied=True),
    _cp("balanced, tp 2", ranks=8, pp=2, cp=2, tp=2, strategy="balanced", encoders=((1, 1),) * 2),
    _cp("balanced-best", ranks=4, pp=2, cp=2, strategy="balanced-best", layers=8, images="rare"),
    _cp("three-phase", ranks=4, pp=2, cp=2, strategy="three-phase", varied=True),
    _cp("paper", ranks=4, pp=2, cp=2, strategy="paper"),
    _cp("paper, all traffic at the ends", ranks=4, pp=2, cp=2, preset="paper", recompute="full"),
]  # fmt: skip
CP_SHARDED = [
    replace(case, name=f"sharded {case.name}", sharded=True, clip=0.05)
    for case in CP
    if case.ranks >= 4 and case.strategy == "fill"
]
