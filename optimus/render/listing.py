"""The catalog as text for people and as an object for tools."""

from __future__ import annotations

from optimus.job import catalog
from optimus.job.read import find_job, load_cluster, load_model
from optimus.render.text import billions, columns

SCHEMA = "optimus.catalog/1"


def catalog_json() -> dict[str, object]:
    """The object of `optimus catalog --json`."""
    models = {}
    for name in catalog.names("models"):
        model = load_model(name)
        models[name] = {
            "parameters": model.parameters(),
            "modules": {module.name: module.parameters() for module in model.modules},
        }
    short = {full: alias for alias, full in catalog.aliases().items()}
    clusters = {}
    for name in catalog.names("clusters"):
        cluster = load_cluster(f"{name}:8")
        clusters[name] = {
            "alias": short.get(name, name),
            "peak_tflops": cluster.gpu.peak_flops / 1e12,
            "memory_gb": cluster.gpu.memory_bytes / 1e9,
            "gpus_per_node": cluster.gpus_per_node,
        }
    jobs = {}
    for name in catalog.names("jobs"):
        job = find_job(name)
        jobs[name] = {"model": job.model.name, "cluster": job.cluster.name, "gpus": job.cluster.gpus}
    return {"schema": SCHEMA, "models": models, "clusters": clusters, "jobs": jobs}


def catalog_text() -> list[str]:
    """Three short tables and what to do with them."""
    models = []
    for name in catalog.names("models"):
        model = load_model(name)
        parts = " + ".join(f"{module.name} {billions(module.parameters())}" for module in model.modules)
        models.append([name, parts])
    short = {full: alias for alias, full in catalog.aliases().items()}
    clusters = []
    for name in catalog.names("clusters"):
        gpu = load_cluster(f"{name}:8").gpu
        figures = [f"{gpu.peak_flops / 1e12:.0f}", f"{gpu.memory_bytes / 1e9:.0f}"]
        clusters.append([short.get(name, name), name, *figures])
    jobs = []
    for name in catalog.names("jobs"):
        job = find_job(name)
        jobs.append([name, job.model.name, f"{job.cluster.gpus} x {job.cluster.name}"])
    return [
        "Models",
        *columns(["name", "modules"], models, left=2),
        "",
        "Clusters",
        *columns(["alias", "name", "bf16 TFLOPS", "GB"], clusters, left=2),
        "",
        "Jobs",
        *columns(["name", "model", "on"], jobs, left=3),
        "",
        "next   optimus simulate paper/strong-3072 | optimus simulate qwen2.5-vl-72b --on h100:512",
    ]
