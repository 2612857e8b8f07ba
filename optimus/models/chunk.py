"""The phases protocol: what a chunk answers when the executor plays one op of one microbatch.

A chunk lists the phases of an op in order: compute, or the launch of a collective, or the wait for it. The
executor plays them where the program says, with other work between them. Nothing of one chunk runs inside the
forward or backward of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from optimus.models.segment import Deferred, Gradients, Saved, Segment, State
from optimus.program.op import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One part of an op, ready to run. `kernels` are those of the plan's phases that it stands for."""

    kind: Kind  # F, R, B, I or W for compute; LAUNCH, WAIT
    layer: int  # counted inside the chunk, as the plan counts; ANY for a chunk that is one piece
    kernels: tuple[str, ...]  # none: all of the layer
    run: Callable[[], None]


ANY = -1
Recompute = Literal["none", "cheap", "attention", "full"]
CHEAP, ATTENTION = ("cheap",), ("attention",)  # kernels of what a plan makes again


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

    __slots__ = ("context", "deferred", "gradients", "kept", "needs", "saved", "state")

    def __init__(self, state: State, needs: tuple[bool, ...] | None, context: Any, segments: int) -> None:
        self.state, self.needs, self.context = state, needs, context
        self.saved: list[Saved | None] = [None] * segments
        self.deferred: list[Deferred | None] = [None] * segments
        self.kept: dict[int, tuple[State, tuple[bool, ...] | None]] = {}  # what segments are made again from
        self.gradients: Gradients = ()


class SegmentedChunk:
    """Layers cut into segments; a module that is not cut is one.

    What is made again before a layer's backward: nothing; what is `cheap` in it, which is emptied behind its
    forward; its `attention`; or with `full` all of it, so that only its inputs are kept. A chunk that is
    `whole` stands for all layers of its stage, however many the plan counts.
    """

    def __init__(
        self, layers: Sequence[Sequence[Segment]], *, recompute: Recompute = "none", whole: bool = False
    ) -> None:
        self.layers = nn.ModuleList(nn.ModuleList(layer) for layer in layers)
        self.recompute, self.whole = recompute, whole
        self._segments = [segment for layer in layers for segment in layer]
        self._layer_of = [number for number, layer in enumerate(layers) for _ in layer]
        self._remade = [self._is_remade(segment) for segment in self._segments]
        self._frames: dict[int, _Frame] = {}

    # ------------------------------------------------------------------------ what an op consists of

    def phases(self, kind: Kind, microbatch: int) -> list[Phase]:
        places = range(len(self._segments))
        if kind == Kind.F:
            found = [self._phase(kind, place, self._forward, microbatch) for place in places]
        elif kind == Kind.W:
            found = [self._phase(kind, place, self._weights, microbatch) for place in reversed(places)]
        else:
            backward = partial(self._backward, split=kind == Kind.I)
            found = []
            for layer in reversed(range(len(self.layers))):
                mine = [place for place in places if self._layer_of[place] == layer]
                if self.recompute == "cheap" and any(self._segments[place].has_cheap for place in mine):
                    fill = partial(self._fill, microbatch, layer)
                    found.append(Phase(kind=Kind.R, layer=layer, kernels=CHEAP, run=fill))
                again = [place for place in mine if self._remade[place]]
                found += [self._phase(Kind.R, place, self._again, microbatch) for place in again]
                found += [self._phase(kind, place, backward, microbatch) for place in reversed(mine)]
        return found or [Phase(kind=kind, layer=ANY, kernels=(), run=_pass)]

    def _phase(self, kind: Kind, place: int, play: Callable[[int, int], None], microbatch: int) -> Phase:
        return Phase(
            kind=kind,
            layer=ANY if self.whole else self._layer_of[place],
            kernels=self._segments[place].kernels,
            run=partial(play, microbatch, place),
        )

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
        if not any(frame.deferred):
            del self._frames[microbatch]  # no W has anything to do
        return found

    # ------------------------------------------------------------------------ phases

    def _forward(self, microbatch: int, place: int) -> None:
        frame, segment = self._frames[microbatch], self._segments[place]
        if frame.needs is None:
            with torch.no_grad():
                frame.state = segment.forward(frame.state, frame.context)
            return
        remade, empties = self._remade[place], self.recompute == "cheap"
        if remade and not self._follows(place):
            self._keep_input(frame, place)
        state, saved = segment.run(frame.state, frame.needs, frame.context, empties=empties)
        if saved is None:
            frame.needs = (False,) * len(state)
        else:
            frame.needs = tuple([tensor.requires_grad for tensor in state])
        if remade:
            state = tuple([tensor.detach() for tensor in state])
        else:
            frame.saved[place] = saved
        frame.state = state
        if empties and self._is_last(place):
            for each in self._saved_of(frame, self._layer_of[place]):
                each.deferred.empty()

    def _is_remade(self, segment: Segment) -> bool:
        """Whether a segment runs again before its backward."""
        wanted = self.recompute == "attention" and segment.kernels == ATTENTION
        return self.recompute == "full" or wanted

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
            if place not in frame.kept:
                frame.state, frame.needs = (), None
                return  # frozen, with nothing trained before it
            frame.state, frame.needs = frame.kept.pop(place)
        if frame.needs is None:
            return
        frame.state, frame.saved[place] = self._segments[place].run(frame.state, frame.needs, frame.context)
        frame.needs = tuple(tensor.requires_grad for tensor in frame.state)

    def _fill(self, microbatch: int, layer: int) -> None:
        """What was emptied behind a layer's forward."""
        for saved in self._saved_of(self._frames[microbatch], layer):
            saved.deferred.fill()

    def _backward(self, microbatch: int, place: int, *, split: bool) -> None:
        frame, segment = self._frames[microbatch], self._segments[place]
        saved, frame.saved[place] = frame.saved[place], None
        if saved is None:
            return  # frozen, with nothing trained before it
        saved.deferred.at_once = not split  # what they are made from need not wait for the segment's end
        frame.gradients = segment.input_gradient(saved, frame.gradients, split=split)
        if split:
            frame.deferred[place] = saved.deferred

    def _weights(self, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is None:
            return
        deferred, frame.deferred[place] = frame.deferred[place], None
        if deferred is not None:
            with torch.no_grad():
                for work in deferred:
                    work()
            deferred.clear()
        if not any(frame.deferred):
            del self._frames[microbatch]


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
