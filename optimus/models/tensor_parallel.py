"""Defines the collectives between segments of a tensor-parallel layer, with sequence parallelism.

Between segments every rank holds its own rows, a run of the sequence. Rows are all-gathered before a
column-parallel product and reduce-scattered after a row-parallel one; in the backward the two change places.
A collective holds no parameters. It is launched and waited for, and other work runs in the slot between.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from optimus.ir.op import KernelName
from optimus.models.collectives import AsyncCollective, TpGroup
from optimus.models.segment import Gradients, NeedsGrad, Segment, State, WeightGradStore

SeamAxis = Literal["deal", "tp", "cp"]  # axes over which encoder rows are exchanged, in this order


class TpCollective(Segment):
    """A collective between two segments, over the tensor at `state_index` of their state.

    `axis` is that of its group. `forward_name`, `backward_name` and `regather_name` are the names that plans
    give its collectives: in the forward, in the backward, and for the second gather that a weight gradient
    reads. `in_wgrad` marks one whose backward serves a weight gradient only. No backward reads the tensors at
    the indices `freed` of the state: they are freed once the next segment has added them up.
    """

    defers_weight_grads = True
    axis = "tp"
    forward_name: str
    backward_name: str
    regather_name: str | None = None
    in_wgrad = False
    freed: tuple[int, ...] = ()

    def __init__(self, tp_group: TpGroup, state_index: int) -> None:
        super().__init__()
        self.tp_group, self.state_index = tp_group, state_index

    def output_needs_grad(self, needs_grad: NeedsGrad) -> NeedsGrad:
        """Returns which tensors of the next state need a gradient."""
        return needs_grad

    def has_backward(self, needs_grad: NeedsGrad) -> bool:
        """Returns whether its backward runs, from which tensors of the next state need a gradient."""
        return needs_grad[self.state_index]

    def launch(self, state: State, context: Any) -> AsyncCollective:
        """Launches the forward collective; waiting for it returns the next state."""
        raise NotImplementedError

    def launch_backward(self, gradients: Gradients, context: Any) -> AsyncCollective:
        """Launches the backward collective; waiting for it returns the gradients of the state before."""
        raise NotImplementedError

    def launch_regather(self, rows: Tensor, output: Tensor, context: Any) -> AsyncCollective:
        """Gathers a second time, from this rank's rows into the output of the forward's gather."""
        raise NotImplementedError

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        """Runs the collective without a slot."""
        output: State = self.launch(state, context).wait()
        return output


class AllGather(TpCollective):
    """Gathers the rows of all ranks before a column-parallel product; reduce-scatters their gradients."""

    def __init__(
        self, tp_group: TpGroup, state_index: int, *, forward_name: str, kernel: KernelName, regather: bool
    ) -> None:
        super().__init__(tp_group, state_index)
        self.forward_name, self.backward_name = forward_name, kernel.scatter
        self.regather_name = kernel.gather if regather else None

    def launch(self, state: State, context: Any) -> AsyncCollective:
        gather = self.tp_group.all_gather(state[self.state_index])
        return gather.then(lambda rows: replaced(state, self.state_index, rows))

    def launch_backward(self, gradients: Gradients, context: Any) -> AsyncCollective:
        scatter = self.tp_group.reduce_scatter(present(gradients[self.state_index]))
        return scatter.then(lambda rows: replaced(gradients, self.state_index, rows))

    def launch_regather(self, rows: Tensor, output: Tensor, context: Any) -> AsyncCollective:
        return self.tp_group.all_gather_into(output, rows)


class ReduceScatter(TpCollective):
    """Sums a row-parallel product over ranks, each of which keeps its own rows; all-gathers gradients."""

    def __init__(
        self,
        tp_group: TpGroup,
        state_index: int,
        *,
        forward_name: str,
        kernel: KernelName,
        in_wgrad: bool = False,
        freed: tuple[int, ...] = (),
    ) -> None:
        super().__init__(tp_group, state_index)
        self.forward_name, self.backward_name, self.in_wgrad = forward_name, kernel.gather, in_wgrad
        self.freed = (*freed, state_index)

    def launch(self, state: State, context: Any) -> AsyncCollective:
        scatter = self.tp_group.reduce_scatter(state[self.state_index])
        return scatter.then(lambda rows: replaced(state, self.state_index, rows))

    def launch_backward(self, gradients: Gradients, context: Any) -> AsyncCollective:
        gather = self.tp_group.all_gather(present(gradients[self.state_index]))
        return gather.then(lambda rows: replaced(gradients, self.state_index, rows))


class SeamExchange(TpCollective):
    """Sends encoder rows to the ranks that need them: (ids, rows, ...) to (ids, rows).

    Along the axis `deal` these are replicas, along `tp` and `cp` ranks that hold the rows' positions; the
    context holds the routes. `needs_backward` says whether any encoder needs gradients: all ranks agree, also
    those that hold no rows.
    """

    def __init__(
        self,
        group: TpGroup,
        axis: SeamAxis,
        *,
        width: int,
        dtype: torch.dtype,
        needs_backward: bool,
    ) -> None:
        super().__init__(group, 1)
        self.axis = axis
        self.forward_name, self.backward_name = (
            f"{name}.{axis}" for name in (KernelName.SEAM.gather, KernelName.SEAM.scatter)
        )
        self.width, self.dtype, self.needs_backward = width, dtype, needs_backward

    def output_needs_grad(self, needs_grad: NeedsGrad) -> NeedsGrad:
        return (False, self.needs_backward)

    def launch(self, state: State, context: Any) -> AsyncCollective:
        ids, *pieces = state
        seam = context.routes[self.axis]
        no_rows = torch.empty(0, self.width, dtype=self.dtype, device=ids.device)
        rows = torch.cat([piece.detach() for piece in pieces]) if pieces else no_rows
        exchange = self.tp_group.all_to_all(rows[seam.leaving], seam.sent, seam.received)
        return exchange.then(lambda received: (ids, received))

    def launch_backward(self, gradients: Gradients, context: Any) -> AsyncCollective:
        seam = context.routes[self.axis]
        gradient = present(gradients[self.state_index])
        exchange = self.tp_group.all_to_all(gradient, seam.received, seam.sent)

        def piece_gradients(received: Tensor) -> Gradients:
            rows = received.new_zeros(sum(seam.pieces), self.width)
            return (None, *rows.index_copy_(0, seam.leaving, received).split(seam.pieces))

        return exchange.then(piece_gradients)


def replaced(state: Any, index: int, tensor: Tensor) -> Any:
    """Returns a state or its gradients with another tensor at an index."""
    return (*state[:index], tensor, *state[index + 1 :])


def present(gradient: Tensor | None) -> Tensor:
    """Returns a gradient that must exist."""
    assert gradient is not None, "nothing depends on the output of the collective"
    return gradient
