"""Saves and loads plans as JSON, laid out line by line for people, diff and grep."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optimus import __version__
from optimus.ir.files import write_file_atomically
from optimus.ir.op import COMPUTE_OPS, KIND_OF_WORD, NamedPhase, list_recomputed_kernels, regathers_inputs
from optimus.ir.plan import (
    FORMAT,
    SCHEMA,
    Bucket,
    DeviceClassMemory,
    Plan,
    PlannedChunk,
    PlannedModule,
    Template,
)
from optimus.ir.plan_lines import format_program_lines, format_program_title
from optimus.ir.plan_reader import ALIVE, CHUNK, LEGEND, read_plan_document
from optimus.job.nodes import DocumentNode, is_file, parse_json, read_text
from optimus.job.typed import read_typed

Row = list[Any]
PLAN_FILE_ENDING = ".plan.json"
MAX_BYTES = 200_000_000
LEGEND_4 = {
    **LEGEND,
    "chunk": ["templates", "layers", "kept_bytes", "made_again_bytes", "output_bytes", "send_s"],
    "memory": LEGEND["memory"][:-1],
}  # of format 4
LEGEND_3 = {**LEGEND_4, "bucket": LEGEND["bucket"][:-2], "memory": LEGEND_4["memory"][:-1]}  # of format 3
TABLES_3 = ("buckets", "memory")  # to which format 4 added columns
TABLES_4 = ("chunks", "memory")  # to which format 5 did
TABLE_LINES = 16  # a longer table has several rows on a line, so that the header stays short


# ---------------------------------------------------------------------------- writing


def hash_plan(plan: Plan) -> str:
    """Returns the SHA-256 of the bytes that `save_plan` writes."""
    return hashlib.sha256(format_plan(plan).encode()).hexdigest()


def save_plan(plan: Plan, path: Path) -> str:
    """Writes a plan atomically and returns the SHA-256 of its bytes."""
    return write_file_atomically(path, format_plan(plan))


def format_plan(plan: Plan) -> str:
    """Returns the document: a header of short lines, a template per line, then an op per line."""
    parts = [f"{_json(name)}: {_laid_out(name, value)}" for name, value in plan_header_fields(plan).items()]
    programs = [
        _json(
            [format_program_title(plan, device), *format_program_lines(program, plan.names)], between=",\n"
        )[:-1]
        + "\n]"
        for device, program in enumerate(plan.programs)
    ]
    parts.append('"programs": [\n' + ",\n".join(programs) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def plan_header_fields(plan: Plan) -> dict[str, Any]:
    """Returns the document without programs; tables hold every distinct row once."""
    chunks, buckets = _Table(), _Table()
    modules = {name: _module(module, chunks, buckets) for name, module in plan.modules.items()}
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "tool": plan.tool,
        "strategy": plan.strategy,
        "order": plan.order,
        "microbatches": int(plan.microbatches),
        "dealing_replicas": int(plan.dealing_replicas),
        "slowdown": float(plan.slowdown),
        "launch_s": float(plan.launch_s),
        "finish_s": [float(finish_s) for finish_s in plan.finish_s],
        "capacity_bytes": int(plan.capacity_bytes),
        "claims": {
            "step_s": float(plan.claims.step_s),
            "lagged_s": float(plan.claims.lagged_s),
            "estimate_s": float(plan.claims.estimate_s),
            "encoder_s": {region: float(time_s) for region, time_s in plan.claims.encoder_s.items()},
        },
        "hashes": dict(plan.hashes),
        "bound_to": {part: dict(fields) for part, fields in plan.bound_to.items()},
        "notes": dict(plan.notes),
        "legend": LEGEND,
        "modules": modules,
        "chunks": chunks.rows,
        "buckets": buckets.rows,
        "memory": _memory_rows(plan.memory),
        "templates": {name: _template_rows(template) for name, template in plan.templates.items()},
    }


def _template_rows(template: Template) -> list[Row]:
    """Returns one row per phase."""
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


def _chunk_row(chunk: PlannedChunk) -> Row:
    """Returns templates, sizes and send time of a virtual stage."""
    templates = {kind.word: chunk.templates[kind] for kind in COMPUTE_OPS if kind in chunk.templates}
    held = (chunk.saved_activation_bytes, chunk.recomputed_bytes, chunk.logits_bytes)
    return [templates, *map(int, (chunk.layers, *held, chunk.output_bytes)), float(chunk.send_s)]


def _bucket_row(bucket: Bucket) -> Row:
    """Returns layers, seconds and bytes of a bucket."""
    layers = [int(bucket.chunk), int(bucket.first_layer), int(bucket.end_layer)]
    gather = [float(bucket.gather_s), int(bucket.gather_bytes)]
    reduce = [float(bucket.reduce_s), int(bucket.reduce_bytes)]
    spans = [span.name.lower() for span in (bucket.gathered_per, bucket.reduced_per)]
    return [*layers, *gather, *reduce, bucket.lane.name.lower(), bool(bucket.gates), *spans]


def _memory_rows(memory: Sequence[DeviceClassMemory]) -> list[Row]:
    """Returns the column names, then one row per device class; null for an absent component."""
    components = list(dict.fromkeys(name for of_class in memory for name in of_class.fixed))
    rows = [
        [None if name not in of_class.fixed else int(of_class.fixed[name]) for name in components]
        + [int(getattr(of_class, name)) for name in ALIVE]
        for of_class in memory
    ]
    return [[*components, *ALIVE], *rows]


class _Table:
    """Distinct rows in order of first use."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    @property
    def rows(self) -> list[Row]:
        return [json.loads(text) for text in self.places]

    def place(self, row: Row) -> int:
        return self.places.setdefault(_json(row), len(self.places))


def _module(module: PlannedModule, chunks: _Table, buckets: _Table) -> dict[str, Any]:
    return {
        "layout": asdict(module.layout),
        "recompute": module.recompute,
        "recomputed": list(module.recomputed),
        "regather": bool(module.regather),
        "pieces": int(module.microbatches_per_llm_microbatch),
        "bin_tokens": int(module.bin_tokens),
        "item_cost": [float(cost) for cost in module.item_cost],
        "seam_bytes": int(module.seam_bytes),
        "seam_s": float(module.seam_s),
        "chunks": [chunks.place(_chunk_row(chunk)) for chunk in module.chunks],
        "buckets": [[buckets.place(_bucket_row(bucket)) for bucket in stage] for stage in module.buckets],
        "pipelines": [int(pipeline) for pipeline in module.pipelines],
    }


def _json(value: Any, *, between: str = ", ") -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(between, ": "))


def _laid_out(name: str, value: Any) -> str:
    """Returns a value as JSON: tables and collections have one entry per line."""
    if name in ("legend", "bound_to", "modules", "templates") and value:
        entries = [f"{_json(key)}: {_json(entry)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + "\n}"
    if name in ("chunks", "buckets", "memory") and value:
        per_line = -(-len(value) // TABLE_LINES)
        rows = [_json(row) for row in value]
        lines = [", ".join(rows[first : first + per_line]) for first in range(0, len(rows), per_line)]
        return "[\n" + ",\n".join(lines) + "\n]"
    return _json(value)


# ---------------------------------------------------------------------------- reading


def is_plan_file(name: str) -> bool:
    """Returns whether a name has the ending of plan files, or its file the schema of one."""
    path = Path(name)
    if name.endswith(PLAN_FILE_ENDING):
        return True
    if path.suffix != ".json" or not is_file(path):
        return False
    with path.open("rb") as file:
        return b'"optimus.plan/' in file.read(200)


def load_plan(path: Path) -> Plan:
    """Loads a plan; raises a `UserError` that locates the first mistake."""
    return parse_plan(read_text(path, limit=MAX_BYTES), str(path))


def parse_plan(text: str, file: str) -> Plan:
    """Reads a plan from text; `file` names it in errors."""
    root = parse_json(text, file=file, name="plan", hint="undo the last edit, or plan again")
    if "schema" not in root:
        raise root.error("has no schema, so it is not a plan", "give a file that `optimus plan` wrote")
    for migrate in _migrations(root["schema"]):
        migrate(root)
    return read_plan_document(root)


def _migrate_from_0(root: DocumentNode) -> None:
    """Adds the fields that format 0, of before the first release, did not have."""
    root.value.setdefault("requires", [])
    root.value.setdefault("single_connection", False)
    for module in _objects(root.value.get("modules")).values():
        _objects(module).setdefault("bin_tokens", 0)


def _migrate_from_1(root: DocumentNode) -> None:
    """Removes fields that no plan used, and states the recomputation that names of kernels implied."""
    document = root.value
    if "requires" in root and read_typed(tuple[str, ...], root["requires"]):
        problem = f"is a feature that the plan needs and Optimus {__version__} does not know"
        raise root["requires"][0].error(problem, "plan again with this version")
    if document.get("single_connection"):
        problem = f"is true, which Optimus {__version__} does not enforce any more"
        raise root["single_connection"].error(problem, "plan again; optimus check says whether it holds")
    for removed in ("seed", "requires", "single_connection"):
        document.pop(removed, None)
    if document.get("legend") == {**LEGEND_3, "line": ["module.verb", *LEGEND["line"][1:]]}:
        document["legend"] = LEGEND_3
    for module in _objects(document.get("modules")).values():
        phases = list(_named_phases(document, _objects(module).get("chunks")))
        _objects(module).setdefault("recomputed", list(list_recomputed_kernels(phases)))
        _objects(module).setdefault("regather", regathers_inputs(phases))


def _migrate_from_2(root: DocumentNode) -> None:
    """States that images stay on their replica and cost as many seconds as tokens."""
    root.value.setdefault("dealing_replicas", 1)
    claims = _objects(root.value.get("claims"))
    claims.setdefault("lagged_s", claims.get("step_s"))
    for module in _objects(root.value.get("modules")).values():
        _objects(module).setdefault("item_cost", [1.0, 0.0])


def _migrate_from_3(root: DocumentNode) -> None:
    """States that parameters are gathered, and gradients reduced, once a step."""
    document = root.value
    if document.get("legend") == LEGEND_3:
        document["legend"] = LEGEND_4
    buckets, memory = (value if isinstance(value, list) else [] for value in map(document.get, TABLES_3))
    for row in (row for row in buckets if isinstance(row, list)):
        row += ["step", "step"]
    for number, row in enumerate(memory):
        if isinstance(row, list):
            row.append(0 if number else "gathered")


def _migrate_from_4(root: DocumentNode) -> None:
    """States that chunks keep no logits: those of one microbatch are part of what is always there."""
    document = root.value
    if document.get("legend") == LEGEND_4:
        document["legend"] = LEGEND
    chunks, memory = (value if isinstance(value, list) else [] for value in map(document.get, TABLES_4))
    for row in (row for row in chunks if isinstance(row, list)):
        row.insert(CHUNK.index("logits_bytes"), 0)
    names, *rows = [row for row in memory if isinstance(row, list)] or [[]]
    if "logits" in names and "working" in names:
        logits, working = names.index("logits"), names.index("working")
        names[logits] = "logits of one microbatch"  # absent from here on
        for row in rows:
            if len(row) == len(names) and type(row[logits]) is type(row[working]) is int:
                row[working], row[logits] = row[working] + row[logits], None
    names.append("logits")
    for row in rows:
        row.append(0)


def _named_phases(document: dict[str, Any], chunks: Any) -> Iterator[NamedPhase]:
    """Yields the phases of a module's templates; what is malformed is left to the reader."""
    rows, templates = document.get("chunks"), _objects(document.get("templates"))
    if not isinstance(rows, list) or not isinstance(chunks, list):
        return
    for place in chunks:
        row = rows[place] if type(place) is int and 0 <= place < len(rows) else None
        names = _objects(row[0] if isinstance(row, list) and row else None).values()
        for template in (templates.get(name) for name in names if isinstance(name, str)):
            for phase in template if isinstance(template, list) else ():
                if isinstance(phase, list) and len(phase) > 1 and isinstance(phase[1], str):
                    yield str(phase[0]), KIND_OF_WORD.get(phase[1])


def _objects(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


MIGRATIONS: tuple[Callable[[DocumentNode], None], ...] = (
    _migrate_from_0,
    _migrate_from_1,
    _migrate_from_2,
    _migrate_from_3,
    _migrate_from_4,
)  # by format, in place


def _migrations(schema: DocumentNode) -> Sequence[Callable[[DocumentNode], None]]:
    """Returns the functions that migrate a document of this schema to the current format, in order."""
    match = re.fullmatch(r"optimus\.plan/(0|[1-9][0-9]{0,5})", str(schema.value))
    if match is None:
        raise schema.error("is not the schema of a plan", f'give a file with "schema": "{SCHEMA}"')
    if int(match[1]) > FORMAT:
        problem = f"is newer than Optimus {__version__}, which reads format {FORMAT}"
        raise schema.error(problem, "update Optimus, or plan again with this version")
    return MIGRATIONS[int(match[1]) :]
