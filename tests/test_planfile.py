"""Plan files: what is written is read again, and ten thousand broken files are refused or read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machine import allowed_s
from plan_by_hand import llm_alone, plan_by_hand, two_encoders, two_pipelines
from tiny_plans import tiny_plan

from optimus.errors import UserError
from optimus.ir.op import OpKind
from optimus.ir.plan import Bucket, Plan, PlannedChunk
from optimus.ir.planfile import format_plan, load_plan, parse_plan, save_plan
from optimus.job.layout import Layout

PLANS = [two_pipelines, two_encoders, llm_alone]


@pytest.mark.parametrize("make", PLANS)
def test_what_is_written_is_read_again(make: Callable[[], Plan], tmp_path: Path) -> None:
    plan, path = make(), tmp_path / "plan.json"
    assert save_plan(plan, path) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert list(tmp_path.iterdir()) == [path]
    again = load_plan(path)
    assert format_plan(again) == path.read_text() == format_plan(make())
    for name in ("modules", "templates", "memory", "claims", "bound_to", "hashes", "notes", "finish_s"):
        assert getattr(again, name) == getattr(plan, name), name
    for program, same in zip(plan.programs, again.programs, strict=True):
        assert program.rows.tolist() == same.rows.tolist() and same.rows.dtype == "int32"


def test_random_plans_are_read_again() -> None:
    for seed in range(30):
        plan = tiny_plan(random.Random(seed))
        again = parse_plan(format_plan(plan), "x")
        assert format_plan(again) == format_plan(plan)
        assert (again.modules, again.templates, again.memory) == (plan.modules, plan.templates, plan.memory)


def test_one_line_per_op() -> None:
    plan = two_pipelines()
    lines = format_plan(plan).splitlines()
    assert lines[:2] == ["{", '"schema": "optimus.plan/5",']
    ops = [line for line in lines if re.fullmatch(r'"[a-z0-9]+\.[FBIWa-z-]+ \d+ \d+ \d+",?', line)]
    assert len(ops) == sum(map(len, plan.programs))
    assert lines.index('["class 1: stage 1, context 0, tp block 0",') > 0
    assert sum(line.startswith('"llm-F": [[') for line in lines) == 1


def test_the_header_of_a_large_plan_is_short() -> None:
    """64 classes, three encoders, and no two chunks, buckets or classes alike."""
    encoders = Layout(dp=16, pp=4, tp=2), Layout(dp=32, pp=2, tp=2), Layout(dp=8, pp=8, tp=2)
    plan = plan_by_hand(Layout(dp=1, pp=16, tp=8, chunks=4), *encoders, microbatches=8)
    memory = tuple(replace(of_class, seam=place) for place, of_class in enumerate(plan.memory))
    llm = plan.modules["llm"]
    chunks = tuple(replace(chunk, saved_activation_bytes=place) for place, chunk in enumerate(llm.chunks))
    buckets = tuple(
        tuple(replace(bucket, gather_bytes=100 * stage + place) for place, bucket in enumerate(of_stage))
        for stage, of_stage in enumerate(llm.buckets)
    )
    modules = {**plan.modules, "llm": replace(llm, chunks=chunks, buckets=buckets)}
    plan = replace(plan, memory=memory, modules=modules)
    text = format_plan(plan)
    assert plan.ranks.num_classes == 64
    assert text[: text.index('"templates": {')].count("\n") <= 100
    assert format_plan(parse_plan(text, "x")) == text
    alike = format_plan(plan_by_hand(Layout(dp=1, pp=16, tp=8, chunks=4), *encoders, microbatches=8))
    assert len(alike[: alike.index('"memory"')]) < 6000  # equal chunks and buckets stand there once


def test_a_plan_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    save_plan(two_pipelines(), path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"plan\.json"):
        save_plan(llm_alone(), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        save_plan(llm_alone(), tmp_path / "missing" / "plan.json")
    assert "cannot be written: No such file" in str(caught.value)


def test_split_backwards_and_whole_stages_are_read_again() -> None:
    """Reads what plans by hand do not have: I and W, a bucket of the whole stage, odd names."""
    plan = plan_by_hand(Layout(pp=2), microbatches=1, name='ein "Plan" für 日本')
    halves = {OpKind.FORWARD: "llm-F", OpKind.INPUT_GRAD: "llm-B", OpKind.WEIGHT_GRAD: "llm-B"}
    chunk = PlannedChunk(templates=halves, layers=2)
    bucket = Bucket(
        chunk=-1,
        first_layer=0,
        end_layer=2,
        gather_s=0.0,
        gather_bytes=0,
        reduce_s=1 / 3,
        reduce_bytes=2,
        gates=False,
    )
    llm = replace(plan.modules["llm"], chunks=(chunk, chunk), buckets=((bucket,), ()))
    plan = replace(plan, modules={"llm": llm}, programs=tuple(type(p).of([]) for p in plan.programs))
    again = parse_plan(format_plan(plan), "x")
    assert again.modules == plan.modules and again.name == plan.name and len(again.programs[1]) == 0


@pytest.mark.ci("plan file")
@pytest.mark.alone
def test_a_large_plan_is_read_fast(tmp_path: Path) -> None:
    plan = plan_by_hand(
        Layout(dp=4, pp=16, tp=8, chunks=6), Layout(dp=64, pp=4, tp=2), microbatches=41, pieces=2
    )
    count, path = sum(map(len, plan.programs)), tmp_path / "plan.json"
    assert 160_000 <= count <= 170_000
    save_plan(plan, path)
    assert path.stat().st_size < 5_000_000 and path.stat().st_size / count * 700_000 < 20_000_000
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        load_plan(path)
        taken.append(time.perf_counter() - started)
    assert min(taken) < allowed_s(0.3)


# ---------------------------------------------------------------------------- fuzz

NUMBERS = [*map(str, (-1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30)), "9" * 5000]
NUMBERS += ["0.5", "1e308", "1e999", "-0.0", "NaN", "Infinity", "true", "null", '"7"', "[]", "{}"]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    2**31,
    2**63,
    0.5,
    -0.5,
    1e308,
    "",
    "x",
    "llm",
    [],
    {},
    [[]],
    [0],
    {"a": 1},
]


def bytes_changed(text: str, chance: random.Random, longest: int) -> bytes:
    """Bits flipped, a stretch left out, or a stretch written twice."""
    content = bytearray(text.encode())
    first = chance.randrange(len(content))
    end = min(len(content), first + chance.choice([1, 2, 10, 100, longest]))
    way = chance.randrange(3)
    if way == 0:
        for _ in range(chance.choice([1, 1, 4])):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif way == 1:
        del content[first:end]
    else:
        content[end:end] = content[first:end]
    return bytes(content)


def mutated(text: str, chance: random.Random) -> bytes:
    """One plan file with one thing done to it."""
    way = chance.randrange(7)
    if way < 3:
        return bytes_changed(text, chance, longest=1000)
    if way == 3:
        return token_swapped(text, chance).encode()
    if way == 4:
        numbers = list(re.finditer(r"-?\d+(\.\d+)?(e-?\d+)?", text))
        found = chance.choice(numbers)
        return (text[: found.start()] + chance.choice(NUMBERS) + text[found.end() :]).encode()
    return restructured(text, chance).encode()


def token_swapped(text: str, chance: random.Random) -> str:
    tokens = re.split(r"(\s+|[\[\]{},:]|\"[^\"]*\")", text)
    a, b = chance.sample([place for place, token in enumerate(tokens) if token.strip()], 2)
    tokens[a], tokens[b] = tokens[b], tokens[a]
    return "".join(tokens)


def restructured(text: str, chance: random.Random) -> str:
    """A field removed, renamed, doubled or given another value, wherever it stands."""
    document = at = json.loads(text)
    while True:
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        inner = at[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.3:
            break
        at = inner
    way = chance.randrange(4)
    if way == 0:
        del at[key]
    elif way == 1 and isinstance(at, dict):
        at[chance.choice([f"{key}s", "", "llm", key.upper(), "\ud800"])] = at.pop(key)
    elif way == 2 and isinstance(at, list):
        at.insert(chance.randrange(len(at) + 1), inner)
    else:
        at[key] = chance.choice(VALUES)
    return json.dumps(document)


@pytest.mark.ci("plan file")
def test_broken_files(tmp_path: Path) -> None:
    chance, path = random.Random(7), tmp_path / "plan.json"
    texts = [format_plan(make()) for make in PLANS]
    outcomes: Counter[str] = Counter()
    for _ in range(3_000):
        path.write_bytes(mutated(chance.choice(texts), chance))
        started = time.process_time()
        try:
            plan = load_plan(path)
        except UserError as error:
            printed = str(error).encode()
            outcomes["refused" if b"\nhint: " in printed else "without a hint"] += 1
        else:
            assert format_plan(parse_plan(format_plan(plan), "x")) == format_plan(plan)
            outcomes["read"] += 1
        assert time.process_time() - started < 2
    assert outcomes["refused"] > 1500 and outcomes["read"] > 30 and len(outcomes) == 2, outcomes
