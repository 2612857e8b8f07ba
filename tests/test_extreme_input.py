"""Extreme names, numbers, lists and depths give an answer or a typed error, soon and in little memory."""

from __future__ import annotations

import copy
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from machine import allowed_s
from made_profiles import made_profile

from optimus.cli import run
from optimus.cli.flags import NO, OK, USER_ERROR
from optimus.cost.profile_file import format_profile
from optimus.errors import UserError
from optimus.ir.planfile import format_plan, is_plan_file
from optimus.job.read import find_job, load_data_source, load_job
from optimus.job.yaml_parser import MAX_NODES
from optimus.planner.planning import make_plan

TINY = ("cpu/tiny-vl", "--layout", "llm=pp1,tp1")
MOST_S, MOST_MB = 2.0, 500
LONG = "n" * 300  # longer than a file's name may be

JOB = yaml.safe_load("""
format: optimus.job/1
name: demo
model:
  encoders:
    - name: vision
      stack: {hidden: 256, layers: 4, mlp: {width: 512, gated: false},
              attention: {heads: 4, kv_heads: 4, head_dim: 64, causal: false}}
      projector: {widths: [256], merge: 4}
  llm:
    stack: {hidden: 256, layers: 8, attention: {heads: 4, kv_heads: 2, head_dim: 64}, mlp: {width: 512}}
    vocab: 32000
cluster:
  name: c
  gpus: 8
  gpus_per_node: 4
  gpu: {name: g, peak_tflops: 900, memory_gb: 80, memory_tb_per_s: 3.3, curves: flat}
  within_node: {gb_per_s_per_gpu: 400, latency_us: 2}
  between_nodes: {gb_per_s_per_gpu: 50, latency_us: 5}
  reserve_gb_per_gpu: 2
workload: {sequence_tokens: 512, sequences_per_step: 16, vision_tokens: {p50: 100, p95: 300, max: 400}}
layout: {llm: {dp: 2, pp: 2, tp: 2}, vision: {pp: 1, tp: 1}, limits: {microbatch_sequences: [1, 2]}}
today: {framework: megatron, layout: {llm: {dp: 2, pp: 2, tp: 2, chunks: 1}, vision: stage0},
        measured: {step_s: 1.9, peak_memory_gb: 71}}
run: {steps: 20}
""")


@cache
def plan_text() -> str:
    return format_plan(make_plan(find_job("cpu/tiny-vl", None, ["llm=pp1,tp1"]), systems=[]).plan)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, in which commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.plan.json").write_text(plan_text())
    return tmp_path


# ---------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", [LONG, "a\0b"])
@pytest.mark.parametrize(
    "arguments",
    [
        "simulate NAME",
        "simulate NAME.yaml",
        "simulate NAME.json --on h100:64",
        "simulate good.plan.json --trace NAME.json",
        "simulate cpu/tiny-vl --picture NAME.svg",
        "simulate cpu/tiny-vl --profile NAME.yaml",
        "check NAME",
        "report NAME.plan.json",
        "report good.plan.json -o NAME.html",
        "export good.plan.json --to megatron -o NAME",
        "why NAME llm=pp1",
        "diff NAME NAME",
        "plan cpu/tiny-vl -o NAME.json",
        "init --hf NAME --on h100:64",
        "init --hf NAME/config.json --on h100:64",
        "profile NAME",
        "profile cpu/tiny-vl -o NAME.yaml",
        "data index NAME.jsonl --model NAME",
        "deal NAME",
        "train NAME",
        "train cpu/tiny-vl --run-dir NAME",
        "train cpu/tiny-vl --plan NAME",
        "train cpu/tiny-vl --model NAME",
    ],
)
@pytest.mark.usefixtures("folder")
def test_names_that_no_file_can_have(arguments: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.process_time()
    assert run([word.replace("NAME", name) for word in arguments.split()]) == USER_ERROR
    assert "\nhint: " in capsys.readouterr().err
    assert time.process_time() - started < allowed_s(MOST_S)


def test_the_library_takes_such_names_too(tmp_path: Path) -> None:
    assert not is_plan_file(f"{LONG}.json")
    for name in (LONG, f"{LONG}/config.json"):
        with pytest.raises(UserError):
            find_job(name, on="h100:8")
    (tmp_path / "job.yaml").write_text(json.dumps({**JOB, "model": {"hf": LONG}, "data": {"path": LONG}}))
    with pytest.raises(UserError, match="neither a model folder"):
        load_job(tmp_path / "job.yaml")
    with pytest.raises(UserError, match="neither a model folder"):
        load_data_source(tmp_path / "job.yaml")


def test_a_job_whose_name_is_too_long_for_its_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text(json.dumps({**JOB, "name": LONG}))
    assert run(["plan", "job.yaml"]) == USER_ERROR
    assert "--output" in capsys.readouterr().err


# ---------------------------------------------------------------------------- numbers and lists


def test_a_latency_of_days_is_refused(tmp_path: Path) -> None:
    job = copy.deepcopy(JOB)
    job["cluster"]["between_nodes"]["latency_us"] = 1e12
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    with pytest.raises(UserError, match="latency_us = 1000000000000"):
        load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize("step_s", [5e-324, 1e-308])
def test_times_that_overflow_when_divided_by_are_refused(step_s: float, tmp_path: Path) -> None:
    job = copy.deepcopy(JOB)
    job["today"]["measured"]["step_s"] = step_s
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    with pytest.raises(UserError, match=r"today\.measured\.step_s = .* is closer to 0 than 1e-100"):
        load_job(tmp_path / "job.yaml")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("claim_s", [0, -0.0, 1e-99])
def test_claims_of_no_time_are_refused(claim_s: float, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(plan_text())
    document["claims"].update(step_s=claim_s, lagged_s=claim_s, estimate_s=claim_s)
    Path("zero.plan.json").write_text(json.dumps(document))
    assert run(["check", "zero.plan.json"]) == NO
    for arguments in (["simulate"], ["report"], ["diff", "good.plan.json"], ["why", "llm=tp2"]):
        assert run([arguments[0], "zero.plan.json", *arguments[1:]]) == USER_ERROR
        assert "breaks the rule `claim`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "a: [" + "1, " * 340_000 + "1]",
        "- 1\n" * 260_000,
        "a:\n" + "  - {b: c}\n" * 60_000,
        "".join(f"k{number}: 1\n" for number in range(60_000)),
        "a: &a [" + "1, " * 50_000 + "1]\nb: [*a, *a, *a]\n",
    ],
)
def test_large_yaml_is_refused_before_it_is_read(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are counted as they come: the rest of a file that has too many is not parsed."""
    (tmp_path / "job.yaml").write_text(text)
    parse, events = yaml.parse, list[yaml.Event]()

    def count(*arguments: Any, **options: Any) -> Iterator[yaml.Event]:
        for event in parse(*arguments, **options):
            events.append(event)
            yield event

    monkeypatch.setattr(yaml, "parse", count)
    with pytest.raises(UserError):
        load_job(tmp_path / "job.yaml")
    assert 50_000 < len(events) <= 2 * MAX_NODES + 10  # a value, and its key or its end


# ---------------------------------------------------------------------------- mutated files

EXTREMES: tuple[object, ...] = (
    0, -0.0, -1, 1, 1e308, 1e-308, 5e-324, 2**31, 2**53, 2**63, 2**64, 10**14, 1e12, 1e11, 1e-12, 1e6,
    "", "x", LONG, None, True, [], {}, [0] * 20_000, [1e308] * 10, "deep",
)  # fmt: skip


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every container of a document with every key or index in it."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def mutated(document: Any, rng: random.Random) -> str:
    """Returns the document with an extreme in place of a number (mostly) or of anything."""
    changed = copy.deepcopy(document)
    spots = list(places(changed))
    numbers = [(block, key) for block, key in spots if isinstance(block[key], int | float)]
    block, key = rng.choice(numbers if rng.random() < 0.75 else spots)
    value = rng.choice(EXTREMES)
    if value == "deep":
        value = 1
        for _ in range(rng.choice((10, 40, 300))):
            value = [value] if rng.random() < 0.5 else {"a": value}
    block[key] = value
    return json.dumps(changed)


def outcomes(document: Any, path: Path, commands: list[list[str]], count: int, seed: int) -> Counter[int]:
    """Runs commands on mutated files; what is refused is refused soon."""
    rng, found, before = random.Random(seed), Counter[int](), most_megabytes()
    for _ in range(count):
        path.write_text(mutated(document, rng))
        for arguments in commands:
            started = time.process_time()
            code = run(arguments)
            assert code in (OK, NO, USER_ERROR), (arguments, path.read_text())
            seconds = time.process_time() - started
            assert code != USER_ERROR or seconds < MOST_S or seconds < allowed_s(MOST_S), path.read_text()
            found[code] += 1
    assert most_megabytes() - before < MOST_MB
    return found


def most_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def jobs(folder: Path, count: int, seed: int) -> Counter[int]:
    simulate = ["simulate", "j.yaml", "--system", "stage0", "fsdp", "llm-only"]
    return outcomes(JOB, folder / "j.yaml", [simulate], count, seed)


def plans(folder: Path, count: int, seed: int) -> Counter[int]:
    commands = [
        ["check", "p.plan.json"],
        ["simulate", "p.plan.json"],
        ["diff", "p.plan.json", "good.plan.json"],
    ]
    return outcomes(json.loads(plan_text()), folder / "p.plan.json", commands, count, seed)


def profiles(folder: Path, count: int, seed: int) -> Counter[int]:
    document = yaml.safe_load(format_profile(made_profile(find_job("cpu/tiny-vl"))))
    simulate = ["simulate", *TINY, "--profile", "p.yaml", "--system", "stage0", "llm-only"]
    return outcomes(document, folder / "p.yaml", [simulate], count, seed)


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize(("kind", "count"), [(jobs, 3), (plans, 6), (profiles, 3)])
def test_extreme_values(kind: Callable[..., Counter[int]], count: int, folder: Path) -> None:
    assert kind(folder, count, 1)[USER_ERROR] > 0


@pytest.mark.ci("plan file")
@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize(("kind", "count"), [(jobs, 50), (plans, 200), (profiles, 50)])
def test_more_extreme_values(kind: Callable[..., Counter[int]], count: int, folder: Path) -> None:
    found = kind(folder, count, 2)
    assert found[USER_ERROR] > count / 4 and found[OK] > 0


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize(("kind", "count"), [(jobs, 1000), (plans, 4000), (profiles, 1000)])
def test_thousands_of_extreme_values(kind: Callable[..., Counter[int]], count: int, folder: Path) -> None:
    kind(folder, count, 3)
