"""Kernels: what the cost model prices, and lists of them in the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass, field

from optimus.cost.network import Collective
from optimus.cost.prices import Prices
from optimus.ir.op import Communicator, Lane, OpKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """What the cost model prices. `after`: places in the list it waits for (none: what came before)."""

    name: str
    kind: OpKind
    lane: Lane
    duration_s: float
    size_bytes: float = 0.0
    after: tuple[int, ...] = ()
    communicator: Communicator = Communicator.NONE


@dataclass(kw_only=True)
class KernelList:
    """Collects kernels; each waits for the one added before it unless told otherwise."""

    prices: Prices
    kind: OpKind
    tp: int
    kernels: list[Kernel] = field(default_factory=list)
    last: tuple[int, ...] = ()  # what the next kernel waits for

    def compute(self, name: str, seconds: float, *, after: tuple[int, ...] | None = None) -> int:
        return self._add(name, Lane.COMPUTE, seconds, 0.0, after, Communicator.NONE)

    def collective(
        self, name: str, kind: Collective, size_bytes: float, *, after: tuple[int, ...] | None = None
    ) -> int | None:
        """A TP collective; none when the module is not divided."""
        if self.tp == 1:
            return None
        seconds = self.prices.tp_s(kind, size_bytes, self.tp)
        return self._add(name, Lane.TP, seconds, size_bytes, after, Communicator.TP)

    def group(
        self,
        name: str,
        kind: Collective,
        size_bytes: float,
        communicator: Communicator,
        *,
        ranks: int,
        stride: int,
    ) -> None:
        """A cp or ep collective, on the NIC when it leaves the node."""
        if ranks > 1:
            seconds = self.prices.group_s(kind, size_bytes, ranks=ranks, stride=stride)
            lane = self.prices.group_lane(ranks, stride)
            self._add(name, lane, seconds, size_bytes, None, communicator)

    def join(self, *places: int | None) -> None:
        """The next kernel waits for all of these."""
        self.last = tuple(place for place in places if place is not None)

    def _add(
        self,
        name: str,
        lane: Lane,
        seconds: float,
        size_bytes: float,
        after: tuple[int, ...] | None,
        communicator: Communicator,
    ) -> int:
        self.kernels.append(
            Kernel(
                name=name,
                kind=self.kind,
                lane=lane,
                duration_s=seconds,
                size_bytes=size_bytes,
                after=self.last if after is None else after,
                communicator=communicator,
            )
        )
        place = len(self.kernels) - 1
        self.last = (place,)
        return place
