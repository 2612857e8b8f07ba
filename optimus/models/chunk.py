"""Runs the phases of one op of one microbatch for a chunk of layers, as the executor asks for them.

A chunk lists the phases of an op in order: compute, the launch of a collective, or the wait for it
(`phase_order` draws those of a transformer layer). The executor runs them where the program says, with other
work between them. Nothing of one chunk runs inside the forward or backward of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from optimus.ir.op import OpKind
from optimus.models.collectives import AsyncCollective
from optimus.models.phase_order import ALL_LAYERS, ChunkPhase, LayerPhases, PhaseAction, Recompute
from optimus.models.segment import Gradients, NeedsGrad, SavedTensors, Segment, State, WeightGradStore
from optimus.models.tensor_parallel import TpCollective


class _Frame:
    """Tensors of one microbatch that are alive in one chunk; dictionaries are by index of the segment."""

    __slots__ = (
        "collectives", "context", "deferred_gradients", "freed", "freed_gathers", "gradients", "has_backward",
        "needs_grad", "recompute_inputs", "saved", "state", "weight_grads",
    )  # fmt: skip

    def __init__(self, state: State, needs_grad: NeedsGrad | None, context: Any, segments: int) -> None:
        self.state, self.needs_grad, self.context = state, needs_grad, context
        self.saved: list[SavedTensors | None] = [None] * segments
        self.weight_grads: list[WeightGradStore | None] = [None] * segments
        self.recompute_inputs: dict[int, tuple[State, NeedsGrad | None]] = {}
        self.gradients: Gradients = ()
        self.collectives: dict[int, AsyncCollective] = {}  # in flight; ~index for a regather
        self.has_backward: set[int] = set()  # collectives whose output needs a gradient
        self.freed_gathers: dict[int, tuple[Tensor, Tensor]] = {}  # this rank's rows, freed output
        self.freed: dict[int, list[Tensor]] = {}  # outputs that no backward reads
        self.deferred_gradients: dict[int, Gradients] = {}  # of collectives whose backward runs in W


class SegmentedChunk:
    """Layers cut into segments.

    `recompute` says what a backward recomputes first: nothing; what is `cheap`, which is freed after the
    forward; the `attention`; or the `full` layer, of which only the inputs are saved. With `regather`, the
    output of an all-gather is freed after the product that reads it, and gathered again for the gradient of
    its weights. An `opaque` chunk runs all layers of its stage as one, however many the plan has.
    `rows_in` and `rows_out` number the rows that travel behind its input and output (deepstack).
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Segment]],
        *,
        recompute: Recompute = "none",
        regather: bool = True,
        opaque: bool = False,
        rows_in: Sequence[int] = (),
        rows_out: Sequence[int] = (),
    ) -> None:
        self.layers = nn.ModuleList(nn.ModuleList(layer) for layer in layers)
        self.recompute, self.opaque = recompute, opaque
        self.rows_in, self.rows_out = tuple(rows_in), tuple(rows_out)
        self._segments = [segment for layer in layers for segment in layer]
        self._layer_of = [number for number, layer in enumerate(layers) for _ in layer]
        firsts = accumulate((len(layer) for layer in layers), initial=0)
        self._layer_phases = [
            LayerPhases(layer, first, recompute, regather=regather)
            for layer, first in zip(layers, firsts, strict=False)
        ]
        by_index = [(index, self._layer_phases[layer]) for index, layer in enumerate(self._layer_of)]
        self._recomputed = [layer.is_recomputed(index) for index, layer in by_index]
        self._frees_gathered = [layer.frees_gathered(index) for index, layer in by_index]
        self._frames: dict[int, _Frame] = {}

    # ------------------------------------------------------------------------ phases

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
        phases = []
        for layer in self._layer_phases if kind == OpKind.FORWARD else reversed(self._layer_phases):
            for spec in layer.phases(kind):
                segment = self._segments[spec.index]
                waits_for = "tp" if kind == OpKind.FORWARD and segment.waits_for_tp else ""
                phase = ChunkPhase(
                    kind=spec.kind,
                    layer=ALL_LAYERS if self.opaque else self._layer_of[spec.index],
                    kernels=spec.kernels,
                    run=partial(actions[spec.action], microbatch, spec.index),
                    waits_for=self._collective(spec.index).axis if spec.kind == OpKind.WAIT else waits_for,
                )
                phases.append(phase)
        return phases or [ChunkPhase(kind=kind, layer=ALL_LAYERS, kernels=(), run=_pass)]

    # ------------------------------------------------------------------------ inputs and outputs

    def trainable_parameters(self, first_layer: int, end_layer: int) -> list[Tensor]:
        return trainable_parameters(self.layers if self.opaque else self.layers[first_layer:end_layer])

    def begin_forward(
        self, microbatch: int, state: State, needs_grad: NeedsGrad | None, context: Any
    ) -> None:
        if self.rows_in:
            first = len(state) - len(self.rows_in)
            context.side.rows.update(zip(self.rows_in, state[first:], strict=True))
            state, needs_grad = state[:first], needs_grad and needs_grad[:first]
        self._frames[microbatch] = _Frame(state, needs_grad, context, len(self._segments))

    def output(self, microbatch: int) -> State:
        frame = self._frames[microbatch]
        output = tuple(tensor.detach() for tensor in frame.state)
        frame.state = ()
        if frame.saved:
            self._release_outputs(frame, len(frame.saved) - 1)
        if not any(frame.saved) and not frame.recompute_inputs:
            del self._frames[microbatch]  # no backward follows
        return (*output, *frame.context.side.take(self.rows_out, output[0])) if self.rows_out else output

    def begin_backward(self, microbatch: int, gradients: Gradients) -> None:
        frame = self._frames[microbatch]
        if self.rows_out:
            first = len(gradients) - len(self.rows_out)
            frame.context.side.grads.update(zip(self.rows_out, gradients[first:], strict=True))
            gradients = gradients[:first]
        frame.gradients = gradients

    def input_gradients(self, microbatch: int) -> Gradients:
        frame = self._frames[microbatch]
        gradients, frame.gradients = frame.gradients, ()
        self._drop_finished(microbatch)
        return (*gradients, *frame.context.side.take_grads(self.rows_in)) if self.rows_in else gradients

    def _drop_finished(self, microbatch: int) -> None:
        """Drops the frame of a microbatch on which no op has anything left to do."""
        frame = self._frames[microbatch]
        gradients = frame.gradients or frame.deferred_gradients
        if not (gradients or any(frame.saved) or any(frame.weight_grads)):
            del self._frames[microbatch]

    def _release_outputs(self, frame: _Frame, index: int) -> None:
        saved = frame.saved[index]
        if saved is not None:
            self._segments[index].release_outputs(saved)

    # ------------------------------------------------------------------------ forward

    def _forward(self, microbatch: int, index: int) -> None:
        frame, segment = self._frames[microbatch], self._segments[index]
        if frame.needs_grad is None:
            with torch.no_grad():
                frame.state = segment.forward(frame.state, frame.context)
            return
        recomputed, frees = self._recomputed[index], self.recompute == "cheap"
        if recomputed and not self._continues_recompute(index):
            self._save_recompute_input(frame, index)
        weight_grads = WeightGradStore(track_recomputable=frees)
        state, saved = segment.run_forward(frame.state, frame.needs_grad, frame.context, weight_grads)
        if saved is None:
            frame.needs_grad = (False,) * len(state)
        else:
            frame.needs_grad = tuple([tensor.requires_grad for tensor in state])
        if recomputed:
            state = tuple([tensor.detach() for tensor in state])
        else:
            frame.saved[index] = saved
        frame.state = state
        self._free_inputs(frame, index - 1)
        if recomputed:
            frame.freed_gathers.pop(index - 1, None)
        if frees and self._is_last_of_layer(index):
            for layer_saved in self._saved_of(frame, self._layer_of[index]):
                layer_saved.weight_grads.free()

    def _continues_recompute(self, index: int) -> bool:
        """Tells whether a recomputed segment reads the output of a recomputed segment of its layer."""
        same_layer = index > 0 and self._layer_of[index - 1] == self._layer_of[index]
        return same_layer and self._recomputed[index - 1]

    def _is_last_of_layer(self, index: int) -> bool:
        return index + 1 == len(self._segments) or self._layer_of[index + 1] != self._layer_of[index]

    def _saved_of(self, frame: _Frame, layer: int) -> list[SavedTensors]:
        in_layer = [frame.saved[index] for index, number in enumerate(self._layer_of) if number == layer]
        return [saved for saved in in_layer if saved is not None]

    def _save_recompute_input(self, frame: _Frame, index: int) -> None:
        assert frame.needs_grad is not None
        if any(frame.needs_grad) or trainable_parameters([self.layers[self._layer_of[index]]]):
            frame.recompute_inputs[index] = frame.state, frame.needs_grad

    def _recompute(self, microbatch: int, index: int) -> None:
        """Runs one segment of the forward again, from its saved input or after the segment before it."""
        frame = self._frames[microbatch]
        if not self._continues_recompute(index):
            frame.state, frame.needs_grad = frame.recompute_inputs.pop(index, ((), None))
        if frame.needs_grad is None:
            return  # frozen, and nothing before it trains
        frame.state, frame.saved[index] = self._segments[index].run_forward(
            frame.state, frame.needs_grad, frame.context, WeightGradStore()
        )
        frame.needs_grad = tuple(tensor.requires_grad for tensor in frame.state)
        self._free_inputs(frame, index - 1)

    def _recompute_freed(self, microbatch: int, index: int) -> None:
        """Recomputes the freed activations of the layer whose first segment has this index."""
        for saved in self._saved_of(self._frames[microbatch], self._layer_of[index]):
            saved.weight_grads.recompute()

    # ------------------------------------------------------------------------ backward

    def _backward(self, microbatch: int, index: int, *, split: bool) -> None:
        frame, segment = self._frames[microbatch], self._segments[index]
        saved = frame.saved[index]
        if saved is None:
            return  # frozen, and nothing before it trains
        frame.state = ()  # no backward reads the output of a recomputed layer
        if split and self._defer_to_wgrad(frame, index + 1):
            frame.gradients = segment.run_backward(saved, frame.gradients, split=False)
            return
        frame.saved[index] = None
        saved.weight_grads.immediate = not split  # frees what weight gradients read before the segment ends
        frame.gradients = segment.run_backward(saved, frame.gradients, split=split)
        if split:
            frame.weight_grads[index] = saved.weight_grads

    def _defer_to_wgrad(self, frame: _Frame, index: int) -> bool:
        """Defers the gradient of a collective whose backward serves a weight gradient only."""
        collective = self._segments[index] if index < len(self._segments) else None
        if not isinstance(collective, TpCollective) or not collective.in_wgrad:
            return False
        if index not in frame.has_backward:
            return False
        gradients, at = frame.gradients, collective.state_index
        frame.deferred_gradients[index] = gradients
        frame.gradients = (*gradients[:at], None, *gradients[at + 1 :])
        return True

    def _weight_grad(self, microbatch: int, index: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is None:
            return
        weight_grads, frame.weight_grads[index] = frame.weight_grads[index], None
        saved = frame.saved[index]
        if saved is not None and frame.gradients:  # those of a collective that ran in this op
            frame.saved[index], saved.weight_grads.immediate = None, True
            self._segments[index].run_backward(saved, frame.gradients, split=False)
            frame.gradients = ()
        if weight_grads is not None:
            with torch.no_grad():
                for accumulate_grad in weight_grads:
                    accumulate_grad()
            weight_grads.clear()
        self._drop_finished(microbatch)

    # ------------------------------------------------------------------------ collectives

    def _collective(self, index: int) -> TpCollective:
        collective = self._segments[index]
        assert isinstance(collective, TpCollective)
        return collective

    def _launch(self, microbatch: int, index: int) -> None:
        frame = self._frames[microbatch]
        if frame.state:  # empty in a recomputation of a layer in which nothing trains
            frame.collectives[index] = self._collective(index).launch(frame.state, frame.context)

    def _wait(self, microbatch: int, index: int) -> None:
        frame, collective = self._frames[microbatch], self._collective(index)
        if index not in frame.collectives:
            return
        before, frame.state = frame.state, frame.collectives.pop(index).wait()
        if index:
            self._release_outputs(frame, index - 1)  # large, and alive while the collective was in flight
        if frame.needs_grad is None:
            return
        frame.needs_grad = collective.output_needs_grad(frame.needs_grad)
        at = collective.state_index
        if collective.has_backward(frame.needs_grad):
            frame.has_backward.add(index)
        if self._frees_gathered[index]:
            frame.freed_gathers[index] = before[at].detach(), frame.state[at]
        elif collective.freed:
            frame.freed[index] = [frame.state[position] for position in collective.freed]

    def _free_inputs(self, frame: _Frame, index: int) -> None:
        """Frees the output of a collective after the segment that reads it."""
        if index in frame.freed_gathers:
            frame.freed_gathers[index][1].untyped_storage().resize_(0)
        for tensor in frame.freed.pop(index, ()):
            tensor.untyped_storage().resize_(0)

    def _launch_backward(self, microbatch: int, index: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is None or index not in frame.has_backward:
            return
        frame.has_backward.discard(index)
        gradients = frame.deferred_gradients.pop(index, frame.gradients)
        frame.collectives[index] = self._collective(index).launch_backward(gradients, frame.context)

    def _wait_backward(self, microbatch: int, index: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is not None and index in frame.collectives:
            frame.gradients = frame.collectives.pop(index).wait()

    def _launch_regather(self, microbatch: int, index: int) -> None:
        """Gathers into the freed output, whose storage the weight gradient reads."""
        frame = self._frames.get(microbatch)
        if frame is None or index not in frame.freed_gathers:
            return
        rows, output = frame.freed_gathers.pop(index)
        output.untyped_storage().resize_(output.nbytes)
        frame.collectives[~index] = self._collective(index).launch_regather(rows, output.data, frame.context)

    def _wait_regather(self, microbatch: int, index: int) -> None:
        frame = self._frames.get(microbatch)
        if frame is not None and ~index in frame.collectives:
            frame.collectives.pop(~index).wait()


def _pass() -> None:
    """Runs a chunk without layers, whose outputs are its inputs."""


def trainable_parameters(layers: Sequence[nn.Module]) -> list[Tensor]:
    """Returns the parameters of some layers that need gradients, in order, each once."""
    parameters: dict[int, Tensor] = {}
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameters.setdefault(id(parameter), parameter)
    return list(parameters.values())
