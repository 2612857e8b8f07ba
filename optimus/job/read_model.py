"""Reads the `model:` block: from the catalog, from a released config.json, or by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from optimus.errors import nearest
from optimus.job import catalog
from optimus.job.hf_config import read_hf_config
from optimus.job.model import Encoder, Llm, Model
from optimus.job.schema import ModelBlock, ModelFile, ModuleFile, ModuleSwitches
from optimus.job.typed import Places, join
from optimus.job.yaml_nodes import Node, merged


def read_model(places: Places, node: Node, folder: Path) -> Model:
    """The model of a job file whose relative paths start at `folder`."""
    block = places.read(ModelBlock, node, "model")
    forms = [name for name in ("hf", "use", "llm") if getattr(block, name) is not None]
    if len(forms) != 1:
        problem = f"states {' and '.join(forms)}" if forms else "states neither hf, use nor llm"
        hint = "state one of: hf (a config.json), use (a catalog name), encoders with llm (dimensions)"
        raise node.error("model", problem, hint)
    if block.encoders is not None and block.llm is None:
        raise places.error("model.encoders", f"stands beside {forms[0]}", "state one of them")
    if block.hf is not None:
        model = read_hf_config(folder / block.hf)
    elif block.use is not None:
        model = catalog_model(block.use, where=node.entries["use"])
    else:
        model = _compose(places, node, "model", block.name or "model", block.encoders or (), block.llm)
    if block.precision is not None:
        model = replace(model, precision=block.precision)
    changed = replace(model, name=block.name or model.name, source=block.source or model.source)
    return _switch(places, block.modules, changed)


def catalog_model(name: str, *, where: Node | None = None, field: str = "model.use") -> Model:
    """A whole model of the catalog."""
    node = catalog.find("models", name, field=field, where=where)
    places = Places()
    file = places.read(ModelFile, node, "")
    model = _compose(places, node, "", file.name, file.encoders, file.llm)
    return replace(model, source=file.source)


@dataclass(frozen=True, kw_only=True)
class Part:
    """An encoder or LLM of catalog/modules and what is said about it."""

    file: ModuleFile
    node: Node


def catalog_part(
    kind: Literal["encoder", "llm"], name: str, *, field: str, where: Node | None = None
) -> Part:
    """A module of the catalog, of the kind that is needed."""
    root = catalog.find("modules", name, field=field, where=where)
    file = Places().read(ModuleFile, root, "")
    node = file.encoder if kind == "encoder" else file.llm
    if node is None:
        fitting = [n for n in catalog.names("modules") if kind in catalog.node("modules", n).entries]
        raise (where or root).error(field, f"is not an {kind}", nearest(name, fitting), name)
    return Part(file=file, node=node)


def _compose(
    places: Places, where: Node, field: str, name: str, encoders: tuple[Node, ...], llm: Node | None
) -> Model:
    assert llm is not None
    read = []
    for index, node in enumerate(encoders):
        here = join(field, f"encoders[{index}]")
        read.append(places.read(Encoder, _laid_over("encoder", node, here), here))
    here = join(field, "llm")
    found = places.read(Llm, _laid_over("llm", llm, here), here)
    return Model(name=name, encoders=tuple(read), llm=found, source=where.file)


def _laid_over(kind: Literal["encoder", "llm"], node: Node, field: str) -> Node:
    """What a block states over the catalog module it uses, if it uses one."""
    use = node.entries.get("use")
    if use is None:
        return node
    if not isinstance(use.value, str):
        hint = nearest(str(use.value), catalog.names("modules"))
        raise use.error(join(field, "use"), "is not the name of a catalog module", hint)
    part = catalog_part(kind, use.value, field=join(field, "use"), where=use)
    return merged(part.node, node.without("use"))


def _switch(places: Places, node: Node | None, model: Model) -> Model:
    """`modules:` of a job file: train and recompute, module by module."""
    if node is None:
        return model
    by_name = {module.name: module for module in model.modules}
    switches = places.read(dict[str, ModuleSwitches], node, "model.modules")
    places.refuse_unknown(node, "model.modules", by_name)
    encoders = []
    for encoder in model.encoders:
        change = switches.get(encoder.name, ModuleSwitches())
        projector = encoder.projector
        if change.train_projector is not None:
            projector = replace(projector, train=change.train_projector)
        train = encoder.train if change.train is None else change.train
        recompute = change.recompute or encoder.recompute
        encoders.append(replace(encoder, projector=projector, train=train, recompute=recompute))
    change = switches.get("llm", ModuleSwitches())
    if change.train_projector is not None:
        raise places.error("model.modules.llm.train_projector", "is not known here", "use it on an encoder")
    train = model.llm.train if change.train is None else change.train
    llm = replace(model.llm, train=train, recompute=change.recompute or model.llm.recompute)
    return replace(model, encoders=tuple(encoders), llm=llm)
