"""Every line knows the ranks for which it may wait: what it really waits for is noted while a step runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_cases import CASES, TP, Case
from torch import distributed as dist

from benchmarks.host_issue import FakeGroups
from optimus.engine.compile import describe_line
from optimus.engine.config import TrainingConfig
from optimus.engine.executor import Executor
from optimus.engine.p2p import Key, P2PMailbox, SideStream
from optimus.engine.process_groups import make_process_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.sharded_bucket import ShardedBucket
from optimus.engine.torch_private import fake_process_group
from optimus.models.collectives import AsyncCollective

NAMES = (
    "one stage, two replicas", "two by two interleaved", "paper, two by two, two encoders",
    "one bucket for a stage", "four stages", "eight: pp 4, encoder pp 2",
    "tp: two stages", "tp: two replicas", "tp: full, split", "tp: zero-bubble",
    "tp: eight: pp 2 x tp 2 x dp 2, two encoders",
)  # fmt: skip
BY_NAME = {case.name: case for case in (*CASES, *TP)}


class Notes:
    """Ranks that each line waits for: gathers, messages, collectives of divided layers."""

    executor: Executor

    def __init__(self) -> None:
        self.found: dict[int, set[int]] = defaultdict(set)
        self._line = -1
        self._senders: dict[Key, int] = {}
        self._beside: dict[object, set[int]] = {}

    def begin(self, line: int) -> None:
        self._line = line

    def end(self, line: int) -> None:
        assert line == self._line

    @contextmanager
    def taken(self) -> Iterator[None]:
        with (
            patch.object(
                ShardedBucket, "wait_gathered", self._around(ShardedBucket.wait_gathered, self._gather)
            ),
            patch.object(P2PMailbox, "receive", self._around(P2PMailbox.receive, self._receive)),
            patch.object(P2PMailbox, "take", self._around(P2PMailbox.take, self._take)),
            patch.object(AsyncCollective, "wait", self._around(AsyncCollective.wait, self._wait)),
            patch.object(SideStream, "launch", lambda side, name, run: self._begin(name, run)),
            patch.object(SideStream, "wait", lambda side, name: self._end(name)),
        ):
            yield

    def _around(self, function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            note(*given)
            return function(*given)

        return noted

    def _gather(self, bucket: ShardedBucket) -> None:
        if bucket._gather_work is not None:
            assert bucket.group is not None
            self.found[self._line] |= set(dist.get_process_group_ranks(bucket.group))

    def _receive(self, mail: P2PMailbox, key: Key, specs: object, other: int, group: object) -> None:
        self._senders[key] = other

    def _take(self, mail: P2PMailbox, key: Key) -> None:
        if key in mail._receives:
            self.found[self._line].add(self._senders[key])

    def _wait(self, collective: AsyncCollective) -> None:
        """Rows of one module: that of the line."""
        plan, groups = self.executor.plan, self.executor.groups
        row = plan.programs[plan.ranks.class_of(groups.rank)].rows[self._line]
        if collective._work is not None:
            self.found[self._line] |= set(groups.members[f"{plan.names[int(row[0])]}.tp"])

    def _begin(self, name: object, run: Callable[[], None]) -> None:
        """Messages outside the program: the line that ends one waits as long."""
        before = self.found.pop(self._line, set())
        run()
        waits = self.found.pop(self._line, set()).union(*self._beside.values())  # one after another
        self._beside[name], self.found[self._line] = waits, before

    def _end(self, name: object) -> None:
        self.found[self._line] |= self._beside.pop(name, set())


def stepped(case: Case, rank: int) -> tuple[Executor, dict[int, set[int]]]:
    notes = Notes()
    with fake_process_group(rank, case.ranks), notes.taken():
        made = make_process_groups(case.plan, rank, timeout_s=60)
        groups = FakeGroups(rank=rank, members=made.members, groups=made.groups)
        device = torch.device("cpu")
        one = RankTrainer(case.job, case.plan, TrainingConfig(), groups, dtype=torch.float32, device=device)
        notes.executor = one.executor
        one.executor.replace_recorder(notes)
        one.executor.step(one.batch(0))
    return one.executor, notes.found


@pytest.mark.ci("engine")
@pytest.mark.parametrize("name", NAMES)
def test_a_line_names_all_that_it_waits_for(name: str) -> None:
    case, waits = BY_NAME[name], 0
    for rank in range(case.ranks):
        executor, found = stepped(case, rank)
        for line, ranks in found.items():
            others = ranks - {rank}
            waits += bool(others)
            said = describe_line(case.plan, case.plan.ranks.class_of(rank), line)
            assert others <= set(executor.waits_for(line)), f"rank {rank} in {said}"
    assert waits > 0
