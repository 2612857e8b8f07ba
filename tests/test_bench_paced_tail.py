"""`benchmarks paced --long-tail`: images of very different sizes, dealt over replicas on paced ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.__main__ import run
from benchmarks.paced_tail import bench_paced_tail
from benchmarks.paced_tail_job import (
    COMPARED_STEPS,
    PADDED,
    PLANS,
    SCHEDULES,
    STEPS,
    UNDEALT,
    Epoch,
    LoadedPlan,
    draw_epoch,
    load_plans,
    load_variants,
    make_job,
)
from benchmarks.paced_tp_job import TOKENS, TP, VISION
from benchmarks.paced_tp_plans import OURS
from benchmarks.paced_tp_torch import torch_variants
from optimus.job.workload import PackedSequence

EIGHT = make_job(8)


def _tokens(sequences: Sequence[PackedSequence]) -> list[int]:
    return [sum(sequence.lengths(VISION)) for sequence in sequences]


def test_steps_of_an_epoch_differ_less_than_their_sequences() -> None:
    epoch = draw_epoch(32)
    assert epoch == draw_epoch(32) != draw_epoch(32, seed=1)
    totals = np.array(_tokens(epoch)).reshape(STEPS, 32)
    assert all(sequence.text + n == TOKENS for sequence, n in zip(epoch, totals.ravel(), strict=True))
    assert totals.std() > 0.6 * totals.mean(), "a long tail"
    assert totals.min() == 0, "text-only sequences"
    assert totals.sum(axis=1).std() < 0.05 * totals.sum(axis=1).mean()
    ranked = np.sort(totals, axis=1)
    assert (np.diff(ranked.min(axis=0)) >= 0).all() and (
        ranked[:, :-1].max(axis=0) <= ranked[:, 1:].min(axis=0)
    ).all()


@pytest.fixture(scope="module")
def plans() -> list[LoadedPlan]:
    return load_plans(EIGHT, PLANS)


@pytest.mark.ci("data")
def test_loads_are_those_of_all_images_once(plans: list[LoadedPlan]) -> None:
    dealt, kept = plans
    assert dealt.plan.dealing_replicas == EIGHT.dp and kept.plan.dealing_replicas == 1
    assert set(kept.loads) == {UNDEALT, PADDED}
    ours, undealt, padded = dealt.loads[OURS], kept.loads[UNDEALT], kept.loads[PADDED]
    assert ours.shape == (STEPS, EIGHT.dp, TP * EIGHT.microbatches)
    assert ours.sum(axis=(1, 2)) == pytest.approx(undealt.sum(axis=(1, 2)))
    assert ours.mean() == pytest.approx(1)
    assert (padded == undealt.max()).all()

    def fullest(loads: np.ndarray, pipelines: Sequence[int]) -> float:
        """Returns the load of the fullest pipeline of a step over the mean, in the mean of steps."""
        totals = [[np.bincount(pipelines, bins).max() for bins in step] for step in loads]
        return float(
            np.mean(np.max(totals, axis=1) / loads.mean(axis=(1, 2)) / len(pipelines) * (1 + max(pipelines)))
        )

    assert np.mean(dealt.replayed_s(OURS)) < 1.05 * dealt.plan.claims.step_s
    assert np.mean(kept.replayed_s(PADDED)) > 1.2 * kept.plan.claims.step_s
    dealt_load, kept_load = (
        fullest(loads, each.plan.modules[VISION].pipelines)
        for each, loads in ((dealt, ours), (kept, undealt))
    )
    assert dealt_load < 1.1 < kept_load


@pytest.mark.ci("data")
def test_torchs_schedules_get_the_same_images_in_both_ways(plans: list[LoadedPlan]) -> None:
    variants = {name: torch_variants(EIGHT)[name].best(EIGHT.pp) for name in SCHEDULES[:1]}
    names = [f"{SCHEDULES[0]}, {fed}" for fed in ("as drawn", "re-dealt")]
    drawn, again = load_variants(Epoch(EIGHT.job, plans[0].plan), variants, names).values()
    assert drawn.loads.shape == (STEPS, EIGHT.dp, TP, EIGHT.microbatches)
    assert drawn.loads.sum(axis=(1, 2, 3)) == pytest.approx(again.loads.sum(axis=(1, 2, 3)))
    replicas = [each.loads.sum(axis=(2, 3)) for each in (drawn, again)]
    assert np.ptp(replicas[1], axis=1).max() < np.ptp(replicas[0], axis=1).mean()
    assert drawn.replayed_s() > again.replayed_s() > drawn.variant.replayed_s()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["real", "--long-tail"], "is for `paced`"),
        (["paced", "--long-tail", "--ranks", "4"], "use 8, 16, 32 or 64"),
        (["paced", "--long-tail", "--ranks", "8", "--dp", "1"], "use 2 or more"),
        (["paced", "--long-tail", "--against", "magic"], "is not a variant"),
    ],
)
def test_invalid_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.alone
@pytest.mark.ci("data")
@pytest.mark.timeout(300)
def test_eight_ranks_run_dealt_images_in_program_order() -> None:
    """How near the claim they are, a quiet host shows (heavy)."""
    result = bench_paced_tail(ranks=8, against=(UNDEALT,))
    assert not [problem for problem in result.problems if "order" in problem], result.problems
    assert (result.variants[OURS].steps, result.variants[UNDEALT].steps) == (STEPS, COMPARED_STEPS)


@pytest.mark.alone
@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [16, 32])
def test_an_epoch_takes_what_the_plan_claims(ranks: int) -> None:
    result = bench_paced_tail(ranks=ranks)
    assert result.ok, result.problems
