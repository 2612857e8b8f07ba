"""Bugs of an engine on streams, which gloo on a CPU forgives: each with a case, and what must be named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from engine_bugs import Bugs, Plant, bug, wrapped
from torch import Tensor

from optimus.engine import p2p
from optimus.engine.buckets import ReplicatedBucket
from optimus.engine.p2p import P2PMailbox
from optimus.engine.sharded_bucket import FrozenBucket, ShardedBucket
from optimus.models.collectives import AsyncCollective

STREAM_BUGS: Bugs = {}
NAMED: dict[str, str] = {}  # by bug
PIPELINE, TP, SHARDED, FSDP = (
    "two by two interleaved",
    "tp: two stages, encoder too",
    "sharded: two by two",
    "fsdp: four ranks, frozen trunk",
)


def stream_bug(name: str, case: str, named: str) -> Callable[[Plant], Plant]:
    NAMED[name] = named
    return bug(name, case, STREAM_BUGS)


class _Waited:
    """Work that streams do not wait for."""

    def wait(self) -> None:
        """Returns at once."""


# ---------------------------------------------------------------------------- messages


@stream_bug("compute does not wait for a message", PIPELINE, "does not wait for receive on")
def _() -> AbstractContextManager[Any]:
    def take(original: Any, self: P2PMailbox, key: Any) -> Any:
        self._receives = {key: [_Waited()] for key in self._receives}
        return original(self, key)

    return wrapped(P2PMailbox, "take", take)


@stream_bug("a message is not recorded on the stream that reads it", PIPELINE, "is freed before")
def _() -> AbstractContextManager[Any]:
    def take(original: Any, self: P2PMailbox, key: Any) -> Any:
        with patch.object(Tensor, "record_stream", lambda *_: None):
            return original(self, key)

    return wrapped(P2PMailbox, "take", take)


@stream_bug("what is sent is dropped at once", PIPELINE, "is freed before send on")
def _() -> AbstractContextManager[Any]:
    return patch.object(p2p._PendingSends, "add", lambda *_: None)


@stream_bug("a buffer is written while it is sent", PIPELINE, "does not wait for send on")
def _() -> AbstractContextManager[Any]:
    def send(original: Any, self: P2PMailbox, key: Any, *args: Any) -> None:
        tensors = self._tensors[key]
        original(self, key, *args)
        for tensor in tensors:
            tensor.zero_()

    return wrapped(P2PMailbox, "send", send)


@stream_bug("the next message goes into the buffer of the last", PIPELINE, "does not wait for receive on")
def _() -> AbstractContextManager[Any]:
    def empty(original: Any, self: p2p.TensorSpec, device: Any) -> Any:
        known = BUFFERS.setdefault((self.shape, self.dtype), original(self, device))
        return known.view(self.shape)

    BUFFERS: dict[Any, Tensor] = {}
    return wrapped(p2p.TensorSpec, "empty", empty)


# ---------------------------------------------------------------------------- collectives


@stream_bug("compute does not wait for a collective", TP, "does not wait for all-gather on")
def _() -> AbstractContextManager[Any]:
    def wait(original: Any, self: AsyncCollective) -> Any:
        self._work = None
        return original(self)

    return wrapped(AsyncCollective, "wait", wait)


@stream_bug("a collective's tensors are not recorded on the stream that waits", TP, "is freed before")
def _() -> AbstractContextManager[Any]:
    def wait(original: Any, self: AsyncCollective) -> Any:
        self._tensors = ()
        return original(self)

    return wrapped(AsyncCollective, "wait", wait)


@stream_bug("a collective writes over what it reads", TP, "does not wait for all-gather on")
def _() -> AbstractContextManager[Any]:
    def start(original: Any, self: AsyncCollective, work: Any, result: Any, *tensors: Tensor) -> None:
        original(self, work, result, *tensors)
        if len(tensors) == 2 and tensors[1].numel() > tensors[0].numel():
            tensors[1].add_(1)

    return wrapped(AsyncCollective, "__init__", start)


# ---------------------------------------------------------------------------- parameters and gradients


@stream_bug("compute does not wait for parameters", FSDP, "does not wait for all-gather on")
def _() -> AbstractContextManager[Any]:
    return patch.object(FrozenBucket, "wait_gathered", lambda self: None)


@stream_bug("parameters are freed while they are gathered", FSDP, "is freed before all-gather on")
def _() -> AbstractContextManager[Any]:
    def gather(original: Any, self: FrozenBucket) -> None:
        original(self)
        self.free_parameters()

    return wrapped(FrozenBucket, "gather", gather)


@stream_bug("the optimizer does not wait for gradients", SHARDED, "does not wait for reduce-scatter on")
def _() -> AbstractContextManager[Any]:
    return patch.object(ShardedBucket, "wait_reduced", lambda self: None)


@stream_bug("gradients are zeroed while they are reduced", SHARDED, "does not wait for reduce-scatter on")
def _() -> AbstractContextManager[Any]:
    def reduce(original: Any, self: ShardedBucket) -> None:
        original(self)
        self.grad_buffer.zero_()

    return wrapped(ShardedBucket, "reduce", reduce)


@stream_bug("a gradient is added after its reduction began", PIPELINE, "does not wait for all-reduce on")
def _() -> AbstractContextManager[Any]:
    def reduce(original: Any, self: ReplicatedBucket) -> None:
        original(self)
        self.parameters[0].grad.add_(0)

    return wrapped(ReplicatedBucket, "reduce", reduce)
