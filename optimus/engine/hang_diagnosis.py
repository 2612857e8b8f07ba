"""Finds, in the statuses that ranks published, the rank that all others wait for."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_STATUSES_READ = 64  # by one rank, in worlds too large to read all
MAX_RANKS_NAMED = 8  # in one sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """Op and waits of a rank when it last published its status."""

    rank: int
    beat: int  # statuses published
    count: int  # ops begun
    op: str  # empty between ops
    for_s: float
    waits_for: tuple[int, ...]
    error: str = ""

    @property
    def where(self) -> str:
        """The op as a phrase that follows a verb."""
        return f"in {self.op}" if self.op else "between ops"

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)

    def as_json(self) -> str:
        """Returns the value under the rank's key in the store."""
        return json.dumps(self.as_dict())

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        """Reads the value under a rank's key in the store."""
        fields = json.loads(text)
        return cls(**{**fields, "waits_for": tuple(fields["waits_for"])})


Statuses = Mapping[int, RankStatus | None]


def read_blocking_statuses(
    statuses: dict[int, RankStatus | None], rank: int, read: Callable[[int], RankStatus | None]
) -> dict[int, RankStatus | None]:
    """Adds statuses of ranks that `rank` waits for, directly or not, nearest first.

    At most `MAX_STATUSES_READ` are read. Each rank's list is read in turn with the others, so that hundreds
    of DP replicas in one list do not hide a chain of pipeline stages.
    """
    queue = deque([_ranks_awaited_by(statuses[rank])])
    while queue and len(statuses) <= MAX_STATUSES_READ:
        awaited = queue.popleft()
        other = next((rank for rank in awaited if rank not in statuses), None)
        if other is not None:
            statuses[other] = read(other)
            queue += [_ranks_awaited_by(statuses[other]), awaited]
    return statuses


def _ranks_awaited_by(status: RankStatus | None) -> Iterator[int]:
    return iter(() if status is None else status.waits_for)


def diagnose_hang(rank: int, before: Statuses, after: Statuses) -> tuple[str, bool]:
    """Reports what blocks `rank`, from statuses of two moments; also returns whether that makes progress."""
    reached = _reached_from(rank, before, after)
    causes = [one for one in reached if _stopped(one, before, after) or not _waits(after[one])]
    if not causes:
        return _report_cycle(reached, after), False
    progress = all(_progresses(one, before, after) for one in causes)
    return "\n".join(_report_cause(one, before, after) for one in sorted(causes)[:MAX_RANKS_NAMED]), progress


def _reached_from(rank: int, before: Statuses, after: Statuses) -> list[int]:
    """Returns `rank` and the ranks it waits for, directly or through ranks that are alive."""
    reached = [rank]
    for one in reached:
        status = after.get(one)
        if status is None or _stopped(one, before, after):
            continue
        reached.extend(other for other in status.waits_for if other in after and other not in reached)
    return reached


def _waits(status: RankStatus | None) -> bool:
    return status is not None and bool(status.waits_for) and not status.error


def _stopped(rank: int, before: Statuses, after: Statuses) -> bool:
    earlier, later = before.get(rank), after.get(rank)
    if later is None:
        return True
    return earlier is not None and earlier.beat == later.beat and not later.error


def _progresses(rank: int, before: Statuses, after: Statuses) -> bool:
    earlier, later = before.get(rank), after.get(rank)
    return earlier is not None and later is not None and later.count > earlier.count and not later.error


def _report_cause(rank: int, before: Statuses, after: Statuses) -> str:
    waiting = _ranks_waiting_for(rank, before, after)
    tail = ""
    if waiting:
        tail = f": {format_ranks(tuple(waiting))} {'waits' if len(waiting) == 1 else 'wait'} for it"
    direct = [one for one in waiting if (status := after[one]) is not None and rank in status.waits_for]
    for one in (direct + [one for one in waiting if one not in direct])[:MAX_RANKS_NAMED]:
        tail += _report_wait(after[one])
    status = after[rank]
    if status is None:
        return f"rank {rank} stopped before its first op{tail}"
    if status.error:
        return f"rank {rank} failed {status.where} ({status.error}){tail}"
    if _stopped(rank, before, after):
        return f"rank {rank} stopped {status.where}{tail}"
    return f"rank {rank} has been {status.where} for {status.for_s:.1f} s and waits for no other rank{tail}"


def _report_wait(status: RankStatus | None) -> str:
    assert status is not None
    awaited = format_ranks(status.waits_for)
    return f"; rank {status.rank} has waited {status.for_s:.1f} s in {status.op} for {awaited}"


def _ranks_waiting_for(rank: int, before: Statuses, after: Statuses) -> list[int]:
    """Returns all ranks that are alive and wait for `rank`, directly or through others."""
    waiting: list[int] = []
    for target in (queue := [rank]):
        for one, status in after.items():
            if one == rank or one in waiting or status is None or _stopped(one, before, after):
                continue
            if target in status.waits_for:
                waiting.append(one)
                queue.append(one)
    return sorted(waiting)


def _report_cycle(reached: list[int], after: Statuses) -> str:
    """Reports ranks that wait in a cycle, or in a chain longer than was read."""
    statuses = [status for one in reached if (status := after[one]) is not None]
    unread = [rank for status in statuses for rank in status.waits_for if rank not in after]
    report = f"{format_ranks(tuple(sorted(reached)))} wait for each other"
    if unread:
        last = f"rank {unread[-1]}, whose status was not read"
        report = f"{format_ranks(tuple(reached))} wait; in the end for {last}"
    # The rank that waits longest is the likeliest cause.
    for status in sorted(statuses, key=lambda status: -status.for_s)[:MAX_RANKS_NAMED]:
        report += _report_wait(status)
    return report


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Formats ranks as `rank 3`, as `ranks 0, 1, 2`, or as the first of many and their number."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:MAX_RANKS_NAMED]))
    more = len(ranks) - MAX_RANKS_NAMED
    return f"ranks {named}" + (f" and {more} more" if more > 0 else "")
