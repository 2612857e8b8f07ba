"""The smallest schedulable piece of a module: a pure function with its forward, input and weight gradient.

A segment maps a *state*, a tuple of tensors, to the next state. By default its gradients come from autograd
on a detached boundary: nothing reaches into the segments beside it, so any other work may run between them.
Weight gradients that can wait are put into a list, the *deferred* work of one segment and microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optimus.models.param_split import ParamSplit

State = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


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

    def add(self, work: Callable[[], None]) -> None:
        """Defers a weight gradient, or runs it if the store is `immediate`; no graph is built here."""
        if self.immediate:
            work()
        else:
            self.append(work)

    def mark_recomputable(self, made: Tensor, make: Callable[[Tensor], Tensor], rows: Tensor) -> None:
        """Records that `make(rows)` gives this tensor cheaply, so that its storage may be freed."""
        if self.track_recomputable:
            self.recomputable.append((made, make, rows))

    def free(self) -> None:
        """Frees the storage of activations that are cheap to recompute; the tensor objects stay valid."""
        for tensor, _, _ in self.recomputable:
            tensor.untyped_storage().resize_(0)

    def recompute(self) -> None:
        """Recomputes the freed activations, in the order of the forward."""
        with torch.no_grad():
            for tensor, make, rows in self.recomputable:
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.data.copy_(make(rows))  # not as an operation on what autograd has saved
        self.recomputable.clear()


class SavedTensors:
    """What one segment keeps of one microbatch, from its forward to its backward."""

    __slots__ = ("inputs", "outputs", "weight_grads")

    def __init__(self, inputs: State, outputs: State, weight_grads: WeightGradStore) -> None:
        self.inputs, self.weight_grads = inputs, weight_grads
        self.outputs: tuple[Tensor | GradientEdge, ...] = outputs

    def release_outputs(self) -> None:
        """A backward needs to know where they came from, not their numbers: who took them keeps them."""
        self.outputs = tuple(
            get_gradient_edge(each) if isinstance(each, Tensor) and each.grad_fn is not None else each
            for each in self.outputs
        )


class Segment(nn.Module):
    """Subclasses give `forward`, a function of parameters, state and context without other effects.

    `kernels` are those of the cost model that a segment stands for. A segment whose weight gradients all go
    through `weight_grads` says `defers = True`; for others the weight half of a backward asks autograd again.
    """

    kernels: tuple[str, ...] = ()
    defers_weight_grads = False
    has_recomputable = False  # it notes something that is quickly made again
    is_end = False  # an embedding, a projector or a head: never made again
    saves_nothing = False  # between forward and backward: no reason to make it again
    waits_for_tp = False  # other ranks of its tensor-parallel group, in the midst of its forward
    # Of parameters by name: how tensor parallelism divides them. Others are whole on every rank, which sees
    # only some rows or heads: their gradients are summed over the ranks.
    splits: Mapping[str, ParamSplit] = MappingProxyType({})

    def tp_segments(self) -> list[Segment]:
        """What it consists of where its layer is divided: segments and the exchanges between them."""
        return [self]

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        """Returns the next state; with `weight_grads`, linears defer their weight gradients to it.

        Segments with a hand-written backward defer them in `run_backward` instead.
        """
        raise NotImplementedError

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Parameters that get gradients. Freezing is decided before the first step."""
        return self._trainable

    @cached_property
    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def run_forward(
        self, state: State, needs: tuple[bool, ...], context: Any, weight_grads: WeightGradStore
    ) -> tuple[State, SavedTensors | None]:
        """The next state, and what its backward will need: nothing if no gradient is asked for.

        `needs` says which tensors of the state want a gradient; those of the next that do `requires_grad`.
        """
        if not self.trainable and not any(needs):
            with torch.no_grad():
                return self.forward(state, context), None
        detached = [tensor.detach() for tensor in state]
        for tensor, need in zip(detached, needs, strict=True):
            if need:
                tensor.requires_grad_()
        inputs = tuple(detached)
        if torch.is_grad_enabled():  # to make sure of it costs more than to ask
            outputs = self.forward(inputs, context, weight_grads)
        else:
            with torch.enable_grad():
                outputs = self.forward(inputs, context, weight_grads)
        return outputs, SavedTensors(inputs, outputs, weight_grads)

    def run_backward(self, saved: SavedTensors, gradients: Gradients, *, split: bool) -> Gradients:
        """Gradients of the inputs. Weight gradients are added to their parameters or deferred.

        With `split` as much as possible is deferred.
        """
        roots: list[Tensor | GradientEdge] = []
        seeds: list[Tensor] = []
        for output, gradient in zip(saved.outputs, gradients, strict=True):
            if gradient is not None and (isinstance(output, GradientEdge) or output.requires_grad):
                roots.append(output)  # or an input handed on as it is: autograd adds that up, too
                seeds.append(gradient)
        inputs = saved.inputs
        later = split and not self.defers_weight_grads and bool(self.trainable)
        trained = [] if later else self.trainable
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        count = len(wanted)
        asked = wanted + trained if trained else wanted
        found: Gradients = (None,) * len(asked)
        if roots and asked:
            found = gradients_of(roots, asked, seeds, keep_graph=later)
        if trained:
            self.add_gradients(trained, found[count:])
        if later and roots:
            saved.weight_grads.append(lambda: self._weight_gradients(roots, seeds))
        if count == len(inputs):
            return found[:count]
        given = iter(found)
        return tuple([next(given) if tensor.requires_grad else None for tensor in inputs])

    def _weight_gradients(self, roots: list[Tensor | GradientEdge], seeds: list[Tensor]) -> None:
        """The weight half by asking autograd a second time."""
        trained = self.trainable
        self.add_gradients(trained, gradients_of(roots, trained, seeds, keep_graph=False))

    def add_gradients(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        """What autograd found of some parameters, to what they already have."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                add_gradient(parameter, gradient)


class FunctionSegment(Segment):
    """A function of another segment, with the parameters that it reads, to be played for itself."""

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
        self._reads = [each for each in reads if each is not None]

    @cached_property
    def _trainable(self) -> list[nn.Parameter]:
        found: list[nn.Parameter] = []
        for each in self._reads:
            found += [each] if isinstance(each, nn.Parameter) else each.parameters()
        return [parameter for parameter in found if parameter.requires_grad]

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        return self._function(state, context, weight_grads)


class _ChainedSegment(Segment):
    """Segments between which nothing is scheduled, as one; `linked` does not own them."""

    def link(self, *links: Segment) -> None:
        self.linked = list(links)  # which torch does not look into
        self.defers_weight_grads = all(link.defers_weight_grads for link in links)
        self.has_recomputable = any(link.has_recomputable for link in links)
        self.is_end = any(link.is_end for link in links)

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        for link in self.linked:
            state = link.forward(state, context, weight_grads)
        return state

    def run_forward(
        self, state: State, needs: tuple[bool, ...], context: Any, weight_grads: WeightGradStore
    ) -> tuple[State, SavedTensors | None]:
        parts, first = [], needs
        for link in self.linked:
            state, saved = link.run_forward(state, needs, context, weight_grads)
            needs = tuple([tensor.requires_grad for tensor in state])
            parts.append(saved)
        return state, _SequentialSavedTensors(parts, len(first), weight_grads) if any(parts) else None

    def run_backward(self, saved: SavedTensors, gradients: Gradients, *, split: bool) -> Gradients:
        assert isinstance(saved, _SequentialSavedTensors)
        for link in reversed(self.linked):
            part = saved.parts.pop()
            if part is None:  # frozen, with nothing trained before it
                return (None,) * saved.inputs_count
            gradients = link.run_backward(part, gradients, split=split)
        return gradients


class SequentialSegment(_ChainedSegment):
    """The same of segments that it owns."""

    def __init__(self, links: Sequence[Segment], kernels: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.links, self.kernels = nn.ModuleList(links), kernels
        self.link(*links)


class _SequentialSavedTensors(SavedTensors):
    """What the links of a chain keep, given up one by one."""

    __slots__ = ("inputs_count", "parts")

    def __init__(
        self, parts: list[SavedTensors | None], inputs_count: int, weight_grads: WeightGradStore
    ) -> None:
        super().__init__((), (), weight_grads)
        self.parts, self.inputs_count = parts, inputs_count

    def release_outputs(self) -> None:
        if self.parts and self.parts[-1] is not None:
            self.parts[-1].release_outputs()


class ModuleSegment(Segment):
    """Any module as one segment: it maps one or more tensors to one or more tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        found = self.module(*state)
        return found if isinstance(found, tuple) else (found,)


def gradients_of(
    roots: Sequence[Tensor | GradientEdge],
    asked: Sequence[Tensor],
    seeds: Sequence[Tensor],
    *,
    keep_graph: bool,
) -> Gradients:
    """As `torch.autograd.grad`, without what that checks each time: a third of what the host spends on it."""
    found: Gradients = Variable._execution_engine.run_backward(
        tuple(roots),
        tuple(seeds),
        keep_graph,
        False,
        tuple(asked),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to a parameter's gradient, in place where there is one.

    What autograd gives may share its memory with another gradient, or hold one number for many.
    """
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad.add_(gradient)
