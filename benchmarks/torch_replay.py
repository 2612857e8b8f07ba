"""What a step of torch's schedules should take by the rules alone: a second, tiny implementation of them.

A program is a rank's list of (verb, virtual stage, microbatch): computing (F, B, I, W), launching a message
(SEND_F, SEND_B), or waiting until all messages of this rank have arrived (WAIT). Computing waits for inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from benchmarks.paced_torch import TorchPipeline
from benchmarks.pacing import Link

Line = tuple[str, int, int]
Programs = list[list[Line]]  # of every rank
Seconds = Callable[[str, int, int], float]


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> list[Line]:
    """What torch's `Schedule1F1B._step_microbatches` does, its waits for sends included."""
    first, last = rank == 0, rank == ranks - 1
    warm = min(microbatches, ranks - rank)
    lines: list[Line] = []

    def send(verb: str, microbatch: int) -> list[Line]:
        return [] if (last if verb == "SEND_F" else first) else [(verb, rank, microbatch)]

    for forward in range(warm):
        lines += [("F", rank, forward), ("WAIT", rank, 0)]
        lines += send("SEND_F", forward) if forward < warm - 1 else []
    for backward in range(microbatches - warm + 1):
        forward = warm + backward
        lines += [*send("SEND_F", forward - 1), ("WAIT", rank, 0), ("B", rank, backward)]
        lines += send("SEND_B", backward)
        if forward < microbatches:
            lines += [("WAIT", rank, 0), ("F", rank, forward)]
    for backward in range(microbatches - warm + 1, microbatches):
        lines += [("B", rank, backward), ("WAIT", rank, 0), *send("SEND_B", backward)]
    return [*lines, ("WAIT", rank, 0)]


def from_torch(actions: Sequence[str]) -> list[Line]:
    """A rank's program from the names of torch's actions; its sends are waited for at the end."""
    lines: list[Line] = []
    for action in actions:
        found = re.fullmatch(r"(\d+)(F|B|I|W|SEND_F|SEND_B)(\d+)", action)
        if found:
            lines.append((found[2], int(found[1]), int(found[3])))
        elif not re.fullmatch(r"\d+(RECV_F|RECV_B)\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)", action):
            raise ValueError(f"what is {action}?")
    return [*lines, ("WAIT", 0, 0)]


def programs_of(pipeline: TorchPipeline, actions: Sequence[Sequence[str]]) -> Programs:
    """Of every rank, by what torch lists for it; its 1F1B lists nothing."""
    if pipeline.schedule == "1F1B":
        return [one_f_one_b(rank, len(actions), pipeline.num_microbatches) for rank in range(len(actions))]
    return [from_torch(own) for own in actions]


def replay_step(pipeline: TorchPipeline, programs: Programs, seconds: Seconds, link: Link) -> float:
    """When all ranks of a pipeline are done."""
    ranks = range(len(programs))
    rank_of = {stage: rank for rank in ranks for stage in pipeline.stages_of(rank, len(programs))}
    return max(
        replay(
            programs,
            [rank_of[stage] for stage in sorted(rank_of)],
            seconds,
            link.message_s(pipeline.example),
            split=pipeline.splits,
            shared=link.lane is not None,
        )
    )


def replay(
    programs: Sequence[Sequence[Line]],
    rank_of: Sequence[int],
    seconds: Seconds,
    message_s: float,
    *,
    split: bool = False,
    shared: bool = False,
) -> list[float]:
    """When each rank is done. One message after the other on each link from rank to rank.

    With `split` a whole backward takes what its halves take; with `shared` all links of a sender are one.
    """
    at, now, sent_s = [0] * len(programs), [0.0] * len(programs), [0.0] * len(programs)
    free_s: dict[tuple[int, int], float] = {}
    arrived_s: dict[Line, float] = {}  # of the message of a stage and microbatch
    while any(at[rank] < len(program) for rank, program in enumerate(programs)):
        before = list(at)
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                verb, stage, microbatch = program[at[rank]]
                if verb == "WAIT":
                    now[rank] = max(now[rank], sent_s[rank])
                elif verb.startswith("SEND"):
                    to = rank_of[stage + (1 if verb == "SEND_F" else -1)]
                    link = rank, rank if shared else to
                    free_s[link] = max(now[rank], free_s.get(link, 0.0)) + message_s
                    arrived_s[verb, stage, microbatch] = free_s[link]
                    sent_s[rank] = max(sent_s[rank], free_s[link])
                else:
                    needed = _needed(verb, stage, microbatch, rank_of)
                    if needed is not None and needed not in arrived_s:
                        break
                    start_s = now[rank] if needed is None else max(now[rank], arrived_s[needed])
                    parts = _parts(verb, stage) if split else verb
                    now[rank] = start_s + sum(seconds(part, stage, microbatch) for part in parts)
                at[rank] += 1
        assert at != before, "nobody can go on"
    return now


def _needed(verb: str, stage: int, microbatch: int, rank_of: Sequence[int]) -> Line | None:
    """The message that an op waits for."""
    other = stage - 1 if verb == "F" else stage + 1
    if verb == "W" or not 0 <= other < len(rank_of) or rank_of[other] == rank_of[stage]:
        return None
    return ("SEND_F" if verb == "F" else "SEND_B", other, microbatch)


def _parts(verb: str, stage: int) -> str:
    """torch skips I on the first stage and runs both halves in its W."""
    if stage == 0 and verb in "IW":
        return "" if verb == "I" else "IW"
    return "IW" if verb == "B" else verb
