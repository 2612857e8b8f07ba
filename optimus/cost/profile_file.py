"""Profiles on disk: one YAML document with a line per measurement, read as strictly as a job file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from optimus.cost.measured import (
    KERNELS,
    Conditions,
    Layers,
    LinkTime,
    Profile,
    SegmentTime,
    SizeTime,
)
from optimus.errors import UserError, nearest
from optimus.ir.files import write_whole
from optimus.ir.op import KIND_OF_WORD, OpKind
from optimus.job.model import Count
from optimus.job.schema import Amount, Rest
from optimus.job.typed import Places
from optimus.job.yaml_nodes import Node, load_yaml, parse_yaml

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
class _Segment:
    module: str
    layers: Layers
    segment: str
    kernels: tuple[str, ...]
    kind: Literal["F", "I", "W", "B"]
    tokens: Count
    tp: Count = 1
    median_s: Rest
    p25_s: Rest
    p75_s: Rest
    repetitions: Count


@dataclass(frozen=True, kw_only=True)
class _Size:
    size_bytes: Annotated[int, "not negative"]
    median_s: Rest
    p25_s: Rest
    p75_s: Rest
    repetitions: Count


@dataclass(frozen=True, kw_only=True)
class _Link:
    operation: Literal["send", "all_reduce"]
    backend: str
    ranks: Count
    latency_s: Rest
    bandwidth_bytes_per_s: Amount
    sizes: tuple[_Size, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Measured:
    host: str
    date: str
    torch: str
    threads: Count
    dtype: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class _Host:
    issue_s: Rest | None = None
    slowdown: Rest | None = None


@dataclass(frozen=True, kw_only=True)
class _File:
    format: Literal["optimus.profile/1"]
    name: str | None = None
    measured: _Measured
    modules: dict[str, str]
    segments: tuple[Node, ...]
    links: tuple[_Link, ...] = ()
    host: _Host | None = None


# ---------------------------------------------------------------------------- reading


def load_profile(path: Path) -> Profile:
    """The profile in a file; whatever is wrong with it is a `UserError` that says where."""
    if path.suffix not in ENDINGS:
        raise UserError(
            field="--profile",
            value=str(path),
            problem="is not a .yaml or .json file",
            hint="give a file that `optimus profile` wrote",
        )
    return _read(load_yaml(path), path.name.removesuffix(path.suffix))


def read_profile(text: str, file: str) -> Profile:
    """The profile in a text; `file` is what errors call it."""
    return _read(parse_yaml(text, file=file), Path(file).stem)


def _read(root: Node, name: str) -> Profile:
    if "format" not in root.entries:
        hint = f"give a file that `optimus profile` wrote: it begins with `format: {FORMAT}`"
        raise root.error("format", "is missing, so this is not a profile", hint)
    places = Places()
    file = places.read(_File, root, "")
    _refuse_many(root, "segments", len(file.segments), MAX_ROWS)
    segments = tuple(_segment(places, node, at) for at, node in enumerate(file.segments))
    _refuse_contradictions(places, segments)
    for at, row in enumerate(segments):
        if row.module not in file.modules:
            hint = nearest(row.module, file.modules) if file.modules else "list it under modules"
            problem = "is not one of the modules that the file lists"
            raise places.error(f"segments[{at}].module", problem, hint, row.module)
    for at, link in enumerate(file.links):
        _refuse_many(root, f"links[{at}].sizes", len(link.sizes), MAX_SIZES)
        for place, size in enumerate(link.sizes):
            _check_spread(places, f"links[{at}].sizes[{place}]", size)
    return Profile(
        name=file.name or name,
        measured=Conditions(**_values(file.measured)),
        modules=tuple(sorted(file.modules.items())),
        segments=segments,
        links=tuple(_link(link) for link in file.links),
        issue_s=None if file.host is None else file.host.issue_s,
        slowdown=None if file.host is None else file.host.slowdown,
    )


def _segment(places: Places, node: Node, at: int) -> SegmentTime:
    field = f"segments[{at}]"
    row = places.read(_Segment, node, field)
    if not row.kernels:
        hint = "name the kernels of the cost model that the segment covers"
        raise places.error(f"{field}.kernels", "is empty", hint)
    for place, kernel in enumerate(row.kernels):
        if kernel not in KERNELS:
            problem = "is not a kernel of the cost model"
            raise places.error(f"{field}.kernels[{place}]", problem, nearest(kernel, KERNELS), kernel)
        if kernel in row.kernels[:place]:
            raise places.error(f"{field}.kernels[{place}]", "is given twice", "keep one", kernel)
    _check_spread(places, field, row)
    return SegmentTime(**{**_values(row), "kind": KIND_OF_WORD[row.kind]})


def _link(link: _Link) -> LinkTime:
    return LinkTime(**{**_values(link), "sizes": tuple(SizeTime(**_values(size)) for size in link.sizes)})


def _check_spread(places: Places, field: str, row: _Segment | _Size) -> None:
    """Quartiles lie on their sides of the median."""
    if row.p25_s > row.median_s:
        problem = f"is more than median_s = {row.median_s:g}"
        raise places.error(f"{field}.p25_s", problem, "give the lower quartile", f"{row.p25_s:g}")
    if row.p75_s < row.median_s:
        problem = f"is less than median_s = {row.median_s:g}"
        raise places.error(f"{field}.p75_s", problem, "give the upper quartile", f"{row.p75_s:g}")


def _refuse_contradictions(places: Places, rows: tuple[SegmentTime, ...]) -> None:
    """No place is measured twice, and no kernel belongs to two segments."""
    seen: dict[tuple[Any, ...], int] = {}
    owners: dict[tuple[str, str, str], str] = {}
    covers: dict[tuple[str, str, str], frozenset[str]] = {}
    for at, row in enumerate(rows):
        field = f"segments[{at}]"
        key = row.module, row.layers, row.segment, row.kind, row.tokens, row.tp
        if key in seen:
            problem = f"is the same place as segments[{seen[key]}]"
            raise places.error(field, problem, "keep one of them")
        seen[key] = at
        own = row.module, row.layers, row.segment
        if covers.setdefault(own, frozenset(row.kernels)) != frozenset(row.kernels):
            problem = f"differs from what {row.segment} of {row.module} covers above"
            raise places.error(f"{field}.kernels", problem, f"use {', '.join(sorted(covers[own]))}")
        for kernel in row.kernels:
            owner = owners.setdefault((row.module, row.layers, kernel), row.segment)
            if owner != row.segment:
                problem = f"names {kernel}, which the segment {owner} covers already"
                raise places.error(f"{field}.kernels", problem, "give every kernel to one segment")


def _refuse_many(root: Node, field: str, count: int, most: int) -> None:
    if count > most:
        hint = f"keep it to {most:,}: fewer sizes, for example"
        raise root.error(field, f"has {count:,} rows, more than {most:,}", hint)


def _values(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row)}


# ---------------------------------------------------------------------------- writing


def save_profile(profile: Profile, path: Path) -> str:
    """Writes a profile, whole or not at all, and returns the SHA-256 of its bytes."""
    return write_whole(path, profile_text(profile))


def profile_text(profile: Profile) -> str:
    """The document; seconds to six digits."""
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
    """A value in YAML's flow style."""
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
