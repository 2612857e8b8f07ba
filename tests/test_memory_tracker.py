"""Bytes counted while plans are played, beside those that the plans say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from dry_run_worker import TRAINING
from engine_cases import CASES, MEASURED, WINDOWED, Case
from worker_lines import run_worker

from optimus.engine.memory_tracker import MemoryTracker
from optimus.engine.rank_dry_run import dry_run_rank
from optimus.engine.torch_private import FakeTensorMode
from optimus.ir.op import OpKind

OVER = 0.15  # planned above counted
QUICK = ("window of 4, 8 microbatches",)


def check(line: dict[str, Any]) -> None:
    """Every rank: states but for padding, no line above what was planned for it, the peak not far below."""
    assert "error" not in line, line["error"]
    for use in line["ranks"]:
        for name in ("parameters", "gradients", "optimizer"):
            assert use["counted"][name] == pytest.approx(use["planned"][name], rel=1e-3)
        assert use["lines_over"] == 0
        assert 0 <= use["error"] <= OVER
        for name in ("llm_activations", "encoder_activations", "seam"):
            most = use["planned"][name] + use["planned"]["working"]
            assert use["counted"][name] <= most


def encoders_of(line: dict[str, Any]) -> list[tuple[int, int]]:
    parts = ("planned", "counted")
    return [tuple(use[part]["encoder_activations"] for part in parts) for use in line["ranks"]]


# ---------------------------------------------------------------------------- the counter


class Quiet:
    def begin(self, line: int) -> None: ...

    def end(self, line: int) -> None: ...


@contextmanager
def counting() -> Iterator[tuple[MemoryTracker, torch.Tensor]]:
    """Yields a tracker of rank 0 of two, and a tensor that is counted apart."""
    told: list[Any] = [Quiet()]

    def replace_recorder(recorder: Any) -> Any:
        told.append(recorder)
        return told[-2]

    known = torch.zeros(100)
    executor = SimpleNamespace(
        plan=CASES[0].plan, groups=SimpleNamespace(rank=0), replace_recorder=replace_recorder
    )
    with MemoryTracker(cast(Any, executor), [known]) as found:
        assert told[-1] is found
        yield found, known
    assert told[-1] is told[0]


@pytest.fixture
def counter() -> Iterator[tuple[MemoryTracker, torch.Tensor]]:
    with counting() as found:
        yield found


def test_what_is_kept_is_counted_until_it_is_gone(counter: tuple[MemoryTracker, torch.Tensor]) -> None:
    count, known = counter
    count.begin(2)
    kept = known + 1
    view = kept[10:].view(-1, 10)
    known.mul_(2)
    count.end(2)
    count.begin(5)
    del kept
    count.end(5)
    count.begin(6)
    del view
    count.end(6)
    assert count.live_bytes.sum(axis=1)[:7].tolist() == [0, 0, 400, 400, 400, 400, 0]
    assert count.peak_bytes[:7].tolist() == [0, 0, 400, 400, 400, 400, 400]


def test_what_no_line_leaves_behind_counts_while_it_runs(counter: tuple[MemoryTracker, torch.Tensor]) -> None:
    count, known = counter
    count.begin(0)
    total = float((known + 1).mul(3).sum())
    count.end(0)
    assert total == 300 and count.live_bytes[0].sum() == 0
    assert 800 <= count.peak_bytes[0] <= 808  # two tensors at a time, and a number


def test_storages_may_be_emptied_and_filled(counter: tuple[MemoryTracker, torch.Tensor]) -> None:
    count, known = counter
    count.begin(0)
    kept = known + 1
    kept.untyped_storage().resize_(0)
    count.end(0)
    count.begin(1)
    kept.untyped_storage().resize_(400)
    count.end(1)
    assert count.live_bytes.sum(axis=1)[:2].tolist() == [0, 400]


def test_views_of_what_was_emptied_do_not_fill_it() -> None:
    """Views of fake tensors, which have no numbers, would fill it by themselves."""
    with FakeTensorMode(), counting() as (count, known):
        count.begin(0)
        kept = known + 1
        kept.untyped_storage().resize_(0)
        view = kept.detach().view(10, 10)
        count.end(0)
        count.begin(1)
        kept.untyped_storage().resize_(400)
        count.end(1)
    assert view.shape == (10, 10)
    assert count.live_bytes.sum(axis=1)[:2].tolist() == [0, 400]


def test_tensors_belong_to_who_made_them(counter: tuple[MemoryTracker, torch.Tensor]) -> None:
    """Rows that arrive are the seam's, and what was there before the step is nobody's."""
    count, _ = counter
    rows = CASES[0].plan.programs[0].rows
    names = CASES[0].plan.names
    lines = [
        next(line for line, row in enumerate(rows.tolist()) if (names[row[0]], row[1]) == wanted)
        for wanted in (("llm", OpKind.FORWARD), ("vision", OpKind.FORWARD), ("vision", OpKind.RECV_SEAM))
    ]
    held = []
    for line, size in sorted(zip(lines, (100, 200, 300), strict=True)):
        count.begin(line)
        held.append(torch.zeros(size))
        count.end(line)
    assert count.live_bytes[max(lines)].tolist() == [400, 800, 1200, 0]


# ---------------------------------------------------------------------------- plans


@pytest.mark.ci("engine")
@pytest.mark.timeout(200)
def test_a_plan_needs_what_it_says() -> None:
    lines = run_worker("memory_worker.py", *QUICK, timeout_s=180)
    assert len(lines) == len(QUICK)
    for line in lines:
        check(line)


def count_with_kernels_of_gpus(case: Case) -> dict[str, Any]:
    """Counts on fake tensors: kernels of CPUs make wide copies beside."""
    uses = [dry_run_rank(case.job, case.plan, TRAINING, rank).memory for rank in range(case.ranks)]
    return {"name": case.name, "ranks": [{**asdict(use), "error": use.error} for use in uses]}


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_all_plans_need_what_they_say(case: Case) -> None:
    check(count_with_kernels_of_gpus(case))


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_window_bounds_what_encoders_keep() -> None:
    lines = [count_with_kernels_of_gpus(case) for case in WINDOWED]
    for line in lines:
        check(line)
    short, long, whole, twice = map(encoders_of, lines)
    for (planned, counted), (later_planned, later_counted) in zip(short, long, strict=True):
        assert later_planned == planned  # of 8 and of 32 microbatches
        assert later_counted <= 1.01 * counted
    for (_, counted), (_, later) in zip(whole, twice, strict=True):
        assert later > 1.8 * counted  # without a window, of 8 and of 16


@pytest.mark.heavy
@pytest.mark.timeout(200)
def test_an_engine_that_keeps_too_much_is_noticed() -> None:
    """Outputs that nobody needs any more are counted, and what was sent is more than any plan allows."""
    sound, outputs, sent = run_worker("memory_worker.py", "leaks", timeout_s=180)
    check(sound)
    for leak in (outputs, sent):
        peaks = zip(sound["ranks"], leak["ranks"], strict=True)
        assert any(after["counted_peak"] > 1.002 * before["counted_peak"] for before, after in peaks)
    assert max(use["lines_over"] for use in sent["ranks"]) > 0
