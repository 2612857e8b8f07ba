"""Verifies a plan by every rule of `RULES`, sharing no code with the planner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np

from optimus.errors import UserError
from optimus.ir.binding import BoundProfile, list_bound_parts, require_plan_of_job
from optimus.ir.op import COMPUTE_PHASES, NUM_LANES, Floats, OpKind
from optimus.ir.plan import REGIONS, Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.verify.buckets import check_bucket_lifetimes, check_trained_layers_in_buckets
from optimus.verify.expected_program import ExpectedProgram, PlanLines, check_line_coverage
from optimus.verify.memory_replay import ALIVE, replay_peak_bytes
from optimus.verify.rules import (
    check_collective_order,
    check_gpu_capacity,
    check_lines_after_inputs,
    check_plan_header,
    check_recomputation,
    check_seam_gathers,
    check_template_layers,
    check_transfer_order,
)
from optimus.verify.wait_graph import (
    ReplayedTimes,
    WaitCycle,
    find_host_deadlock,
    find_stream_deadlock,
    replay_times,
)
from optimus.verify.waits import NO_LANE, LineWaits, WaitDerivation

RULES = {  # what each rule proves, in order
    "coverage": "every phase of every op exactly once, on the rank that owns it",
    "data": "no op runs before its inputs, none after the optimizer",
    "pairs": "both ends of every pair send and receive in the same order",
    "deadlock": "no cycle of waits, with blocking sends and with one FIFO per communicator",
    "groups": "collectives run in the same order on all ranks of a group",
    "memory": "within the GPU's capacity at every line, all freed at the end",
    "lanes": "one op at a time per lane, encoder work where the plan says",
    "claim": "an independent replay takes the claimed time, also where dealt encoders lag",
    "binding": "model, cluster, workload and profile match the plan's hashes",
}
BOUND_PARTS = ("model", "cluster", "workload", "profile")
MAX_VIOLATIONS = 20  # kept per rule; the rest is counted
TOLERANCE_S = 1e-9  # of replayed seconds, relative above 1 s
MAX_CYCLE_LINES = 12  # shown
LAG = 0.5  # of a mean encoder microbatch: how far dealt images may put a pipeline behind the plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """Violation of a rule by a line or a part of the header."""

    rule: str
    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Result of a check. A rule that could not be evaluated does not hold."""

    rules: dict[str, bool]
    violations: tuple[Violation, ...]
    more: dict[str, int] = field(default_factory=dict)  # violations beyond MAX_VIOLATIONS, by rule
    step_s: float | None = None  # as replayed; None if the replay does not finish
    single_connection_holds: bool = False

    @property
    def ok(self) -> bool:
        return all(self.rules.values())


Problems = Iterable[tuple[str, str]]  # where, problem


class _ReportBuilder:
    """Collects the violations of a report."""

    def __init__(self) -> None:
        self.rules: dict[str, bool] = {}
        self.violations: list[Violation] = []
        self.more: dict[str, int] = {}

    def add(self, rule: str, problems: Problems) -> bool:
        """Keeps the first violations of a rule and returns whether there was none."""
        rest = iter(problems)
        kept = [
            Violation(rule=rule, where=where, problem=problem)
            for where, problem in islice(rest, MAX_VIOLATIONS)
        ]
        dropped = sum(1 for _ in rest)
        if dropped:
            self.more[rule] = self.more.get(rule, 0) + dropped
        self.violations += kept
        self.rules[rule] = self.rules.get(rule, True) and not kept
        return not kept

    def done(self, step_s: float | None, single_connection_holds: bool) -> CheckReport:
        order = list(RULES)
        return CheckReport(
            rules={rule: self.rules[rule] for rule in RULES},
            violations=tuple(sorted(self.violations, key=lambda violation: order.index(violation.rule))),
            more=self.more,
            step_s=step_s,
            single_connection_holds=single_connection_holds,
        )


def check_plan(plan: Plan) -> CheckReport:
    """Verifies a plan by every rule."""
    report = _ReportBuilder()
    report.add("binding", _check_binding_hashes(plan))
    if not report.add("coverage", check_plan_header(plan)):
        return _unseen(report, "the header is not sound")
    if not report.add("coverage", chain(check_template_layers(plan), check_recomputation(plan))):
        return _unseen(report, "templates and modules do not agree")
    lines, expected = PlanLines(plan), ExpectedProgram(plan)
    if not report.add("coverage", check_line_coverage(lines, expected)):
        return _unseen(report, "coverage does not hold")
    derived = WaitDerivation(lines, expected)
    waits = derived.derive()
    report.add(
        "data",
        chain(
            check_trained_layers_in_buckets(plan),
            check_seam_gathers(plan),
            check_bucket_lifetimes(derived),
            check_lines_after_inputs(derived, waits),
        ),
    )
    report.add("pairs", check_transfer_order(waits))
    report.add("groups", check_collective_order(waits))
    report.add("memory", chain(check_gpu_capacity(plan), _memory(derived)))
    single = find_stream_deadlock(waits, one_queue=True)
    streams = find_stream_deadlock(waits, one_queue=False) if single else None
    cycles = [find_host_deadlock(waits), streams]
    deadlocks = [_describe_cycle(lines, cycle) for cycle in cycles if cycle is not None]
    replayed = replay_times(waits)
    if not replayed.complete:
        first = lines.text(int(np.flatnonzero(replayed.end_s < 0)[0]))
        report.add("deadlock", deadlocks or [(first, "never ends if every lane runs in program order")])
        return _unseen(report, "it never ends", where=first, single_connection_holds=single is None)
    report.add("deadlock", deadlocks)
    report.add("lanes", _lanes(derived, waits, replayed))
    report.add("claim", _differs("step_s", replayed.step_s, plan.claims.step_s))
    lagged = replay_times(delay_encoders(waits)) if plan.dealing_replicas > 1 else replayed
    report.add("claim", _differs("lagged_s", lagged.step_s, plan.claims.lagged_s))
    return report.done(replayed.step_s, single is None)


def _unseen(
    report: _ReportBuilder, reason: str, *, where: str = "plan", single_connection_holds: bool = False
) -> CheckReport:
    """Ends a check early: rules that were not evaluated do not hold."""
    for rule in RULES:
        if rule not in report.rules:
            report.add(rule, [(where, f"not evaluated: {reason}")])
    return report.done(None, single_connection_holds)


def _describe_cycle(lines: PlanLines, cycle: WaitCycle) -> tuple[str, str]:
    named = [lines.text(line) for line in cycle.lines[:MAX_CYCLE_LINES]]
    rest = len(cycle.lines) - len(named)
    more = f", and {rest} more" if rest else ""
    return named[
        0
    ] if named else "plan", f"waits in a cycle if {cycle.model}: {' waits for '.join(named)}{more}"


def _differs(where: str, replayed: float, claimed: float) -> Problems:
    if not abs(replayed - claimed) <= TOLERANCE_S * max(1.0, abs(replayed)):
        yield where, f"{claimed!r} is claimed, {replayed!r} was replayed"


def delay_encoders(waits: LineWaits) -> LineWaits:
    """Returns waits whose first microbatch on each encoder pipeline is half a mean one longer."""
    plan, lines = waits.lines.plan, waits.lines
    names, load = list(plan.modules), np.ones(len(lines))
    for name, module in plan.encoders.items():
        first = [module.pipelines.index(pipeline) for pipeline in set(module.pipelines)]
        load[(lines.module == names.index(name)) & np.isin(lines.microbatch, first)] += LAG
    computes = np.isin(waits.phase_kind, COMPUTE_PHASES)
    return replace(waits, duration_s=np.where(computes, load, 1.0) * waits.duration_s)


# ---------------------------------------------------------------------------- memory


def _memory(derived: WaitDerivation) -> Problems:
    plan = derived.plan
    replayed = replay_peak_bytes(derived)
    if len(plan.memory) != len(replayed):
        yield "memory", f"{len(plan.memory)} entries for {len(replayed)} device classes"
        return
    for device, (claimed, alive) in enumerate(zip(plan.memory, replayed, strict=True)):
        where = f"class {device}"
        if min(claimed.fixed.values(), default=0) < 0:
            yield where, "claims a negative size"
        total = sum(claimed.fixed.values()) + sum(alive.peak.values())
        if total > plan.capacity_bytes:
            text = derived.lines.text(alive.line)
            yield text, f"{total} bytes are alive, the capacity is {plan.capacity_bytes}"
        if alive.left or alive.lowest < 0:
            yield where, f"{alive.left} bytes are left at the end, {alive.lowest} is the lowest level"
        for name in ALIVE:
            if alive.peak[name] != getattr(claimed, name):
                yield where, f"{name} of {getattr(claimed, name)} bytes claimed, {alive.peak[name]} replayed"


# ---------------------------------------------------------------------------- lanes


def _lanes(derived: WaitDerivation, waits: LineWaits, replayed: ReplayedTimes) -> Problems:
    """Checks that a lane runs one op at a time and that encoder compute is where the plan claims."""
    lines = waits.lines
    rows = np.flatnonzero(waits.lane != NO_LANE)
    lane = lines.device * NUM_LANES + waits.lane
    rows = rows[np.lexsort((replayed.end_s[rows], replayed.start_s[rows], lane[rows]))]
    over = (lane[rows[1:]] == lane[rows[:-1]]) & (replayed.start_s[rows[1:]] < replayed.end_s[rows[:-1]])
    for at in np.flatnonzero(over).tolist():
        yield (
            lines.text(int(rows[at + 1])),
            f"starts on a lane that is occupied by {lines.text(int(rows[at]))}",
        )
    for region, seconds in zip(REGIONS, sum_encoder_seconds_by_region(derived, waits, replayed), strict=True):
        claimed = lines.plan.claims.encoder_s.get(region)
        if claimed is None:
            yield f"encoder_s {region}", "no claim"
        else:
            yield from _differs(f"encoder_s {region}", float(seconds), claimed)


def sum_encoder_seconds_by_region(
    derived: WaitDerivation, waits: LineWaits, replayed: ReplayedTimes
) -> Floats:
    """Returns replayed encoder compute in each of REGIONS, summed over device classes."""
    lines = waits.lines
    llm = list(lines.plan.modules).index(LLM)
    of_llm = (lines.module == llm) & (lines.kind <= OpKind.WEIGHT_GRAD)
    opened = np.zeros(len(lines), np.int64)  # LLM launches that are not waited for yet
    for (device, name, kind, chunk), _, block in lines.all_blocks():
        if name == LLM and kind <= OpKind.WEIGHT_GRAD:
            shape = derived.shape(name, kind, derived.virtual(device, name, chunk))
            for launch, wait in shape.wait_of.items():
                opened[block[:, launch]] += wait >= 0
                opened[block[:, wait]] -= wait >= 0
    slot = np.cumsum(opened) > 0
    seen = np.concatenate([[0], np.cumsum(of_llm)])
    first, end = seen[lines.first[:-1]][lines.device], seen[lines.first[1:]][lines.device]
    before, after = seen[:-1] == first, seen[:-1] == end
    region = np.select([before, after, slot], [0, 3, 1], 2)
    compute = (lines.module < llm) & np.isin(waits.phase_kind, COMPUTE_PHASES)
    spent = (replayed.end_s - replayed.start_s)[compute]
    return np.bincount(region[compute], weights=spent, minlength=len(REGIONS)).astype(np.float64)


# ---------------------------------------------------------------------------- binding


def _check_binding_hashes(plan: Plan) -> Problems:
    """Checks that the plan is bound to every part and that its hashes are those of the stored fields."""
    for part in BOUND_PARTS:
        if part not in plan.bound_to or part not in plan.hashes:
            yield part, "the plan is not bound to it"
    for part, fields in plan.bound_to.items():
        text = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))
        if part in plan.hashes and plan.hashes[part] != hashlib.sha256(text.encode()).hexdigest():
            yield part, "the hash is not that of its fields"
    for part in sorted(set(plan.hashes) - set(plan.bound_to) - set(BOUND_PARTS)):
        yield part, "has a hash, but no fields"


def require_valid_plan(
    plan: Plan, job: Job, profile: BoundProfile | None = None, *, file: str | None = None
) -> None:
    """Raises if a plan was made for another job or violates a rule."""
    require_plan_of_job(plan, list_bound_parts(job, profile), file=file)
    require_proven_plan(plan, file=file)


def require_proven_plan(plan: Plan, *, file: str | None = None) -> None:
    """Raises if a plan violates a rule: what shows, exports or runs a plan calls this first."""
    report = check_plan(plan)
    if not report.ok:
        first = report.violations[0]
        raise UserError(
            field=first.where,
            problem=f"breaks the rule `{first.rule}`: {first.problem}",
            hint=f"plan again; optimus check {file or 'PLAN'} shows all violations",
            file=file,
        )
