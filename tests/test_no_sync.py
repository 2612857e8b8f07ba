"""Between the first op and the optimizer the host reads nothing from a device: no value, no size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_reads import HostRead, no_host_reads
from worker_lines import run_worker

CASES = (
    "two encoders",
    "three encoders",
    "windows and sections",
    "dropout",
    "rare images",
    "pieces",
    "plain",
    "zero-bubble",
    "recompute",
    "sharded: zero-bubble, tied, dropout, two encoders",
    "sharded: four replicas",
    "tp: two stages",
    "tp: full, split",
)
ROWS, MASK = torch.arange(6.0).reshape(3, 2), torch.tensor([True, False, True])


@pytest.mark.parametrize(
    "read",
    [
        lambda: ROWS.sum().item(),
        lambda: float(ROWS.sum()),
        lambda: int(ROWS.sum()),
        lambda: ROWS.sum() > 1 and None,
        ROWS.tolist,
        ROWS.numpy,
        ROWS.cpu,
        lambda: ROWS[MASK],
        lambda: ROWS[MASK, 0],
        lambda: ROWS.clone().__setitem__(MASK, torch.ones(2, 2)),
        lambda: ROWS.clone().__setitem__(MASK, 1.0),
        ROWS.nonzero,
        lambda: torch.where(MASK),
        lambda: ROWS.masked_select(ROWS > 1),
        ROWS.unique,
        lambda: ROWS.equal(ROWS),
        lambda: torch.allclose(ROWS, ROWS),
        lambda: torch.arange(3).repeat_interleave(torch.arange(3)),
        lambda: ROWS.to("meta"),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: ROWS[torch.tensor(1)],
        lambda: list(range(5))[torch.ones((), dtype=torch.int64)],
    ],
)
def test_what_reads_a_device_is_noticed(read: Callable[[], Any]) -> None:
    with pytest.raises(HostRead), no_host_reads():
        read()


def test_what_a_step_may_do_is_not() -> None:
    index = torch.tensor([0, 2])
    with no_host_reads() as count:
        rows = ROWS.clone().requires_grad_()
        found = torch.where(ROWS > 1, rows, 0.0).index_copy(0, index, torch.ones(2, 2))[:2].double()
        picked = rows[index].index_add(0, index[:1], rows[:1]) + rows.index_select(0, index)
        repeated = torch.arange(2).repeat_interleave(torch.arange(2), output_size=1)
        torch.autograd.grad(found.sum() + picked.sum(), rows)
        rows.detach().masked_fill_(MASK[:, None], 0.0).add_(repeated)
        assert rows.shape[0] == 3
        assert count() > 10


@pytest.mark.timeout(440)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(CASES[::3], id="some", marks=pytest.mark.ci("engine")),
        pytest.param(CASES, id="all", marks=pytest.mark.heavy),
    ],
)
def test_a_step_reads_nothing_from_a_device(names: tuple[str, ...]) -> None:
    lines = run_worker("no_sync_worker.py", "nothing", *names, timeout_s=400)
    assert {line["name"] for line in lines} == set(names)
    for line in lines:
        assert "error" not in line, f"{line['name']}: {line['error']}"
        assert min(line["ops"]) > 1000  # it was looked at


PLANTED = {
    "item": ("_local_scalar_dense", "Tensor.item"),
    "mask": ("by a mask",),
    "list": ("Tensor.tolist",),
    "backward": ("_local_scalar_dense", "is_nonzero", "Tensor.__bool__"),
}


@pytest.mark.ci("engine")
@pytest.mark.timeout(240)
def test_a_planted_read_is_noticed() -> None:
    lines = run_worker("no_sync_worker.py", "planted", "zero-bubble", timeout_s=220)
    assert [line["name"] for line in lines] == list(PLANTED)
    for line in lines:
        assert "HostRead" in line["error"], line
        assert any(word in line["error"] for word in PLANTED[line["name"]]), line["error"]
