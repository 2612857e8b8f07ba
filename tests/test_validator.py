"""Every rule of the validator: what it accepts, what it rejects, and that its replay is right."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from all_interleavings import can_stop
from machine import allowed_s
from plan_mutants import FATAL, move, swap, with_rows
from slow_plan_figures import bytes_alive, regions
from slow_plan_replay import SlowPlan, slow_replay
from tiny_plans import large_plan, tiny_plan

from optimus.errors import UserError
from optimus.ir.binding import flatten_and_hash_parts, list_bound_parts
from optimus.ir.op import OpKind
from optimus.ir.plan import REGIONS, Plan, Program
from optimus.ir.ranks import LLM
from optimus.job.read import find_job
from optimus.verify.validator import (
    MAX_VIOLATIONS,
    RULES,
    CheckReport,
    _ReportBuilder,
    check_plan,
    require_valid_plan,
)

ORDER = ("coverage", "data", "pairs", "deadlock", "groups")  # rules that say nothing of seconds and bytes


def broken(report: CheckReport) -> set[str]:
    return {rule for rule, holds in report.rules.items() if not holds}


def test_a_rule_that_failed_once_stays_failed() -> None:
    report = _ReportBuilder()
    assert not report.add("coverage", [("line 1", "is missing")])
    assert report.add("coverage", [])
    assert report.rules == {"coverage": False}


# ---------------------------------------------------------------------------- what is valid


def test_valid_plans_hold_all_rules() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        plan = tiny_plan(Random(seed))
        report = check_plan(plan)
        assert report.ok and not report.violations, (seed, report.violations)
        assert list(report.rules) == list(RULES)
        assert report.step_s == plan.claims.step_s
        seen.update(region for region in REGIONS if plan.claims.encoder_s[region] > 0)
        seen[f"{len(plan.encoders)} encoders"] += 1
        seen["split"] += OpKind.INPUT_GRAD in plan.modules[LLM].chunks[0].templates
        seen["chunks"] += plan.modules[LLM].layout.chunks > 1
        seen["blocks"] += plan.ranks.positions > 1
    assert all(seen[kind] for kind in (*REGIONS, "0 encoders", "2 encoders", "split", "chunks", "blocks")), (
        seen
    )


def compare_with_oracle(seeds: Iterable[int]) -> None:
    for seed in seeds:
        plan = tiny_plan(Random(seed))
        slow = SlowPlan(plan)
        played = slow_replay(slow)
        assert played is not None
        assert abs(max(end for _, end in played.values()) - plan.claims.step_s) < 1e-9
        seconds = regions(slow, played)
        assert all(abs(seconds[region] - plan.claims.encoder_s[region]) < 1e-9 for region in REGIONS), seed
        for device, claimed in enumerate(plan.memory):
            found = bytes_alive(slow, device)
            assert found == (claimed.llm_activations, claimed.encoder_activations, claimed.seam), seed


def test_time_bytes_and_regions_are_those_of_a_plain_replay() -> None:
    compare_with_oracle(range(10))


@pytest.mark.ci("plan file")
def test_time_bytes_and_regions_are_those_of_a_plain_replay_on_200_plans() -> None:
    compare_with_oracle(range(100, 300))


# ---------------------------------------------------------------------------- what is not


def reject_all(seeds: Iterable[int], *, each: int) -> Counter[str]:
    """Puts every kind of fatal fault into plans, `each` times, and counts them."""
    tried: Counter[str] = Counter()
    for seed in seeds:
        rng = Random(seed)
        plan = tiny_plan(rng, few=seed % 3 > 0)
        for fault, rule in FATAL.items():
            for _ in range(each):
                mutant = fault(plan, rng)
                if mutant is not None:
                    report = check_plan(mutant)
                    assert rule in broken(report), (seed, fault)
                    tried[fault.__name__] += 1
    return tried


def survivors(seeds: Iterable[int], *, each: int) -> tuple[int, int]:
    """Moves lines about; whatever the rules of order let pass is shown to be harmless.

    All lines are there, every line stands behind what it needs on its class, a plain replay comes to the
    end, and no interleaving of hosts stops (searched where the plan is small enough).
    """
    tried = passed = 0
    for seed in seeds:
        rng = Random(seed)
        few = seed % 5 > 0
        plan = tiny_plan(rng, few=few)
        lines = set(SlowPlan(plan).at)
        for fault in (swap, move) * each:
            mutant = fault(plan, rng)
            if mutant is None:
                continue
            tried += 1
            report = check_plan(mutant)
            if broken(report) & set(ORDER):
                continue
            passed += 1
            slow = SlowPlan(mutant)
            assert set(slow.at) == lines
            for line, needs in slow.needs.items():
                assert all(slow.at[need] < slow.at[line] for need in needs if need.device == line.device)
            assert all(program[-1].kind == OpKind.OPTIMIZER for program in slow.programs)
            if few:
                assert not can_stop(slow), seed
            if few or passed % 10 == 0:
                played = slow_replay(slow)
                assert played is not None, seed
                assert report.step_s is not None
                assert abs(max(end for _, end in played.values()) - report.step_s) < 1e-9
    return tried, passed


def test_faults_are_rejected() -> None:
    assert set(reject_all(range(24), each=1)) == {fault.__name__ for fault in FATAL}


def test_swaps_that_survive_are_harmless() -> None:
    tried, passed = survivors(range(20), each=2)
    assert 0 < passed < tried


@pytest.mark.parametrize(
    ("rejects", "survives", "least"),
    [
        pytest.param(range(1000, 1060), range(2000, 2040), 2_500, marks=pytest.mark.ci("plan file")),
        pytest.param(range(1060, 1240), range(2040, 2150), 7_500, marks=pytest.mark.heavy),
    ],
)
def test_ten_thousand_mutants(rejects: range, survives: range, least: int) -> None:
    rejected = reject_all(rejects, each=7)
    tried, passed = survivors(survives, each=11)
    assert sum(rejected.values()) + tried > least
    assert min(rejected.values()) > least // 100 and 0 < passed < tried


@pytest.mark.ci("plan file")
def test_nothing_crashes_the_validator() -> None:
    """Any rows at all: a report, never an exception."""
    for seed in range(1500):
        rng = Random(seed)
        plan = tiny_plan(rng, few=True)
        device = rng.randrange(len(plan.programs))
        rows = plan.programs[device].rows.tolist()
        choice = rng.randrange(4)
        if choice == 0:
            rng.shuffle(rows)
        elif choice == 1:
            rows = [[rng.randrange(len(plan.names)), rng.choice(list(OpKind)), *noise(rng)] for _ in range(9)]
        elif choice == 2:
            rows = []
        else:
            for row in rng.sample(rows, 2):
                row[2:] = [-1, *noise(rng)[1:]]
        report = check_plan(with_rows(plan, device, rows))
        assert report.rules["coverage"] == (choice == 0)
        assert report.violations or report.ok


def noise(rng: Random) -> list[int]:
    return [rng.choice((-(2**31), -1, 0, 1, 2, 7, 2**31 - 1)) for _ in range(3)]


# ---------------------------------------------------------------------------- single rules


@pytest.fixture(name="plan")
def plan_with_encoder() -> Plan:
    """The first one with an encoder that is trained, of several pipelines and stages."""
    for seed in range(1000):
        plan = tiny_plan(Random(seed))
        if len(plan.encoders) == 1 and plan.modules[LLM].layout.pp == 4:
            (encoder,) = plan.encoders.values()
            if encoder.layout.pp == 2 and any(encoder.buckets):
                return plan
    raise AssertionError


def test_claims_are_recomputed(plan: Plan) -> None:
    claims = plan.claims
    slower = replace(plan, claims=replace(claims, step_s=claims.step_s + 1e-6))
    assert broken(check_plan(slower)) == {"claim"}
    sooner = replace(plan, claims=replace(claims, lagged_s=claims.lagged_s - 1e-6))
    assert broken(check_plan(sooner)) == {"claim"}
    region = next(region for region in REGIONS if claims.encoder_s[region] > 0)
    elsewhere = {**claims.encoder_s, region: 0.0}
    assert broken(check_plan(replace(plan, claims=replace(claims, encoder_s=elsewhere)))) == {"lanes"}
    assert broken(check_plan(replace(plan, claims=replace(claims, encoder_s={})))) == {"lanes"}
    not_a_number = replace(plan, claims=replace(claims, step_s=float("nan")))
    assert broken(check_plan(not_a_number)) == {"claim"}


def test_memory_is_replayed(plan: Plan) -> None:
    peak = max(memory.peak for memory in plan.memory)
    assert plan.capacity_bytes == peak
    assert broken(check_plan(replace(plan, capacity_bytes=peak - 1))) == {"memory"}
    assert broken(check_plan(replace(plan, memory=plan.memory[1:]))) == {"memory"}
    for name in ("llm_activations", "encoder_activations", "seam"):
        lower = replace(plan.memory[0], **{name: getattr(plan.memory[0], name) - 1})
        report = check_plan(replace(plan, memory=(lower, *plan.memory[1:])))
        assert broken(report) == {"memory"}
        assert name in report.violations[0].problem


def test_binding(plan: Plan) -> None:
    assert broken(check_plan(replace(plan, hashes={}))) == {"binding"}
    other = {**plan.bound_to, "model": {"llm.layers": 5}}
    (violation,) = check_plan(replace(plan, bound_to=other)).violations
    assert (violation.rule, violation.where) == ("binding", "model")
    without = {part: fields for part, fields in plan.bound_to.items() if part != "profile"}
    assert broken(check_plan(replace(plan, bound_to=without))) == {"binding"}


def test_the_owner_of_a_microbatch_is_its_pipeline(plan: Plan) -> None:
    ((name, encoder),) = plan.encoders.items()
    for pipelines in ((encoder.pipelines[0] + 1, *encoder.pipelines[1:]), (99,) * len(encoder.pipelines), ()):
        modules = {**plan.modules, name: replace(encoder, pipelines=pipelines)}
        report = check_plan(replace(plan, modules=modules))
        assert not report.rules["coverage"] and report.rules["binding"]
        assert {v.problem.split(":")[0] for v in report.violations if v.rule != "coverage"} == {
            "not evaluated"
        }


def test_headers_that_make_no_sense_are_violations(plan: Plan) -> None:
    llm = plan.modules[LLM]
    faults = [
        replace(plan, programs=plan.programs[1:]),
        replace(plan, programs=()),
        replace(plan, microbatches=0),
        replace(plan, microbatches=10**9),
        replace(plan, launch_s=-1.0),
        replace(plan, slowdown=float("inf")),
        replace(plan, finish_s=(1.0,)),
        replace(plan, modules={LLM: replace(llm, layout=llm.layout.with_(tp=llm.layout.tp * 2))}),
        replace(plan, modules={**plan.modules, LLM: replace(llm, layout=llm.layout.with_(pp=3))}),
        replace(plan, modules={**plan.modules, LLM: replace(llm, chunks=llm.chunks[1:])}),
        replace(plan, modules={name: module for name, module in plan.modules.items() if name != LLM}),
        replace(plan, templates=dict.fromkeys(plan.templates, ())),
    ]
    for fault in faults:
        report = check_plan(fault)
        assert not report.rules["coverage"], fault
        assert report.step_s is None


def test_a_launch_must_be_waited_for(plan: Plan) -> None:
    for seed in range(100):
        plan = tiny_plan(Random(seed), few=True)
        found = [name for name, template in plan.templates.items() if template[-1].kind == OpKind.WAIT]
        if found:
            break
    *others, wait = plan.templates[found[0]]
    templates = {**plan.templates, found[0]: (*others, replace(wait, kind=OpKind.FORWARD))}
    report = check_plan(replace(plan, templates=templates))
    assert any("no phase of its op waits for" in violation.problem for violation in report.violations)


def test_violations_are_kept_to_a_number(plan: Plan) -> None:
    backwards = tuple(Program.of(program.rows[::-1]) for program in plan.programs)
    report = check_plan(replace(plan, programs=backwards))
    assert Counter(violation.rule for violation in report.violations)["data"] == MAX_VIOLATIONS
    assert report.more["data"] > 0


def test_a_broken_plan_does_not_run(plan: Plan) -> None:
    job = find_job("cpu/tiny-vl")
    bound_to, hashes = flatten_and_hash_parts(list_bound_parts(job))
    plan = replace(plan, bound_to=bound_to, hashes=hashes)
    require_valid_plan(plan, job)
    backwards = tuple(Program.of(program.rows[::-1]) for program in plan.programs)
    with pytest.raises(UserError, match="plan again") as caught:
        require_valid_plan(replace(plan, programs=backwards), job, file="plan.json")
    assert caught.value.file == "plan.json" and "class 0 line" in caught.value.field


def test_a_line_is_named_as_it_is_written(plan: Plan) -> None:
    device = 2
    rows = plan.programs[device].rows.tolist()
    line = next(at for at, row in enumerate(rows) if row[1] == OpKind.FORWARD and plan.names[row[0]] == LLM)
    _, _, chunk, microbatch, place = rows[line]
    report = check_plan(with_rows(plan, device, rows[:line] + rows[line + 1 :]))
    (missing,) = [violation for violation in report.violations if violation.rule == "coverage"]
    assert str(missing) == f"coverage: class {device}: llm.F {chunk} {microbatch} {place}: is missing"
    report = check_plan(with_rows(plan, device, rows[: line + 1] + rows[line:]))
    (again,) = [violation for violation in report.violations if violation.rule == "coverage"]
    assert again.where == f"class {device} line {line + 2}: llm.F {chunk} {microbatch} {place}"


@pytest.mark.ci("plan file")
@pytest.mark.alone
def test_a_large_plan_is_checked_in_seconds() -> None:
    plan = large_plan(Random(3), microbatches=64, layers=10)
    count = sum(len(program) for program in plan.programs)
    assert count > 100_000
    began = time.perf_counter()
    report = check_plan(plan)
    assert report.ok and time.perf_counter() - began < allowed_s(5.0)
    assert np.isfinite(plan.claims.step_s)
