"""`optimus why`: explains why a plan does not use another layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from optimus.cli.console import announce_compilation, print_result, progress_bar
from optimus.cli.flags import (
    OK,
    JsonFlag,
    OnFlag,
    PlanArgument,
    describe_option,
    load_optional_profile,
    refuse_without_job,
)
from optimus.cli.text import align_columns, wrap_text
from optimus.render.format_numbers import format_gigabytes, format_seconds

if TYPE_CHECKING:
    from optimus.sensitivity.why_not import LayoutExplanation, PlanFigures

SCHEMA = "optimus.why/1"


@dataclass(frozen=True)
class WhyCommand:
    """Explain why a plan does not use another layout."""

    plan: PlanArgument
    layouts: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        describe_option(
            metavar="MODULE=AXES ...",
            help="the layout in question, e.g. llm=pp8,tp4 vision=pp2; the rest is searched",
        ),
    ]
    job: Annotated[
        str | None,
        describe_option(
            metavar="JOB", help="the plan's job, for its limits, or if the plan does not hold all of its data"
        ),
    ] = None
    on: OnFlag = None
    profile: Annotated[
        Path | None,
        describe_option(metavar="FILE.yaml", help="the profile that the plan was made with"),
    ] = None
    json: JsonFlag = False

    def __call__(self) -> int:
        refuse_without_job(self.job, on=self.on)
        job = None
        if self.job is not None:
            from optimus.job.read import find_job

            job = find_job(self.job, self.on)
        profile = load_optional_profile(self.profile)
        with progress_bar("planning") as progress, announce_compilation():
            from optimus.sensitivity.why_not import explain_layout

            reason = explain_layout(self.plan, *self.layouts, job=job, profile=profile, progress=progress)
        print_result(_why_json(reason), _why_text(reason), as_json=self.json)
        return OK


def _why_json(reason: LayoutExplanation) -> dict[str, object]:
    """Returns the object of `optimus why --json`."""
    need = reason.need
    return {
        "schema": SCHEMA,
        "asked": list(reason.asked),
        "verdict": reason.verdict,
        "reason": reason.reason,
        "hint": reason.hint,
        "plan_step_s": reason.plan_step_s,
        "plan_layouts": {name: asdict(layout) for name, layout in reason.plan_layouts.items()},
        "step_s": None if reason.other is None else reason.other.step_s,
        "step_over_plan": None if reason.other is None else reason.other.step_s / reason.plan_step_s,
        "differences_s": reason.differences_s,
        "planned": None if reason.other is None else _planning_json(reason.other),
        "plan": None if reason.plan is None else _planning_json(reason.plan),
        "memory": None
        if need is None
        else {
            "needed_bytes": need.needed_bytes,
            "capacity_bytes": need.capacity_bytes,
            "largest": need.largest,
            "encoder_bytes": need.encoder_bytes,
            "llm_alone_bytes": asdict(need.llm_alone),
            "llm_stage": need.stage,
            "llm_layout": asdict(need.llm_layout),
            "encoder_layout": None if need.encoders is None else asdict(need.encoders),
        },
    }


def _planning_json(planning: PlanFigures) -> dict[str, object]:
    return {
        "step_s": planning.step_s,
        "layouts": {name: asdict(layout) for name, layout in planning.layouts.items()},
        "microbatch_sequences": planning.microbatch_sequences,
        "recompute": dict(planning.recompute),
        "peak_memory_bytes": planning.peak_bytes,
        "spent_s": dict(planning.spent_s),
        "llm_alone_s": planning.llm_alone_s,
        "encoders_not_hidden_s": planning.not_hidden_s,
    }


def _why_text(reason: LayoutExplanation) -> list[str]:
    """Returns the reason, then for a layout that fits how its step and the plan's divide."""
    lines = wrap_text("asked", " ".join(reason.asked))
    lines += wrap_text("reason", reason.reason)
    if reason.hint:
        lines += wrap_text("hint", reason.hint)
    if reason.plan is None or reason.other is None:
        layouts = ", ".join(f"{name} {layout}" for name, layout in reason.plan_layouts.items())
        return [*lines, *wrap_text("plan", f"{layouts}; {format_seconds(reason.plan_step_s)} s")]
    lines += wrap_text("plan", _how(reason.plan)) + wrap_text("as asked", _how(reason.other))
    return [*lines, "", *_table(reason, reason.plan, reason.other)]


def _how(planning: PlanFigures) -> str:
    modules = [
        f"{name} {layout} recompute {planning.recompute[name]}" for name, layout in planning.layouts.items()
    ]
    size = f"microbatch {planning.microbatch_sequences:.3g}, peak {format_gigabytes(planning.peak_bytes)} GB"
    return "; ".join([*modules, size])


def _table(reason: LayoutExplanation, plan: PlanFigures, other: PlanFigures) -> list[str]:
    """Returns seconds of the mean GPU by part; parts that are zero in both are left out."""
    from optimus.sensitivity.time_breakdown import LABELS

    digits = 3 if max(plan.step_s, other.step_s) >= 1 else 5
    shown = [
        name for name in LABELS if any(round(planning.spent_s[name], digits) for planning in (plan, other))
    ]
    rows = [_row(LABELS[name], plan.spent_s[name], other.spent_s[name], digits) for name in shown]
    rows.append(_row("step", plan.step_s, other.step_s, digits))
    if plan.llm_alone_s is not None and other.llm_alone_s is not None:
        rows.append(_row("LLM alone", plan.llm_alone_s, other.llm_alone_s, digits))
    return align_columns(["seconds of the mean GPU", "plan", "as asked", "difference"], rows)


def _row(words: str, plan_s: float, other_s: float, digits: int) -> list[str]:
    return [words, f"{plan_s:.{digits}f}", f"{other_s:.{digits}f}", f"{other_s - plan_s:+.{digits}f}"]
