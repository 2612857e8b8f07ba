"""Runs torch's own pipeline schedules over modules that sleep, searches cuts for them, and replays them.

A paced stage computes something tiny and takes a given time. In its backward, two nodes spend the time: one
on the path to the input, one on the path to the weight. So torch's split backward spends each part where
torch runs it; a single custom function for both would spend all of it in the first part.

A replay is a second, tiny implementation of the schedules' rules. Its program is a rank's list of (verb,
virtual stage, microbatch): computing (F, B, I, W), launching a message (SEND_F, SEND_B), or waiting until all
messages of this rank have arrived (WAIT). Computing waits for inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from benchmarks.paced_clock import MEANS, Draws, PacedClock, PacedLink
from benchmarks.variants import stages_of
from optimus.engine.torch_private import fake_process_group
from optimus.planner.systems.pipeline_search import (
    cut_proportionally,
    minimize_largest_stage,
    neighbouring_cuts,
)
from optimus.schedule.stage_costs import Cut

MAX_REPLAYS = 300  # of a search; a count and not a time, so that results repeat

Seconds = Callable[[str, int, int], float]  # of kind (F, B, I or W), virtual stage and microbatch
Line = tuple[str, int, int]
Programs = list[list[Line]]  # by rank


class SpendInBackward(torch.autograd.Function):
    """Identity whose backward takes time."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, spend: Callable[[], None]) -> Tensor:
        context.spend = spend
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        context.spend()
        return grad, None


class PacedStage(nn.Module):
    """One virtual stage. If the schedule splits backwards, one takes I and W, also where torch runs both."""

    def __init__(self, clock: PacedClock, seconds: Seconds, *, stage: int, like: TorchPipeline) -> None:
        super().__init__()
        eye = torch.eye(like.width, dtype=like.dtype)
        self.weight = nn.Parameter(eye * (1 + stage / 64))  # differs by stage, for tests
        self._clock, self._seconds, self._stage, self._split = clock, seconds, stage, like.splits
        self.is_free = False  # takes no time: for the step in which torch connects stages

    def forward(self, rows: Tensor, microbatch: Tensor) -> Tensor:
        number = int(microbatch)
        if not rows.requires_grad:  # the first stage spends the time of its unused input gradient too
            rows = rows.detach().requires_grad_()
        rows = SpendInBackward.apply(rows, lambda: self._spend("I" if self._split else "B", number))
        weight = self.weight
        if self._split:
            weight = SpendInBackward.apply(weight, lambda: self._spend("W", number))
        output = torch.tanh(rows @ weight)
        self._spend("F", number)
        return output

    def _spend(self, kind: str, microbatch: int) -> None:
        if not self.is_free:
            self._clock.compute(self._seconds(kind, self._stage, microbatch))


@dataclass(frozen=True, kw_only=True)
class TorchPipeline:
    """A schedule of torch by its class name, as `get_schedule_class` takes it."""

    schedule: str
    num_microbatches: int
    chunks: int = 1  # per rank
    rows: int = 2  # of one microbatch
    width: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def splits(self) -> bool:
        return "ZeroBubble" in self.schedule or "ZBV" in self.schedule or "DualPipe" in self.schedule

    def data(self) -> tuple[Tensor, Tensor]:
        """Returns rows and targets of all microbatches."""
        count = self.num_microbatches * self.rows * self.width
        rows = torch.linspace(-1, 1, count).reshape(-1, self.width)
        return rows.to(self.dtype), torch.sin(7 * rows).to(self.dtype)

    @property
    def example(self) -> Tensor:
        """One microbatch of activations."""
        return torch.zeros(self.rows, self.width, dtype=self.dtype)

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """Returns the virtual stages of a rank."""
        return stages_of(self.schedule, rank, ranks, ranks * self.chunks)


class PacedPipeline:
    """One rank of a schedule of torch; `make` builds the module of a virtual stage, if not a `PacedStage`."""

    def __init__(
        self,
        pipeline: TorchPipeline,
        *,
        clock: PacedClock,
        seconds: Seconds,
        group: dist.ProcessGroup | None = None,
        make: Callable[[int], Any] | None = None,
    ) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._pipeline, self._ranks = pipeline, ranks
        numbers = pipeline.stages_of(rank, ranks)
        make = make or (lambda number: PacedStage(clock, seconds, stage=number, like=pipeline))
        self._modules = [make(number) for number in numbers]
        example = pipeline.example.requires_grad_()
        stages = [
            PipelineStage(
                module,
                number,
                ranks * len(numbers),
                torch.device("cpu"),
                input_args=example.detach() if number == 0 else example,
                output_args=example,
                group=group,
            )
            for module, number in zip(self._modules, numbers, strict=True)
        ]
        schedule = get_schedule_class(pipeline.schedule)
        is_single = issubclass(schedule, PipelineScheduleSingle)
        self.schedule = schedule(
            stages[0] if is_single else stages, pipeline.num_microbatches, loss_fn=loss, scale_grads=False
        )
        self._is_first, self._is_last = 0 in numbers, ranks * len(numbers) - 1 in numbers

    def prepare(self) -> None:
        """Runs the first step, in which torch connects stages: only messages take time in it."""
        self._set_free(True)
        self.step()
        self._set_free(False)

    def actions(self) -> list[list[str]]:
        """Returns the actions that torch lists for every rank; its 1F1B lists none."""
        order = getattr(self.schedule, "pipeline_order_with_comms", {})
        return [[str(action) for action in order.get(rank, ())] for rank in range(self._ranks)]

    def grads(self) -> list[Tensor]:
        """Returns the gradient of every weight of this rank, by chunk."""
        return [module.weight.grad for module in self._modules]

    def _set_free(self, is_free: bool) -> None:
        for module in self._modules:
            module.is_free = is_free

    def step(self) -> None:
        pipeline, count = self._pipeline, self._pipeline.num_microbatches
        for module in self._modules:
            module.zero_grad()
        rows, targets = pipeline.data()
        inputs, target = (rows,) if self._is_first else (), targets if self._is_last else None
        self.schedule.step(*inputs, target=target, microbatch=torch.arange(count), return_outputs=False)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns a loss that differs between microbatches, so that gradients reveal swapped ones."""
    return ((output - target) ** 2).sum()


# ---------------------------------------------------------------------------- variants and their cuts


@dataclass(frozen=True, kw_only=True)
class PacedTorchVariant:
    """A schedule of torch over one cut: mean seconds of every virtual stage, by kind (F, B, I, W).

    `compute_s` is drawn; `collective_s`, of tensor-parallel stages, takes the time of its link. `encoder_s`
    is the part of `compute_s` that grows with the `load` of images of a microbatch.
    """

    pipeline: TorchPipeline
    programs: Programs
    link: PacedLink  # between stages
    layers: tuple[range, ...]  # of every virtual stage
    compute_s: Mapping[str, tuple[float, ...]]
    collective_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    encoder_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def drawn_s(self, draws: Draws, kind: str, stage: int, microbatch: int) -> float:
        """Returns the compute seconds of one op."""
        named = f"{self.pipeline.schedule} of {len(self.layers)}"
        factor = draws.factor(module=named, kind=kind, virtual_stage=stage, microbatch=microbatch)
        return self.compute_s[kind][stage] * factor

    def loaded_s(self, load: float, kind: str, stage: int) -> float:
        """Returns the compute seconds of one op with so many times the mean load of images."""
        return self.compute_s[kind][stage] + (load - 1) * self.encoder_s[kind][stage]

    def replayed_s(self, draws: Draws = MEANS, loads: Sequence[float] | None = None) -> float:
        """Returns the step by the rules alone, of mean or given loads of microbatches."""

        def seconds(kind: str, stage: int, microbatch: int) -> float:
            collective_s = self.collective_s[kind][stage] if self.collective_s else 0.0
            if loads is not None:
                return self.loaded_s(loads[microbatch], kind, stage) + collective_s
            return self.drawn_s(draws, kind, stage, microbatch) + collective_s

        ranks = range(len(self.programs))
        rank_of = {stage: rank for rank in ranks for stage in self.pipeline.stages_of(rank, len(ranks))}
        return max(
            replay(
                self.programs,
                [rank_of[stage] for stage in sorted(rank_of)],
                seconds,
                self.link.message_s(self.pipeline.example),
                split=self.pipeline.splits,
                shared=self.link.lane is not None,
            )
        )

    @property
    def least_s(self) -> float:
        """Mean compute of the busiest rank: no step is shorter."""
        ranks = len(self.programs)
        return self.pipeline.num_microbatches * max(
            sum(
                self.compute_s[kind][stage] for stage in self.pipeline.stages_of(rank, ranks) for kind in "FB"
            )
            for rank in range(ranks)
        )


@dataclass(frozen=True, kw_only=True)
class CutSearch:
    """Searches the cut with the shortest replayed step, from `starts`; only those, if it is fixed."""

    pipeline: TorchPipeline
    starts: tuple[Cut, ...]
    make: Callable[[Cut, Programs], PacedTorchVariant]
    is_fixed: bool = False

    def best(self, ranks: int) -> PacedTorchVariant:
        """Returns the best variant by mean durations, as our plans are chosen."""
        programs = list_programs(self.pipeline, ranks)
        starts = {cut: self.make(cut, programs).replayed_s() for cut in self.starts}
        best = min(starts, key=starts.__getitem__)
        if not self.is_fixed:
            best = _improve(best, starts[best], lambda cut: self.make(cut, programs).replayed_s())
        return self.make(best, programs)


def _improve(best: Cut, best_s: float, replayed_s: Callable[[Cut], float]) -> Cut:
    """Moves one layer at a time to a neighbouring stage while the step gets shorter."""
    replays, improved, seen = 0, True, {best}
    while improved and replays < MAX_REPLAYS:
        improved = False
        for cut in neighbouring_cuts(best):
            if cut in seen or replays >= MAX_REPLAYS:
                continue
            seen.add(cut)
            replays += 1
            if (seconds := replayed_s(cut)) < best_s * (1 - 1e-9):
                best, best_s, improved = cut, seconds, True
                break
    return best


def balanced_cuts(weights: Sequence[float], parts: int) -> tuple[Cut, ...]:
    """Returns cuts by seconds, from the front, from the back and by equal shares; and by layer counts."""
    count, even = len(weights), [1.0] * len(weights)
    cuts: dict[Cut, None] = {}
    for cut_of in (minimize_largest_stage, cut_proportionally):
        cuts[cut_of(weights, parts)] = None
        cuts[tuple(count - place for place in reversed(cut_of(weights[::-1], parts)))] = None
    return (*cuts, cut_proportionally(even, parts))


# ---------------------------------------------------------------------------- replay


def list_programs(pipeline: TorchPipeline, ranks: int) -> Programs:
    """Returns the program of every rank, from the actions that torch lists; 1F1B by its own rules."""
    if pipeline.schedule == "1F1B":
        return [one_f_one_b(rank, ranks, pipeline.num_microbatches) for rank in range(ranks)]
    with fake_process_group(0, ranks):
        clock = PacedClock(sleep=lambda seconds: None)
        schedule = PacedPipeline(pipeline, clock=clock, seconds=lambda kind, stage, microbatch: 0.0)
        return [from_torch(actions) for actions in schedule.actions()]


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> list[Line]:
    """Returns the program of torch's `Schedule1F1B._step_microbatches`, with its waits for sends."""
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
    """Returns a rank's program from the names of torch's actions; sends are waited for at the end."""
    lines: list[Line] = []
    for action in actions:
        match = re.fullmatch(r"(\d+)(F|B|I|W|SEND_F|SEND_B)(\d+)", action)
        if match:
            lines.append((match[2], int(match[1]), int(match[3])))
        elif not re.fullmatch(r"\d+(RECV_F|RECV_B)\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)", action):
            raise ValueError(f"unknown action {action}")
    return [*lines, ("WAIT", 0, 0)]


def replay(
    programs: Sequence[Sequence[Line]],
    rank_of: Sequence[int],
    seconds: Seconds,
    message_s: float,
    *,
    split: bool = False,
    shared: bool = False,
) -> list[float]:
    """Returns when each rank is done. Messages between two ranks are serialized.

    With `split` a backward takes what its halves take; with `shared` all messages of a sender are serialized.
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
        assert at != before, "deadlock"
    return now


def _needed(verb: str, stage: int, microbatch: int, rank_of: Sequence[int]) -> Line | None:
    """Returns the message that an op waits for."""
    other = stage - 1 if verb == "F" else stage + 1
    if verb == "W" or not 0 <= other < len(rank_of) or rank_of[other] == rank_of[stage]:
        return None
    return ("SEND_F" if verb == "F" else "SEND_B", other, microbatch)


def _parts(verb: str, stage: int) -> str:
    """Returns the halves of an op: torch skips I on the first stage and runs both in its W."""
    if stage == 0 and verb in "IW":
        return "" if verb == "I" else "IW"
    return "IW" if verb == "B" else verb
