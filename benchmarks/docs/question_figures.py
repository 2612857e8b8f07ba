"""Computes the figures of docs/questions.md: every case is one line of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks.docs.pages import Figures, rounded
from optimus.cost.assumptions import get_preset
from optimus.errors import DoesNotFit
from optimus.ir.op import Lane, OpKind, Schedule
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import Layout, LayoutConstraints, PartialLayout, SearchLimits
from optimus.job.model import Encoder, Llm
from optimus.job.read import find_job
from optimus.job.workload import PackedSequence
from optimus.planner.compare import Comparison, compare_systems
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import SearchResult
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.step_bounds import StepBounds, compute_step_bounds
from optimus.planner.systems.base import SimulatedSystem
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.registry import load_system
from optimus.schedule.bubbles import CAUSES, average_bubbles, find_idle_intervals, sum_bubbles_by_cause
from optimus.schedule.llm_timeline import LlmTimeline
from optimus.schedule.lower import LoweredPlan, lower_to_programs
from optimus.schedule.simulator import Timeline

MERGE = 4  # encoder tokens per LLM token, as in the paper's jobs of the catalog
IMAGE_TOKENS = 512  # LLM tokens of an image there

RATIOS = (0.01, 0.03, 0.07, 0.15, 0.3, 0.5)  # encoder's parameters over the LLM's
TOKENS = (256, 1024, 2048, 4096, 8192, 16384)  # of the encoder in a sequence
SWEEP_SEQUENCE = 8192  # LLM tokens, whatever share of them are images
SWEEP_IMAGE = 1024  # encoder tokens of an image at most
SWEEP_LAYOUT = PartialLayout(dp=8, pp=8, tp=8)
SWEEP_BATCH = 128
DEPTHS = (24, 32, 40, 48)  # of a swept encoder
HEAD_DIM = 128


def triple() -> Job:
    """Returns the paper's LLM with three encoders: `dual-22-11` and ViT-5B, with an image for each."""
    job, other = find_job("paper/dual-22-11"), find_job("paper/dual-11-5")
    third = replace(other.model.encoders[1], name="vision3")
    names = [*(encoder.name for encoder in job.model.encoders), third.name]
    model = replace(job.model, name="vit-22b+vit-11b+vit-5b+gpt-175b", encoders=(*job.model.encoders, third))
    job = replace(job, name="triple-22-11-5", model=model)
    return _with_items(job, dict.fromkeys(names, (IMAGE_TOKENS,)))


def omni() -> Job:
    """Returns a 32B LLM with three small encoders: images, sound and video."""
    return _omni("omni-3", ("vision", "audio", "video"))


def image_and_sound() -> Job:
    """Returns the omni job without video."""
    return _omni("omni-3 without video", ("vision", "audio"))


def _omni(name: str, encoders: tuple[str, ...]) -> Job:
    job = find_job("omni-3", "h100:256", ["llm=pp4,tp4"])
    kept = tuple(encoder for encoder in job.model.encoders if encoder.name in encoders)
    sequences = tuple(
        replace(
            each,
            text=each.text + sum(sum(n) for e, n in each.items if e not in encoders),
            items=tuple((e, n) for e, n in each.items if e in encoders),
        )
        for each in job.workload.sequences
    )
    workload = replace(job.workload, sequences=sequences)
    return replace(job, name=name, model=replace(job.model, encoders=kept), workload=workload)


def vit_3b_gpt_11b() -> Job:
    """Returns the paper's small job, with a pipeline."""
    return replace(find_job("paper/small-a100", layouts=["llm=pp4,tp2"]), name="ViT-3B + GPT-11B")


def vit_6b_gpt_11b() -> Job:
    """Returns InternViT-6B in place of ViT-3B, on twice the GPUs with twice the batch."""
    job = vit_3b_gpt_11b().replace(gpus=16, sequences_per_step=32)
    projector = job.model.encoders[0].projector
    encoder = replace(
        find_job("internvl3-78b", "h100:64").model.encoders[0], name="vision", projector=projector
    )
    return _with_modules(job, "ViT-6B + GPT-11B", encoder, job.model.llm)


def vit_11b_gpt_33b() -> Job:
    """Returns the paper's job A with a synthetic GPT of 33B parameters: GPT-11B, wider and less deep."""
    job, gpt = find_job("paper/A"), find_job("paper/small-a100").model.llm
    hidden, layers = 6144, 72
    attention = replace(gpt.stack.attention, heads=hidden // HEAD_DIM, kv_heads=hidden // HEAD_DIM)
    stack = replace(
        gpt.stack,
        hidden=hidden,
        layers=layers,
        attention=attention,
        mlp=replace(gpt.stack.mlp, width=4 * hidden),
    )
    encoder = job.model.encoders[0]
    encoder = replace(encoder, projector=replace(encoder.projector, widths=(hidden,)))
    job = replace(job, layout=replace(job.layout, modules={"llm": PartialLayout(dp=2, pp=4, tp=8)}))
    return _with_modules(job, "ViT-11B + GPT-33B", encoder, replace(gpt, stack=stack))


def swept(ratio: float, tokens: int) -> Job:
    """Returns GPT-175B with an encoder of `ratio` times its size and `tokens` tokens a sequence."""
    job = find_job("paper/D")
    encoder = sized(job.model.encoders[0], ratio * job.model.llm.parameters())
    llm = replace(job.model.llm, positions=SWEEP_SEQUENCE)
    job = _with_modules(job, f"{ratio:g} of GPT-175B, {tokens} tokens", encoder, llm)
    workload = replace(job.workload, sequence_tokens=SWEEP_SEQUENCE, sequences_per_step=SWEEP_BATCH)
    layout = LayoutConstraints(modules={"llm": SWEEP_LAYOUT}, limits=SearchLimits(microbatch_sequences=(1,)))
    image = min(tokens, SWEEP_IMAGE)
    items = {encoder.name: (image // MERGE,) * (tokens // image)}
    return _with_items(replace(job, workload=workload, layout=layout), items)


def sized(encoder: Encoder, parameters: float) -> Encoder:
    """Returns the encoder with the width, in steps of eight heads, and depth closest to `parameters`."""
    stack, encoders = encoder.stack, []
    for layers in DEPTHS:
        for heads in range(8, 161, 8):
            hidden = heads * HEAD_DIM
            attention = replace(stack.attention, heads=heads, kv_heads=heads)
            mlp = replace(stack.mlp, width=4 * hidden)
            resized = replace(stack, hidden=hidden, layers=layers, attention=attention, mlp=mlp)
            encoders.append(replace(encoder, stack=resized))
    return min(encoders, key=lambda resized: abs(resized.parameters() / parameters - 1))


def with_capacity(context: PlanningContext, gigabytes: float) -> PlanningContext:
    """Returns the context with so much memory on every GPU."""
    free = context.job.cluster.gpu.memory_bytes - gigabytes * 1e9
    return replace(context, kept_free_bytes=free)


def _with_modules(job: Job, name: str, encoder: Encoder, llm: Llm) -> Job:
    return replace(job, name=name, model=replace(job.model, name=name, encoders=(encoder,), llm=llm))


def _with_items(job: Job, items: dict[str, tuple[int, ...]]) -> Job:
    """Fills every sequence with these images, and text up to its length."""
    text = job.workload.sequence_tokens - sum(map(sum, items.values()))
    sequence = PackedSequence(text=text, items=tuple(items.items()))
    return replace(job, workload=replace(job.workload, sequences=(sequence,)))


SIMPLER = ("balanced-best", "three-phase", "fsdp")
ALL = ("optimus", "paper", "balanced-best", "three-phase", "stage0", "fsdp")
CAPACITIES = (80, 64, 48, 40, 32)  # GB of a GPU
ROOMY, ROOMY_GB = ("0.3 16384", "0.5 8192"), 160  # points of the sweep where memory decides, and more of it
STRONG = (1024, 2048, 3072)
MULTI: dict[str, Callable[[], Job]] = {
    "dual-11-5": lambda: find_job("paper/dual-11-5"),
    "dual-22-5": lambda: find_job("paper/dual-22-5"),
    "dual-22-11": lambda: find_job("paper/dual-22-11"),
    "triple-22-11-5": triple,
    "omni-3": omni,
    "omni-3 without video": image_and_sound,
}
SIZES: dict[str, Callable[[], Job]] = {
    "ViT-3B + GPT-11B": vit_3b_gpt_11b,
    "ViT-6B + GPT-11B": vit_6b_gpt_11b,
    "ViT-11B + GPT-33B": vit_11b_gpt_33b,
}
WEAK: dict[str, Callable[[], Job]] = {
    name: lambda name=name: find_job(f"paper/{name}")  # type: ignore[misc]
    for name in ("A", "B", "C", "D")
}


@dataclass(frozen=True, kw_only=True)
class QuestionCase:
    """One job under one set of assumptions, for one question."""

    part: str
    name: str
    preset: str
    make: Callable[[], Figures]

    @property
    def key(self) -> str:
        return f"{self.part} {self.name} {self.preset}"


def all_cases() -> Iterator[QuestionCase]:
    """Yields every case of every table, in the order of the stored figures."""
    for name in MULTI:
        yield _case("encoders", name, "default", several_encoders)
    for preset_name in ("default", "paper"):
        for name in (*SIZES, *WEAK):
            yield _case("memory", name, preset_name, peaks)
        for gpus in STRONG:
            yield _case("bubbles", str(gpus), preset_name, bubbles)
    for name in SIZES:
        yield _case("capacity", name, "default", at_capacities)
    for ratio in RATIOS:
        for tokens in TOKENS:
            yield _case("sweep", f"{ratio:g} {tokens}", "default", sweep_point)
    for name in ROOMY:
        yield _case("roomy", name, "default", roomy_point)


def _case(part: str, name: str, preset_name: str, make: Callable[[str, str], Figures]) -> QuestionCase:
    return QuestionCase(part=part, name=name, preset=preset_name, make=lambda: make(name, preset_name))


# ------------------------------------------------------------------------ several encoders


def several_encoders(name: str, assumed: str) -> Figures:
    """Compares all systems; and ours with one layout for all encoders, where it chose several."""
    job = MULTI[name]()
    comparison = compare_systems(job, names=ALL, assumptions=assumed)
    figures = _systems(comparison)
    ours = comparison.systems.get("optimus")
    if ours is None or ours.search_result is None:
        return figures
    layouts = set(_encoder_layouts(ours).values())
    if len(layouts) > 1:
        tried = {str(each.layout): each.layout for each in ours.search_result.tried}
        alike = [
            compare_systems(_alike(job, tried[name]), names=["optimus"], assumptions=assumed)
            for name in sorted(layouts | {str(ours.search_result.tried[0].layout)})
            if name in tried
        ]
        ours_alike = [each.systems["optimus"] for each in alike if "optimus" in each.systems]
        figures["systems"]["optimus, one layout"] = _system(min(ours_alike, key=lambda system: system.step_s))
    return figures


def _alike(job: Job, layout: Layout) -> Job:
    """States this layout for all encoders."""
    stated = PartialLayout(dp=layout.dp, pp=layout.pp, tp=layout.tp)
    modules = {encoder.name: stated for encoder in job.model.encoders}
    return replace(job, layout=replace(job.layout, modules={**job.layout.modules, **modules}))


# ------------------------------------------------------------------------ memory


def peaks(name: str, assumed: str) -> Figures:
    """Plans every system with all memory of a GPU."""
    return _systems(compare_systems((SIZES | WEAK)[name](), names=ALL, assumptions=assumed))


def at_capacities(name: str, assumed: str) -> Figures:
    """Plans every system on GPUs with less and less memory."""
    context, _ = choose_smallest_context(SIZES[name](), get_preset(assumed))
    figures: Figures = {}
    for gigabytes in CAPACITIES:
        pipelines = LlmPipelines(with_capacity(context, gigabytes))
        planned = {}
        for system in ("optimus", *SIMPLER, "stage0"):
            try:
                planned[system] = _system(load_system(system).simulate(pipelines))
            except DoesNotFit:
                continue
        figures[str(gigabytes)] = {system: value for system, value in planned.items() if value["fits"]}
    return figures


# ------------------------------------------------------------------------ bubbles by cause


def bubbles(name: str, assumed: str) -> Figures:
    """Breaks down the step of the mean GPU, of the LLM alone and with encoders in its bubbles."""
    job = find_job("paper/strong-3072").replace(gpus=int(name))
    comparison = compare_systems(job, names=["optimus", "balanced-best"], assumptions=assumed)
    ours = comparison.systems["optimus"]
    assert ours.search_result is not None
    alone = llm_alone(ours.search_result)
    bounds = _bounds(comparison)
    return {
        "before": _seconds(alone.schedule, alone.timeline),
        "after": _seconds(ours.schedule, ours.timeline),
        "floor_s": rounded(comparison.floor_s),
        "bound_s": rounded(bounds.bound_s),
        "balanced_best_s": rounded(comparison.systems["balanced-best"].step_s),
        "placed": {k: rounded(v) for k, v in ours.search_result.filled.plan.claims.encoder_s.items()},
        "microbatches": ours.search_result.llm.microbatches,
        "how": ours.how,
    }


def llm_alone(result: SearchResult) -> LoweredPlan:
    """Returns the LLM of a plan without encoders, with the same order, phases and traffic."""
    plan = result.filled.plan
    alone = replace(plan, modules={LLM: plan.modules[LLM]})
    return lower_to_programs(alone, LlmTimeline(plan, result.llm.order)._orders)


def _seconds(schedule: Schedule, timeline: Timeline) -> Figures:
    """Returns seconds of the mean GPU: compute of the LLM, of encoders, the optimizer, bubbles by cause."""
    spent = timeline.finish_s - timeline.start_s
    compute = schedule.lane == Lane.COMPUTE
    finish = compute & (schedule.kind == OpKind.OPTIMIZER)
    llm = compute & ~finish & (schedule.module == schedule.modules.index(LLM))
    of = {"llm": llm, "encoders": compute & ~finish & ~llm, "optimizer": finish}
    seconds = {word: float(np.sum(spent[rows])) / schedule.num_devices for word, rows in of.items()}
    idle = find_idle_intervals(schedule, timeline)
    own = (idle.cause == CAUSES.index("tp")) & (idle.op >= 0)
    own &= schedule.module[idle.op] != schedule.modules.index(LLM)
    seconds["tp_of_encoders"] = float(np.sum((idle.end_s - idle.begin_s)[own])) / schedule.num_devices
    return {
        "step_s": timeline.step_s,
        **seconds,
        **asdict(average_bubbles(sum_bubbles_by_cause(schedule, timeline))),
    }


# ------------------------------------------------------------------------ sizes of encoders


def sweep_point(name: str, assumed: str) -> Figures:
    """Compares systems at one size of encoder and of images."""
    ratio, tokens = name.split()
    job = swept(float(ratio), int(tokens))
    comparison = compare_systems(job, names=("optimus", *SIMPLER), assumptions=assumed)
    encoder = job.model.encoders[0]
    bounds = _bounds(comparison)
    return {
        **_systems(comparison),
        "ratio": rounded(encoder.parameters() / job.model.llm.parameters()),
        "work_share": rounded(bounds.encoder_s / comparison.floor_s),
    }


def roomy_point(name: str, assumed: str) -> Figures:
    """Compares systems at the same point, on GPUs with more memory."""
    ratio, tokens = name.split()
    job = swept(float(ratio), int(tokens))
    gpu = replace(job.cluster.gpu, memory_bytes=ROOMY_GB * 1e9)
    job = replace(job, cluster=replace(job.cluster, gpu=gpu))
    return _systems(compare_systems(job, names=("optimus", *SIMPLER), assumptions=assumed))


# ------------------------------------------------------------------------ shared


def _bounds(comparison: Comparison) -> StepBounds:
    floor = comparison.llm_only.search_result
    assert floor is not None
    return compute_step_bounds(comparison.context, floor.llm, comparison.floor_s)


def _systems(comparison: Comparison) -> Figures:
    bounds = _bounds(comparison)
    return {
        "floor_s": rounded(comparison.floor_s),
        "bound_s": rounded(bounds.bound_s),
        "systems": {name: _system(system) for name, system in comparison.systems.items()},
        "missing": comparison.missing,
    }


def _system(system: SimulatedSystem) -> Figures:
    memory = system.memory
    parts = {
        "states": memory.states,
        "llm_activations": memory.llm_activations + memory.logits,
        "encoder_activations": memory.encoder_activations + memory.seam,
    }
    figures = {
        "step_s": rounded(system.step_s),
        "peak_gb": round(system.peak_bytes / 1e9, 3),
        "fits": system.fits,
        "how": system.how,
        "gb": {name: round(size / 1e9, 3) for name, size in parts.items()},
    }
    return figures if system.search_result is None else {**figures, "layouts": _encoder_layouts(system)}


def _encoder_layouts(system: SimulatedSystem) -> dict[str, str]:
    assert system.search_result is not None
    return {name: str(module.layout) for name, module in system.search_result.filled.plan.encoders.items()}


def simpler(point: Figures) -> tuple[str, Figures]:
    """Returns the fastest system that fits and fills no bubbles."""
    fitting = {name: point["systems"][name] for name in SIMPLER if name in point["systems"]}
    return min(fitting.items(), key=lambda pair: (not pair[1]["fits"], pair[1]["step_s"]))


def gain(point: Figures) -> float:
    """Returns the step of the best simpler system over ours, less one."""
    return float(simpler(point)[1]["step_s"] / point["systems"]["optimus"]["step_s"] - 1)
