"""What no schedule can beat: the floor, all work spread evenly, and the way of one microbatch."""

from __future__ import annotations

from dataclasses import dataclass

from optimus.job.model import Encoder
from optimus.program.op import Kind, Lane
from optimus.schedule.build import Builder
from optimus.schedule.chunk import KINDS
from optimus.schedule.timeline import evaluate
from optimus.systems.inline import InlinePipeline
from optimus.systems.setting import Setting
from optimus.systems.spread import SpreadEncoder, encoder_choices, spread_over_all


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds of a step in seconds; `encoder_s`: encoders alone on all GPUs, with their traffic."""

    floor_s: float
    work_s: float
    critical_path_s: float
    encoder_s: float

    @property
    def bound_s(self) -> float:
        return max(self.floor_s, self.work_s, self.critical_path_s)

    @property
    def binds(self) -> str:
        """Which bound is the largest."""
        named = {
            "floor": self.floor_s,
            "total work": self.work_s,
            "critical path": self.critical_path_s,
        }
        return max(named, key=lambda name: named[name])

    def hidden_share(self, step_s: float) -> float:
        """Strict: the share of the encoders' own time that the step does not show."""
        return 1.0 - (step_s - self.floor_s) / self.encoder_s if self.encoder_s else 1.0


def find_bounds(setting: Setting, floor: InlinePipeline, floor_s: float) -> Bounds:
    """Bounds of every system at this layout."""
    best = [_best_alone(setting, encoder) for encoder in setting.job.model.encoders]
    work = _llm_work_s(floor) + sum(_compute_s(spread) for spread, _ in best)
    path = sum(_path_s(spread) for spread, _ in best) + _llm_path_s(floor)
    return Bounds(
        floor_s=floor_s, work_s=work, critical_path_s=path, encoder_s=sum(seconds for _, seconds in best)
    )


def _best_alone(setting: Setting, encoder: Encoder) -> tuple[SpreadEncoder, float]:
    """The layout in which an encoder alone is fastest on all GPUs, and its seconds."""
    choices = [
        spread_over_all(setting, encoder, tp=tp, recompute=recompute)
        for tp, recompute in encoder_choices(setting, encoder)
    ]
    timed = [(spread, _alone_s(spread)) for spread in choices]
    return min(timed, key=lambda pair: pair[1])


def _alone_s(spread: SpreadEncoder) -> float:
    """All forwards, then all backwards, with gathers and reduces under them."""
    builder = Builder(spread.setting.chunks.modules, 1)
    after: list[int] = []
    for piece in range(spread.pieces):
        after = [spread.forwards(builder, 0, piece, first=piece == 0, after=after)]
    for piece in range(spread.pieces):
        block, _ = spread.backwards(builder, 0, piece, last=piece == spread.pieces - 1, after=after)
        after = [block]
    if not spread.pieces:
        return 0.0
    return evaluate(builder.build(), slowdown=spread.setting.prices.assumptions.residence_slowdown).step_s


def _compute_s(spread: SpreadEncoder) -> float:
    """Kernels of all pieces, without any communication."""
    return spread.pieces * sum(
        kernel.duration_s
        for layer in spread.layers
        for kind in (Kind.F, Kind.B)
        for kernel in layer.kernels[kind]
        if kernel.lane == Lane.COMPUTE
    )


def _llm_work_s(floor: InlinePipeline) -> float:
    """The LLM's kernels on the mean stage, without any communication."""
    total = sum(
        kernel.duration_s
        for layer in floor.layers
        for kind in (Kind.F, Kind.B)
        for kernel in layer.kernels[kind]
        if kernel.lane == Lane.COMPUTE
    )
    return total * floor.microbatches / floor.layout.pp


def _llm_path_s(floor: InlinePipeline) -> float:
    """One microbatch through all stages and back; weight gradients may wait."""
    chunks = [floor.setting.chunks.make([layer]).seconds for layer in floor.layers]
    assert set(KINDS) <= set(chunks[0])
    return sum(seconds[Kind.F] + min(seconds[Kind.I], seconds[Kind.B]) for seconds in chunks)


def _path_s(spread: SpreadEncoder) -> float:
    """One piece forward, and the shorter of its backwards."""
    seconds = spread.setting.chunks.make(spread.layers).seconds
    return seconds[Kind.F] + min(seconds[Kind.I], seconds[Kind.B]) if spread.pieces else 0.0
