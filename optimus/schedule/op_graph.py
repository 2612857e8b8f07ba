"""One op per row: the graph of an op order, timed for any cut without being built again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from optimus.cost.assumptions import Assumptions
from optimus.ir.op import Floats, Ints, OpKind, Schedule
from optimus.schedule.chunk_templates import KINDS
from optimus.schedule.dp_traffic import EXPOSED, HIDDEN, Exposure, ParameterTraffic


@dataclass(frozen=True, kw_only=True, eq=False)
class CutSeconds:
    """Everything a cut decides about a graph: seconds of ops, sends and traffic of every virtual stage."""

    ops: dict[OpKind, Floats]
    sends: Floats
    traffic: list[ParameterTraffic]


class OpGraph:
    """A schedule of whole ops whose rows know which number of a cut they take."""

    def __init__(self, schedule: Schedule, stages: int, assumptions: Assumptions) -> None:
        self._schedule, self._stages, self._assumptions = schedule, stages, assumptions
        virtual = schedule.chunk.astype(np.int64) * stages + schedule.device

        def rows(kind: OpKind, segment: int | None = None) -> tuple[Ints, Ints]:
            wanted = schedule.kind == kind
            if segment is not None:
                wanted &= schedule.segment == segment
            found = np.flatnonzero(wanted)
            return found, virtual[found]

        self._ops = {kind: rows(kind) for kind in KINDS}
        self._sends = {kind: rows(kind) for kind in (OpKind.SEND_F, OpKind.SEND_B)}
        self._hidden = {kind: rows(kind, HIDDEN) for kind in (OpKind.UNSHARD, OpKind.REDUCE_GRAD)}
        self._exposed = {kind: rows(kind, EXPOSED) for kind in (OpKind.UNSHARD, OpKind.REDUCE_GRAD)}
        self._finish = rows(OpKind.OPTIMIZER)

    def timed(self, cut: CutSeconds) -> Schedule:
        """The schedule with the durations of a cut."""
        duration = np.empty(len(self._schedule))
        for kind, (rows, virtual) in self._ops.items():
            duration[rows] = cut.ops[kind][virtual]
        rows, virtual = self._sends[OpKind.SEND_F]
        duration[rows] = cut.sends[virtual]
        rows, virtual = self._sends[OpKind.SEND_B]
        duration[rows] = cut.sends[virtual - 1]
        stages = self._stages
        by_stage = [cut.traffic[stage::stages] for stage in range(stages)]
        exposures = [Exposure(chunks=chunks, assumptions=self._assumptions) for chunks in by_stage]
        for kind in (OpKind.UNSHARD, OpKind.REDUCE_GRAD):
            name = f"{kind.word}_s"
            rows, virtual = self._hidden[kind]
            duration[rows] = [exposures[v % stages].hidden(name, v // stages) for v in virtual.tolist()]
            rows, virtual = self._exposed[kind]
            duration[rows] = [exposures[v % stages].exposed(name) for v in virtual.tolist()]
        rows, virtual = self._finish
        duration[rows] = [sum(part.update_s for part in by_stage[v % stages]) for v in virtual.tolist()]
        return replace(self._schedule, duration_s=duration)
