"""`FillSchedule` trains as one process would, and refuses by name what does not fit its plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fill_worker import CASES, FillCase, Scale, Shift, make_batch, make_encoders, make_stages
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from worker_lines import run_cases

from optimus.engine.buckets import ReplicatedBucket
from optimus.engine.executor import Executor
from optimus.engine.fill_schedule import FillSchedule
from optimus.engine.fsdp_ddp import (
    FsdpBucket,
    FsdpSegment,
    disable_fsdp_hooks,
    list_fsdp_modules,
    make_param_bucket,
    reject_wrapped_modules,
)
from optimus.engine.p2p import BatchMessageSpecs
from optimus.engine.torch_private import fake_process_group
from optimus.errors import UserError
from optimus.ir.op import OpKind
from optimus.models.chunk import SegmentedChunk
from optimus.models.segment import ModuleSegment, WeightGradStore

DIFFERENCE = 1e-14
CASE = FillCase(name="refused", ranks=2, pp=2, encoders=((1, 2, 0), (2, 1, 0)))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES[1::2], id="half", marks=pytest.mark.ci("engine")),
        pytest.param(CASES[::2], id="other half", marks=pytest.mark.heavy),
    ],
)
def test_gradients_losses_and_outputs_are_those_of_one_process(cases: list[FillCase]) -> None:
    """And `eval` gives the same losses and outputs, bit by bit, and leaves gradients alone."""
    for line in run_cases("fill_worker.py", [case.name for case in cases], timeout_s=220):
        assert line["gradients"] <= DIFFERENCE and line["losses"] <= DIFFERENCE, line
        assert line["eval"] == 0 and line["untouched"], line
        assert line["last ranks"] == 2 * line["replicas"], line  # in each of two steps


# ---------------------------------------------------------------------------- gradients of any block


def twice(module: nn.Module, *, split: bool = False) -> list[Tensor]:
    """The gradients handed back for two microbatches, the first still held while the second runs."""
    chunk, handed = SegmentedChunk([[ModuleSegment(module)]]), []
    for microbatch in (0, 1):
        chunk.begin_forward(microbatch, (torch.ones(2, 4, dtype=torch.float64),), (True,), None)
        for phase in chunk.phases(OpKind.FORWARD, microbatch):
            phase.run()
        (output,) = chunk.output(microbatch)
        chunk.begin_backward(microbatch, (torch.ones_like(output),))
        for kind in (OpKind.INPUT_GRAD,) if split else (OpKind.BACKWARD,):
            for phase in chunk.phases(kind, microbatch):
                phase.run()
        (gradient,) = chunk.input_gradients(microbatch)
        assert gradient is not None
        handed.append(gradient)
        for phase in chunk.phases(OpKind.WEIGHT_GRAD, microbatch) if split else ():
            phase.run()
    return handed


@pytest.mark.parametrize("split", [False, True])
def test_a_parameter_does_not_add_into_a_gradient_that_is_on_its_way(split: bool) -> None:
    """Autograd gives both the same tensor; a second microbatch must not change what the first sent."""
    module = Shift().double()
    first, second = twice(module, split=split)
    assert torch.equal(first, torch.ones_like(first)) and torch.equal(second, first)
    assert module.weight.grad is not None and torch.equal(module.weight.grad, 2 * first)


@pytest.mark.parametrize("split", [False, True])
def test_a_parameter_whose_gradient_is_one_number_for_all_elements_can_be_added_to(split: bool) -> None:
    module = Scale().double()
    twice(module, split=split)
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, torch.full((4,), 16.0, dtype=torch.float64))


def test_what_is_handed_on_twice_gets_both_gradients() -> None:
    class Twice(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), 3.0))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return x, x, x * self.weight, self.weight, y

    block = ModuleSegment(Twice())
    _, saved = block.run_forward((torch.ones(2), torch.ones(2)), (True, True), None, WeightGradStore())
    assert saved is not None
    seeds = tuple(torch.full((2,), value) for value in (1.0, 10.0, 100.0, 1000.0))
    of_x, of_y = block.run_backward(saved, (*seeds, None), split=False)
    assert of_x is not None and of_x.tolist() == [311.0, 311.0] and of_y is None
    assert block.module.weight.grad.tolist() == [1100.0, 1100.0]


# ---------------------------------------------------------------------------- refusals


@pytest.fixture
def rank() -> Iterator[None]:
    """Rank 0 of a world whose backend does nothing."""
    with fake_process_group(0, CASE.ranks):
        yield


def schedule(**changed: Any) -> FillSchedule:
    given: dict[str, Any] = {"stages": make_stages(CASE)[:1], "encoders": make_encoders(CASE)} | changed
    return FillSchedule(given["stages"], given["encoders"], CASE.plan)


@pytest.mark.ci("engine")
@pytest.mark.usefixtures("rank")
def test_another_number_of_blocks_is_refused_with_both_numbers() -> None:
    encoders = make_encoders(CASE)
    encoders["encoder1"].pop()
    with pytest.raises(UserError) as error:
        schedule(encoders=encoders)
    assert (error.value.field, error.value.value) == ("encoders.encoder1", 3)
    assert "4" in error.value.problem


@pytest.mark.usefixtures("rank")
def test_other_encoders_than_the_plan_has_are_refused() -> None:
    encoders = make_encoders(CASE)
    encoders["sounds"] = encoders.pop("encoder1")
    with pytest.raises(UserError) as error:
        schedule(encoders=encoders)
    assert error.value.field == "encoders"
    assert "encoder1" in error.value.problem and error.value.value == ["encoder0", "sounds"]


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_stages_is_refused(count: int) -> None:
    with pytest.raises(UserError) as error:
        schedule(stages=make_stages(CASE)[:count])
    assert (error.value.field, error.value.value) == ("stages", count)


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("way", ["step", "eval"])
def test_a_step_without_the_inputs_of_an_encoder_is_refused(way: str) -> None:
    x, images, target = make_batch(CASE, 0)
    del images["encoder1"]
    with pytest.raises(UserError) as error:
        getattr(schedule(), way)(x, target=target, **images)
    assert error.value.field == "step"
    assert (
        "for ['encoder0']" in error.value.problem
        and "none for the encoders ['encoder1']" in error.value.problem
    )


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(
    ("what", "count"), [("argument 0", 4), ("encoder0", 8), ("encoder1", 4), ("target", 4)]
)
def test_a_batch_that_cannot_be_divided_is_refused_by_name(what: str, count: int) -> None:
    x, images, target = make_batch(CASE, 0)
    given = {"argument 0": x, "target": target, **images}
    given[what] = given[what][:-1]
    with pytest.raises(UserError) as error:
        schedule().step(given.pop("argument 0"), target=given.pop("target"), **given)
    assert error.value.field == f"step: {what}"
    assert f"into {count} microbatches" in error.value.problem


@pytest.mark.ci("engine")
def test_a_parameter_shared_by_stages_with_replicas_is_refused_by_name() -> None:
    """The first bucket would be summed over replicas before the other stage has added to it."""
    case = FillCase(name="shared", ranks=4, pp=2, chunks=2)
    with fake_process_group(0, case.ranks):
        stage, _ = make_stages(case)[:2]
        mine = FillSchedule([stage, stage], make_encoders(case), case.plan)
        nothing = BatchMessageSpecs(inputs={}, rows={}, tokens_per_row={})
        with pytest.raises(UserError, match="two of its buckets share") as error:
            Executor(case.plan, mine._groups, mine._chunks, nothing, device=torch.device("cpu"))
        assert error.value.field == "llm"


@pytest.mark.usefixtures("rank")
def test_two_types_in_one_bucket_are_refused_with_both() -> None:
    encoders = make_encoders(CASE)
    for parameter in list(encoders["encoder0"][0].parameters())[:1]:
        parameter.data = parameter.data.bfloat16()
    with pytest.raises(UserError, match=r"torch.bfloat16 and torch.float64"):
        ReplicatedBucket(list(encoders["encoder0"][0].parameters()), None)


@pytest.mark.usefixtures("rank")
def test_stages_of_torch_are_taken_by_their_module() -> None:
    class PipelineStage:
        def __init__(self, submod: nn.Module) -> None:
            self.submod = submod

    (stage,) = make_stages(CASE)[:1]
    assert schedule(stages=[PipelineStage(stage)]).stages == [stage]


# ---------------------------------------------------------------------------- modules that come sharded


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_module_sharded_over_other_ranks_is_refused(alone: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(2, 2), mesh=alone)
    disable_fsdp_hooks(module, "llm", (0,))
    with pytest.raises(UserError, match=r"llm.*over the ranks \[0\].*replicas are \[0, 1\]"):
        disable_fsdp_hooks(module, "llm", (0, 1))


def test_a_module_sharded_over_a_part_of_its_replicas_is_refused(alone: DeviceMesh) -> None:
    mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("replicated", "sharded"))
    module = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(UserError, match=r"over the ranks \[\[0\]\]"):
        disable_fsdp_hooks(module, "llm", (0,))


@pytest.mark.parametrize("inside", [False, True])
def test_a_wrapped_block_that_runs_elsewhere_is_refused(alone: DeviceMesh, inside: bool) -> None:
    module = fully_shard(nn.Linear(2, 2), mesh=alone)
    with pytest.raises(UserError, match=r"encoders.images.*does not run on this rank"):
        reject_wrapped_modules(nn.Sequential(module) if inside else module, "encoders.images")
    reject_wrapped_modules(nn.Linear(2, 2), "encoders.images")


def test_a_block_that_is_sharded_in_part_is_refused(alone: DeviceMesh) -> None:
    module = nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=alone), nn.Linear(2, 2))
    with pytest.raises(UserError, match="only in part"):
        make_param_bucket(list_fsdp_modules(module), list(module.parameters()), None)


def test_gradients_of_bf16_blocks_are_added_up_in_float32(alone: DeviceMesh) -> None:
    """Of 64 microbatches: in bf16 the sum would no longer grow."""
    module = nn.Linear(4, 1, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(module, mesh=alone, mp_policy=policy)
    disable_fsdp_hooks(module, "llm", (0,))
    bucket, block = FsdpBucket(list(module.parameters()), list_fsdp_modules(module)), FsdpSegment(module)
    bucket.begin_step()
    bucket.gather()
    bucket.wait_gathered()
    chunk = SegmentedChunk([[block]])
    for microbatch, size in enumerate([256.0] + [1.0] * 63):
        chunk.begin_forward(microbatch, (torch.full((1, 4), size, dtype=torch.bfloat16),), (True,), None)
        for kind in (OpKind.FORWARD, OpKind.BACKWARD):
            if kind == OpKind.BACKWARD:
                chunk.begin_backward(microbatch, (torch.ones_like(chunk.output(microbatch)[0]),))
            for phase in chunk.phases(kind, microbatch):
                phase.run()
        chunk.input_gradients(microbatch)
    bucket.reduce()
    bucket.wait_reduced()
    assert bucket.reduced_grad.tolist() == [256.0 + 63.0] * 4
    assert isinstance(module.weight, DTensor)  # in parts again
    state: Any = module._get_fsdp_state()
    assert not state._comm_ctx.post_forward_order and not state._comm_ctx.reduce_scatter_states
