"""Of what an op of a layer consists, in order: which segments compute, which exchanges are launched when.

Where layers are divided, a backward brings what a product has read a second time while the gradient of that
is made, and scatters this gradient while that of the weights is made. Whoever plans knows the same order: a
plan's phases and these steps have the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from optimus.ir.op import Kind
from optimus.models.segment import Segment
from optimus.models.tensor_parallel import Exchange, Gather

Recompute = Literal["none", "cheap", "attention", "full"]
CHEAP, ATTENTION = ("cheap",), ("attention",)  # kernels of what a plan makes again
Play = Literal[
    "forward", "again", "fill", "backward", "inputs", "weights",
    "launch", "land", "launch_back", "land_back", "launch_again", "land_again",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a chunk does with the segment at a place; `kernels` are those of the plan that it stands for."""

    play: Play
    kind: Kind
    place: int
    kernels: tuple[str, ...]


class Layer:
    """The segments of one layer; the first of them stands at `first` in its chunk."""

    def __init__(
        self, segments: Sequence[Segment], first: int, recompute: Recompute, *, regathers: bool
    ) -> None:
        self._at = dict(enumerate(segments, first))
        self._recompute, self._regathers = recompute, regathers
        self._is_end = any(segment.is_end for segment in segments)
        # The sum at the end of a divided layer, which no gradient needs, is not made again.
        spared = 2 if segments and segments[-1].keeps_nothing else 0
        self._spared = first + len(segments) - spared

    def steps(self, kind: Kind) -> Iterator[Step]:
        """Of an op of this kind."""
        if kind == Kind.F:
            yield from self._run(self._at, "forward", kind)
        elif kind == Kind.W:
            yield from self._weights()
        else:
            if self._recompute == "cheap" and any(segment.has_cheap for segment in self._at.values()):
                yield Step(play="fill", kind=Kind.R, place=min(self._at), kernels=CHEAP)
            yield from self._run(filter(self.is_made_again, self._at), "again", Kind.R)
            yield from self._backward(kind)

    def is_made_again(self, place: int) -> bool:
        """Whether a segment runs a second time before its backward."""
        wanted = self._recompute == "attention" and self._at[place].kernels == ATTENTION
        return wanted or (self._recompute == "full" and not self._is_end and place < self._spared)

    def gives_up(self, place: int) -> bool:
        """Whether what an exchange brings is given up behind the product that it serves."""
        return self._again(place) is not None and (self._regathers or not self._at[place + 1].trained)

    def _run(self, places: Iterable[int], play: Play, kind: Kind) -> Iterator[Step]:
        for place in places:
            segment = self._at[place]
            if isinstance(segment, Exchange):
                yield from _flight(place, "launch", "land", segment.there)
            else:
                yield Step(play=play, kind=kind, place=place, kernels=segment.kernels)

    def _backward(self, kind: Kind) -> Iterator[Step]:
        """From the last segment to the first; a gather goes with the product that it serves."""
        for place, segment in reversed(self._at.items()):
            if isinstance(segment, Gather):
                continue
            if isinstance(self._at.get(place - 1), Gather):
                yield from self._column(kind, place)
            elif not isinstance(segment, Exchange):
                play: Play = "backward" if kind == Kind.B else "inputs"
                yield Step(play=play, kind=kind, place=place, kernels=segment.kernels)
            elif not (segment.late and kind == Kind.I):
                yield from _flight(place, "launch_back", "land_back", segment.back)

    def _column(self, kind: Kind, place: int) -> Iterator[Step]:
        """A product whose columns are divided, and what travels around it."""
        inputs, weights = (self._half(place, play) for play in ("inputs", "weights"))
        launch, land = _flight(place - 1, "launch_back", "land_back", self._exchange(place - 1).back)
        again = self._again(place - 1)
        if kind == Kind.I:
            yield from (inputs, launch, land)
        elif again is None or not self._regathers:
            yield from (inputs, launch, land, weights)
        else:
            begin, end = again
            yield from (begin, inputs, launch, end, weights, land)

    def _weights(self) -> Iterator[Step]:
        """What is brought again comes while the product before the next scatter has its turn."""
        coming: tuple[Step, Step] | None = None
        for place, segment in reversed(self._at.items()):
            if isinstance(segment, Exchange):
                if segment.late:
                    yield from _flight(place, "launch_back", "land_back", segment.back)
                elif not isinstance(segment, Gather):
                    coming = self._again(self._exchange_before(place))
                    yield from () if coming is None else coming[:1]
                continue
            if coming is not None and coming[0].place == place - 1:
                yield coming[1]
            yield Step(play="weights", kind=Kind.W, place=place, kernels=segment.kernels)

    def _half(self, place: int, play: Literal["inputs", "weights"]) -> Step:
        """One of the two gradients of a segment, where they are made apart."""
        kind, suffix = (Kind.I, "dgrad") if play == "inputs" else (Kind.W, "wgrad")
        kernels = tuple(f"{kernel}.{suffix}" for kernel in self._at[place].kernels)
        return Step(play=play, kind=kind, place=place, kernels=kernels)

    def _exchange(self, place: int) -> Exchange:
        found = self._at[place]
        assert isinstance(found, Exchange)
        return found

    def _exchange_before(self, place: int) -> int:
        return max((at for at in self._at if at < place and isinstance(self._at[at], Exchange)), default=-1)

    def _again(self, place: int) -> tuple[Step, Step] | None:
        """How an exchange brings a second time what a gradient of weights needs; if it does."""
        segment = self._at.get(place)
        if not isinstance(segment, Exchange) or segment.again is None:
            return None
        return _flight(place, "launch_again", "land_again", segment.again)


def _flight(place: int, launch: Play, land: Play, name: str) -> tuple[Step, Step]:
    return (
        Step(play=launch, kind=Kind.LAUNCH, place=place, kernels=(name,)),
        Step(play=land, kind=Kind.WAIT, place=place, kernels=(name,)),
    )
