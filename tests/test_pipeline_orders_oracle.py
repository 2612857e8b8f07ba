"""Our pipelines are, op for op, those that torch and Megatron run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from optimus.ir.op import OpKind
from optimus.schedule.pipeline_orders import (
    PipelineOp,
    PipelineOrder,
    build_1f1b_order,
    build_interleaved_1f1b_order,
    build_zero_bubble_order,
)

pytestmark = pytest.mark.ci

MOST_MICROBATCHES = 32
INTERLEAVED = [
    (p, v, m) for p in range(2, 9) for v in range(2, 5) for m in range(p, MOST_MICROBATCHES + 1, p)
]
ONE_CHUNK = [(p, m) for p in range(2, 9) for m in range(1, MOST_MICROBATCHES + 1)]
TORCH_KIND = {
    "FORWARD": OpKind.FORWARD,
    "FULL_BACKWARD": OpKind.BACKWARD,
    "BACKWARD_INPUT": OpKind.INPUT_GRAD,
    "BACKWARD_WEIGHT": OpKind.WEIGHT_GRAD,
}


@pytest.fixture(scope="module")
def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules", exc_type=ImportError)


@pytest.fixture(scope="module")
def megatron_schedules() -> Any:
    return pytest.importorskip("megatron.core.pipeline_parallel.schedules", exc_type=ImportError)


def torch_pipeline(schedule_class: Any, *, stages: int, chunks: int, microbatches: int) -> PipelineOrder:
    """The op orders of a torch multi-chunk schedule, which one rank computes for all."""
    local = [
        SimpleNamespace(num_stages=stages * chunks, group_size=stages, group_rank=0, submod=None)
        for _ in range(chunks)
    ]
    order = schedule_class(local, microbatches).pipeline_order
    return tuple(from_torch(order[stage], stage, stages) for stage in range(stages))


def from_torch(actions: Iterable[Any], stage: int, stages: int) -> tuple[PipelineOp, ...]:
    ops = []
    for action in actions:
        if action is not None:
            chunk, owner = divmod(action.stage_index, stages)
            assert owner == stage
            ops.append(PipelineOp(TORCH_KIND[action.computation_type.name], chunk, action.microbatch_index))
    return tuple(ops)


class LoggingStage:
    """A torch pipeline stage that has nothing to send and writes down what it is asked to compute."""

    device = "cpu"

    def __init__(self, stage: int, stages: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.calls: list[PipelineOp] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.calls.append(PipelineOp(OpKind.FORWARD, 0, microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.calls.append(PipelineOp(OpKind.BACKWARD, 0, microbatch))

    def no_communication(self, *args: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_communication
    _get_init_p2p_neighbors_ops = no_communication

    def nothing(self, *args: Any, **kwargs: Any) -> None: ...

    _prepare_forward_infra = _prepare_backward_infra = perform_reduce_grad = nothing


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in ONE_CHUNK if m >= p])  # torch refuses fewer
def test_one_f_one_b_makes_the_calls_of_torch(torch_schedules: Any, p: int, m: int) -> None:
    called = []
    for stage in range(p):
        logging_stage = LoggingStage(stage, p)
        schedule = torch_schedules.Schedule1F1B(logging_stage, m, loss_fn=lambda output, target: None)
        schedule._step_microbatches(target_mbs=[None] * m)
        called.append(tuple(logging_stage.calls))
    assert build_1f1b_order(stages=p, microbatches=m) == tuple(called)


@pytest.mark.parametrize(("p", "v", "m"), INTERLEAVED)
def test_interleaved_is_torchs(torch_schedules: Any, p: int, v: int, m: int) -> None:
    theirs = torch_pipeline(torch_schedules.ScheduleInterleaved1F1B, stages=p, chunks=v, microbatches=m)
    assert build_interleaved_1f1b_order(stages=p, chunks=v, microbatches=m) == theirs


@pytest.mark.parametrize(("p", "v", "m"), INTERLEAVED)
def test_zero_bubble_is_torchs(torch_schedules: Any, p: int, v: int, m: int) -> None:
    schedule = torch_schedules.ScheduleInterleavedZeroBubble
    theirs = torch_pipeline(schedule, stages=p, chunks=v, microbatches=m)
    assert build_zero_bubble_order(stages=p, chunks=v, microbatches=m) == theirs


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in ONE_CHUNK if m % max(1, m // p) == 0])
def test_zero_bubble_of_one_chunk_is_torchs(torch_schedules: Any, p: int, m: int) -> None:
    """Where torch accepts m (whole rounds); the order itself does not depend on the rounds."""
    schedule = torch_schedules.ScheduleInterleavedZeroBubble
    theirs = torch_pipeline(schedule, stages=p, chunks=1, microbatches=m)
    assert build_zero_bubble_order(stages=p, chunks=1, microbatches=m) == theirs


@pytest.mark.parametrize(("p", "v", "m"), INTERLEAVED)
def test_interleaved_is_megatrons(megatron_schedules: Any, p: int, v: int, m: int) -> None:
    theirs = tuple(megatron_order(megatron_schedules, p, v, m, stage) for stage in range(p))
    assert build_interleaved_1f1b_order(stages=p, chunks=v, microbatches=m) == theirs


def megatron_order(megatron: Any, p: int, v: int, m: int, stage: int) -> tuple[PipelineOp, ...]:
    """What forward_backward_pipelining_with_interleaving does with its table and its warm-up count.

    The table gives the chunk of every step, mirrored for backwards; a backward takes the oldest
    microbatch in flight of its chunk.
    """
    table = megatron.get_schedule_table(m, v, p)
    group = SimpleNamespace(size=lambda: p, rank=lambda: stage)
    communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=v)
    total, _, warmup, remaining = megatron.get_pp_rank_microbatches(m, v, p, p2p_communicator=communicator)
    assert warmup == min(total, 2 * (p - 1 - stage) + (v - 1) * p)
    oldest: Counter[int] = Counter()

    def forward(step: int) -> PipelineOp:
        microbatch, chunk = table[step]
        return PipelineOp(OpKind.FORWARD, chunk, microbatch)

    def backward(step: int) -> PipelineOp:
        chunk = v - 1 - table[step][1]
        oldest[chunk] += 1
        return PipelineOp(OpKind.BACKWARD, chunk, oldest[chunk] - 1)

    ops = [forward(step) for step in range(warmup)]
    for step in range(remaining):
        ops += [forward(warmup + step), backward(step)]
    return (*ops, *(backward(step) for step in range(remaining, total)))
