"""Computes what published recipes take beside our recommendation, and writes the table of docs/accuracy.md.

With arguments (`qwen25_vl`), only recipes whose names start with one are computed.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

from benchmarks.docs.pages import (
    DOCS,
    GOLDEN,
    Figures,
    compute_named,
    fill_tables,
    markdown,
    read_figures,
    rounded,
)
from optimus.cost.assumptions import get_preset
from optimus.errors import DoesNotFit
from optimus.job.layout import LayoutConstraints
from optimus.job.measured_runs import Recipe, load_recipes
from optimus.planner.compare import compare_systems
from optimus.sensitivity.recommend import plan_job

PAGE = DOCS / "accuracy.md"
STORED = GOLDEN / "recipe_figures.json"
HEADER = ["recipe", "GPUs", "its layout", "s", "GB", "our recommendation", "s", "GB", "ours / its"]


def figures(recipe: Recipe) -> Figures:
    """Returns a recipe's step and ours, on the same GPUs, batch, memory, and exchange of experts."""
    assumptions = replace(
        get_preset("default"),
        token_dispatcher=recipe.token_dispatcher,
        ep_overlapped_share=recipe.ep_overlapped,
    )
    theirs: Figures = {"step_s": None, "gb": None, "fits": False}
    with suppress(DoesNotFit):
        stated = compare_systems(recipe.job, names=["today"], assumptions=assumptions).systems["today"]
        theirs = _sum_up(stated.step_s, stated.memory.total, fits=stated.fits)
    ours: Figures = {}
    with suppress(DoesNotFit):
        job = replace(recipe.job, today=None, layout=LayoutConstraints())
        planned = plan_job(job, assumptions=assumptions)
        plan = planned.plan
        ours = {"system": plan.strategy, "layout": str(plan.modules["llm"].layout)}
        ours |= _sum_up(planned.step_s, max(held.peak for held in plan.memory), fits=True)
    return {"recipe": theirs, "ours": ours}


def _sum_up(step_s: float, peak_bytes: float, *, fits: bool) -> Figures:
    return {"step_s": rounded(step_s), "gb": rounded(peak_bytes / 1e9), "fits": fits}


def table(stored: Figures) -> str:
    """Shows every recipe beside our recommendation."""
    rows, recipes = [], {each.id: each for each in load_recipes()}
    for name, row in stored.items():
        recipe, theirs, ours = recipes[name], row["recipe"], row["ours"]
        left = ["does not fit", ""]
        if theirs["step_s"] is not None:
            left = [f"{theirs['step_s']:.2f}", f"{theirs['gb']:.0f}" + ("" if theirs["fits"] else " *")]
        right, ratio = ["does not fit", "", ""], ""
        if ours:
            right = [f"{ours['system']}, {ours['layout']}", f"{ours['step_s']:.2f}", f"{ours['gb']:.0f}"]
        if ours and theirs["fits"]:
            ratio = f"{ours['step_s'] / theirs['step_s']:.2f}"
        rows.append([name, f"{recipe.gpus} {recipe.gpu}", recipe.layout, *left, *right, ratio])
    return markdown(HEADER, rows)


def main() -> int:
    """Computes, stores and shows."""
    compute_named(STORED, {each.id: partial(figures, each) for each in load_recipes()}, sys.argv[1:])
    PAGE.write_text(fill_tables(PAGE.read_text(), {"recipes": table(read_figures(STORED))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
