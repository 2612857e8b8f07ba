"""Finds catalog files by name: models, modules, clusters and jobs that come with the package."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import optimus.catalog
from optimus.errors import UserError, nearest
from optimus.job.cluster import FLAT
from optimus.job.yaml_nodes import Node, parse_yaml, read_text

Kind = Literal["models", "modules", "clusters", "jobs"]

_ROOT = Path(optimus.catalog.__file__).parent


@cache
def names(kind: Kind) -> tuple[str, ...]:
    """All names of one kind, sorted; jobs in folders are `folder/name`."""
    folder = _ROOT / kind
    return tuple(
        sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    )


@cache
def curves() -> tuple[str, ...]:
    """What `gpu.curves` may name: the systems with measured curves, and none of them."""
    return (*sorted(path.name for path in (_ROOT / "curves").iterdir() if path.is_dir()), FLAT)


@cache
def aliases() -> dict[str, str]:
    """Short names of clusters: `h100` is `h100-sxm-80gb`."""
    found = {}
    for name in names("clusters"):
        listed = node("clusters", name).entries.get("aliases")
        for alias in listed.value if listed and isinstance(listed.value, list) else ():
            found[str(alias.value)] = name
    return found


@cache
def node(kind: Kind, name: str) -> Node:
    """The root of a catalog file that exists."""
    path = _ROOT / kind / f"{name}.yaml"
    return parse_yaml(read_text(path), file=f"catalog/{kind}/{name}.yaml")


def find(kind: Kind, name: str, *, field: str, where: Node | None = None) -> Node:
    """The root of a catalog file, by name or alias; else an error at `field` that proposes the nearest."""
    known = names(kind)
    short = aliases() if kind == "clusters" else {}
    full = short.get(name, name)
    if full in known:
        return node(kind, full)
    hint = nearest(name, (*known, *short))
    problem = f"is not in the catalog of {kind}"
    if where is None:
        raise UserError(field=field, value=name, problem=problem, hint=hint)
    raise where.error(field, problem, hint, name)
