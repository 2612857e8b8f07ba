"""Faults to put into a valid plan; each gives a new plan, or None if there is no room for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from random import Random

from slow_plan_replay import SlowPlan

from optimus.ir.op import RECVS, OpKind
from optimus.ir.plan import Plan, Program
from optimus.ir.ranks import LLM

Mutate = Callable[[Plan, Random], Plan | None]
Row = list[int]


def with_rows(plan: Plan, device: int, rows: list[Row]) -> Plan:
    programs = list(plan.programs)
    programs[device] = Program.of(rows)
    return replace(plan, programs=tuple(programs))


@lru_cache(maxsize=1)
def _slow(plan: Plan) -> SlowPlan:
    return SlowPlan(plan)


def _pick(plan: Plan, rng: Random) -> tuple[int, list[Row], int]:
    device = rng.randrange(len(plan.programs))
    rows = plan.programs[device].rows.tolist()
    return device, rows, rng.randrange(len(rows))


def drop(plan: Plan, rng: Random) -> Plan:
    device, rows, line = _pick(plan, rng)
    return with_rows(plan, device, rows[:line] + rows[line + 1 :])


def duplicate(plan: Plan, rng: Random) -> Plan:
    device, rows, line = _pick(plan, rng)
    rows.insert(rng.randrange(len(rows) + 1), rows[line])
    return with_rows(plan, device, rows)


def retarget(plan: Plan, rng: Random) -> Plan:
    """Another module, chunk, microbatch or place, in range or not."""
    device, rows, line = _pick(plan, rng)
    column = rng.choice((0, 2, 3, 4))
    limit = len(plan.names) if column == 0 else 6
    values = [value for value in range(0 if column == 0 else -1, limit) if value != rows[line][column]]
    rows[line] = [*rows[line][:column], rng.choice(values), *rows[line][column + 1 :]]
    return with_rows(plan, device, rows)


def cross(plan: Plan, rng: Random) -> Plan | None:
    """Two transfers of one pair of classes change places at one end."""
    slow = _slow(plan)
    pairs: dict[tuple[int, int, str, bool], list[int]] = defaultdict(
        list
    )  # by device, other end, module, seam or not
    for recv in (line for line in slow.at if line.kind in RECVS):
        send = slow.send_of(recv)
        for here, there in ((recv, send), (send, recv)):
            pairs[here.device, there.device, here.module, here.kind >= OpKind.SEND_SEAM].append(slow.at[here])
    crossable = [(key, lines) for key, lines in pairs.items() if len(lines) > 1]
    if not crossable:
        return None
    key, lines = rng.choice(crossable)
    return _exchanged(plan, key[0], *rng.sample(lines, 2))


def behind_filler(plan: Plan, rng: Random) -> Plan | None:
    """A receive of the LLM goes behind an encoder's phase."""
    llm = plan.names.index(LLM)
    found = []
    for device, program in enumerate(plan.programs):
        rows = program.rows.tolist()
        posted = [
            line
            for line, (module, kind, *_) in enumerate(rows)
            if (module == llm and kind in (OpKind.RECV_F, OpKind.RECV_B)) or kind == OpKind.RECV_SEAM
        ]
        filler = [
            line
            for line, (module, kind, *_) in enumerate(rows)
            if kind <= OpKind.WEIGHT_GRAD and module < llm
        ]
        found += [(device, a, b) for a in posted for b in filler]
    if not found:
        return None
    device, recv, filler_line = rng.choice(found)
    return _moved(plan, device, recv, filler_line if recv < filler_line else filler_line + 1)


def oppose(plan: Plan, rng: Random) -> Plan | None:
    """On one of two classes that share two groups, collectives of both change places."""
    slow = _slow(plan)
    found = []
    for program in slow.programs:
        groups = [(line, group) for line in program if (group := slow.group(line)) and len(group[2]) > 1]
        for (one, first), (other, second) in pairwise(groups):
            if first != second and len(set(first[2]) & set(second[2])) > 1:
                found.append((one, other))
    if not found:
        return None
    one, other = rng.choice(found)
    return _exchanged(plan, one.device, slow.at[one], slow.at[other])


def swap(plan: Plan, rng: Random) -> Plan | None:
    """Two lines that stand next to each other change places."""
    device, rows, line = _pick(plan, rng)
    return None if line + 1 == len(rows) else _exchanged(plan, device, line, line + 1)


def move(plan: Plan, rng: Random) -> Plan:
    """One line goes elsewhere in its program."""
    device, rows, line = _pick(plan, rng)
    return _moved(plan, device, line, rng.randrange(len(rows)))


def _exchanged(plan: Plan, device: int, one: int, other: int) -> Plan:
    rows = plan.programs[device].rows.tolist()
    rows[one], rows[other] = rows[other], rows[one]
    return with_rows(plan, device, rows)


def _moved(plan: Plan, device: int, line: int, to: int) -> Plan:
    """`to` is where it stands in the end."""
    rows = plan.programs[device].rows.tolist()
    rows.insert(to, rows.pop(line))
    return with_rows(plan, device, rows)


# What must be rejected whatever it hits, with the rule that must see it.
FATAL: dict[Mutate, str] = {
    drop: "coverage",
    duplicate: "coverage",
    retarget: "coverage",
    cross: "pairs",
    behind_filler: "data",
    oppose: "groups",
}
