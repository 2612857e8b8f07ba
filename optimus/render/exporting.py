"""An exported plan as text for people and as an object for tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from optimus.exporters.registry import SYSTEMS
from optimus.exporters.target import AS_WRITTEN, Export, Price, price_words
from optimus.render.text import wrap

SCHEMA = "optimus.export/1"


def export_json(export: Export, files: Sequence[Path]) -> dict[str, object]:
    """The object of `optimus export --json`."""
    return {
        "schema": SCHEMA,
        "plan": export.plan.name,
        "target": export.target,
        "checked_against": export.version,
        "files": [str(path) for path in files],
        "step_s": export.plan.claims.step_s,
        "not_supported": [asdict(each) for each in export.not_supported],
        "as_written": _price(export.as_written),
        "best_there": _price(export.best_there),
    }


def export_text(export: Export, files: Sequence[Path]) -> list[str]:
    """Files written, what the target cannot run, and what it costs."""
    plan = export.plan
    layouts = "   ".join(f"{name} {module.layout}" for name, module in plan.modules.items())
    lines = [f"{plan.name}   {plan.ranks.world} GPUs   {layouts}   for {export.version}"]
    lines += wrap("wrote", " ".join(map(str, files)))
    for each in export.not_supported:
        lines += wrap("cannot run", f"{each.what}: {each.why}")
    lines += wrap("as written", price_words(plan, export.as_written, AS_WRITTEN, about=True))
    best = price_words(plan, export.best_there, SYSTEMS[export.target])
    if export.best_there is not None and export.best_there.system not in AS_WRITTEN:
        best += "; not these files: optimus simulate shows its layout"
    return [*lines, *wrap("best there", best)]


def _price(price: Price | None) -> dict[str, object] | None:
    return None if price is None else asdict(price)
