"""Plays the jobs behind docs/questions.md: every case is one line of a table, as plain figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from question_jobs import (
    RATIOS,
    TOKENS,
    image_and_sound,
    omni,
    swept,
    triple,
    vit_3b_gpt_11b,
    vit_6b_gpt_11b,
    vit_11b_gpt_33b,
    with_capacity,
)

from optimus.cost.assumptions import preset
from optimus.errors import DoesNotFit
from optimus.ir.op import Kind, Lane, Schedule
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import Layout, LayoutChoice
from optimus.job.read import find_job
from optimus.planner.bounds import find_bounds
from optimus.planner.compare import Comparison, compare_systems
from optimus.planner.layouts import decide_context
from optimus.planner.search_result import SearchResult
from optimus.planner.systems.registry import System, Systems
from optimus.schedule.bubbles import CAUSES, find_bubbles, find_idle, mean_bubbles
from optimus.schedule.llm_timeline import LlmTimeline
from optimus.schedule.lower import Lowered, lower
from optimus.schedule.simulate import Timeline

Figures = dict[str, Any]
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
class Case:
    """One job under one set of assumptions, for one question."""

    part: str
    name: str
    preset: str
    make: Callable[[], Figures]

    @property
    def key(self) -> str:
        return f"{self.part} {self.name} {self.preset}"


def all_cases() -> Iterator[Case]:
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


def _case(part: str, name: str, preset_name: str, make: Callable[[str, str], Figures]) -> Case:
    return Case(part=part, name=name, preset=preset_name, make=lambda: make(name, preset_name))


# ------------------------------------------------------------------------ several encoders


def several_encoders(name: str, assumed: str) -> Figures:
    """All systems; and ours with one layout for all encoders, where it took several."""
    job = MULTI[name]()
    found = compare_systems(job, names=ALL, assumptions=assumed)
    figures = _systems(found)
    ours = found.systems.get("optimus")
    if ours is None or ours.found is None:
        return figures
    layouts = set(_encoder_layouts(ours).values())
    if len(layouts) > 1:
        tried = {str(each.layout): each.layout for each in ours.found.tried}
        alike = [
            compare_systems(_alike(job, tried[name]), names=["optimus"], assumptions=assumed)
            for name in sorted(layouts | {str(ours.found.tried[0].layout)})
            if name in tried
        ]
        made = [each.systems["optimus"] for each in alike if "optimus" in each.systems]
        figures["systems"]["optimus, one layout"] = _system(min(made, key=lambda system: system.step_s))
    return figures


def _alike(job: Job, layout: Layout) -> Job:
    """With this layout stated for all encoders."""
    stated = LayoutChoice(dp=layout.dp, pp=layout.pp, tp=layout.tp)
    modules = {encoder.name: stated for encoder in job.model.encoders}
    return replace(job, layout=replace(job.layout, modules={**job.layout.modules, **modules}))


# ------------------------------------------------------------------------ memory


def peaks(name: str, assumed: str) -> Figures:
    """Every system as it is planned where a GPU has all its memory."""
    return _systems(compare_systems((SIZES | WEAK)[name](), names=ALL, assumptions=assumed))


def at_capacities(name: str, assumed: str) -> Figures:
    """Every system at its best on GPUs with less and less memory."""
    context, _ = decide_context(SIZES[name](), preset(assumed))
    found: Figures = {}
    for gigabytes in CAPACITIES:
        systems = Systems(with_capacity(context, gigabytes))
        made = {}
        for system in ("optimus", *SIMPLER, "stage0"):
            try:
                made[system] = _system(systems.make(system))
            except DoesNotFit:
                continue
        found[str(gigabytes)] = {system: value for system, value in made.items() if value["fits"]}
    return found


# ------------------------------------------------------------------------ bubbles by cause


def bubbles(name: str, assumed: str) -> Figures:
    """Seconds of a mean GPU by what they go to, of the LLM alone and with encoders in its bubbles."""
    job = find_job("paper/strong-3072").replace(gpus=int(name))
    found = compare_systems(job, names=["optimus", "balanced-best"], assumptions=assumed)
    ours = found.systems["optimus"]
    assert ours.found is not None
    alone = llm_alone(ours.found)
    bounds = find_bounds(found.context, found.floor, found.floor_s)
    return {
        "before": _seconds(alone.schedule, alone.timeline),
        "after": _seconds(ours.schedule, ours.timeline),
        "floor_s": _rounded(found.floor_s),
        "bound_s": _rounded(bounds.bound_s),
        "balanced_best_s": _rounded(found.systems["balanced-best"].step_s),
        "placed": {k: _rounded(v) for k, v in ours.found.filled.plan.claims.encoder_s.items()},
        "microbatches": ours.found.llm.microbatches,
        "how": ours.how,
    }


def llm_alone(found: SearchResult) -> Lowered:
    """The LLM of a plan as the plan plays it, without encoders: the same order, phases and traffic."""
    plan = found.filled.plan
    alone = replace(plan, modules={LLM: plan.modules[LLM]})
    return lower(alone, LlmTimeline(plan, found.llm.order)._orders)


def _seconds(schedule: Schedule, timeline: Timeline) -> Figures:
    """The step of the mean GPU: compute of the LLM, of encoders, the optimizer, and bubbles by cause."""
    spent = timeline.finish_s - timeline.start_s
    compute = schedule.lane == Lane.COMPUTE
    finish = compute & (schedule.kind == Kind.FINISH)
    llm = compute & ~finish & (schedule.module == schedule.modules.index(LLM))
    of = {"llm": llm, "encoders": compute & ~finish & ~llm, "optimizer": finish}
    seconds = {word: float(np.sum(spent[rows])) / schedule.num_devices for word, rows in of.items()}
    idle = find_idle(schedule, timeline)
    own = (idle.cause == CAUSES.index("tp")) & (idle.op >= 0)
    own &= schedule.module[idle.op] != schedule.modules.index(LLM)
    seconds["tp_of_encoders"] = float(np.sum((idle.end_s - idle.begin_s)[own])) / schedule.num_devices
    return {"step_s": timeline.step_s, **seconds, **asdict(mean_bubbles(find_bubbles(schedule, timeline)))}


# ------------------------------------------------------------------------ sizes of encoders


def sweep_point(name: str, assumed: str) -> Figures:
    """One size of encoder and of images."""
    ratio, tokens = name.split()
    job = swept(float(ratio), int(tokens))
    found = compare_systems(job, names=("optimus", *SIMPLER), assumptions=assumed)
    encoder = job.model.encoders[0]
    bounds = find_bounds(found.context, found.floor, found.floor_s)
    return {
        **_systems(found),
        "ratio": _rounded(encoder.parameters() / job.model.llm.parameters()),
        "work_share": _rounded(bounds.encoder_s / found.floor_s),
    }


def roomy_point(name: str, assumed: str) -> Figures:
    """The same point on GPUs that differ in nothing but their memory."""
    ratio, tokens = name.split()
    job = swept(float(ratio), int(tokens))
    gpu = replace(job.cluster.gpu, memory_bytes=ROOMY_GB * 1e9)
    job = replace(job, cluster=replace(job.cluster, gpu=gpu))
    return _systems(compare_systems(job, names=("optimus", *SIMPLER), assumptions=assumed))


# ------------------------------------------------------------------------ shared


def _systems(found: Comparison) -> Figures:
    bounds = find_bounds(found.context, found.floor, found.floor_s)
    return {
        "floor_s": _rounded(found.floor_s),
        "bound_s": _rounded(bounds.bound_s),
        "systems": {name: _system(system) for name, system in found.systems.items()},
        "missing": found.missing,
    }


def _system(system: System) -> Figures:
    memory = system.memory
    parts = {
        "states": memory.states,
        "llm_activations": memory.llm_activations + memory.logits,
        "encoder_activations": memory.encoder_activations + memory.seam,
    }
    figures = {
        "step_s": _rounded(system.step_s),
        "peak_gb": round(memory.total / 1e9, 3),
        "fits": system.fits,
        "how": system.how,
        "gb": {name: round(size / 1e9, 3) for name, size in parts.items()},
    }
    return figures if system.found is None else {**figures, "layouts": _encoder_layouts(system)}


def _encoder_layouts(system: System) -> dict[str, str]:
    assert system.found is not None
    return {name: str(module.layout) for name, module in system.found.filled.plan.encoders.items()}


def _rounded(value: float) -> float:
    return round(value, 6)


def simpler(found: Figures) -> tuple[str, Figures]:
    """The fastest that fits and fills no bubbles."""
    fitting = {name: found["systems"][name] for name in SIMPLER if name in found["systems"]}
    return min(fitting.items(), key=lambda pair: (not pair[1]["fits"], pair[1]["step_s"]))


def gain(found: Figures) -> float:
    """Time of the best simpler system over ours, less one."""
    return float(simpler(found)[1]["step_s"] / found["systems"]["optimus"]["step_s"] - 1)
