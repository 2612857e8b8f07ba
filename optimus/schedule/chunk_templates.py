"""Chunks: the layers of one virtual stage, as templates of rows for every kind of op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimus.cost.kernel import Kernel
from optimus.cost.module import PricedLayer
from optimus.ir.op import Lane, OpKind
from optimus.schedule.build import ROW, Builder, Template, single
from optimus.schedule.simulate import evaluate

KINDS = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """What one virtual stage runs and holds."""

    layers: tuple[PricedLayer, ...]
    seconds: dict[OpKind, float]  # of a whole op, played alone

    @property
    def output_bytes(self) -> float:
        return self.layers[-1].output_bytes if self.layers else 0.0

    @property
    def saved_activation_bytes(self) -> float:
        """Activations of one microbatch."""
        return sum(layer.activation_bytes for layer in self.layers)


class Chunks:
    """Makes chunks and their templates, each distinct one once."""

    def __init__(self, modules: Sequence[str], slowdown: float) -> None:
        self.modules = tuple(modules)
        self._slowdown = slowdown
        self._layer_seconds: dict[tuple[int, OpKind], float] = {}
        self._templates: dict[tuple[tuple[int, ...], OpKind], Template] = {}
        self._alive: list[object] = []  # keeps layers alive, so that their ids stay theirs

    def make(self, layers: Sequence[PricedLayer]) -> Chunk:
        seconds = {kind: sum(self._seconds_of(layer, kind) for layer in layers) for kind in KINDS}
        return Chunk(layers=tuple(layers), seconds=seconds)

    def template(self, chunk: Chunk, kind: OpKind) -> Template:
        """The rows of one op: layers in order forward, reversed backward."""
        layers = chunk.layers if kind == OpKind.FORWARD else chunk.layers[::-1]
        key = tuple(id(layer.kernels[kind]) for layer in layers), kind
        if key not in self._templates:
            lists = [(layer.kernels[kind], self.modules.index(layer.module)) for layer in layers]
            self._templates[key] = concatenate(lists, kind)
            self._alive.append(layers)
        return self._templates[key]

    def _seconds_of(self, layer: PricedLayer, kind: OpKind) -> float:
        """Makespan of a layer's kernels played alone; a chunk's op is its layers one after another."""
        key = id(layer.kernels[kind]), kind
        if key not in self._layer_seconds:
            builder = Builder(self.modules, 1)
            template = concatenate([(layer.kernels[kind], 0)], kind)
            builder.add(template, device=0)
            self._layer_seconds[key] = evaluate(builder.build(), slowdown=self._slowdown).step_s
            self._alive.append(layer)
        return self._layer_seconds[key]


def concatenate(lists: Sequence[tuple[Sequence[Kernel], int]], kind: OpKind) -> Template:
    """Kernel lists (with the module each belongs to) one after another as one template."""
    kernels: list[Kernel] = []
    owners: list[int] = []
    edges: list[tuple[int, int]] = []
    entries: tuple[int, ...] = ()
    exits: tuple[int, ...] = ()
    for part, module in lists:
        offset, waited = len(kernels), set[int]()
        for place, kernel in enumerate(part):
            waits = tuple(offset + other for other in kernel.after) or exits
            edges += [(offset + place, other) for other in waits]
            waited.update(waits)
            if not kernel.after and offset == 0:
                entries += (place,)
        if part:
            exits = tuple(row for row in range(offset, offset + len(part)) if row not in waited)
        kernels += part
        owners += [module] * len(part)
    if not kernels:
        return single(kind, Lane.COMPUTE, 0.0)
    rows = [
        (
            kernel.duration_s,
            round(kernel.size_bytes),
            place,
            kernel.kind,
            owner,
            kernel.lane,
            kernel.communicator,
        )
        for place, (kernel, owner) in enumerate(zip(kernels, owners, strict=True))
    ]
    return Template(
        rows=np.array(rows, ROW),
        edges=np.array(edges, np.int64).reshape(-1, 2),
        entries=entries,
        exits=exits,
    )
