"""Sharded replicas on paced ranks: gathers and reduces take their time at their lines of the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_bench_paced import DRAWS, leave, one_process, run_spoiled

from benchmarks.__main__ import run
from benchmarks.paced import OURS, RankResult, bench_paced, faults_of
from benchmarks.paced_backend import PacedWork, run_paced_ranks
from benchmarks.paced_job import ENCODER, REPLICAS_LINK, WIDTH, PacedJob
from benchmarks.paced_plan import PacedPlan, PlanReplay, replay_plan
from benchmarks.paced_steps import is_disturbed, step_s
from optimus.engine import distributed_optimizer
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM

pytestmark = pytest.mark.heavy  # checks the benchmark, no promise of the product

JOB = PacedJob(ranks=4, dp=2, link=REPLICAS_LINK)
Answers = list[list[tuple[RankResult, list[list[float]]]]]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return JOB.plan()


def replay(plan: Plan) -> PlanReplay:
    return replay_plan(plan, DRAWS, JOB.link, traffic="sharded")


# ---------------------------------------------------------------- without processes


def test_every_stage_and_block_has_a_bucket_of_known_seconds(plan: Plan) -> None:
    """Of 64 activations, half of which travels between 2 replicas and three quarters between 4."""
    activation_s = JOB.link.message_s(torch.zeros(4, 4)) - JOB.link.latency_s
    for name, replicas in ((LLM, 2), (ENCODER, 4)):
        module = plan.modules[name]
        wanted_s = 0.001 + 64 * activation_s * (replicas - 1) / replicas
        assert module.layout.dp == replicas
        for stage in module.buckets:
            assert sum(each.end_layer - each.first_layer for each in stage) == len(stage)
            for each in stage:
                assert (each.gather_s, each.reduce_s) == pytest.approx((wanted_s, wanted_s))


def test_traffic_costs_some_of_what_it_takes(plan: Plan) -> None:
    sharded = replay(plan)
    without = replay_plan(plan, DRAWS, JOB.link, traffic="none")
    buckets = [each for module in plan.modules.values() for each in module.buckets[0]]
    assert sharded.traffic_s == pytest.approx(sum(each.gather_s + each.reduce_s for each in buckets))
    assert 0 < sharded.step_s - without.step_s < sharded.traffic_s


# ---------------------------------------------------------------- four ranks


class _Hurried:
    """Work of a gather whose `wait` does not advance the clock."""

    def __init__(self, work: PacedWork) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.end_s()


def hurry(rank: int, ours: PacedPlan) -> None:
    """Lets rank 3 compute before its parameters have arrived."""
    launch: Callable[..., Any] = distributed_optimizer.all_gather_single  # type: ignore[attr-defined]
    if rank == 3:
        hurried = lambda *given, **named: _Hurried(launch(*given, **named))  # noqa: E731
        distributed_optimizer.all_gather_single = hurried  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def answers(plan: Plan) -> Answers:
    return run_paced_ranks(run_spoiled, 4, JOB.link, plan, [leave, hurry], 2, True)


@pytest.mark.alone
@pytest.mark.ci("engine")
def test_a_sound_run_takes_what_its_replay_says_and_has_the_gradients_of_one_process(
    plan: Plan, answers: Answers
) -> None:
    sound = [cases[0][0] for cases in answers]
    assert faults_of(plan, replay(plan), sound) == ()
    steps = [list(step) for step in zip(*(answer.steps[OURS] for answer in sound), strict=True)]
    calm = [step_s(step) for step in steps if not is_disturbed(step)]
    replayed_s = replay(plan).step_s
    assert all(-0.001 < found_s / replayed_s - 1 < 0.03 for found_s in calm)
    wanted = one_process(plan)  # both replicas have the same data
    for rank, cases in enumerate(answers):
        stage = plan.ranks.place(LLM, rank).pp
        expected = [*wanted[ENCODER], *(wanted[LLM][virtual] for virtual in (stage, stage + JOB.pp))]
        assert len(cases[0][1]) == len(expected)
        for found, gradient in zip(cases[0][1], expected, strict=True):
            torch.testing.assert_close(torch.tensor(found).reshape(WIDTH, WIDTH), 2 * gradient)


@pytest.mark.alone
@pytest.mark.ci("engine")
def test_a_gather_that_nobody_waits_for_is_noticed(plan: Plan, answers: Answers) -> None:
    words = faults_of(plan, replay(plan), [cases[1][0] for cases in answers])
    assert any("before everything it waits for allows" in word for word in words)


@pytest.mark.alone
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_sixteen_ranks() -> None:
    result = bench_paced(ranks=16, dp=2, rounds=3)
    assert result.ok, result.problems
    ours = result.variants[OURS]
    assert ours.error is not None and -0.001 < ours.error < 0.03
    assert ours.steps


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["paced", "--dp", "3"], "use 1, 2, 4 or 8"),
        (["paced", "--dp", "0"], "use 1 or more"),
        (["real", "--dp", "2"], "is for `paced`"),
    ],
)
def test_invalid_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.alone
@pytest.mark.heavy
def test_the_command_says_what_traffic_costs(capsys: pytest.CaptureFixture[str]) -> None:
    run(["paced", "--ranks", "4", "--dp", "2", "--rounds", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found["variants"]) == [OURS]
    assert any("gathers and reduces take" in note for note in found["notes"])
