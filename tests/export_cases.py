"""Plans to export, and exported arguments read back."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from plan_by_hand import plan_by_hand

from optimus.cost.assumptions import get_preset
from optimus.exporters.exported_plan import ExportedPlan
from optimus.exporters.plan_facts import PlanFacts
from optimus.exporters.targets import TARGETS
from optimus.ir.binding import flatten_and_hash_parts, list_bound_parts
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.job.read import find_job
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.planning import make_plan
from optimus.planner.systems.colocated_plan import Sharding
from optimus.planner.systems.fsdp import FsdpSystem
from optimus.planner.systems.llm_only import LlmPipelines

LAYERS = (3, 3, 3, 4, 2, 3, 3, 3, 3, 3, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 3)  # and two ends
DATA = Path(__file__).parent / "data"
FORMS: dict[str, Any] = json.loads((DATA / "released_forms.json").read_text())
FORMS |= {
    path.name.removesuffix("_config.json").partition("--")[2]: json.loads(path.read_text())
    for path in (DATA / "configs").glob("*_config.json")
    if "vision_config" in json.loads(path.read_text())
}


@cache
def planned(name: str, *layout: str) -> Plan:
    """The plan of a catalog job, made once."""
    return make_plan(find_job(name, None, layout), systems=()).plan


@cache
def fsdp_plan(sharding: Sharding) -> Plan:
    """A plan of cpu/tiny-vl whose layers are sharded as FSDP does, with recomputation that targets have."""
    context, _ = choose_smallest_context(find_job("cpu/tiny-vl"), get_preset("default"))
    candidates = list(FsdpSystem().candidates(LlmPipelines(context)))
    plan = next(each for each in candidates if each.sharding == sharding).filled.plan
    fields, hashes = flatten_and_hash_parts(list_bound_parts(context.job))
    notes = {"systems_s": {"stage0": 2 * plan.claims.step_s, "fsdp": plan.claims.step_s}}
    return replace(plan, strategy="fsdp", bound_to=fields, hashes=hashes, notes=notes)


def uneven_plan() -> Plan:
    """A plan for paper/small-a100 of virtual stages that are unequal, made by hand."""
    plan = plan_by_hand(Layout(pp=4, tp=2, chunks=7), Layout(dp=8), microbatches=8, name="paper/small-a100")
    modules = {"vision": plan.modules["enc0"], LLM: plan.modules[LLM]}
    chunks = tuple(replace(modules[LLM].chunks[0], layers=count) for count in LAYERS)
    modules[LLM] = replace(modules[LLM], chunks=chunks)
    fields, hashes = flatten_and_hash_parts(list_bound_parts(find_job("paper/small-a100", None)))
    return replace(plan, order="interleaved", modules=modules, bound_to=fields, hashes=hashes)


@cache
def job_of(form: str) -> Job:
    """A job of a model in the test data or the catalog."""
    if form not in FORMS:
        return find_job(form, "h100:64")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(FORMS[form]))
        return find_job(str(path), "h100:64")


def stage0_plan(form: str, layout: Layout, *, recompute: str = "none", uneven: bool = False) -> Plan:
    """A plan of `stage0` made by hand; uneven, its virtual stages hold embedding and head as layers."""
    job, encoder = job_of(form), replace(layout, dp=layout.dp * layout.cp, cp=1, ep=1)
    stages, layers = layout.virtual_stages, job.model.llm.stack.layers + (2 if uneven else 0)
    counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    if not uneven:
        counts[0] += 1
        counts[-1] += 1
    plan = plan_by_hand(layout, encoder, microbatches=8, name="paper/small-a100")
    llm, vision = plan.modules[LLM], plan.modules["enc0"]
    chunks = tuple(replace(llm.chunks[0], layers=count) for count in counts)
    modules = {
        "vision": replace(vision, recompute=recompute),
        LLM: replace(llm, recompute=recompute, chunks=chunks),
    }
    fields, hashes = flatten_and_hash_parts(list_bound_parts(job))
    order = "interleaved" if layout.chunks > 1 else "1f1b"
    return replace(
        plan, strategy="stage0", order=order, modules=modules, bound_to=fields, hashes=hashes, notes={}
    )


def export_unproven(plan: Plan, target: str) -> ExportedPlan:
    """Exports a plan made by hand, which need not hold every rule."""
    return TARGETS[target](PlanFacts(plan=plan))


def with_llm(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, modules={**plan.modules, LLM: replace(plan.modules[LLM], **changes)})


def parsed(text: str) -> dict[str, list[str]]:
    """An arguments file as a shell would hand it over: flags with their values."""
    words = " ".join(line for line in text.splitlines() if not line.startswith("#")).split()
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in found
            last = found[word[2:]] = []
        else:
            last.append(word)
    return found


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())
