"""Finds where a rank's program waits for, frees and begins buckets that it does not hold for a whole step.

Parameters are waited for before the first phase of an op that reads them and freed behind the last. Gradients
of a microbatch begin with the first phase of its backward, when those of the second layer before are reduced:
those of at most two layers are in memory, and of buckets of the whole stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from optimus.engine.buckets import RankBuckets
from optimus.errors import UserError
from optimus.ir.op import COMPUTE_OPS, OpKind
from optimus.ir.plan import WHOLE_STAGE, Bucket, Plan, Span
from optimus.models.phase_order import ALL_LAYERS, ChunkPhase

Run = Callable[[], None]
PlacedPhases = Callable[[str, OpKind, int, int], list[list[ChunkPhase]]]
READS_PARAMETERS = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRAD)


class Resharding:
    """Holds the calls to buckets before and behind lines of a program.

    Lines in `waits_for_gather` wait for replicas. `placed` gives the phases that run at every line of an op.
    """

    def __init__(self, plan: Plan, device: int, buckets: RankBuckets, placed: PlacedPhases) -> None:
        self._plan, self._device, self._buckets, self._placed = plan, device, buckets, placed
        self.before: dict[int, list[Run]] = defaultdict(list)
        self.behind: dict[int, list[Run]] = defaultdict(list)
        self.waits_for_gather: set[int] = set()
        self._first: dict[tuple[str, int, int, OpKind], int] = {}  # lines that read, by bucket, turn and op
        self._last: dict[tuple[str, int, int, OpKind], int] = {}
        self._begins: dict[tuple[str, int, int], int] = {}  # lines that add gradients
        self._known: dict[tuple[str, OpKind, int, int], tuple[int, ...]] = {}
        self._reduces: list[tuple[str, int, int]] = []  # in order
        if any(self._is_moved(bucket) for name in plan.modules for bucket in self._of_stage(name)):
            self._read_program()
            self._place_parameters()
            self._place_gradients()

    def _of_stage(self, name: str) -> Sequence[Bucket]:
        return self._plan.modules[name].buckets[self._plan.ranks.stage_of(name, self._device)]

    def _is_moved(self, bucket: Bucket) -> bool:
        return max(bucket.gathered_per, bucket.reduced_per) > Span.STEP

    def _read_program(self) -> None:
        names = self._plan.names
        rows = self._plan.programs[self._device].rows.tolist()
        for line, (number, code, chunk, microbatch, place) in enumerate(rows):
            name, kind = names[number], OpKind(code)
            if kind == OpKind.REDUCE_GRAD and self._of_stage(name)[place].reduced_per == Span.MICROBATCH:
                self._reduces.append((name, place, microbatch))  # its turn
            elif kind in COMPUTE_OPS:
                layers = {phase.layer for phase in self._placed(name, kind, chunk, microbatch)[place]}
                places = {p for layer in layers for p in self._places_of(name, kind, chunk, layer)}
                turn = self._plan.modules[name].turn_of(microbatch)
                for bucket in sorted(places):
                    if kind in READS_PARAMETERS:
                        self._first.setdefault((name, bucket, turn, kind), line)
                        self._last[name, bucket, turn, kind] = line
                    if kind != OpKind.FORWARD:
                        self._begins.setdefault((name, bucket, turn), line)

    def _places_of(self, name: str, kind: OpKind, chunk: int, layer: int) -> tuple[int, ...]:
        """Returns the places of moved buckets that an op reads, or adds to, in a layer of a chunk."""
        key = name, kind, chunk, layer
        if key not in self._known:
            moved = [(p, b) for p, b in enumerate(self._of_stage(name)) if self._is_moved(b)]
            mine = [(p, b) for p, b in moved if b.chunk in (chunk, WHOLE_STAGE)]
            if mine and layer == ALL_LAYERS:
                raise _runs_as_one(name)
            stage = self._plan.ranks.stage_of(name, self._device)
            template = self._plan.template_of(name, kind, stage, chunk)
            # A backward passes frozen layers below all trained ones without reading them.
            reads = layer in {phase.layer for phase in template}
            self._known[key] = tuple(
                place
                for place, bucket in mine
                if reads and (bucket.chunk == WHOLE_STAGE or bucket.first_layer <= layer < bucket.end_layer)
            )
        return self._known[key]

    def _place_parameters(self) -> None:
        for (name, place, turn, kind), line in self._first.items():
            span, forward = self._of_stage(name)[place].gathered_per, kind == OpKind.FORWARD
            kept = span == Span.MICROBATCH and not forward  # gathered for the forward
            if span == Span.STEP:
                continue
            for bucket in self._buckets.at(name, place):
                if not kept:
                    self.before[line].append(bucket.wait_gathered)
                    self.waits_for_gather.add(line)
                if span == Span.OP or not forward or not self._has_backward(name, place, turn):
                    last = self._last[name, place, turn, kind]
                    self.behind[last].append(bucket.free_parameters)

    def _has_backward(self, name: str, place: int, turn: int) -> bool:
        kinds = READS_PARAMETERS[1:]
        return any((name, place, turn, kind) in self._first for kind in kinds)

    def _place_gradients(self) -> None:
        layers = list[tuple[str, int]]()  # buckets of layers that were reduced, in order
        for name, place, turn in self._reduces:
            line, earlier = self._begins[name, place, turn], list[tuple[str, int]]()
            if self._of_stage(name)[place].chunk != WHOLE_STAGE:
                earlier = layers[-2:-1]
                layers.append((name, place))
            for key in dict.fromkeys([*earlier, (name, place)]):
                self.before[line] += [bucket.wait_reduced for bucket in self._buckets.at(*key)]
            self.before[line] += [bucket.begin_gradients for bucket in self._buckets.at(name, place)]


def _runs_as_one(name: str) -> UserError:
    # A phase that reads all layers would need all of them gathered, which the plan does not count.
    return UserError(
        field=f"plan.modules.{name}.buckets",
        problem="gather its layers one after another, and it runs as one piece",
        hint="plan with another system than fsdp, or use layers of the engine",
    )
