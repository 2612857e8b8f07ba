"""A forked process gives the same answer as one process, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from optimus.errors import DoesNotFit
from optimus.ir.planfile import save_plan
from optimus.job.read import find_job
from optimus.planner.forked import Forked, compute_by_key
from optimus.sensitivity.recommend import plan_job


@dataclass(eq=False)
class _Thing:
    name: str


def has_child() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG) is not None
    except ChildProcessError:
        return False


def test_shared_objects_come_back_as_they_are_and_others_as_copies() -> None:
    kept, other = _Thing("kept"), _Thing("other")
    with Forked(lambda: (kept, other, os.getpid()), cores=2, shared=[kept]) as forked:
        same, copied, process = forked.result()
    assert same is kept
    assert copied is not other and copied.name == "other"
    assert process != os.getpid()
    assert not has_child()


def test_with_one_core_the_function_runs_here() -> None:
    with Forked(os.getpid, cores=1) as forked:
        assert forked.result() == os.getpid()


def test_a_process_that_fails_is_replaced_and_errors_are_raised_here() -> None:
    here = os.getpid()

    def fails_elsewhere() -> int:
        if os.getpid() != here:
            os._exit(3)
        return here

    with Forked(fails_elsewhere, cores=2) as forked:
        assert forked.result() == here

    def refuses() -> None:
        raise DoesNotFit("no", "never")

    with Forked(refuses, cores=2) as refused, pytest.raises(DoesNotFit):
        refused.result()
    assert not has_child()


def test_a_process_that_is_not_waited_for_is_ended() -> None:
    with pytest.raises(KeyboardInterrupt), Forked(lambda: bytes(10**7), cores=2):
        raise KeyboardInterrupt
    assert not has_child()


def test_a_process_ends_with_the_one_that_forked_it() -> None:
    """However it is killed: the pipe that both hold closes."""
    script = (
        "import os, time\n"
        "from optimus.planner.forked import Forked\n"
        "with Forked(lambda: time.sleep(60), cores=2):\n"
        "    os.write(1, b'forked')\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(6) == b"forked"
        process.kill()
        begin_s = time.monotonic()
        assert process.stdout.read() == b""  # when both are gone
        assert time.monotonic() - begin_s < 30


@pytest.mark.parametrize("cores", [1, 2])
def test_keys_are_computed_once_each_and_stay_in_order(cores: int) -> None:
    reported: list[str] = []
    work = {"a": 1.0, "b": 5.0, "c": 2.0, "d": 2.0}
    results = compute_by_key(lambda key: (key, os.getpid()), work, cores=cores, report=reported.append)
    assert list(results) == list(work) and all(key == found for key, (found, _) in results.items())
    assert len({process for _, process in results.values()}) == cores
    assert reported == [key for key, (_, process) in results.items() if process == os.getpid()]


@pytest.mark.ci("search")
@pytest.mark.parametrize("name", ["paper/small-a100", "gpu/bench-vl"])
def test_two_cores_give_the_plan_of_one(name: str, tmp_path: Path) -> None:
    one, two = (plan_job(find_job(name), cores=cores, batches=8, draws=20) for cores in (1, 2))
    assert one.recommendation.sentence == two.recommendation.sentence
    assert list(one.systems) == list(two.systems)
    for system, other in zip(one.systems.values(), two.systems.values(), strict=True):
        assert (system.step_s, system.memory, system.how) == (other.step_s, other.memory, other.how)
    digests = [save_plan(planned.plan, tmp_path / "plan.json") for planned in (one, two)]
    assert digests[0] == digests[1]
