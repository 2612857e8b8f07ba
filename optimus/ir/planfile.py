"""Plans on disk: one JSON document, laid out line by line for people, diff and grep."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optimus import __version__
from optimus.ir.files import write_whole
from optimus.ir.plan import FORMAT, SCHEMA, Plan, PlannedModule
from optimus.ir.plan_lines import opening, program_lines
from optimus.ir.plan_reader import LEGEND, read_document
from optimus.ir.plan_rows import Row, bucket_row, chunk_row, memory_rows, template_rows
from optimus.job.nodes import Node, parse_json, read_text
from optimus.job.typed import read

ENDING = ".plan.json"
MAX_BYTES = 200_000_000
TABLE_LINES = 16  # a longer table has several rows on a line, so that the header stays short
FEATURES: frozenset[str] = frozenset()  # what a plan may require of who plays it


# ---------------------------------------------------------------------------- writing


def plan_digest(plan: Plan) -> str:
    """The SHA-256 of the bytes that `save_plan` writes."""
    return hashlib.sha256(plan_text(plan).encode()).hexdigest()


def save_plan(plan: Plan, path: Path) -> str:
    """Writes a plan, whole or not at all, and returns the SHA-256 of its bytes."""
    return write_whole(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The document: a header of short lines, a template per line, then an op per line."""
    parts = [f"{_json(name)}: {_laid_out(name, value)}" for name, value in header(plan).items()]
    programs = [
        _json([opening(plan, device), *program_lines(program, plan.names)], between=",\n")[:-1] + "\n]"
        for device, program in enumerate(plan.programs)
    ]
    parts.append('"programs": [\n' + ",\n".join(programs) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def header(plan: Plan) -> dict[str, Any]:
    """Everything but the programs, as it stands in the file; tables hold every distinct row once."""
    chunks, buckets = _Table(), _Table()
    modules = {name: _module(module, chunks, buckets) for name, module in plan.modules.items()}
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "tool": plan.tool,
        "strategy": plan.strategy,
        "seed": int(plan.seed),
        "order": plan.order,
        "microbatches": int(plan.microbatches),
        "requires": list(plan.requires),
        "single_connection": bool(plan.single_connection),
        "slowdown": float(plan.slowdown),
        "launch_s": float(plan.launch_s),
        "finish_s": [float(finish_s) for finish_s in plan.finish_s],
        "capacity_bytes": int(plan.capacity_bytes),
        "claims": {
            "step_s": float(plan.claims.step_s),
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
        "memory": memory_rows(plan.memory),
        "templates": {name: template_rows(template) for name, template in plan.templates.items()},
    }


class _Table:
    """Distinct rows in the order in which they were first asked for."""

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
        "pieces": int(module.pieces),
        "bin_tokens": int(module.bin_tokens),
        "seam_bytes": int(module.seam_bytes),
        "seam_s": float(module.seam_s),
        "chunks": [chunks.place(chunk_row(chunk)) for chunk in module.chunks],
        "buckets": [[buckets.place(bucket_row(bucket)) for bucket in stage] for stage in module.buckets],
        "pipelines": [int(pipeline) for pipeline in module.pipelines],
    }


def _json(value: Any, *, between: str = ", ") -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(between, ": "))


def _laid_out(name: str, value: Any) -> str:
    """A value on one line, or a table's rows and a collection's entries on a line each."""
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
    """Whether a name is meant as a plan file's: it ends so, or the file says so in its first lines."""
    path = Path(name)
    if name.endswith(ENDING):
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"optimus.plan/' in file.read(200)


def load_plan(path: Path) -> Plan:
    """The plan in a file; whatever is wrong with it is a `UserError` that says where."""
    return read_plan(read_text(path, limit=MAX_BYTES), str(path))


def read_plan(text: str, file: str) -> Plan:
    """The plan in a text; `file` is what errors call it."""
    root = parse_json(text, file=file, name="plan", hint="undo the last edit, or plan again")
    if "schema" not in root:
        raise root.error("has no schema, so it is not a plan", "give a file that `optimus plan` wrote")
    migrate = _migration(root["schema"])
    migrate(root.value)
    if "requires" in root:
        _refuse_features(root["requires"])
    return read_document(root)


def _from_0(document: dict[str, Any]) -> None:
    """Format 0, of before the first release, had none of these fields."""
    document.setdefault("requires", [])
    document.setdefault("single_connection", False)
    modules = document.get("modules")
    for module in modules.values() if isinstance(modules, dict) else ():
        if isinstance(module, dict):
            module.setdefault("bin_tokens", 0)


MIGRATIONS: dict[int, Callable[[dict[str, Any]], None]] = {0: _from_0}  # in place; of the format before


def _migration(schema: Node) -> Callable[[dict[str, Any]], None]:
    """What makes a document of this schema one of the current format."""
    found = re.fullmatch(r"optimus\.plan/(0|[1-9][0-9]{0,5})", str(schema.value))
    if found is None:
        raise schema.error("is not the schema of a plan", f'give a file with "schema": "{SCHEMA}"')
    number = int(found[1])
    if number == FORMAT:
        return lambda document: None
    if number > FORMAT:
        problem = f"is newer than Optimus {__version__}, which reads format {FORMAT}"
        raise schema.error(problem, "update Optimus, or plan again with this version")
    if number not in MIGRATIONS:
        problem = f"is older than what Optimus {__version__} reads"
        raise schema.error(problem, "plan again")
    return MIGRATIONS[number]


def _refuse_features(requires: Node) -> None:
    """A feature that is not known here is refused by its name, before anything else is looked at."""
    for place, feature in enumerate(read(tuple[str, ...], requires)):
        if feature not in FEATURES:
            problem = f"is a feature that the plan needs and Optimus {__version__} does not know"
            raise requires[place].error(problem, "update Optimus, or plan again with this version")
