"""Turns a YAML file, a catalog name or a config.json into a checked job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from optimus.errors import UserError, nearest, one_of
from optimus.job import catalog
from optimus.job.checks import check_job
from optimus.job.cluster import GB, Cluster, Gpu, Link
from optimus.job.hf_config import read_hf_config
from optimus.job.job import Job, Run, Today, on_other_cluster
from optimus.job.layout import Constraints, LayoutChoice, Limits, parse_layout
from optimus.job.model import Model
from optimus.job.nodes import NO_FILE, Node, Position, YamlMapping, argument, load_yaml, merged
from optimus.job.read_workload import default_workload, read_workload
from optimus.job.schema import (
    ClusterBlock,
    JobFile,
    LinkBlock,
    ModelBlock,
    ModelFile,
    ModuleFile,
    ModuleSwitches,
    Placement,
    TodayBlock,
)
from optimus.job.typed import read, refuse_unknown

JOB_ENDINGS = (".yaml", ".yml")


def find_job(name_or_path: str | Path, on: str | None = None, layouts: Iterable[str] = ()) -> Job:
    """JOB of every command: a YAML file, a catalog job, or a catalog model or config.json with `on`.

    `layouts` such as `llm=pp8,tp4` are stated on top of the job's own.
    """
    name, path = str(name_or_path), Path(name_or_path)
    if job_name := catalog.full_name("jobs", name):
        return _assemble(catalog.node("jobs", job_name), job_name, Path(), on, layouts)
    if path.suffix in JOB_ENDINGS:
        return load_job(path, on=on, layouts=layouts)
    if catalog.full_name("models", name) or _is_config(path):
        return make_job(model=name, on=on, layouts=layouts)
    known = (*catalog.names("jobs"), *catalog.names("models"))
    hint = f"{nearest(name, known)}; or the path of a job.yaml or config.json"
    problem = "is neither a job.yaml, a config.json nor in the catalog"
    raise UserError(field="JOB", value=name, problem=problem, hint=hint)


def make_job(*, model: str | Path | Model, on: str | None, layouts: Iterable[str] = ()) -> Job:
    """A job without a file: a catalog model or a config.json, on a cluster such as `h100:512`."""
    model = model if isinstance(model, Model) else load_model(model)
    if on is None:
        short = sorted(catalog.aliases())
        hint = f"add --on {short[-2]}:512 (clusters: {one_of(short)})"
        raise UserError(
            field="--on", problem=f"is missing: the model {model.name} needs a cluster", hint=hint
        )
    node = place_on(NO_FILE, on)
    cluster = read_cluster(node)
    workload, notes = default_workload(model, cluster.gpus)
    layout = stated_on_top(Constraints(), layouts, model)
    job = Job(name=model.name, model=model, cluster=cluster, workload=workload, layout=layout, notes=notes)
    check_job(job, node.root)
    return job


def load_model(name_or_path: str | Path) -> Model:
    """A catalog model by name, or a released config.json (or the folder that holds one)."""
    path = Path(name_or_path)
    if catalog.full_name("models", str(name_or_path)) is None and _is_config(path):
        return read_hf_config(path / "config.json" if path.is_dir() else path)
    return catalog_model(str(name_or_path))


def load_cluster(on: str) -> Cluster:
    """`h100:512`: a catalog cluster by name or alias, and its GPUs."""
    return read_cluster(place_on(NO_FILE, on))


def load_job(path: str | Path, *, on: str | None = None, layouts: Iterable[str] = ()) -> Job:
    """A job file; `on` puts it on another cluster."""
    path = Path(path)
    return _assemble(load_yaml(path), path.stem, path.parent, on, layouts)


def stated_on_top(
    layout: Constraints, stated: Iterable[str], model: Model, *, field: str = "--layout"
) -> Constraints:
    """Constraints with layouts such as `llm=pp8,tp4` stated on top; `dp` follows where it can."""
    modules = dict(layout.modules)
    names = [module.name for module in model.modules]
    for text in stated:
        name, choice = parse_layout(text, field=field)
        if name not in names:
            problem = f"names {name}, which is not a module of {model.name}"
            raise UserError(field=field, value=text, problem=problem, hint=nearest(name, names))
        axes = {**modules.get(name, LayoutChoice()).stated(), **choice.stated()}
        if choice.dp is None and {"pp", "cp", "tp"} & set(choice.stated()):
            axes.pop("dp", None)  # it followed from the others
        modules[name] = LayoutChoice(**axes)
    return replace(layout, modules=modules)


def _is_config(path: Path) -> bool:
    return path.suffix == ".json" or (path / "config.json").is_file()


def _assemble(root: Node, name: str, folder: Path, on: str | None, layouts: Iterable[str]) -> Job:
    file = read(JobFile, root)
    root = expand_modules(root, "model")
    model = read_model(root["model"], folder)
    root = (expand_cluster(root["cluster"], folder) if on is None else place_on(root, on)).root
    cluster = read_cluster(root["cluster"])
    if file.workload is None:
        workload, notes = default_workload(model, cluster.gpus)
    else:
        workload, notes = read_workload(root["workload"], model, folder)
    layout = Constraints() if file.layout is None else _constraints(root["layout"], model)
    today = None if file.today is None else _today(root["today"], file.today, model)
    if on is not None:
        layout, today = on_other_cluster(layout, today)
    job = Job(
        name=file.name or name,
        model=model,
        cluster=cluster,
        workload=workload,
        layout=stated_on_top(layout, layouts, model),
        today=today,
        run=Run(settings=file.run),
        notes=notes,
    )
    check_job(job, root)
    return job


def _constraints(node: Node, model: Model) -> Constraints:
    names = [module.name for module in model.modules]
    read(dict[str, object], node)
    refuse_unknown(node, (*names, "limits"))
    limits = read(Limits, node["limits"]) if "limits" in node else Limits()
    choices = {name: read(LayoutChoice, node[name]) for name in names if name in node}
    stated = {name: choice for name, choice in choices.items() if choice.stated()}
    return Constraints(modules=stated, limits=limits)


def _today(node: Node, block: TodayBlock, model: Model) -> Today:
    llm, placement = LayoutChoice(), "stage0"
    if block.layout is not None:
        layout = node["layout"]
        read(dict[str, object], layout)
        refuse_unknown(layout, [module.name for module in model.modules])
        if "llm" in layout:
            llm = read(LayoutChoice, layout["llm"])
        encoders = [name for name in layout.entries() if name != "llm"]
        for name in encoders:
            placement = str(read(Placement, layout[name]))
            if placement != layout[encoders[0]].value:
                problem = f"differs from {layout[encoders[0]].field} = {layout[encoders[0]].value}"
                raise layout[name].error(problem, "place all encoders alike")
    measured = block.measured
    peak = measured.peak_memory_gb
    return Today(
        framework=block.framework,
        llm=llm,
        placement=placement,
        measured_step_s=measured.step_s,
        measured_memory_bytes=None if peak is None else peak * GB,
    )


ENDINGS = (".yaml", ".yml")  # of a cluster's own file


def expand_cluster(node: Node, folder: Path = Path()) -> Node:
    """The block `cluster:` over the file that its `use` names, a path below `folder` or a catalog name."""
    if "use" not in node:
        return node
    name = str(node["use"].value)
    if name.endswith(ENDINGS):
        base = load_yaml(folder / name)
    else:
        base = catalog.find("clusters", name, where=node["use"]).without("aliases")
    return node.replaced(merged(base.value, node.without("use").value))


def read_cluster(node: Node) -> Cluster:
    """The cluster of an expanded block `cluster:`."""
    block = read(ClusterBlock, node)
    return Cluster(
        name=block.name,
        gpu=Gpu(
            name=block.gpu.name or block.name,
            peak_flops=block.gpu.peak_tflops * 1e12,
            memory_bytes=block.gpu.memory_gb * GB,
            memory_bandwidth_bytes_per_s=block.gpu.memory_tb_per_s * 1e12,
            curves=block.gpu.curves,
            source=block.gpu.source,
        ),
        gpus=block.gpus,
        gpus_per_node=block.gpus_per_node,
        within_node=_link(block.within_node),
        between_nodes=_link(block.between_nodes),
        reserve_bytes=block.reserve_gb_per_gpu * GB,
    )


def _link(block: LinkBlock) -> Link:
    return Link(
        bandwidth_bytes_per_s=block.gb_per_s_per_gpu * GB,
        latency_s=block.latency_us * 1e-6,
        source=block.source,
    )


def place_on(root: Node, on: str) -> Node:
    """The block `cluster:` of a job file that is placed on `h100:512` or `machine.yaml:2`."""
    name, _, count = on.rpartition(":")
    if not (count.isascii() and count.isdigit() and 0 < len(count) < 10 and int(count) > 0):
        raise UserError(
            field="--on",
            value=on,
            problem="is not CLUSTER:GPUS",
            hint="write for example --on h100:512",
        )
    if not name.endswith(ENDINGS):
        catalog.find("clusters", name, where=argument("--on", name))
    position: Position = ("--on", None)
    block = YamlMapping({"use": name, "gpus": int(count)}, {"use": position, "gpus": position})
    return expand_cluster(root["cluster"].replaced(block, position))


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
