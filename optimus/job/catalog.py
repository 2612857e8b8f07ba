"""Finds catalog files by name: models, modules, clusters and jobs that come with the package."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import optimus.catalog
from optimus.errors import nearest
from optimus.job.cluster import FLAT
from optimus.job.nodes import Node, parse_yaml, read_text
from optimus.job.typed import read

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
    """Valid values of `gpu.curves`: the systems with measured curves, and `flat`."""
    return (*sorted(path.name for path in (_ROOT / "curves").iterdir() if path.is_dir()), FLAT)


@cache
def aliases() -> dict[str, str]:
    """Short names of clusters: `h100` is `h100-sxm-80gb`."""
    return {
        alias: name
        for name in names("clusters")
        for alias in read(tuple[str, ...], node("clusters", name)["aliases"])
    }


@cache
def node(kind: Kind, name: str) -> Node:
    """The root of a catalog file that exists."""
    path = _ROOT / kind / f"{name}.yaml"
    return parse_yaml(read_text(path), file=f"catalog/{kind}/{name}.yaml")


@cache
def full_name(kind: Kind, name: str) -> str | None:
    """The catalog's own spelling of a name or alias in any letter case; None if it has no such name."""
    short = aliases() if kind == "clusters" else {}
    spelled = {known.lower(): known for known in names(kind)} | {a.lower(): full for a, full in short.items()}
    return spelled.get(name.lower())


def find(kind: Kind, name: str, *, where: Node) -> Node:
    """The root of a catalog file, by name or alias; else an error at `where` that proposes the nearest."""
    full = full_name(kind, name)
    if full is not None:
        return node(kind, full)
    short = aliases() if kind == "clusters" else {}
    raise where.error(f"is not in the catalog of {kind}", nearest(name, (*names(kind), *short)), name)
