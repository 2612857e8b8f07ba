"""Turns a YAML file, a catalog name or a config.json into a checked job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from optimus.errors import UserError, nearest, one_of
from optimus.job.catalog_files import (
    expand_catalog_modules,
    find_catalog_node,
    list_catalog_names,
    list_cluster_aliases,
    load_catalog_node,
    read_catalog_model,
    resolve_catalog_name,
    resolve_gpu_curves,
)
from optimus.job.checks import check_job
from optimus.job.cluster import GB, Cluster, ClusterBlock, Gpu, Link, LinkBlock
from optimus.job.data_source import CONFIG, DataSource, find_model_dir, read_data_source
from optimus.job.hf_config import read_hf_config
from optimus.job.job import CurrentRun, Job, adapt_to_other_cluster
from optimus.job.layout import (
    CurrentPlacement,
    CurrentSchedule,
    LayoutConstraints,
    PartialLayout,
    SearchLimits,
    TokenDispatcher,
    parse_layout,
)
from optimus.job.model import Encoder, Llm, Model, Precision, Recompute
from optimus.job.nodes import (
    NO_FILE,
    DocumentNode,
    Position,
    YamlMapping,
    is_dir,
    is_file,
    make_argument_node,
    merge_yaml,
)
from optimus.job.typed import Amount, Count, Share, read_typed, refuse_unknown_keys
from optimus.job.workload import assume_workload, read_workload
from optimus.job.yaml_parser import load_yaml

JOB_ENDINGS = CLUSTER_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class MeasuredBlock:
    """Measurements of the job as it runs today."""

    step_s: Amount | None = None
    peak_memory_gb: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class TodayBlock:
    """`today:` of a job file."""

    framework: str = ""
    layout: object = None
    microbatch_sequences: Count | None = None
    schedule: CurrentSchedule | None = None
    reshard_after_forward: bool | None = None
    recompute: object = None
    tp_overlapped: Share | None = None
    ep_overlapped: Share | None = None
    token_dispatcher: TokenDispatcher | None = None
    measured: MeasuredBlock = field(default_factory=MeasuredBlock)


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """Job file; blocks that refer to the catalog or to module names are read later."""

    format: Literal["optimus.job/1"]
    name: str | None = None
    source: str = ""
    model: object
    cluster: object
    workload: object = None
    data: object = None
    layout: object = None
    today: TodayBlock | None = None
    run: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModuleOverrides:
    """Changes that a job makes to a module of its model."""

    train: bool | None = None
    train_projector: bool | None = None
    recompute: Recompute | None = None


@dataclass(frozen=True, kw_only=True)
class ModelBlock:
    """`model:` of a job file: one of `hf`, `use`, or `encoders` with `llm`."""

    hf: str | None = None
    use: str | None = None
    name: str | None = None
    encoders: tuple[Encoder, ...] | None = None
    llm: Llm | None = None
    family: str = ""
    modules: dict[str, ModuleOverrides] = field(default_factory=dict)
    precision: Precision | None = None
    source: str = ""


def find_job(name_or_path: str | Path, on: str | None = None, layouts: Iterable[str] = ()) -> Job:
    """Finds the JOB of a command: a YAML file, a catalog job, or a catalog model or config.json with `on`.

    `layouts` such as `llm=pp8,tp4` are stated on top of the job's own.
    """
    name, path = str(name_or_path), Path(name_or_path)
    if job_name := resolve_catalog_name("jobs", name):
        return _assemble(load_catalog_node("jobs", job_name), job_name, Path(), on, layouts)
    if path.suffix in JOB_ENDINGS:
        return load_job(path, on=on, layouts=layouts)
    if resolve_catalog_name("models", name) or _is_config(path):
        return make_job(model=name, on=on, layouts=layouts)
    known = (*list_catalog_names("jobs"), *list_catalog_names("models"))
    hint = f"{nearest(name, known)}; or the path of a job.yaml or config.json"
    problem = "is neither a job.yaml, a config.json nor in the catalog"
    raise UserError(field="JOB", value=name, problem=problem, hint=hint)


def make_job(*, model: str | Path | Model, on: str | None, layouts: Iterable[str] = ()) -> Job:
    """Builds a job without a file: a catalog model or a config.json, on a cluster such as `h100:512`."""
    model = model if isinstance(model, Model) else load_model(model)
    if on is None:
        short = sorted(list_cluster_aliases())
        hint = f"add --on {short[-2]}:512 (clusters: {one_of(short)})"
        raise UserError(
            field="--on", problem=f"is missing: the model {model.name} needs a cluster", hint=hint
        )
    node = _place_on_cluster(NO_FILE, on)
    cluster = _read_cluster(node)
    workload, notes = assume_workload(model, cluster.gpus)
    layout = add_stated_layouts(LayoutConstraints(), layouts, model)
    job = Job(
        name=model.name,
        model=model,
        cluster=cluster,
        workload=workload,
        layout=layout,
        notes=(*_model_notes(model), *notes),
    )
    check_job(job, node.root)
    return job


def _model_notes(model: Model) -> tuple[str, ...]:
    """Returns a line for each approximation, and one for the values that the file leaves out."""
    values = [note for note in model.derived if note.endswith(")")]
    lines = [note for note in model.derived if note not in values]
    return tuple(f"model: {line}" for line in (*lines, ", ".join(values)) if line)


def load_model(name_or_path: str | Path) -> Model:
    """Loads a catalog model by name, or a released config.json (or the folder that holds one)."""
    path = Path(name_or_path)
    if resolve_catalog_name("models", str(name_or_path)) is None and _is_config(path):
        return read_hf_config(_find_config(path))
    return read_catalog_model(str(name_or_path))


def load_cluster(on: str) -> Cluster:
    """Loads a catalog cluster by name or alias, with its GPUs: `h100:512`."""
    return _read_cluster(_place_on_cluster(NO_FILE, on))


def load_job(path: str | Path, *, on: str | None = None, layouts: Iterable[str] = ()) -> Job:
    """Loads a job file; `on` puts it on another cluster."""
    path = Path(path)
    return _assemble(load_yaml(path), path.stem, path.parent, on, layouts)


def load_data_source(path: str | Path) -> DataSource | None:
    """Reads `data:` of a job file alone: lengths of the workload may still have to be counted."""
    root = load_yaml(Path(path))
    read_typed(JobFile, root)
    source = read_data_source(root, Path(path).parent)
    if source is not None and not (is_file(source.path) or is_dir(source.path)):
        hint = "give a .jsonl file or a folder of shards, seen from the folder of the job file"
        raise root["data"]["path"].error("does not exist", hint)
    return source


def add_stated_layouts(
    layout: LayoutConstraints, stated: Iterable[str], model: Model, *, field: str = "--layout"
) -> LayoutConstraints:
    """Returns the constraints with layouts such as `llm=pp8,tp4` stated on top; `dp` follows where it can."""
    modules = dict(layout.modules)
    names = [module.name for module in model.modules]
    for text in stated:
        name, choice = parse_layout(text, field=field)
        if name not in names:
            problem = f"names {name}, which is not a module of {model.name}"
            raise UserError(field=field, value=text, problem=problem, hint=nearest(name, names))
        axes = {**modules.get(name, PartialLayout()).stated(), **choice.stated()}
        if choice.dp is None and {"pp", "cp", "tp"} & set(choice.stated()):
            axes.pop("dp", None)  # it followed from the others
        modules[name] = PartialLayout(**axes)
    return replace(layout, modules=modules)


def _is_config(path: Path) -> bool:
    return path.suffix == ".json" or is_file(path / CONFIG)


def _find_config(path: Path) -> Path:
    return path / CONFIG if is_dir(path) else path


def _assemble(root: DocumentNode, name: str, folder: Path, on: str | None, layouts: Iterable[str]) -> Job:
    file = read_typed(JobFile, root)
    root = expand_catalog_modules(root, "model")
    model = _read_model(root["model"], folder)
    root = (_expand_cluster(root["cluster"], folder) if on is None else _place_on_cluster(root, on)).root
    cluster = _read_cluster(root["cluster"])
    data = read_data_source(root, folder)
    if file.workload is None:
        workload, notes = assume_workload(model, cluster.gpus)
    else:
        workload, notes = read_workload(root["workload"], model, folder, data)
    layout = LayoutConstraints() if file.layout is None else _constraints(root["layout"], model)
    today = None if file.today is None else _today(root["today"], file.today, model)
    if on is not None:
        layout, today = adapt_to_other_cluster(layout, today)
    job = Job(
        name=file.name or name,
        model=model,
        cluster=cluster,
        workload=workload,
        layout=add_stated_layouts(layout, layouts, model),
        today=today,
        run=file.run,
        data=data,
        model_dir=find_model_dir(root["model"], folder),
        notes=(*_model_notes(model), *notes),
    )
    check_job(job, root)
    return job


def _constraints(node: DocumentNode, model: Model) -> LayoutConstraints:
    names = [module.name for module in model.modules]
    read_typed(dict[str, object], node)
    refuse_unknown_keys(node, (*names, "limits"))
    limits = read_typed(SearchLimits, node["limits"]) if "limits" in node else SearchLimits()
    choices = {name: read_typed(PartialLayout, node[name]) for name in names if name in node}
    stated = {name: choice for name, choice in choices.items() if choice.stated()}
    return LayoutConstraints(modules=stated, limits=limits)


def _today(node: DocumentNode, block: TodayBlock, model: Model) -> CurrentRun:
    llm, placement = PartialLayout(), "stage0"
    if block.layout is not None:
        layout = node["layout"]
        read_typed(dict[str, object], layout)
        refuse_unknown_keys(layout, [module.name for module in model.modules])
        if "llm" in layout:
            llm = read_typed(PartialLayout, layout["llm"])
        encoders = [name for name in layout.entries() if name != "llm"]
        for name in encoders:
            placement = str(read_typed(CurrentPlacement, layout[name]))
            if placement != layout[encoders[0]].value:
                problem = f"differs from {layout[encoders[0]].field} = {layout[encoders[0]].value}"
                raise layout[name].error(problem, "place all encoders alike")
    _refuse_other_recipes(node, block, placement, llm)
    recompute: dict[str, Recompute] = {}
    if block.recompute is not None:
        refuse_unknown_keys(node["recompute"], [module.name for module in model.modules])
        recompute = read_typed(dict[str, Recompute], node["recompute"])
    measured = block.measured
    peak = measured.peak_memory_gb
    return CurrentRun(
        framework=block.framework,
        llm=llm,
        placement=placement,
        microbatch_sequences=block.microbatch_sequences,
        schedule=block.schedule,
        reshard_after_forward=block.reshard_after_forward,
        recompute=recompute,
        tp_overlapped=block.tp_overlapped,
        ep_overlapped=block.ep_overlapped,
        token_dispatcher=block.token_dispatcher,
        measured_step_s=measured.step_s,
        measured_memory_bytes=None if peak is None else peak * GB,
    )


def _refuse_other_recipes(node: DocumentNode, block: TodayBlock, placement: str, llm: PartialLayout) -> None:
    """Refuses a schedule that a placement or a layout does not have, and sharding without `fsdp`."""
    chunks, stages = llm.chunks or 1, llm.pp or 1
    if block.schedule is not None:
        if placement not in ("stage0", "balanced"):
            raise node["schedule"].error(f"is stated, and {placement} has its own", "leave it out")
        if (block.schedule == "1f1b" and chunks > 1) or (block.schedule == "interleaved" and chunks == 1):
            raise node["schedule"].error(f"is not for chunks {chunks}", "use interleaved with chunks above 1")
        if block.schedule != "1f1b" and stages == 1:
            raise node["schedule"].error("needs several stages", "state today.layout.llm.pp, or use 1f1b")
    if block.reshard_after_forward is not None and placement != "fsdp":
        raise node["reshard_after_forward"].error(
            f"is stated, and {placement} is not sharded", "leave it out"
        )


def _expand_cluster(node: DocumentNode, folder: Path = Path()) -> DocumentNode:
    """Merges the block `cluster:` over the file of its `use`, a path below `folder` or a catalog name."""
    if "use" not in node:
        return node
    name = str(node["use"].value)
    if name.endswith(CLUSTER_ENDINGS):
        base = load_yaml(folder / name)
    else:
        base = find_catalog_node("clusters", name, where=node["use"]).without("aliases")
    return node.replaced(merge_yaml(base.value, node.without("use").value))


def _read_cluster(node: DocumentNode) -> Cluster:
    """Reads the cluster of an expanded block `cluster:`."""
    block = read_typed(ClusterBlock, node)
    return Cluster(
        name=block.name,
        gpu=Gpu(
            name=block.gpu.name or block.name,
            peak_flops=block.gpu.peak_tflops * 1e12,
            memory_bytes=block.gpu.memory_gb * GB,
            memory_bandwidth_bytes_per_s=block.gpu.memory_tb_per_s * 1e12,
            curves=resolve_gpu_curves(block.gpu.curves),
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


def _place_on_cluster(root: DocumentNode, on: str) -> DocumentNode:
    """Returns the block `cluster:` of a job file that is placed on `h100:512` or `machine.yaml:2`."""
    name, _, count = on.rpartition(":")
    if not (count.isascii() and count.isdigit() and 0 < len(count) < 10 and int(count) > 0):
        raise UserError(
            field="--on",
            value=on,
            problem="is not CLUSTER:GPUS",
            hint="write for example --on h100:512",
        )
    if not name.endswith(CLUSTER_ENDINGS):
        find_catalog_node("clusters", name, where=make_argument_node("--on", name))
    position: Position = ("--on", None)
    block = YamlMapping({"use": name, "gpus": int(count)}, {"use": position, "gpus": position})
    return _expand_cluster(root["cluster"].replaced(block, position))


def _read_model(node: DocumentNode, folder: Path) -> Model:
    """Reads the model of a job file whose relative paths start at `folder`; its modules are expanded."""
    block = read_typed(ModelBlock, node)
    forms = [name for name in ("hf", "use", "llm") if getattr(block, name) is not None]
    if len(forms) != 1:
        problem = f"states {' and '.join(forms)}" if forms else "states neither hf, use nor llm"
        hint = "state one of: hf (a config.json), use (a catalog name), encoders with llm (dimensions)"
        raise node.error(problem, hint)
    if block.encoders is not None and block.llm is None:
        raise node["encoders"].error(f"is given together with {forms[0]}", "state one of them")
    if block.family and block.llm is None:
        raise node["family"].error(f"is given together with {forms[0]}", "leave it out")
    if block.hf is not None:
        path = folder / block.hf
        if not (is_file(path) or is_dir(path)):
            problem = "is neither a model folder nor a config.json"
            raise node["hf"].error(problem, "give the folder, seen from that of the job file")
        model = read_hf_config(_find_config(path))
    elif block.use is not None:
        model = read_catalog_model(block.use, where=node["use"])
    else:
        assert block.llm is not None
        source = str(node.document.file)
        model = Model(
            name="model", encoders=block.encoders or (), llm=block.llm, source=source, family=block.family
        )
    if block.precision is not None:
        model = replace(model, precision=block.precision)
    named = replace(model, name=block.name or model.name, source=block.source or model.source)
    refuse_unknown_keys(node["modules"], [module.name for module in model.modules])
    return _switch(node["modules"], block.modules, named)


def _switch(node: DocumentNode, switches: dict[str, ModuleOverrides], model: Model) -> Model:
    """Returns the model with the overrides of `modules:`: train and recompute, module by module."""
    encoders = []
    for encoder in model.encoders:
        change = switches.get(encoder.name, ModuleOverrides())
        projector = encoder.projector
        if change.train_projector is not None:
            projector = replace(projector, train=change.train_projector)
        train = encoder.train if change.train is None else change.train
        recompute = change.recompute or encoder.recompute
        encoders.append(replace(encoder, projector=projector, train=train, recompute=recompute))
    change = switches.get("llm", ModuleOverrides())
    if change.train_projector is not None:
        raise node.at("llm.train_projector").error("is not known here", "use it on an encoder", shown=False)
    train = model.llm.train if change.train is None else change.train
    llm = replace(model.llm, train=train, recompute=change.recompute or model.llm.recompute)
    return replace(model, encoders=tuple(encoders), llm=llm)
