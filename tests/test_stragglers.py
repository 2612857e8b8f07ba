"""A rank that is twice as slow is named, and nobody else, whatever the noise of the machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from faults import ROOT
from hypothesis import given
from hypothesis import strategies as st

from optimus.engine.stragglers import WINDOW, StragglerFinder, _median_of_others

NAMED_WITHIN = 60  # steps
CLEAN = 1000  # steps


def draw_steps(rng: np.random.Generator, ranks: int, steps: int) -> np.ndarray:
    """Draws busy seconds: stages of unequal load, 20 % of drift for all ranks, noise and rare hiccups."""
    load = 1.0 + rng.random(ranks // 2).repeat(2)[:ranks]
    drift = 1.0 + 0.2 * np.sin(np.arange(steps) / 50 + rng.random())
    noise = rng.lognormal(0.0, 0.2, (steps, ranks))
    hiccups = np.where(rng.random((steps, ranks)) < 0.01, 3.0, 1.0)
    busy: np.ndarray = load * drift[:, None] * noise * hiccups
    return busy


def find(busy: np.ndarray, programs: list[int]) -> list[tuple[int, int]]:
    """Returns steps and ranks that were named."""
    finder, named = StragglerFinder(programs), []
    for end in range(WINDOW, len(busy) + 1, WINDOW):
        found = finder.find(np.median(busy[end - WINDOW : end], 0).tolist())
        named += [(end, rank) for rank, _ in found]
    return named


PROGRAMS = {"replicas": [0, 0, 1, 1, 2, 2, 3, 3], "one pipeline": list(range(8))}


@pytest.mark.parametrize("programs", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_nobody_is_named_in_clean_steps(programs: list[int]) -> None:
    for seed in range(20):
        assert not find(draw_steps(np.random.default_rng(seed), 8, CLEAN), programs)


@pytest.mark.parametrize("programs", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_rank_that_becomes_slow_is_named(programs: list[int]) -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        busy, slow, begin = draw_steps(rng, 8, 300), int(rng.integers(8)), int(rng.integers(50, 150))
        busy[begin:, slow] *= 2.0
        named = find(busy, programs)
        assert [rank for _, rank in named] == [slow]
        assert named[0][0] <= begin + NAMED_WITHIN


@given(st.lists(st.floats(0.1, 10.0), min_size=2))
def test_the_median_of_others_is_that_of_a_list_without_the_rank(seconds: list[float]) -> None:
    for place, own in enumerate(seconds):
        others = seconds[:place] + seconds[place + 1 :]
        assert _median_of_others(sorted(seconds), own) == pytest.approx(float(np.median(others)))


def test_a_rank_that_is_slow_from_the_beginning_is_named_by_its_replica() -> None:
    busy = draw_steps(np.random.default_rng(0), 8, NAMED_WITHIN)
    busy[:, 5] *= 2.0
    assert [rank for _, rank in find(busy, PROGRAMS["replicas"])] == [5]


SLOW = """
import os, time
if os.environ.get("RANK") == "2":
    from optimus.engine.executor import Executor
    run = Executor._run
    def slow(self, actions, batch, **options):
        time.sleep(SECONDS)
        run(self, actions, batch, **options)
    Executor._run = slow
"""


@pytest.mark.ci("survival")
@pytest.mark.timeout(300)
def test_a_run_names_its_slow_rank(tmp_path: Path) -> None:
    """Four ranks: two stages of two replicas; one rank sleeps in every step."""
    text = (ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml").read_text()
    job = tmp_path / "job.yaml"
    job.write_text(text.replace("gpus: 2", "gpus: 4").replace("gpus_per_node: 2", "gpus_per_node: 4"))
    (tmp_path / "sitecustomize.py").write_text(SLOW.replace("SECONDS", "1.0"))
    words = ["train", str(job), "--steps", "40", "--run-dir", str(tmp_path / "run"), "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "optimus", *words],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    named = [line for line in done.stderr.splitlines() if "is slow" in line]
    assert len(named) == 1 and "rank 2 on " in named[0]
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert all(0 < line["goodput"] <= 1 for line in lines)
