"""Bugs that an engine could have, each planted by replacing one piece of it, with a case that must notice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist

from optimus.engine import build_rank, rank_batch, rank_trainer
from optimus.engine.buckets import ReplicatedBucket
from optimus.engine.compile import ProgramCompiler
from optimus.engine.executor import Executor
from optimus.engine.p2p import P2PMailbox
from optimus.models import kernels, layer_ops
from optimus.models.chunk import SegmentedChunk
from optimus.models.layer_ops import PreNorm
from optimus.models.segment import WeightGradStore
from optimus.models.tensor_parallel import SeamExchange

Plant = Callable[[], AbstractContextManager[Any]]
Bugs = dict[str, tuple[str, Plant]]  # name -> case, and what plants it
BUGS: Bugs = {}


def bug(name: str, case: str, into: Bugs = BUGS) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        into[name] = case, plant
        return plant

    return keep


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`change(original, *args)` in place of a function or method."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


# ---------------------------------------------------------------------------- seam


@bug("the seam's gradient is lost", "two ranks")
def _() -> AbstractContextManager[Any]:
    def put(original: Any, self: P2PMailbox, key: Any, tensors: Any) -> None:
        lost = key[0] == "backward" and key[1] == "vision"
        original(self, key, tuple(torch.zeros_like(t) for t in tensors) if lost else tensors)

    return wrapped(P2PMailbox, "put", put)


@bug("the seam's gradient is asked for by nobody", "two ranks")
def _() -> AbstractContextManager[Any]:
    return wrapped(
        ProgramCompiler, "_needs_grad", lambda original, self, key: key[0] != "rows" and original(self, key)
    )


@bug("rows of the batch table are one too late", "two ranks")
def _() -> AbstractContextManager[Any]:
    return wrapped(rank_batch, "find_row_positions", lambda original, *args: original(*args).roll(1))


@bug("padding lands on the first token", "rare images")
def _() -> AbstractContextManager[Any]:
    def rows(original: Any, *args: Any) -> Any:
        found = original(*args)
        return replace(found, targets=torch.where(found.targets == args[-1], 0, found.targets))

    return wrapped(rank_batch.RankBatch, "_bin_rows", rows)


@bug("the second piece goes where the first went", "pieces")
def _() -> AbstractContextManager[Any]:
    def targets(original: Any, bins: Any, *args: Any) -> Any:
        for each in bins:
            count = min(len(each.targets), len(bins[0].targets))
            each.targets[:count] = bins[0].targets[:count]
        return original(bins, *args)

    return wrapped(rank_batch, "route_encoder_rows", targets)


@bug("rows go to the next replica", "one stage, two replicas")
def _() -> AbstractContextManager[Any]:
    def rows(original: Any, *args: Any) -> Any:
        found = original(*args)
        swapped = torch.where(found.owners < 2, 1 - found.owners, found.owners)
        return replace(found, owners=swapped)

    return wrapped(rank_batch.RankBatch, "_bin_rows", rows)


@bug("gradients of dealt rows come back in the order of replicas", "four replicas")
def _() -> AbstractContextManager[Any]:
    def back(original: Any, self: SeamExchange, gradients: Any, context: Any) -> Any:
        flight = original(self, gradients, context)
        return flight.then(lambda found: (found[0], *(part.roll(1, 0) for part in found[1:])))

    return wrapped(SeamExchange, "launch_backward", back)


@bug("only the first replica's labels are counted", "two by two")
def _() -> AbstractContextManager[Any]:
    def plan(original: Any, *args: Any, labels: int, **how: Any) -> Any:
        return original(*args, labels=labels // 2, **how)

    return wrapped(rank_trainer, "plan_batch", plan)


@bug("images attend to each other", "two ranks")
def _() -> AbstractContextManager[Any]:
    def inputs(original: Any, encoder: Any, items: Any, capacity: int, **how: Any) -> Any:
        found, context = original(encoder, items, capacity, **how)
        return found, replace(context, spans=(capacity,), window_spans=(capacity,))

    return wrapped(rank_batch, "build_encoder_inputs", inputs)


@bug("two images change places", "two ranks")
def _() -> AbstractContextManager[Any]:
    return wrapped(
        rank_batch.RankBatch, "_build_encoder", lambda original, self, name, mb: original(self, name, mb ^ 1)
    )


# ---------------------------------------------------------------------------- microbatches and messages


@bug("microbatches are swapped", "two ranks")
def _() -> AbstractContextManager[Any]:
    def inputs(original: Any, self: Any, module: str, microbatch: int) -> Any:
        return original(self, module, microbatch ^ 1 if module == "llm" else microbatch)

    return wrapped(rank_batch.RankBatch, "inputs", inputs)


@bug("a message is zeros", "two ranks")
def _() -> AbstractContextManager[Any]:
    def send(original: Any, self: P2PMailbox, key: Any, other: int, group: Any) -> None:
        if key[0] == "backward" and key[3] == 1:
            self.put(key, tuple(torch.zeros_like(t) for t in self.take(key)))
        original(self, key, other, group)

    return wrapped(P2PMailbox, "send", send)


@bug("received gradients are taken for those of the next microbatch", "four stages")
def _() -> AbstractContextManager[Any]:
    def receive(original: Any, self: P2PMailbox, key: Any, *rest: Any) -> None:
        crossed = (*key[:3], key[3] ^ 1) if key[:2] == ("backward", "llm") else key
        original(self, crossed, *rest)

    return wrapped(P2PMailbox, "receive", receive)


@bug("a stage holds the layers of another", "encoder pipeline of two")
def _() -> AbstractContextManager[Any]:
    def ranges(original: Any, plan: Any, module: Any, rank: int) -> Any:
        found = original(plan, module, rank)
        return [(max(first - 1, 0), end) for first, end in found] if module.name == "vision" else found

    return wrapped(build_rank, "find_layer_ranges", ranges)


# ---------------------------------------------------------------------------- reductions


@bug("averaged twice", "one stage, two replicas")
def _() -> AbstractContextManager[Any]:
    def wait(original: Any, self: ReplicatedBucket) -> None:
        original(self)
        if self.group is not None:
            self.reduced_grad /= dist.get_world_size(self.group)

    return wrapped(ReplicatedBucket, "wait_reduced", wait)


@bug("reduced twice", "one stage, two replicas")
def _() -> AbstractContextManager[Any]:
    def launch(original: Any, self: ReplicatedBucket) -> None:
        if self.group is not None:
            dist.all_reduce(self.reduced_grad, group=self.group)
        original(self)

    return wrapped(ReplicatedBucket, "reduce", launch)


@bug("an encoder is not reduced", "two ranks")
def _() -> AbstractContextManager[Any]:
    return wrapped(ReplicatedBucket, "reduce", lambda original, self: None)


@bug("gradients of the step before stay", "two ranks")
def _() -> AbstractContextManager[Any]:
    def reset(original: Any, self: ReplicatedBucket) -> None:
        before = self.reduced_grad.clone()
        original(self)
        self.reduced_grad.copy_(before)

    return wrapped(ReplicatedBucket, "begin_step", reset)


@bug("tied embeddings are not summed", "tied")
def _() -> AbstractContextManager[Any]:
    def make(original: Any, self: Executor, *args: Any, tied: Any = (), **rest: Any) -> None:
        original(self, *args, **rest)

    return wrapped(Executor, "__init__", make)


# ---------------------------------------------------------------------------- gradients


@bug("a weight gradient is dropped", "zero-bubble")
def _() -> AbstractContextManager[Any]:
    def weights(original: Any, self: SegmentedChunk, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if place == 1 and frame is not None:
            frame.weight_grads[place] = None
        original(self, microbatch, place)

    return wrapped(SegmentedChunk, "_weight_grad", weights)


@bug("a weight gradient is set, not added", "zero-bubble")
def _() -> AbstractContextManager[Any]:
    def add(weight: Any, gradient: Any, inputs: Any) -> None:
        weight.grad = gradient.T @ inputs

    wrong = replace(kernels.TORCH_LINEAR, add_weight_gradient=add)
    return wrapped(
        layer_ops,
        "linear_backward",
        lambda original, *args, **flags: original(*args[:-1], wrong, **flags),
    )


@bug("a bias gradient is lost", "plain")
def _() -> AbstractContextManager[Any]:
    return patch.object(kernels, "add_bias_gradient", lambda bias, gradient: None)


@bug("a table's gradient is set, not added", "two ranks")
def _() -> AbstractContextManager[Any]:
    def add(original: Any, table: Any, *given: Any) -> None:
        if table.grad is not None:
            table.grad.zero_()
        original(table, *given)

    return wrapped(kernels, "_add_table_gradient", add)


@bug("the residual's gradient is lost", "plain")  # played segment by segment
def _() -> AbstractContextManager[Any]:
    def gradient(original: Any, self: PreNorm, values: Any, given: Any, *rest: Any) -> Any:
        return original(self, values, (None, given[1]), *rest)

    return wrapped(PreNorm, "backward", gradient)


@bug("the loss is averaged over microbatches", "two ranks")
def _() -> AbstractContextManager[Any]:
    def begin(original: Any, self: ProgramCompiler, chunk: Any, microbatch: int) -> None:
        one = self.step_state.loss_grad
        assert one is not None
        self.step_state.loss_grad = torch.full_like(one, 1 / self.plan.microbatches)
        original(self, chunk, microbatch)

    return wrapped(ProgramCompiler, "_begin_at_loss", begin)


@bug("the loss is scaled by the labels of one replica", "one stage, two replicas")
def _() -> AbstractContextManager[Any]:
    def make(original: Any, self: Any, *args: Any, scale: float, **rest: Any) -> None:
        original(self, *args, scale=2 * scale, **rest)

    return wrapped(rank_batch.RankBatch, "__init__", make)


@bug("what was freed is not recomputed", "selective")
def _() -> AbstractContextManager[Any]:
    def recompute(original: Any, self: WeightGradStore) -> None:
        for tensor, _, _ in self.recomputable:
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.data.zero_()

    return wrapped(WeightGradStore, "recompute", recompute)


@bug("a layer is recomputed from the input of another", "recompute")
def _() -> AbstractContextManager[Any]:
    def again(original: Any, self: SegmentedChunk, microbatch: int, place: int) -> None:
        kept = self._frames[microbatch].recompute_inputs
        before = [other for other in kept if 0 < other < place]
        if place in kept and before:
            kept[place] = kept[max(before)]
        original(self, microbatch, place)

    return wrapped(SegmentedChunk, "_recompute", again)


# ---------------------------------------------------------------------------- dropout


@bug("dropout depends on the place in the bin", "dropout")
def _() -> AbstractContextManager[Any]:
    def inputs(original: Any, encoder: Any, items: Any, capacity: int, **how: Any) -> Any:
        placed = [(at, number, item) for at, (_, number, item) in enumerate(items)]
        return original(encoder, placed, capacity, **how)

    return wrapped(rank_batch, "build_encoder_inputs", inputs)


@bug("dropout is the same at every step", "dropout")
def _() -> AbstractContextManager[Any]:
    return wrapped(
        rank_batch, "build_llm_inputs", lambda original, *args, step, **how: original(*args, step=0, **how)
    )
