"""torch's own schedules on the paced network, against a replay of the same draws that shares no code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.paced_backend import PacedNetwork, run_paced_ranks
from benchmarks.paced_clock import Draws, PacedClock, PacedLink
from benchmarks.paced_steps import StepTime, run_step, step_s
from benchmarks.paced_torch import (
    PacedPipeline,
    PacedStage,
    TorchPipeline,
    from_torch,
    loss,
    one_f_one_b,
    replay,
)

pytestmark = pytest.mark.heavy  # checks the benchmark, no promise of the product

MEAN_S = {"F": 0.025, "B": 0.05, "I": 0.025, "W": 0.025}
LINK = PacedLink(latency_s=0.002, bandwidth_bytes_per_s=1e6, bytes_scale=250.0)
MESSAGE_S = 0.002 + 250 * 32 / 1e6  # 2 rows of 4 floats: 10 ms
PIPELINES = {
    "1f1b": TorchPipeline(schedule="1F1B", num_microbatches=8),
    "interleaved": TorchPipeline(schedule="Interleaved1F1B", num_microbatches=8, chunks=2),
    "zero bubble": TorchPipeline(schedule="InterleavedZeroBubble", num_microbatches=8, chunks=2),
    "zbv": TorchPipeline(schedule="ZBVZeroBubble", num_microbatches=8, chunks=2),
}


def seconds(kind: str, stage: int, microbatch: int) -> float:
    draws = Draws(seed=11)
    return MEAN_S[kind] * draws.factor(module="llm", kind=kind, virtual_stage=stage, microbatch=microbatch)


def one_process(pipeline: TorchPipeline, num_stages: int) -> list[torch.Tensor]:
    """Gradients of all weights, by plain autograd over all microbatches at once."""
    weights = [(torch.eye(pipeline.width) * (1 + stage / 64)).requires_grad_() for stage in range(num_stages)]
    rows, targets = pipeline.data()
    for weight in weights:
        rows = torch.tanh(rows @ weight)
    loss(rows, targets).backward()
    return [weight.grad for weight in weights if weight.grad is not None]


def run_pipeline(rank: int, network: PacedNetwork, name: str, steps: int) -> dict[str, Any]:
    """Steps of one pipeline on this rank, and the program that torch made for it."""
    pipeline = PacedPipeline(PIPELINES[name], clock=network.clock, seconds=seconds)
    pipeline.prepare()
    times = [run_step(network.clock, pipeline.step) for _ in range(steps)]
    return {
        "steps": times,
        "actions": pipeline.actions()[rank],
        "gradients": [g.tolist() for g in pipeline.grads()],
    }


def expected_s(name: str, ranks: list[dict[str, Any]]) -> float:
    """The step by the replay."""
    pipeline, world = PIPELINES[name], len(ranks)
    rank_of = {stage: rank for rank in range(world) for stage in pipeline.stages_of(rank, world)}
    if pipeline.schedule == "1F1B":
        programs = [one_f_one_b(rank, world, pipeline.num_microbatches) for rank in range(world)]
    else:
        programs = [from_torch(found["actions"]) for found in ranks]
    places = [rank_of[stage] for stage in sorted(rank_of)]
    return max(replay(programs, places, seconds, MESSAGE_S, split=pipeline.splits))


def measured_s(ranks: list[dict[str, Any]]) -> list[float]:
    """Every step: from the common start until the last rank is done."""
    steps: list[tuple[StepTime, ...]] = list(zip(*(found["steps"] for found in ranks), strict=True))
    return [step_s(list(step)) for step in steps]


class Spent(PacedClock):
    """Writes down what it is asked for instead of sleeping."""

    def __init__(self) -> None:
        super().__init__(sleep=lambda _: None)
        self.seen: list[float] = []

    def compute(self, duration_s: float) -> None:
        self.seen.append(duration_s)


def test_each_part_of_a_split_backward_takes_its_own_time() -> None:
    clock = Spent()
    taken = {"F": 1.0, "I": 2.0, "W": 3.0, "B": 4.0}
    for split, first in ((True, False), (True, True), (False, False)):
        like = TorchPipeline(schedule="ZBVZeroBubble" if split else "1F1B", num_microbatches=1, width=2)
        stage = PacedStage(clock, lambda kind, *_: taken[kind], stage=0, like=like)
        rows = torch.ones(3, 2, requires_grad=not first)
        clock.seen.clear()
        found = stage(rows, torch.tensor([5]))
        assert clock.seen == [1.0]
        clock.seen.clear()
        if not split:
            found.sum().backward()
            assert clock.seen == [4.0]
        elif first:  # torch runs a full backward where W stands
            found.sum().backward()
            assert sorted(clock.seen) == [2.0, 3.0]
        else:
            _, groups = stage_backward_input([found], [torch.ones(3, 2)], [rows], stage.parameters())
            assert clock.seen == [2.0]
            assert stage.weight.grad is None
            stage_backward_weight(stage.parameters(), groups)
            assert clock.seen == [2.0, 3.0]
            assert stage.weight.grad is not None


@pytest.mark.alone
@pytest.mark.heavy
@pytest.mark.parametrize("name", PIPELINES)
def test_a_schedule_of_torch_takes_what_the_replay_says(name: str) -> None:
    ranks = run_paced_ranks(run_pipeline, 4, LINK, name, 4)
    expected, measured = expected_s(name, ranks), measured_s(ranks)
    assert min(measured) > 0.999 * expected  # nothing is faster than the rules
    assert min(measured) < 1.03 * expected  # other work on the host can only make a step longer
    pipeline = PIPELINES[name]
    wanted = one_process(pipeline, 4 * pipeline.chunks)
    for rank, found in enumerate(ranks):
        for stage, gradient in zip(pipeline.stages_of(rank, 4), found["gradients"], strict=True):
            torch.testing.assert_close(torch.tensor(gradient), wanted[stage])
