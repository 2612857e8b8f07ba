"""Memory of heavy steps: what is planned for suffices in 99 of 100 steps that are drawn again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_batches import few_layers, uneven

from optimus.cost.assumptions import get_preset
from optimus.data.dealing import deal_items, deal_sequences
from optimus.job.job import Job
from optimus.planner.filled_plan import RejectedLayout
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.systems.colocation_candidate import ColocationCandidate
from optimus.planner.systems.colocation_search import ColocationSearch, ScheduledCandidate
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.optimus import _first_that_fits
from optimus.planner.worst_step import BinShape, resident_bins_at_p99

SHAPE = BinShape(encoder="vision", replicas=8, microbatches=8, pieces=2, pipelines=1)


def job(sequences: int = 64) -> Job:
    varied = uneven(few_layers())
    return replace(varied, workload=replace(varied.workload, sequences_per_step=sequences))


def test_where_all_sequences_are_alike_a_heavy_step_is_the_mean() -> None:
    assert resident_bins_at_p99(few_layers().workload, SHAPE).tolist() == list(range(17))


@pytest.mark.parametrize("resident", [1, 4, 16])
def test_one_step_in_a_hundred_holds_more(resident: int) -> None:
    """Other steps, drawn and dealt here: the fullest pipeline of eight, by bins in a row."""
    workload, rng = job().workload, np.random.default_rng(7)
    lengths = [list(map(float, sequence.lengths("vision"))) for sequence in workload.sequences]
    mean = np.mean([sum(items) for items in lengths]) / SHAPE.pieces
    held = []
    for _ in range(300):
        drawn = [lengths[n] for n in rng.integers(len(lengths), size=64)]
        columns = deal_sequences([sum(items) for items in drawn], 8)
        costs = [[cost for place in column for cost in drawn[place]] for column in columns]
        dealt = deal_items(costs, [[n // 2 for n in range(16)]] * 8)
        bins = np.concatenate([loads.reshape(8, 2) for loads in dealt.loads], axis=1) / mean
        rows = [bins[:, at : at + resident].sum(axis=1) for at in range(17 - resident)]
        held.append(float(np.max(rows)))
    planned = resident_bins_at_p99(workload, SHAPE)[resident]
    assert np.mean(np.array(held) > planned) <= 0.03
    assert planned <= 1.1 * max(held)


def scheduled(candidate: ColocationCandidate) -> ScheduledCandidate:
    return ScheduledCandidate(candidate=candidate, arranged=candidate.fill.schedule_encoders(0.0))


def test_a_layout_that_fits_at_the_mean_alone_is_refused() -> None:
    context, _ = choose_smallest_context(job(), get_preset("default"))
    llm = LlmPipelines(context).floor
    candidate = ColocationSearch(context, llm).schedule_common_layouts()[0].candidate
    plan = candidate.lowered(scheduled(candidate).arranged).plan
    mean = max(held.peak for held in plan.memory)
    heavy = candidate.peak_bytes_at_p99(plan)
    assert mean < heavy <= candidate.peak_bytes_bound
    middle = (mean + heavy) / 2
    for capacity, reason in ((heavy + 1, ""), (middle, " at p99 of the data, "), (mean - 1, " GB")):
        tight = replace(context, kept_free_bytes=context.capacity_bytes - capacity)
        rejected: list[RejectedLayout] = []
        again = ColocationCandidate(tight, llm, candidate.placements)
        found = _first_that_fits([scheduled(again)], rejected)
        assert (found is None) == bool(reason) == bool(rejected)
        assert not reason or reason in rejected[0].reason
        assert ("p99" in reason) == any("p99" in each.reason for each in rejected)
