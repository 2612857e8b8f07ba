"""A device on the CPU that is as asynchronous as a GPU: streams, events, memory that is used again at once.

Rules, each of which a CPU lets programs break unseen:

- The host posts ops on the current stream and goes on; a stream is a thread that runs its ops in order. An op
  that reads or writes what another stream writes comes after it, by an event that the other recorded.
- Memory belongs to the stream on which it was allocated. What the host drops is overwritten with NaN behind
  the ops that are on this stream then, as the next tensor there might do; ops of other streams come before,
  by an event or by `record_stream`.
- The host waits where it reads numbers: `item`, `tolist`, shapes that depend on data.

Streams and events stand in for those of `torch.cuda`. A dispatch mode posts every op on tensors of the CPU:
shapes come from meta tensors, numbers from the same kernels as ever, in the same order of every stream.
A broken rule is named with the op, the streams and the line of the program that posted it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import strict_network
import torch
from strict_network import StrictGroup, StrictNetwork, StrictWork
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from benchmarks import gloo_group
from optimus.engine import p2p
from optimus.models import collectives

_NUMPY = Tensor.numpy  # which waits while the device runs
POISON = 255  # every byte: NaN in floating point, -1 in integers
EMPTY = {
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
HOST_WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
BELOW = (__file__, strict_network.__file__, gloo_group.__file__, str(Path(torch.__file__).parent))


class BrokenOrder(RuntimeError):
    """Ops of two streams that no event orders, or memory that was freed too early."""


# ---------------------------------------------------------------------------- time


class Clock:
    """Counts what is posted on a stream, and what of other streams comes before what is posted next."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self._before: dict[Clock, int] = {}

    def tick(self) -> int:
        self.count += 1
        return self.count

    def comes_after(self, other: Clock, count: int) -> bool:
        """Returns whether what is posted now comes after the op `count` of another stream."""
        if other is self or self._before.get(other, 0) >= count:
            return True
        return DEVICE.host is not self and DEVICE.host.comes_after(other, count)

    def snapshot(self) -> dict[Clock, int]:
        """Returns what comes before an event that is recorded now."""
        return {**self._before, self: self.count}

    def wait_for(self, snapshot: dict[Clock, int]) -> None:
        for clock, count in snapshot.items():
            self._before[clock] = max(self._before.get(clock, 0), count)


class Event:
    """A point of a stream, once it was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.before: dict[Clock, int] = {}
        self.done: Future[None] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or DEVICE.current
        self.before, self.done = stream.clock.snapshot(), stream.post(lambda: None)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or DEVICE.current).wait_event(self)

    def query(self) -> bool:
        done = self.done is None or self.done.done()
        if done:
            DEVICE.host.wait_for(self.before)
        return done

    def synchronize(self) -> None:
        self.reached()
        DEVICE.host.wait_for(self.before)
        DEVICE.raise_broken()

    def reached(self) -> None:
        """Waits for the event on a thread that is not the host."""
        if self.done is not None:
            self.done.result()


class Stream:
    """Runs what is posted on it, in order, on a thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        number = len(DEVICE.streams)
        DEVICE.streams.append(self)
        self.clock = Clock(f"stream {number}")
        self._posted: SimpleQueue[tuple[Callable[[], object], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=self.clock.name, daemon=True)
        self._thread.start()

    def post(self, run: Callable[[], object]) -> Future[None]:
        done = Future[None]()
        self._posted.put((run, done))
        return done

    def __len__(self) -> int:
        """Ops that were posted and did not begin."""
        return self._posted.qsize()

    def __bool__(self) -> bool:
        return True

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.clock.wait_for(event.before)
        if event.done is not None:
            self.post(event.done.result)  # of this record, not of a later one

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def stop(self) -> None:
        self._posted.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (posted := self._posted.get()) is not None:
            run, done = posted
            try:
                run()
            except BaseException as error:
                DEVICE.broken.append(error)
            done.set_result(None)  # streams go on: the host is told where it waits
            del run, done, posted


# ---------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Access:
    """Bytes of a block that an op reads or writes."""

    first: int
    end: int
    clock: Clock
    count: int
    writes: bool
    named: str


@dataclass(eq=False)
class Block:
    """Memory of one storage; `memory` outlives it, and none is there for what the device did not allocate."""

    stream: Stream
    memory: Tensor | None = None
    accesses: list[Access] = field(default_factory=list)
    recorded: set[Stream] = field(default_factory=set)

    def access(self, new: Access, clock: Clock) -> None:
        """Checks that an op comes after all that it conflicts with, which it then stands for."""
        kept = []
        for old in self.accesses:
            meets = old.first < new.end and new.first < old.end
            ordered = clock.comes_after(old.clock, old.count)
            if meets and not ordered and (old.writes or new.writes):
                raise BrokenOrder(f"{new.named} does not wait for {old.named}")
            inside = new.first <= old.first and old.end <= new.end
            if not (ordered and inside and (new.writes or (old.clock is new.clock and not old.writes))):
                kept.append(old)
        self.accesses = [*kept, new]


class AsyncDevice(TorchDispatchMode):  # type: ignore[misc]
    """Posts ops on streams while it is entered; `installed` makes `torch.cuda` stand for it."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.host = Clock("host")  # what it knows to have run
        self.broken: list[BaseException] = []
        self.runs = False
        self.line: int | None = None  # of the plan's program
        # The last operation of every communicator, and what comes before its end.
        self.in_flight: dict[Clock, tuple[StrictWork, dict[Clock, int]]] = {}
        self._blocks: dict[int, Block] = {}
        self._specs: dict[Any, Any] = {}

    def start(self) -> None:
        """Makes the stream on which everything runs that says no other."""
        self.default = self.current = Stream()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Posts the ops of a block, and waits for them at its end."""
        with ExitStack() as stack:
            for name in ("tolist", "numpy", "__array__"):
                read = getattr(Tensor, name)
                stack.enter_context(patch.object(Tensor, name, self._reading(read)))
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", self._resizing()))
            self.runs = True
            try:
                with self:
                    yield
            finally:
                self.runs = False
            self.synchronize()

    def synchronize(self, *_: Any) -> None:
        for event in [stream.record_event() for stream in self.streams]:
            event.synchronize()
        for work, before in self.in_flight.values():
            work.wait()
            self.host.wait_for(before)

    def raise_broken(self) -> None:
        if self.broken:
            raise self.broken[0]

    # ------------------------------------------------------------------ as torch.cuda

    def current_stream(self, *_: Any) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # ------------------------------------------------------------------ ops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if any(each.alias_info and not each.alias_info.is_write for each in schema.returns):
            return func(*args, **kwargs)  # a view
        self.raise_broken()
        assert torch.Tag.inplace_view not in func.tags, f"{func} changes the shape of its argument"
        written = [
            tensor
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info and argument.alias_info.is_write
            for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
        ]
        if _host_waits(func, args, kwargs):
            return self._run_now(func, args, kwargs, written)
        try:
            outputs = None if written else self._allocate(func, args, kwargs)
        except (NotImplementedError, RuntimeError):  # without a meta kernel
            return self._run_now(func, args, kwargs, [])
        if func.overloadpacket in EMPTY:
            return outputs
        results = tensors_in(outputs)
        run_args, run_kwargs = self.without_storages((args, kwargs))
        into = self.without_storages(results)

        def run() -> None:
            with torch.no_grad():
                found = func(*run_args, **run_kwargs)
                for target, source in zip(into, tensors_in(found), strict=bool(into)):
                    target.copy_(source)

        read = tensors_in((args, kwargs))
        self.post(str(func), run, reads=read, writes=[*written, *results])
        return _returned(schema, args, kwargs) if written else outputs

    def post(
        self, name: str, run: Callable[[], object], *, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        """Posts an op on the current stream."""
        stream = self.current
        self.check(name, stream.clock, reads=reads, writes=writes)
        stream.post(run)

    def check(self, name: str, clock: Clock, *, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Checks that an op comes after those that write what it reads, or use what it writes."""
        count, named = clock.tick(), f"{name} on {clock.name} at {_find_line()}"
        if self.line is not None:
            named += f", line {self.line} of the program"
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                first, end = _span(tensor)
                if first < end:
                    access = Access(first, end, clock, count, writing, named)
                    self.block_of(tensor).access(access, clock)

    def _run_now(self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor]) -> Any:
        """Runs an op whose result the host needs, once all that was posted before it has run."""
        self.check(str(func), self.current.clock, reads=tensors_in((args, kwargs)), writes=written)
        self.current.synchronize()
        run_args, run_kwargs = self.without_storages((args, kwargs))
        found = func(*run_args, **run_kwargs)
        return _returned(func._schema, args, kwargs) if written else found

    def _allocate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns memory for the results of an op, of the shapes that meta tensors have."""
        flat, tree = tree_flatten((args, kwargs))
        key = func, tree, tuple(_spec(each) if isinstance(each, Tensor) else _hashable(each) for each in flat)
        if key not in self._specs:
            meta_args, meta_kwargs = tree_map_only(Tensor, _as_meta, (args, kwargs))
            if any(argument.name == "device" for argument in func._schema.arguments):
                meta_kwargs = {**meta_kwargs, "device": torch.device("meta")}
            self._specs[key] = func(*meta_args, **meta_kwargs)
        return tree_map_only(Tensor, self._empty, self._specs[key])

    def _empty(self, like: Tensor) -> Tensor:
        """Allocates on the current stream; the numbers are those that a freed tensor left."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True))
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        memory = torch.full((size * like.element_size(),), POISON, dtype=torch.uint8)
        tensor = torch.frombuffer(_NUMPY(memory), dtype=like.dtype).as_strided(like.shape, like.stride())
        block = Block(self.current, memory)
        self._keep(tensor, block)
        weakref.finalize(tensor.untyped_storage(), self._freed, block)
        return tensor

    # ------------------------------------------------------------------ memory

    def _allocated(self, block: Block) -> None:
        """Gives other memory, in which nothing is, to a tensor whose memory was given back."""
        assert block.memory is not None
        block.memory = torch.full((len(block.memory),), POISON, dtype=torch.uint8)
        block.stream, block.accesses, block.recorded = self.current, [], set()

    def _keep(self, tensor: Tensor, block: Block) -> None:
        key = tensor.untyped_storage()._cdata
        self._blocks[key] = block
        weakref.finalize(tensor.untyped_storage(), self._blocks.pop, key, None)

    def block_of(self, tensor: Tensor) -> Block:
        key = tensor.untyped_storage()._cdata
        if key not in self._blocks:
            self._keep(tensor, Block(self.default))
        return self._blocks[key]

    def without_storages(self, values: Any) -> Any:
        """Replaces tensors by others on the same memory that do not tell when the host drops it."""

        def replace(tensor: Tensor) -> Tensor:
            block = self._blocks.get(tensor.untyped_storage()._cdata)
            if block is None or block.memory is None:
                return tensor.detach()
            alias = torch.empty(0, dtype=tensor.dtype)
            memory = block.memory.untyped_storage()
            return alias.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

        return tree_map_only(Tensor, replace, values)

    def _freed(self, block: Block) -> None:
        """Gives memory back: behind what is on its stream now, the next tensor may overwrite it."""
        try:
            self._check_freed(block)
        except BrokenOrder as error:
            self.broken.append(error)
        others = block.recorded - {block.stream}
        events = [stream.record_event() for stream in (block.stream, *others) if others]
        memory = block.memory
        if memory is None:
            return

        def overwrite() -> None:
            for event in events:
                event.reached()
            memory.fill_(POISON)

        if events:  # the allocator waits, the stream does not
            threading.Thread(target=overwrite, daemon=True).start()
        else:
            block.stream.post(overwrite)

    def _check_freed(self, block: Block) -> None:
        clocks = [stream.clock for stream in (block.stream, *block.recorded)]
        for old in block.accesses:
            if not any(clock.comes_after(old.clock, old.count) for clock in clocks):
                raise BrokenOrder(f"memory of {block.stream.clock.name} is freed before {old.named} has run")

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.check(read.__name__, self.current.clock, reads=[tensor], writes=[])
            self.current.synchronize()
            with _disable_current_modes():
                return read(self.without_storages(tensor), *args, **kwargs)

        return wait_and_read

    def _resizing(self) -> Callable[..., Any]:
        resize = torch.UntypedStorage.resize_

        def free_or_resize(storage: torch.UntypedStorage, size: int) -> Any:
            block = self._blocks.get(storage._cdata)
            if block is not None and not size:
                self._freed(block)
                self.raise_broken()
            if block is None or block.memory is None:
                for stream in self.streams:  # which hold the storage itself
                    stream.record_event().reached()
                return resize(storage, size)
            assert size in (0, len(block.memory)), "memory that was given back is given again whole"
            if size:
                self._allocated(block)
            return storage

        return free_or_resize


def _host_waits(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Returns whether the host needs the result of an op, or its generator of random numbers."""
    if func is torch.ops.aten.index.Tensor:  # masks have as many rows as they have ones
        return any(each.dtype in (torch.bool, torch.uint8) for each in tensors_in(args[1]))
    if func in ATTENTION:  # draws numbers for dropout alone
        return bool(kwargs.get("dropout_p", args[3] if len(args) > 3 else 0.0))
    return torch.Tag.nondeterministic_seeded in func.tags or bool(HOST_WAITS & set(func.tags))


def tensors_in(values: Any) -> list[Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]


def _returned(schema: Any, args: Any, kwargs: Any) -> Any:
    """Returns the arguments that an op in place returns."""
    by_alias = {}
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            by_alias[frozenset(argument.alias_info.before_set)] = value
    found = [by_alias[frozenset(each.alias_info.before_set)] for each in schema.returns]
    return found[0] if len(found) == 1 else tuple(found) or None


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its storage, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    first = tensor.storage_offset()
    last = first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _spec(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _hashable(value: Any) -> Any:
    return (type(value), value) if value.__hash__ else repr(value)


def _find_line() -> str:
    """Returns the innermost line that is not of torch, of the network or of this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(BELOW):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    DEVICE.block_of(tensor).recorded.add(stream)


# ---------------------------------------------------------------------------- communication


class AsyncWork(StrictWork):
    """An operation that streams wait for; until then it keeps its tensors, as NCCL's do."""

    def __init__(self, work: StrictWork, before: dict[Clock, int], tensors: Sequence[Tensor]) -> None:
        super().__init__(work._done, work._describe, work._timeout_s)
        self._before, self._tensors = before, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not DEVICE.runs:
            return super().wait(timeout)
        DEVICE.current.clock.wait_for(self._before)
        DEVICE.current.post(super().wait)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        done = super().is_completed()
        if done:
            DEVICE.host.wait_for(self._before)
        return done


class AsyncGroup(StrictGroup):
    """Runs operations on a stream of each communicator, after what the current stream held."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._clocks: dict[Any, Clock] = {}
        # What the operation that is posted reads, and what it writes.
        self._operands: tuple[list[Tensor], list[Tensor]] = [], []

    def _post(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        carry: Callable[[], Sequence[Any]],
        members: Sequence[int],
        connection: str,
        ready: Callable[[], None] = lambda: None,
    ) -> StrictWork:
        if not DEVICE.runs:
            return super()._post(kind, tensors, carry, members, connection)
        (reads, writes), self._operands = self._operands, ([], [])
        assert reads or writes or kind == "barrier", f"{kind} by a method that is not wrapped"
        where = f"{self.description or 'the default group'} of rank {self._ranks[self._mine]}"
        clock = self._clocks.setdefault(tuple(members), Clock(where))
        posted = DEVICE.current.record_event()
        clock.wait_for(posted.before)
        DEVICE.check(kind, clock, reads=reads, writes=writes)
        work = super()._post(kind, tensors, carry, members, connection, posted.reached)
        DEVICE.in_flight[clock] = work, clock.snapshot()
        return AsyncWork(work, clock.snapshot(), [*reads, *writes])


def _posting(method: Callable[..., Any], written: Sequence[int], read: Sequence[int]) -> Callable[..., Any]:
    """Runs a method of a group on memory that stays when the host drops its arguments at these places."""

    def post(group: AsyncGroup, *args: Any, **kwargs: Any) -> Any:
        if not DEVICE.runs:
            return method(group, *args, **kwargs)
        group._operands = tensors_in([args[n] for n in read]), tensors_in([args[n] for n in written])
        with _disable_current_modes():
            return method(group, *DEVICE.without_storages(args), **kwargs)

    return post


for _name, (_written, _read) in {
    "allreduce": ([0], []),
    "allgather": ([0], [1]),
    "all_gather_single": ([0], [1]),
    "reduce_scatter": ([0], [1]),
    "reduce_scatter_single": ([0], [1]),
    "all_to_all_single": ([0], [1]),
    "_allgather_base": ([0], [1]),  # before torch 2.13
    "_reduce_scatter_base": ([0], [1]),
    "alltoall_base": ([0], [1]),
    "broadcast": ([0], []),
    "scatter": ([0], [1]),
    "gather": ([0], [1]),
    "send": ([], [0]),
    "recv": ([0], []),
}.items():
    setattr(AsyncGroup, _name, _posting(getattr(StrictGroup, _name), _written, _read))


class AsyncNetwork(StrictNetwork):
    """A strict network whose operations run on streams."""

    group_type = AsyncGroup


# ---------------------------------------------------------------------------- use

DEVICE = AsyncDevice()


@contextmanager
def installed() -> Iterator[AsyncDevice]:
    """Makes streams of `torch.cuda` and of the engine those of the device."""
    DEVICE.start()
    with ExitStack() as stack:
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "current_stream": DEVICE.current_stream,
            "stream": DEVICE.stream,
            "synchronize": DEVICE.synchronize,
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(Tensor, "record_stream", _record_stream))
        for module in (p2p, collectives):
            stack.enter_context(patch.object(module, "has_streams", lambda device: True))
        yield DEVICE
    while DEVICE.streams:
        DEVICE.streams.pop().stop()
