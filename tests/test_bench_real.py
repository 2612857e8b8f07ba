"""`python -m benchmarks real`: its cuts, its statistics, and (heavy) its figures on this machine."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest

pytest.importorskip("torch")

from benchmarks.real import VARIANTS, bench_real, chosen_variants, compare, even_cut, stage0_cut
from benchmarks.timing import Timings, bootstrap, machine_cpu_s
from benchmarks.variants import (
    OURS,
    StepSetup,
    TorchVariant,
    layers_in_order,
    llm_context,
    pixels_of,
    stage_of_layers,
)  # fmt: skip
from optimus.engine.synthetic_data import SyntheticDataset
from optimus.errors import UserError
from optimus.ir.plan import Seconds
from optimus.job.read import find_job
from optimus.planner.user_modules import plan_modules

pytestmark = pytest.mark.heavy  # checks the benchmark, no promise of the product


def test_stage_0_holds_the_whole_encoder_and_the_llm_is_cut_evenly() -> None:
    assert stage0_cut([1, 1, 1, 2, 2, 2, 2], encoder_layers=3, parts=2) == (0, 5, 7)
    assert stage0_cut([1, 1, 1, 2, 2, 2, 2], encoder_layers=3, parts=4) == (0, 4, 5, 6, 7)


def test_a_stage_may_end_after_any_layer() -> None:
    """torch detaches what a stage made in place, which a view cannot be."""
    job = find_job("cpu/bench-vl")
    (encoder,) = job.model.encoders
    sample = SyntheticDataset(job=job, seed=0).sample(0)
    x, context = pixels_of(encoder, sample)
    contexts = {encoder.name: context, "llm": llm_context(job, sample, 1.0)}
    for layer in layers_in_order(job.model):
        x = stage_of_layers([layer], contexts)(x, ids=sample.tokens).detach_()
    assert x.shape == (job.workload.sequence_tokens, job.model.llm.vocab)


def test_the_even_cut_is_that_of_the_busiest_rank() -> None:
    weights = [3, 1, 1, 1, 2, 2, 1, 1]
    assert even_cut(weights, ((0,), (1,))) == (0, 4, 8)
    cut = even_cut(weights, ((0, 3), (1, 2)))
    parts = [sum(weights[a:b]) for a, b in pairwise(cut)]
    assert parts[0] + parts[3] == parts[1] + parts[2] == 6


def test_virtual_stages_are_round_robin_and_a_v_for_zbv() -> None:
    interleaved = TorchVariant(name="a", schedule="Interleaved1F1B", cut=(0, 1, 2, 3, 4))
    zbv = TorchVariant(name="b", schedule="ZBVZeroBubble", cut=(0, 1, 2, 3, 4))
    assert [interleaved.stages_of(rank, 2) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert [zbv.stages_of(rank, 2) for rank in (0, 1)] == [[0, 3], [1, 2]]


def test_the_interval_covers_the_true_ratio_and_shrinks_with_rounds() -> None:
    chance = random.Random(1)

    def interval(rounds: int) -> tuple[float, float]:
        ours = [chance.gauss(1.0, 0.02) for _ in range(rounds)]
        return bootstrap([1.1 * chance.gauss(1.0, 0.02) for _ in range(rounds)], ours)

    low, high = interval(200)
    assert low < 1.1 < high and high - low < 0.02
    wide = interval(14)
    assert wide[1] - wide[0] > high - low


def test_the_machine_is_busy_while_we_are() -> None:
    before, begin = machine_cpu_s(), time.process_time()
    while time.process_time() - begin < 0.2:
        pass
    assert machine_cpu_s() - before >= 0.15


def test_medians_and_the_best_balanced_variant_are_reported() -> None:
    job = find_job("cpu/bench-vl")
    assert len(layers_in_order(job.model)) == 23
    seconds = {OURS: [1.0, 1.0, 3.0], "stage0 1F1B": [1.3] * 3}
    seconds |= {"balanced ZBV": [1.1] * 3, "balanced 1F1B": [1.2] * 3}
    timings = Timings(seconds=seconds, losses={}, dropped=2, kept=0, foreign_share=0.01)
    plan = plan_modules(
        stages=[Seconds(forward_s=0.1, backward_s=0.2)] * 2, encoders={}, microbatches=8, ranks=2, pp=2
    )
    setup = StepSetup(job=job, plan=plan, variants=(), bound_s=0.9, encoder_share=0.5, how="1f1b")
    result = compare(setup, timings, rounds=3)
    assert result.variants["stage0 1F1B"].over_ours == pytest.approx(1.3)
    assert result.ours_over_bound == pytest.approx(1 / 0.9)
    assert any("best balanced variant: balanced ZBV, 1.100" in note for note in result.notes)


def test_variants_are_chosen_by_name() -> None:
    assert chosen_variants(()) == tuple(VARIANTS)
    assert chosen_variants(("balanced ZBV",)) == ("balanced ZBV",)
    with pytest.raises(UserError, match="balanced ZB is not a variant"):
        chosen_variants(("balanced ZB",))


@pytest.mark.heavy
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_filled_is_faster_than_torch_s_schedules_on_this_machine() -> None:
    result = bench_real(rounds=14)
    stage0 = min(v.over_ours for name, v in result.variants.items() if name.startswith("stage0"))
    balanced = min(
        (v for name, v in result.variants.items() if name.startswith("balanced")), key=lambda v: v.step_s
    )
    assert balanced.over_ours_low is not None
    assert stage0 >= 1.15 and balanced.over_ours_low > 1.0, result
