"""Binds a plan to its job: refuses it for any other job, and rebuilds the job from the plan alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from math import isfinite
from typing import Any, Protocol

from optimus.errors import UserError
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.checks import check_job
from optimus.job.cluster import Cluster
from optimus.job.job import Job
from optimus.job.layout import LayoutConstraints, SearchLimits
from optimus.job.model import Model
from optimus.job.nodes import DocumentNode, make_argument_node, parse_field_path
from optimus.job.typed import read_typed
from optimus.job.workload import Workload

MAX_VALUE_CHARACTERS = 200  # characters of JSON; a longer value is replaced by its hash
ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True)
class BindingMismatch:
    """Field whose value differs from the one the plan was made for."""

    part: str
    field: str
    planned: Any  # or ABSENT
    given: Any


class BoundProfile(Protocol):
    """Part of a profile that a plan is bound to."""

    @property
    def issue_s(self) -> float | None: ...

    @property
    def slowdown(self) -> float | None: ...

    def bound(self) -> Any: ...


def list_bound_parts(job: Job, profile: BoundProfile | None = None) -> dict[str, Any]:
    """Returns the parts of a job that a plan is bound to; `run:` is not one of them."""
    measured: dict[str, Any] = {"kernels": [] if profile is None else profile.bound()}
    if profile is not None and profile.issue_s is not None:
        measured["issue_s"] = profile.issue_s
    if profile is not None and profile.slowdown is not None:
        measured["slowdown"] = profile.slowdown
    return {
        "model": omit_default_constants(job.model),
        "cluster": asdict(job.cluster),
        "workload": asdict(job.workload),
        "profile": measured,
    }


def omit_default_constants(value: Any) -> Any:
    """Returns dataclasses as mappings, without constants that have their default."""
    if isinstance(value, tuple):
        return tuple(map(omit_default_constants, value))
    if not is_dataclass(value):
        return value
    items = ((field, getattr(value, field.name)) for field in fields(value))
    return {
        field.name: omit_default_constants(item)
        for field, item in items
        if not (field.metadata.get("constant") and item == field.default)
    }


def flatten_and_hash_parts(parts: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Returns the flat fields of every part, and a hash of each, as a plan stores them."""
    bound_to = {part: dict(_flat(value, "")) for part, value in parts.items()}
    return bound_to, {part: hash_fields(fields) for part, fields in bound_to.items()}


def hash_fields(fields: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of flat fields, independent of their order."""
    return _sha256(_json(fields))


def find_binding_mismatches(plan: Plan, parts: Mapping[str, Any]) -> list[BindingMismatch]:
    """Returns every field in which `parts` differ from what the plan was made for."""
    given_parts, _ = flatten_and_hash_parts(parts)
    differing = []
    for part in [*plan.bound_to, *(part for part in given_parts if part not in plan.bound_to)]:
        planned, given = plan.bound_to.get(part, {}), given_parts.get(part, {})
        for field in [*planned, *(field for field in given if field not in planned)]:
            was, now = planned.get(field, ABSENT), given.get(field, ABSENT)
            if _json(was) != _json(now):  # 8 and 8.0 have different hashes
                differing.append(BindingMismatch(part=part, field=field, planned=was, given=now))
    return differing


def require_plan_of_job(plan: Plan, parts: Mapping[str, Any], *, file: str | None = None) -> None:
    """Raises if a plan was made for another job."""
    differing = find_binding_mismatches(plan, parts)
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
    """Yields the fields below `value`, without `source` and `derived`, which do not change a plan."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            if name not in ("source", "derived"):
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
    return json.loads(text) if len(text) <= MAX_VALUE_CHARACTERS else f"sha256:{_sha256(text)}"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(value: Any) -> str:
    text = str(value) if value == ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------------- rebuilding the job

_JOB_PARTS = {"model": Model, "cluster": Cluster, "workload": Workload}
_HASH_PREFIX = "sha256:"  # replaces a value that is too long for the file
_MISSING = "name the job that the plan was made for with --job"


def rebuild_job(plan: Plan) -> Job:
    """Returns the job without stated layouts; `run` and `today` are not in the file.

    Model, cluster and workload are exact: their hashes are those of the plan.
    """
    for part in _JOB_PARTS:
        if part not in plan.bound_to:
            raise UserError(field=f"bound_to.{part}", problem="is missing", hint=_MISSING)
        for field, value in plan.bound_to[part].items():
            if isinstance(value, str) and value.startswith(_HASH_PREFIX):
                problem = "is too long for the plan file, which holds its hash only"
                raise UserError(field=f"{part}.{field}", problem=problem, hint=_MISSING)
    try:
        parts: dict[str, Any] = {
            name: read_typed(kind, _node(plan, name)) for name, kind in _JOB_PARTS.items()
        }
        job = Job(name=plan.name, layout=LayoutConstraints(limits=_limits(plan, parts["workload"])), **parts)
        bound_to, _ = flatten_and_hash_parts(list_bound_parts(job))
    except (ArithmeticError, AttributeError, LookupError, TypeError, UserError, ValueError) as error:
        problem = f"does not describe a job: {error.problem if isinstance(error, UserError) else error}"
        raise UserError(field="bound_to", problem=problem, hint=_MISSING) from None
    for name in _JOB_PARTS:
        if bound_to[name] != plan.bound_to[name] or hash_fields(plan.bound_to[name]) != plan.hashes.get(name):
            problem = f"holds a {name} that is not the one of the plan's hash"
            raise UserError(field="bound_to", problem=problem, hint=_MISSING)
    check_job(job)
    return job


def _limits(plan: Plan, workload: Workload) -> SearchLimits:
    """Returns the limits in the notes, or in older files the defaults after the plan's microbatch size."""
    if "limits" in plan.notes:
        return read_typed(SearchLimits, make_argument_node("notes.limits", plan.notes["limits"]))
    planned = max(1, workload.sequences_per_step // (plan.modules[LLM].layout.dp * plan.microbatches))
    sizes = dict.fromkeys((planned, *SearchLimits().microbatch_sequences))
    return SearchLimits(microbatch_sequences=tuple(sizes))


def _node(plan: Plan, part: str) -> DocumentNode:
    """Returns the tree of flat fields such as `encoders[0].stack.hidden`."""
    root: dict[Any, Any] = {}
    for field, value in plan.bound_to[part].items():
        *blocks, last = parse_field_path(field)
        block = root
        for step in blocks:
            block = block.setdefault(step, {})
        block[last] = value
    return make_argument_node(f"bound_to.{part}", _with_lists(root))


def _with_lists(tree: Any) -> Any:
    """Returns the tree with lists in place of mappings whose keys are indices."""
    if not isinstance(tree, dict):
        return tree
    values = {step: _with_lists(value) for step, value in tree.items()}
    return [values[index] for index in range(len(values))] if 0 in values else values
