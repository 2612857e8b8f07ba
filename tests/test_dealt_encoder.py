"""Towers whose items are dealt over ranks: losses and gradients are those of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dealt_worker import CASES, TOWERS, DealtCase, compare
from engine_worker import play
from torch import Tensor, nn
from torch import distributed as dist
from worker_lines import run_cases

from optimus.data.dealt_encoder import Call, DealtEncoder, Routes, _merge_calls, count_tower_flops
from optimus.errors import UserError

CLOSE = 1e-12
IN_CI = ("qwen3_vl fsdp 4", "siglip fsdp 4", "qwen2_5_vl ddp 4", "whisper ddp 4", "qwen3_vl ddp 4 no images")
OTHERS = tuple(case.name for case in CASES if case.name not in IN_CI)


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(IN_CI, id="some", marks=pytest.mark.ci("data")),
        *(
            pytest.param(
                tuple(name for name in OTHERS if name.startswith(tower)), id=tower, marks=pytest.mark.heavy
            )
            for tower in TOWERS
        ),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(names: tuple[str, ...]) -> None:
    for line in run_cases("dealt_worker.py", names, timeout_s=400):
        assert line["gradients"] < CLOSE and line["loss"] < CLOSE, line
        assert not line["missing"], line


def _kept_gradients() -> AbstractContextManager[Any]:
    """Gradients of rows stay on the rank that owns the item."""

    def send_gradient(self: Routes, gradient: Tensor, shape: torch.Size, rows: int, group: Any) -> Tensor:
        padded = gradient.new_zeros(shape)
        count = min(len(gradient), len(padded))
        padded[:count] = gradient[:count]
        return padded

    return mock.patch.object(Routes, "send_gradient", send_gradient)


def _unsorted_rows() -> AbstractContextManager[Any]:
    """Rows come back in the order of the ranks that encoded them."""

    def order(self: Routes, numerator: int, denominator: int) -> Tensor:
        return torch.arange(self.own_rows * numerator // denominator)

    return mock.patch.object(Routes, "_order", order)


EXAMPLE = Path(__file__).parents[1] / "examples" / "dealt_fsdp.py"


def run_example(way: str) -> list[str]:
    """Returns the losses that the example prints."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE), way],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return re.findall(r"loss ([\d.]+)", done.stdout)


@pytest.mark.timeout(420)
@pytest.mark.ci("data")
def test_the_example_trains_the_same_dealt_and_undealt() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    dealt = run_example("dealt")
    assert len(set(dealt)) == 6
    assert dealt == run_example("undealt")


@pytest.mark.ci("data")
@pytest.mark.parametrize("bug", [_kept_gradients, _unsorted_rows])
def test_planted_bugs_show(bug: Callable[[], AbstractContextManager[Any]]) -> None:
    case = DealtCase(name="bug", model="qwen3_vl", steps=((1, 1, 3, 1),))
    result = play(case, compare, bug)  # type: ignore[arg-type]
    assert "error" in result or result["gradients"] > 1e-3, result


# ---------------------------------------------------------------------------- refusals


class Tower(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, pixels: Tensor, scale: Tensor | None = None) -> Tensor:
        output: Tensor = self.linear(pixels)
        return output


@pytest.fixture
def world() -> Iterator[None]:
    """One rank, alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_arguments_that_cannot_be_dealt_are_refused() -> None:
    tower = Tower()
    DealtEncoder(tower, nn.Identity(), cost=float)
    with pytest.raises(UserError, match=r"scale = .* has no row for each of 3 of pixels"):
        tower(torch.ones(3, 2), scale=torch.ones(2, 2))
    with pytest.raises(UserError, match="requires gradients"):
        tower(torch.ones(3, 2, requires_grad=True))


@pytest.mark.usefixtures("world")
def test_outputs_that_are_not_of_rows_are_refused() -> None:
    tower = Tower()
    tower.linear = nn.Sequential(tower.linear, nn.Flatten(0), nn.Unflatten(0, (1, 6)))
    DealtEncoder(tower, nn.Identity(), cost=float)
    with pytest.raises(UserError, match=r"output = .*1, 6.* has no row for each of 3 input rows"):
        tower(torch.ones(3, 2))


@pytest.mark.usefixtures("world")
def test_an_llm_that_gets_no_embeddings_is_refused() -> None:
    tower, llm = Tower(), nn.Embedding(4, 2)
    DealtEncoder(tower, llm, cost=float)
    tower(torch.ones(3, 2))
    with pytest.raises(UserError, match="llm is called without embeddings"):
        llm(torch.tensor([1]))


def test_ranks_with_other_arguments_are_refused() -> None:
    one = Call(items=((),), tensors=(("pixels", (2,), torch.float32),), options=(("scale", 1),))
    other = Call(items=((),), tensors=(("pixels", (3,), torch.float32),), options=(("scale", 1),))
    assert _merge_calls("Tower", [Call(), one, one]) == one
    for different in (other, Call(items=((),), tensors=one.tensors, options=(("scale", 2),))):
        with pytest.raises(UserError, match="arguments on rank"):
            _merge_calls("Tower", [one, different])


@pytest.mark.usefixtures("world")
def test_names_and_classes_stay() -> None:
    tower = Tower()
    names, class_name = list(tower.state_dict()), str(type(tower))
    DealtEncoder(tower, nn.Identity(), cost=float)
    assert (list(tower.state_dict()), str(type(tower))) == (names, class_name)
    assert isinstance(tower, Tower)


def test_costs_have_a_linear_and_a_quadratic_part() -> None:
    tower = Tower()
    tower.config = type("Config", (), {"depth": 3, "hidden_size": 2})()
    assert count_tower_flops(tower, 10) == 2 * 6 * 10 + 4 * 2 * 3 * 100
