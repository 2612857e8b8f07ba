"""A stand-in for a trainer: ranks pass small tensors around a ring, step after step, and are watched."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from optimus.engine.rendezvous import RunMembership, check_ranks_agree, join_process_group
from optimus.engine.watchdog import FlightRecorder, Watchdog

MICROBATCHES = 4
VERBS = ("recv-f", "F", "send-f")  # line = 3 * microbatch + place of the verb


def text(line: int) -> str:
    return f"llm.{VERBS[line % 3]} chunk 0 microbatch {line // 3}"


class Around:
    """Rank 0 sends each microbatch around the ring and gets it back increased by every rank."""

    def __init__(self, member: RunMembership, timeout_s: float) -> None:
        self.rank, self.world = member.rank, member.world
        self.previous, self.next = (self.rank - 1) % self.world, (self.rank + 1) % self.world
        assert self.world % 2 == 0
        edges = [(rank, (rank + 1) % self.world) for rank in range(self.world)]
        # First all even edges, then all odd ones: torch names a group after its members and the number of
        # groups that a process has, so members must have made equally many before.
        edges = edges[::2] + edges[1::2]
        self.groups: dict[tuple[int, int], Any] = {
            edge: dist.new_group(
                list(edge), timeout=timedelta(seconds=timeout_s), use_local_synchronization=True
            )
            for edge in edges
            if self.rank in edge
        }

    def waits_for(self, line: int) -> tuple[int, ...]:
        return ((self.previous,), (), (self.next,))[line % 3]

    def lines(self) -> list[int]:
        places = (1, 2, 0) if self.rank == 0 else (0, 1, 2)
        return [3 * microbatch + place for microbatch in range(MICROBATCHES) for place in places]

    def play(self, line: int, value: torch.Tensor, compute_s: float) -> None:
        if line % 3 == 0:
            dist.recv(value, self.previous, group=self.groups[self.previous, self.rank])
        elif line % 3 == 1:
            time.sleep(compute_s)
            value += 1
        else:
            dist.send(value, self.next, group=self.groups[self.rank, self.next])


def say(words: str) -> None:
    os.write(1, f"{words} at {time.monotonic():.3f}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--compute-s", type=float, default=0.005)
    parser.add_argument("--limit-s", type=float, default=8.0)
    parser.add_argument("--dump-into", type=Path)
    parser.add_argument("--fail-rank", type=int, default=-1, help="this rank raises at step 3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    member = join_process_group(timeout_s=30.0, backend="gloo")
    check_ranks_agree(member.store, member.rank, member.world, "plan hash", "abc")
    around = Around(member, timeout_s=30.0)
    say(f"rank {member.rank} pid {os.getpid()} restart {member.restart} joined")
    ring = FlightRecorder()
    watch = Watchdog(
        rank=member.rank,
        world=member.world,
        recorder=ring,
        store=member.store,
        describe=text,
        waits_for=around.waits_for,
        timeout_s=options.limit_s,
        dump_dir=options.dump_into,
    )
    watch.start()
    try:
        for step in range(options.steps):
            value = torch.zeros(8, dtype=torch.float64)
            for line in around.lines():
                ring.begin(line)
                around.play(line, value, options.compute_s)
                ring.end(line)
            if step == 3 and member.rank == options.fail_rank:
                raise ValueError("a mistake in the step")
            say(f"rank {member.rank} pid {os.getpid()} restart {member.restart} step {step}")
    except Exception as error:
        watch.fail(error)
    watch.stop()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
