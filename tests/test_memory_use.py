"""Bytes counted while plans are played, beside those that the plans say."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cases import MEASURED
from worker_lines import run_worker

OVER, FULL = 0.10, 0.15  # planned above counted; where layers are made again, of every module one is planned
QUICK = ("zero-bubble", "window of 4, 8 microbatches")


def check(line: dict[str, Any]) -> None:
    """Every rank: states to the byte, no line above what was planned for it, and the peak not far below."""
    assert "error" not in line, line["error"]
    for use in line["ranks"]:
        for name in ("parameters", "gradients", "optimizer"):
            assert use["counted"][name] == pytest.approx(use["planned"][name], rel=1e-3)
        assert use["lines_over"] == 0
        assert 0 <= use["error"] <= (FULL if "full" in line["name"] else OVER)
        for name in ("llm_activations", "encoder_activations", "seam"):
            most = use["planned"][name] + use["planned"]["working"]
            assert use["counted"][name] <= most


def encoders_of(line: dict[str, Any]) -> list[tuple[int, int]]:
    parts = ("planned", "counted")
    return [tuple(use[part]["encoder_activations"] for part in parts) for use in line["ranks"]]


@pytest.mark.ci("engine")
@pytest.mark.timeout(200)
def test_two_plans_need_what_they_say() -> None:
    lines = run_worker("memory_worker.py", *QUICK, timeout_s=180)
    assert len(lines) == len(QUICK)
    for line in lines:
        check(line)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_all_plans_need_what_they_say_and_a_window_bounds_what_encoders_keep() -> None:
    lines = run_worker("memory_worker.py", timeout_s=850)
    assert len(lines) >= len(MEASURED) >= 8
    for line in lines:
        check(line)
    short, long, whole, twice = map(encoders_of, lines[-4:])
    for (planned, counted), (later_planned, later_counted) in zip(short, long, strict=True):
        assert later_planned == planned  # of 8 and of 32 microbatches
        assert later_counted <= 1.01 * counted
    for (_, counted), (_, later) in zip(whole, twice, strict=True):
        assert later > 1.8 * counted  # without a window, of 8 and of 16
