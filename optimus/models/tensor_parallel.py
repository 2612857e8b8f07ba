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

from optimus.models.collectives import (
    AsyncCollective,
    all_gather_rows,
    all_gather_rows_into,
    all_to_all_rows,
    reduce_scatter_rows,
)
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

    def all_gather(self, part: Tensor) -> AsyncCollective:
        """Rows of all ranks in order."""
        return all_gather_rows(part, self._process_group)

    def all_gather_into(self, whole: Tensor, part: Tensor) -> AsyncCollective:
        """The same, into memory that is there."""
        return all_gather_rows_into(whole, part, self._process_group)

    def reduce_scatter(self, parts: Tensor) -> AsyncCollective:
        """This rank's rows of the sum over all ranks."""
        return reduce_scatter_rows(parts, self._process_group, by_all_to_all=self._uses_all_to_all)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncCollective:
        """So many rows to every rank, and so many from every rank."""
        return all_to_all_rows(rows, sent, received, self._process_group)

    @cached_property
    def _uses_all_to_all(self) -> bool:
        """Gloo's own reduce-scatter takes twice as long."""
        return bool(dist.get_backend(self._process_group) == "gloo")

    @property
    def _process_group(self) -> dist.ProcessGroup:
        assert self.group is not None, "built to be looked at, not to run"
        return self.group


NO_TP = TpGroup()


class TpCollective(Segment):
    """A collective between two segments, over the tensor at `state_index` of their state.

    `forward_name`, `backward_name` and `regather_name` are the names that plans give its collectives: in the
    forward, in the backward, and for the second gather that a weight gradient reads. `in_wgrad` marks one
    whose backward serves a weight gradient only. No backward reads the tensors at the indices `freed` of the
    state: they are freed once the next segment has added them up.
    """

    defers_weight_grads = True
    forward_name: str
    backward_name: str
    regather_name: str | None = None
    in_wgrad = False
    freed: tuple[int, ...] = ()

    def __init__(self, tp_group: TpGroup, state_index: int) -> None:
        super().__init__()
        self.tp_group, self.state_index = tp_group, state_index

    def output_needs_grad(self, needs_grad: tuple[bool, ...]) -> tuple[bool, ...]:
        """Returns which tensors of the next state need a gradient."""
        return needs_grad

    def launch(self, state: State, context: Any) -> AsyncCollective:
        """Launches the forward collective; waiting for it returns the next state."""
        raise NotImplementedError

    def launch_backward(self, gradients: Gradients, context: Any) -> AsyncCollective:
        """Launches the backward collective; waiting for it returns the gradients of the state before."""
        raise NotImplementedError

    def launch_regather(self, part: Tensor, whole: Tensor) -> AsyncCollective:
        """Gathers into `whole` a second time, from this rank's rows `part`."""
        raise NotImplementedError

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        """Runs the collective without a slot."""
        found: State = self.launch(state, context).wait()
        return found


class AllGather(TpCollective):
    """Rows of all ranks, before a product whose columns are divided; going back, sums over the columns."""

    def __init__(
        self, tp_group: TpGroup, state_index: int, *, forward_name: str, kernel: str, regather: bool
    ) -> None:
        super().__init__(tp_group, state_index)
        self.forward_name, self.backward_name = forward_name, f"{kernel}.scatter"
        self.regather_name = f"{kernel}.gather" if regather else None

    def launch(self, state: State, context: Any) -> AsyncCollective:
        flight = self.tp_group.all_gather(state[self.state_index])
        return flight.then(lambda rows: _changed(state, self.state_index, rows))

    def launch_backward(self, gradients: Gradients, context: Any) -> AsyncCollective:
        flight = self.tp_group.reduce_scatter(_present(gradients[self.state_index]))
        return flight.then(lambda rows: _changed(gradients, self.state_index, rows))

    def launch_regather(self, part: Tensor, whole: Tensor) -> AsyncCollective:
        return self.tp_group.all_gather_into(whole, part)


class ReduceScatter(TpCollective):
    """Sums over ranks, of which each keeps its own rows; going back, gradients of all rows to everybody."""

    def __init__(
        self,
        tp_group: TpGroup,
        state_index: int,
        *,
        forward_name: str,
        kernel: str,
        in_wgrad: bool = False,
        freed: tuple[int, ...] = (),
    ) -> None:
        super().__init__(tp_group, state_index)
        self.forward_name, self.backward_name, self.in_wgrad = forward_name, f"{kernel}.gather", in_wgrad
        self.freed = (*freed, state_index)

    def launch(self, state: State, context: Any) -> AsyncCollective:
        flight = self.tp_group.reduce_scatter(state[self.state_index])
        return flight.then(lambda rows: _changed(state, self.state_index, rows))

    def launch_backward(self, gradients: Gradients, context: Any) -> AsyncCollective:
        flight = self.tp_group.all_gather(_present(gradients[self.state_index]))
        return flight.then(lambda rows: _changed(gradients, self.state_index, rows))


class SeamExchange(TpCollective):
    """(ids, rows of a piece, ...) to (ids, rows): encoder rows go to who holds their places in the sequence.

    The context holds the routes. `needs_backward` says whether any encoder needs gradients: all ranks agree,
    also those that hold no rows.
    """

    forward_name, backward_name = "seam.gather.tp", "seam.scatter.tp"

    def __init__(self, tp_group: TpGroup, *, width: int, dtype: torch.dtype, needs_backward: bool) -> None:
        super().__init__(tp_group, 1)
        self.width, self.dtype, self.needs_backward = width, dtype, needs_backward

    def output_needs_grad(self, needs_grad: tuple[bool, ...]) -> tuple[bool, ...]:
        return (False, self.needs_backward)

    def launch(self, state: State, context: Any) -> AsyncCollective:
        ids, *pieces = state
        seam = context.seam
        nothing = torch.empty(0, self.width, dtype=self.dtype, device=ids.device)
        rows = torch.cat([piece.detach() for piece in pieces]) if pieces else nothing
        flight = self.tp_group.all_to_all(rows[seam.leaving], seam.sent, seam.received)
        return flight.then(lambda came: (ids, came))

    def launch_backward(self, gradients: Gradients, context: Any) -> AsyncCollective:
        seam = context.seam
        flight = self.tp_group.all_to_all(_present(gradients[self.state_index]), seam.received, seam.sent)

        def dealt(came: Tensor) -> Gradients:
            rows = came.new_zeros(sum(seam.pieces), self.width)
            return (None, *rows.index_copy_(0, seam.leaving, came).split(seam.pieces))

        return flight.then(dealt)


def _changed(state: Any, state_index: int, tensor: Tensor) -> Any:
    return (*state[:state_index], tensor, *state[state_index + 1 :])


def _present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "nothing depends on what was exchanged"
    return gradient
