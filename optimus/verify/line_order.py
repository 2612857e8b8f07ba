"""Checks the order of lines: after their inputs, next to their producers, equal at both ends."""

from __future__ import annotations

import numpy as np

from optimus.ir.op import SEAMS, Ints, OpKind
from optimus.ir.ranks import LLM
from optimus.verify.expected_lines import PlanLines, Problems, backward_kind
from optimus.verify.waits import Derivation, Waits


def check_data(derived: Derivation, waits: Waits) -> Problems:
    """Checks that lines follow what they wait for on their class, and the rules of order."""
    lines = waits.lines
    for where, _, rows in lines.all_blocks():
        if where.kind <= OpKind.WEIGHT_GRAD and rows.shape[1] > 1 and (np.diff(rows, axis=1) <= 0).any():
            early = rows[:, 1:][np.diff(rows, axis=1) <= 0]
            for line in early.tolist():
                yield lines.text(line), "comes before the previous phase of its op"
    wrong = (lines.device[waits.before] == lines.device[waits.after]) & (waits.before >= waits.after)
    for before, after in zip(waits.before[wrong].tolist(), waits.after[wrong].tolist(), strict=True):
        yield lines.text(after), f"comes before what it waits for: {lines.text(before)}"
    for device, end in enumerate(lines.first[1:].tolist()):
        if end == lines.first[device] or lines.kind[end - 1] != OpKind.OPTIMIZER:
            yield f"class {device}", "the last line is not finish"
    for name, shape in derived.phases.items():
        for launch, wait in shape.wait_of.items():
            if wait < 0:
                yield f"template {name} phase {launch}", "is a launch that no phase of its op waits for"
    yield from _neighbours(derived, waits)


def _neighbours(derived: Derivation, waits: Waits) -> Problems:
    """Checks lines that must directly follow a certain phase, or any phase of the LLM."""
    lines = waits.lines
    rows = np.arange(len(lines))
    latest = np.maximum.accumulate(np.where(lines.kind <= OpKind.WEIGHT_GRAD, rows, -1))
    previous = np.concatenate([[-1], latest[:-1]])  # latest phase before each line, on its class
    previous[previous < lines.first[:-1][lines.device]] = -1
    follows = _predecessors(derived, lines)
    for line in rows[(follows >= 0) & (previous != follows)].tolist():
        yield lines.text(line), f"does not directly follow {lines.text(int(follows[line]))}"
    llm = list(lines.plan.modules).index(LLM)
    receives = (lines.module == llm) & np.isin(lines.kind, (OpKind.RECV_F, OpKind.RECV_B))
    receives |= lines.kind == OpKind.RECV_SEAM
    for line in rows[receives & (previous >= 0) & (lines.module[previous] != llm)].tolist():
        yield lines.text(line), f"is posted behind filler, {lines.text(int(previous[line]))}"


def _predecessors(derived: Derivation, lines: PlanLines) -> Ints:
    """Returns the phase that each LLM launch and each send must directly follow; -1 for the rest."""
    plan = lines.plan
    follows = np.full(len(lines), -1)
    for (device, name, kind, chunk), microbatches, rows in lines.all_blocks():
        virtual = derived.virtual(device, name, chunk) if name in plan.modules else 0
        if kind <= OpKind.WEIGHT_GRAD and name == LLM:
            launches = [place for place, _ in derived.shape(name, kind, virtual).launches if place]
            follows[rows[:, launches]] = rows[:, [place - 1 for place in launches]]
        elif kind in (OpKind.SEND_F, OpKind.SEND_SEAM):
            follows[rows] = lines.at(device, name, OpKind.FORWARD, chunk)[:, -1:]
        elif kind in (OpKind.SEND_B, OpKind.SEND_SEAM_B):
            seam = kind == OpKind.SEND_SEAM_B
            producer, at = (LLM, 0) if seam else (name, virtual)
            backward = lines.at(
                device, producer, backward_kind(plan, producer, at) or OpKind.BACKWARD, 0 if seam else chunk
            )
            of = microbatches // plan.modules[name].microbatches_per_llm_microbatch if seam else slice(None)
            follows[rows] = backward[of, -1:]
    return follows


def check_pairs(waits: Waits) -> Problems:
    """Checks that two classes order their transfers of a module, pipeline or seam, in the same way."""
    lines = waits.lines
    here, there = lines.device[waits.send], lines.device[waits.recv]
    low, high = np.minimum(here, there), np.maximum(here, there)
    at_low = np.where(here < there, waits.send, waits.recv)
    at_high = np.where(here < there, waits.recv, waits.send)
    seam = np.isin(lines.kind[waits.send], SEAMS)
    order_low = np.lexsort((at_low, seam, lines.module[waits.send], high, low))
    order_high = np.lexsort((at_high, seam, lines.module[waits.send], high, low))
    for at in np.flatnonzero(order_low != order_high).tolist():
        one, other = int(at_low[order_low[at]]), int(at_high[order_high[at]])
        yield lines.text(one), f"at the other end the transfer in this position is {lines.text(other)}"


def check_groups(waits: Waits) -> Problems:
    """Checks that two classes order the collectives of the groups they share in the same way."""
    lines, members = waits.lines, waits.group_members
    num_classes = len(lines.first) - 1
    groups_of: list[set[int]] = [set() for _ in range(num_classes)]
    for group, classes in enumerate(members):
        for device in classes if len(classes) > 1 else ():
            groups_of[device].add(group)
    cache: dict[tuple[int, frozenset[int]], Ints] = {}

    def issued(device: int, shared: frozenset[int]) -> Ints:
        """Returns the lines of a class that belong to one of the groups, in order."""
        if (device, shared) not in cache:
            first, end = lines.first[device], lines.first[device + 1]
            wanted = np.zeros(len(members) + 1, bool)  # the last is for lines of no group
            wanted[list(shared)] = True
            cache[device, shared] = first + np.flatnonzero(wanted[waits.group[first:end]])
        return cache[device, shared]

    for one in range(num_classes):
        for other in range(one + 1, num_classes):
            shared = frozenset(groups_of[one] & groups_of[other])
            if not shared:
                continue
            mine, theirs = issued(one, shared), issued(other, shared)
            if len(mine) != len(theirs):
                yield f"classes {one} and {other}", f"{len(mine)} collectives meet {len(theirs)}"
            elif (differ := np.flatnonzero(lines.identity[mine] != lines.identity[theirs])).size:
                at = int(differ[0])
                yield lines.text(int(mine[at])), f"meets {lines.text(int(theirs[at]))}"
