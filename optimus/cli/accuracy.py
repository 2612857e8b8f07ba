"""`optimus accuracy`: prints predicted beside published training steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from optimus.cli.console import announce_compilation, print_result, progress_bar
from optimus.cli.flags import OK, JsonFlag, PresetFlag, describe_option
from optimus.cli.text import align_columns, wrap_remark, wrap_text
from optimus.environment import usable_cores
from optimus.errors import UserError
from optimus.render.format_numbers import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optimus.sensitivity.accuracy import GroupAccuracy, PredictedRun, RankedLayouts

SCHEMA = "optimus.accuracy/1"
WORST = 10  # runs that are shown without --runs


@dataclass(frozen=True)
class AccuracyCommand:
    """Print predicted beside published training steps, run by run and group by group."""

    only: Annotated[
        tuple[str, ...],
        describe_option(
            metavar="NAME ...",
            help="only runs of these: splits, kinds, GPUs, systems, presets, sources or models, e.g. fsdp",
        ),
    ] = ()
    runs: Annotated[bool, describe_option(help="show every run, not only those that are furthest off")] = (
        False
    )
    preset: PresetFlag | None = None
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import get_preset
        from optimus.job.measured_runs import load_measured_runs
        from optimus.sensitivity.accuracy import group_runs, predict_runs, rank_layouts, sum_up_memory

        chosen = load_measured_runs()
        known = sorted({name for run in chosen for name in run.groups})
        for name in self.only:
            if name not in known:
                problem, hint = "is no group of published runs", f"use one of {', '.join(known)}"
                raise UserError(field="--only", value=name, problem=problem, hint=hint)
        chosen = tuple(run for run in chosen if set(self.only) <= set(run.groups))
        if not chosen:
            problem, hint = "leave no published run", "use fewer"
            raise UserError(field="--only", value=" ".join(self.only), problem=problem, hint=hint)
        assumptions = None if self.preset is None else get_preset(self.preset)
        with progress_bar("predicting") as progress, announce_compilation():
            predicted = predict_runs(assumptions, runs=chosen, cores=usable_cores(), progress=progress)
        groups, ranked = list(group_runs(predicted)), list(rank_layouts(predicted))
        memory = sum_up_memory(predicted)
        result = {
            "schema": SCHEMA,
            "assumptions": None if assumptions is None else assumptions.describe(),
            "points": len(predicted),
            "median_error": groups[0].median,
            "p90_error": groups[0].p90,
            "bias": groups[0].bias,
            "held_out": next(
                ({"median_error": g.median, "bias": g.bias} for g in groups if g.name == "held-out"), None
            ),
            "groups": [asdict(group) for group in groups],
            "memory": None if memory is None else asdict(memory),
            "rankings": [asdict(each) for each in ranked],
            "runs": [_run_json(each) for each in predicted],
        }
        text = format_accuracy(
            predicted, groups if memory is None else [*groups, memory], ranked, every=self.runs
        )
        print_result(result, text, as_json=self.json)
        return OK


def format_accuracy(
    predicted: Sequence[PredictedRun],
    groups: Sequence[GroupAccuracy],
    rankings: Sequence[RankedLayouts],
    *,
    every: bool,
) -> list[str]:
    """Formats errors by group, orders of layouts, and the runs that are furthest off."""
    gpus = [each.run.gpus for each in predicted]
    sources = len({each.run.source for each in predicted})
    counted = f"{len(predicted)} step{'s' * (len(predicted) > 1)} of {sources} source{'s' * (sources > 1)}"
    where = f"on {min(gpus):,} to {max(gpus):,} GPUs" if min(gpus) < max(gpus) else f"on {gpus[0]:,} GPUs"
    how = "each simulated at its own layout and stack; nothing is searched or calibrated"
    lines = wrap_text("published", f"{counted} {where}, {how}")
    rows = [
        [each.name, str(each.runs), f"{100 * each.bias:+.1f}"]
        + [f"{100 * share:.1f}" for share in (each.median, each.p90)]
        for each in groups
    ]
    lines += ["", *align_columns(["group", "runs", "bias %", "median %", "p90 %"], rows)]
    lines += wrap_remark(
        "Predicted over published step, less 1: the mean, and of sizes the median and p90. Memory: the same "
        "of the peak that torch allocates, where it is published."
    )
    if rankings:
        rows = [
            [
                f"{each.model} on {each.gpus} {each.gpu}, {each.microbatches} microbatches",
                str(each.layouts),
                f"{each.correlation:.2f}",
                f"{100 * each.lost:.1f}",
            ]
            for each in rankings
        ]
        lines += ["", *align_columns(["order of layouts", "layouts", "correlation", "lost %"], rows)]
        lines += wrap_remark(
            "Rank correlation of tokens a second; what the layout that is predicted to be fastest loses."
        )
    shown = sorted(predicted, key=lambda each: -abs(each.error))
    rows = [_run_row(each) for each in (predicted if every else shown[:WORST])]
    header = ["run", "GPUs", "layout", "published s", "predicted s", "error %"]
    lines += ["", *align_columns(header, rows)]
    if not every and len(predicted) > WORST:
        lines += wrap_remark(f"The {WORST} that are furthest off; --runs shows all.")
    return lines


def _run_row(each: PredictedRun) -> list[str]:
    run = each.run
    seconds = [format_seconds(run.step_s), format_seconds(each.step_s)]
    return [run.id, f"{run.gpus} {run.gpu}", run.layout, *seconds, f"{100 * each.error:+.1f}"]


def _run_json(each: PredictedRun) -> dict[str, object]:
    return {
        **asdict(each.run),
        "predicted_s": each.step_s,
        "error": each.error,
        "peak_memory_bytes": each.peak_bytes,
        "allocated_bytes": each.allocated_bytes,
        "memory_error": each.memory_error,
    }
