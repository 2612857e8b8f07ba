"""Expands the kernels of a chunk's op into phases that a rank runs: compute, launches and waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optimus.cost.kernel import Kernel
from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Communicator, KernelName, Lane, OpKind
from optimus.ir.plan import Phase, Template

SECONDS_DIGITS = 12  # durations are whole picoseconds, the same on every machine


def expand_op_into_phases(
    layers: Sequence[PricedLayer],
    kind: OpKind,
    *,
    first: Sequence[Kernel] = (),
    last: Sequence[Kernel] = (),
) -> Template:
    """Builds the template of one op of a chunk: layers in order forward, reversed backward.

    `first` and `last` are kernels around the layers. A collective is launched at the position of its kernel
    and waited for before the first compute that needs it, at the latest at the end of the op: the next op
    finds all results complete.
    """
    numbers = range(len(layers)) if kind == OpKind.FORWARD else range(len(layers))[::-1]
    outer = (numbers[0], numbers[-1]) if layers else (0, 0)
    parts = [(first, outer[0])]
    parts += [(layers[number].kernels[kind], number) for number in numbers]
    parts += [(last, outer[1])]
    phases = _Phases()
    for kernels, layer in parts:
        phases.add(kernels, layer)
    return phases.finished()


# Templates of a chunk without layers: its ops pass tensors on and compute no weight gradient.
PASS_THROUGH_TEMPLATES: dict[OpKind, Template] = {
    kind: (Phase(name="pass", kind=OpKind.FORWARD if kind == OpKind.FORWARD else OpKind.INPUT_GRAD, layer=0),)
    for kind in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)
}


class _Phases:
    """Collects kernels as phases."""

    def __init__(self) -> None:
        self._phases: list[Phase] = []
        self._waits: dict[int, int] = {}  # phase of a launch -> phase of its wait
        self._ends: tuple[int, ...] = ()  # phases that the next list waits for

    def add(self, kernels: Sequence[Kernel], layer: int) -> None:
        """Appends one list of kernels."""
        if not kernels:
            return
        places: list[int] = []
        for kernel in kernels:
            after = tuple(places[other] for other in kernel.after) if kernel.after else self._ends
            compute = kernel.lane == Lane.COMPUTE
            if compute or any(self._sorts_rows(kernel, place) for place in after):
                after = tuple(self._waited(place, layer) for place in after)
            places.append(len(self._phases))
            self._phases.append(
                Phase(
                    name=kernel.name,
                    kind=kernel.kind if compute else OpKind.LAUNCH,
                    layer=layer,
                    duration_s=round(kernel.duration_s, SECONDS_DIGITS),
                    bytes=round(kernel.size_bytes),
                    lane=kernel.lane,
                    communicator=kernel.communicator,
                    after=tuple(sorted(set(after))),
                )
            )
        needed = {other for kernel in kernels for other in kernel.after}
        self._ends = tuple(place for index, place in enumerate(places) if index not in needed)

    def finished(self) -> Template:
        """Returns all phases, with a wait for every launch."""
        for place in list(self._launches()):
            self._waited(place, self._phases[place].layer)
        return tuple(self._phases)

    def _sorts_rows(self, kernel: Kernel, place: int) -> bool:
        """Tells whether encoder rows are sorted between two collectives: by replica, tp rank and cp rank."""
        return all(name.startswith(f"{KernelName.SEAM}.") for name in (kernel.name, self._phases[place].name))

    def _launches(self) -> Iterator[int]:
        return (place for place, phase in enumerate(self._phases) if phase.kind == OpKind.LAUNCH)

    def _waited(self, place: int, layer: int) -> int:
        """Returns the phase after which `place` has ended, as seen from the compute lane."""
        launch = self._phases[place]
        if launch.kind != OpKind.LAUNCH:
            return place
        if place not in self._waits:
            for other in launch.after:
                self._waited(other, layer)  # collectives in a row are waited for together
            self._waits[place] = len(self._phases)
            self._phases.append(
                Phase(
                    name=launch.name,
                    kind=OpKind.WAIT,
                    layer=layer,
                    communicator=launch.communicator,
                    after=(place,),
                )
            )
        return self._waits[place]


def make_collective_kernel(
    name: str, lane: Lane, communicator: Communicator, seconds: float, size_bytes: float
) -> Kernel:
    """Makes a collective that belongs to no layer, such as the seam's."""
    return Kernel(
        name=name,
        kind=OpKind.FORWARD,
        lane=lane,
        duration_s=seconds,
        size_bytes=size_bytes,
        communicator=communicator,
    )
