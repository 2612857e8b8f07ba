"""Rebuilds the job of a plan from the plan file, or names the field that is missing."""

from __future__ import annotations

from typing import Any

from optimus.errors import UserError
from optimus.ir.binding import bind, bound_parts, hash_of
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.checks import check_job
from optimus.job.cluster import Cluster
from optimus.job.job import Job
from optimus.job.layout import Constraints, Limits
from optimus.job.model import Model
from optimus.job.nodes import Node, argument, parse_field
from optimus.job.typed import read
from optimus.job.workload import Workload

PARTS = {"model": Model, "cluster": Cluster, "workload": Workload}
HASHED = "sha256:"  # replaces a value that is too long for the file
_MISSING = "name the job that the plan was made for with --job"


def rebuild_job(plan: Plan) -> Job:
    """Returns the job without stated layouts; `run` and `today` are not in the file.

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
        parts: dict[str, Any] = {name: read(kind, _node(plan, name)) for name, kind in PARTS.items()}
        job = Job(name=plan.name, layout=Constraints(limits=_limits(plan, parts["workload"])), **parts)
        bound_to, _ = bind(bound_parts(job))
    except (ArithmeticError, AttributeError, LookupError, TypeError, UserError, ValueError) as error:
        problem = f"does not describe a job: {error.problem if isinstance(error, UserError) else error}"
        raise UserError(field="bound_to", problem=problem, hint=_MISSING) from None
    for name in PARTS:
        if bound_to[name] != plan.bound_to[name] or hash_of(plan.bound_to[name]) != plan.hashes.get(name):
            problem = f"holds a {name} that is not the one of the plan's hash"
            raise UserError(field="bound_to", problem=problem, hint=_MISSING)
    check_job(job)
    return job


def _limits(plan: Plan, workload: Workload) -> Limits:
    """Returns the limits in the notes, or in older files the defaults after the plan's microbatch size."""
    if "limits" in plan.notes:
        return read(Limits, argument("notes.limits", plan.notes["limits"]))
    planned = max(1, workload.sequences_per_step // (plan.modules[LLM].layout.dp * plan.microbatches))
    sizes = dict.fromkeys((planned, *Limits().microbatch_sequences))
    return Limits(microbatch_sequences=tuple(sizes))


def _node(plan: Plan, part: str) -> Node:
    """Returns the tree of flat fields such as `encoders[0].stack.hidden`."""
    root: dict[Any, Any] = {}
    for field, value in plan.bound_to[part].items():
        *blocks, last = parse_field(field)
        block = root
        for step in blocks:
            block = block.setdefault(step, {})
        block[last] = value
    return argument(f"bound_to.{part}", _with_lists(root))


def _with_lists(tree: Any) -> Any:
    """Returns the tree with lists in place of mappings whose keys are indices."""
    if not isinstance(tree, dict):
        return tree
    values = {step: _with_lists(value) for step, value in tree.items()}
    return [values[index] for index in range(len(values))] if 0 in values else values
