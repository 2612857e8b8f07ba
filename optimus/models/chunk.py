"""The phases protocol: what a chunk answers when the executor plays one op of one microbatch.

A chunk lists the phases of an op in order: compute, or the launch of a collective, or the wait for it. The
executor plays them where the program says, with other work between them. Nothing of one chunk runs inside the
forward or backward of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optimus.ir.op import Kind
from optimus.models.collectives import AsyncCollective
from optimus.models.phase_order import Layer, Play, Recompute
from optimus.models.segment import Gradients, Saved, Segment, State, WeightGradStore
from optimus.models.tensor_parallel import Exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One part of an op, ready to run. `kernels` are those of the plan's phases that it stands for."""

    kind: Kind  # F, R, B, I or W for compute; LAUNCH, WAIT
    layer: int  # counted inside the chunk, as the plan counts; ANY for a chunk that is one piece
    kernels: tuple[str, ...]  # none: all of the layer
    run: Callable[[], None]
    meets: bool = False  # it waits for other ranks of its tensor-parallel group


ANY = -1


class Chunk(Protocol):
    """One virtual stage of a module on one rank."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """As the plan counts them: an embedding, a projector and a head are layers too."""

    def trained(self, first_layer: int, end_layer: int) -> list[Tensor]:
        """Parameters of these layers that get gradients."""

    def phases(self, kind: Kind, microbatch: int) -> Sequence[Phase]:
        """What an op (F, B, I or W) consists of; asked once for every microbatch, before the first step."""

    def begin(self, microbatch: int, state: State, needs: tuple[bool, ...] | None, context: Any) -> None:
        """The inputs of a forward; `needs`: which of them want a gradient, None if no backward comes."""

    def output(self, microbatch: int) -> State:
        """What a forward made, detached."""

    def begin_backward(self, microbatch: int, gradients: Gradients) -> None:
        """Gradients of what `output` gave; of the loss, if it was a loss."""

    def input_gradients(self, microbatch: int) -> Gradients:
        """What a backward (B or I) made, one per input."""


class _Frame:
    """What is alive of one microbatch in one chunk."""

    __slots__ = (
        "context", "deferred", "flights", "given_up", "gradients", "kept", "late", "needs", "saved", "spent",
        "state", "wanted",
    )  # fmt: skip

    def __init__(self, state: State, needs: tuple[bool, ...] | None, context: Any, segments: int) -> None:
        self.state, self.needs, self.context = state, needs, context
        self.saved: list[Saved | None] = [None] * segments
        self.deferred: list[WeightGradStore | None] = [None] * segments
        self.kept: dict[int, tuple[State, tuple[bool, ...] | None]] = {}  # what segments are made again from
        self.gradients: Gradients = ()
        # Of exchanges, by place: what is on its way, a rank's part and the whole that was given up for now,
        # what no backward reads, whether a gradient comes back, and the gradients of one that is late.
        self.flights: dict[int, AsyncCollective] = {}
        self.given_up: dict[int, tuple[Tensor, Tensor]] = {}
        self.spent: dict[int, list[Tensor]] = {}
        self.wanted: set[int] = set()
        self.late: dict[int, Gradients] = {}


class SegmentedChunk:
    """Layers cut into segments; a module that is not cut is one.

    What is made again before a layer's backward: nothing; what is `cheap` in it, which is emptied behind its
    forward; its `attention`; or with `full` all of it, so that only its inputs are kept. If a chunk
    `regathers`, what was gathered for a product is given up behind it, and gathered again for the gradient of
    its weights. One that is `whole` stands for all layers of its stage, however many the plan counts.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Segment]],
        *,
        recompute: Recompute = "none",
        regathers: bool = True,
        whole: bool = False,
    ) -> None:
        self.layers = nn.ModuleList(nn.ModuleList(layer) for layer in layers)
        self.recompute, self.whole = recompute, whole
        self._segments = [segment for layer in layers for segment in layer]
        self._layer_of = [number for number, layer in enumerate(layers) for _ in layer]
        firsts = accumulate((len(layer) for layer in layers), initial=0)
        self._ordered = [
            Layer(layer, first, recompute, regathers=regathers)
            for layer, first in zip(layers, firsts, strict=False)
        ]
        places = range(len(self._segments))
        self._remade = [self._ordered[self._layer_of[place]].is_made_again(place) for place in places]
        self._gives_up = [self._ordered[self._layer_of[place]].gives_up(place) for place in places]
        self._frames: dict[int, _Frame] = {}

    # ------------------------------------------------------------------------ what an op consists of

    def phases(self, kind: Kind, microbatch: int) -> list[Phase]:
        plays: dict[Play, Callable[[int, int], None]] = {
            "forward": self._forward,
            "again": self._again,
            "fill": self._fill,
            "backward": partial(self._backward, split=False),
            "inputs": partial(self._backward, split=True),
            "weights": self._weights,
            "launch": self._launch,
            "land": self._land,
            "launch_back": self._launch_back,
            "land_back": self._land_back,
            "launch_again": self._launch_again,
            "land_again": self._land_again,
        }
        found = [
            Phase(
                kind=step.kind,
                layer=ANY if self.whole else self._layer_of[step.place],
                kernels=step.kernels,
                run=partial(plays[step.play], microbatch, step.place),
                meets=step.kind == Kind.WAIT or (kind == Kind.F and self._segments[step.place].meets),
            )
            for layer in (self._ordered if kind == Kind.F else reversed(self._ordered))
            for step in layer.steps(kind)
        ]
        return found or [Phase(kind=kind, layer=ANY, kernels=(), run=_pass)]

    # ------------------------------------------------------------------------ data in and out

    def trained(self, first_layer: int, end_layer: int) -> list[Tensor]:
        return parameters_of(self.layers if self.whole else self.layers[first_layer:end_layer])

    def begin(self, microbatch: int, state: State, needs: tuple[bool, ...] | None, context: Any) -> None:
        self._frames[microbatch] = _Frame(state, needs, context, len(self._segments))

    def output(self, microbatch: int) -> State:
        frame = self._frames[microbatch]
        found = tuple(tensor.detach() for tensor in frame.state)
        frame.state, last = (), frame.saved[-1] if frame.saved else None
        if last is not None:
            last.let_outputs_go()
        if not any(frame.saved) and not frame.kept:
            del self._frames[microbatch]  # no backward will come
        return found

    def begin_backward(self, microbatch: int, gradients: Gradients) -> None:
        self._frames[microbatch].gradients = gradients

    def input_gradients(self, microbatch: int) -> Gradients:
        frame = self._frames[microbatch]
        found, frame.gradients = frame.gradients, ()
        self._forget_finished(microbatch)
        return found

    def _forget_finished(self, microbatch: int) -> None:
        """When no op has anything to do any more."""
        frame = self._frames[microbatch]
        if not (frame.gradients or frame.late or any(frame.saved) or any(frame.deferred)):
            del self._frames[microbatch]

    # ------------------------------------------------------------------------ forward

    def _forward(self, microbatch: int, place: int) -> None:
        frame, segment = self._frames[microbatch], self._segments[place]
        if frame.needs is None:
            with torch.no_grad():
                frame.state = segment.forward(frame.state, frame.context)
            return
        remade, empties = self._remade[place], self.recompute == "cheap"
        if remade and not self._follows(place):
            self._keep_input(frame, place)
        deferred = WeightGradStore(empties=empties)
        state, saved = segment.run(frame.state, frame.needs, frame.context, deferred)
        if saved is None:
            frame.needs = (False,) * len(state)
        else:
            frame.needs = tuple([tensor.requires_grad for tensor in state])
        if remade:
            state = tuple([tensor.detach() for tensor in state])
        else:
            frame.saved[place] = saved
        frame.state = state
        self._give_up(frame, place - 1)
        if remade:
            frame.given_up.pop(place - 1, None)
        if empties and self._is_last(place):
            for each in self._saved_of(frame, self._layer_of[place]):
                each.deferred.empty()

    def _follows(self, place: int) -> bool:
        """Whether a segment that is made again is so from the one before it."""
        same = place > 0 and self._layer_of[place - 1] == self._layer_of[place]
        return same and self._remade[place - 1]

    def _is_last(self, place: int) -> bool:
        """Of its layer."""
        return place + 1 == len(self._segments) or self._layer_of[place + 1] != self._layer_of[place]

    def _saved_of(self, frame: _Frame, layer: int) -> list[Saved]:
        found = [frame.saved[place] for place, at in enumerate(self._layer_of) if at == layer]
        return [saved for saved in found if saved is not None]

    def _keep_input(self, frame: _Frame, place: int) -> None:
        """What a segment, and those of its layer that follow, are made again from."""
        assert frame.needs is not None
        if any(frame.needs) or parameters_of([self.layers[self._layer_of[place]]]):
            frame.kept[place] = frame.state, frame.needs

    def _again(self, microbatch: int, place: int) -> None:
        """One segment of a forward, from what was kept for it or from the segment before it."""
        frame = self._frames[microbatch]
        if not self._follows(place):
            frame.state, frame.needs = frame.kept.pop(place, ((), None))
        if frame.needs is None:
            return  # frozen, with nothing trained before it
        segment, given = self._segments[place], frame.state
        frame.state, frame.saved[place] = segment.run(given, frame.needs, frame.context, WeightGradStore())
        frame.needs = tuple(tensor.requires_grad for tensor in frame.state)
        self._give_up(frame, place - 1)

    def _fill(self, microbatch: int, place: int) -> None:
        """What was emptied behind the forward of the layer that begins here."""
        for saved in self._saved_of(self._frames[microbatch], self._layer_of[place]):
            saved.deferred.fill()

    # ------------------------------------------------------------------------ backward

    def _backward(self, microbatch: int, place: int, *, split: bool) -> None:
        frame, segment = self._frames[microbatch], self._segments[place]
        saved = frame.saved[place]
        if saved is None:
            return  # frozen, with nothing trained before it
        frame.state = ()  # if its layer was made again, nobody needs what that ended with
        if split and self._leave_for_later(frame, place + 1):
            frame.gradients = segment.input_gradient(saved, frame.gradients, split=False)
            return
        frame.saved[place] = None
        saved.deferred.at_once = not split  # what they are made from need not wait for the segment's end
        frame.gradients = segment.input_gradient(saved, frame.gradients, split=split)
        if split:
            frame.deferred[place] = saved.deferred

    def _leave_for_later(self, frame: _Frame, place: int) -> bool:
        """Gradients that only a W needs are exchanged there."""
        exchange = self._segments[place] if place < len(self._segments) else None
        if not (isinstance(exchange, Exchange) and exchange.late and place in frame.wanted):
            return False
        given, at = frame.gradients, exchange.at
        frame.late[place], frame.gradients = given, (*given[:at], None, *given[at + 1 :])
        return True

    def _weights(self, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is None:
            return
        deferred, frame.deferred[place] = frame.deferred[place], None
        saved = frame.saved[place]
        if saved is not None and frame.gradients:  # its gradients came late
            frame.saved[place], saved.deferred.at_once = None, True
            self._segments[place].input_gradient(saved, frame.gradients, split=False)
            frame.gradients = ()
        if deferred is not None:
            with torch.no_grad():
                for work in deferred:
                    work()
            deferred.clear()
        self._forget_finished(microbatch)

    # ------------------------------------------------------------------------ exchanges

    def _exchange(self, place: int) -> Exchange:
        found = self._segments[place]
        assert isinstance(found, Exchange)
        return found

    def _launch(self, microbatch: int, place: int) -> None:
        frame = self._frames[microbatch]
        if frame.state:  # else its layer is to be made again, and has nothing to learn
            frame.flights[place] = self._exchange(place).launch(frame.state, frame.context)

    def _land(self, microbatch: int, place: int) -> None:
        frame, exchange = self._frames[microbatch], self._exchange(place)
        if place not in frame.flights:
            return
        before, frame.state = frame.state, frame.flights.pop(place).land()
        made = frame.saved[place - 1] if place else None
        if made is not None:
            made.let_outputs_go()  # what was exchanged is large, and on its way it was alive
        if frame.needs is None:
            return
        frame.needs = exchange.needs(frame.needs)
        if frame.needs[exchange.at]:
            frame.wanted.add(place)
        if self._gives_up[place]:
            frame.given_up[place] = before[exchange.at].detach(), frame.state[exchange.at]
        elif exchange.spent:
            frame.spent[place] = [frame.state[at] for at in exchange.spent]

    def _give_up(self, frame: _Frame, place: int) -> None:
        """What was gathered for the product that has just been made, or scattered to be added."""
        if place in frame.given_up:
            frame.given_up[place][1].untyped_storage().resize_(0)
        for tensor in frame.spent.pop(place, ()):
            tensor.untyped_storage().resize_(0)

    def _launch_back(self, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is None or place not in frame.wanted:
            return
        frame.wanted.discard(place)
        given = frame.late.pop(place, frame.gradients)
        frame.flights[place] = self._exchange(place).launch_back(given, frame.context)

    def _land_back(self, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is not None and place in frame.flights:
            frame.gradients = frame.flights.pop(place).land()

    def _launch_again(self, microbatch: int, place: int) -> None:
        """Into the memory that the gradient of weights will read: what it was given up from."""
        frame = self._frames.get(microbatch)
        if frame is None or place not in frame.given_up:
            return
        part, whole = frame.given_up.pop(place)
        whole.untyped_storage().resize_(whole.nbytes)
        frame.flights[~place] = self._exchange(place).launch_again(part, whole.data)

    def _land_again(self, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is not None and ~place in frame.flights:
            frame.flights.pop(~place).land()


def _pass() -> None:
    """A chunk without layers hands on what it gets."""


def parameters_of(layers: Sequence[nn.Module]) -> list[Tensor]:
    """Trained parameters of some layers, in order, each once."""
    found: dict[int, Tensor] = {}
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.requires_grad:
                found.setdefault(id(parameter), parameter)
    return list(found.values())
