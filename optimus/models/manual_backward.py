"""Segments whose gradients are written out: no graph, no boundary.

The host spends on them what their kernels cost, where autograd around so few kernels takes several times as
long; and they keep what they name and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from optimus.models.segment import Gradients, SavedTensors, Segment, State, WeightGradStore


class ManualSavedTensors(SavedTensors):
    """What the gradients of a formula are made from, and which of its inputs want one."""

    __slots__ = ("needs", "values")

    def __init__(self, needs: tuple[bool, ...], values: Any, weight_grads: WeightGradStore) -> None:
        super().__init__((), (), weight_grads)
        self.needs, self.values = needs, values


class ManualBackwardSegment(Segment):
    """Subclasses give `made` and `gradient`, both of which run where no graph is made.

    `forward` does the same as `made` for those who want a graph. The first tensor of a state, the residual
    stream, is handed on as it is, or made anew.
    """

    defers_weight_grads = True

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        """The next state, and what its gradient needs."""
        raise NotImplementedError

    def backward(
        self, values: Any, given: Gradients, needs: tuple[bool, ...], weight_grads: WeightGradStore
    ) -> Gradients:
        """Of the state before, where it needs one; those of parameters are added to them, or deferred."""
        raise NotImplementedError

    def run_forward(
        self, state: State, needs: tuple[bool, ...], context: Any, weight_grads: WeightGradStore
    ) -> tuple[State, SavedTensors | None]:
        if not self.trainable and not any(needs):
            return super().run_forward(state, needs, context, weight_grads)
        if torch.is_grad_enabled():  # to make sure of it costs more than to ask
            with torch.no_grad():
                return self.run_forward(state, needs, context, weight_grads)
        x, *rest = state
        if x.requires_grad != needs[0]:
            state = (x.detach().requires_grad_(needs[0]), *rest)
        found, values = self.forward_saving(state, context, weight_grads)
        for tensor in found:
            if tensor is not state[0]:
                tensor.requires_grad_()
        return found, ManualSavedTensors(needs, values, weight_grads)

    def run_backward(self, saved: SavedTensors, gradients: Gradients, *, split: bool) -> Gradients:
        assert isinstance(saved, ManualSavedTensors)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.backward(saved.values, gradients, saved.needs, saved.weight_grads)
        return self.backward(saved.values, gradients, saved.needs, saved.weight_grads)
