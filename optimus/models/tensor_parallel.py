"""Tensor parallelism with sequence parallelism: who shares a layer, and what travels between its segments.

Between segments every rank holds its own rows, a run of the sequence. Before a product whose columns are
divided, rows of all ranks are gathered; after one whose inner dimension is, sums are scattered over rows. An
*exchange* stands between two segments of a layer and holds no parameters: it is launched and waited for, and
anything may run in between. Going back, a gather becomes a scatter of sums, and a scatter a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.models.collectives import AsyncCollective, exchange_rows, fill_rows, gather_rows, sum_rows
from optimus.models.segment import Gradients, Segment, State, WeightGradStore


@dataclass(frozen=True, kw_only=True, eq=False)
class TpGroup:
    """A rank's place among those that divide the layers of a module between them, and how it reaches them."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # needed to run, not to build

    def rows(self, count: int) -> slice:
        """Of a sequence: this rank's."""
        assert count % self.size == 0, f"{count} rows for {self.size} ranks"
        own = count // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def gather(self, part: Tensor) -> AsyncCollective:
        """Rows of all ranks in order."""
        return gather_rows(part, self._reached)

    def fill(self, whole: Tensor, part: Tensor) -> AsyncCollective:
        """The same, into memory that is there."""
        return fill_rows(whole, part, self._reached)

    def sum(self, parts: Tensor) -> AsyncCollective:
        """This rank's rows of the sum over all ranks."""
        return sum_rows(parts, self._reached, by_exchange=self._exchanges)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncCollective:
        """So many rows to every rank, and so many from every rank."""
        return exchange_rows(rows, sent, received, self._reached)

    @cached_property
    def _exchanges(self) -> bool:
        """Gloo's own reduce-scatter takes twice as long."""
        return bool(dist.get_backend(self._reached) == "gloo")

    @property
    def _reached(self) -> dist.ProcessGroup:
        assert self.group is not None, "built to be looked at, not to run"
        return self.group


ALONE = TpGroup()


class Exchange(Segment):
    """Communication between two segments, of the tensor at place `at` of their state.

    `there`, `back` and `again` name its collectives as plans do: of a forward, of a backward, and of what is
    brought a second time for gradients of weights. One whose backward serves such a gradient alone is `late`.
    At the places `spent` of the state stands what the next segment only adds up: nobody reads it afterwards.
    """

    defers = True
    there: str
    back: str
    again: str | None = None
    late = False
    spent: tuple[int, ...] = ()

    def __init__(self, share: TpGroup, at: int) -> None:
        super().__init__()
        self.share, self.at = share, at

    def needs(self, given: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which tensors of the state want a gradient afterwards."""
        return given

    def launch(self, state: State, context: Any) -> AsyncCollective:
        """Lands as the next state."""
        raise NotImplementedError

    def launch_back(self, gradients: Gradients, context: Any) -> AsyncCollective:
        """Lands as the gradients of the state before."""
        raise NotImplementedError

    def launch_again(self, part: Tensor, whole: Tensor) -> AsyncCollective:
        """Into `whole` what was brought there before, from this rank's part of it."""
        raise NotImplementedError

    def forward(self, state: State, context: Any, deferred: WeightGradStore | None = None) -> State:
        """At once, for those who schedule nothing."""
        found: State = self.launch(state, context).land()
        return found


class Gather(Exchange):
    """Rows of all ranks, before a product whose columns are divided; going back, sums over the columns."""

    def __init__(self, share: TpGroup, at: int, *, there: str, of: str, regathers: bool) -> None:
        super().__init__(share, at)
        self.there, self.back = there, f"{of}.scatter"
        self.again = f"{of}.gather" if regathers else None

    def launch(self, state: State, context: Any) -> AsyncCollective:
        flight = self.share.gather(state[self.at])
        return flight.then(lambda rows: _changed(state, self.at, rows))

    def launch_back(self, gradients: Gradients, context: Any) -> AsyncCollective:
        flight = self.share.sum(_present(gradients[self.at]))
        return flight.then(lambda rows: _changed(gradients, self.at, rows))

    def launch_again(self, part: Tensor, whole: Tensor) -> AsyncCollective:
        return self.share.fill(whole, part)


class Scatter(Exchange):
    """Sums over ranks, of which each keeps its own rows; going back, gradients of all rows to everybody."""

    def __init__(
        self, share: TpGroup, at: int, *, there: str, of: str, late: bool = False, spent: tuple[int, ...] = ()
    ) -> None:
        super().__init__(share, at)
        self.there, self.back, self.late = there, f"{of}.gather", late
        self.spent = (*spent, at)

    def launch(self, state: State, context: Any) -> AsyncCollective:
        flight = self.share.sum(state[self.at])
        return flight.then(lambda rows: _changed(state, self.at, rows))

    def launch_back(self, gradients: Gradients, context: Any) -> AsyncCollective:
        flight = self.share.gather(_present(gradients[self.at]))
        return flight.then(lambda rows: _changed(gradients, self.at, rows))


class Seam(Exchange):
    """(ids, rows of a piece, ...) to (ids, rows): encoder rows go to who holds their places in the sequence.

    What goes where stands in the context. `learns` says whether any encoder wants gradients: all ranks must
    agree, also those that hold no rows.
    """

    there, back = "seam.gather.tp", "seam.scatter.tp"

    def __init__(self, share: TpGroup, *, width: int, dtype: torch.dtype, learns: bool) -> None:
        super().__init__(share, 1)
        self.width, self.dtype, self.learns = width, dtype, learns

    def needs(self, given: tuple[bool, ...]) -> tuple[bool, ...]:
        return (False, self.learns)

    def launch(self, state: State, context: Any) -> AsyncCollective:
        ids, *pieces = state
        seam = context.seam
        nothing = torch.empty(0, self.width, dtype=self.dtype, device=ids.device)
        rows = torch.cat([piece.detach() for piece in pieces]) if pieces else nothing
        flight = self.share.exchange(rows[seam.leaving], seam.sent, seam.received)
        return flight.then(lambda came: (ids, came))

    def launch_back(self, gradients: Gradients, context: Any) -> AsyncCollective:
        seam = context.seam
        flight = self.share.exchange(_present(gradients[self.at]), seam.received, seam.sent)

        def dealt(came: Tensor) -> Gradients:
            rows = came.new_zeros(sum(seam.pieces), self.width)
            return (None, *rows.index_copy_(0, seam.leaving, came).split(seam.pieces))

        return flight.then(dealt)


def _changed(state: Any, at: int, tensor: Tensor) -> Any:
    return (*state[:at], tensor, *state[at + 1 :])


def _present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "nothing depends on what was exchanged"
    return gradient
