"""Of what an op of a layer consists, in order: which segments compute, which exchanges are launched when.

Where layers are divided, a backward brings what a product has read a second time while the gradient of that
is made, and scatters this gradient while that of the weights is made. Whoever plans knows the same order: a
plan's phases and these steps have the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from optimus.ir.op import OpKind
from optimus.models.segment import Segment
from optimus.models.tensor_parallel import AllGather, TpCollective

Recompute = Literal["none", "cheap", "attention", "full"]
CHEAP, ATTENTION = ("cheap",), ("attention",)  # kernels of what a plan makes again
PhaseAction = Literal[
    "forward", "recompute", "recompute_freed", "backward", "input_grad", "weight_grad",
    "launch", "wait", "launch_backward", "wait_backward", "launch_regather", "wait_regather",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSpec:
    """What a chunk does with the segment at a place; `kernels` are those of the plan that it stands for."""

    action: PhaseAction
    kind: OpKind
    place: int
    kernels: tuple[str, ...]


class LayerPhases:
    """The segments of one layer; the first of them stands at `first` in its chunk."""

    def __init__(
        self, segments: Sequence[Segment], first: int, recompute: Recompute, *, regather: bool
    ) -> None:
        self._at = dict(enumerate(segments, first))
        self._recompute, self._regathers = recompute, regather
        self._is_end = any(segment.is_end for segment in segments)
        # The sum at the end of a divided layer, which no gradient needs, is not made again.
        spared = 2 if segments and segments[-1].saves_nothing else 0
        self._spared = first + len(segments) - spared

    def steps(self, kind: OpKind) -> Iterator[PhaseSpec]:
        """Of an op of this kind."""
        if kind == OpKind.FORWARD:
            yield from self._run(self._at, "forward", kind)
        elif kind == OpKind.WEIGHT_GRAD:
            yield from self._weight_grads_phases()
        else:
            if self._recompute == "cheap" and any(segment.has_recomputable for segment in self._at.values()):
                yield PhaseSpec(
                    action="recompute_freed", kind=OpKind.RECOMPUTE, place=min(self._at), kernels=CHEAP
                )
            yield from self._run(filter(self.is_recomputed, self._at), "recompute", OpKind.RECOMPUTE)
            yield from self._backward(kind)

    def is_recomputed(self, place: int) -> bool:
        """Whether a segment runs a second time before its backward."""
        wanted = self._recompute == "attention" and self._at[place].kernels == ATTENTION
        return wanted or (self._recompute == "full" and not self._is_end and place < self._spared)

    def regathers_input(self, place: int) -> bool:
        """Whether what an exchange brings is given up behind the product that it serves."""
        return self._again(place) is not None and (self._regathers or not self._at[place + 1].trainable)

    def _run(self, places: Iterable[int], action: PhaseAction, kind: OpKind) -> Iterator[PhaseSpec]:
        for place in places:
            segment = self._at[place]
            if isinstance(segment, TpCollective):
                yield from _flight(place, "launch", "wait", segment.forward_name)
            else:
                yield PhaseSpec(action=action, kind=kind, place=place, kernels=segment.kernels)

    def _backward(self, kind: OpKind) -> Iterator[PhaseSpec]:
        """From the last segment to the first; a gather goes with the product that it serves."""
        for place, segment in reversed(self._at.items()):
            if isinstance(segment, AllGather):
                continue
            if isinstance(self._at.get(place - 1), AllGather):
                yield from self._column(kind, place)
            elif not isinstance(segment, TpCollective):
                action: PhaseAction = "backward" if kind == OpKind.BACKWARD else "input_grad"
                yield PhaseSpec(action=action, kind=kind, place=place, kernels=segment.kernels)
            elif not (segment.in_wgrad and kind == OpKind.INPUT_GRAD):
                yield from _flight(place, "launch_backward", "wait_backward", segment.backward_name)

    def _column(self, kind: OpKind, place: int) -> Iterator[PhaseSpec]:
        """A product whose columns are divided, and what travels around it."""
        inputs, weights = (self._half(place, action) for action in ("input_grad", "weight_grad"))
        launch, wait = _flight(
            place - 1, "launch_backward", "wait_backward", self._collective(place - 1).backward_name
        )
        again = self._again(place - 1)
        if kind == OpKind.INPUT_GRAD:
            yield from (inputs, launch, wait)
        elif again is None or not self._regathers:
            yield from (inputs, launch, wait, weights)
        else:
            begin, end = again
            yield from (begin, inputs, launch, end, weights, wait)

    def _weight_grads_phases(self) -> Iterator[PhaseSpec]:
        """What is brought again comes while the product before the next scatter has its turn."""
        coming: tuple[PhaseSpec, PhaseSpec] | None = None
        for place, segment in reversed(self._at.items()):
            if isinstance(segment, TpCollective):
                if segment.in_wgrad:
                    yield from _flight(place, "launch_backward", "wait_backward", segment.backward_name)
                elif not isinstance(segment, AllGather):
                    coming = self._again(self._collective_before(place))
                    yield from () if coming is None else coming[:1]
                continue
            if coming is not None and coming[0].place == place - 1:
                yield coming[1]
            yield PhaseSpec(
                action="weight_grad", kind=OpKind.WEIGHT_GRAD, place=place, kernels=segment.kernels
            )

    def _half(self, place: int, action: Literal["input_grad", "weight_grad"]) -> PhaseSpec:
        """One of the two gradients of a segment, where they are made apart."""
        kind, suffix = (
            (OpKind.INPUT_GRAD, "dgrad") if action == "input_grad" else (OpKind.WEIGHT_GRAD, "wgrad")
        )
        kernels = tuple(f"{kernel}.{suffix}" for kernel in self._at[place].kernels)
        return PhaseSpec(action=action, kind=kind, place=place, kernels=kernels)

    def _collective(self, place: int) -> TpCollective:
        found = self._at[place]
        assert isinstance(found, TpCollective)
        return found

    def _collective_before(self, place: int) -> int:
        return max(
            (at for at in self._at if at < place and isinstance(self._at[at], TpCollective)), default=-1
        )

    def _again(self, place: int) -> tuple[PhaseSpec, PhaseSpec] | None:
        """How an exchange brings a second time what a gradient of weights needs; if it does."""
        segment = self._at.get(place)
        if not isinstance(segment, TpCollective) or segment.regather_name is None:
            return None
        return _flight(place, "launch_regather", "wait_regather", segment.regather_name)


def _flight(place: int, launch: PhaseAction, wait: PhaseAction, name: str) -> tuple[PhaseSpec, PhaseSpec]:
    return (
        PhaseSpec(action=launch, kind=OpKind.LAUNCH, place=place, kernels=(name,)),
        PhaseSpec(action=wait, kind=OpKind.WAIT, place=place, kernels=(name,)),
    )
