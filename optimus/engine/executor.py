"""Runs a rank's program, line by line, for one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.buckets import BucketType, GroupOf, RankBuckets, ReplicatedBucket, group_all
from optimus.engine.compile import Action, ProgramCompiler, StepState, select_forward_actions
from optimus.engine.distributed_optimizer import DistributedOptimizer
from optimus.engine.p2p import MessageSpecs, P2PMailbox, SideStream
from optimus.engine.process_groups import ProcessGroups
from optimus.engine.sharded_bucket import FrozenBucket, ShardedBucket
from optimus.ir.plan import Plan
from optimus.models.segment import State
from optimus.protocols import Batch, Chunk, Recorder


class _NullRecorder:
    def begin(self, line: int) -> None:
        """Records nothing."""

    def end(self, line: int) -> None:
        """Records nothing."""


class Executor:
    """Runs a plan on one rank. After `step` every bucket holds its gradients of the whole batch.

    `chunks` are this rank's chunks of every module, in order. `bucket_type` decides how their parameters are
    gathered and their gradients reduced: by default parameters are replicated and `grad` holds their
    gradients. `tied` are an embedding table and a head on this rank that are one parameter of the model:
    their gradients are summed, over the first and last stage if these are apart. `group_of` is that of the
    `optimizer`, which steps in the last line if it is set.
    """

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        chunks: Mapping[str, tuple[Chunk, ...]],
        specs: MessageSpecs,
        *,
        device: torch.device,
        bucket_type: BucketType = ReplicatedBucket,
        tied: Sequence[Tensor] = (),
        partial: Sequence[Tensor] = (),
        group_of: GroupOf = group_all,
        recorder: Recorder | None = None,
    ) -> None:
        self.plan, self.groups, self.tied, self._specs = plan, groups, tied, specs
        self.optimizer: DistributedOptimizer | None = None
        self._mailbox, self.side_stream, self._state = P2PMailbox(device), SideStream(device), StepState()
        self._recorder = recorder or _NullRecorder()
        shards = isinstance(bucket_type, type) and issubclass(bucket_type, ShardedBucket)
        self.buckets = RankBuckets(
            plan,
            groups,
            chunks,
            bucket_type,
            tied,
            partial,
            group_of,
            frozen_type=FrozenBucket if shards else None,
        )
        self.actions = ProgramCompiler(
            plan,
            groups,
            chunks,
            self.buckets,
            specs,
            self._mailbox,
            self.side_stream,
            self._state,
            self._finish,
        ).actions()
        self._waits_for = {action.line: action.waits_for for action in self.actions}
        self._forward_actions = select_forward_actions(self.actions)

    def step(self, batch: Batch) -> Tensor | None:
        """Runs forward and backward of all microbatches; returns this rank's part of the loss, if any."""
        for bucket in self.buckets:
            bucket.begin_step()
        for bucket in self.buckets.unplanned:
            bucket.gather()
        self._run(self.actions, batch)
        return self._loss()

    def eval(self, batch: Batch) -> Tensor | None:
        """Runs forward only and saves nothing for a backward."""
        for bucket in self.buckets.unplanned:
            bucket.gather()
        self._run(self._forward_actions, batch, needs_backward=False)
        self._mailbox.finish()
        return self._loss()

    @property
    def outputs(self) -> dict[int, State]:
        """Outputs of the LLM's last stage besides the loss, by microbatch."""
        return self._state.outputs

    def waits_for(self, line: int) -> tuple[int, ...]:
        """Returns the ranks without which a line does not end."""
        return self._waits_for.get(line, ())

    def replace_recorder(self, recorder: Recorder) -> Recorder:
        """Replaces the recorder and returns the previous one."""
        previous, self._recorder = self._recorder, recorder
        return previous

    def _run(self, actions: list[Action], batch: Batch, *, needs_backward: bool = True) -> None:
        state, recorder, self._specs.batch = self._state, self._recorder, batch
        state.batch, state.needs_backward, state.losses, state.outputs = batch, needs_backward, [], {}
        with torch.no_grad():  # chunks enable gradients where they build a graph
            for action in actions:
                recorder.begin(action.line)
                action.run()
                recorder.end(action.line)
        state.batch = None

    def _loss(self) -> Tensor | None:
        losses = self._state.losses
        return torch.stack(losses).sum() if losses else None

    def _finish(self) -> None:
        """Runs the last line: waits for sends and reductions, sums tied gradients, steps the optimizer."""
        self._mailbox.finish()
        for bucket in self.buckets.unplanned:
            bucket.reduce()  # no line does
        for bucket in self.buckets:
            bucket.wait_reduced()
        self.buckets.reduce_partial_sums()
        self._sum_tied_grads()
        for bucket in self.buckets:
            bucket.end_step()
        if self.optimizer is not None:
            self.optimizer.step(self._loss())

    def _sum_tied_grads(self) -> None:
        tied = {id(parameter) for parameter in self.tied}
        grads = [
            bucket.local_grad(parameter)
            for bucket in self.buckets
            for parameter in bucket.parameters
            if id(parameter) in tied
        ]
        group = self.groups.get("ends")
        if len(grads) == 2:
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
        elif grads and group is not None:
            dist.all_reduce(grads[0], dist.ReduceOp.SUM, group)
