"""The Trainer of transformers with dealt images: losses and gradients are those of a loop in one process."""

from __future__ import annotations

import pytest
from dealt_trainer_worker import CASES
from worker_lines import run_cases

CLOSE = 1e-12
IN_CI = ("ddp", "fsdp")
OTHERS = tuple(case.name for case in CASES if case.name not in IN_CI)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(IN_CI, id="some", marks=pytest.mark.ci("data")),
        pytest.param(OTHERS, id="others", marks=pytest.mark.heavy),
    ],
)
def test_losses_and_gradients_are_those_of_a_loop(names: tuple[str, ...]) -> None:
    for line in run_cases("dealt_trainer_worker.py", names, timeout_s=220):
        assert line["gradients"] < CLOSE and line["loss"] < CLOSE, line
        assert line["is_sharded"] == line["name"].startswith("fsdp"), line
        assert not any(line["missing"]), line
