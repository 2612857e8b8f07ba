"""Finds and reads catalog files: models, modules, clusters and jobs that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import optimus.catalog
from optimus.errors import nearest
from optimus.job.cluster import FLAT
from optimus.job.model import Encoder, Llm, Model
from optimus.job.nodes import DocumentNode, make_argument_node, merge_yaml, read_text
from optimus.job.typed import Amount, read_typed
from optimus.job.yaml_parser import parse_yaml

Kind = Literal["models", "modules", "clusters", "jobs"]
ModuleKind = Literal["encoder", "llm"]

CATALOG = Path(optimus.catalog.__file__).parent


@cache
def list_catalog_names(kind: Kind) -> tuple[str, ...]:
    """Returns all names of one kind, sorted; jobs in folders are `folder/name`."""
    folder = CATALOG / kind
    return tuple(
        sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    )


@cache
def list_gpu_curves() -> tuple[str, ...]:
    """Returns the valid values of `gpu.curves`: the systems with measured curves, and `flat`."""
    return (*sorted(path.name for path in (CATALOG / "curves").iterdir() if path.is_dir()), FLAT)


def resolve_gpu_curves(name: str) -> str:
    """Returns the catalog's spelling of `gpu.curves` in any letter case; an unknown name as it is."""
    return next((known for known in list_gpu_curves() if known.lower() == name.lower()), name)


@cache
def list_cluster_aliases() -> dict[str, str]:
    """Returns the short names of clusters: `h100` is `h100-sxm-80gb`."""
    return {
        alias: name
        for name in list_catalog_names("clusters")
        for alias in read_typed(tuple[str, ...], load_catalog_node("clusters", name)["aliases"])
    }


@cache
def load_catalog_node(kind: Kind, name: str) -> DocumentNode:
    """Returns the root of a catalog file that exists."""
    path = CATALOG / kind / f"{name}.yaml"
    return parse_yaml(read_text(path), file=f"catalog/{kind}/{name}.yaml")


@cache
def resolve_catalog_name(kind: Kind, name: str) -> str | None:
    """Returns the catalog's spelling of a name or alias in any letter case; None if it has no such name."""
    short = list_cluster_aliases() if kind == "clusters" else {}
    spelled = {known.lower(): known for known in list_catalog_names(kind)} | {
        a.lower(): full for a, full in short.items()
    }
    return spelled.get(name.lower())


def find_catalog_node(kind: Kind, name: str, *, where: DocumentNode) -> DocumentNode:
    """Returns the root of a catalog file by name or alias; else raises at `where` with the nearest name."""
    full = resolve_catalog_name(kind, name)
    if full is not None:
        return load_catalog_node(kind, full)
    short = list_cluster_aliases() if kind == "clusters" else {}
    raise where.error(
        f"is not in the catalog of {kind}", nearest(name, (*list_catalog_names(kind), *short)), name
    )


# ---------------------------------------------------------------------------- models and modules


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """File of catalog/models: a whole model. `stated_...` is what its name or card says."""

    format: Literal["optimus.model/1"]
    name: str
    encoders: tuple[Encoder, ...]
    llm: Llm
    source: str
    stated_parameters_b: Amount
    stated_active_b: Amount | None = None  # of the LLM
    stated_source: str
    stated_note: str = ""
    stated_ratio: Amount | None = None  # where the arithmetic misses the stated count by more than 2 %


@dataclass(frozen=True, kw_only=True)
class ModuleFile:
    """File of catalog/modules: an encoder without its projector, or an LLM, to compose models from."""

    format: Literal["optimus.module/1"]
    name: str
    encoder: object = None
    llm: object = None
    stated_parameters_b: Amount | None = None
    stated_source: str = ""
    stated_note: str = ""
    stated_ratio: Amount | None = None


def read_catalog_model(name: str, *, where: DocumentNode | None = None) -> Model:
    """Reads a whole model of the catalog; an unknown name is an error at `where`."""
    root = find_catalog_node("models", name, where=where or make_argument_node("model", name))
    file = read_typed(ModelFile, expand_catalog_modules(root))
    return Model(name=file.name, encoders=file.encoders, llm=file.llm, source=file.source)


def _find_catalog_module(kind: ModuleKind, name: str, *, where: DocumentNode) -> Any:
    """Returns the YAML value of a catalog module of the kind that is needed."""
    root = find_catalog_node("modules", name, where=where)
    read_typed(ModuleFile, root)
    if kind not in root:
        fitting = [
            known for known in list_catalog_names("modules") if kind in load_catalog_node("modules", known)
        ]
        raise where.error(f"is not an {kind}", nearest(name, fitting))
    return root[kind].value


def expand_catalog_modules(root: DocumentNode, field: str = "") -> DocumentNode:
    """Returns the document with the modules of the block `field` merged over the catalog modules they use."""
    encoders = root.at(field)["encoders"].value
    count = len(encoders) if isinstance(encoders, list) else 0
    names = [f"encoders[{index}]" for index in range(count)]
    for name in (*names, "llm"):
        root = _expand("llm" if name == "llm" else "encoder", root.at(field).at(name)).root
    return root


def _expand(kind: ModuleKind, node: DocumentNode) -> DocumentNode:
    use = node["use"]
    if "use" not in node:
        return node
    if not isinstance(use.value, str):
        hint = nearest(str(use.value), list_catalog_names("modules"))
        raise use.error("is not the name of a catalog module", hint)
    base = _find_catalog_module(kind, use.value, where=use)
    return node.replaced(merge_yaml(base, node.without("use").value))
