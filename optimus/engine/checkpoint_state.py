"""Describes what a rank holds of each tensor of a checkpoint, as boxes of whole tensors under global names.

A ZeRO-1 shard is a run of a flat buffer that crosses parameters. A run of a parameter, or of its
tensor-parallel shard, is a few boxes of the whole parameter, which any other layout can read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from optimus.engine.process_groups import build_tp_group
from optimus.engine.rank_trainer import RankTrainer
from optimus.models.collectives import ParamSplit, TpGroup

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
STEP = "optimizer.step"  # steps that the optimizer has taken
NORMS = "optimizer.recent_norms"  # of the last steps, which tell a spike
HEAD = " (head)"  # suffix of a tied head's name, whose embedding is stored


@dataclass(frozen=True, kw_only=True, eq=False)
class Box:
    """Values of a box of a tensor, in memory that they share with the rank, and where the box begins."""

    offsets: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorShards:
    """The boxes of one tensor that a rank holds."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


State = Mapping[str, TensorShards]


def stage(state: State) -> dict[str, TensorShards]:
    """Allocates a copy in host memory, pinned if the values are on a GPU."""
    return {
        name: TensorShards(
            shape=shards.shape,
            boxes=tuple(Box(offsets=box.offsets, values=_allocate_host(box.values)) for box in shards.boxes),
        )
        for name, shards in state.items()
    }


def copy_state(target: State, source: State) -> None:
    """Copies the values of one state into another with the same boxes."""
    torch._foreach_copy_(_list_values(target), _list_values(source), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _list_values(state: State) -> list[Tensor]:
    return [box.values for shards in state.values() for box in shards.boxes]


def _allocate_host(values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)


# ---------------------------------------------------------------------------- our own layers


def collect_rank_state(rank: RankTrainer, *, saving: bool) -> dict[str, TensorShards]:
    """Returns masters, moments and frozen parameters of a rank.

    What several places hold alike (a tied embedding and head, the optimizer's norms and count of steps) is
    saved from one of them and loaded into all.
    """
    names = {id(parameter): name for name, parameter in rank.model.parameters.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, list[Box]] = {}
    for parameter, begin, values in _list_runs(rank):
        name = names[id(parameter)]
        if saving and name.endswith(HEAD):
            continue
        plain = name.removesuffix(HEAD)
        split = rank.model.splits.get(plain)
        tp_group = build_tp_group(rank.plan, plain.split(".")[0], rank.groups.rank)
        for kind, flat in values.items():
            key = f"model.{plain}" if kind == MASTER else f"optimizer.{plain}.{kind}"
            shapes[key] = _whole_shape(parameter, split)
            found = list_shard_boxes(flat, tuple(parameter.shape), begin, split, tp_group)
            boxes.setdefault(key, []).extend(found)
    state = {key: TensorShards(shape=shapes[key], boxes=tuple(found)) for key, found in boxes.items()}
    optimizer = rank.optimizer
    assert optimizer is not None
    steps = [Box(offsets=(), values=optimizer.state_of(tensor)["step"]) for tensor in optimizer.tensors()]
    state[NORMS] = describe_tensor(optimizer.recent_norms)
    if steps:
        state[STEP] = TensorShards(shape=(), boxes=tuple(steps[:1] if saving else steps))
    return state


def _list_runs(rank: RankTrainer) -> Iterator[tuple[Tensor, int, dict[str, Tensor]]]:
    """Yields parameters, where this rank's run of each begins, and its values by kind."""
    assert rank.optimizer is not None
    for tensor in rank.optimizer.tensors():
        state = rank.optimizer.state_of(tensor)
        kinds = {MASTER: tensor.parameter.detach(), **{kind: state[kind] for kind in MOMENTS}}
        begin, at = tensor.begin, 0
        for parameter in tensor.bucket.parameters:
            low, high = max(begin, at), min(tensor.end, at + parameter.numel())
            if low < high:
                values = {kind: flat[low - begin : high - begin] for kind, flat in kinds.items()}
                yield parameter, low - at, values
            at += parameter.numel()
    sharded: set[int] = set()
    for bucket in rank.executor.buckets.frozen:
        sharded |= {id(parameter) for parameter in bucket.parameters}
        for parameter, begin, values in bucket.shard_runs():
            yield parameter, begin, {MASTER: values}
    for parameter in rank.model.parameters.values():
        if not parameter.requires_grad and id(parameter) not in sharded:
            yield parameter, 0, {MASTER: parameter.detach().view(-1)}


def list_shard_boxes(
    flat: Tensor, shape: tuple[int, ...], begin: int, split: ParamSplit | None, tp_group: TpGroup
) -> Iterator[Box]:
    """Yields a run of a shard of a parameter, that begins at an index, as boxes of the whole parameter.

    Heads and columns that only pad a shard are in no box.
    """
    at = 0
    for offsets, sizes in _cut_run(shape, begin, begin + len(flat)):
        values = flat[at : at + prod(sizes)].view(sizes)
        at += prod(sizes)
        if split is None:
            yield Box(offsets=offsets, values=values)
            continue
        low, high = offsets[split.dim], offsets[split.dim] + sizes[split.dim]
        for first, start, length in split.shard_runs(tp_group.rank, tp_group.size):
            inside, end = max(low, start), min(high, start + length)
            if inside < end:
                moved = list(offsets)
                moved[split.dim] = first + inside - start
                yield Box(offsets=tuple(moved), values=values.narrow(split.dim, inside - low, end - inside))


def _cut_run(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields offsets and sizes of the boxes that make up a run of a tensor's values, in order."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    row_size = prod(shape[1:])
    (row, first), (last, rest) = divmod(begin, row_size), divmod(end, row_size)
    if row == last or first:
        for offsets, sizes in _cut_run(shape[1:], first, rest if row == last else row_size):
            yield (row, *offsets), (1, *sizes)
        row += 1
    if last > row:
        yield (row, *(0,) * (len(shape) - 1)), (last - row, *shape[1:])
    if last >= row:
        for offsets, sizes in _cut_run(shape[1:], 0, rest):
            yield (last, *offsets), (1, *sizes)


def _whole_shape(parameter: Tensor, split: ParamSplit | None) -> tuple[int, ...]:
    shape = list(parameter.shape)
    if split is not None:
        shape[split.dim] = split.shard_length(1)
    return tuple(shape)


# ---------------------------------------------------------------------------- tensors of torch


def describe_tensor(tensor: Tensor) -> TensorShards:
    """Describes a tensor that a rank holds whole, or a DTensor of which it holds a shard."""
    if not isinstance(tensor, DTensor):
        return TensorShards(
            shape=tuple(tensor.shape), boxes=(Box(offsets=(0,) * tensor.ndim, values=tensor.detach()),)
        )
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.detach().to_local()
    boxes = (Box(offsets=tuple(offsets), values=local),) if local.numel() else ()
    return TensorShards(shape=tuple(tensor.shape), boxes=boxes)
