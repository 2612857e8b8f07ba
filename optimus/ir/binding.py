"""Binds a plan to its job and refuses it, by the field that differs, for any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Protocol

from optimus.errors import UserError
from optimus.ir.plan import Plan
from optimus.job.job import Job

MAX_VALUE = 200  # characters of JSON; a longer value is replaced by its hash
ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Field whose value differs from the one the plan was made for."""

    part: str
    field: str
    planned: Any  # or ABSENT
    given: Any


class Measured(Protocol):
    """Part of a profile that a plan is bound to."""

    @property
    def issue_s(self) -> float | None: ...

    @property
    def slowdown(self) -> float | None: ...

    def bound(self) -> Any: ...


def bound_parts(job: Job, profile: Measured | None = None) -> dict[str, Any]:
    """Returns the parts of a job that a plan is bound to; `run:` is not one of them."""
    measured: dict[str, Any] = {"kernels": [] if profile is None else profile.bound()}
    if profile is not None and profile.issue_s is not None:
        measured["issue_s"] = profile.issue_s
    if profile is not None and profile.slowdown is not None:
        measured["slowdown"] = profile.slowdown
    return {
        "model": asdict(job.model),
        "cluster": asdict(job.cluster),
        "workload": asdict(job.workload),
        "profile": measured,
    }


def bind(parts: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Returns the flat fields of every part, and a hash of each, as a plan stores them."""
    bound_to = {part: dict(_flat(value, "")) for part, value in parts.items()}
    return bound_to, {part: hash_of(fields) for part, fields in bound_to.items()}


def hash_of(fields: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of flat fields, independent of their order."""
    return _sha256(_json(fields))


def mismatches(plan: Plan, parts: Mapping[str, Any]) -> list[Mismatch]:
    """Returns every field in which `parts` differ from what the plan was made for."""
    given_parts, _ = bind(parts)
    differing = []
    for part in [*plan.bound_to, *(part for part in given_parts if part not in plan.bound_to)]:
        planned, given = plan.bound_to.get(part, {}), given_parts.get(part, {})
        for field in [*planned, *(field for field in given if field not in planned)]:
            was, now = planned.get(field, ABSENT), given.get(field, ABSENT)
            if _json(was) != _json(now):  # 8 and 8.0 have different hashes
                differing.append(Mismatch(part=part, field=field, planned=was, given=now))
    return differing


def check_binding(plan: Plan, parts: Mapping[str, Any], *, file: str | None = None) -> None:
    """Raises if a plan was made for another job."""
    differing = mismatches(plan, parts)
    if not differing:
        return
    first, more = differing[0], len(differing) - 1
    others = f", and {more} more {'field differs' if more == 1 else 'fields differ'}" if more else ""
    raise UserError(
        field=f"{first.part}.{first.field}",
        problem=f"is {_shown(first.given)}, and the plan was made for {_shown(first.planned)}{others}",
        hint="plan again for this job, or run the job that the plan was made for",
        file=file,
    )


def _flat(value: Any, field: str) -> Iterator[tuple[str, Any]]:
    """Yields the fields below `value`, without `source`, which does not change a plan."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            if name != "source":
                yield from _flat(item, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _flat(item, f"{field}[{place}]")
    else:
        yield field, _short(value)


def _short(value: Any) -> Any:
    """Returns a value as JSON reads it back, or its hash if it is long."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    text = json.dumps(value, sort_keys=True, default=str)
    return json.loads(text) if len(text) <= MAX_VALUE else f"sha256:{_sha256(text)}"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(value: Any) -> str:
    text = str(value) if value == ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
