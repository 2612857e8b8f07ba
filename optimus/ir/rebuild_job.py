"""Rebuilds the job that a plan was made for from what the plan file holds, or says what it does not hold."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from optimus.errors import UserError
from optimus.ir.binding import bind, bound_parts
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.checks import check_job
from optimus.job.cluster import Cluster
from optimus.job.job import Job
from optimus.job.layout import Constraints, Limits
from optimus.job.model import Model
from optimus.job.typed import Places
from optimus.job.workload import Workload

PARTS = {"model": Model, "cluster": Cluster, "workload": Workload}
HASHED = "sha256:"  # what stands in the place of a value too long for the file
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_MISSING = "name the job that the plan was made for with --job"


def rebuild_job(plan: Plan) -> Job:
    """The job with no layout stated; what is not in the file (`run`, `today`) is left out.

    Model, cluster and workload are exact: their hashes are those of the plan.
    """
    for part in PARTS:
        if part not in plan.bound_to:
            raise UserError(field=f"bound_to.{part}", problem="is missing", hint=_MISSING)
        for field, value in plan.bound_to[part].items():
            if isinstance(value, str) and value.startswith(HASHED):
                problem = "is too long for the plan file, which holds its hash only"
                raise UserError(field=f"{part}.{field}", problem=problem, hint=_MISSING)
    try:
        parts = {name: _made(kind, _tree(plan.bound_to[name])) for name, kind in PARTS.items()}
        job = Job(name=plan.name, layout=Constraints(limits=_limits(plan, parts["workload"])), **parts)
        _, hashes = bind(bound_parts(job))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"does not describe a job: {error}"
        raise UserError(field="bound_to", problem=problem, hint=_MISSING) from None
    for name in PARTS:
        if hashes[name] != plan.hashes.get(name):
            problem = f"holds a {name} that is not the one of the plan's hash"
            raise UserError(field="bound_to", problem=problem, hint=_MISSING)
    check_job(job, Places())
    return job


def _limits(plan: Plan, workload: Workload) -> Limits:
    """As noted; in a file of before they were, the usual ones, after the plan's own microbatch."""
    if "limits" in plan.notes:
        noted: Limits = _made(Limits, plan.notes["limits"])
        return noted
    own = max(1, workload.sequences_per_step // (plan.modules[LLM].layout.dp * plan.microbatches))
    sizes = dict.fromkeys((own, *Limits().microbatch_sequences))
    return Limits(microbatch_sequences=tuple(sizes))


def _tree(fields: Mapping[str, Any]) -> Any:
    """Flat fields such as `encoders[0].stack.hidden` as the tree they were made from; lists are by number."""
    root: dict[Any, Any] = {}
    for field, value in fields.items():
        steps = [int(number) if number else name for name, number in _STEP.findall(field)]
        at = root
        for step in steps[:-1]:
            at = at.setdefault(step, {})
        at[steps[-1]] = value
    return root


def _made(kind: Any, value: Any) -> Any:
    """A value of the plan file as what `kind` says; TypeError if it cannot be."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _made(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if origin in (Union, types.UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _made(inner, value)
    if origin is tuple:
        items = [value[place] for place in range(len(value))]  # a list, or entries by number
        kinds = [arguments[0]] * len(items) if arguments[-1] is ... else arguments
        return tuple(_made(each, item) for each, item in zip(kinds, items, strict=True))
    holds = (
        value in arguments
        if origin is Literal
        else type(value) in ((int, float) if kind is float else (kind,))
    )
    if not holds:
        raise TypeError(f"{value!r} for {kind}")
    return value
