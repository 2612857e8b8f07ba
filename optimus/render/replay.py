"""A replayed plan file as text for people and as an object for tools."""

from __future__ import annotations

from dataclasses import asdict

from optimus.planner.replaying import Replayed
from optimus.render.text import columns, gigabytes, seconds
from optimus.schedule.bubbles import CAUSES

SCHEMA = "optimus.simulate/1"


def replay_json(replayed: Replayed) -> dict[str, object]:
    """The object of `optimus simulate PLAN --json`."""
    plan, floor = replayed.plan, replayed.floor_s
    step = replayed.timeline.step_s
    return {
        "schema": SCHEMA,
        "job": plan.name,
        "gpus": plan.ranks.world,
        "layout": {name: asdict(module.layout) for name, module in plan.modules.items()},
        "floor_s": floor,
        "systems": {
            plan.strategy: {
                "step_s": step,
                "claimed_step_s": plan.claims.step_s,
                "step_over_floor": step / floor if floor else None,
                "peak_memory_bytes": max(held.peak for held in plan.memory),
                "mfu": plan.notes.get("mfu"),
                "bubbles_s": asdict(replayed.bubbles),
                "tasks": len(replayed.schedule),
            }
        },
    }


def replay_text(replayed: Replayed) -> list[str]:
    """Step, memory and bubbles of the plan."""
    plan, step, floor = replayed.plan, replayed.timeline.step_s, replayed.floor_s
    layouts = "   ".join(f"{name} {module.layout}" for name, module in plan.modules.items())
    lines = [f"{plan.name}   {plan.ranks.world} GPUs   {layouts}", ""]
    header = ["system", "step s", "/floor", "peak GB", *(f"{cause} %" for cause in CAUSES)]
    row = [
        plan.strategy,
        seconds(step),
        f"{step / floor:.3f}" if floor else "-",
        gigabytes(max(held.peak for held in plan.memory)),
        *(f"{100 * getattr(replayed.bubbles, cause) / step:.1f}" for cause in CAUSES),
    ]
    lines += columns(header, [row])
    lines += ["", f"  claimed {plan.claims.step_s:.9f} s, replayed {step:.9f} s"]
    return lines
