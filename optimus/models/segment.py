"""Defines segments: the smallest schedulable parts of a module, with forward, input and weight gradients.

A segment maps a *state*, a tuple of tensors, to the next state. Its backward comes from autograd on a
detached boundary, or is written by hand (`ManualBackwardSegment`); either way it reaches into no other
segment, so any other work may run between two segments. Weight gradients go to a `WeightGradStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optimus.models.collectives import ParamSplit

State = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]
NeedsGrad = tuple[bool, ...]  # which tensors of a state need a gradient


class WeightGradStore(list[Callable[[], None]]):
    """Deferred weight gradients of one segment and microbatch; each closure adds to its parameter.

    It also holds the activations that are cheap to recompute from others that the backward reads: their
    storage may be freed after the forward and filled again before the backward.
    """

    __slots__ = ("immediate", "recomputable", "track_recomputable")

    def __init__(self, *, track_recomputable: bool = False) -> None:
        super().__init__()
        self.track_recomputable, self.immediate = track_recomputable, False
        self.recomputable: list[tuple[Tensor, Callable[[Tensor], Tensor], Tensor]] = []

    def add(self, accumulate_grad: Callable[[], None]) -> None:
        """Defers a weight gradient, or computes it now if the store is `immediate`; builds no graph."""
        if self.immediate:
            accumulate_grad()
        else:
            self.append(accumulate_grad)

    def mark_recomputable(self, tensor: Tensor, function: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
        """Records that `function(inputs)` gives this tensor cheaply, so that its storage may be freed."""
        if self.track_recomputable:
            self.recomputable.append((tensor, function, inputs))

    def free(self) -> None:
        """Frees the storage of activations that are cheap to recompute; the tensor objects stay valid."""
        for tensor, _, _ in self.recomputable:
            tensor.untyped_storage().resize_(0)

    def recompute(self) -> None:
        """Recomputes the freed activations, in the order of the forward."""
        with torch.no_grad():
            for tensor, function, inputs in self.recomputable:
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.data.copy_(function(inputs))  # invisible to autograd, which has saved the tensor
        self.recomputable.clear()


@dataclass(slots=True, eq=False)
class SavedTensors:
    """Activations that a segment keeps from the forward of one microbatch to its backward.

    Autograd segments keep `inputs` and `outputs`; others keep `values` in a form of their own.
    """

    weight_grads: WeightGradStore
    needs_grad: NeedsGrad
    inputs: State = ()
    outputs: tuple[Tensor | GradientEdge, ...] = ()
    values: Any = None


class Segment(nn.Module):
    """Base class of segments; subclasses give `forward`, a pure function of parameters, state and context.

    `kernels` are those of the cost model that a segment runs. A segment whose weight gradients all go to the
    store sets `defers_weight_grads`; for others the weight half of a backward runs autograd again.
    """

    kernels: tuple[str, ...] = ()
    defers_weight_grads = False
    has_recomputable = False  # it marks activations as recomputable
    is_end = False  # an embedding, a projector or a head: never recomputed
    saves_nothing = False  # between forward and backward, so that nothing is gained by recomputing it
    waits_for_tp = False  # its forward waits for other ranks of its tensor-parallel group
    # Shards of parameters by name. Others are replicated over the tensor-parallel group; each rank computes
    # their gradients from some rows or heads only, so they are summed over the group.
    splits: Mapping[str, ParamSplit] = MappingProxyType({})

    def parallel_segments(self) -> list[Segment]:
        """Returns the segments and collectives that it runs as under tensor or context parallelism."""
        return [self]

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        """Returns the next state; with `weight_grads`, linears defer their weight gradients to it.

        Segments with a hand-written backward defer them in `run_backward` instead.
        """
        raise NotImplementedError

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Parameters that need gradients; freezing is decided before the first step."""
        return self._trainable

    @cached_property
    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def run_forward(
        self, state: State, needs_grad: NeedsGrad, context: Any, weight_grads: WeightGradStore
    ) -> tuple[State, SavedTensors | None]:
        """Returns the next state and what the backward reads: None if nothing needs a gradient.

        Tensors of the next state that need a gradient have `requires_grad` set.
        """
        if not self.trainable and not any(needs_grad):
            with torch.no_grad():
                return self.forward(state, context), None
        detached = [tensor.detach() for tensor in state]
        for tensor, needs in zip(detached, needs_grad, strict=True):
            if needs:
                tensor.requires_grad_()
        inputs = tuple(detached)
        if torch.is_grad_enabled():  # asking costs the host less than the context manager
            outputs = self.forward(inputs, context, weight_grads)
        else:
            with torch.enable_grad():
                outputs = self.forward(inputs, context, weight_grads)
        return outputs, SavedTensors(weight_grads, needs_grad, inputs, outputs)

    def release_outputs(self, saved: SavedTensors) -> None:
        """Drops the values of the outputs, of which a backward reads only their place in the graph."""
        saved.outputs = tuple(
            get_gradient_edge(output) if isinstance(output, Tensor) and output.grad_fn is not None else output
            for output in saved.outputs
        )

    def run_backward(self, saved: SavedTensors, gradients: Gradients, *, split: bool) -> Gradients:
        """Returns the gradients of the inputs; adds those of the weights to their parameters.

        With `split` it defers as many weight gradients as it can.
        """
        roots: list[Tensor | GradientEdge] = []
        root_grads: list[Tensor] = []
        for output, gradient in zip(saved.outputs, gradients, strict=True):
            if gradient is not None and (isinstance(output, GradientEdge) or output.requires_grad):
                roots.append(output)  # an input that was passed on unchanged too: autograd adds that up
                root_grads.append(gradient)
        defer = split and not self.defers_weight_grads and bool(self.trainable)
        parameters = [] if defer else self.trainable
        inputs = [tensor for tensor in saved.inputs if tensor.requires_grad]
        count, targets = len(inputs), inputs + parameters if parameters else inputs
        grads: Gradients = (None,) * len(targets)
        if roots and targets:
            grads = _autograd_grad(roots, targets, root_grads, keep_graph=defer)
        if parameters:
            self.add_gradients(parameters, grads[count:])
        if defer and roots:
            saved.weight_grads.append(lambda: self._add_weight_gradients(roots, root_grads))
        if count == len(saved.inputs):
            return grads[:count]
        input_grads = iter(grads)
        return tuple([next(input_grads) if tensor.requires_grad else None for tensor in saved.inputs])

    def _add_weight_gradients(self, roots: list[Tensor | GradientEdge], root_grads: list[Tensor]) -> None:
        """Runs autograd a second time, for the weights."""
        parameters = self.trainable
        self.add_gradients(parameters, _autograd_grad(roots, parameters, root_grads, keep_graph=False))

    def add_gradients(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        """Adds what autograd returned for some parameters to their gradients."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                accumulate_grad(parameter, gradient)


class ManualBackwardSegment(Segment):
    """Segment with a hand-written backward: no graph, and nothing saved but what it names.

    Autograd around so few kernels takes the host several times as long as the kernels themselves. Subclasses
    give `forward_saving` and `backward`, which both run without a graph, and `forward`, the same computation
    for callers that build one. The first tensor of a state, the residual stream, is passed on or replaced.
    """

    defers_weight_grads = True

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        """Returns the next state and the values that `backward` reads."""
        raise NotImplementedError

    def backward(
        self, values: Any, gradients: Gradients, needs_grad: NeedsGrad, weight_grads: WeightGradStore
    ) -> Gradients:
        """Returns the gradients of the state before, where needed; adds or defers those of parameters."""
        raise NotImplementedError

    def run_forward(
        self, state: State, needs_grad: NeedsGrad, context: Any, weight_grads: WeightGradStore
    ) -> tuple[State, SavedTensors | None]:
        if not self.trainable and not any(needs_grad):
            return super().run_forward(state, needs_grad, context, weight_grads)
        if torch.is_grad_enabled():  # asking costs the host less than the context manager
            with torch.no_grad():
                return self.run_forward(state, needs_grad, context, weight_grads)
        x, *rest = state
        if x.requires_grad != needs_grad[0]:
            state = (x.detach().requires_grad_(needs_grad[0]), *rest)
        outputs, values = self.forward_saving(state, context, weight_grads)
        for tensor in outputs:
            if tensor is not state[0]:
                tensor.requires_grad_()
        return outputs, SavedTensors(weight_grads, needs_grad, values=values)

    def run_backward(self, saved: SavedTensors, gradients: Gradients, *, split: bool) -> Gradients:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.backward(saved.values, gradients, saved.needs_grad, saved.weight_grads)
        return self.backward(saved.values, gradients, saved.needs_grad, saved.weight_grads)


class FunctionSegment(Segment):
    """A function of another segment and the parameters that it reads, scheduled on its own."""

    defers_weight_grads = True

    def __init__(
        self,
        owner: Segment,
        function: Callable[[State, Any, WeightGradStore | None], State],
        kernels: tuple[str, ...],
        reads: Sequence[nn.Module | nn.Parameter | None],
        *,
        waits_for_tp: bool = False,
    ) -> None:
        super().__init__()
        self.owner, self._function, self.waits_for_tp = owner, function, waits_for_tp
        self.kernels, self.is_end = kernels, owner.is_end
        self._reads = [source for source in reads if source is not None]

    @cached_property
    def _trainable(self) -> list[nn.Parameter]:
        parameters: list[nn.Parameter] = []
        for source in self._reads:
            parameters += [source] if isinstance(source, nn.Parameter) else source.parameters()
        return [parameter for parameter in parameters if parameter.requires_grad]

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        return self._function(state, context, weight_grads)


class SequentialSegment(Segment):
    """Segments that run one after another with nothing scheduled between them.

    It saves what each of them saves, as a list. Subclasses whose segments share their own parameters give
    none to the constructor and call `set_segments`, so that torch finds every parameter once.
    """

    def __init__(self, segments: Sequence[Segment] = (), kernels: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.owned = nn.ModuleList(segments)
        self.kernels = kernels or self.kernels
        self.set_segments(segments)

    def set_segments(self, segments: Sequence[Segment]) -> None:
        self.segments = list(segments)  # a list, into which torch does not look
        self.defers_weight_grads = all(segment.defers_weight_grads for segment in segments)
        self.has_recomputable = any(segment.has_recomputable for segment in segments)
        self.is_end = any(segment.is_end for segment in segments)

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        for segment in self.segments:
            state = segment.forward(state, context, weight_grads)
        return state

    def run_forward(
        self, state: State, needs_grad: NeedsGrad, context: Any, weight_grads: WeightGradStore
    ) -> tuple[State, SavedTensors | None]:
        inputs_need_grad, parts = needs_grad, []
        for segment in self.segments:
            state, saved = segment.run_forward(state, needs_grad, context, weight_grads)
            needs_grad = tuple([tensor.requires_grad for tensor in state])
            parts.append(saved)
        return state, SavedTensors(weight_grads, inputs_need_grad, values=parts) if any(parts) else None

    def release_outputs(self, saved: SavedTensors) -> None:
        if saved.values and saved.values[-1] is not None:
            self.segments[-1].release_outputs(saved.values[-1])

    def run_backward(self, saved: SavedTensors, gradients: Gradients, *, split: bool) -> Gradients:
        for segment in reversed(self.segments):
            part = saved.values.pop()
            if part is None:  # frozen, and nothing before it trains
                return (None,) * len(saved.needs_grad)
            gradients = segment.run_backward(part, gradients, split=split)
        return gradients


class ModuleSegment(Segment):
    """Any module as one segment: it maps one or more tensors to one or more tensors.

    Its context, if any, holds keyword arguments of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        output = self.module(*state, **(context or {}))
        return output if isinstance(output, tuple) else (output,)


def _autograd_grad(
    roots: Sequence[Tensor | GradientEdge],
    inputs: Sequence[Tensor],
    root_grads: Sequence[Tensor],
    *,
    keep_graph: bool,
) -> Gradients:
    """Computes as `torch.autograd.grad`, without its checks: a third of its host time."""
    grads: Gradients = Variable._execution_engine.run_backward(
        tuple(roots),
        tuple(root_grads),
        keep_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return grads


def accumulate_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to a parameter's gradient, in place if there is one.

    Autograd's gradient may share its memory with another one, or expand one value to many.
    """
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad.add_(gradient)
