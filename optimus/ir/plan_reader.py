"""Reads the JSON document of a plan into a `Plan` in which every index is in range."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from optimus.errors import nearest
from optimus.ir.binding import hash_fields
from optimus.ir.op import COLLECTIVE_PHASES, COMPUTE_OPS, COMPUTE_PHASES, Communicator, Lane, OpKind
from optimus.ir.plan import (
    ALL,
    REGIONS,
    WHOLE_STAGE,
    Bucket,
    Bytes,
    DeviceClassMemory,
    Phase,
    Plan,
    PlanClaims,
    PlannedChunk,
    PlannedModule,
    Span,
    Template,
)
from optimus.ir.plan_lines import (
    check_lines_in_range,
    format_program_title,
    number_line_prefixes,
    parse_program_lines,
)
from optimus.ir.ranks import LLM
from optimus.job.checks import format_nearest_divisors
from optimus.job.layout import Axis, Layout
from optimus.job.nodes import DocumentNode
from optimus.job.typed import ROW, NonNegative, Whole, read_typed, refuse_unknown_keys

PHASE_KINDS = (*COMPUTE_PHASES, *COLLECTIVE_PHASES)
PHASE = ["name", "kind", "layer", "duration_s", "bytes", "lane", "communicator", "after"]
CHUNK = ["templates", "layers", "saved_bytes", "recomputed_bytes", "logits_bytes", "output_bytes", "send_s"]
BUCKET = ["chunk", "first_layer", "end_layer", "gather_s", "gather_bytes", "reduce_s", "reduce_bytes"]
BUCKET += ["lane", "gates", "gathered_per", "reduced_per"]
# Columns of memory after the fixed components.
ALIVE = ["llm_activations", "encoder_activations", "seam", "gathered", "logits"]
LEGEND = {
    "modules": "places in the tables: chunks by virtual stage (chunk * pp + stage), buckets by stage",
    "chunk": CHUNK,
    "bucket": BUCKET,
    "memory": ["fixed components, by name ...", *ALIVE],
    "phase": PHASE,
    "line": ["module.kind", "chunk", "microbatch", "place"],
}
MAX_GPUS, MAX_MODULES = 10_000_000, 100  # beyond them a number is a mistake, and would cost minutes


@dataclass(frozen=True, kw_only=True)
class _ModuleEntry:
    """Module of the file; `chunks` and `buckets` are indices into the file's tables."""

    layout: Layout
    recompute: str
    recomputed: tuple[str, ...]
    regather: bool
    pieces: Axis
    bin_tokens: Bytes
    item_cost: tuple[NonNegative, NonNegative]
    seam_bytes: Bytes
    seam_s: NonNegative
    chunks: tuple[Whole, ...]
    buckets: tuple[tuple[Whole, ...], ...]
    pipelines: tuple[Whole, ...]


@dataclass(frozen=True, kw_only=True)
class _PlanDocument:
    """The document; memory and programs, one entry per device class, are read when the classes are known."""

    schema: object
    name: str
    tool: str
    strategy: str
    order: str
    microbatches: Axis
    dealing_replicas: Axis
    slowdown: NonNegative
    launch_s: NonNegative
    finish_s: tuple[NonNegative, ...]
    capacity_bytes: Bytes
    claims: PlanClaims
    hashes: dict[str, str]
    bound_to: dict[str, dict[str, Any]]
    notes: dict[str, Any]
    legend: object
    modules: dict[str, _ModuleEntry]
    chunks: tuple[Annotated[PlannedChunk, ROW], ...]
    buckets: tuple[Annotated[Bucket, ROW], ...]
    memory: object
    templates: dict[str, tuple[Annotated[Phase, ROW], ...]]
    programs: object


def read_plan_document(root: DocumentNode) -> Plan:
    """Reads the plan of a document in the current format."""
    if "legend" in root and root["legend"].value != LEGEND:
        raise root["legend"].error("is not the legend of this format", "plan again: it is never edited")
    file = read_typed(_PlanDocument, root, complete=True)
    for name, template in file.templates.items():
        _check_template(root["templates"][name], template)
    for place, chunk in enumerate(file.chunks):
        _check_chunk(root["chunks"][place], chunk, file.templates)
    for place, bucket in enumerate(file.buckets):
        _check_bucket(root["buckets"][place], bucket)
    _check_layouts(root["modules"], {name: entry.layout for name, entry in file.modules.items()})
    llm = file.modules[LLM].layout
    if len(file.finish_s) not in (0, llm.pp):
        problem = f"has {len(file.finish_s)} numbers, and modules.llm.layout.pp = {llm.pp}"
        raise root["finish_s"].error(problem, "give one for every stage of the LLM")
    if llm.dp % file.dealing_replicas:
        problem = f"does not divide modules.llm.layout.dp = {llm.dp}"
        raise root["dealing_replicas"].error(
            problem, f"use {format_nearest_divisors(llm.dp, file.dealing_replicas)}"
        )
    refuse_unknown_keys(root["claims"]["encoder_s"], REGIONS, "is not a known region")
    _check_hashes(root["hashes"], file)
    plan = Plan(
        name=file.name,
        tool=file.tool,
        strategy=file.strategy,
        order=file.order,
        microbatches=file.microbatches,
        dealing_replicas=file.dealing_replicas,
        modules={name: _module(root["modules"][name], name, file) for name in file.modules},
        templates=file.templates,
        slowdown=file.slowdown,
        launch_s=file.launch_s,
        capacity_bytes=file.capacity_bytes,
        memory=(),
        claims=file.claims,
        programs=(),
        bound_to=file.bound_to,
        hashes=file.hashes,
        notes=file.notes,
        finish_s=file.finish_s,
    )
    return _with_classes(plan, root["memory"], root["programs"])


# ---------------------------------------------------------------------------- modules


def _check_layouts(node: DocumentNode, layouts: Mapping[str, Layout]) -> None:
    """Refuses modules that do not share their GPUs, or encoders that do not lie inside the LLM."""
    if list(layouts)[-1:] != [LLM]:
        raise node.error(f"does not end with {LLM}", "give every encoder, then the LLM")
    if len(layouts) > MAX_MODULES:
        raise node.error(f"has {len(layouts):,} modules", f"use {MAX_MODULES} or fewer")
    for name, layout in layouts.items():
        if not re.fullmatch(r"\S+", name) or name == ALL:
            raise node[name].error("is not the name of a module", f"use a word without spaces, not {ALL}")
        _check_layout(node[name]["layout"], layout, None if name == LLM else layouts[LLM])


def _check_layout(node: DocumentNode, layout: Layout, llm: Layout | None) -> None:
    """Checks an encoder's layout against the LLM's, or the LLM's alone if `llm` is None."""
    if layout.gpus > MAX_GPUS:
        raise node.error(f"has {layout.gpus:,} GPUs", f"use {MAX_GPUS:,} or fewer")
    if llm is None:
        if layout.dp * layout.cp * layout.tp % layout.ep:
            problem = f"does not divide dp x cp x tp = {layout.dp * layout.cp * layout.tp} of a stage"
            raise node["ep"].error(
                problem, f"use {format_nearest_divisors(layout.dp * layout.cp * layout.tp, layout.ep)}"
            )
        return
    for axis in ("cp", "ep"):
        if getattr(layout, axis) != 1:
            raise node[axis].error("is not 1, and this is an encoder", "use 1")
    for axis, outer in (("pp", llm.pp), ("tp", llm.tp)):
        if outer % getattr(layout, axis):
            problem = f"does not divide modules.{LLM}.layout.{axis} = {outer}"
            raise node[axis].error(problem, f"use {format_nearest_divisors(outer, getattr(layout, axis))}")
    if layout.gpus != llm.gpus:
        dp = llm.gpus // (layout.pp * layout.tp)
        raise node["dp"].error(f"makes {layout.gpus} GPUs, and the LLM has {llm.gpus}", f"use {dp}")


def _module(node: DocumentNode, name: str, file: _PlanDocument) -> PlannedModule:
    entry, llm = file.modules[name], file.modules[LLM].layout
    layout = entry.layout
    _check_length(node["chunks"], layout.virtual_stages, "chunks")
    _check_indices(node["chunks"], entry.chunks, len(file.chunks))
    if not any(file.chunks[place].templates for place in entry.chunks):
        raise node["chunks"].error("has no chunk with a template", "give the module something to run")
    _check_length(node["buckets"], layout.pp, "stages")
    for stage, places in enumerate(entry.buckets):
        _check_indices(node["buckets"][stage], places, len(file.buckets))
        if any(file.buckets[place].chunk >= layout.chunks for place in places):
            problem = f"has a bucket of a chunk that there is not: {name} has {layout.chunks}"
            hint = f"use chunks from {WHOLE_STAGE} (the whole stage) to {layout.chunks - 1}"
            raise node["buckets"][stage].error(problem, hint)
    if name == LLM and entry.pieces > 1:
        raise node["pieces"].error("is more than 1, and this is the LLM", "use 1")
    encoder_microbatches = 0 if name == LLM else file.microbatches * entry.pieces
    _check_length(node["pipelines"], encoder_microbatches, "microbatches")
    _check_indices(node["pipelines"], entry.pipelines, layout.dp // llm.dp)
    return PlannedModule(
        layout=layout,
        chunks=tuple(file.chunks[place] for place in entry.chunks),
        buckets=tuple(tuple(file.buckets[place] for place in stage) for stage in entry.buckets),
        recompute=entry.recompute,
        recomputed=entry.recomputed,
        regather=entry.regather,
        microbatches_per_llm_microbatch=entry.pieces,
        pipelines=entry.pipelines,
        bin_tokens=entry.bin_tokens,
        item_cost=entry.item_cost,
        seam_bytes=entry.seam_bytes,
        seam_s=entry.seam_s,
    )


def _check_indices(node: DocumentNode, indices: tuple[int, ...], count: int) -> None:
    for place, index in enumerate(indices):
        if index >= count:
            problem = f"is not a whole number from 0 to {count - 1}"
            raise node[place].error(problem, "correct it, or plan again")


# ---------------------------------------------------------------------------- the rest


def _check_hashes(node: DocumentNode, file: _PlanDocument) -> None:
    """Refuses hashes that are not those of the fields in `bound_to`."""
    refuse_unknown_keys(node, file.bound_to)
    for part, fields in file.bound_to.items():
        if file.hashes.get(part) != hash_fields(fields):
            problem = f"is not the hash of bound_to.{part}"
            raise node[part].error(problem, "plan again: what a plan is bound to is never edited")


def _with_classes(plan: Plan, memory: DocumentNode, programs: DocumentNode) -> Plan:
    """Adds memory and programs to the plan; the number of device classes follows from the layouts."""
    classes = plan.ranks.num_classes
    _check_length(programs, classes, "device classes")
    heads = number_line_prefixes(plan.names)
    for device in range(classes):
        if programs[device][0].value != format_program_title(plan, device):
            hint = f'open with "{format_program_title(plan, device)}"'
            raise programs[device].error("does not open with its device class", hint)
    read_programs = tuple(parse_program_lines(programs[device], heads) for device in range(classes))
    if plan.microbatches > max(1, sum(map(len, read_programs))):
        raise programs.error(f"has fewer lines than microbatches = {plan.microbatches:,}", "plan again")
    plan = replace(plan, memory=_read_memory(memory, classes), programs=read_programs)
    check_lines_in_range(plan, programs)
    return plan


# ---------------------------------------------------------------------------- rows of the tables


def _check_template(node: DocumentNode, template: Template) -> None:
    """Refuses a template without phases, and phases on the wrong lane or before their predecessors."""
    if not template:
        raise node.error("has no phases", "give it one, or leave the template out of its chunks")
    for place, phase in enumerate(template):
        _check_phase(node[place], place, phase)


def _check_phase(node: DocumentNode, place: int, phase: Phase) -> None:
    launch = phase.kind == OpKind.LAUNCH
    late = [other for other in phase.after if other >= place]
    if late:
        problem = f"names phase {late[0]}, which does not precede phase {place}"
        raise node[PHASE.index("after")].error(problem, "name earlier phases of the same template")
    if phase.kind not in PHASE_KINDS:
        hint = nearest(phase.kind.word, [kind.word for kind in PHASE_KINDS])
        raise node[PHASE.index("kind")].error("is not a kind of phase", hint)
    if not launch and phase.lane != Lane.COMPUTE:
        raise node[PHASE.index("lane")].error("is not the lane of compute and waits", "use compute")
    if launch and phase.lane not in (Lane.TP, Lane.DP):
        raise node[PHASE.index("lane")].error("is not a lane of collectives", "use tp or dp")
    if launch and phase.communicator == Communicator.NONE:
        raise node[PHASE.index("communicator")].error(
            "cannot carry a collective", "use tp, cp, ep, dp or deal"
        )


def _check_chunk(node: DocumentNode, chunk: PlannedChunk, templates: Mapping[str, Template]) -> None:
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


def _check_bucket(node: DocumentNode, bucket: Bucket) -> None:
    """Refuses a bucket whose layers are out of order, or on a lane that carries none."""
    if bucket.end_layer < bucket.first_layer:
        problem = f"is before first_layer = {bucket.first_layer}"
        raise node[BUCKET.index("end_layer")].error(problem, f"use {bucket.first_layer} or more")
    if bucket.lane not in (Lane.TP, Lane.DP, Lane.HOST):
        raise node[BUCKET.index("lane")].error("is not a lane of buckets", "use tp, dp or host")
    if bucket.gathered_per == Span.NEVER:
        raise node[BUCKET.index("gathered_per")].error(
            "leaves nothing to compute with", "use step, microbatch or op"
        )
    if bucket.reduced_per == Span.OP:
        raise node[BUCKET.index("reduced_per")].error(
            "is no span of gradients", "use never, step or microbatch"
        )
    if bucket.chunk == WHOLE_STAGE and bucket.gathered_per == Span.OP:
        raise node[BUCKET.index("chunk")].error(
            "is the whole stage, which is gathered for a microbatch or a step", "name a chunk"
        )


def _read_memory(node: DocumentNode, classes: int) -> tuple[DeviceClassMemory, ...]:
    """Reads the memory of every device class."""
    _check_length(node, classes + 1, "rows, the names included")
    columns = read_typed(tuple[str, ...], node[0])
    if list(columns[-len(ALIVE) :]) != ALIVE or len(set(columns)) < len(columns):
        raise node[0].error(f"does not end with {', '.join(ALIVE)}, or has a name twice", "plan again")
    memory = []
    for row in range(1, classes + 1):
        _check_length(node[row], len(columns), "columns")
        cells = {name: node[row][column] for column, name in enumerate(columns)}
        sizes = {
            name: read_typed(Bytes, cell)
            for name, cell in cells.items()
            if name in ALIVE or cell.value is not None
        }
        alive = {name: sizes.pop(name) for name in ALIVE}
        memory.append(DeviceClassMemory(fixed=sizes, **alive))
    return tuple(memory)


def _check_length(node: DocumentNode, length: int, unit: str) -> None:
    """Refuses a list that does not have `length` items."""
    items = read_typed(tuple[object, ...], node)
    if len(items) != length:
        raise node.error(f"has {len(items):,} {unit}, not {length:,}", f"give {length:,} {unit}")
