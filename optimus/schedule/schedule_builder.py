"""Builds schedules from kernels: graphs of the kernels of one op, and blocks of such graphs per device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimus.cost.kernel import Kernel
from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Communicator, Ints, Lane, OpKind, Schedule
from optimus.schedule.simulator import simulate_schedule

KERNEL_ROW = np.dtype(
    [
        ("duration_s", np.float64),
        ("bytes", np.int64),
        ("segment", np.int32),
        ("kind", np.int8),
        ("module", np.int8),
        ("lane", np.int8),
        ("communicator", np.int8),
    ]
)
NO_EDGES = np.zeros((0, 2), np.int64)
COMMUNICATOR_OF = {Lane.TP: Communicator.TP, Lane.DP: Communicator.DP, Lane.P2P: Communicator.PP}
REPEATED_COLUMNS = (
    "kind", "module", "chunk", "segment", "microbatch", "lane", "communicator", "bytes", "duration_s"
)  # fmt: skip
NO_MODULE = -1  # the last of a schedule's modules, "all"


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelGraph:
    """Kernels of one op as rows, with the dependencies among them.

    `entries` wait for earlier blocks; later blocks wait for `exits`.
    """

    rows: NDArray[Any]  # of dtype ROW
    edges: Ints  # pairs (row, row it waits for)
    entries: tuple[int, ...]
    exits: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)


def make_single_kernel_graph(
    kind: OpKind, lane: Lane, duration_s: float, *, segment: int = 0, size_bytes: float = 0
) -> KernelGraph:
    """Makes a graph of one row that belongs to no single module."""
    communicator = COMMUNICATOR_OF.get(lane, Communicator.NONE)
    rows = np.array(
        [(duration_s, round(size_bytes), segment, kind, NO_MODULE, lane, communicator)], KERNEL_ROW
    )
    return KernelGraph(rows=rows, edges=NO_EDGES, entries=(0,), exits=(0,))


class ScheduleBuilder:
    """Collects blocks and the waits between them.

    A device's program is its blocks in the order in which they were added, except that a
    block added `right_after` another (which was not itself added so) follows that one.
    """

    def __init__(self, modules: Sequence[str], num_devices: int, device_names: Sequence[str] = ()) -> None:
        self._modules = (*modules, "all")
        self._num_devices, self._device_names = num_devices, tuple(device_names)
        self._graphs: list[KernelGraph] = []
        self._numbers: dict[int, int] = {}  # id of a graph -> its number
        self._count = 0
        self._blocks: list[Ints] = []  # columns: graph, device, chunk, microbatch, position, doubled
        self._waits: list[Ints] = []  # columns: block, what it waits for

    def register(self, graph: KernelGraph) -> int:
        """Returns the number of a graph, for `add_many`."""
        number = self._numbers.get(id(graph))
        if number is None:
            number = self._numbers[id(graph)] = len(self._graphs)
            self._graphs.append(graph)
        return number

    def add(
        self,
        graph: KernelGraph,
        *,
        device: int,
        chunk: int = 0,
        microbatch: int = 0,
        after: Sequence[int] = (),
        right_after: int | None = None,
    ) -> int:
        """Appends a block to a device's program and returns its number."""
        position = 2 * self._count if right_after is None else 2 * right_after + 1
        row = (self.register(graph), device, chunk, microbatch, position)
        self._blocks.append(np.array(row, np.int64)[:, None])
        if after:
            self.wait(np.full(len(after), self._count), np.array(after))
        self._count += 1
        return self._count - 1

    def add_many(
        self,
        graphs: Ints,
        device: int,
        chunks: Ints,
        microbatches: Ints,
        *,
        right_after: Ints | None = None,
    ) -> Ints:
        """Appends blocks of registered graphs to a device's program and returns their numbers."""
        numbers = np.arange(self._count, self._count + len(graphs))
        columns = np.empty((5, len(graphs)), np.int64)
        columns[0], columns[1], columns[2], columns[3] = graphs, device, chunks, microbatches
        columns[4] = 2 * numbers if right_after is None else 2 * right_after + 1
        self._blocks.append(columns)
        self._count += len(graphs)
        return numbers

    def wait(self, blocks: Sequence[int] | Ints, sources: Sequence[int] | Ints) -> None:
        """Makes each block start only after the source at the same position has ended."""
        if len(blocks):
            self._waits.append(np.array((blocks, sources), np.int64))

    def build(self) -> Schedule:
        """Expands all blocks to rows."""
        blocks = np.concatenate(self._blocks, axis=1)
        order = np.argsort(blocks[4], kind="stable")
        graph_of, device, chunk, microbatch, _ = blocks[:, order]
        sizes = np.array([len(graph) for graph in self._graphs], np.int64)
        first_row = np.concatenate([[0], np.cumsum(sizes[graph_of])])
        total = int(first_row[-1])
        block_of = np.repeat(np.arange(self._count), sizes[graph_of])
        table_first = np.cumsum(sizes) - sizes
        table_row = table_first[graph_of[block_of]] + np.arange(total) - first_row[block_of]
        table = np.empty(int(sizes.sum()), KERNEL_ROW)
        for graph, first in zip(self._graphs, table_first, strict=True):
            table[first : first + len(graph)] = graph.rows
        rows = table[table_row]
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order))
        waits = number[np.concatenate([NO_EDGES.T, *self._waits], axis=1)].T
        edges = np.concatenate(
            [self._edges_inside(graph_of, first_row), self._edges_between(graph_of, first_row, waits)]
        )
        dep_offset, deps = edges_to_csr(edges, total)
        return Schedule(
            modules=self._modules,
            num_devices=self._num_devices,
            kind=rows["kind"].copy(),
            module=rows["module"] % len(self._modules),
            chunk=chunk[block_of].astype(np.int32),
            segment=rows["segment"].copy(),
            microbatch=microbatch[block_of].astype(np.int32),
            device=device[block_of].astype(np.int32),
            lane=rows["lane"].copy(),
            communicator=rows["communicator"].copy(),
            bytes=rows["bytes"].copy(),
            duration_s=rows["duration_s"].copy(),
            dep_offset=dep_offset,
            deps=deps,
            device_names=self._device_names,
        )

    def _edges_inside(self, graph_of: Ints, first_row: Ints) -> Ints:
        """Returns dependencies inside blocks, as pairs of rows."""
        parts = [NO_EDGES]
        for index, graph in enumerate(self._graphs):
            if len(graph.edges):
                starts = first_row[:-1][graph_of == index]
                parts.append((starts[:, None, None] + graph.edges[None, :, :]).reshape(-1, 2))
        return np.concatenate(parts)

    def _edges_between(self, graph_of: Ints, first_row: Ints, waits: Ints) -> Ints:
        """Returns dependencies between blocks: every entry of one waits for every exit of the other."""
        entries, entry_count, entry_first = _ragged([t.entries for t in self._graphs])
        exits, exit_count, exit_first = _ragged([t.exits for t in self._graphs])
        block, source = graph_of[waits[:, 0]], graph_of[waits[:, 1]]
        pairs = entry_count[block] * exit_count[source]
        wait = np.repeat(np.arange(len(waits)), pairs)
        nth = np.arange(len(wait)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
        entry = entries[entry_first[block[wait]] + nth // exit_count[source[wait]]]
        leave = exits[exit_first[source[wait]] + nth % exit_count[source[wait]]]
        rows = first_row[waits[wait]]
        return np.stack([rows[:, 0] + entry, rows[:, 1] + leave], axis=1)


def _ragged(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints, Ints]:
    """Returns lists of different lengths as values, lengths and offsets."""
    count = np.array([len(part) for part in lists], np.int64)
    values = np.array([value for part in lists for value in part], np.int64)
    return values, count, np.cumsum(count) - count


def edges_to_csr(edges: Ints, count: int) -> tuple[Ints, Ints]:
    """Returns edges (row, dep) as offsets and deps, rows ascending."""
    order = np.argsort(edges[:, 0], kind="stable")
    offset: Ints = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(edges[:, 0], minlength=count), out=offset[1:])
    return offset, edges[order, 1].astype(np.int32)


# ---------------------------------------------------------------------------- chunks

CHUNK_OP_KINDS = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedChunk:
    """Layers of one virtual stage, and the seconds of its ops."""

    layers: tuple[PricedLayer, ...]
    seconds: dict[OpKind, float]  # of a whole op, simulated alone

    @property
    def output_bytes(self) -> float:
        return self.layers[-1].output_bytes if self.layers else 0.0

    @property
    def saved_activation_bytes(self) -> float:
        """Activations of one microbatch."""
        return sum(layer.activation_bytes for layer in self.layers)


class ChunkPricer:
    """Prices chunks and builds their kernel graphs, each distinct one once."""

    def __init__(self, modules: Sequence[str], slowdown: float) -> None:
        self.modules = tuple(modules)
        self._slowdown = slowdown
        self._layer_seconds: dict[tuple[int, OpKind], float] = {}  # by id of kernels
        self._compute_seconds: dict[int, float] = {}  # by id of all kernels of a layer
        self._kernel_seconds: dict[tuple[tuple[Lane, float, tuple[int, ...]], ...], float] = {}
        self._graphs: dict[tuple[tuple[int, ...], OpKind], KernelGraph] = {}
        self._alive: list[object] = []  # keeps layers alive, so that their ids are not reused

    def price(self, layers: Sequence[PricedLayer]) -> PricedChunk:
        distinct = {id(layer): layer for layer in layers}
        counts = Counter(map(id, layers))
        seconds = {
            kind: sum(count * self.seconds_of(distinct[key], kind) for key, count in counts.items())
            for kind in CHUNK_OP_KINDS
        }
        return PricedChunk(layers=tuple(layers), seconds=seconds)

    def kernel_graph(self, chunk: PricedChunk, kind: OpKind) -> KernelGraph:
        """Returns the kernels of one op: layers in order forward, reversed backward."""
        layers = chunk.layers if kind == OpKind.FORWARD else chunk.layers[::-1]
        key = tuple(id(layer.kernels[kind]) for layer in layers), kind
        if key not in self._graphs:
            lists = [(layer.kernels[kind], self.modules.index(layer.module)) for layer in layers]
            self._graphs[key] = build_kernel_graph(lists, kind)
            self._alive.append(layers)
        return self._graphs[key]

    def seconds_of(self, layer: PricedLayer, kind: OpKind) -> float:
        """Returns the makespan of a layer's kernels simulated alone; an op runs its layers in a row."""
        key = id(layer.kernels[kind]), kind
        if key not in self._layer_seconds:
            kernels = layer.kernels[kind]
            content = tuple((kernel.lane, kernel.duration_s, kernel.after) for kernel in kernels)
            if content not in self._kernel_seconds:  # layouts that differ in dp or pp have the same kernels
                self._kernel_seconds[content] = self._simulate_alone(kernels, kind)
            self._layer_seconds[key] = self._kernel_seconds[content]
            self._alive.append(layer)
        return self._layer_seconds[key]

    def compute_s(self, layer: PricedLayer) -> float:
        """Returns the seconds of a layer's compute kernels, with the backward split or whole: the less."""
        key = id(layer.kernels)
        if key not in self._compute_seconds:
            by_kind = {
                kind: sum(kernel.duration_s for kernel in layer.kernels[kind] if kernel.lane == Lane.COMPUTE)
                for kind in CHUNK_OP_KINDS
            }
            split_s = by_kind[OpKind.INPUT_GRAD] + by_kind[OpKind.WEIGHT_GRAD]
            self._compute_seconds[key] = by_kind[OpKind.FORWARD] + min(by_kind[OpKind.BACKWARD], split_s)
            self._alive.append(layer)
        return self._compute_seconds[key]

    def _simulate_alone(self, kernels: Sequence[Kernel], kind: OpKind) -> float:
        if all(kernel.after == (place - 1,) for place, kernel in enumerate(kernels) if place):
            return sum(kernel.duration_s for kernel in kernels)  # one after another: nothing overlaps
        builder = ScheduleBuilder(self.modules, 1)
        builder.add(build_kernel_graph([(kernels, 0)], kind), device=0)
        return simulate_schedule(builder.build(), slowdown=self._slowdown).step_s


def build_kernel_graph(lists: Sequence[tuple[Sequence[Kernel], int]], kind: OpKind) -> KernelGraph:
    """Chains kernel lists, each with the module it belongs to, into one graph."""
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
        return make_single_kernel_graph(kind, Lane.COMPUTE, 0.0)
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
    return KernelGraph(
        rows=np.array(rows, KERNEL_ROW),
        edges=np.array(edges, np.int64).reshape(-1, 2),
        entries=entries,
        exits=exits,
    )


def repeat_for_replicas(schedule: Schedule, replicas: int) -> Schedule:
    """Returns the schedule of several replicas, one after another, each with devices of its own.

    They meet where they exchange rows of dealt images, in gathers and reduces, and at the optimizer.
    """
    count, devices, kind = len(schedule), schedule.num_devices, schedule.kind
    meets = np.isin(schedule.communicator, (Communicator.DEAL, Communicator.DP)) & (kind != OpKind.WAIT)
    meets |= kind == OpKind.OPTIMIZER
    meeting = np.full(count, -1) if schedule.meeting is None else schedule.meeting.astype(np.int64)
    new = np.flatnonzero(meets & (meeting < 0))
    meeting[new] = 1 + meeting.max(initial=-1) + np.arange(len(new))
    shift = np.where(meets | (meeting < 0), 0, 1 + meeting.max(initial=-1))

    def tile(column: Any, step: Any = 0) -> Any:
        return np.concatenate([column + replica * step for replica in range(replicas)])

    return replace(
        schedule,
        num_devices=replicas * devices,
        **{name: tile(getattr(schedule, name)) for name in REPEATED_COLUMNS},
        device=tile(schedule.device, devices),
        dep_offset=np.append(
            tile(schedule.dep_offset[:-1], len(schedule.deps)), replicas * len(schedule.deps)
        ),
        deps=tile(schedule.deps, count),
        meeting=tile(meeting, shift),
        label=None if schedule.label is None else tile(schedule.label),
        device_names=(),
    )
