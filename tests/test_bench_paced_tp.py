"""`benchmarks paced --tp`: tensor-parallel layers on paced ranks take what replays say, line by line."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.__main__ import run
from benchmarks.paced_torch import list_programs
from benchmarks.paced_tp import bench_paced_tp, bound_of
from benchmarks.paced_tp_job import COLLECTIVE_S, MESSAGE_S, SIZES, TP, TpJob, replicas_on
from benchmarks.paced_tp_plans import (
    COARSE,
    DP_BUBBLES,
    FLOOR,
    NOTHING,
    OURS,
    TP_SLOTS,
    PlanVariant,
    variants_of,
)
from benchmarks.paced_tp_torch import COLLECTIVES, half_s, torch_variants
from benchmarks.report import EVENLY
from optimus.ir.op import OpKind
from optimus.ir.ranks import LLM
from optimus.verify.validator import check_plan

pytestmark = pytest.mark.heavy  # checks the benchmark, no promise of the product

EIGHT = TpJob(ranks=8)


@pytest.fixture(scope="module")
def variants() -> dict[str, PlanVariant]:
    return dict(variants_of(EIGHT))


def test_the_bound_is_the_llm_alone_if_that_was_played() -> None:
    assert bound_of({FLOOR: 1.0, OURS: 2.0}, {FLOOR: 1.1}, 0.5) == (FLOOR, 1.0)
    assert bound_of({OURS: 2.0}, {FLOOR: 1.1}, 0.5) == (f"{FLOOR}, replayed", 1.1)
    assert bound_of({OURS: 2.0}, {OURS: 2.1}, 0.5) == (EVENLY, 0.5)


def test_plans_know_kernels_and_links_as_ranks_do(variants: dict[str, PlanVariant]) -> None:
    plan = variants[OURS].plan
    phases = [phase for template in plan.templates.values() for phase in template]
    launched = {
        phase.duration_s for phase in phases if phase.kind == OpKind.LAUNCH and "seam" not in phase.name
    }
    assert launched == {COLLECTIVE_S}
    assert plan.modules[LLM].chunks[0].send_s == pytest.approx(MESSAGE_S)
    assert plan.slowdown == plan.launch_s == 0.0 and plan.ranks.llm.tp == TP


def test_every_idea_makes_the_step_shorter_and_passes_the_proof(variants: dict[str, PlanVariant]) -> None:
    steps = {name: variant.plan.claims.step_s for name, variant in variants.items()}
    order = [FLOOR, OURS, TP_SLOTS, DP_BUBBLES, COARSE, NOTHING]
    assert [steps[name] for name in order] == sorted(steps[name] for name in order)
    assert steps[DP_BUBBLES] / steps[TP_SLOTS] > 1.1
    for variant in variants.values():
        report = check_plan(variant.plan)
        broken = {rule for rule, holds in report.rules.items() if not holds}
        assert broken <= {"binding"}, report.violations[:3]  # bound to no file


def test_torchs_schedules_hold_every_layer_once() -> None:
    halves = 2 * (EIGHT.encoder_layers + EIGHT.pp)
    alone_s = sum(half_s(half, kind) for half in range(halves) for kind in "FB")
    for name, search in torch_variants(EIGHT).items():
        programs = list_programs(search.pipeline, EIGHT.pp)
        for variant in (search.make(cut, programs) for cut in search.starts):
            assert [half for stage in variant.layers for half in stage] == list(range(halves)), name
            assert sum(sum(variant.compute_s[kind]) for kind in "FB") == pytest.approx(alone_s)
            collective_s = sum(variant.collective_s["F"])
            assert collective_s == pytest.approx(COLLECTIVES * 2 * EIGHT.pp * COLLECTIVE_S), "of the LLM"


def test_what_is_no_variant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["paced", "--tp", "--ranks", "8", "--against", "magic"]) == 2
    assert "error: --against = magic is not a variant" in capsys.readouterr().err
    assert run(["real", "--tp"]) == 2
    assert run(["paced", "--tp", "--ranks", "16", "--dp", "1"]) == 2
    said = capsys.readouterr().err
    assert (
        "error: --dp = 1 replicas of 2 to 4 stages of 2 do not fit on 16 ranks" in said
        and "use 2 or 4" in said
    )


@pytest.mark.parametrize("ranks", ["0", "-8", "7"])
def test_a_number_of_ranks_without_a_layout_is_refused(
    ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["paced", "--tp", "--ranks", ranks]) == 2
    assert f"error: --ranks = {ranks} is not a size" in capsys.readouterr().err


def test_every_size_has_a_number_of_replicas() -> None:
    assert {ranks: replicas_on(ranks) for ranks in SIZES} == {
        4: [1],
        8: [1, 2],
        16: [2, 4],
        32: [4, 8],
        64: [8, 16],
    }


@pytest.mark.alone
@pytest.mark.ci("tensor parallelism")
@pytest.mark.timeout(240)
def test_eight_ranks_run_every_line_when_its_replay_says() -> None:
    """In order, and off by no more than hosts were late; how late that is, a quiet one shows (heavy)."""
    result = bench_paced_tp(ranks=8, rounds=1, against=(TP_SLOTS,))
    assert not [problem for problem in result.problems if ":" in problem], result.problems


@pytest.mark.alone
@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [16, 32])
def test_steps_take_what_replays_say(ranks: int) -> None:
    result = bench_paced_tp(ranks=ranks)
    assert result.ok, result.problems
