"""The only loop: plays a rank's program, line by line, for one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.buckets import BucketType, RankBuckets
from optimus.engine.compile import Action, Batch, Compiler, MessageSpecs, StepState, forward_actions
from optimus.engine.optimizer import DistributedOptimizer
from optimus.engine.p2p import P2PMailbox
from optimus.engine.process_groups import ProcessGroups
from optimus.engine.replicated_buckets import ReplicatedBucket
from optimus.engine.side_stream import SideStream
from optimus.ir.plan import Plan
from optimus.models.chunk import Chunk
from optimus.models.segment import State


class Recorder(Protocol):
    """Who wants to know which line runs; see `watch.FlightRecorder`."""

    def begin(self, line: int) -> None: ...

    def end(self, line: int) -> None: ...


class _Nobody:
    def begin(self, line: int) -> None:
        """Nobody wants to know."""

    def end(self, line: int) -> None:
        """Nobody wants to know."""


class Executor:
    """Plays a plan on one rank. After `step` every bucket holds its gradients of the whole batch.

    `tied` are an embedding table and a head on this rank that are one parameter of the model: their gradients
    are added up, over the first and last stage where they are apart. `chunks` holds this rank's chunks of
    every module, in order; `bucket_type` says how their parameters are gathered and their gradients reduced:
    by default parameters are replicated and `grad` holds their gradients. An `optimizer`, if there is one,
    steps in the last line.
    """

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        chunks: Mapping[str, tuple[Chunk, ...]],
        shapes: MessageSpecs,
        *,
        device: torch.device,
        bucket_type: BucketType = ReplicatedBucket,
        tied: Sequence[Tensor] = (),
        partial: Sequence[Tensor] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self.plan, self.groups, self.tied = plan, groups, tied
        self._mail, self.side, self._moment = P2PMailbox(device), SideStream(device), StepState()
        self._recorder = recorder or _Nobody()
        self.buckets = RankBuckets(plan, groups, chunks, bucket_type, tied, partial)
        self.optimizer: DistributedOptimizer | None = None
        mail, moment = self._mail, self._moment
        compiler = Compiler(plan, groups, chunks, self.buckets, shapes, mail, self.side, moment, self._finish)
        self.actions = compiler.actions()
        self._waits_for = {action.line: action.waits_for for action in self.actions}
        self._forward = forward_actions(self.actions)

    def step(self, batch: Batch) -> Tensor | None:
        """Forward and backward of all microbatches; this rank's part of the loss, where it is made."""
        for bucket in self.buckets:
            bucket.reset()
        for bucket in self.buckets.rest:
            bucket.gather()
        self._play(self.actions, batch)
        return self._loss()

    def replace_recorder(self, recorder: Recorder) -> Recorder:
        """From now on another is told which line runs; who was told until now."""
        before, self._recorder = self._recorder, recorder
        return before

    def eval(self, batch: Batch) -> Tensor | None:
        """Forward only: nothing is kept for a backward."""
        for bucket in self.buckets.rest:
            bucket.gather()
        self._play(self._forward, batch, learns=False)
        self._mail.finish()
        return self._loss()

    @property
    def outputs(self) -> dict[int, State]:
        """What the LLM's last stage made besides the loss, by microbatch."""
        return self._moment.outputs

    def waits_for(self, line: int) -> tuple[int, ...]:
        """Ranks without which a line does not end."""
        return self._waits_for.get(line, ())

    def _play(self, actions: list[Action], batch: Batch, *, learns: bool = True) -> None:
        moment, recorder = self._moment, self._recorder
        moment.batch, moment.learns, moment.losses, moment.outputs = batch, learns, [], {}
        with torch.no_grad():  # whoever wants a graph makes one
            for action in actions:
                recorder.begin(action.line)
                action.run()
                recorder.end(action.line)
        moment.batch = None

    def _loss(self) -> Tensor | None:
        losses = self._moment.losses
        return torch.stack(losses).sum() if losses else None

    def _finish(self) -> None:
        """The last line: everything sent and reduced, tied gradients joined, parameters changed."""
        self._mail.finish()
        for bucket in self.buckets.rest:
            bucket.reduce()  # no line does
        for bucket in self.buckets:
            bucket.wait_reduced()
        self.buckets.add_partial_sums()
        self._join_tied()
        if self.optimizer is not None:
            self.optimizer.step()

    def _join_tied(self) -> None:
        """A tied parameter's two gradients become one."""
        tied = {id(parameter) for parameter in self.tied}
        gradients = [each.summed for each in self.buckets if id(each.parameters[0]) in tied]
        group = self.groups.get("ends")
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients and group is not None:
            dist.all_reduce(gradients[0], dist.ReduceOp.SUM, group)
