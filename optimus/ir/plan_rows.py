"""The rows of a plan file's tables: how phases, chunks, buckets and memory are written and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optimus.errors import nearest
from optimus.ir.op import COLLECTIVE_PHASES, COMPUTE_OPS, COMPUTE_PHASES, Communicator, Lane, OpKind
from optimus.ir.plan import Bucket, Bytes, ClassMemory, Phase, PlannedChunk, Template
from optimus.job.nodes import Node
from optimus.job.typed import read

Row = list[Any]
PHASE_KINDS = (*COMPUTE_PHASES, *COLLECTIVE_PHASES)

PHASE = ["name", "kind", "layer", "duration_s", "bytes", "lane", "communicator", "after"]
CHUNK = ["templates", "layers", "kept_bytes", "made_again_bytes", "output_bytes", "send_s"]
BUCKET = ["chunk", "first_layer", "end_layer", "gather_s", "gather_bytes", "reduce_s", "reduce_bytes"]
BUCKET += ["lane", "gates"]
ALIVE = ["llm_activations", "encoder_activations", "seam"]  # columns of memory after the fixed components


# ---------------------------------------------------------------------------- phases


def template_rows(template: Template) -> list[Row]:
    """One row per phase."""
    return [
        [
            phase.name,
            phase.kind.word,
            int(phase.layer),
            float(phase.duration_s),
            int(phase.bytes),
            phase.lane.name.lower(),
            phase.communicator.name.lower(),
            [int(other) for other in phase.after],
        ]
        for phase in template
    ]


def check_template(node: Node, template: Template) -> None:
    """Refuses a template without phases, and phases on the wrong lane or before their predecessors."""
    if not template:
        raise node.error("has no phases", "give it one, or leave the template out of its chunks")
    for place, phase in enumerate(template):
        _check_phase(node[place], place, phase)


def _check_phase(node: Node, place: int, phase: Phase) -> None:
    launch = phase.kind == OpKind.LAUNCH
    late = [other for other in phase.after if other >= place]
    if late:
        problem = f"names phase {late[0]}, which does not stand before phase {place}"
        raise node[PHASE.index("after")].error(problem, "name earlier phases of the same template")
    if phase.kind not in PHASE_KINDS:
        hint = nearest(phase.kind.word, [kind.word for kind in PHASE_KINDS])
        raise node[PHASE.index("kind")].error("is not a kind of phase", hint)
    if not launch and phase.lane != Lane.COMPUTE:
        raise node[PHASE.index("lane")].error("is not the lane of compute and waits", "use compute")
    if launch and phase.lane not in (Lane.TP, Lane.DP):
        raise node[PHASE.index("lane")].error("is not a lane of collectives", "use tp or dp")
    if launch and phase.communicator == Communicator.NONE:
        raise node[PHASE.index("communicator")].error("cannot carry a collective", "use tp, cp, ep or dp")


# ---------------------------------------------------------------------------- chunks


def chunk_row(chunk: PlannedChunk) -> Row:
    """What one virtual stage follows, holds and sends."""
    templates = {kind.word: chunk.templates[kind] for kind in COMPUTE_OPS if kind in chunk.templates}
    sizes = (chunk.layers, chunk.kept_bytes, chunk.made_again_bytes, chunk.output_bytes)
    return [templates, *map(int, sizes), float(chunk.send_s)]


def check_chunk(node: Node, chunk: PlannedChunk, templates: Mapping[str, Template]) -> None:
    """Refuses a chunk whose templates are unknown, or that has a backward together with its halves."""
    named = node[CHUNK.index("templates")]
    for kind, name in chunk.templates.items():
        if kind not in COMPUTE_OPS:
            words = [known.word for known in COMPUTE_OPS]
            raise named[kind.word].error("is not a kind of op", nearest(kind.word, words), shown=False)
        if name not in templates:
            raise named[kind.word].error("is not a known template", nearest(name, templates))
    if OpKind.BACKWARD in chunk.templates and (
        OpKind.INPUT_GRAD in chunk.templates or OpKind.WEIGHT_GRAD in chunk.templates
    ):
        raise named.error("has B together with its halves I and W", "use B, or I and W")


# ---------------------------------------------------------------------------- buckets


def bucket_row(bucket: Bucket) -> Row:
    """Which layers, and what gathering and reducing them costs."""
    layers = [int(bucket.chunk), int(bucket.first_layer), int(bucket.end_layer)]
    gather = [float(bucket.gather_s), int(bucket.gather_bytes)]
    reduce = [float(bucket.reduce_s), int(bucket.reduce_bytes)]
    return [*layers, *gather, *reduce, bucket.lane.name.lower(), bool(bucket.gates)]


def check_bucket(node: Node, bucket: Bucket) -> None:
    """Refuses a bucket whose layers are out of order, or on a lane that carries none."""
    if bucket.end_layer < bucket.first_layer:
        problem = f"is before first_layer = {bucket.first_layer}"
        raise node[BUCKET.index("end_layer")].error(problem, f"use {bucket.first_layer} or more")
    if bucket.lane not in (Lane.TP, Lane.DP, Lane.HOST):
        raise node[BUCKET.index("lane")].error("is not a lane of buckets", "use tp, dp or host")


# ---------------------------------------------------------------------------- memory


def memory_rows(memory: Sequence[ClassMemory]) -> list[Row]:
    """The names of the columns, then one row per device class; null for a component that it does not have."""
    components = list(dict.fromkeys(name for of_class in memory for name in of_class.fixed))
    rows = [
        [None if name not in of_class.fixed else int(of_class.fixed[name]) for name in components]
        + [int(getattr(of_class, name)) for name in ALIVE]
        for of_class in memory
    ]
    return [[*components, *ALIVE], *rows]


def read_memory(node: Node, classes: int) -> tuple[ClassMemory, ...]:
    """The memory of every device class."""
    check_length(node, classes + 1, "rows, the names included")
    columns = read(tuple[str, ...], node[0])
    if list(columns[-len(ALIVE) :]) != ALIVE or len(set(columns)) < len(columns):
        raise node[0].error(f"does not end with {', '.join(ALIVE)}, or has a name twice", "plan again")
    memory = []
    for row in range(1, classes + 1):
        check_length(node[row], len(columns), "columns")
        cells = {name: node[row][column] for column, name in enumerate(columns)}
        sizes = {
            name: read(Bytes, cell) for name, cell in cells.items() if name in ALIVE or cell.value is not None
        }
        alive = {name: sizes.pop(name) for name in ALIVE}
        memory.append(ClassMemory(fixed=sizes, **alive))
    return tuple(memory)


def check_length(node: Node, length: int, unit: str) -> None:
    """Refuses a list that does not have `length` items."""
    items = read(tuple[object, ...], node)
    if len(items) != length:
        raise node.error(f"has {len(items):,} {unit}, not {length:,}", f"give {length:,} {unit}")
