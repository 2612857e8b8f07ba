"""Turns what a user names (a YAML file, a catalog name, a config.json) into a checked job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from optimus.errors import UserError, nearest, one_of
from optimus.job import catalog
from optimus.job.checks import check_job
from optimus.job.cluster import GB, Cluster
from optimus.job.hf_config import read_hf_config
from optimus.job.job import Job, Today, elsewhere
from optimus.job.layout import Constraints, LayoutChoice, Limits, parse_layout
from optimus.job.model import Model
from optimus.job.nodes import NO_FILE, Node, load_yaml
from optimus.job.read_cluster import expand_cluster, place_on, read_cluster
from optimus.job.read_model import catalog_model, expand_modules, read_model
from optimus.job.read_workload import default_workload, read_workload
from optimus.job.run import Run
from optimus.job.schema import JobFile, Placement, TodayBlock
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
    found = model if isinstance(model, Model) else load_model(model)
    if on is None:
        short = sorted(catalog.aliases())
        hint = f"add --on {short[-2]}:512 (clusters: {one_of(short)})"
        raise UserError(
            field="--on", problem=f"is missing: the model {found.name} needs a cluster", hint=hint
        )
    node = place_on(NO_FILE, on)
    cluster = read_cluster(node)
    workload, notes = default_workload(found, cluster.gpus)
    layout = stated_on_top(Constraints(), layouts, found)
    job = Job(name=found.name, model=found, cluster=cluster, workload=workload, layout=layout, notes=notes)
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
        layout, today = elsewhere(layout, today)
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
