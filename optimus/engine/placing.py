"""Says at which line of a program each phase of a chunk runs.

A plan cuts an op into phases by the kernels of its cost model; a chunk may be cut more coarsely, down to one
piece. A piece of a forward runs at the last line that it covers, when everything gathered for it is there; a
piece of a backward at the first, so that what is reduced after any of these lines is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optimus.errors import UserError
from optimus.ir.kernel_names import KernelName
from optimus.ir.op import COLLECTIVE_PHASES, OpKind
from optimus.ir.plan import Phase as PlannedPhase
from optimus.ir.plan import Template
from optimus.models.chunk import ALL_LAYERS, ChunkPhase

SPARED = (
    KernelName.SCATTER2
)  # the last sum of a layer that is made again: plans count it, and no gradient needs it


def place_phases(what: str, template: Template, phases: Sequence[ChunkPhase]) -> list[list[ChunkPhase]]:
    """For every line of an op, the phases of the chunk to run there."""
    forward = all(phase.kind in (OpKind.FORWARD, *COLLECTIVE_PHASES) for phase in phases)
    covered: list[list[int]] = [[] for _ in phases]
    found_at: dict[int, int] = {}  # the phase that stands for a line of the template
    for place, planned in enumerate(template):
        number = _phase_for(template, place, phases, found_at)
        if number is not None:
            found_at[place] = number
            covered[number].append(place)
        elif planned.name == SPARED and not forward:
            continue
        elif planned.kind in COLLECTIVE_PHASES or planned.duration_s > 0:
            raise UserError(
                field=f"{what} layer {planned.layer} {planned.name}",
                problem="is in the plan, and the chunk that was given has nothing for it",
                hint="give the modules that the plan was made for, or plan again for these",
            )
    found: list[list[ChunkPhase]] = [[] for _ in template]
    at = 0
    for phase, places in zip(phases, covered, strict=True):
        wanted = (places[-1] if forward else places[0]) if places else at
        if wanted < at:
            raise UserError(
                field=f"{what} layer {phase.layer} {'+'.join(phase.kernels)}",
                problem="stands before what the chunk runs first",
                hint="give the modules that the plan was made for, or plan again for these",
            )
        at = wanted
        found[at].append(phase)
    return found


def _phase_for(
    template: Template, place: int, phases: Sequence[ChunkPhase], found_at: Mapping[int, int]
) -> int | None:
    """The number of the phase that stands for a line; a wait is found by its launch."""
    planned = template[place]
    if planned.kind == OpKind.WAIT and planned.after[0] in found_at:
        launch = found_at[planned.after[0]]
        if phases[launch].kind != OpKind.LAUNCH:
            return launch  # a chunk that is one piece
        name = phases[launch].kernels
        rest = range(launch + 1, len(phases))
        return next(at for at in rest if phases[at].kind == OpKind.WAIT and phases[at].kernels == name)
    return next((at for at, phase in enumerate(phases) if _stands_for(phase, planned)), None)


def _stands_for(phase: ChunkPhase, planned: PlannedPhase) -> bool:
    if phase.layer == ALL_LAYERS:
        return True
    if phase.layer != planned.layer or (phase.kind == OpKind.RECOMPUTE) != (planned.kind == OpKind.RECOMPUTE):
        return False
    if planned.kind in COLLECTIVE_PHASES or phase.kind in COLLECTIVE_PHASES:
        return phase.kind == planned.kind and planned.name in phase.kernels
    own = planned.name, planned.name.split(".")[0]
    return not phase.kernels or any(name in phase.kernels for name in own)
