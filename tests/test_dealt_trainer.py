"""The Trainer of transformers with dealt images: losses and gradients are those of a loop in one process."""

from __future__ import annotations

import pytest
from dealt_trainer_worker import CASES
from dealt_worker import TOWERS
from worker_lines import run_cases

CLOSE = 1e-12
IN_CI = ("qwen2_5_vl ddp 4", "qwen2_5_vl fsdp 4")
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
def test_losses_and_gradients_are_those_of_a_loop(names: tuple[str, ...]) -> None:
    for line in run_cases("dealt_trainer_worker.py", names, timeout_s=400):
        assert line["gradients"] < CLOSE and line["loss"] < CLOSE, line
        assert line["is_sharded"] == ("fsdp" in line["name"]), line
        assert not any(line["missing"]), line
