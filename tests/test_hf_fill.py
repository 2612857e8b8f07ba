"""Transformers models in `FillSchedule`, on 2 and 4 ranks, give loss and gradients of one process."""

from __future__ import annotations

import pytest
from hf_fill_worker import CASES, HfCase
from worker_lines import run_cases

CLOSE = 1e-12  # of the largest gradient, and of the loss
QUICK = ("qwen2_5_vl", "qwen3_vl tied FSDP2", "qwen3_vl_moe", "gemma3", "qwen2_5_omni", "LoRA")


SOME = [case for case in CASES if case.name in QUICK]
OTHERS = [case for case in CASES if case.name not in QUICK]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SOME, id="some", marks=pytest.mark.ci("hf")),
        pytest.param(OTHERS, id="others", marks=pytest.mark.heavy),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(cases: list[HfCase]) -> None:
    for line in run_cases("hf_fill_worker.py", [case.name for case in cases], timeout_s=380):
        assert line["gradients"] < CLOSE and line["loss"] < CLOSE, line
        assert not line["missing"] and line["read"] <= 1.1, line
