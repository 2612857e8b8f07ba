"""`benchmarks paced --systems`: plans of all systems of one job, beside torch's FSDP2 and schedules."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

pytest.importorskip("torch")

from benchmarks.__main__ import run
from benchmarks.paced import SEED
from benchmarks.paced_clock import MEANS, Draws
from benchmarks.paced_fsdp import FsdpReplay, list_layers
from benchmarks.paced_systems import (
    FSDP,
    OURS,
    SYSTEMS,
    bench_paced_systems,
    list_pipelines,
    make_job,
    plan_systems,
    rank_by,
)
from benchmarks.paced_tp_job import DP_LINK
from benchmarks.paced_tp_model import RankTraffic, replay_model
from benchmarks.paced_tp_plans import PlanVariant
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan

FOUR = make_job(4)
DRAWS = Draws(seed=SEED)


@pytest.fixture(scope="module")
def plans() -> Mapping[str, PlanVariant]:
    return plan_systems(FOUR, ("balanced", "stage0", FSDP), lambda name, done, total: None)


def traffic_of(plan: Plan, share: float) -> list[RankTraffic]:
    """Seconds of ranks whose gathers and reduces take a share of what the plan says."""
    bucket_s = {
        (name, place): (share * bucket.gather_s, share * bucket.reduce_s)
        for name, module in plan.modules.items()
        for buckets in module.buckets
        for place, bucket in enumerate(buckets)
    }
    return [RankTraffic(bucket_s=bucket_s, seam_s={}) for _ in range(plan.ranks.world)]


@pytest.mark.ci("engine")
def test_torchs_1f1b_takes_what_our_plan_without_parameters_takes(plans: Mapping[str, PlanVariant]) -> None:
    """By replays that share no code: torch waits for its sends, and its message over the seam is larger."""
    for name in ("balanced", "stage0"):
        plan = plans[name].plan
        (torchs,) = list_pipelines(name, plan).values()
        ours_s = replay_model(plan, DRAWS, traffic_of(plan, 0.0)).step_s
        assert 1 <= torchs.replayed_s(DRAWS) / ours_s < 1.01, name


@pytest.mark.ci("engine")
def test_torchs_fsdp2_takes_what_our_plan_of_fsdp_takes(plans: Mapping[str, PlanVariant]) -> None:
    """By replays that share no code: FSDP2 holds one buffer of gradients that are reduced, ours two."""
    plan = plans[FSDP].plan
    ours_s = replay_model(plan, DRAWS, traffic_of(plan, 1.0)).step_s
    assert 1 <= FsdpReplay(plan, DRAWS).step_s() / ours_s < 1.02


@pytest.mark.ci("engine")
def test_fully_sharded_layers_have_all_lines_and_parameters_of_the_plan(
    plans: Mapping[str, PlanVariant],
) -> None:
    plan = plans[FSDP].plan
    layers = list_layers(plan)
    for kind in (OpKind.FORWARD, OpKind.BACKWARD):
        templates = [module.chunks[0].templates[kind] for module in plan.modules.values()]
        planned_s = sum(phase.duration_s for name in templates for phase in plan.templates[name])
        assert sum(layer.drawn_s(plan, MEANS, kind, 0) for layer in layers) == pytest.approx(planned_s)
    step_s, ranks = FsdpReplay(plan, MEANS).step_s(), plan.ranks.world
    compute_s = plan.microbatches * FOUR.bound_s * FOUR.ranks / ranks / plan.microbatches
    reduced_bytes = plan.microbatches * sum(layer.bucket.reduce_bytes for layer in layers)
    reduce_s = reduced_bytes * (ranks - 1) / ranks / DP_LINK.bandwidth_bytes_per_s
    assert max(compute_s, reduce_s) < step_s < compute_s + 2 * reduce_s


def test_systems_are_ranked_by_their_steps() -> None:
    steps = {OURS: 2.0, "stage0": 3.0, "torch": 1.0, FSDP: 2.5}
    assert rank_by(steps, SYSTEMS) == (OURS, FSDP, "stage0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["real", "--systems"], "is for `paced`"),
        (["paced", "--systems", "--ranks", "7"], "is not a size"),
        (["paced", "--systems", "--ranks", "16", "--dp", "1"], "use 4 or 8"),
        (["paced", "--systems", "--ranks", "4", "--against", "magic"], "is not a variant"),
    ],
)
def test_invalid_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.alone
@pytest.mark.ci("engine")
@pytest.mark.timeout(240)
def test_four_ranks_run_every_line_of_every_system_in_order() -> None:
    """And off by no more than hosts were late; how late that is, a quiet one shows (heavy)."""
    result = bench_paced_systems(ranks=4, rounds=1, against=("stage0", FSDP))
    assert set(result.variants) == {
        OURS,
        "stage0",
        "stage0: torch 1F1B, no DP traffic",
        FSDP,
        "fsdp: torch FSDP2",
    }
    assert result.rankings is not None and set(result.rankings["measured"]) <= {OURS, "stage0", FSDP}
    assert not [problem for problem in result.problems if "order" in problem], result.problems


@pytest.mark.alone
@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_sixteen_ranks_rank_all_systems_as_replays_do() -> None:
    result = bench_paced_systems(ranks=16)
    assert result.ok, result.problems
    assert result.rankings is not None and len(result.rankings["measured"]) == len(SYSTEMS)
