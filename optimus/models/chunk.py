"""The phases protocol: what a chunk answers when the executor plays one op of one microbatch.

A chunk lists the phases of an op in order: compute, or the launch of a collective, or the wait for it. The
executor plays them where the program says, with other work between them. Nothing of one chunk runs inside the
forward or backward of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optimus.models.segment import Block, Deferred, Gradients, Saved, Segment, State
from optimus.program.op import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One part of an op, ready to run. `kernels` are those of the plan's phases that it stands for."""

    kind: Kind  # F, R, B, I or W for compute; LAUNCH, WAIT
    layer: int  # counted inside the chunk, as the plan counts; ANY for a chunk that is one piece
    kernels: tuple[str, ...]  # none: all of the layer
    run: Callable[[], None]


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

    __slots__ = ("context", "deferred", "gradients", "kept", "needs", "saved", "state")

    def __init__(self, state: State, needs: tuple[bool, ...] | None, context: Any, segments: int) -> None:
        self.state, self.needs, self.context = state, needs, context
        self.saved: list[Saved | None] = [None] * segments
        self.deferred: list[Deferred] = [[] for _ in range(segments)]
        self.kept: dict[int, tuple[State, tuple[bool, ...] | None]] = {}  # inputs of layers to be made again
        self.gradients: Gradients = ()


class SegmentedChunk:
    """Layers cut into segments. An opaque chunk is one segment.

    With `recompute` only the inputs of a layer are kept, and its forward runs again before its backward. A
    chunk that is `whole` stands for all layers of its stage, however many the plan counts.
    """

    def __init__(
        self, layers: Sequence[Sequence[Segment]], *, recompute: bool = False, whole: bool = False
    ) -> None:
        self.layers = nn.ModuleList(nn.ModuleList(layer) for layer in layers)
        self.recompute, self.whole = recompute, whole
        self._segments = [segment for layer in layers for segment in layer]
        self._layer_of = [number for number, layer in enumerate(layers) for _ in layer]
        self._frames: dict[int, _Frame] = {}

    @classmethod
    def opaque(cls, module: nn.Module, *, takes_context: bool = False) -> SegmentedChunk:
        """Any module as a chunk of one layer and one phase."""
        return cls([[Block(module, takes_context=takes_context)]], whole=True)

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
                if self.recompute:
                    found += [self._phase(Kind.R, place, self._again, microbatch) for place in mine]
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
        frame.state = ()
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
        if self.recompute:
            self._keep_input(frame, place)
        state, saved = segment.run(frame.state, frame.needs, frame.context)
        if saved is None:
            frame.needs = (False,) * len(state)
        else:
            frame.needs = tuple([tensor.requires_grad for tensor in state])
        if self.recompute:
            state = tuple([tensor.detach() for tensor in state])
        else:
            frame.saved[place] = saved
        frame.state = state

    def _keep_input(self, frame: _Frame, place: int) -> None:
        """Where a layer begins, what its forward is made again from."""
        layer = self._layer_of[place]
        assert frame.needs is not None
        if place and self._layer_of[place - 1] == layer:
            return
        if any(frame.needs) or parameters_of([self.layers[layer]]):
            frame.kept[layer] = frame.state, frame.needs

    def _again(self, microbatch: int, place: int) -> None:
        """One segment of a layer's forward, from the layer's kept input."""
        frame, layer = self._frames[microbatch], self._layer_of[place]
        if layer not in frame.kept:
            return  # frozen, with nothing trained before it
        if place == 0 or self._layer_of[place - 1] != layer:
            frame.state, frame.needs = frame.kept[layer]
        assert frame.needs is not None
        frame.state, frame.saved[place] = self._segments[place].run(frame.state, frame.needs, frame.context)
        frame.needs = tuple(tensor.requires_grad for tensor in frame.state)
        if place + 1 == len(self._segments) or self._layer_of[place + 1] != layer:
            del frame.kept[layer]

    def _backward(self, microbatch: int, place: int, *, split: bool) -> None:
        frame, segment = self._frames[microbatch], self._segments[place]
        saved, frame.saved[place] = frame.saved[place], None
        if saved is None:
            return  # frozen, with nothing trained before it
        frame.gradients = segment.input_gradient(saved, frame.gradients, split=split)
        if split:
            frame.deferred[place] = saved.deferred
        else:
            _play(saved.deferred)

    def _weights(self, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is None:
            return
        deferred, frame.deferred[place] = frame.deferred[place], []
        _play(deferred)
        if not any(frame.deferred):
            del self._frames[microbatch]


def _play(deferred: Deferred) -> None:
    """Weight gradients: no graph is made of what they are computed from."""
    with torch.no_grad():
        for work in deferred:
            work()
    deferred.clear()


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
