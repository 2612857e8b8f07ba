"""`FillSchedule` with inputs that vary, tied weights and accumulation trains as one process would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from engine_worker import play
from fill_vlm_worker import CASES, VlmCase, build, compare, image_shapes, llm_shapes, loss_fn, make_batch
from torch import nn
from worker_lines import run_cases

from optimus.engine.buckets import ReplicatedBucket
from optimus.engine.executor import Executor
from optimus.engine.fill_schedule import FillSchedule
from optimus.engine.stage_profile import ProfiledStages, StageInputs, StageProfile
from optimus.engine.step_batch import StepBatch
from optimus.engine.tied_weights import reject_undeclared_ties
from optimus.engine.torch_private import fake_process_group
from optimus.errors import UserError
from optimus.ir.plan import Seconds
from optimus.ir.ranks import LLM

DIFFERENCE = 1e-14


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([CASES[0], CASES[2], CASES[5]], id="some", marks=pytest.mark.ci("engine")),
        pytest.param([*CASES[1:2], *CASES[3:5], *CASES[6:]], id="others", marks=pytest.mark.heavy),
    ],
)
def test_gradients_norms_and_losses_are_those_of_one_process(cases: list[VlmCase]) -> None:
    for line in run_cases("fill_vlm_worker.py", [case.name for case in cases], timeout_s=220):
        assert max(line["gradients"], line["norm"], line["loss"]) <= DIFFERENCE, line


# ---------------------------------------------------------------------------- planted bugs


def _reduced_twice() -> AbstractContextManager[Any]:
    """Earlier gradients stay in the buffer that is reduced over replicas."""

    def begin_step(self: ReplicatedBucket) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    return mock.patch.object(ReplicatedBucket, "begin_step", begin_step)


def _forgotten() -> AbstractContextManager[Any]:
    """Every step starts new gradients."""
    return mock.patch.object(ReplicatedBucket, "end_step")


def _untied() -> AbstractContextManager[Any]:
    return mock.patch.object(Executor, "_sum_tied_grads")


def _mean_of_microbatches() -> AbstractContextManager[Any]:
    """Microbatches weigh the same, however many labels they have."""
    original = StepBatch.context

    def context(self: StepBatch, module: str, microbatch: int) -> Any:
        result = original(self, module, microbatch)
        if module == LLM:
            count = int((result.target != -100).sum()) * len(self._targets)
            object.__setattr__(result, "num_items", count)
        return result

    return mock.patch.object(StepBatch, "context", context)


@pytest.mark.ci("engine")
@pytest.mark.parametrize("bug", [_reduced_twice, _forgotten, _untied, _mean_of_microbatches])
def test_planted_bugs_show(bug: Callable[[], AbstractContextManager[Any]]) -> None:
    case = CASES[1] if bug is _reduced_twice else CASES[0]
    result = play(case, compare, bug)  # type: ignore[arg-type]
    assert result["gradients"] > 1e-3, result


# ---------------------------------------------------------------------------- refusals

CASE = VlmCase(name="refused", ranks=2, pp=2, encoder_pp=2, tied=False)


@pytest.fixture
def rank() -> Iterator[None]:
    """Rank 0 of a world whose backend does nothing."""
    with fake_process_group(0, CASE.ranks):
        yield


def schedule(**changed: Any) -> FillSchedule:
    stages, blocks = build(CASE)
    options: dict[str, Any] = {
        "loss_fn": loss_fn,
        "shapes": {"images": image_shapes, LLM: llm_shapes},
    } | changed
    blocks = options.pop("blocks", blocks)
    return FillSchedule(stages[:1], {"images": blocks}, CASE.plan, **options)


@pytest.mark.usefixtures("rank")
def test_a_block_without_values_that_runs_here_is_refused() -> None:
    _, blocks = build(CASE)
    schedule(blocks=[*blocks[:2], *(block.to("meta") for block in blocks[2:])])
    _, blocks = build(CASE)
    with pytest.raises(UserError, match=r"encoders.images\[1\].*meta"):
        schedule(blocks=[blocks[0], blocks[1].to("meta"), *blocks[2:]])


@pytest.mark.usefixtures("rank")
def test_shapes_of_a_module_that_is_not_planned_are_refused() -> None:
    with pytest.raises(UserError, match="sounds"):
        schedule(shapes={"sounds": image_shapes})


@pytest.mark.usefixtures("rank")
def test_a_list_of_another_length_than_there_are_microbatches_is_refused() -> None:
    batch = make_batch(CASE, 0, 0)
    with pytest.raises(UserError, match=r"images.*3.*4 microbatches"):
        schedule().step(batch["ids"], images=batch["images"][:3], positions=batch["positions"], scale=0.7)


def step_batch(shapes: dict[str, Any]) -> StepBatch:
    batch = make_batch(CASE, 0, 0)
    kwargs = {"images": batch["images"], "positions": batch["positions"], "scale": 0.7}
    options: dict[str, Any] = {"target": None, "num_items": None, "loss_kwargs": {}, "keeps_output": False}
    split = StepBatch(CASE.plan, (batch["ids"],), kwargs, shapes, **options)
    seconds = Seconds(forward_s=0.0, backward_s=0.0)
    one = StageProfile(output=(), seconds=seconds, needs_backward=True)
    images = split.stage_inputs("images", 0)
    assert images is not None
    split.profiles = ProfiledStages(
        stages=(one, one),
        encoders={"images": (one,) * 4},
        signatures={"images": images.signature, LLM: {}},
    )
    return split


def test_other_shapes_are_refused_where_nothing_says_what_they_lead_to() -> None:
    with pytest.raises(UserError, match=r"images microbatch 3.*\(8, 5\).*the first had.*\(6, 5\)"):
        step_batch({}).check_signatures()
    step_batch({"images": image_shapes, LLM: llm_shapes}).check_signatures()


def test_another_number_of_shapes_than_outputs_is_refused() -> None:
    with pytest.raises(UserError, match="returned 1 shapes for the 0 outputs of number 0"):
        step_batch({"images": image_shapes}).output_specs("images", 0, 0)


def test_a_tie_that_is_not_declared_is_refused_by_name(tmp_path: Path) -> None:
    stages, _ = build(VlmCase(name="tied", ranks=1, pp=1, chunks=2))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=r"embedding.weight of the first stage, which equals head.weight"):
            reject_undeclared_ties(stages, is_first=True, is_last=True)
        head = cast(Any, stages[-1].head)
        head.weight = nn.Parameter(head.weight.detach() + 1e-9)
        reject_undeclared_ties(stages, is_first=True, is_last=True)
        for weight in (cast(Any, stages[0].embedding).weight, head.weight):
            nn.init.ones_(weight)  # all equal: not taken for a tie
        reject_undeclared_ties(stages, is_first=True, is_last=True)
    finally:
        torch.distributed.destroy_process_group()


def test_inputs_are_given_as_one_tensor_several_or_by_name() -> None:
    batch = {"images": (torch.zeros(8, 2), torch.zeros(4, 3)), "positions": torch.zeros(8), "scale": 0.7}
    options: dict[str, Any] = {"target": None, "num_items": None, "loss_kwargs": {}, "keeps_output": False}
    split = StepBatch(CASE.plan, (torch.zeros(4, 1),), batch, {}, **options)
    images, llm = split.stage_inputs("images", 3), split.stage_inputs(LLM, 3)
    assert images is not None and llm is not None
    assert images.signature == {"argument 0": (2, 2), "argument 1": (1, 3)}
    assert llm.signature == {"argument 0": (1, 1), "positions": (2,)} and llm.kwargs["scale"] == 0.7
    batch["images"] = {"pixels": torch.zeros(8, 2)}
    split = StepBatch(CASE.plan, (torch.zeros(4, 1),), batch, {}, **options)
    assert split.stage_inputs("images", 0) == StageInputs(kwargs={"pixels": mock.ANY})
    batch["images"] = None
    split = StepBatch(CASE.plan, (torch.zeros(4, 1),), batch, {}, **options)
    assert split.stage_inputs("images", 0) is None and split.find_complete_microbatch() is None
