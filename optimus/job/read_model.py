"""Reads the `model:` block: from the catalog, from a released config.json, or by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from optimus.errors import nearest
from optimus.job import catalog
from optimus.job.hf_config import read_hf_config
from optimus.job.model import Model
from optimus.job.nodes import Node, argument, merged
from optimus.job.schema import ModelBlock, ModelFile, ModuleFile, ModuleSwitches
from optimus.job.typed import read, refuse_unknown

ModuleKind = Literal["encoder", "llm"]


def read_model(node: Node, folder: Path) -> Model:
    """The model of a job file whose relative paths start at `folder`; its modules are expanded."""
    block = read(ModelBlock, node)
    forms = [name for name in ("hf", "use", "llm") if getattr(block, name) is not None]
    if len(forms) != 1:
        problem = f"states {' and '.join(forms)}" if forms else "states neither hf, use nor llm"
        hint = "state one of: hf (a config.json), use (a catalog name), encoders with llm (dimensions)"
        raise node.error(problem, hint)
    if block.encoders is not None and block.llm is None:
        raise node["encoders"].error(f"stands beside {forms[0]}", "state one of them")
    if block.hf is not None:
        model = read_hf_config(folder / block.hf)
    elif block.use is not None:
        model = catalog_model(block.use, where=node["use"])
    else:
        assert block.llm is not None
        source = str(node.document.file)
        model = Model(name="model", encoders=block.encoders or (), llm=block.llm, source=source)
    if block.precision is not None:
        model = replace(model, precision=block.precision)
    named = replace(model, name=block.name or model.name, source=block.source or model.source)
    refuse_unknown(node["modules"], [module.name for module in model.modules])
    return _switch(node["modules"], block.modules, named)


def catalog_model(name: str, *, where: Node | None = None) -> Model:
    """A whole model of the catalog; an unknown name is an error at `where`."""
    root = catalog.find("models", name, where=where or argument("model", name))
    file = read(ModelFile, expand_modules(root))
    return Model(name=file.name, encoders=file.encoders, llm=file.llm, source=file.source)


def catalog_module(kind: ModuleKind, name: str, *, where: Node) -> Any:
    """The YAML value of a module of the catalog, of the kind that is needed."""
    root = catalog.find("modules", name, where=where)
    read(ModuleFile, root)
    if kind not in root:
        fitting = [known for known in catalog.names("modules") if kind in catalog.node("modules", known)]
        raise where.error(f"is not an {kind}", nearest(name, fitting))
    return root[kind].value


def expand_modules(root: Node, field: str = "") -> Node:
    """The document whose modules in the block `field` are laid over the catalog modules that they use."""
    encoders = root.at(field)["encoders"].value
    count = len(encoders) if isinstance(encoders, list) else 0
    names = [f"encoders[{index}]" for index in range(count)]
    for name in (*names, "llm"):
        root = _expand("llm" if name == "llm" else "encoder", root.at(field).at(name)).root
    return root


def _expand(kind: ModuleKind, node: Node) -> Node:
    use = node["use"]
    if "use" not in node:
        return node
    if not isinstance(use.value, str):
        hint = nearest(str(use.value), catalog.names("modules"))
        raise use.error("is not the name of a catalog module", hint)
    base = catalog_module(kind, use.value, where=use)
    return node.replaced(merged(base, node.without("use").value))


def _switch(node: Node, switches: dict[str, ModuleSwitches], model: Model) -> Model:
    """The model with the switches of `modules:`: train and recompute, module by module."""
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
        raise node.at("llm.train_projector").error("is not known here", "use it on an encoder", shown=False)
    train = model.llm.train if change.train is None else change.train
    llm = replace(model.llm, train=train, recompute=change.recompute or model.llm.recompute)
    return replace(model, encoders=tuple(encoders), llm=llm)
