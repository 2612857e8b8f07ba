"""Says at which line of a program each phase of a chunk runs.

A plan cuts an op into phases by the kernels of its cost model; a chunk may be cut more coarsely, down to one
piece. A piece of a forward runs at the last line that it covers, when everything gathered for it is there; a
piece of a backward at the first, so that what is reduced after any of these lines is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from optimus.errors import UserError
from optimus.models.chunk import ANY, Phase
from optimus.program.op import Kind
from optimus.program.plan import Phase as PlannedPhase
from optimus.program.plan import Template


def place_phases(what: str, template: Template, phases: Sequence[Phase]) -> list[list[Phase]]:
    """For every line of an op, the phases of the chunk to run there."""
    forward = all(phase.kind == Kind.F for phase in phases)
    covered: list[list[int]] = [[] for _ in phases]
    for place, planned in enumerate(template):
        number = next((at for at, phase in enumerate(phases) if _stands_for(phase, planned)), None)
        if number is not None:
            covered[number].append(place)
        elif planned.kind in (Kind.LAUNCH, Kind.WAIT) or planned.duration_s > 0:
            raise UserError(
                field=f"{what} layer {planned.layer} {planned.name}",
                problem="is in the plan, and the chunk that was given has nothing for it",
                hint="give the modules that the plan was made for, or plan again for these",
            )
    found: list[list[Phase]] = [[] for _ in template]
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


def _stands_for(phase: Phase, planned: PlannedPhase) -> bool:
    if phase.layer == ANY:
        return True
    if phase.layer != planned.layer or (phase.kind == Kind.R) != (planned.kind == Kind.R):
        return False
    communicates = planned.kind in (Kind.LAUNCH, Kind.WAIT)
    if communicates != (phase.kind in (Kind.LAUNCH, Kind.WAIT)):
        return False
    return not phase.kernels or planned.name.split(".")[0] in phase.kernels
