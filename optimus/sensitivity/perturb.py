"""Other cost models, as wrong about ours as it may be about the world, and a schedule played under them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus.ir.op import Communicator, Floats, Kind, Lane, Schedule
from optimus.schedule.simulate import evaluate

DRAWS = 200
SEED = 0
SLOWDOWN, LAUNCH_S = 0.1, 5e-6  # in doubt where the base has none


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """How another cost model differs: factors on what ours takes, and what it assumes in place of ours."""

    llm_efficiency: float = 1.0
    encoder_efficiency: float = 1.0
    tp_bandwidth: float = 1.0
    dp_bandwidth: float = 1.0
    pp_bandwidth: float = 1.0
    image_tokens: float = 1.0
    slowdown: float
    launch_s: float
    tp_overlapped: float  # share of TP traffic that the framework already hides


@dataclass(frozen=True, kw_only=True)
class UncertainParameter:
    """One assumption that may be wrong: anywhere from `low` to `high`, or one of `choices`."""

    field: str
    words: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[float, ...] = ()
    unit: str = "change"  # change: a factor; share; us: seconds
    said: str = "{} is {}"  # of these words and a value

    @property
    def name(self) -> str:
        """By itself, in a table or picture."""
        return f"{self.words} overlapped" if self.field == "tp_overlapped" else self.words

    @property
    def ends(self) -> tuple[float, float]:
        return (self.choices[0], self.choices[-1]) if self.choices else (self.low, self.high)

    def at(self, quantile: float) -> float:
        """The value below which lies this share of all."""
        if self.choices:
            return self.choices[int(quantile * len(self.choices))]
        return self.low + quantile * (self.high - self.low)

    def say(self, value: float, *, above: bool) -> str:
        """`DP bandwidth is -10 % or lower`, `TP traffic is 70 % overlapped`."""
        alone = value == self.ends[above]
        shown = self.show(value) + ("" if alone else f" or {'higher' if above else 'lower'}")
        return self.said.format(self.words, shown)

    def show(self, value: float) -> str:
        """`-15 %`, `70 %`, `5 us`."""
        if self.unit == "us":
            return f"{value * 1e6:.3g} us"
        return f"{100 * (value - 1):+.0f} %" if self.unit == "change" else f"{100 * value:.0f} %"


def doubts(base: CostModel, time_scale: float = 1.0) -> tuple[UncertainParameter, ...]:
    """All that is perturbed together. `time_scale` is that of the calibration: launches carry it too.

    Slow-down and launch are what `base` has, nothing, or twice as much: it may have measured them.
    """
    factors = [
        ("llm_efficiency", "LLM compute efficiency", 0.15),
        ("encoder_efficiency", "encoder compute efficiency", 0.15),
        ("tp_bandwidth", "TP bandwidth", 0.25),
        ("dp_bandwidth", "DP bandwidth", 0.25),
        ("pp_bandwidth", "PP bandwidth", 0.25),
        ("image_tokens", "image tokens", 0.25),
    ]
    changes = [
        UncertainParameter(field=name, words=words, low=1 - by, high=1 + by) for name, words, by in factors
    ]
    changes[-1] = replace(changes[-1], said="{} are {}")
    slowdown, launch_s = base.slowdown or SLOWDOWN, base.launch_s or LAUNCH_S * time_scale
    return (
        *changes,
        UncertainParameter(
            field="slowdown",
            words="slow-down under collectives",
            choices=_up_to_twice(slowdown),
            unit="share",
        ),
        UncertainParameter(
            field="launch_s", words="a launch", choices=_up_to_twice(launch_s), unit="us", said="{} takes {}"
        ),
        UncertainParameter(
            field="tp_overlapped",
            words="TP traffic",
            choices=(0.0, 0.7),
            unit="share",
            said="{} is {} overlapped",
        ),
    )


def _up_to_twice(value: float) -> tuple[float, ...]:
    return 0.0, value, 2 * value


def draw_models(
    base: CostModel, asked: Sequence[UncertainParameter], *, draws: int, seed: int
) -> list[CostModel]:
    """A Latin hypercube: every doubt takes each `draws`-th part of its range once."""
    random = np.random.default_rng(seed)
    values = {doubt.field: [doubt.at(quantile) for quantile in _quantiles(random, draws)] for doubt in asked}
    return [replace(base, **{name: found[draw] for name, found in values.items()}) for draw in range(draws)]


def _quantiles(random: np.random.Generator, draws: int) -> list[float]:
    """One in each part, in any order."""
    found: list[float] = ((random.permutation(draws) + random.random(draws)) / draws).tolist()
    return found


class Perturbable:
    """A schedule whose durations follow a cost model; its order stays as it is.

    Latencies scale with their links, and an encoder's compute, TP traffic and messages with image tokens.
    What belongs to no single module (messages of pipelines, the seam of three-phase, the optimizer) does not.
    """

    def __init__(self, schedule: Schedule, encoders: Collection[str], base: CostModel) -> None:
        self._schedule, self._base = schedule, base
        numbers = [schedule.modules.index(name) for name in encoders if name in schedule.modules]
        own = np.isin(schedule.module, numbers)
        computes = (schedule.lane == Lane.COMPUTE) & (schedule.kind <= Kind.W)
        moves = (schedule.kind != Kind.GATHER) & (schedule.kind != Kind.REDUCE)
        self._llm, self._encoders = computes & ~own, computes & own
        self._lanes = {lane: schedule.lane == lane for lane in (Lane.TP, Lane.DP, Lane.P2P)}
        self._images = own & moves & (schedule.communicator != Communicator.DP)
        self._tp = schedule.communicator == Communicator.TP

    def step_s(self, model: CostModel) -> float:
        """The step if `model` were true."""
        scaled = replace(self._schedule, duration_s=self._schedule.duration_s * self._factors(model))
        return evaluate(scaled, slowdown=model.slowdown, launch_s=model.launch_s).step_s

    def _factors(self, model: CostModel) -> Floats:
        factors = np.ones(len(self._schedule))
        factors[self._llm] = 1 / model.llm_efficiency
        factors[self._encoders] = 1 / model.encoder_efficiency
        bandwidths = {
            Lane.TP: model.tp_bandwidth,
            Lane.DP: model.dp_bandwidth,
            Lane.P2P: model.pp_bandwidth,
        }
        for lane, bandwidth in bandwidths.items():
            factors[self._lanes[lane]] = 1 / bandwidth
        factors[self._images] *= model.image_tokens
        hidden = self._base.tp_overlapped
        factors[self._tp] *= (1 - model.tp_overlapped) / (1 - hidden) if hidden < 1 else 1.0
        return factors
