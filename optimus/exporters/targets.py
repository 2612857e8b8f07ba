"""Lists the trainers that a plan can be exported to."""

from __future__ import annotations

from collections.abc import Callable

from optimus.errors import UserError, nearest
from optimus.exporters import bridge, megatron, torchtitan
from optimus.exporters.exported_plan import ExportedPlan
from optimus.exporters.plan_facts import PlanFacts
from optimus.ir.plan import Plan
from optimus.verify.validator import require_proven_plan

TARGETS: dict[str, Callable[[PlanFacts], ExportedPlan]] = {
    "megatron": megatron.export_megatron,
    "bridge": bridge.export_bridge,
    "torchtitan": torchtitan.export_torchtitan,
}
SYSTEMS = {  # that each target can run
    "megatron": megatron.SYSTEMS,
    "bridge": bridge.SYSTEMS,
    "torchtitan": torchtitan.SYSTEMS,
}


def export_plan(plan: Plan, target: str, *, file: str | None = None) -> ExportedPlan:
    """Exports a plan that every rule proves; errors call the plan `file`."""
    require_known_target(target)
    exported = TARGETS[target](PlanFacts(plan=plan, file=file))
    require_proven_plan(plan, file=file)
    return exported


def require_known_target(name: str) -> None:
    """Refuses an unknown target."""
    if name not in TARGETS:
        raise UserError(field="--to", value=name, problem="is not a target", hint=nearest(name, TARGETS))
