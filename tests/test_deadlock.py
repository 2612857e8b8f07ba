"""The deadlock verdict of the validator against a search of everything that can happen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from all_interleavings import can_stop, streams_stop
from plan_mutants import move, swap
from slow_plan_replay import SlowPlan
from tiny_plans import tiny_plan

from optimus.ir.op import OpKind
from optimus.ir.plan import Plan, Program
from optimus.verify.expected_program import ExpectedProgram, PlanLines, check_line_coverage
from optimus.verify.validator import check_plan
from optimus.verify.wait_graph import find_host_deadlock, find_stream_deadlock
from optimus.verify.waits import LineWaits, WaitDerivation


def waits_of(plan: Plan) -> LineWaits:
    lines, asked = PlanLines(plan), ExpectedProgram(plan)
    assert not list(check_line_coverage(lines, asked))
    return WaitDerivation(lines, asked).derive()


def disordered(plan: Plan, rng: Random) -> Plan:
    """A few lines stand elsewhere."""
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        plan = move(plan, rng) if rng.random() < 0.7 else swap(plan, rng) or plan
    return plan


def compare(seeds: range) -> Counter[str]:
    """How many plans stop and how many do not, by device model; both ways of finding out agree on each."""
    found: Counter[str] = Counter()
    for seed in seeds:
        rng = Random(seed)
        plan = disordered(tiny_plan(rng, few=True), rng)
        waits, slow = waits_of(plan), SlowPlan(plan)
        hosts = find_host_deadlock(waits) is not None
        assert hosts == can_stop(slow), seed
        found["hosts stop" if hosts else "hosts go"] += 1
        if seed % 4:
            continue  # the other models on some of them: it takes as long
        streams = find_stream_deadlock(waits, one_queue=False) is not None
        assert streams == streams_stop(slow, one_queue=False), seed
        one_queue = find_stream_deadlock(waits, one_queue=True) is not None
        assert one_queue == streams_stop(slow, one_queue=True), seed
        found["streams stop" if streams else "streams go"] += 1
        found["one queue stops" if one_queue else "one queue goes"] += 1
    assert len(found) == 6
    return found


def test_the_verdict_is_that_of_an_exhaustive_search() -> None:
    assert min(compare(range(100)).values()) > 3


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1000, 2000), marks=pytest.mark.ci("plan file")),
        pytest.param(range(2000, 6000), marks=pytest.mark.heavy),
    ],
)
def test_the_verdict_is_that_of_an_exhaustive_search_on_5000_plans(seeds: range) -> None:
    found = compare(seeds)
    assert min(found["hosts stop"], found["hosts go"]) >= len(seeds) // 10
    assert min(found.values()) >= len(seeds) // 50


def pipeline_of_two(first: list[tuple[OpKind, int]], second: list[tuple[OpKind, int]]) -> Plan:
    """Two stages of an LLM that run these kinds of these microbatches."""
    seed = 0
    while True:  # the first header of the right shape
        plan = tiny_plan(Random(seed), few=True)
        llm = plan.modules["llm"]
        simple = all(len(template) == 1 for template in plan.templates.values()) and not any(llm.buckets)
        if (
            len(plan.modules) == 1
            and simple
            and (llm.layout.pp, plan.microbatches, len(plan.templates)) == (2, 2, 2)
        ):
            break
        seed += 1
    finish = [(1, OpKind.OPTIMIZER, 0, 0, 0)]
    programs = [[(0, kind, 0, microbatch, 0) for kind, microbatch in order] for order in (first, second)]
    return replace(plan, programs=tuple(Program.of(rows + finish) for rows in programs))


@pytest.mark.ci("plan file")
def test_sends_that_face_each_other_stop() -> None:
    """Equal sequences per direction are not enough: A = [send f, recv b], B = [send b, recv f]."""
    F, B = OpKind.FORWARD, OpKind.BACKWARD
    first = [
        (F, 0),
        (OpKind.SEND_F, 0),
        (F, 1),
        (OpKind.SEND_F, 1),
        (OpKind.RECV_B, 0),
        (B, 0),
        (OpKind.RECV_B, 1),
        (B, 1),
    ]
    second = [
        (OpKind.RECV_F, 0),
        (F, 0),
        (B, 0),
        (OpKind.SEND_B, 0),
        (OpKind.RECV_F, 1),
        (F, 1),
        (B, 1),
        (OpKind.SEND_B, 1),
    ]
    plan = pipeline_of_two(first, second)
    report = check_plan(plan)
    assert not report.rules["pairs"] and not report.rules["deadlock"]
    circle = find_host_deadlock(waits_of(plan))
    assert circle is not None
    texts = {waits_of(plan).lines.text(line).split(": ")[1] for line in circle.lines}
    assert {"llm.send-f 0 1 0", "llm.send-b 0 0 0"} <= texts
    assert can_stop(SlowPlan(plan))
    good = [
        (F, 0),
        (OpKind.SEND_F, 0),
        (F, 1),
        (OpKind.RECV_B, 0),
        (OpKind.SEND_F, 1),
        (B, 0),
        (OpKind.RECV_B, 1),
        (B, 1),
    ]
    plan = pipeline_of_two(good, second)
    assert find_host_deadlock(waits_of(plan)) is None and not can_stop(SlowPlan(plan))
    assert check_plan(plan).rules["pairs"] and check_plan(plan).rules["deadlock"]


def test_one_queue_is_stricter_than_queues_per_communicator() -> None:
    """Some valid plans need more than one connection, and the report says so."""
    kinds = set()
    for seed in range(30):
        plan = tiny_plan(Random(seed))
        waits = waits_of(plan)
        assert find_stream_deadlock(waits, one_queue=False) is None
        single = find_stream_deadlock(waits, one_queue=True) is None
        kinds.add(single)
        report = check_plan(plan)
        assert report.ok and report.single_connection_holds == single
        circle = find_stream_deadlock(waits, one_queue=True)
        assert (circle is None) == single and (circle is None or len(circle.lines) > 1)
    assert kinds == {True, False}
