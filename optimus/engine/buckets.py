"""Groups a rank's parameters into the plan's buckets: units whose values and gradients move together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from optimus.engine.optimizer_config import ParamGroup
from optimus.engine.process_groups import ProcessGroups
from optimus.errors import UserError
from optimus.ir.plan import WHOLE_STAGE, Bucket, Plan, Span
from optimus.models.chunk import trainable_parameters
from optimus.models.phase_order import ALL_LAYERS
from optimus.protocols import Chunk, MovedBucket, ParamBucket

if TYPE_CHECKING:
    from optimus.engine.sharded_bucket import FrozenBucket

# Of parameters, their group and, where it is not one step, for how much they are gathered and reduced.
BucketType = Callable[..., ParamBucket]
FrozenType = Callable[[Sequence[Tensor], dist.ProcessGroup | None, Span], "FrozenBucket"]
GroupOf = Callable[[Tensor], ParamGroup]


def group_all(parameter: Tensor) -> ParamGroup:
    """Puts all parameters into one group, for optimizers that are not ours."""
    return ParamGroup(weight_decay=0.0, lr=0.0)


class ReplicatedBucket:
    """Parameters that every replica holds in full, with gradients in one buffer that is all-reduced.

    Callers with an optimizer of their own read `grad`, as after any backward: a step adds to what they leave
    there.
    """

    shard_offset = 0
    is_sharded = False

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        check_one_dtype(parameters)
        self.parameters, self.group = list(parameters), group
        like = self.parameters[0]
        size = sum(parameter.numel() for parameter in self.parameters)
        self.reduced_grad = torch.zeros(size, dtype=like.dtype, device=like.device)
        self._views = view_as_params(self.reduced_grad, self.parameters)
        self._earlier: Tensor | None = None  # gradients of earlier steps, which must not be reduced again
        self._work: dist.Work | None = None

    def local_grad(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad

    def begin_step(self) -> None:
        """Sets aside what earlier steps left in `grad`, if anything."""
        if any(parameter.grad is not None for parameter in self.parameters):
            self._earlier = torch.zeros_like(self.reduced_grad)
            for parameter, view in zip(
                self.parameters, view_as_params(self._earlier, self.parameters), strict=True
            ):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
        self.reduced_grad.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def end_step(self) -> None:
        if self._earlier is not None:
            self.reduced_grad.add_(self._earlier)
            self._earlier = None

    def gather(self) -> None:
        """Does nothing: parameters are never sharded."""

    def wait_gathered(self) -> None:
        """Does nothing: parameters are never sharded."""

    def reduce(self) -> None:
        if self.group is not None:
            self._work = dist.all_reduce(self.reduced_grad, dist.ReduceOp.SUM, self.group, async_op=True)

    def wait_reduced(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def free_parameters(self) -> None:
        """Does nothing: parameters are never sharded."""

    def begin_gradients(self) -> None:
        """Does nothing: gradients are reduced once a step."""


class RankBuckets:
    """All buckets of one rank; each parameter is in exactly one.

    A parameter that is `tied` to another rank's has a bucket of its own, so that both ends hold the same
    shard of it (FSDP2 shards every parameter alike at both). Parameters outside the plan's chunk buckets are
    in the bucket of the whole stage, if there is one; those that the plan does not reduce at all are in
    `unplanned`. Parameters whose gradients are `partial` sums over a tensor-parallel group come first in
    their bucket. Among them and among the others, parameters of one group (`group_of`) of the optimizer are
    together; groups with most decay meet in the middle.
    """

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        chunks: Mapping[str, tuple[Chunk, ...]],
        bucket_type: BucketType,
        tied: Sequence[Tensor] = (),
        partial: Sequence[Tensor] = (),
        group_of: GroupOf = group_all,
        frozen_type: FrozenType | None = None,
    ) -> None:
        self._plan, self._groups, self._chunks, self._bucket_type = plan, groups, chunks, bucket_type
        self._frozen_type = frozen_type
        self._frozen: dict[tuple[str, int], FrozenBucket] = {}
        self._group_of = group_of
        self._tied = {id(parameter) for parameter in tied}
        self._partial = {id(parameter) for parameter in partial}
        self._module_of: dict[ParamBucket, str] = {}
        self._device = plan.ranks.class_of(groups.rank)
        self._planned: dict[tuple[str, int], tuple[ParamBucket, ...]] = {}
        self._assigned: set[int] = set()
        for name in plan.modules:
            self._make_planned(name)
        self.unplanned = tuple(chain.from_iterable(self._make_unplanned(name) for name in plan.modules))

    def __iter__(self) -> Iterator[ParamBucket]:
        return chain(chain.from_iterable(self._planned.values()), self.unplanned)

    @property
    def frozen(self) -> tuple[FrozenBucket, ...]:
        """Buckets of frozen parameters that are sharded; others are whole on every rank."""
        return tuple(self._frozen.values())

    def at(self, module: str, place: int) -> tuple[MovedBucket, ...]:
        """Returns the buckets at a place of the module's stage; none if it moves nothing."""
        frozen = self._frozen.get((module, place))
        return (*self._planned.get((module, place), ()), *(() if frozen is None else (frozen,)))

    def needed_by(self, module: str, chunk: int, layer: int) -> Iterator[MovedBucket]:
        """Yields the buckets of a step that hold parameters of a layer of a chunk (or of `ALL_LAYERS`)."""
        for place, bucket in enumerate(self._buckets_of(module)):
            if bucket.gathered_per > Span.STEP:
                continue
            in_bucket = layer == ALL_LAYERS or bucket.first_layer <= layer < bucket.end_layer
            if bucket.chunk == WHOLE_STAGE or (bucket.chunk == chunk and in_bucket):
                yield from self.at(module, place)

    def partial_sums(self, bucket: ParamBucket) -> Tensor:
        """Returns the gradients of a bucket that are yet to be summed over the tensor-parallel group."""
        count = sum(parameter.numel() for parameter in bucket.parameters if id(parameter) in self._partial)
        return bucket.reduced_grad[: max(0, count - bucket.shard_offset)]

    def grad_for_norm(self, bucket: ParamBucket) -> Tensor:
        """Returns the gradients that enter the norm on this rank.

        Gradients that every rank of a tensor-parallel group holds enter it on the first rank only.
        """
        first = self._plan.ranks.place(self._module_of[bucket], self._groups.rank).tp == 0
        return bucket.reduced_grad if first else bucket.reduced_grad[len(self.partial_sums(bucket)) :]

    def reduce_partial_sums(self) -> None:
        """All-reduces partial sums over each module's tensor-parallel group, in one call per module."""
        for name in self._plan.modules:
            group = self._groups.get(f"{name}.tp")
            if group is None:
                continue
            sums = [self.partial_sums(bucket) for bucket in self if self._module_of[bucket] == name]
            sums = [part for part in sums if len(part)]
            if not sums:
                continue
            flat = torch.cat(sums)
            dist.all_reduce(flat, dist.ReduceOp.SUM, group)
            for part, total in zip(sums, flat.split([len(part) for part in sums]), strict=True):
                part.copy_(total)

    def _buckets_of(self, module: str) -> Sequence[Bucket]:
        return self._plan.modules[module].buckets[self._plan.ranks.stage_of(module, self._device)]

    def _make_planned(self, name: str) -> None:
        group, before = self._groups.get(f"{name}.dp"), set(self._assigned)
        places = list(enumerate(self._buckets_of(name)))
        for place, bucket in sorted(places, key=lambda pair: pair[1].chunk == WHOLE_STAGE):
            held = self._parameters_in(name, bucket)
            unassigned = [parameter for parameter in held if id(parameter) not in self._assigned]
            if bucket.chunk != WHOLE_STAGE and len(unassigned) < len(held) and group is not None:
                raise _shared_parameter(name)
            self._assigned |= {id(parameter) for parameter in unassigned}
            spans = bucket.gathered_per, bucket.reduced_per
            if max(spans) == Span.STEP:
                self._planned[name, place] = self._make(name, unassigned, group)
                continue
            if self._frozen_type is None:
                raise _cannot_reshard(name)
            self._planned[name, place] = self._make(name, unassigned, group, *spans)
            frozen = self._frozen_in(name, bucket) if bucket.gathered_per > Span.STEP else []
            if frozen:
                self._assigned |= {id(parameter) for parameter in frozen}
                self._frozen[name, place] = self._frozen_type(frozen, group, bucket.gathered_per)
        trained = {id(p) for p in trainable_parameters(list_all_layers({name: self._chunks[name]}))}
        if group is not None and trained - (self._assigned - before):
            raise _missing_parameter(name)

    def _make_unplanned(self, name: str) -> Iterator[ParamBucket]:
        """Makes buckets, one per dtype, of parameters that no bucket of the plan holds."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in trainable_parameters(list_all_layers({name: self._chunks[name]})):
            if id(parameter) not in self._assigned:
                self._assigned.add(id(parameter))
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            yield from self._make(name, parameters, None)

    def _make(
        self, name: str, parameters: Sequence[Tensor], group: dist.ProcessGroup | None, *spans: Span
    ) -> tuple[ParamBucket, ...]:
        """Makes one bucket, and one for each tied parameter."""
        tied = [[p] for p in parameters if id(p) in self._tied and not isinstance(p, DTensor)]
        untied = [p for p in parameters if id(p) not in self._tied or isinstance(p, DTensor)]
        partial = sorted((p for p in untied if id(p) in self._partial), key=self._group_of)
        whole = sorted((p for p in untied if id(p) not in self._partial), key=self._group_of, reverse=True)
        parts = [part for part in ([*partial, *whole], *tied) if part]
        buckets = tuple(self._bucket_type(part, group, *spans) for part in parts)
        self._module_of.update(dict.fromkeys(buckets, name))
        return buckets

    def _parameters_in(self, name: str, bucket: Bucket) -> list[Tensor]:
        parameters: list[Tensor] = []
        for number, chunk in enumerate(self._chunks[name]):
            if bucket.chunk == WHOLE_STAGE:
                parameters += chunk.trainable_parameters(0, len(chunk.layers))
            elif bucket.chunk == number:
                parameters += chunk.trainable_parameters(bucket.first_layer, bucket.end_layer)
        return parameters

    def _frozen_in(self, name: str, bucket: Bucket) -> list[Tensor]:
        """Returns the frozen parameters of a bucket that no other holds, each once."""
        of_bucket = range(bucket.first_layer, bucket.end_layer)
        held = {
            id(parameter): parameter
            for number, chunk in enumerate(self._chunks[name])
            for at, layer in enumerate(chunk.layers)
            if bucket.chunk == WHOLE_STAGE or (bucket.chunk == number and at in of_bucket)
            for parameter in layer.parameters()
            if not parameter.requires_grad and id(parameter) not in self._assigned
        }
        return list(held.values())


def list_all_layers(chunks: Mapping[str, tuple[Chunk, ...]]) -> list[torch.nn.Module]:
    """Returns every layer of some modules on this rank."""
    return list(chain.from_iterable(chunk.layers for of_module in chunks.values() for chunk in of_module))


def check_one_dtype(parameters: Sequence[Tensor]) -> None:
    """Raises if parameters of one bucket have several dtypes."""
    dtypes = sorted({str(parameter.dtype) for parameter in parameters})
    if len(dtypes) > 1:
        raise UserError(
            field="parameters",
            problem=f"of one stage or block have the types {' and '.join(dtypes)}",
            hint="give all that one stage or block trains one type",
        )


def view_as_params(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of a flat buffer, one after another, in the shapes of parameters."""
    sizes = [parameter.numel() for parameter in parameters]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def _shared_parameter(name: str) -> UserError:
    # One bucket would be reduced before the other has added its part of the gradient.
    return UserError(
        field=name,
        problem="has a parameter that two of its buckets share, and is trained on several ranks",
        hint="put what shares a parameter into one stage or block, or plan with the preset `paper`, "
        "whose buckets are whole stages",
    )


def _cannot_reshard(name: str) -> UserError:
    return UserError(
        field=f"plan.modules.{name}.buckets",
        problem="are gathered or reduced in every microbatch, which modules of one's own do not do here",
        hint="plan with another system than fsdp",
    )


def _missing_parameter(name: str) -> UserError:
    # A module with replicas must reduce all that it trains.
    return UserError(
        field=f"plan.modules.{name}.buckets",
        problem="leave out parameters that are trained on several ranks",
        hint="plan again for these modules",
    )
