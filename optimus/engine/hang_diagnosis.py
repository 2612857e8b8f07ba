"""Finds, in what ranks posted about themselves, the rank that all others wait for."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MOST_READ = 64  # posts that one rank follows, in worlds too large to read all
MOST_NAMED = 8  # ranks written out in one sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """What a rank says that it is doing."""

    rank: int
    beat: int  # grows with every post
    count: int  # ops begun
    op: str  # empty between ops
    for_s: float
    waits_for: tuple[int, ...]
    error: str = ""

    @property
    def where(self) -> str:
        """Its op in words, to follow a verb."""
        return f"in {self.op}" if self.op else "between ops"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def as_json(self) -> str:
        """For the store."""
        return json.dumps(self.as_dict())

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        """From the store."""
        fields = json.loads(text)
        return cls(**{**fields, "waits_for": tuple(fields["waits_for"])})


Posts = Mapping[int, RankStatus | None]


def behind(
    posts: dict[int, RankStatus | None], rank: int, read: Callable[[int], RankStatus | None]
) -> dict[int, RankStatus | None]:
    """Adds posts of those that `rank` waits for, directly or not; at most `MOST_READ`, nearest first.

    One of each in turn: who waits for many replicas does not keep us from following a chain of stages.
    """
    queue = deque([_named_by(posts[rank])])
    while queue and len(posts) <= MOST_READ:
        named = queue.popleft()
        other = next((one for one in named if one not in posts), None)
        if other is not None:
            posts[other] = read(other)
            queue += [_named_by(posts[other]), named]
    return posts


def _named_by(post: RankStatus | None) -> Iterator[int]:
    return iter(() if post is None else post.waits_for)


def diagnose_hang(rank: int, before: Posts, after: Posts) -> tuple[str, bool]:
    """What holds `rank` up, in words, and whether that makes progress; from posts of two moments."""
    reached = _reached(rank, before, after)
    ends = [one for one in reached if _stopped(one, before, after) or not _waits(after[one])]
    if not ends:
        return _no_end(reached, after), False
    progress = all(_progresses(one, before, after) for one in ends)
    return "\n".join(_end(one, before, after) for one in sorted(ends)[:MOST_NAMED]), progress


def _reached(rank: int, before: Posts, after: Posts) -> list[int]:
    """`rank` and those it waits for, directly or through ranks that are alive."""
    reached = [rank]
    for one in reached:
        post = after.get(one)
        if post is None or _stopped(one, before, after):
            continue
        reached.extend(other for other in post.waits_for if other in after and other not in reached)
    return reached


def _waits(post: RankStatus | None) -> bool:
    return post is not None and bool(post.waits_for) and not post.error


def _stopped(rank: int, before: Posts, after: Posts) -> bool:
    earlier, later = before.get(rank), after.get(rank)
    if later is None:
        return True
    return earlier is not None and earlier.beat == later.beat and not later.error


def _progresses(rank: int, before: Posts, after: Posts) -> bool:
    earlier, later = before.get(rank), after.get(rank)
    return earlier is not None and later is not None and later.count > earlier.count and not later.error


def _end(rank: int, before: Posts, after: Posts) -> str:
    post = after[rank]
    waiting = _waiting_for(rank, before, after)
    tail = ""
    if waiting:
        tail = f": {format_ranks(tuple(waiting))} {'waits' if len(waiting) == 1 else 'wait'} for it"
    direct = [one for one in waiting if (at := after[one]) is not None and rank in at.waits_for]
    for one in (direct + [one for one in waiting if one not in direct])[:MOST_NAMED]:
        waits = after[one]
        assert waits is not None
        whom = format_ranks(waits.waits_for)
        tail += f"; rank {one} has waited {waits.for_s:.1f} s in {waits.op} for {whom}"
    if post is None:
        return f"rank {rank} stopped before its first op{tail}"
    if post.error:
        return f"rank {rank} failed {post.where} ({post.error}){tail}"
    if _stopped(rank, before, after):
        return f"rank {rank} stopped {post.where}{tail}"
    return f"rank {rank} has been {post.where} for {post.for_s:.1f} s and waits for nobody{tail}"


def _waiting_for(rank: int, before: Posts, after: Posts) -> list[int]:
    """All that are alive and wait for `rank`, directly or through others."""
    waiting: list[int] = []
    for target in (queue := [rank]):
        for one, post in after.items():
            if one == rank or one in waiting or post is None or _stopped(one, before, after):
                continue
            if target in post.waits_for:
                waiting.append(one)
                queue.append(one)
    return sorted(waiting)


def _no_end(reached: list[int], after: Posts) -> str:
    """They wait in a circle, or in a chain longer than was followed."""
    words = f"{format_ranks(tuple(sorted(reached)))} wait for each other"
    posts = [post for one in reached if (post := after[one]) is not None]
    beyond = [other for post in posts for other in post.waits_for if other not in after]
    if beyond:
        words = f"{format_ranks(tuple(reached))} wait; in the end for rank {beyond[-1]}, which was not asked"
    for post in sorted(posts, key=lambda post: -post.for_s)[:MOST_NAMED]:  # who stood first may be to blame
        others = format_ranks(post.waits_for)
        words += f"; rank {post.rank} has waited {post.for_s:.1f} s in {post.op} for {others}"
    return words


def format_ranks(ranks: tuple[int, ...]) -> str:
    """`rank 3` or `ranks 0, 1, 2`, or the first of many and their number."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:MOST_NAMED]))
    return f"ranks {named}" + (f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else "")
