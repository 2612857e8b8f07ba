"""Defines an exported plan: its files, what the target cannot run, and the best system that it can."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimus.exporters.plan_facts import PlanFacts
from optimus.exporters.rank_groups import describe_rank_groups
from optimus.ir.plan import Plan


@dataclass(frozen=True, kw_only=True)
class UnsupportedFeature:
    """A feature of the plan that the target cannot run."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class TargetStepTime:
    """Step time of a system that the target can run, absolute and over the plan's."""

    system: str
    step_s: float
    over_plan: float


@dataclass(frozen=True, kw_only=True)
class ExportedPlan:
    """A plan for a target: texts by file name, and what the target cannot run."""

    plan: Plan
    target: str
    version: str  # of the target, against which names and behaviour were checked
    files: Mapping[str, str]
    not_supported: tuple[UnsupportedFeature, ...]
    as_written: TargetStepTime | None  # approximately what the files run, if it was compared
    best_there: TargetStepTime | None  # None if no system that the target can run was compared and fits


JSON_WIDTH = 110


def written_system(plan: Plan) -> tuple[str]:
    """Returns the system that files run: FSDP, or encoders in the LLM's first stage."""
    return ("fsdp",) if PlanFacts(plan=plan).is_fsdp else ("stage0",)


def find_fastest_system(plan: Plan, systems: Sequence[str]) -> TargetStepTime | None:
    """Returns the fastest of `systems` that fits and was compared when the plan was made."""
    compared, unfit = plan.notes.get("systems_s"), plan.notes.get("systems_unfit", [])
    if not isinstance(compared, Mapping):
        return None
    times = {
        name: float(compared[name])
        for name in systems
        if isinstance(compared.get(name), int | float) and name not in unfit
    }
    if not times:
        return None
    fastest = min(times, key=lambda name: times[name])
    step_s = times[fastest]
    return TargetStepTime(system=fastest, step_s=step_s, over_plan=step_s / plan.claims.step_s)


def build_export(
    plan: Plan,
    *,
    target: str,
    version: str,
    systems: Sequence[str],
    files: Mapping[str, str],
    unsupported: Sequence[UnsupportedFeature],
) -> ExportedPlan:
    """Returns the export with the rank groups and the step times of what the target can run."""
    return ExportedPlan(
        plan=plan,
        target=target,
        version=version,
        files={**files, "ranks.json": format_json(describe_rank_groups(plan))},
        not_supported=tuple(unsupported),
        as_written=find_fastest_system(plan, written_system(plan)),
        best_there=find_fastest_system(plan, systems),
    )


EMPTY_ENDS = UnsupportedFeature(
    what="a first or last virtual stage without layers",
    why="it keeps the embedding in the first and the head in the last; the files say so",
)


def describe_step_time(
    plan: Plan, step: TargetStepTime | None, systems: Sequence[str], *, about: bool = False
) -> str:
    """Describes a step time relative to the plan's."""
    if step is None:
        return f"unknown: {' and '.join(systems)} not compared when the plan was made, or too large"
    more = step.over_plan - 1
    relative = f"{abs(more):.1%} {'more' if more >= 0 else 'less'} than the plan's {plan.claims.step_s:.3f} s"
    return f"{'about ' if about else ''}{step.system}, {step.step_s:.3f} s per step: {relative}"


def format_comment_lines(lines: Sequence[str]) -> list[str]:
    """Returns the lines as comments of a shell or Python file."""
    return [f"# {line}".rstrip() for line in lines]


def describe_limitations(
    plan: Plan, target: str, unsupported: Sequence[UnsupportedFeature], systems: Sequence[str]
) -> list[str]:
    """Returns the head of a file: what the target cannot run, and what that costs."""
    lines = [f"{target} cannot run of this plan:"]
    lines += [f"- {feature.what}: {feature.why}" for feature in unsupported] or [
        "- nothing: it can run all of it"
    ]
    system = written_system(plan)
    written = describe_step_time(plan, find_fastest_system(plan, system), system, about=True)
    best = describe_step_time(plan, find_fastest_system(plan, systems), systems)
    return [*lines, f"What these settings run: {written}.", f"The best system that it can run: {best}."]


def list_unsupported_encoder_features(
    facts: PlanFacts, *, stages: str, layout: str, splits_over_cp: bool = False
) -> list[UnsupportedFeature]:
    """Returns the encoder features that a trainer with encoders in the first stage only cannot run.

    `stages` and `layout` are the target's own reasons against several stages and a layout per module;
    `splits_over_cp` is True if it splits an encoder's batch over the LLM's context-parallel ranks.
    """
    llm, unsupported = facts.layout, list[UnsupportedFeature]()
    if facts.plan.encoders and facts.plan.strategy not in ("stage0", "fsdp"):
        why = "it runs an encoder only as part of the first pipeline stage's forward and backward"
        unsupported.append(UnsupportedFeature(what="encoder work in the LLM's idle time", why=why))
    if (replicas := facts.plan.dealing_replicas) > 1:
        why = "each of its replicas encodes the items of its own sequences, and all wait for the slowest"
        unsupported.append(UnsupportedFeature(what=f"items dealt over {replicas} replicas", why=why))
    for name, module in facts.plan.encoders.items():
        encoder = module.layout
        if encoder.pp > 1 and facts.plan.strategy != "stage0":  # which has all its layers in the first
            unsupported.append(
                UnsupportedFeature(what=f"{name} over {encoder.pp} pipeline stages", why=stages)
            )
        if (encoder.tp, encoder.pp) != (llm.tp, llm.pp) or (llm.cp > 1 and not splits_over_cp):
            unsupported.append(
                UnsupportedFeature(what=f"{name} in a layout of its own ({encoder})", why=layout)
            )
        if module.microbatches_per_llm_microbatch > 1:
            what = f"{name} in {module.microbatches_per_llm_microbatch} pieces per microbatch of the LLM"
            unsupported.append(UnsupportedFeature(what=what, why="it runs an encoder on whole microbatches"))
    return unsupported


def format_json(value: Any) -> str:
    """Formats JSON for readers: an entry per line, but short values and lists of numbers on one line."""
    return _laid_out(value, "") + "\n"


def _laid_out(value: Any, indent: str) -> str:
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list) or len(indent) + len(flat) <= JSON_WIDTH or not value:
        return flat
    deeper = indent + "  "
    if isinstance(value, list):
        if not any(isinstance(item, dict | list) for item in value):
            return flat
        items = [_laid_out(item, deeper) for item in value]
        return "[\n" + ",\n".join(f"{deeper}{item}" for item in items) + f"\n{indent}]"
    entries = [f"{deeper}{json.dumps(name)}: {_laid_out(item, deeper)}" for name, item in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def format_python_dict(fields: dict[str, Any]) -> str:
    """Returns a dict as Python source, one entry per line."""
    lines = []
    for name, value in fields.items():
        if isinstance(value, list):
            rows = "".join(f"        {_python_value(row)},\n" for row in value)
            lines.append(f'    "{name}": [\n{rows}    ],')
        else:
            lines.append(f'    "{name}": {_python_value(value)},')
    return "{\n" + "\n".join(lines) + "\n}"


def _python_value(value: Any) -> str:
    return repr(value).replace("'", '"')
