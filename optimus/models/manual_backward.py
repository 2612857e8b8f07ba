"""Segments whose gradients are written out: no graph, no boundary.

The host spends on them what their kernels cost, where autograd around so few kernels takes several times as
long; and they keep what they name and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from optimus.models.segment import Gradients, Saved, Segment, State, WeightGradStore


class Kept(Saved):
    """What the gradients of a formula are made from, and which of its inputs want one."""

    __slots__ = ("needs", "values")

    def __init__(self, needs: tuple[bool, ...], values: Any, deferred: WeightGradStore) -> None:
        super().__init__((), (), deferred)
        self.needs, self.values = needs, values


class ManualBackwardSegment(Segment):
    """Subclasses give `made` and `gradient`, both of which run where no graph is made.

    `forward` does the same as `made` for those who want a graph. The first tensor of a state, the residual
    stream, is handed on as it is, or made anew.
    """

    defers = True

    def made(self, state: State, context: Any, deferred: WeightGradStore) -> tuple[State, Any]:
        """The next state, and what its gradient needs."""
        raise NotImplementedError

    def gradient(
        self, values: Any, given: Gradients, needs: tuple[bool, ...], deferred: WeightGradStore
    ) -> Gradients:
        """Of the state before, where it needs one; those of parameters are added to them, or deferred."""
        raise NotImplementedError

    def run(
        self, state: State, needs: tuple[bool, ...], context: Any, deferred: WeightGradStore
    ) -> tuple[State, Saved | None]:
        if not self.trained and not any(needs):
            return super().run(state, needs, context, deferred)
        if torch.is_grad_enabled():  # to make sure of it costs more than to ask
            with torch.no_grad():
                return self.run(state, needs, context, deferred)
        x, *rest = state
        if x.requires_grad != needs[0]:
            state = (x.detach().requires_grad_(needs[0]), *rest)
        found, values = self.made(state, context, deferred)
        for tensor in found:
            if tensor is not state[0]:
                tensor.requires_grad_()
        return found, Kept(needs, values, deferred)

    def input_gradient(self, saved: Saved, gradients: Gradients, *, split: bool) -> Gradients:
        assert isinstance(saved, Kept)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.gradient(saved.values, gradients, saved.needs, saved.deferred)
        return self.gradient(saved.values, gradients, saved.needs, saved.deferred)
