"""Reads and writes profiles: one YAML document with a line per measurement."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from optimus.cost.measured_profile import (
    KERNELS,
    MEASURED_KINDS,
    LinkMeasurement,
    MeasurementConditions,
    MessageTime,
    Profile,
    SegmentMeasurement,
)
from optimus.errors import UserError, nearest, one_of
from optimus.ir.files import write_file_atomically
from optimus.ir.op import OpKind
from optimus.job.nodes import DocumentNode
from optimus.job.typed import NonNegative, read_typed
from optimus.job.yaml_parser import load_yaml, parse_yaml

FORMAT = "optimus.profile/1"
ENDINGS = (".yaml", ".yml", ".json")  # JSON is YAML
DIGITS = 6  # of seconds: no measurement has more
# A row has at most 12 values and two dozen around them: 4,000 rows stay below the reader's limits.
MAX_ROWS = 4000
MAX_SIZES = 100
_WORD = re.compile(r"[a-zA-Z_][\w-]*", re.ASCII)  # needs no quotes, unless it is one of
_TAKEN = ("null", "true", "false", "nan", "inf", "infinity")


# ---------------------------------------------------------------------------- what stands in the file


@dataclass(frozen=True, kw_only=True)
class _HostTimes:
    """The `host` section of a profile."""

    issue_s: NonNegative | None = None
    slowdown: NonNegative | None = None


@dataclass(frozen=True, kw_only=True)
class _ProfileFile:
    """A profile as it is written."""

    format: Literal["optimus.profile/1"]
    name: str | None = None
    measured: MeasurementConditions
    modules: dict[str, str]
    segments: tuple[SegmentMeasurement, ...]
    links: tuple[LinkMeasurement, ...] = ()
    host: _HostTimes = _HostTimes()


# ---------------------------------------------------------------------------- reading


def load_profile(path: Path) -> Profile:
    """Loads a profile; raises a `UserError` that names the place of what is wrong."""
    if path.suffix not in ENDINGS:
        raise UserError(
            field="--profile",
            value=str(path),
            problem="is not a .yaml or .json file",
            hint="give a file that `optimus profile` wrote",
        )
    return _read(load_yaml(path), path.name.removesuffix(path.suffix))


def parse_profile(text: str, file: str) -> Profile:
    """Parses a profile; errors name it `file`."""
    return _read(parse_yaml(text, file=file), Path(file).stem)


def _read(root: DocumentNode, name: str) -> Profile:
    if "format" not in root:
        hint = f"give a file that `optimus profile` wrote: it begins with `format: {FORMAT}`"
        raise root["format"].error("is missing, so this is not a profile", hint)
    file = read_typed(_ProfileFile, root)
    _check_count(root["segments"], MAX_ROWS)
    for place, row in enumerate(file.segments):
        _check_segment(root["segments"][place], row, file.modules)
    _refuse_contradictions(root["segments"], file.segments)
    for link_place, link in enumerate(file.links):
        sizes = root["links"][link_place]["sizes"]
        _check_count(sizes, MAX_SIZES)
        for place, size in enumerate(link.sizes):
            _check_spread(sizes[place], size)
    return Profile(
        name=file.name or name,
        measured=file.measured,
        modules=tuple(sorted(file.modules.items())),
        segments=file.segments,
        links=file.links,
        issue_s=file.host.issue_s,
        slowdown=file.host.slowdown,
    )


def _check_segment(node: DocumentNode, row: SegmentMeasurement, modules: Mapping[str, str]) -> None:
    if row.kind not in MEASURED_KINDS:
        kinds = one_of(kind.word for kind in MEASURED_KINDS)
        raise node["kind"].error(f"is not {kinds}", f"use {kinds}")
    if not row.kernels:
        hint = "name the kernels of the cost model that the segment covers"
        raise node["kernels"].error("is empty", hint)
    for place, kernel in enumerate(row.kernels):
        if kernel not in KERNELS:
            raise node["kernels"][place].error("is not a kernel of the cost model", nearest(kernel, KERNELS))
        if kernel in row.kernels[:place]:
            raise node["kernels"][place].error("is given twice", "keep one")
    _check_spread(node, row)
    if row.module not in modules:
        hint = nearest(row.module, modules) if modules else "list it under modules"
        raise node["module"].error("is not one of the modules that the file lists", hint)


def _check_spread(node: DocumentNode, row: SegmentMeasurement | MessageTime) -> None:
    """Refuses quartiles on the wrong side of the median."""
    if row.p25_s > row.median_s:
        raise node["p25_s"].error(f"is more than median_s = {row.median_s:g}", "give the lower quartile")
    if row.p75_s < row.median_s:
        raise node["p75_s"].error(f"is less than median_s = {row.median_s:g}", "give the upper quartile")


def _refuse_contradictions(node: DocumentNode, rows: tuple[SegmentMeasurement, ...]) -> None:
    """Refuses rows that measure one place twice, and kernels that belong to two segments."""
    seen: dict[tuple[Any, ...], int] = {}
    owners: dict[tuple[str, str, str], str] = {}
    covers: dict[tuple[str, str, str], frozenset[str]] = {}
    for place, row in enumerate(rows):
        key = row.module, row.layers, row.segment, row.kind, row.tokens, row.tp
        if key in seen:
            raise node[place].error(f"is the same place as segments[{seen[key]}]", "keep one of them")
        seen[key] = place
        segment = row.module, row.layers, row.segment
        if covers.setdefault(segment, frozenset(row.kernels)) != frozenset(row.kernels):
            problem = f"differs from what {row.segment} of {row.module} covers above"
            raise node[place]["kernels"].error(problem, f"use {', '.join(sorted(covers[segment]))}")
        for kernel in row.kernels:
            owner = owners.setdefault((row.module, row.layers, kernel), row.segment)
            if owner != row.segment:
                problem = f"names {kernel}, which the segment {owner} covers already"
                raise node[place]["kernels"].error(problem, "give every kernel to one segment")


def _check_count(node: DocumentNode, most: int) -> None:
    count = len(node.value or ())
    if count > most:
        hint = f"keep it to {most:,}: fewer sizes, for example"
        raise node.error(f"has {count:,} rows, more than {most:,}", hint)


def _values(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row)}


# ---------------------------------------------------------------------------- writing


def save_profile(profile: Profile, path: Path) -> str:
    """Writes a profile, whole or not at all, and returns the SHA-256 of its bytes."""
    return write_file_atomically(path, format_profile(profile))


def format_profile(profile: Profile) -> str:
    """Formats a profile as a YAML document, with seconds to six digits."""
    assert profile.measured is not None, "a profile says where it was measured"
    lines = [
        "# Measured by `optimus profile`; used by `optimus plan JOB --profile FILE`.",
        f"format: {FORMAT}",
        f"name: {_shown(profile.name)}",
        f"measured: {_shown(_values(profile.measured))}",
        f"modules: {_shown(dict(profile.modules))}",
    ]
    host = {"issue_s": profile.issue_s, "slowdown": profile.slowdown}
    if known := {name: value for name, value in host.items() if value is not None}:
        lines.append(f"host: {_shown(known)}")
    lines.append("segments:" if profile.segments else "segments: []")
    lines += [f"  - {_shown(_values(row))}" for row in profile.segments]
    if profile.links:
        lines.append("links:")
    for link in profile.links:
        entries = list(_values(link).items())
        first, *rest = (f"{name}: {_shown(value)}" for name, value in entries if name != "sizes")
        lines += [f"  - {first}", *(f"    {entry}" for entry in rest), "    sizes:" if link.sizes else ""]
        lines += [f"      - {_shown(_values(size))}" for size in link.sizes]
    return "\n".join(line for line in lines if line) + "\n"


def _shown(value: Any) -> str:
    """Formats a value in YAML's flow style."""
    if isinstance(value, OpKind):
        return value.word
    if isinstance(value, float):
        return repr(float(f"{value:.{DIGITS}g}"))
    if isinstance(value, str):
        plain = _WORD.fullmatch(value) and value.lower() not in _TAKEN
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_shown(str(key))}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return json.dumps(value)
