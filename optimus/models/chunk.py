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

from optimus.ir.op import OpKind
from optimus.models.collectives import AsyncCollective
from optimus.models.phase_order import LayerPhases, PhaseAction, Recompute
from optimus.models.segment import Gradients, SavedTensors, Segment, State, WeightGradStore
from optimus.models.tensor_parallel import TpCollective


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPhase:
    """One part of an op, ready to run. `kernels` are those of the plan's phases that it stands for."""

    kind: OpKind  # F, R, B, I or W for compute; LAUNCH, WAIT
    layer: int  # counted inside the chunk, as the plan counts; ANY for a chunk that is one piece
    kernels: tuple[str, ...]  # none: all of the layer
    run: Callable[[], None]
    waits_for_tp: bool = False  # it waits for other ranks of its tensor-parallel group


ALL_LAYERS = -1


class Chunk(Protocol):
    """One virtual stage of a module on one rank."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """As the plan counts them: an embedding, a projector and a head are layers too."""

    def trainable_parameters(self, first_layer: int, end_layer: int) -> list[Tensor]:
        """Parameters of these layers that get gradients."""

    def phases(self, kind: OpKind, microbatch: int) -> Sequence[ChunkPhase]:
        """What an op (F, B, I or W) consists of; asked once for every microbatch, before the first step."""

    def begin_forward(
        self, microbatch: int, state: State, needs: tuple[bool, ...] | None, context: Any
    ) -> None:
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
        "context",
        "flights",
        "freed",
        "freed_gathers",
        "gradients",
        "in_wgrad",
        "kept",
        "needs",
        "saved",
        "state",
        "wanted",
        "weight_grads",
    )  # fmt: skip

    def __init__(self, state: State, needs: tuple[bool, ...] | None, context: Any, segments: int) -> None:
        self.state, self.needs, self.context = state, needs, context
        self.saved: list[SavedTensors | None] = [None] * segments
        self.weight_grads: list[WeightGradStore | None] = [None] * segments
        self.kept: dict[int, tuple[State, tuple[bool, ...] | None]] = {}  # what segments are made again from
        self.gradients: Gradients = ()
        # Of exchanges, by place: what is on its way, a rank's part and the whole that was given up for now,
        # what no backward reads, whether a gradient comes back, and the gradients of one that is late.
        self.flights: dict[int, AsyncCollective] = {}
        self.freed_gathers: dict[int, tuple[Tensor, Tensor]] = {}
        self.freed: dict[int, list[Tensor]] = {}
        self.wanted: set[int] = set()
        self.in_wgrad: dict[int, Gradients] = {}


class SegmentedChunk:
    """Layers cut into segments; a module that is not cut is one.

    What is made again before a layer's backward: nothing; what is `cheap` in it, which is emptied behind its
    forward; its `attention`; or with `full` all of it, so that only its inputs are kept. If a chunk
    `regather`, what was gathered for a product is given up behind it, and gathered again for the gradient of
    its weights. One that is `whole` stands for all layers of its stage, however many the plan counts.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Segment]],
        *,
        recompute: Recompute = "none",
        regather: bool = True,
        opaque: bool = False,
    ) -> None:
        self.layers = nn.ModuleList(nn.ModuleList(layer) for layer in layers)
        self.recompute, self.opaque = recompute, opaque
        self._segments = [segment for layer in layers for segment in layer]
        self._layer_of = [number for number, layer in enumerate(layers) for _ in layer]
        firsts = accumulate((len(layer) for layer in layers), initial=0)
        self._ordered = [
            LayerPhases(layer, first, recompute, regather=regather)
            for layer, first in zip(layers, firsts, strict=False)
        ]
        places = range(len(self._segments))
        self._recomputed = [self._ordered[self._layer_of[place]].is_recomputed(place) for place in places]
        self._regathered = [self._ordered[self._layer_of[place]].regathers_input(place) for place in places]
        self._frames: dict[int, _Frame] = {}

    # ------------------------------------------------------------------------ what an op consists of

    def phases(self, kind: OpKind, microbatch: int) -> list[ChunkPhase]:
        actions: dict[PhaseAction, Callable[[int, int], None]] = {
            "forward": self._forward,
            "recompute": self._recompute,
            "recompute_freed": self._recompute_freed,
            "backward": partial(self._backward, split=False),
            "input_grad": partial(self._backward, split=True),
            "weight_grad": self._weight_grad,
            "launch": self._launch,
            "wait": self._wait,
            "launch_backward": self._launch_backward,
            "wait_backward": self._wait_backward,
            "launch_regather": self._launch_regather,
            "wait_regather": self._wait_regather,
        }
        found = [
            ChunkPhase(
                kind=step.kind,
                layer=ALL_LAYERS if self.opaque else self._layer_of[step.place],
                kernels=step.kernels,
                run=partial(actions[step.action], microbatch, step.place),
                waits_for_tp=step.kind == OpKind.WAIT
                or (kind == OpKind.FORWARD and self._segments[step.place].waits_for_tp),
            )
            for layer in (self._ordered if kind == OpKind.FORWARD else reversed(self._ordered))
            for step in layer.steps(kind)
        ]
        return found or [ChunkPhase(kind=kind, layer=ALL_LAYERS, kernels=(), run=_pass)]

    # ------------------------------------------------------------------------ data in and out

    def trainable_parameters(self, first_layer: int, end_layer: int) -> list[Tensor]:
        return trainable_parameters(self.layers if self.opaque else self.layers[first_layer:end_layer])

    def begin_forward(
        self, microbatch: int, state: State, needs: tuple[bool, ...] | None, context: Any
    ) -> None:
        self._frames[microbatch] = _Frame(state, needs, context, len(self._segments))

    def output(self, microbatch: int) -> State:
        frame = self._frames[microbatch]
        found = tuple(tensor.detach() for tensor in frame.state)
        frame.state, last = (), frame.saved[-1] if frame.saved else None
        if last is not None:
            last.release_outputs()
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
        if not (frame.gradients or frame.in_wgrad or any(frame.saved) or any(frame.weight_grads)):
            del self._frames[microbatch]

    # ------------------------------------------------------------------------ forward

    def _forward(self, microbatch: int, place: int) -> None:
        frame, segment = self._frames[microbatch], self._segments[place]
        if frame.needs is None:
            with torch.no_grad():
                frame.state = segment.forward(frame.state, frame.context)
            return
        remade, track_recomputable = self._recomputed[place], self.recompute == "cheap"
        if remade and not self._follows(place):
            self._keep_input(frame, place)
        weight_grads = WeightGradStore(track_recomputable=track_recomputable)
        state, saved = segment.run_forward(frame.state, frame.needs, frame.context, weight_grads)
        if saved is None:
            frame.needs = (False,) * len(state)
        else:
            frame.needs = tuple([tensor.requires_grad for tensor in state])
        if remade:
            state = tuple([tensor.detach() for tensor in state])
        else:
            frame.saved[place] = saved
        frame.state = state
        self._free_inputs(frame, place - 1)
        if remade:
            frame.freed_gathers.pop(place - 1, None)
        if track_recomputable and self._is_last(place):
            for each in self._saved_of(frame, self._layer_of[place]):
                each.weight_grads.free()

    def _follows(self, place: int) -> bool:
        """Whether a segment that is made again is so from the one before it."""
        same = place > 0 and self._layer_of[place - 1] == self._layer_of[place]
        return same and self._recomputed[place - 1]

    def _is_last(self, place: int) -> bool:
        """Of its layer."""
        return place + 1 == len(self._segments) or self._layer_of[place + 1] != self._layer_of[place]

    def _saved_of(self, frame: _Frame, layer: int) -> list[SavedTensors]:
        found = [frame.saved[place] for place, at in enumerate(self._layer_of) if at == layer]
        return [saved for saved in found if saved is not None]

    def _keep_input(self, frame: _Frame, place: int) -> None:
        """What a segment, and those of its layer that follow, are made again from."""
        assert frame.needs is not None
        if any(frame.needs) or trainable_parameters([self.layers[self._layer_of[place]]]):
            frame.kept[place] = frame.state, frame.needs

    def _recompute(self, microbatch: int, place: int) -> None:
        """One segment of a forward, from what was kept for it or from the segment before it."""
        frame = self._frames[microbatch]
        if not self._follows(place):
            frame.state, frame.needs = frame.kept.pop(place, ((), None))
        if frame.needs is None:
            return  # frozen, with nothing trained before it
        segment, given = self._segments[place], frame.state
        frame.state, frame.saved[place] = segment.run_forward(
            given, frame.needs, frame.context, WeightGradStore()
        )
        frame.needs = tuple(tensor.requires_grad for tensor in frame.state)
        self._free_inputs(frame, place - 1)

    def _recompute_freed(self, microbatch: int, place: int) -> None:
        """What was emptied behind the forward of the layer that begins here."""
        for saved in self._saved_of(self._frames[microbatch], self._layer_of[place]):
            saved.weight_grads.recompute()

    # ------------------------------------------------------------------------ backward

    def _backward(self, microbatch: int, place: int, *, split: bool) -> None:
        frame, segment = self._frames[microbatch], self._segments[place]
        saved = frame.saved[place]
        if saved is None:
            return  # frozen, with nothing trained before it
        frame.state = ()  # if its layer was made again, nobody needs what that ended with
        if split and self._leave_to_wgrad(frame, place + 1):
            frame.gradients = segment.run_backward(saved, frame.gradients, split=False)
            return
        frame.saved[place] = None
        saved.weight_grads.immediate = (
            not split
        )  # what they are made from need not wait for the segment's end
        frame.gradients = segment.run_backward(saved, frame.gradients, split=split)
        if split:
            frame.weight_grads[place] = saved.weight_grads

    def _leave_to_wgrad(self, frame: _Frame, place: int) -> bool:
        """Gradients that only a W needs are exchanged there."""
        exchange = self._segments[place] if place < len(self._segments) else None
        if not (isinstance(exchange, TpCollective) and exchange.in_wgrad and place in frame.wanted):
            return False
        given, at = frame.gradients, exchange.state_index
        frame.in_wgrad[place], frame.gradients = given, (*given[:at], None, *given[at + 1 :])
        return True

    def _weight_grad(self, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is None:
            return
        weight_grads, frame.weight_grads[place] = frame.weight_grads[place], None
        saved = frame.saved[place]
        if saved is not None and frame.gradients:  # its gradients came late
            frame.saved[place], saved.weight_grads.immediate = None, True
            self._segments[place].run_backward(saved, frame.gradients, split=False)
            frame.gradients = ()
        if weight_grads is not None:
            with torch.no_grad():
                for work in weight_grads:
                    work()
            weight_grads.clear()
        self._forget_finished(microbatch)

    # ------------------------------------------------------------------------ exchanges

    def _collective(self, place: int) -> TpCollective:
        found = self._segments[place]
        assert isinstance(found, TpCollective)
        return found

    def _launch(self, microbatch: int, place: int) -> None:
        frame = self._frames[microbatch]
        if frame.state:  # else its layer is to be made again, and has nothing to learn
            frame.flights[place] = self._collective(place).launch(frame.state, frame.context)

    def _wait(self, microbatch: int, place: int) -> None:
        frame, exchange = self._frames[microbatch], self._collective(place)
        if place not in frame.flights:
            return
        before, frame.state = frame.state, frame.flights.pop(place).wait()
        made = frame.saved[place - 1] if place else None
        if made is not None:
            made.release_outputs()  # what was exchanged is large, and on its way it was alive
        if frame.needs is None:
            return
        frame.needs = exchange.output_needs_grad(frame.needs)
        if frame.needs[exchange.state_index]:
            frame.wanted.add(place)
        if self._regathered[place]:
            frame.freed_gathers[place] = (
                before[exchange.state_index].detach(),
                frame.state[exchange.state_index],
            )
        elif exchange.freed:
            frame.freed[place] = [frame.state[at] for at in exchange.freed]

    def _free_inputs(self, frame: _Frame, place: int) -> None:
        """What was gathered for the product that has just been made, or scattered to be added."""
        if place in frame.freed_gathers:
            frame.freed_gathers[place][1].untyped_storage().resize_(0)
        for tensor in frame.freed.pop(place, ()):
            tensor.untyped_storage().resize_(0)

    def _launch_backward(self, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is None or place not in frame.wanted:
            return
        frame.wanted.discard(place)
        given = frame.in_wgrad.pop(place, frame.gradients)
        frame.flights[place] = self._collective(place).launch_backward(given, frame.context)

    def _wait_backward(self, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is not None and place in frame.flights:
            frame.gradients = frame.flights.pop(place).wait()

    def _launch_regather(self, microbatch: int, place: int) -> None:
        """Into the memory that the gradient of weights will read: what it was given up from."""
        frame = self._frames.get(microbatch)
        if frame is None or place not in frame.freed_gathers:
            return
        part, whole = frame.freed_gathers.pop(place)
        whole.untyped_storage().resize_(whole.nbytes)
        frame.flights[~place] = self._collective(place).launch_regather(part, whole.data)

    def _wait_regather(self, microbatch: int, place: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is not None and ~place in frame.flights:
            frame.flights.pop(~place).wait()


def _pass() -> None:
    """A chunk without layers hands on what it gets."""


def trainable_parameters(layers: Sequence[nn.Module]) -> list[Tensor]:
    """Trained parameters of some layers, in order, each once."""
    found: dict[int, Tensor] = {}
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.requires_grad:
                found.setdefault(id(parameter), parameter)
    return list(found.values())
