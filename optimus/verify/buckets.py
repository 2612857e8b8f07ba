"""Checks the buckets of a plan: what they hold, and when their parameters and gradients are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optimus.ir.op import COMPUTE_OPS, PARAMETER_TRAFFIC, Ints, OpKind
from optimus.ir.plan import WHOLE_STAGE, Bucket, Plan, Span
from optimus.verify.expected_program import Problems

if TYPE_CHECKING:
    from optimus.verify.waits import WaitDerivation

GRADIENTS = (OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)
READERS = {OpKind.UNSHARD: (OpKind.FORWARD,), OpKind.UNSHARD_B: (OpKind.BACKWARD, OpKind.INPUT_GRAD)}


class BucketLifetime(NamedTuple):
    """Parameters or gradients of a bucket in one microbatch or op."""

    end: int  # line: the last that reads the parameters, or the reduce
    begin: int  # line: the gather, or the first compute that adds to the gradients
    bucket: tuple[str, int]  # module and place
    bytes: int


def list_parameter_lifetimes(derived: WaitDerivation, device: int) -> Iterator[BucketLifetime]:
    """Yields the parameters that a class gathers for less than a step, from gather to last reader."""
    for name, kind, gathers, bucket in _moved_buckets(derived, device):
        if kind not in READERS or bucket.gathered_per == Span.STEP:
            continue
        kinds = READERS[kind]
        kinds += READERS[OpKind.UNSHARD_B] if bucket.gathered_per == Span.MICROBATCH else ()
        blocks = derived.phases_of(device, name, bucket, kinds)
        last = [block.max(axis=1) for block in blocks if block.shape[1]]
        key = name, int(derived.lines.place[gathers[0]])
        for begin, end in zip(gathers.tolist(), np.max(last, axis=0).tolist(), strict=True):
            yield BucketLifetime(end, begin, key, bucket.gather_bytes)


def list_gradient_lifetimes(derived: WaitDerivation, device: int) -> list[tuple[list[BucketLifetime], int]]:
    """Returns gradients that a class reduces in every microbatch, from first compute to reduce, in order.

    With each list, how many of it are in memory at most: two of layers; one of a bucket of the whole stage,
    each of which has its own list. Gradients are freed when others begin that would be one too many.
    """
    layers, whole = list[BucketLifetime](), list[tuple[list[BucketLifetime], int]]()
    for name, kind, reduces, bucket in _moved_buckets(derived, device):
        if kind != OpKind.REDUCE_GRAD or bucket.reduced_per != Span.MICROBATCH:
            continue
        blocks = derived.phases_of(device, name, bucket, GRADIENTS, compute=True)
        begins = np.min([block.min(axis=1) for block in blocks if block.shape[1]], axis=0)
        key = name, int(derived.lines.place[reduces[0]])
        found = [
            BucketLifetime(end, begin, key, bucket.reduce_bytes)
            for begin, end in zip(begins.tolist(), reduces.tolist(), strict=True)
        ]
        if bucket.chunk == WHOLE_STAGE:
            whole.append((sorted(found), 1))
        else:
            layers += found
    return [(sorted(layers), 2), *whole]


def _moved_buckets(derived: WaitDerivation, device: int) -> Iterator[tuple[str, OpKind, Ints, Bucket]]:
    """Yields module, kind of traffic, lines by microbatch and bucket of all traffic on a class."""
    for (at, name, kind, _), _, rows in derived.lines.all_blocks():
        if at == device and kind in PARAMETER_TRAFFIC:
            for column in rows.T:
                yield name, kind, column, derived.bucket_of(device, name, int(column[0]))


# ---------------------------------------------------------------------------- rules


def list_span_problems(plan: Plan, name: str, stage: int) -> Problems:
    """Yields buckets that are moved for ops without phases of their layers, and chunks of several spans."""
    module = plan.modules[name]
    for place, bucket in enumerate(module.buckets[stage]):
        if max(bucket.gathered_per, bucket.reduced_per) == Span.STEP:
            continue
        kinds = {
            kind
            for kind in COMPUTE_OPS
            for chunk in range(module.layout.chunks)
            for phase in plan.template_of(name, kind, stage, chunk)
            if _holds(bucket, chunk, phase.layer)
        }
        where, backward = f"{name} stage {stage} bucket {place}", {OpKind.BACKWARD, OpKind.INPUT_GRAD}
        if bucket.chunk == WHOLE_STAGE and bucket.gathered_per == Span.OP:
            yield where, "is of the whole stage and gathered for single ops"
        elif bucket.gathered_per > Span.STEP and OpKind.FORWARD not in kinds:
            yield where, "is gathered for a forward that has no phase of its layers"
        elif bucket.gathered_per == Span.OP and not kinds & backward:
            yield where, "is gathered for a backward that has no phase of its layers"
        elif bucket.reduced_per == Span.MICROBATCH and not kinds - {OpKind.FORWARD}:
            yield where, "is reduced without a backward of its layers"
    for spans in ("gathered_per", "reduced_per"):
        for chunk in range(module.layout.chunks):
            found = {getattr(b, spans) for b in module.buckets[stage] if max(b.chunk, 0) == chunk}
            if len({span == Span.STEP for span in found - {Span.NEVER}}) > 1:
                yield f"{name} stage {stage} chunk {chunk}", f"has buckets {spans} step and others"


def check_trained_layers_in_buckets(plan: Plan) -> Problems:
    """Checks that replicated weights that are trained are gathered before their forward and reduced."""
    for name, module in plan.modules.items():
        if module.layout.replica_ranks == 1:
            continue
        for virtual, chunk in enumerate(module.chunks):
            number, stage = divmod(virtual, module.layout.pp)
            kinds = [kind for kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD) if kind in chunk.templates]
            trained = {
                phase.layer
                for kind in kinds
                for phase in plan.templates[chunk.templates[kind]]
                if phase.kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD)
            }
            first, last = 0 if virtual == 0 else -1, chunk.layers - 1
            ends = {first, last if virtual == len(module.chunks) - 1 else -1}
            for layer in sorted(trained) if chunk.layers else ():
                mine = _list_buckets_of(layer, number, module.buckets[stage], is_end=layer in ends)
                if not any(bucket.gates for bucket in mine):
                    problem = "is in no bucket" if not mine else "does not wait for its parameters"
                    yield f"{name} stage {stage} chunk {number} layer {layer}", f"is trained and {problem}"
                elif any(bucket.reduced_per == Span.NEVER for bucket in mine):
                    where = f"{name} stage {stage} chunk {number} layer {layer}"
                    yield where, "is trained and its gradients are never reduced"


def _list_buckets_of(layer: int, chunk: int, buckets: Sequence[Bucket], *, is_end: bool) -> list[Bucket]:
    """Returns the buckets that move a layer: those of its chunk that hold it, and one of the whole stage.

    Moved once a step, the latter holds a share of every layer, and chunks without buckets. Moved more often,
    it holds the tied ends of the LLM alone.
    """
    whole = [bucket for bucket in buckets if bucket.chunk == WHOLE_STAGE]
    of_chunk = [bucket for bucket in buckets if bucket.chunk == chunk]
    of_layer = [bucket for bucket in of_chunk if _holds(bucket, chunk, layer)]
    once = all(max(bucket.gathered_per, bucket.reduced_per) == Span.STEP for bucket in whole)
    if of_layer:
        return of_layer + whole if once else of_layer
    return whole if is_end or (once and not of_chunk) else []


def _holds(bucket: Bucket, chunk: int, layer: int) -> bool:
    inside = bucket.first_layer <= layer < bucket.end_layer
    return bucket.chunk == WHOLE_STAGE or (bucket.chunk == chunk and inside)


def check_bucket_lifetimes(derived: WaitDerivation) -> Problems:
    """Checks that a bucket is not gathered while it is, and that microbatches do not mix their gradients."""
    for device in range(derived.ranks.num_classes):
        gradients = [of for of, _ in list_gradient_lifetimes(derived, device)]
        for lifetimes, what in (
            (list_parameter_lifetimes(derived, device), "is gathered before its last reader"),
            (chain.from_iterable(gradients), "has new gradients before the reduce of others"),
        ):
            latest: dict[tuple[str, int], int] = {}
            for each in sorted(lifetimes, key=lambda lifetime: lifetime.begin):
                end = latest.get(each.bucket, -1)
                if each.begin <= end:
                    yield derived.lines.text(each.begin), f"{what}, {derived.lines.text(end)}"
                latest[each.bucket] = max(end, each.end)
