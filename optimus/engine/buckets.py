"""Which of a rank's parameters are gathered and reduced together, as the plan's buckets say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.process_groups import ProcessGroups
from optimus.errors import UserError
from optimus.ir.plan import WHOLE_STAGE, Plan
from optimus.ir.plan import Bucket as PlannedBucket
from optimus.models.chunk import ALL_LAYERS, Chunk, trainable_parameters


class Bucket(Protocol):
    """Parameters whose values and gradients travel together; launched and waited for by lines of a program.

    `ReplicatedBucket` keeps them whole on every replica, `ShardedBucket` one part of their masters on each.
    """

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    @property
    def gathers(self) -> bool:
        """Whether other replicas bring parts of its parameters."""

    @property
    def summed(self) -> Tensor:
        """After `wait_reduced`: the gradients that this rank holds, flat."""

    @property
    def offset(self) -> int:
        """Where, among the gradients of all parameters one after another, those of this rank begin."""

    def reset(self) -> None:
        """Gradients begin anew."""

    def gather(self) -> None:
        """Launches what makes parameters whole again after an optimizer's step."""

    def wait_gathered(self) -> None: ...

    def reduce(self) -> None:
        """Launches the sum of gradients over replicas."""

    def wait_reduced(self) -> None: ...


BucketType = Callable[[Sequence[Tensor], dist.ProcessGroup | None], Bucket]


class RankBuckets:
    """All buckets of one rank. Each parameter is in one; one that is `tied` to another rank's, alone in it.

    Both ends of a tied parameter then hold the same part of it. What belongs to no chunk's bucket is in that
    of the whole stage, if there is one; what is in none at all is not reduced, and `rest`. Parameters whose
    gradients a tensor-parallel group makes in `partial` sums stand first in their bucket.
    """

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        chunks: Mapping[str, tuple[Chunk, ...]],
        bucket_type: BucketType,
        tied: Sequence[Tensor] = (),
        partial: Sequence[Tensor] = (),
    ) -> None:
        self._plan, self._groups, self._chunks, self._bucket_type = plan, groups, chunks, bucket_type
        self._tied = {id(parameter) for parameter in tied}
        self._partial = {id(parameter) for parameter in partial}
        self._modules: dict[Bucket, str] = {}
        self._device = plan.ranks.class_of(groups.rank)
        self._made: dict[tuple[str, int], tuple[Bucket, ...]] = {}
        self._taken: set[int] = set()
        for name in plan.modules:
            self._make_module(name)
        self.rest = tuple(chain.from_iterable(self._make_rest(name) for name in plan.modules))

    def __iter__(self) -> Iterator[Bucket]:
        return chain(chain.from_iterable(self._made.values()), self.rest)

    def at(self, module: str, place: int) -> tuple[Bucket, ...]:
        """Of the bucket at a place of the module's stage; none if nothing in it is trained."""
        return self._made.get((module, place), ())

    def needed(self, module: str, chunk: int, layer: int) -> Iterator[Bucket]:
        """Without which a layer of a chunk (or `ALL_LAYERS` of them) cannot run."""
        for place, bucket in enumerate(self._planned(module)):
            whole = bucket.chunk == WHOLE_STAGE
            inside = layer == ALL_LAYERS or bucket.first_layer <= layer < bucket.end_layer
            if whole or (bucket.chunk == chunk and inside):
                yield from self.at(module, place)

    def partial_sums(self, bucket: Bucket) -> Tensor:
        """What of a bucket's gradients is, on this rank, still to be summed over the module's group."""
        count = sum(each.numel() for each in bucket.parameters if id(each) in self._partial)
        return bucket.summed[: max(0, count - bucket.offset)]

    def counted(self, bucket: Bucket) -> Tensor:
        """What of a bucket's gradients counts on this rank: what a whole group holds does so on its first."""
        first = self._plan.ranks.place(self._modules[bucket], self._groups.rank).tp == 0
        return bucket.summed if first else bucket.summed[len(self.partial_sums(bucket)) :]

    def add_partial_sums(self) -> None:
        """Over every module's tensor-parallel group, all of it at once."""
        for name in self._plan.modules:
            group = self._groups.get(f"{name}.tp")
            mine = [bucket for bucket in self if self._modules[bucket] == name]
            parts = [] if group is None else [self.partial_sums(bucket) for bucket in mine]
            parts = [part for part in parts if len(part)]
            if not parts:
                continue
            flat = torch.cat(parts)
            dist.all_reduce(flat, dist.ReduceOp.SUM, group)
            for part, found in zip(parts, flat.split([len(part) for part in parts]), strict=True):
                part.copy_(found)

    def _planned(self, module: str) -> Sequence[PlannedBucket]:
        return self._plan.modules[module].buckets[self._plan.ranks.stage_of(module, self._device)]

    def _make_module(self, name: str) -> None:
        group, before = self._groups.get(f"{name}.dp"), set(self._taken)
        places = list(enumerate(self._planned(name)))
        for place, bucket in sorted(places, key=lambda each: each[1].chunk == WHOLE_STAGE):
            held = self._held(name, bucket)
            mine = [parameter for parameter in held if id(parameter) not in self._taken]
            if bucket.chunk != WHOLE_STAGE and len(mine) < len(held) and group is not None:
                raise _shared(name)
            self._taken |= {id(parameter) for parameter in mine}
            self._made[name, place] = self._make_all(name, mine, group)
        trained = {id(p) for p in trainable_parameters(all_layers({name: self._chunks[name]}))}
        if group is not None and trained - (self._taken - before):
            raise _left_out(name)

    def _make_rest(self, name: str) -> Iterator[Bucket]:
        """Of what no bucket of the plan holds."""
        trained = trainable_parameters(all_layers({name: self._chunks[name]}))
        left = [parameter for parameter in trained if id(parameter) not in self._taken]
        self._taken |= {id(parameter) for parameter in left}
        for alike in _by_type(left):
            yield from self._make_all(name, alike, None)

    def _make_all(
        self, name: str, parameters: Sequence[Tensor], group: dist.ProcessGroup | None
    ) -> tuple[Bucket, ...]:
        """One bucket, and one for each parameter that is tied."""
        tied = [[p] for p in parameters if id(p) in self._tied]
        others = [p for p in parameters if id(p) not in self._tied]
        others.sort(key=lambda parameter: id(parameter) not in self._partial)
        found = tuple(self._bucket_type(part, group) for part in (others, *tied) if part)
        self._modules.update(dict.fromkeys(found, name))
        return found

    def _held(self, name: str, bucket: PlannedBucket) -> list[Tensor]:
        held: list[Tensor] = []
        for number, chunk in enumerate(self._chunks[name]):
            if bucket.chunk == WHOLE_STAGE:
                held += chunk.trainable_parameters(0, len(chunk.layers))
            elif bucket.chunk == number:
                held += chunk.trainable_parameters(bucket.first_layer, bucket.end_layer)
        return held


def all_layers(chunks: Mapping[str, tuple[Chunk, ...]]) -> list[torch.nn.Module]:
    """Every layer on this rank."""
    return list(chain.from_iterable(chunk.layers for own in chunks.values() for chunk in own))


def check_types(parameters: Sequence[Tensor]) -> None:
    """What travels together has one type."""
    types = sorted({str(parameter.dtype) for parameter in parameters})
    if len(types) > 1:
        raise UserError(
            field="parameters",
            problem=f"of one stage or block have the types {' and '.join(types)}",
            hint="give all that one stage or block trains one type",
        )


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """One after another in a flat buffer, each in its shape."""
    sizes = [parameter.numel() for parameter in parameters]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def _by_type(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


def _shared(name: str) -> UserError:
    """One bucket would be reduced while the other part of the gradient is still to come."""
    return UserError(
        field=name,
        problem="has a parameter that two of its buckets share, and is trained on several ranks",
        hint="put what shares a parameter into one stage or block, or plan with the preset `clean`, "
        "whose buckets are whole stages",
    )


def _left_out(name: str) -> UserError:
    """Where a module has replicas, all that it trains must be reduced."""
    return UserError(
        field=f"plan.modules.{name}.buckets",
        problem="leave out parameters that are trained on several ranks",
        hint="plan again for these modules",
    )
