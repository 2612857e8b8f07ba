"""Layers of the paper's models, priced at the paper's layout: what several tests look at."""

from __future__ import annotations

from dataclasses import replace

from optimus.cost.assumptions import Assumptions, preset
from optimus.cost.prices import Prices
from optimus.cost.shape import LayerShape
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.job.read import find_job
from optimus.job.workload import Load

PAPER_JOBS = (
    *(f"paper/strong-{gpus}" for gpus in (1536, 2048, 3072)),
    *(f"paper/{letter}" for letter in "ABCD"),
    *(f"paper/dual-{pair}" for pair in ("11-5", "22-5", "22-11")),
)


def strong_3072() -> Job:
    return find_job("paper/strong-3072")


def layer_shape(
    module: str, *, tokens: float, span: float, tp: int = 8, assumptions: Assumptions | None = None
) -> LayerShape:
    """The first layer of a module of paper/strong-3072, for `tokens` tokens in spans of `span`."""
    job = strong_3072()
    found = next(m for m in job.model.modules if m.name == module)
    return LayerShape(
        module=module,
        stack=found.stack,
        layer=0,
        load=Load(tokens=tokens, squares=tokens * span),
        layout=Layout(dp=48, pp=8, tp=tp),
        prices=Prices(cluster=job.cluster, assumptions=assumptions or preset("paper")),
    )


def unfused(name: str = "clean") -> Assumptions:
    """A preset with attention scores stored, as in Korthikanti et al."""
    return replace(preset(name), fused_attention=False)
