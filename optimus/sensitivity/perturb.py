"""Draws perturbed cost models and simulates a schedule under them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus.ir.op import PARAMETER_TRAFFIC, Communicator, Floats, Lane, OpKind, Schedule
from optimus.schedule.longest_path import DEFAULT_SLOWDOWN, LongestPath
from optimus.schedule.simulator import simulate_schedule

DRAWS = 200
SEED = 0
# Published fully sharded steps exceed the predicted ones by so much more than pipelines do, in nine of ten.
MOST_OF_FULL_SHARDING = 1.3
DEFAULT_LAUNCH_S = 5e-6  # with DEFAULT_SLOWDOWN the centres of the ranges where the base model has 0


@dataclass(frozen=True, kw_only=True)
class PerturbedCostModel:
    """A perturbed cost model: factors on the base model's figures, and values in place of its assumptions."""

    llm_efficiency: float = 1.0
    encoder_efficiency: float = 1.0
    tp_bandwidth: float = 1.0
    dp_bandwidth: float = 1.0
    pp_bandwidth: float = 1.0
    image_tokens: float = 1.0
    full_sharding: float = 1.0  # factor on the compute of fully sharded modules
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
            field="full_sharding",
            words="compute of fully sharded modules",
            low=1.0,
            high=MOST_OF_FULL_SHARDING,
            sentence="{} takes {}",
        ),
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

    def __init__(
        self,
        schedule: Schedule,
        encoders: Collection[str],
        base: PerturbedCostModel,
        *,
        fully_sharded: Collection[str] = (),
    ) -> None:
        self._schedule, self._base = schedule, base
        is_encoder, is_sharded = (
            np.isin(schedule.module, [at for at, name in enumerate(schedule.modules) if name in names])
            for names in (encoders, fully_sharded)
        )
        computes = (schedule.lane == Lane.COMPUTE) & (schedule.kind <= OpKind.WEIGHT_GRAD)
        moves = ~np.isin(schedule.kind, PARAMETER_TRAFFIC)
        masks = [computes & ~is_encoder, computes & is_encoder]
        masks += [schedule.lane == lane for lane in (Lane.TP, Lane.DP, Lane.P2P)]
        masks += [is_encoder & moves & (schedule.communicator != Communicator.DP)]
        masks += [schedule.communicator == Communicator.TP]
        masks += [computes & is_sharded]
        # Ops that all masks treat alike form a group, and each mask is one of groups.
        bits, self._group = np.unique(np.stack(masks).T @ (1 << np.arange(len(masks))), return_inverse=True)
        self._masks = (bits[None] >> np.arange(len(masks))[:, None]) & 1 == 1

    def step_s(self, model: PerturbedCostModel) -> float:
        """Simulates the step under `model`."""
        scaled = self._scale(self._factors(model))
        return simulate_schedule(scaled, slowdown=model.slowdown, launch_s=model.launch_s).step_s

    def steps_s(self, models: Sequence[PerturbedCostModel]) -> Floats:
        """Returns the steps under many models as longest paths, which takes a fraction of the time.

        What runs under collectives is simulated for each share of TP traffic that is overlapped.
        """
        steps_s, unscaled = np.empty(len(models)), self._base
        graph = LongestPath(self._schedule, slowdown=unscaled.slowdown, launch_s=unscaled.launch_s)
        for hidden in {model.tp_overlapped for model in models}:
            base = replace(unscaled, tp_overlapped=hidden)
            at = [place for place, model in enumerate(models) if model.tp_overlapped == hidden]
            scaled = self._scale(self._factors(base)).duration_s
            path = graph
            if base != unscaled:
                path = graph.with_durations(scaled, slowdown=base.slowdown, launch_s=base.launch_s)
            steps_s[at] = path.steps_s(
                self._group,
                np.stack([self._factors(models[place]) / self._factors(base) for place in at], axis=1),
                slowdown=np.array([models[place].slowdown for place in at]),
                launch_s=np.array([models[place].launch_s for place in at]),
            )
        return steps_s

    def _scale(self, factors: Floats) -> Schedule:
        return replace(self._schedule, duration_s=self._schedule.duration_s * factors[self._group])

    def _factors(self, model: PerturbedCostModel) -> Floats:
        """Returns the factors on the durations of every group of ops."""
        llm, encoders, tp_lane, dp_lane, p2p_lane, images, tp, sharded = self._masks
        factors = np.ones(self._masks.shape[1])
        factors[llm] = 1 / model.llm_efficiency
        factors[encoders] = 1 / model.encoder_efficiency
        factors[tp_lane] = 1 / model.tp_bandwidth
        factors[dp_lane] = 1 / model.dp_bandwidth
        factors[p2p_lane] = 1 / model.pp_bandwidth
        factors[images] *= model.image_tokens
        factors[sharded] *= model.full_sharding
        hidden = self._base.tp_overlapped
        factors[tp] *= (1 - model.tp_overlapped) / (1 - hidden) if hidden < 1 else 1.0
        return factors
