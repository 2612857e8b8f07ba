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

from optimus.models.param_split import Split

State = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


class WeightGradStore(list[Callable[[], None]]):
    """Weight gradients to compute later, each of which adds to its parameter; or `at_once`.

    `cheap` are tensors that a backward reads and that are quickly made again from others that it reads: they
    may be emptied behind the forward, and filled again before the backward. Only those who do so note them.
    """

    __slots__ = ("at_once", "cheap", "empties")

    def __init__(self, *, empties: bool = False) -> None:
        super().__init__()
        self.empties, self.at_once = empties, False
        self.cheap: list[tuple[Tensor, Callable[[Tensor], Tensor], Tensor]] = []

    def add(self, work: Callable[[], None]) -> None:
        """Said in a backward, where no graph is made."""
        if self.at_once:
            work()
        else:
            self.append(work)

    def note(self, made: Tensor, make: Callable[[Tensor], Tensor], rows: Tensor) -> None:
        """That `make` gave this of `rows`, quickly: it may be emptied behind the forward."""
        if self.empties:
            self.cheap.append((made, make, rows))

    def empty(self) -> None:
        """Gives up the memory of what is cheap; whoever holds it keeps a tensor without numbers."""
        for tensor, _, _ in self.cheap:
            tensor.untyped_storage().resize_(0)

    def fill(self) -> None:
        """Makes what was emptied again, in the order in which it was made."""
        with torch.no_grad():
            for tensor, make, rows in self.cheap:
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.data.copy_(make(rows))  # not as an operation on what autograd has saved
        self.cheap.clear()


class Saved:
    """What one segment keeps of one microbatch, from its forward to its backward."""

    __slots__ = ("inputs", "outputs", "deferred")  # noqa: RUF023  in the order in which they come

    def __init__(self, inputs: State, outputs: State, deferred: WeightGradStore) -> None:
        self.inputs, self.deferred = inputs, deferred
        self.outputs: tuple[Tensor | GradientEdge, ...] = outputs

    def let_outputs_go(self) -> None:
        """A backward needs to know where they came from, not their numbers: who took them keeps them."""
        self.outputs = tuple(
            get_gradient_edge(each) if isinstance(each, Tensor) and each.grad_fn is not None else each
            for each in self.outputs
        )


class Segment(nn.Module):
    """Subclasses give `forward`, a function of parameters, state and context without other effects.

    `kernels` are those of the cost model that a segment stands for. A segment whose weight gradients all go
    through `deferred` says `defers = True`; for others the weight half of a backward asks autograd again.
    """

    kernels: tuple[str, ...] = ()
    defers = False
    has_cheap = False  # it notes something that is quickly made again
    is_end = False  # an embedding, a projector or a head: never made again
    keeps_nothing = False  # between forward and backward: no reason to make it again
    meets = False  # other ranks of its tensor-parallel group, in the midst of its forward
    # Of parameters by name: how tensor parallelism divides them. Others are whole on every rank, which sees
    # only some rows or heads: their gradients are summed over the ranks.
    splits: Mapping[str, Split] = MappingProxyType({})

    def parts(self) -> list[Segment]:
        """What it consists of where its layer is divided: segments and the exchanges between them."""
        return [self]

    def forward(self, state: State, context: Any, deferred: WeightGradStore | None = None) -> State:
        """The next state; with `deferred`, linears add their weight gradients to it in autograd's backward.

        Formulas have a backward of their own, in `input_gradient`: here they compute, and defer nothing.
        """
        raise NotImplementedError

    @property
    def trained(self) -> list[nn.Parameter]:
        """Parameters that get gradients. Freezing is decided before the first step."""
        return self._trained

    @cached_property
    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def run(
        self, state: State, needs: tuple[bool, ...], context: Any, deferred: WeightGradStore
    ) -> tuple[State, Saved | None]:
        """The next state, and what its backward will need: nothing if no gradient is asked for.

        `needs` says which tensors of the state want a gradient; those of the next that do `requires_grad`.
        """
        if not self.trained and not any(needs):
            with torch.no_grad():
                return self.forward(state, context), None
        detached = [tensor.detach() for tensor in state]
        for tensor, need in zip(detached, needs, strict=True):
            if need:
                tensor.requires_grad_()
        inputs = tuple(detached)
        if torch.is_grad_enabled():  # to make sure of it costs more than to ask
            outputs = self.forward(inputs, context, deferred)
        else:
            with torch.enable_grad():
                outputs = self.forward(inputs, context, deferred)
        return outputs, Saved(inputs, outputs, deferred)

    def input_gradient(self, saved: Saved, gradients: Gradients, *, split: bool) -> Gradients:
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
        later = split and not self.defers and bool(self.trained)
        trained = [] if later else self.trained
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        count = len(wanted)
        asked = wanted + trained if trained else wanted
        found: Gradients = (None,) * len(asked)
        if roots and asked:
            found = gradients_of(roots, asked, seeds, keep_graph=later)
        if trained:
            self.add_gradients(trained, found[count:])
        if later and roots:
            saved.deferred.append(lambda: self._weight_gradients(roots, seeds))
        if count == len(inputs):
            return found[:count]
        given = iter(found)
        return tuple([next(given) if tensor.requires_grad else None for tensor in inputs])

    def _weight_gradients(self, roots: list[Tensor | GradientEdge], seeds: list[Tensor]) -> None:
        """The weight half by asking autograd a second time."""
        trained = self.trained
        self.add_gradients(trained, gradients_of(roots, trained, seeds, keep_graph=False))

    def add_gradients(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        """What autograd found of some parameters, to what they already have."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                add_gradient(parameter, gradient)


class Part(Segment):
    """A function of another segment, with the parameters that it reads, to be played for itself."""

    defers = True

    def __init__(
        self,
        owner: Segment,
        function: Callable[[State, Any, WeightGradStore | None], State],
        kernels: tuple[str, ...],
        reads: Sequence[nn.Module | nn.Parameter | None],
        *,
        meets: bool = False,
    ) -> None:
        super().__init__()
        self.owner, self._function, self.meets = owner, function, meets
        self.kernels, self.is_end = kernels, owner.is_end
        self._reads = [each for each in reads if each is not None]

    @cached_property
    def _trained(self) -> list[nn.Parameter]:
        found: list[nn.Parameter] = []
        for each in self._reads:
            found += [each] if isinstance(each, nn.Parameter) else each.parameters()
        return [parameter for parameter in found if parameter.requires_grad]

    def forward(self, state: State, context: Any, deferred: WeightGradStore | None = None) -> State:
        return self._function(state, context, deferred)


class Linked(Segment):
    """Segments between which nothing is scheduled, as one; `linked` does not own them."""

    def link(self, *links: Segment) -> None:
        self.linked = list(links)  # which torch does not look into
        self.defers = all(link.defers for link in links)
        self.has_cheap = any(link.has_cheap for link in links)
        self.is_end = any(link.is_end for link in links)

    def forward(self, state: State, context: Any, deferred: WeightGradStore | None = None) -> State:
        for link in self.linked:
            state = link.forward(state, context, deferred)
        return state

    def run(
        self, state: State, needs: tuple[bool, ...], context: Any, deferred: WeightGradStore
    ) -> tuple[State, Saved | None]:
        parts, first = [], needs
        for link in self.linked:
            state, saved = link.run(state, needs, context, deferred)
            needs = tuple([tensor.requires_grad for tensor in state])
            parts.append(saved)
        return state, _Chained(parts, len(first), deferred) if any(parts) else None

    def input_gradient(self, saved: Saved, gradients: Gradients, *, split: bool) -> Gradients:
        assert isinstance(saved, _Chained)
        for link in reversed(self.linked):
            part = saved.parts.pop()
            if part is None:  # frozen, with nothing trained before it
                return (None,) * saved.inputs_count
            gradients = link.input_gradient(part, gradients, split=split)
        return gradients


class SequentialSegment(Linked):
    """The same of segments that it owns."""

    def __init__(self, links: Sequence[Segment], kernels: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.links, self.kernels = nn.ModuleList(links), kernels
        self.link(*links)


class _Chained(Saved):
    """What the links of a chain keep, given up one by one."""

    __slots__ = ("inputs_count", "parts")

    def __init__(self, parts: list[Saved | None], inputs_count: int, deferred: WeightGradStore) -> None:
        super().__init__((), (), deferred)
        self.parts, self.inputs_count = parts, inputs_count

    def let_outputs_go(self) -> None:
        if self.parts and self.parts[-1] is not None:
            self.parts[-1].let_outputs_go()


class Block(Segment):
    """Any module as one segment: it maps one or more tensors to one or more tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: State, context: Any, deferred: WeightGradStore | None = None) -> State:
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
