"""`optimus catalog`: lists models, clusters and jobs."""

from __future__ import annotations

from dataclasses import dataclass

from optimus.cli.console import print_result
from optimus.cli.flags import OK, JsonFlag
from optimus.cli.text import align_columns, format_next_commands
from optimus.render.format_numbers import format_parameter_count

SCHEMA = "optimus.catalog/1"


@dataclass(frozen=True)
class CatalogCommand:
    """List the models, clusters and jobs of the catalog."""

    json: JsonFlag = False

    def __call__(self) -> int:
        print_result(_catalog_json(), _catalog_text(), as_json=self.json)
        return OK


def _catalog_json() -> dict[str, object]:
    """Returns the object of `optimus catalog --json`."""
    from optimus.job.catalog_files import list_catalog_names, list_cluster_aliases
    from optimus.job.read import find_job, load_cluster, load_model

    models = {}
    for name in list_catalog_names("models"):
        model = load_model(name)
        models[name] = {
            "parameters": model.parameters(),
            "modules": {module.name: module.parameters() for module in model.modules},
        }
    aliases = {full: alias for alias, full in list_cluster_aliases().items()}
    clusters = {}
    for name in list_catalog_names("clusters"):
        cluster = load_cluster(f"{name}:8")
        clusters[name] = {
            "alias": aliases.get(name, name),
            "peak_tflops": cluster.gpu.peak_flops / 1e12,
            "memory_gb": cluster.gpu.memory_bytes / 1e9,
            "gpus_per_node": cluster.gpus_per_node,
        }
    jobs = {}
    for name in list_catalog_names("jobs"):
        job = find_job(name)
        jobs[name] = {"model": job.model.name, "cluster": job.cluster.name, "gpus": job.cluster.gpus}
    return {"schema": SCHEMA, "models": models, "clusters": clusters, "jobs": jobs}


def _catalog_text() -> list[str]:
    """Returns three tables and the commands to try next."""
    from optimus.job.catalog_files import list_catalog_names, list_cluster_aliases
    from optimus.job.read import find_job, load_cluster, load_model

    models = []
    for name in list_catalog_names("models"):
        model = load_model(name)
        modules = " + ".join(
            f"{module.name} {format_parameter_count(module.parameters())}" for module in model.modules
        )
        models.append([name, modules])
    aliases = {full: alias for alias, full in list_cluster_aliases().items()}
    clusters = []
    for name in list_catalog_names("clusters"):
        gpu = load_cluster(f"{name}:8").gpu
        peak, memory = f"{gpu.peak_flops / 1e12:.0f}", f"{gpu.memory_bytes / 1e9:.0f}"
        clusters.append([aliases.get(name, name), name, peak, memory])
    jobs = []
    for name in list_catalog_names("jobs"):
        job = find_job(name)
        jobs.append([name, job.model.name, f"{job.cluster.gpus} x {job.cluster.name}"])
    return [
        "Models",
        *align_columns(["name", "modules"], models, left=2),
        "",
        "Clusters",
        *align_columns(["alias", "name", "bf16 TFLOPS", "GB"], clusters, left=2),
        "",
        "Jobs",
        *align_columns(["name", "model", "on"], jobs, left=3),
        "",
        *format_next_commands(
            "optimus simulate paper/strong-3072", "optimus simulate qwen2.5-vl-72b --on h100:512"
        ),
    ]
