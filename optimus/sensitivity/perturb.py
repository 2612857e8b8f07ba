"""Draws perturbed cost models and simulates a schedule under them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus.ir.op import PARAMETER_TRAFFIC, Communicator, Floats, Lane, OpKind, Schedule
from optimus.schedule.simulator import simulate_schedule

DRAWS = 200
SEED = 0
DEFAULT_SLOWDOWN, DEFAULT_LAUNCH_S = 0.1, 5e-6  # centres of the ranges where the base model has 0


@dataclass(frozen=True, kw_only=True)
class PerturbedCostModel:
    """A perturbed cost model: factors on the base model's figures, and values in place of its assumptions."""

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
    """An assumption that may be wrong: anywhere from `low` to `high`, or one of `choices`."""

    field: str
    words: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[float, ...] = ()
    unit: str = "change"  # change: a factor; share; us: seconds
    sentence: str = "{} is {}"  # filled with `words` and a value

    @property
    def name(self) -> str:
        """Label in a table or picture."""
        return f"{self.words} overlapped" if self.field == "tp_overlapped" else self.words

    @property
    def ends(self) -> tuple[float, float]:
        return (self.choices[0], self.choices[-1]) if self.choices else (self.low, self.high)

    def at(self, quantile: float) -> float:
        """Returns the value at a quantile of the range."""
        if self.choices:
            return self.choices[int(quantile * len(self.choices))]
        return self.low + quantile * (self.high - self.low)

    def describe(self, value: float, *, above: bool) -> str:
        """Returns e.g. `DP bandwidth is -10 % or lower`, `TP traffic is 70 % overlapped`."""
        alone = value == self.ends[above]
        shown = self.show(value) + ("" if alone else f" or {'higher' if above else 'lower'}")
        return self.sentence.format(self.words, shown)

    def show(self, value: float) -> str:
        """Formats a value: `-15 %`, `70 %`, `5 us`."""
        if self.unit == "us":
            return f"{value * 1e6:.3g} us"
        return f"{100 * (value - 1):+.0f} %" if self.unit == "change" else f"{100 * value:.0f} %"


def uncertain_parameters(base: PerturbedCostModel, time_scale: float = 1.0) -> tuple[UncertainParameter, ...]:
    """Returns all parameters that are perturbed together, with their ranges.

    Slow-down and launch time take 0, 1 and 2 times the value of `base`, which may be measured. `time_scale`
    is the factor of the calibration, which default launch times carry too.
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
    changes[-1] = replace(changes[-1], sentence="{} are {}")
    slowdown, launch_s = base.slowdown or DEFAULT_SLOWDOWN, base.launch_s or DEFAULT_LAUNCH_S * time_scale
    return (
        *changes,
        UncertainParameter(
            field="slowdown",
            words="slow-down under collectives",
            choices=_up_to_twice(slowdown),
            unit="share",
        ),
        UncertainParameter(
            field="launch_s",
            words="a launch",
            choices=_up_to_twice(launch_s),
            unit="us",
            sentence="{} takes {}",
        ),
        UncertainParameter(
            field="tp_overlapped",
            words="TP traffic",
            choices=(0.0, 0.7),
            unit="share",
            sentence="{} is {} overlapped",
        ),
    )


def _up_to_twice(value: float) -> tuple[float, ...]:
    return 0.0, value, 2 * value


def draw_cost_models(
    base: PerturbedCostModel, parameters: Sequence[UncertainParameter], *, draws: int, seed: int
) -> list[PerturbedCostModel]:
    """Draws a Latin hypercube: every parameter takes each of `draws` equal parts of its range once."""
    random = np.random.default_rng(seed)
    values = {
        parameter.field: [parameter.at(quantile) for quantile in _quantiles(random, draws)]
        for parameter in parameters
    }
    return [replace(base, **{name: column[draw] for name, column in values.items()}) for draw in range(draws)]


def _quantiles(random: np.random.Generator, draws: int) -> list[float]:
    """Returns one quantile in each of `draws` equal parts, in random order."""
    quantiles: list[float] = ((random.permutation(draws) + random.random(draws)) / draws).tolist()
    return quantiles


class PerturbableSchedule:
    """A schedule that is simulated under perturbed cost models, in its given order.

    Latencies scale with the bandwidth of their links; an encoder's compute, TP traffic and messages scale
    with image tokens. Ops of no single module (pipeline messages, the optimizer) do not.
    """

    def __init__(self, schedule: Schedule, encoders: Collection[str], base: PerturbedCostModel) -> None:
        self._schedule, self._base = schedule, base
        numbers = [schedule.modules.index(name) for name in encoders if name in schedule.modules]
        is_encoder = np.isin(schedule.module, numbers)
        computes = (schedule.lane == Lane.COMPUTE) & (schedule.kind <= OpKind.WEIGHT_GRAD)
        moves = ~np.isin(schedule.kind, PARAMETER_TRAFFIC)
        self._llm, self._encoders = computes & ~is_encoder, computes & is_encoder
        self._lanes = {lane: schedule.lane == lane for lane in (Lane.TP, Lane.DP, Lane.P2P)}
        self._images = is_encoder & moves & (schedule.communicator != Communicator.DP)
        self._tp = schedule.communicator == Communicator.TP

    def step_s(self, model: PerturbedCostModel) -> float:
        """Returns the step time under `model`."""
        scaled = replace(self._schedule, duration_s=self._schedule.duration_s * self._factors(model))
        return simulate_schedule(scaled, slowdown=model.slowdown, launch_s=model.launch_s).step_s

    def _factors(self, model: PerturbedCostModel) -> Floats:
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
