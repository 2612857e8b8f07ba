"""Memory of heavy steps: what is planned for suffices in 99 of 100 steps that are drawn again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from test_batches import few_layers, uneven

from optimus.cost.assumptions import get_preset
from optimus.cost.flops import fit_item_cost
from optimus.data.dealing import deal_items, deal_sequences
from optimus.engine.batch_plan import SampleSizes, plan_batch
from optimus.job.job import Job
from optimus.job.workload import TokenPercentiles, build_sequences_from_percentiles
from optimus.planner import worst_step
from optimus.planner.filled_plan import RejectedLayout
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.systems import colocation_search
from optimus.planner.systems.colocated_plan import encoder_layout_on_llm_gpus
from optimus.planner.systems.colocation_candidate import ColocationCandidate, EncoderPlacement
from optimus.planner.systems.colocation_search import ColocationSearch, ScheduledCandidate
from optimus.planner.systems.fsdp import list_fsdp_candidates
from optimus.planner.systems.llm_only import LlmPipelines, build_llm_pipeline
from optimus.planner.systems.optimus import _first_that_fits
from optimus.planner.worst_step import STEPS, BinShape, DrawnSteps

SHAPE = BinShape(encoder="vision", replicas=8, microbatches=8, pipelines=(0,) * 16, dealing_replicas=8)


def job(sequences: int = 64) -> Job:
    varied = uneven(few_layers())
    return replace(varied, workload=replace(varied.workload, sequences_per_step=sequences))


def two_encoders() -> Job:
    """Two encoders whose items cost unequal amounts, and no sequence has the same share of both."""
    alone = few_layers(64, pp=2)
    (vision,) = alone.model.encoders
    audio = replace(vision, name="audio", stack=replace(vision.stack, layers=2))
    sizes = {
        "vision": TokenPercentiles(p50=400, p95=1200, max=1600, text_only_share=0.2, item=256),
        "audio": TokenPercentiles(p50=100, p95=200, max=400, item=64),
    }
    sequences = build_sequences_from_percentiles(alone.workload.sequence_tokens, sizes)
    workload = replace(alone.workload, sequences=sequences, sequences_per_step=256)
    return replace(alone, model=replace(alone.model, encoders=(vision, audio)), workload=workload)


def test_where_all_sequences_are_alike_a_heavy_step_is_the_mean() -> None:
    assert DrawnSteps(few_layers()).resident_bins_at_p99(SHAPE).tolist() == list(range(17))


@pytest.mark.parametrize("resident", [1, 4, 16])
def test_one_step_in_a_hundred_holds_more(resident: int) -> None:
    """Other steps, drawn and dealt here: the fullest pipeline of eight, by bins in a row."""
    varied, rng = job(), np.random.default_rng(7)
    per_token, per_square = fit_item_cost(varied.model.encoders[0])
    merge = varied.model.encoders[0].merge
    lengths = [[merge * n for n in sequence.lengths("vision")] for sequence in varied.workload.sequences]
    mean = np.mean([sum(items) for items in lengths]) / 2
    held = []
    for _ in range(300):
        drawn = [lengths[n] for n in rng.integers(len(lengths), size=64)]
        loads = [sum(per_token * n + per_square * n * n for n in items) for items in drawn]
        columns = [[n for at in column for n in drawn[at]] for column in deal_sequences(loads, 8)]
        costs = [[per_token * n + per_square * n * n for n in column] for column in columns]
        places = iter(deal_items(costs, [[n // 2 for n in range(16)]] * 8).bins)
        bins = np.zeros((8, 8, 2))
        for number, column in enumerate(columns):
            for tokens in column:
                replica, piece = divmod(next(places), 2)
                bins[replica, number, piece] += tokens / mean
        in_order = bins.reshape(8, 16)
        rows = [in_order[:, at : at + resident].sum(axis=1) for at in range(17 - resident)]
        held.append(float(np.max(rows)))
    planned = DrawnSteps(varied).resident_bins_at_p99(SHAPE)[resident]
    assert np.mean(np.array(held) > planned) <= 0.03
    assert planned <= 1.1 * max(held)


@pytest.mark.parametrize(("replicas", "microbatches"), [(32, 8), (8, 16), (64, 4)])
@pytest.mark.parametrize("resident", [1, 3])
def test_the_fullest_of_all_replicas_that_encode_their_own(
    replicas: int, microbatches: int, resident: int
) -> None:
    """Other steps, dealt here to all replicas: two of them were drawn for the plan."""
    varied, rng = job(sequences=2 * replicas * microbatches), np.random.default_rng(7)
    tokens = np.array([sum(sequence.lengths("vision")) for sequence in varied.workload.sequences], float)
    loads = DrawnSteps(varied)._loads
    held = []
    for _ in range(100):
        drawn = rng.integers(len(tokens), size=2 * replicas * microbatches)
        fullest = 0.0
        for own in deal_sequences(loads[drawn].tolist(), replicas):
            dealt = deal_sequences(loads[drawn[own]].tolist(), microbatches)
            columns = [tokens[drawn[own][column]].sum() for column in dealt]
            in_a_row = [sum(columns[at : at + resident]) for at in range(microbatches + 1 - resident)]
            fullest = max(fullest, *in_a_row)
        held.append(fullest / (2 * tokens.mean()))
    shape = BinShape(
        encoder="vision",
        replicas=replicas,
        microbatches=microbatches,
        pipelines=(0,) * microbatches,
        dealing_replicas=1,
    )
    planned = DrawnSteps(varied).resident_bins_at_p99(shape)[resident]
    assert np.mean(np.array(held) > planned) <= 0.05
    assert planned <= 1.1 * max(held)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_steps_are_dealt_as_in_the_engine(is_reversed: bool) -> None:
    """Two encoders with unequal layouts, on a plan's own pipelines: the tokens of every bin."""
    context, _ = choose_smallest_context(two_encoders(), get_preset("default"))
    llm = build_llm_pipeline(context)
    placements = {
        name: EncoderPlacement(
            layout=encoder_layout_on_llm_gpus(llm.layout, pp=pp, tp=1),
            recompute="none",
            pieces=pieces,
            reverse_pipelines=is_reversed,
        )
        for name, pp, pieces in (("vision", 1, 2), ("audio", 2, 4))
    }
    plan = ColocationCandidate(context, llm, placements)._unfolded.header(strategy="optimus")
    assert plan.dealing_replicas == 8 < llm.layout.dp
    steps = DrawnSteps(context.job)
    samples = [
        SampleSizes(number=number, items={name: sizes.tokens[n] for name, sizes in steps.sizes.items()})
        for number, n in enumerate(steps.drawn[0].tolist())
    ]
    batch = plan_batch(plan, samples)
    for name, module in plan.encoders.items():
        shape = BinShape(
            encoder=name,
            replicas=llm.layout.dp,
            microbatches=llm.microbatches,
            pipelines=module.pipelines,
            dealing_replicas=plan.dealing_replicas,
        )
        assert max(module.pipelines) > 0
        tokens = np.array([[sum(item.tokens for item in own) for own in bins] for bins in batch.bins[name]])
        by_column = tokens.reshape(8, llm.microbatches, -1).swapaxes(0, 1)
        assert next(steps.bin_tokens(shape)).tolist() == [by_column.ravel().tolist()]


def test_steps_of_fsdp_are_dealt_as_in_the_engine() -> None:
    """Replicas wait for each other in every microbatch: its items are dealt by themselves."""
    context, _ = choose_smallest_context(two_encoders(), get_preset("default"))
    candidates = list_fsdp_candidates(context, context.job.model.modules)
    chosen = next(c for c in candidates if c.microbatches > 1 and c.layout.dp > 8)
    plan = chosen.builder.header(strategy="fsdp")
    assert plan.locked and plan.dealing_replicas == 8
    steps = DrawnSteps(context.job)
    samples = [
        SampleSizes(number=number, items={name: sizes.tokens[n] for name, sizes in steps.sizes.items()})
        for number, n in enumerate(steps.drawn[0].tolist())
    ]
    batch = plan_batch(plan, samples)
    for name, module in plan.encoders.items():
        shape = BinShape(
            encoder=name,
            replicas=chosen.layout.dp,
            microbatches=chosen.microbatches,
            pipelines=module.pipelines,
            dealing_replicas=plan.dealing_replicas,
            locked=True,
        )
        tokens = np.array([[sum(item.tokens for item in own) for own in bins] for bins in batch.bins[name]])
        by_column = tokens.reshape(8, chosen.microbatches, -1).swapaxes(0, 1)
        assert next(steps.bin_tokens(shape)).tolist() == [by_column.ravel().tolist()]
        assert (steps.most_resident_bins(shape) >= steps.resident_bins_at_p99(shape)).all()


def test_a_search_deals_every_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences once for all encoder layouts of an LLM pipeline, items once for each that has its turn."""
    calls: Counter[str] = Counter()
    for name in ("deal_items", "deal_evenly"):
        dealt = getattr(worst_step, name)
        monkeypatch.setattr(
            worst_step,
            name,
            lambda *args, n=name, dealt=dealt, **options: (calls.update([n]), dealt(*args, **options))[1],
        )
    monkeypatch.setattr(colocation_search, "MAX_LAYOUTS", 2)
    context, _ = choose_smallest_context(two_encoders(), get_preset("default"))
    llm = build_llm_pipeline(context)
    search = ColocationSearch(context, llm)
    first = search.schedule_common_layouts()[0]
    assert len(context.cache.resident_bins) <= 2 * 2 < 2 * search.considered
    search.refine(first)
    shapes = list(context.cache.resident_bins)
    assert {(shape.replicas, shape.microbatches) for shape in shapes} == {(16, llm.microbatches)}
    assert calls == {"deal_evenly": 2 * STEPS, "deal_items": STEPS * len(shapes)}


def test_a_layout_that_fits_at_the_mean_alone_is_refused() -> None:
    context, _ = choose_smallest_context(job(), get_preset("default"))
    llm = LlmPipelines(context).floor
    candidate = ColocationSearch(context, llm).schedule_common_layouts()[0].candidate
    filled = candidate.lowered(candidate.fill.schedule_encoders(0.0))
    mean = max(held.peak for held in filled.memory)
    heavy = candidate.peak_bytes_at_p99(filled)
    assert mean < heavy <= candidate.peak_bytes_bound
    middle = (mean + heavy) / 2
    for capacity, reason in ((heavy + 1, ""), (middle, " at p99 of the data, "), (mean - 1, " GB")):
        tight = replace(context, kept_free_bytes=context.capacity_bytes - capacity)
        rejected: list[RejectedLayout] = []
        again = ColocationCandidate(tight, llm, candidate.placements)
        found = _first_that_fits([ScheduledCandidate.of(again)], rejected)
        assert (found is None) == bool(reason) == bool(rejected)
        assert not reason or reason in rejected[0].reason
        assert ("p99" in reason) == any("p99" in each.reason for each in rejected)
