"""Plans the catalog's jobs and 60 others, and prints what each recommendation promises beside what holds.

`python tests/recommendation_figures.py [FIRST [END]]` prints a line for every job: the recommended system,
its layout and mean step over drawn batches, what the fastest takes, `optimus` over the best system that it
contains, the fastest system over the floor, and the promises that do not hold.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

from test_recommend import broken_promises

from optimus.errors import DoesNotFit
from optimus.job.catalog_files import list_catalog_names
from optimus.job.job import Job
from optimus.job.read import find_job
from optimus.job.workload import TokenPercentiles, build_sequences_from_percentiles
from optimus.planner.systems.registry import load_system
from optimus.sensitivity.recommend import RecommendedPlan, plan_job

CONFIGS = Path(__file__).parent / "data" / "configs"
MODELS = (
    "siglip-so400m-8b",
    str(CONFIGS / "Qwen--Qwen3-VL-8B-Instruct_config.json"),
    str(CONFIGS / "Qwen--Qwen3-VL-32B-Instruct_config.json"),
    "omni-3",
    "qwen2.5-vl-72b",
    "internvl3-78b",
    "qwen3-vl-235b",
    "kimi-k2.5",
)
GPUS = (8, 64, 256, 512, 1024, 4096)
CLUSTERS = ("h100", "a100", "b200")
WORKLOADS = {  # percentiles of a sequence's LLM tokens from each encoder
    "assumed": None,
    "small images": TokenPercentiles(p50=512, p95=1024, max=2048, item=256),
    "long tail": TokenPercentiles(p50=1024, p95=6554, max=7373, item=1024),
}
FURTHER, STRIDE = 60, 7
BATCHES = 8


def list_jobs() -> Iterator[tuple[str, Job]]:
    """Yields the catalog's jobs, then 60 of all models, sizes, clusters and workloads."""
    for name in list_catalog_names("jobs"):
        yield name, find_job(name)
    every = list(product(MODELS, GPUS, CLUSTERS, WORKLOADS))
    for model, gpus, cluster, data in islice(
        (every[i * STRIDE % len(every)] for i in range(len(every))), FURTHER
    ):
        job = find_job(model, f"{cluster}:{gpus}")
        percentiles = WORKLOADS[data]
        if percentiles is not None:
            workload = job.workload
            by_encoder = {encoder.name: percentiles for encoder in job.model.encoders}
            sequences = build_sequences_from_percentiles(workload.sequence_tokens, by_encoder)
            job = replace(job, workload=replace(workload, sequences=sequences))
        yield f"{Path(model).name.removesuffix('_config.json')} --on {cluster}:{gpus}, {data}", job


def describe(planned: RecommendedPlan) -> str:
    """Returns the line of one plan."""
    recommendation, systems = planned.recommendation, planned.systems
    fastest_s = recommendation.drawn[recommendation.fastest].mean_s
    contained = [
        systems[n].step_s for n in load_system("optimus").contains if n in systems and systems[n].fits
    ]
    ours = systems.get("optimus")
    over = "-" if ours is None or not contained else f"{ours.step_s / min(contained):.4f}"
    steps = (system.step_s for name, system in systems.items() if name != "llm-only")
    return (
        f"{recommendation.name} {planned.plan.modules['llm'].layout} {recommendation.steps.mean_s:.4g} s, "
        f"over fastest {recommendation.steps.mean_s / fastest_s:.4f}, optimus over contained {over}, "
        f"fastest over floor {min(steps) / planned.floor_s:.4f}"
    )


def main(first: int = 0, end: int = 1000) -> int:
    broken = 0
    for number, (name, job) in enumerate(list_jobs()):
        if not first <= number < end:
            continue
        begin = time.process_time()
        try:
            planned = plan_job(job, draws=0, batches=BATCHES)
        except DoesNotFit as no:
            print(f"{number} {name}: refused, {str(no)[:90]}", flush=True)  # noqa: T201
            continue
        promises = list(broken_promises(planned))
        broken += len(promises)
        words = f"{time.process_time() - begin:.0f} s; {'; '.join(promises) or 'all hold'}"
        print(f"{number} {name}: {describe(planned)}, {words}", flush=True)  # noqa: T201
    print(f"{broken} promises do not hold")  # noqa: T201
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
