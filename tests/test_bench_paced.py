"""Plans on paced ranks run as replayed, in program order, and every seeded fault is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paced_replay import replay_lines

from benchmarks.__main__ import run
from benchmarks.paced import OURS, RankResult, bench_paced, faults_of
from benchmarks.paced_backend import PacedNetwork, PacedWork, run_paced_ranks
from benchmarks.paced_clock import Draws
from benchmarks.paced_job import ENCODER, LINK, ROWS, WIDTH, PacedJob
from benchmarks.paced_plan import PacedPlan, PhaseEnd, TinyBatch, TinyStage, find_faults, replay_plan
from benchmarks.paced_steps import run_rounds
from benchmarks.paced_torch import list_programs
from benchmarks.report import EVENLY, BenchResult, VariantTime, to_json, to_text
from optimus.engine.sharded_bucket import ShardedBucket
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.models.collectives import all_gather_single

DRAWS = Draws(seed=5)
SLOW = replace(LINK, bandwidth_bytes_per_s=LINK.bandwidth_bytes_per_s / 9)  # a message takes 10 ms
JOB = PacedJob(ranks=4, link=SLOW)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return JOB.plan()


# ---------------------------------------------------------------- without processes


@pytest.mark.parametrize("seed", [1, 2])
def test_two_replays_agree(plan: Plan, seed: int) -> None:
    draws = Draws(seed=seed)

    def phase_s(module: str, kind: str, virtual: int, microbatch: int, place: int) -> float:
        mean_s = 0.04 if (module, kind) == (ENCODER, "B") else 0.02
        return mean_s * draws.factor(
            module=module, kind=kind, virtual_stage=virtual, microbatch=microbatch, phase=place
        )

    def message_s(module: str) -> float:
        return 0.001 + (0.009 if module == LLM else 0.009 / JOB.pieces)

    reduce_s = 0.001 + 2 * 3 / 4 * 2 * 0.009  # two blocks, each of the bytes of an activation
    wanted_s = replay_lines(plan, phase_s, message_s, reduce_s)
    assert replay_plan(plan, draws, SLOW).step_s == pytest.approx(wanted_s, abs=1e-8)
    assert wanted_s > plan.claims.step_s * 0.9


@pytest.mark.parametrize("moved_s", [-0.004, 0.004])
def test_an_op_that_is_off_its_replay_is_noticed_unless_hosts_were_late(plan: Plan, moved_s: float) -> None:
    replayed = replay_plan(plan, DRAWS, SLOW)
    begun, phase_ends = [], []
    for rank in range(JOB.ranks):
        device = plan.ranks.class_of(rank)
        rows = [tuple(row) for row in plan.programs[device].rows.tolist()]
        begun.append(list(range(len(rows))))
        phase_ends.append(
            [
                PhaseEnd(line=line, row=row, end_s=7.0 + float(replayed.ends_s[device][line]))
                for line, row in enumerate(rows)
                if row[1] <= OpKind.WEIGHT_GRAD
            ]
        )

    def faults(lost_s: float) -> tuple[str, ...]:
        return find_faults(plan, replayed, begun, phase_ends, start_s=7.0, lost_s=lost_s)

    assert faults(0.0) == ()
    phase_ends[2][5] = replace(phase_ends[2][5], end_s=phase_ends[2][5].end_s + moved_s)
    (fault,) = faults(0.003)
    assert ("before everything it waits for" if moved_s < 0 else "late") in fault and "0.0010 s" in fault
    assert faults(0.0045) == ()


def test_the_job_is_as_it_is_described() -> None:
    for ranks in (4, 16):
        job = PacedJob(ranks=ranks)
        for search in job.torch_variants().values():
            programs = list_programs(search.pipeline, ranks)
            for variant in (search.make(cut, programs) for cut in search.starts):
                forward_s = variant.compute_s["F"]
                assert sum(forward_s) == pytest.approx(ranks * job.bound_s / job.microbatches / 3)
                assert len(forward_s) == ranks * variant.pipeline.chunks
                assert variant.least_s >= job.bound_s * (1 - 1e-9)


def test_no_op_of_ours_is_shorter_than_20_ms(plan: Plan) -> None:
    assert min(phase.duration_s for template in plan.templates.values() for phase in template) >= 0.02 - 1e-9


# ---------------------------------------------------------------- four ranks

Spoil = Callable[[int, PacedPlan], None]


def leave(rank: int, ours: PacedPlan) -> None:
    """Plants no fault."""


def _swap(rank: int, ours: PacedPlan) -> None:
    """Swaps the last two weight gradients of rank 1, for which no op waits."""
    actions = ours.executor.actions
    *_, first, second = (at for at, action in enumerate(actions) if action.kind == OpKind.WEIGHT_GRAD)
    if rank == 1:
        actions[first], actions[second] = actions[second], actions[first]


def _drop(rank: int, ours: PacedPlan) -> None:
    """Lets rank 2 read messages without waiting for the link."""
    mail = ours.executor._mailbox
    take = mail.take

    def hurried(key: Any) -> tuple[torch.Tensor, ...]:
        for work in mail._receives.pop(key, ()):
            assert isinstance(work, PacedWork)
            work.end_s()
        return take(key)

    if rank == 2:
        mail.take = hurried  # type: ignore[method-assign]


def run_spoiled(
    rank: int, network: PacedNetwork, plan: Plan, spoils: list[Spoil], rounds: int, sharded: bool = False
) -> list[tuple[RankResult, list[list[float]]]]:
    """Runs steps of ours with each fault; also returns the gradients of this rank."""
    cases = []
    for spoil in spoils:
        ours = PacedPlan(plan, DRAWS, network, timeout_s=60, sharded=sharded)
        ours.prepare()
        spoil(rank, ours)
        begun: list[list[int]] = []
        ends: list[Any] = []

        def after(name: str, ours: PacedPlan = ours, begun: Any = begun, ends: Any = ends) -> None:
            begun.append(ours.recorder.begun)
            ends.append(ours.recorder.phase_ends)

        ours.prepare = lambda: None  # type: ignore[method-assign]  # done before it was spoiled
        steps = run_rounds(network, {OURS: ours}, {OURS: rounds}, after)
        for bucket in ours.executor.buckets:
            if isinstance(bucket, ShardedBucket) and bucket.group is not None:
                all_gather_single(bucket.grad_buffer, bucket.reduced_grad, bucket.group)
        gradients = [
            parameter.grad.flatten().tolist()
            for name in plan.modules
            for chunk in ours.chunks[name]
            for parameter in chunk.trainable_parameters(0, 99)
            if parameter.grad is not None
        ]
        result = RankResult(steps=steps, begun={OURS: begun}, phase_ends={OURS: ends})
        cases.append((result, gradients))
    return cases


def _faults(plan: Plan, results: list[RankResult]) -> tuple[str, ...]:
    return faults_of(plan, replay_plan(plan, DRAWS, SLOW), results)


@pytest.fixture(scope="module")
def spoiled(plan: Plan) -> list[list[tuple[RankResult, list[list[float]]]]]:
    return run_paced_ranks(run_spoiled, 4, SLOW, plan, [leave, _swap, _drop], 1)


def one_process(plan: Plan) -> dict[str, list[torch.Tensor]]:
    """Returns the gradient of every matrix, by plain autograd, one microbatch after the other."""
    batch = TinyBatch(plan)
    stages = {
        name: [
            TinyStage(number, makes_loss=name == LLM and number == len(module.chunks) - 1)
            for number in range(sum(chunk.layers for chunk in module.chunks))
        ]
        for name, module in plan.modules.items()
    }
    pieces = plan.modules[ENCODER].microbatches_per_llm_microbatch
    for microbatch in range(plan.microbatches):
        rows: list[torch.Tensor] = []
        for piece in range(pieces):
            state = batch.inputs(ENCODER, microbatch * pieces + piece)
            for stage in stages[ENCODER]:
                state = stage(state, None)
            rows += state
        state = (*batch.inputs(LLM, microbatch), *rows)
        for stage in stages[LLM]:
            state = stage(state, batch.context(LLM, microbatch))
        state[0].backward()
    return {
        name: [stage.weight.grad for stage in own if stage.weight.grad is not None]
        for name, own in stages.items()
    }


@pytest.mark.alone
@pytest.mark.ci("engine")
def test_a_sound_run_has_no_fault_and_the_gradients_of_one_process(
    plan: Plan, spoiled: list[list[tuple[RankResult, list[list[float]]]]]
) -> None:
    assert _faults(plan, [cases[0][0] for cases in spoiled]) == ()
    wanted = one_process(plan)
    assert ROWS % JOB.pieces == 0
    for rank, cases in enumerate(spoiled):
        expected = [*wanted[ENCODER], *(wanted[LLM][virtual] for virtual in (rank, rank + 4))]
        assert len(cases[0][1]) == len(expected)
        for found, gradient in zip(cases[0][1], expected, strict=True):
            torch.testing.assert_close(torch.tensor(found).reshape(WIDTH, WIDTH), gradient)


@pytest.mark.alone
@pytest.mark.ci("engine")
def test_an_op_out_of_order_is_noticed(plan: Plan, spoiled: Any) -> None:
    words = _faults(plan, [cases[1][0] for cases in spoiled])
    assert any("out of program order" in word for word in words)


@pytest.mark.alone
@pytest.mark.ci("engine")
def test_a_dropped_dependency_is_noticed(plan: Plan, spoiled: Any) -> None:
    words = _faults(plan, [cases[2][0] for cases in spoiled])
    assert any("before everything it waits for allows" in word for word in words)
    assert not any("out of program order" in word for word in words)


@pytest.mark.alone
@pytest.mark.heavy
def test_a_link_slower_than_planned_is_noticed(plan: Plan) -> None:
    slower = replace(
        SLOW, latency_s=1.25 * SLOW.latency_s, bandwidth_bytes_per_s=SLOW.bandwidth_bytes_per_s / 1.25
    )
    answers = run_paced_ranks(run_spoiled, 4, slower, plan, [leave], 1)
    words = _faults(plan, [cases[0][0] for cases in answers])
    assert any("late, which no lateness of the host explains" in word for word in words)


@pytest.mark.alone
@pytest.mark.heavy
def test_the_command_prints_one_object() -> None:
    command = [sys.executable, "-m", "benchmarks", "paced", "--ranks", "4", "--rounds", "1", "--json"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=110, check=False)
    found = json.loads(done.stdout)
    assert "Traceback" not in done.stderr
    assert (done.returncode == 0) == found["ok"]
    assert found["schema"] == "optimus.bench/1"
    assert len(found["variants"]) == 6
    for variant in found["variants"].values():
        assert variant["error"] > -0.001  # nothing is faster than the rules
        assert variant["error"] < 0.03 or variant["disturbed"]
    assert found["variants"][OURS]["over_ours"] == 1.0
    assert found["ours_over_bound"] == pytest.approx(found["variants"][OURS]["step_s"] / found["bound_s"])
    assert not [problem for problem in found["problems"] if "an op" in problem or "order" in problem]
    assert any("not GPU speed" in note for note in found["notes"])


@pytest.mark.alone
@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [16, 32])
def test_many_ranks(ranks: int) -> None:
    result = bench_paced(ranks=ranks, rounds=2)
    assert result.ok, result.problems
    ours = result.variants[OURS]
    assert ours.error is not None and -0.001 < ours.error < 0.03


# ---------------------------------------------------------------- words


def _result(**changes: Any) -> BenchResult:
    variants = {
        "time_scale": VariantTime(
            step_s=2.0, over_ours=2.0, predicted_s=1.99, error=0.005, steps=3, disturbed=1
        ),
        OURS: VariantTime(step_s=1.0, over_ours=1.0, predicted_s=1.0, error=0.0, steps=3, disturbed=0),
    }
    given: dict[str, Any] = {"bench": "paced", "variants": variants, "ours": OURS, "bound_s": 0.8}
    return BenchResult(**{**given, "ours_over_bound": 1.25, "notes": ("said",), **changes})


def test_the_text_of_a_result() -> None:
    lines = to_text(_result(problems=("it is wrong",), bound="nothing sent"))
    assert lines[0].split() == [
        "variant",
        "step",
        "s",
        "over",
        "ours",
        "replayed",
        "s",
        "error",
        "steps",
        "disturbed",
    ]
    assert lines[1].split()[:3] == [OURS, "1.000", "1.000"]
    assert any(line.startswith("NO") and "it is wrong" in line for line in lines)
    assert any(
        line.startswith("bound") and line.endswith("0.800 s, nothing sent; ours takes 1.250 of it")
        for line in lines
    )
    assert all(len(line) <= 100 for line in lines)


def test_the_json_of_a_result() -> None:
    found = to_json(_result())
    assert found["variants"]["time_scale"]["over_ours"] == 2.0
    assert "over_ours_low" not in found["variants"]["time_scale"]
    assert (found["bound_s"], found["ours_over_bound"], found["ok"]) == (0.8, 1.25, True)
    assert found["bound"] == EVENLY
    assert not to_json(_result(problems=("no",)))["ok"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["paced", "--ranks", "5"], "use 4, 8, 16, 32 or 64"),
        (["paced", "--rounds", "0"], "use 1 or more"),
        (["real", "--ranks", "4"], "`real` has 2"),
    ],
)
def test_invalid_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words]) == 2
    assert message in capsys.readouterr().err
