"""Compares predicted with published steps, run by run and group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean, median

import numpy as np

from optimus.cost.assumptions import Assumptions, get_preset
from optimus.ir.op import Floats, Ints
from optimus.job.job import Job
from optimus.job.measured_runs import MeasuredRun, load_measured_models, load_measured_runs
from optimus.planner.forked import compute_by_key
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.systems.base import select_fastest
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.today import TodaySystem
from optimus.protocols import SystemCandidate

MIN_RANKED = 4  # layouts of one model, from which their order is compared

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """A published step and the one that the cost model predicts at its layout."""

    run: MeasuredRun
    step_s: float
    peak_bytes: float
    allocated_bytes: float  # of them by torch: neither CUDA's nor those of communicators

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.step_s / self.run.step_s - 1.0

    @property
    def memory_error(self) -> float | None:
        """Predicted over published peak, less 1; None: not published."""
        return None if self.run.peak_gib is None else self.allocated_bytes / 2**30 / self.run.peak_gib - 1.0


@dataclass(frozen=True, kw_only=True)
class GroupAccuracy:
    """Errors of predicted steps, or of peaks of memory, of a group of runs."""

    name: str
    runs: int
    bias: float  # mean error
    median: float  # of absolute errors
    p90: float

    @classmethod
    def of(cls, name: str, errors: Sequence[float]) -> GroupAccuracy:
        sizes = [abs(error) for error in errors]
        return cls(
            name=name,
            runs=len(errors),
            bias=fmean(errors),
            median=median(sizes),
            p90=float(np.quantile(sizes, 0.9)),
        )


def predict_runs(
    assumptions: Assumptions | None = None,
    *,
    runs: Iterable[MeasuredRun] | None = None,
    cores: int = 1,
    progress: Progress = lambda name, done, total: None,
) -> list[PredictedRun]:
    """Simulates every published step as it was run, by its own preset if no `assumptions` are given.

    Nothing is searched, and nothing is calibrated.
    """
    chosen = load_measured_runs() if runs is None else tuple(runs)
    by_place = compute_by_key(
        lambda place: predict_run(chosen[place], assumptions or get_preset(chosen[place].preset)),
        {place: float(_count_ops(run)) for place, run in enumerate(chosen)},
        cores=cores,
        report=lambda place: progress(chosen[place].id, place, len(chosen)),
    )
    return [by_place[place] for place in range(len(chosen))]


def _count_ops(run: MeasuredRun) -> int:
    """Returns about how many ops of layers a simulation has."""
    layers = load_measured_models()[run.model].llm.stack.layers
    return layers * run.sequences_per_step // (run.dp * run.microbatch_sequences)


def predict_run(run: MeasuredRun, assumptions: Assumptions) -> PredictedRun:
    """Simulates one published step as it was run."""
    assumed = replace(
        assumptions,
        fused_attention=run.fused_attention,
        gather_copies=run.gather_copies is not False,
    )
    candidate = find_recipe(run.job, assumed)
    result = candidate.search_result()
    memories = candidate.memories if result is None else result.memories
    fullest = max(memories, key=lambda memory: memory.total)
    return PredictedRun(
        run=run,
        step_s=candidate.simulated()[1].step_s,
        peak_bytes=fullest.total,
        allocated_bytes=fullest.total - fullest.reserve - fullest.communicators,
    )


def find_recipe(job: Job, assumptions: Assumptions) -> SystemCandidate:
    """Returns the recipe that a job runs today; where several choices are left open, the fastest."""
    if job.today is not None and job.today.token_dispatcher is not None:
        assumptions = replace(assumptions, token_dispatcher=job.today.token_dispatcher)
    context, _ = choose_smallest_context(job, assumptions)
    candidates = list(TodaySystem().candidates(LlmPipelines(context)))
    return candidates[0] if len(candidates) == 1 else select_fastest(context, TodaySystem.name, candidates)


def group_runs(predicted: Sequence[PredictedRun]) -> Iterator[GroupAccuracy]:
    """Yields the accuracy of all runs, then by split, kind, GPU, system, preset and source."""
    yield GroupAccuracy.of("all", [each.error for each in predicted])
    for key in ("split", "kind", "gpu", "system", "preset", "source"):
        by_name = sorted(predicted, key=lambda each: str(getattr(each.run, key)))
        for name, members in groupby(by_name, key=lambda each: str(getattr(each.run, key))):
            yield GroupAccuracy.of(name, [each.error for each in members])


def sum_up_memory(predicted: Sequence[PredictedRun]) -> GroupAccuracy | None:
    """Returns the accuracy of peaks of memory, of the runs that state one."""
    errors = [each.memory_error for each in predicted if each.memory_error is not None]
    return GroupAccuracy.of("memory", errors) if errors else None


@dataclass(frozen=True, kw_only=True)
class RankedLayouts:
    """Order of a model's layouts on the same GPUs, by tokens a second, as predicted and as published."""

    model: str
    gpu: str
    gpus: int
    microbatches: int
    layouts: int
    correlation: float  # of ranks (Spearman)
    lost: float  # share of the best published speed at the layout that is predicted to be fastest


def rank_layouts(predicted: Sequence[PredictedRun]) -> Iterator[RankedLayouts]:
    """Yields the models of which several layouts were measured on as many GPUs and microbatches."""

    def key(each: PredictedRun) -> tuple[str, str, str, int, int, int]:
        run = each.run
        microbatches = run.sequences_per_step // (run.dp * run.microbatch_sequences)
        return run.source, run.model, run.gpu, run.gpus, run.sequence_tokens, microbatches

    for (_, model, gpu, gpus, _, microbatches), members in groupby(sorted(predicted, key=key), key=key):
        alike = list(members)
        if len({each.run.layout for each in alike}) >= MIN_RANKED:
            batches = np.array([each.run.sequences_per_step for each in alike])
            published = batches / np.array([each.run.step_s for each in alike])
            ours = batches / np.array([each.step_s for each in alike])
            yield RankedLayouts(
                model=model,
                gpu=gpu,
                gpus=gpus,
                microbatches=microbatches,
                layouts=len({each.run.layout for each in alike}),
                correlation=float(np.corrcoef(_ranks(published), _ranks(ours))[0, 1]),
                lost=float(1 - published[ours.argmax()] / published.max()),
            )


def _ranks(values: Floats) -> Ints:
    return values.argsort().argsort()
