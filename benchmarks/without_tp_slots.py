"""A plan without TP slots: what encoders do between a launch of the LLM and its wait comes after it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from optimus.ir.op import Communicator, Lane, OpKind
from optimus.ir.plan import Phase, Plan, Program
from optimus.ir.ranks import LLM
from optimus.planner.filled_plan import FilledPlan
from optimus.planner.systems.colocation_candidate import ColocationCandidate
from optimus.schedule.fill import FillResult


class SlotlessCandidate(ColocationCandidate):
    """Arranged as if a rank computed while a collective of the LLM is on its way: encoders go around it."""

    @cached_property
    def header(self) -> Plan:
        header = self._scheduled.header(strategy="optimus")
        templates = {
            name: tuple(map(_blocking, phases)) if name.startswith(f"{LLM}.") else phases
            for name, phases in header.templates.items()
        }
        return replace(header, templates=templates)

    def lowered(self, arranged: FillResult) -> FilledPlan:
        return remove_tp_slots(super().lowered(arranged).plan)


def _blocking(phase: Phase) -> Phase:
    """A collective as compute of the same length."""
    if phase.kind not in (OpKind.LAUNCH, OpKind.WAIT):
        return phase
    return replace(phase, kind=OpKind.FORWARD, lane=Lane.COMPUTE, communicator=Communicator.NONE)


def remove_tp_slots(plan: Plan) -> FilledPlan:
    """Every device keeps the order of each module's own phases, so that sums are made in the same order."""
    orders = [_waited(plan, device, program) for device, program in enumerate(plan.programs)]
    fixed = [memory.fixed for memory in plan.memory]
    return FilledPlan(header=plan, orders=orders, fixed=fixed, estimate_s=plan.claims.estimate_s)


def _waited(plan: Plan, device: int, program: Program) -> Program:
    """The phases of a device, those of encoders not while a collective of the LLM is on its way.

    Nor between it and the compute whose result it takes, behind which it is launched at once.
    """
    found: list[list[int]] = []
    held: list[list[int]] = []
    on_their_way, launches = 0, False
    llm, stage = plan.names.index(LLM), plan.ranks.stage_of(LLM, device)
    for row in program.rows[program.kind <= OpKind.WEIGHT_GRAD].tolist():
        module, kind, chunk, _, place = row
        if module < llm and (on_their_way or launches):
            held.append(row)
            continue
        found.append(row)
        if module == llm:
            phases = plan.template_of(LLM, OpKind(kind), stage, chunk)
            phase = phases[place].kind
            on_their_way += (phase == OpKind.LAUNCH) - (phase == OpKind.WAIT)
            launches = place + 1 < len(phases) and phases[place + 1].kind == OpKind.LAUNCH
        if not (on_their_way or launches):
            found += held
            held = []
    assert not held, "every launch is waited for"
    return Program.of(found)
