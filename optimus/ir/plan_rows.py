"""The rows of a plan file's tables: how phases, chunks, buckets and memory are written, and read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optimus.ir.op import COLLECTIVE_PHASES, COMPUTE_OPS, COMPUTE_PHASES, Communicator, Lane, OpKind
from optimus.ir.plan import WHOLE_STAGE, Bucket, ClassMemory, Phase, PlannedChunk, Template
from optimus.ir.typed_json import INT32, Json

Row = list[Any]
MAX_LAYERS = 100_000

KINDS = {kind.word: kind for kind in (*COMPUTE_PHASES, *COLLECTIVE_PHASES)}
LANES = {lane.name.lower(): lane for lane in Lane}
COMMUNICATORS = {communicator.name.lower(): communicator for communicator in Communicator}
OP_KINDS = {kind.word: kind for kind in COMPUTE_OPS}

PHASE = ["name", "kind", "layer", "duration_s", "bytes", "lane", "communicator", "after"]
CHUNK = ["templates", "layers", "kept_bytes", "made_again_bytes", "output_bytes", "send_s"]
BUCKET = ["chunk", "first_layer", "end_layer", "gather_s", "gather_bytes", "reduce_s", "reduce_bytes"]
BUCKET += ["lane", "gates"]
ALIVE = ["llm_activations", "encoder_activations", "seam"]  # columns of memory after the fixed components


def _word(choices: Mapping[str, Any], value: object) -> str:
    return next(word for word, choice in choices.items() if choice == value)


def _columns(given: Json, names: Sequence[str]) -> dict[str, Json]:
    """The items of a row under their names in the legend."""
    return dict(zip(names, given.items(len(names), "columns"), strict=True))


# ---------------------------------------------------------------------------- phases


def template_rows(template: Template) -> list[Row]:
    """One row per phase."""
    return [
        [
            phase.name,
            _word(KINDS, phase.kind),
            int(phase.layer),
            float(phase.duration_s),
            int(phase.bytes),
            _word(LANES, phase.lane),
            _word(COMMUNICATORS, phase.communicator),
            [int(other) for other in phase.after],
        ]
        for phase in template
    ]


def read_template(given: Json) -> Template:
    """The phases of an op, each after phases that stand before it."""
    rows = given.items()
    if not rows:
        raise given.error("has no phases", "give it one, or leave the template out of its chunks")
    return tuple(_read_phase(row, place) for place, row in enumerate(rows))


def _read_phase(given: Json, place: int) -> Phase:
    row = _columns(given, PHASE)
    after = row["after"].wholes()
    for other in after:
        if other >= place:
            problem = f"names phase {other}, which does not stand before phase {place}"
            raise row["after"].error(problem, "name earlier phases of the same template")
    phase = Phase(
        name=row["name"].word(),
        kind=row["kind"].one_of(KINDS, "kind of phase"),
        layer=row["layer"].whole(0, MAX_LAYERS),
        duration_s=row["duration_s"].number(),
        bytes=row["bytes"].whole(),
        lane=row["lane"].one_of(LANES, "lane"),
        communicator=row["communicator"].one_of(COMMUNICATORS, "communicator"),
        after=after,
    )
    if phase.kind != OpKind.LAUNCH and phase.lane != Lane.COMPUTE:
        raise row["lane"].error("is not the lane of compute and waits", "use compute")
    if phase.kind == OpKind.LAUNCH and phase.lane not in (Lane.TP, Lane.DP):
        raise row["lane"].error("is not a lane of collectives", "use tp or dp")
    if phase.kind == OpKind.LAUNCH and phase.communicator == Communicator.NONE:
        raise row["communicator"].error("cannot carry a collective", "use tp, cp, ep or dp")
    return phase


# ---------------------------------------------------------------------------- chunks


def chunk_row(chunk: PlannedChunk) -> Row:
    """What one virtual stage follows, holds and sends."""
    templates = {kind.word: chunk.templates[kind] for kind in COMPUTE_OPS if kind in chunk.templates}
    sizes = (chunk.layers, chunk.kept_bytes, chunk.made_again_bytes, chunk.output_bytes)
    return [templates, *map(int, sizes), float(chunk.send_s)]


def read_chunk(given: Json, templates: Mapping[str, Template]) -> PlannedChunk:
    """A chunk whose templates are known."""
    row = _columns(given, CHUNK)
    names = dict(zip(templates, templates, strict=True))
    found = {}
    for word, name in row["templates"].entries().items():
        kind = Json(word, word, row["templates"]).one_of(OP_KINDS, "kind of op")
        found[kind] = name.one_of(names, "template")
    if OpKind.BACKWARD in found and (OpKind.INPUT_GRAD in found or OpKind.WEIGHT_GRAD in found):
        problem, hint = "has B together with its halves I and W", "use B, or I and W"
        raise row["templates"].error(problem, hint)
    return PlannedChunk(
        templates=found,
        layers=row["layers"].whole(0, MAX_LAYERS),
        kept_bytes=row["kept_bytes"].whole(),
        made_again_bytes=row["made_again_bytes"].whole(),
        output_bytes=row["output_bytes"].whole(),
        send_s=row["send_s"].number(),
    )


# ---------------------------------------------------------------------------- buckets


def bucket_row(bucket: Bucket) -> Row:
    """Which layers, and what gathering and reducing them costs."""
    layers = [int(bucket.chunk), int(bucket.first_layer), int(bucket.end_layer)]
    gather = [float(bucket.gather_s), int(bucket.gather_bytes)]
    reduce = [float(bucket.reduce_s), int(bucket.reduce_bytes)]
    return [*layers, *gather, *reduce, _word(LANES, bucket.lane), bool(bucket.gates)]


def read_bucket(given: Json) -> Bucket:
    """A bucket of layers that stand in order."""
    row = _columns(given, BUCKET)
    bucket = Bucket(
        chunk=row["chunk"].whole(WHOLE_STAGE, INT32),
        first_layer=row["first_layer"].whole(0, MAX_LAYERS),
        end_layer=row["end_layer"].whole(0, MAX_LAYERS),
        gather_s=row["gather_s"].number(),
        gather_bytes=row["gather_bytes"].whole(),
        reduce_s=row["reduce_s"].number(),
        reduce_bytes=row["reduce_bytes"].whole(),
        lane=row["lane"].one_of(LANES, "lane"),
        gates=row["gates"].flag(),
    )
    if bucket.end_layer < bucket.first_layer:
        problem = f"is before first_layer = {bucket.first_layer}"
        raise row["end_layer"].error(problem, f"use {bucket.first_layer} or more")
    if bucket.lane not in (Lane.TP, Lane.DP, Lane.HOST):
        raise row["lane"].error("is not a lane of buckets", "use tp, dp or host")
    return bucket


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


def read_memory(given: Json, classes: int) -> tuple[ClassMemory, ...]:
    """The memory of every device class."""
    head, *rows = given.items(classes + 1, "rows, the names included")
    columns = [name.word() for name in head.items()]
    components = columns[: -len(ALIVE)]
    if columns[-len(ALIVE) :] != ALIVE or len(set(columns)) < len(columns):
        raise head.error(f"does not end with {', '.join(ALIVE)}, or has a name twice", "plan again")
    found = []
    for row in rows:
        cells = _columns(row, columns)
        fixed = {name: cells[name].whole() for name in components if cells[name].value is not None}
        found.append(ClassMemory(fixed=fixed, **{name: cells[name].whole() for name in ALIVE}))
    return tuple(found)
