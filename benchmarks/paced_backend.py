"""A c10d backend with links of a given speed, and ranks that run on it.

gloo carries the bytes; a transfer ends, in ideal time (see paced_clock.py), when its link says so. A message
carries its ideal arrival. A collective starts when its last member has launched it, and ends on all members
when it does on the slowest. As in plans, a send does not wait for its receive; waiting for a send waits until
the message has arrived.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.gloo_group import GlooGroup, PythonWork, make_gloo_backend, make_loopback_device
from benchmarks.paced_clock import PacedClock, PacedLink
from benchmarks.ranks import Report, run_processes

_HEADER_BYTES = 8  # one float64: when the message arrives


class PacedNetwork:
    """Links of one rank, its clock, and the lanes that groups share; `report` sends to the parent process."""

    def __init__(self, clock: PacedClock, link: PacedLink, *, report: Report = lambda message: None) -> None:
        self.clock, self.link, self.report = clock, link, report
        self.sends_free_s: dict[object, float] = {}
        self._lanes: dict[object, _Lane] = {}
        self._groups: list[PacedGroup] = []

    @cached_property
    def _device(self) -> Any:
        return make_loopback_device()

    def register(self, name: str = "paced") -> None:
        """Registers the backend `name`; `pg_options=PacedLink(...)` gives a group its own link."""
        dist.Backend.register_backend(name, self._make_group, extended_api=True, devices=["cpu"])

    def lane(self, key: object) -> _Lane:
        if key not in self._lanes:
            self._lanes[key] = _Lane()
        return self._lanes[key]

    def close(self) -> None:
        """Waits for all launched transfers, and ends the threads of all lanes."""
        for group in self._groups:
            group.shutdown()
        for lane in self._lanes.values():
            lane.thread.shutdown()
        self._groups.clear()
        self._lanes.clear()

    def _make_group(self, options: Any, link: PacedLink | None) -> PacedGroup:
        make_carrier = partial(make_gloo_backend, self._device, options)
        group = PacedGroup(options.group_rank, options.group_size, make_carrier, self, link or self.link)
        self._groups.append(group)
        return group


class _Lane:
    """Runs collectives in the order in which this rank launched them."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paced-lane")
        self.free_s = 0.0  # ideal; used by the thread only


class PacedWork(PythonWork):
    """A transfer. Its data may be read after `wait`, which advances the rank's clock to its end."""

    def __init__(
        self, clock: PacedClock, has_arrived: Callable[[], bool], end_s: Callable[[], float]
    ) -> None:
        super().__init__()
        self._clock, self._has_arrived, self._find_end_s = clock, has_arrived, end_s
        self._end_s: float | None = None

    def end_s(self) -> float:
        """Returns the ideal time of its end; blocks until that is known."""
        if self._end_s is None:
            self._end_s = self._find_end_s()
        return self._end_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._clock.wait_until(self.end_s())
        return True

    def is_completed(self) -> bool:
        if self._end_s is None and not self._has_arrived():
            return False
        return self._clock.has_passed(self.end_s())

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()


class PacedGroup(GlooGroup):
    """A process group whose transfers take the time of its link."""

    backend_name = "paced"

    def __init__(
        self, rank: int, size: int, make_carrier: Callable[[], Any], network: PacedNetwork, link: PacedLink
    ) -> None:
        super().__init__(rank, size, make_carrier)
        self._network, self._link = network, link
        self._in_flight: deque[tuple[Any, Tensor]] = deque()

    def shutdown(self) -> None:
        """Waits for all sends."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()

    # ------------------------------------------------------------------ messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> PacedWork:
        """Sends a copy at once; its ideal start follows the end of earlier sends."""
        (tensor,) = tensors
        network, link = self._network, self._link
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()[0].wait()  # raises if it failed
        key = link.lane or (self, to)
        start_s = max(network.clock.ideal_s, network.sends_free_s.get(key, 0.0))
        end_s = start_s + link.message_s(tensor)
        network.sends_free_s[key] = end_s
        packed = torch.empty(_HEADER_BYTES + tensor.nbytes, dtype=torch.uint8)
        packed[:_HEADER_BYTES].view(torch.float64)[0] = end_s
        packed[_HEADER_BYTES:].copy_(_bytes_of(tensor.detach().contiguous()))
        self._in_flight.append((self.carrier.send([packed], to, tag), packed))
        return PacedWork(network.clock, lambda: True, lambda: end_s)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> PacedWork:
        (tensor,) = tensors
        packed = torch.empty(_HEADER_BYTES + tensor.nbytes, dtype=torch.uint8)
        carried = self.carrier.recv([packed], source, tag)

        def unpack() -> float:
            carried.wait()
            with torch.no_grad():
                tensor.copy_(packed[_HEADER_BYTES:].view(tensor.dtype).view(tensor.shape))
            return float(packed[:_HEADER_BYTES].view(torch.float64)[0])

        return PacedWork(self._network.clock, carried.is_completed, unpack)

    # ------------------------------------------------------------------ collectives

    def collective(
        self, kind: str, tensors: Sequence[Tensor], carry: Callable[[], Sequence[Any]]
    ) -> PacedWork:
        """Runs on the lane's thread, after earlier ones; gloo matches calls by their order."""
        clock, lane = self._network.clock, self._network.lane(self._link.lane or self)
        launched_s, duration_s = clock.ideal_s, self._duration_s(kind, tensors)

        def run() -> float:
            times = torch.tensor([max(launched_s, lane.free_s), duration_s], dtype=torch.float64)
            carried = [self.carrier.allreduce([times], dist.ReduceOp.MAX), *carry()]
            for work in carried:
                work.wait()
            lane.free_s = float(times.sum())
            return lane.free_s

        end: Future[float] = lane.thread.submit(run)
        return PacedWork(clock, end.done, end.result)

    def _duration_s(self, kind: str, tensors: Sequence[Tensor]) -> float:
        if kind == "broadcast":
            return self._link.broadcast_s(tensors, ranks=self.members)
        return self._link.collective_s(tensors, ranks=self.members, passes=1 + (kind == "all-reduce"))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns a view of the same memory as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


_PRELOADED = [
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "benchmarks.paced",
]  # by the fork server


def run_paced_ranks(
    function: Callable[..., Any],
    world: int,
    link: PacedLink,
    *args: Any,
    time_scale: float = 1.0,
    timeout_s: float = 60.0,
    on_report: Report = lambda message: None,
) -> list[Any]:
    """Returns what `function(rank, network, *args)` returns on every rank; the default group is paced.

    Messages that a rank passes to `network.report` reach `on_report`. With `time_scale`, a second of a rank
    takes so many of the host's.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    rank_args = (function, link, time_scale, timeout_s, args)
    return run_processes(context, _rank_main, world, *rank_args, timeout_s=timeout_s, on_report=on_report)


def _rank_main(
    rank: int,
    world: int,
    store: str,
    report: Report,
    function: Callable[..., Any],
    link: PacedLink,
    time_scale: float,
    timeout_s: float,
    args: tuple[Any, ...],
) -> Any:
    torch.set_num_threads(1)
    network = PacedNetwork(PacedClock(time_scale=time_scale), link, report=report)
    network.register()
    dist.init_process_group(
        "paced",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    result = function(rank, network, *args)
    dist.barrier()
    network.close()
    dist.destroy_process_group()
    return result
