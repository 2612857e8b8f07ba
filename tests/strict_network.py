"""A c10d backend that is as strict as NCCL where gloo, which carries its bytes, is not.

Rules, each of which gloo lets programs break unseen:

- The first operation of a kind in a communicator, and the first message between two peers in one direction,
  connect: the host blocks there until all members have come.
- A communicator runs its operations one at a time, in the order in which a rank posted them, and all members
  post the same ones: same kind, sizes and dtypes. A send ends when its receive has been posted.
- A rank has `queues` launch queues, which communicators share in turn. An operation does not start before
  all that precede it in its queue have: one that waits for its communicator holds up those of others.
- At most `pending` operations of a queue are posted and not ended; then the host blocks.
- Once the network is `sealed`, before the first step, only the default group connects.

A rule that is broken, or that nobody can keep any more, is named with rank, communicator and operation.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from threading import BoundedSemaphore
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.gloo_group import GlooGroup, PythonWork, make_gloo_backend, make_loopback_device
from benchmarks.ranks import run_processes

MANY_QUEUES = 1_000  # of their own for all communicators
SEND, RECEIVE = "send", "receive"
KINDS = [
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "broadcast",
    "scatter",
    "gather",
    "barrier",
    "send",
    "receive",
]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
POLL_S = 0.002
HEADER_TAG = 1 << 20  # of messages in which members agree


class BrokenRule(RuntimeError):
    """A rule of the network that a program broke."""


class StrictNetwork:
    """The launch queues of one rank."""

    group_type: type[StrictGroup]

    def __init__(
        self,
        *,
        queues: int = MANY_QUEUES,
        pending: int = 1_000,
        timeout_s: float = 20.0,
        sealed: bool = False,
    ) -> None:
        self.queues, self.pending, self.timeout_s = queues, pending, timeout_s
        self.sealed = sealed  # whether no group but the default one may connect any more
        self._queues: dict[int, _Queue] = {}
        self._made = 0

    def register(self, name: str = "strict") -> None:
        """Registers the backend `name` in this process."""
        dist.Backend.register_backend(name, self._make_group, extended_api=True, devices=["cpu"])

    @cached_property
    def _device(self) -> Any:
        return make_loopback_device()

    def _make_group(self, options: Any, _: object) -> StrictGroup:
        timeout = timedelta(seconds=self.timeout_s)
        return self.group_type(options, partial(make_gloo_backend, self._device, options, timeout), self)

    def make_communicator(self, ranks: Sequence[int]) -> _Communicator:
        """Makes a communicator on the next queue; those of one rank take none."""
        number = self._made % self.queues
        if number not in self._queues:
            self._queues[number] = _Queue(self.pending)
        self._made += len(ranks) > 1
        return _Communicator(ranks, self._queues[number])


class _Queue:
    """Starts operations in the order in which they were posted."""

    def __init__(self, pending: int) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strict-queue")
        self.room = BoundedSemaphore(pending)
        self.head = ""  # the operation to start next, or the last one that was started


class _Communicator:
    """Runs operations one at a time."""

    def __init__(self, ranks: Sequence[int], queue: _Queue) -> None:
        self.ranks, self.queue, self.posted = tuple(ranks), queue, 0
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strict-communicator")
        self.last: Future[None] | None = None

    def post(self, run: Callable[[], None], named: str, ready: Callable[[], None]) -> Future[None]:
        """Runs an operation after the last one, once its queue has come to it and it is `ready`."""
        previous, done = self.last, Future[None]()
        self.last = done

        def execute() -> None:
            try:
                run()
            except Exception as error:  # raised where it is waited for
                done.set_exception(error)
            else:
                done.set_result(None)

        def start() -> None:
            self.queue.head = named
            if previous is not None:
                previous.exception()
            ready()
            self.thread.submit(execute)

        self.queue.thread.submit(start)
        return done


class StrictWork(PythonWork):  # type: ignore[misc]
    """An operation in its queue."""

    def __init__(self, done: Future[None], describe: Callable[[], str], timeout_s: float) -> None:
        super().__init__()
        self._done, self._describe, self._timeout_s = done, describe, timeout_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._done.result(2 * self._timeout_s)
        except TimeoutError:
            raise BrokenRule(self._describe()) from None
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def synchronize(self) -> None:
        self.wait()


class StrictGroup(GlooGroup):
    """A group of ranks: a communicator, and one for each pair that sends messages where there are more."""

    backend_name = "strict"

    def __init__(self, options: Any, make_carrier: Callable[[], Any], network: StrictNetwork) -> None:
        super().__init__(options.group_rank, options.group_size, make_carrier)
        self._ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self._mine, self._store, self._network = options.group_rank, options.store, network
        self._communicators: dict[tuple[int, ...], _Communicator] = {}
        self._connected: set[str] = set()
        if options.group_size > 1:
            self._communicator(range(options.group_size))

    def collective(
        self, kind: str, tensors: Sequence[Tensor], carry: Callable[[], Sequence[Any]]
    ) -> StrictWork:
        return self._post(kind, tensors, carry, range(self.members), kind)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> StrictWork:
        members, direction = sorted((self._mine, to)), f"message to {self._ranks[to]}"
        return self._post(SEND, tensors, lambda: [self.carrier.send(tensors, to, tag)], members, direction)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> StrictWork:
        members, direction = sorted((self._mine, source)), f"message to {self._ranks[self._mine]}"
        return self._post(
            RECEIVE, tensors, lambda: [self.carrier.recv(tensors, source, tag)], members, direction
        )

    def _communicator(self, members: Sequence[int]) -> _Communicator:
        key = tuple(members)
        if key not in self._communicators:
            ranks = [self._ranks[member] for member in members]
            self._communicators[key] = self._network.make_communicator(ranks)
        return self._communicators[key]

    # ------------------------------------------------------------------ rules

    def _connect(self, what: str, members: Sequence[int], named: str) -> None:
        """Blocks the host until all members have come to this point."""
        if what in self._connected or len(members) == 1:
            return
        if self._network.sealed and self.description != "default_pg":
            raise BrokenRule(f"{named} connects in a step: {what}")
        self._store.set(f"strict/{what}/{members}/{self._mine}", "1")
        missing, deadline = list(members), time.monotonic() + self._network.timeout_s
        while missing:
            missing = [each for each in missing if not self._store.check([f"strict/{what}/{members}/{each}"])]
            if missing and time.monotonic() > deadline:
                away = ", ".join(str(self._ranks[each]) for each in missing)
                raise BrokenRule(f"{named} blocks the host in its first {what}: rank {away} does not come")
            time.sleep(POLL_S if missing else 0.0)
        self._connected.add(what)

    def _post(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        carry: Callable[[], Sequence[Any]],
        members: Sequence[int],
        connection: str,
        ready: Callable[[], None] = lambda: None,
    ) -> StrictWork:
        communicator = self._communicator(members)
        where = f"rank {self._ranks[self._mine]}: {self.description or 'the default group'}"
        where += f" of ranks {list(communicator.ranks)}"
        self._connect(connection, members, where)
        queue, number = communicator.queue, communicator.posted
        communicator.posted += 1
        named = f"{where}, operation {number}: {describe(kind, tensors)}"
        if not queue.room.acquire(timeout=self._network.timeout_s):
            raise BrokenRule(f"{named} is posted behind {self._network.pending} others: {queue.head}")
        header = make_header(number, kind, tensors)

        def run() -> None:
            try:
                for member, other in self._exchange(header, members, named):
                    expected = header.clone()
                    expected[1] = _PAIRED.get(int(header[1]), int(header[1]))
                    if not torch.equal(other, expected):
                        met = f"{describe_header(other)} of rank {self._ranks[member]}"
                        raise BrokenRule(f"{named} meets {met}")
                for work in carry():
                    work.wait()
            finally:
                queue.room.release()

        def stuck() -> str:
            return f"{named} has not ended; its queue is at {queue.head}"

        return StrictWork(communicator.post(run, named, ready), stuck, self._network.timeout_s)

    def _exchange(self, header: Tensor, members: Sequence[int], named: str) -> list[tuple[int, Tensor]]:
        """Returns the operations that the other members run here; ends when all have come to it."""
        others = [(member, torch.zeros_like(header)) for member in members if member != self._mine]
        tag = HEADER_TAG + crc32(bytes(str(list(members)), "ascii")) % HEADER_TAG  # the communicator's own
        try:  # a member that has ended refuses the send, and never comes either
            works = [self.carrier.send([header], member, tag) for member, _ in others]
            works += [self.carrier.recv([other], member, tag) for member, other in others]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise BrokenRule(f"{named} waits for members that do not come to it") from error
        return others


StrictNetwork.group_type = StrictGroup
_PAIRED = {KINDS.index(SEND): KINDS.index(RECEIVE), KINDS.index(RECEIVE): KINDS.index(SEND)}


def run_strict_ranks(
    function: Callable[[int], Any],
    world: int,
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **rules: Any,
) -> list[Any]:
    """Returns what `function(rank)` returns on every rank, or the rule that it broke, as text."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["strict_network"])
    return run_processes(context, _rank_main, world, function, around, rules, timeout_s=60.0)


def _rank_main(
    rank: int,
    world: int,
    store: str,
    report: object,
    function: Callable[[int], Any],
    around: Callable[[], AbstractContextManager[Any]],
    rules: dict[str, Any],
) -> Any:
    torch.set_num_threads(1)
    StrictNetwork(**rules).register()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    with around():
        try:
            result = function(rank)
        except BrokenRule as broken:
            result = str(broken)
    dist.barrier()
    return result


def make_header(number: int, kind: str, tensors: Sequence[Tensor]) -> Tensor:
    """Returns what all members must agree on: place, kind, elements and dtypes."""
    dtypes = [DTYPES.index(tensor.dtype) for tensor in tensors]
    dtype = dtypes[0] if len(set(dtypes)) == 1 else -1 - sum(dtypes)
    elements = sum(tensor.numel() for tensor in tensors)
    if kind == "all-to-all":  # whose parts differ from rank to rank
        elements = 0
    return torch.tensor([number, KINDS.index(kind), elements, dtype])


def describe_header(header: Tensor) -> str:
    """Describes another member's operation."""
    number, kind, elements, dtype = map(int, header)
    name = str(DTYPES[dtype]).removeprefix("torch.") if dtype >= 0 else "several dtypes"
    return f"operation {number}: {KINDS[kind]} of {elements} elements of {name}"


def describe(kind: str, tensors: Sequence[Tensor]) -> str:
    """Describes an operation by what it moves."""
    names = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    elements = sum(tensor.numel() for tensor in tensors)
    return f"{kind} of {elements} elements of {', '.join(names) or 'nothing'}"
