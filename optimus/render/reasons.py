"""The reason against a layout as text for people and as an object for tools."""

from __future__ import annotations

from dataclasses import asdict

from optimus.render.text import columns, gigabytes, seconds, wrap
from optimus.sensitivity.time_breakdown import WORDS
from optimus.sensitivity.why_not import Planning, Reason

SCHEMA = "optimus.why/1"


def reason_json(reason: Reason) -> dict[str, object]:
    """The object of `optimus why --json`."""
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


def _planning_json(made: Planning) -> dict[str, object]:
    return {
        "step_s": made.step_s,
        "layouts": {name: asdict(layout) for name, layout in made.layouts.items()},
        "microbatch_sequences": made.microbatch_sequences,
        "recompute": dict(made.recompute),
        "peak_memory_bytes": made.peak_bytes,
        "spent_s": dict(made.spent_s),
        "llm_alone_s": made.llm_alone_s,
        "encoders_not_hidden_s": made.not_hidden_s,
    }


def reason_text(reason: Reason) -> list[str]:
    """The sentence, then for a layout that fits where its seconds and the plan's go."""
    lines = wrap("asked", " ".join(reason.asked))
    lines += wrap("reason", reason.reason)
    if reason.hint:
        lines += wrap("hint", reason.hint)
    if reason.plan is None or reason.other is None:
        layouts = ", ".join(f"{name} {layout}" for name, layout in reason.plan_layouts.items())
        return [*lines, *wrap("plan", f"{layouts}; {seconds(reason.plan_step_s)} s")]
    lines += wrap("plan", _how(reason.plan)) + wrap("as asked", _how(reason.other))
    return [*lines, "", *_table(reason, reason.plan, reason.other)]


def _how(made: Planning) -> str:
    modules = [f"{name} {layout} recompute {made.recompute[name]}" for name, layout in made.layouts.items()]
    size = f"microbatch {made.microbatch_sequences:.3g}, peak {gigabytes(made.peak_bytes)} GB"
    return "; ".join([*modules, size])


def _table(reason: Reason, plan: Planning, other: Planning) -> list[str]:
    """Seconds of the mean GPU; parts of which neither has any are left out."""
    digits = 3 if max(plan.step_s, other.step_s) >= 1 else 5
    shown = [name for name in WORDS if any(round(made.spent_s[name], digits) for made in (plan, other))]
    rows = [_row(WORDS[name], plan.spent_s[name], other.spent_s[name], digits) for name in shown]
    rows.append(_row("step", plan.step_s, other.step_s, digits))
    if plan.llm_alone_s is not None and other.llm_alone_s is not None:
        rows.append(_row("LLM alone", plan.llm_alone_s, other.llm_alone_s, digits))
    return columns(["seconds of the mean GPU", "plan", "as asked", "difference"], rows)


def _row(words: str, plan_s: float, other_s: float, digits: int) -> list[str]:
    return [words, f"{plan_s:.{digits}f}", f"{other_s:.{digits}f}", f"{other_s - plan_s:+.{digits}f}"]
