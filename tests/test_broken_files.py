"""Broken job and plan files give a typed error with a hint, soon and in little memory; never a traceback."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from machine import allowed_s
from test_planfile import bytes_changed, token_swapped
from test_planfile import mutated as mutated_plan
from test_read import _spots as spots
from tiny_plans import tiny_plan

from optimus.errors import OptimusError, UserError
from optimus.ir.planfile import format_plan, load_plan
from optimus.job.catalog_files import list_catalog_names
from optimus.job.read import load_job
from optimus.planner.plan_replay import replay_plan
from optimus.verify.validator import check_plan

ROOT = Path(__file__).parents[1]
JOBS = sorted((ROOT / "optimus" / "catalog" / "jobs").rglob("*.yaml"))
ODD: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    3,
    2**31,
    10**20,
    0.5,
    -0.5,
    1e308,
    float("nan"),
    "",
    "x",
    "llm",
    [],
    {},
    [0],
    {"a": 1},
)
MOST_S, MOST_MB = 2.0, 500


def mutated_job(text: str, chance: random.Random) -> bytes:
    """One job file with one thing done to it: to bytes, to words, or to a field."""
    way = chance.randrange(5)
    if way < 3:
        return bytes_changed(text, chance, longest=100)
    if way == 3:
        return token_swapped(text, chance).encode()
    tree = yaml.safe_load(text)
    block, key = chance.choice(spots(tree))
    if chance.random() < 0.3:
        del block[key]
    elif chance.random() < 0.3 and isinstance(block, dict):
        block[f"{key}s"] = block.pop(key)
    else:
        block[key] = chance.choice(ODD)
    return yaml.safe_dump(tree).encode()


def outcomes_of_jobs(count: int, seed: int, folder: Path) -> Counter[str]:
    texts = [path.read_text() for path in JOBS]
    chance, path, found = random.Random(seed), folder / "job.yaml", Counter[str]()
    for _ in range(count):
        path.write_bytes(mutated_job(chance.choice(texts), chance))
        started = time.process_time()
        try:
            load_job(path)
            found["read"] += 1
        except OptimusError as error:
            found["refused" if "\nhint: " in str(error) else "without a hint"] += 1
        spent_s = time.process_time() - started
        assert spent_s < MOST_S or spent_s < allowed_s(MOST_S)
    return found


def outcomes_of_plans(count: int, seed: int, folder: Path) -> Counter[str]:
    """What can be read is also checked and played."""
    texts = [format_plan(tiny_plan(random.Random(number))) for number in range(20)]
    chance, path, found = random.Random(seed), folder / "broken.plan.json", Counter[str]()
    for _ in range(count):
        path.write_bytes(mutated_plan(chance.choice(texts), chance))
        started = time.process_time()
        try:
            plan = load_plan(path)
            found["holds" if check_plan(plan).ok else "does not hold"] += 1
            replay_plan(plan)
        except UserError as error:
            found["refused" if "\nhint: " in str(error) else "without a hint"] += 1
        spent_s = time.process_time() - started
        assert spent_s < MOST_S or spent_s < allowed_s(MOST_S)
    return found


def most_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_there_are_jobs_to_break() -> None:
    assert len(JOBS) == len(list_catalog_names("jobs"))


@pytest.mark.ci("plan file")
def test_broken_job_files(tmp_path: Path) -> None:
    found = outcomes_of_jobs(1_000, 11, tmp_path)
    assert found["refused"] > 300 and found["read"] > 30 and set(found) == {"refused", "read"}, found


@pytest.mark.ci("plan file")
def test_broken_plans_that_can_be_read_are_checked_and_played(tmp_path: Path) -> None:
    found = outcomes_of_plans(1_000, 12, tmp_path)
    assert found["does not hold"] > 10 and "without a hint" not in found, found


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_twenty_thousand_broken_files(tmp_path: Path) -> None:
    before = most_megabytes()
    jobs, plans = outcomes_of_jobs(10_000, 1, tmp_path), outcomes_of_plans(10_000, 2, tmp_path)
    assert "without a hint" not in jobs | plans
    assert most_megabytes() - before < MOST_MB
    sys.stdout.write(f"jobs {dict(jobs)}, plans {dict(plans)}, {most_megabytes() - before:.0f} MB more\n")
