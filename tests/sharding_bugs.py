"""Bugs that sharding, norm, clipping and the optimizer could have, each with a case that must notice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import combinations
from typing import Any
from unittest.mock import patch

import engine_bugs
import torch
from engine_bugs import Bugs, wrapped
from torch import Tensor
from torch import distributed as dist

from optimus.engine import resharding
from optimus.engine.buckets import RankBuckets
from optimus.engine.compile import ProgramCompiler
from optimus.engine.distributed_optimizer import CLIP_EPS, DistributedOptimizer
from optimus.engine.executor import Executor
from optimus.engine.resharding import Resharding
from optimus.engine.sharded_bucket import ShardedBucket
from optimus.ir.op import OpKind
from optimus.models.collectives import all_gather_single, reduce_scatter_single

TWO = "sharded: two by two interleaved"
TIED = "sharded: zero-bubble, tied, dropout, two encoders"
FOUR = "sharded: four replicas"
ENDS = "sharded: eight: pp 4, encoder pp 2"
HALF = "bf16: two by two interleaved"
FSDP = "fsdp: two ranks, tied"
SHARDING_BUGS: Bugs = {}
bug = partial(engine_bugs.bug, into=SHARDING_BUGS)


def changed(name: str, case: str, owner: Any, attribute: str, change: Callable[..., Any]) -> None:
    """A bug that replaces one function or method."""
    SHARDING_BUGS[name] = case, lambda: wrapped(owner, attribute, change)


# ---------------------------------------------------------------------------- gathers


def _gather_once(original: Any, self: ShardedBucket) -> None:
    if not hasattr(self, "gathered"):
        original(self)
    self.gathered = True  # type: ignore[attr-defined]


def _gather_nothing(original: Any, self: ShardedBucket) -> None:
    """Parameters stay as they were built."""


def _gather_before_casting(original: Any, self: ShardedBucket) -> None:
    before = self.param_buffer.clone()
    original(self)
    self.wait_gathered()
    if hasattr(self, "gathered"):
        self.param_buffer.copy_(before)
    self.gathered = True  # type: ignore[attr-defined]


def _rolled(original: Any, self: ShardedBucket) -> None:
    original(self)
    self.wait_gathered()
    self.param_buffer.copy_(self.param_buffer.roll(1))


def _replicas_change_places(original: Any, self: ShardedBucket) -> None:
    original(self)
    self.wait_gathered()
    if self.group is not None:
        self.param_buffer.copy_(self.param_buffer.roll(len(self._param_shard)))


changed("parameters are gathered in the first step only", TWO, ShardedBucket, "gather", _gather_once)
changed("parameters are never gathered", FOUR, ShardedBucket, "gather", _gather_nothing)
changed("the type is changed only after sending", HALF, ShardedBucket, "gather", _gather_before_casting)
changed("parameters lie one number too far", TWO, ShardedBucket, "gather", _rolled)
changed("parts of two replicas are exchanged", FOUR, ShardedBucket, "gather", _replicas_change_places)


# ---------------------------------------------------------------------------- reductions


def _without_own(original: Any, self: ShardedBucket) -> None:
    if self.group is not None and dist.get_rank(self.group) == 1:
        self.grad_buffer.zero_()
    original(self)


def _not_reduced(original: Any, self: ShardedBucket) -> None:
    """This replica's own part is taken for the sum."""
    if self.group is not None:
        self.reduced_grad.copy_(
            self.grad_buffer.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        )


def _reduced_twice(original: Any, self: ShardedBucket) -> None:
    if self.group is not None:
        dist.all_reduce(self.grad_buffer, group=self.group)
    original(self)


def _averaged(original: Any, self: ShardedBucket) -> None:
    original(self)
    if self.group is not None:
        self.reduced_grad.div_(dist.get_world_size(self.group))


def _reduced_in_half(original: Any, self: ShardedBucket) -> None:
    self.grad_buffer.copy_(self.grad_buffer.bfloat16())
    original(self)


def _kept(original: Any, self: ShardedBucket) -> None:
    before = self.grad_buffer.clone()
    original(self)
    self.grad_buffer.copy_(before)


def _next_part(original: Any, self: ShardedBucket, *args: Any) -> None:
    original(self, *args)
    if self.group is not None:
        self.wait_reduced()
        self.reduced_grad.copy_(self.reduced_grad.roll(1))


changed("one replica's gradients are missing", FOUR, ShardedBucket, "reduce", _without_own)
changed("nothing is reduced", TWO, ShardedBucket, "reduce", _not_reduced)
changed("gradients are reduced twice", FOUR, ShardedBucket, "reduce", _reduced_twice)
changed("gradients are averaged over replicas", TWO, ShardedBucket, "wait_reduced", _averaged)
changed("gradients travel in bf16", TWO, ShardedBucket, "reduce", _reduced_in_half)
changed("gradients of the step before stay", TWO, ShardedBucket, "begin_step", _kept)
changed("the part of another replica is taken", FOUR, ShardedBucket, "reduce", _next_part)


@bug("reduces are launched with the first gather", TWO)
def _() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(wrapped(ShardedBucket, "reduce", lambda original, self: None))

    def gather(original: Any, self: ShardedBucket) -> None:
        original(self)
        if self.group is not None:
            self._reduce_work = reduce_scatter_single(
                self.reduced_grad, self.grad_buffer, dist.ReduceOp.SUM, self.group, async_op=True
            )

    stack.enter_context(wrapped(ShardedBucket, "gather", gather))
    return stack


@bug("a replica without images does not reduce", "sharded: four replicas, images stay")
def _() -> AbstractContextManager[Any]:
    def reduce(original: Any, self: ShardedBucket) -> None:
        if self.grad_buffer.any():
            original(self)

    return wrapped(ShardedBucket, "reduce", reduce)


@bug("a bucket is left out of the program", TWO)
def _() -> AbstractContextManager[Any]:
    return wrapped(
        RankBuckets,
        "at",
        lambda original, self, module, place: original(self, module, place) if place else (),
    )


# ---------------------------------------------------------------------------- masters and gradients


@bug("masters are those of the next replica", FOUR)
def _() -> AbstractContextManager[Any]:
    def make(original: Any, self: ShardedBucket, parameters: Any, group: Any) -> None:
        original(self, parameters, group)
        if group is not None:
            size, parts = len(self.master), dist.get_world_size(group)
            place = (dist.get_rank(group) + 1) % parts
            self.master.data.copy_(self.param_buffer[place * size : (place + 1) * size])

    return wrapped(ShardedBucket, "__init__", make)


@bug("masters are in bf16", HALF)
def _() -> AbstractContextManager[Any]:
    def step(original: Any, self: DistributedOptimizer, loss: Any = None) -> None:
        original(self, loss)
        for bucket in self.buckets:
            bucket.master.data.copy_(bucket.master.bfloat16())

    return wrapped(DistributedOptimizer, "step", step)


@bug("gradients are added up in bf16", HALF)
def _() -> AbstractContextManager[Any]:
    return patch.object(torch, "promote_types", lambda first, second: first)


@bug("a parameter keeps its own memory", TWO)
def _() -> AbstractContextManager[Any]:
    def place(original: Any, self: ShardedBucket, parameters: Any, *rest: Any) -> None:
        own = parameters[-1].data
        original(self, parameters, *rest)
        parameters[-1].data = own

    return wrapped(ShardedBucket, "__init__", place)


@bug("gradients of two parameters change places", TWO)
def _() -> AbstractContextManager[Any]:
    def place(original: Any, self: ShardedBucket, *given: Any) -> None:
        original(self, *given)
        views = self.grad_views
        for a, b in combinations(range(len(views)), 2):
            if views[a].shape == views[b].shape:
                views[a], views[b] = views[b], views[a]
                return

    return wrapped(ShardedBucket, "__init__", place)


# ---------------------------------------------------------------------------- parameters and gradients freed


def _keep_old_gradients(original: Any, self: ShardedBucket) -> None:
    """Gradients of a microbatch begin with what memory holds: here those of the microbatch before."""
    kept = getattr(self, "kept", None)
    original(self)
    if self.reduces_microbatches and kept is not None:
        self.grad_buffer.copy_(kept)


def _reduce_and_keep(original: Any, self: ShardedBucket) -> None:
    if self.reduces_microbatches:
        self.kept = self.grad_buffer.clone()  # type: ignore[attr-defined]
    original(self)


@bug("gradients of a microbatch begin with those of the last", FSDP)
def _() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(wrapped(ShardedBucket, "begin_gradients", _keep_old_gradients))
    stack.enter_context(wrapped(ShardedBucket, "reduce", _reduce_and_keep))
    return stack


def _gather_when_allocated(original: Any, self: ShardedBucket) -> None:
    """The gather for a backward finds other values in memory than it should."""
    original(self)
    self.wait_gathered()
    self.param_buffer.mul_(1 + 1e-3 * getattr(self, "gathers", 0))
    self.gathers = 1 - getattr(self, "gathers", 0)  # type: ignore[attr-defined]


def _sum_once(original: Any, self: ShardedBucket) -> None:
    before = self.reduced_grad.clone()
    original(self)
    if self.reduces_microbatches and before.any():
        self.reduced_grad.copy_(before)  # of the first microbatch alone


changed("parameters of a backward are not those of the forward", FSDP, ShardedBucket, "gather",
        _gather_when_allocated)  # fmt: skip
changed("gradients of one microbatch are kept", FSDP, ShardedBucket, "wait_reduced", _sum_once)


@bug("parameters are freed before their last reader", FSDP)
def _() -> AbstractContextManager[Any]:
    def place(original: Any, self: Resharding, *given: Any) -> None:
        original(self, *given)
        for line in sorted(self.behind):
            self.before[line] += self.behind.pop(line)

    return wrapped(Resharding, "__init__", place)


@bug("nothing waits for the parameters of a backward", FSDP)
def _() -> AbstractContextManager[Any]:
    return patch.object(resharding, "READS_PARAMETERS", (OpKind.FORWARD,))


# ---------------------------------------------------------------------------- norm, clipping, optimizer


def _uncounted(original: Any, self: DistributedOptimizer, buckets: Any, counted: Any, **rest: Any) -> None:
    original(self, buckets, [bucket.reduced_grad for bucket in buckets], **rest)


def _norm_of_this_rank(original: Any, self: DistributedOptimizer, loss: Any = None) -> Tensor:
    return torch.stack([each.reduced_grad.square().sum() for each in self.buckets]).sum().sqrt()


def _norm_of_own_gradients(original: Any, self: DistributedOptimizer, loss: Any = None) -> Tensor:
    own = [bucket.grad_buffer for bucket in self.buckets]
    with patch.object(self, "_norm_grads", own):
        norm: Tensor = original(self, loss)
    return norm


def _clipped_twice(original: Any, self: DistributedOptimizer, loss: Any = None) -> None:
    kept = torch.clamp(self.clip / (self._total_norm() + CLIP_EPS), max=1.0)
    for bucket in self.buckets:
        bucket.reduced_grad.mul_(kept)
    original(self, loss)


def _clipped_too_late(original: Any, self: DistributedOptimizer, loss: Any = None) -> None:
    if self.adamw is not None:
        self.adamw.step()
    adamw, self.adamw = self.adamw, None
    original(self, loss)
    self.adamw = adamw


def _scaled_up(original: Any, self: DistributedOptimizer, loss: Any = None) -> None:
    clip, self.clip = self.clip, 0.0
    norm = self._total_norm()
    for bucket in self.buckets:
        bucket.reduced_grad.mul_(1000.0 * clip / norm if clip > norm else 1.0 / 1.0000001)
    original(self, loss)
    self.clip = clip


def _each_module_by_itself(original: Any, self: DistributedOptimizer, loss: Any = None) -> None:
    clip, self.clip = self.clip, 0.0
    for bucket in self.buckets:
        norm = bucket.reduced_grad.square().sum()
        if bucket.group is not None:
            dist.all_reduce(norm, group=bucket.group)
        bucket.reduced_grad.mul_(torch.clamp(clip / (norm.sqrt() + CLIP_EPS), max=1.0))
    self.grad_norm = None
    original(self, loss)
    self.clip = clip


def _only_the_first(original: Any, self: DistributedOptimizer, loss: Any = None) -> None:
    before = [bucket.master.detach().clone() for bucket in self.buckets]
    original(self, loss)
    for bucket, old in zip(self.buckets, before, strict=True):
        if bucket.group is not None and dist.get_rank(bucket.group):
            bucket.master.data.copy_(old)


def _coupled_decay(original: Any, self: DistributedOptimizer, loss: Any = None) -> None:
    for bucket in self.buckets:
        bucket.reduced_grad.add_(bucket.master.detach(), alpha=0.01)
    original(self, loss)


def _before_joining(original: Any, self: Executor) -> None:
    if self.optimizer is not None:
        self.optimizer.step()
    steps, self.optimizer = self.optimizer, None
    original(self)
    self.optimizer = steps


changed("a tied parameter is counted twice", TIED, DistributedOptimizer, "__init__", _uncounted)
changed("the norm is that of one rank", TWO, DistributedOptimizer, "_total_norm", _norm_of_this_rank)
changed(
    "the norm is that of gradients before their sum",
    TWO,
    DistributedOptimizer,
    "_total_norm",
    _norm_of_own_gradients,
)
changed("gradients are clipped twice", TWO, DistributedOptimizer, "step", _clipped_twice)
changed("gradients are clipped behind the optimizer", TWO, DistributedOptimizer, "step", _clipped_too_late)
changed("gradients are not clipped at all", TWO, DistributedOptimizer, "step", _scaled_up)
changed("every bucket is clipped by itself", TWO, DistributedOptimizer, "step", _each_module_by_itself)
changed("only the first replica learns", FOUR, DistributedOptimizer, "step", _only_the_first)
changed("weight decay goes through the moments", TWO, DistributedOptimizer, "step", _coupled_decay)
changed(
    "the optimizer comes before the joining of tied gradients",
    ENDS,
    Executor,
    "_sum_tied_grads",
    _before_joining,
)


@bug("tied gradients are not joined", ENDS)
def _() -> AbstractContextManager[Any]:
    return wrapped(Executor, "_sum_tied_grads", lambda original, self: None)


@bug("tied parameters lie in different buckets", ENDS)
def _() -> AbstractContextManager[Any]:
    def make(original: Any, self: RankBuckets, *args: Any) -> Any:
        with patch.object(self, "_tied", frozenset()):
            return original(self, *args)

    return wrapped(RankBuckets, "_make", make)


@bug("nobody waits for a gather", TWO)
def _() -> AbstractContextManager[Any]:
    """With gloo a gather may have ended anyway: here it ends when it is waited for."""
    stack = ExitStack()

    def gather(original: Any, self: ShardedBucket) -> None:
        self._gather_work = self

    def wait(original: Any, self: ShardedBucket) -> None:
        if self._gather_work is not None and self.group is not None:
            self._param_shard.copy_(self.master.detach())
            all_gather_single(self.param_buffer, self._param_shard, self.group)
        self._gather_work = None

    stack.enter_context(wrapped(ShardedBucket, "gather", gather))
    stack.enter_context(wrapped(ShardedBucket, "wait_gathered", wait))
    stack.enter_context(wrapped(ProgramCompiler, "_gathers_needed", lambda original, self, *args: []))
    return stack
