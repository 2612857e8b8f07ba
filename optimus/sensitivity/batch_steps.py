"""Plays systems over drawn batches: the mean step, and the one that 95 of 100 stay below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from optimus.errors import UserError, nearest
from optimus.ir.op import Communicator, Floats, Ints, Kind, Lane
from optimus.planner.batch_assignment import BatchAssignment
from optimus.planner.compare import Comparison
from optimus.planner.systems.base import SimulatedSystem
from optimus.schedule.simulate import evaluate
from optimus.sensitivity.drawn_batches import (
    BATCHES,
    COMPUTE,
    DEALINGS,
    SEED,
    TOKENS,
    Batches,
    deal_batch,
    draw_batches,
    find_loads,
)

MOST_ROWS = 100_000_000  # that are played for all systems together; the first is always played
LOOKS = 3  # ways to guess which replica is the slowest; a very large schedule gets one
RATHER_MORE = 2.0  # load of one microbatch to find out how much room it has
ENDS = 4  # the last 1/ENDS of a replica's microbatches are looked at by themselves

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """The steps of one system, batch by batch."""

    system: str
    dealing: str
    steps_s: Floats
    plays: int

    @property
    def mean_s(self) -> float:
        return float(self.steps_s.mean())

    @property
    def p95_s(self) -> float:
        return float(np.quantile(self.steps_s, 0.95, method="higher"))


class Player:
    """Plays one system with its encoder rows as loaded as a batch makes them."""

    def __init__(
        self,
        system: SimulatedSystem,
        feeding: BatchAssignment,
        *,
        slowdown: float,
        launch_s: float,
        looks: int | None = LOOKS,
    ) -> None:
        self.feeding, self.plays = feeding, 0
        self._schedule, self._slowdown, self._launch_s = system.schedule, slowdown, launch_s
        self._looks = looks
        self._known: dict[bytes, float] = {}
        self._rows = {name: self._find_rows(name) for name in feeding.encoders}
        self._seconds = {
            name: float(system.schedule.duration_s[rows[COMPUTE]].sum()) for name, rows in self._rows.items()
        }

    def _find_rows(self, encoder: str) -> tuple[Ints, Ints]:
        """An encoder's compute, and its traffic that grows with tokens: all but that of parameters."""
        schedule = self._schedule
        mine = schedule.module == schedule.modules.index(encoder)
        moves = mine & (schedule.lane != Lane.COMPUTE) & (schedule.communicator != Communicator.DP)
        moves &= (schedule.kind != Kind.GATHER) & (schedule.kind != Kind.REDUCE)
        return np.flatnonzero(mine & (schedule.lane == Lane.COMPUTE)), np.flatnonzero(moves)

    def step_s(self, loads: Mapping[str, Floats]) -> float:
        """Of the slowest replica. Replicas that cannot be told apart are played once."""
        return max(self._played(loads, replica) for replica in self._slow_replicas(loads))

    def _slow_replicas(self, loads: Mapping[str, Floats]) -> list[int]:
        """Those that may be the slowest: with the most load in all, in one microbatch, and near the end."""
        replicas = max((load.shape[1] for load in loads.values()), default=1)
        if self._looks is None or replicas == 1:
            return list(range(replicas))
        scores = np.zeros((LOOKS, replicas))
        for name, load in loads.items():
            compute = load[COMPUTE] * self._seconds[name] / load.shape[2]
            end = max(1, load.shape[2] // ENDS)
            scores += [compute.sum(axis=1), compute.max(axis=1), compute[:, -end:].sum(axis=1)]
        return sorted(set(scores[: self._looks].argmax(axis=1).tolist()))

    def _played(self, loads: Mapping[str, Floats], replica: int) -> float:
        own = {name: load[:, min(replica, load.shape[1] - 1)] for name, load in loads.items()}
        key = b"".join(load.tobytes() for load in own.values())
        if key not in self._known:
            self.plays += 1
            schedule = self._schedule
            duration_s = schedule.duration_s.copy()
            for name, load in own.items():
                for which in (COMPUTE, TOKENS):
                    rows = self._rows[name][which]
                    at = schedule.microbatch[rows] if load.shape[1] > 1 else 0
                    duration_s[rows] *= load[which][at]
            scaled = replace(schedule, duration_s=duration_s)
            played = evaluate(scaled, slowdown=self._slowdown, launch_s=self._launch_s)
            self._known[key] = played.step_s
        return self._known[key]

    def order(self, dealing: str) -> list[int]:
        """Where the heaviest microbatch should go, the next, ...: the best of a few orders for a ramp."""
        count = self.feeding.microbatches
        orders = [list(range(count)), list(reversed(range(count)))]
        if dealing in ("matched", "reordered"):  # most room: where one more heavy microbatch costs least
            alone = np.where(np.eye(count, dtype=bool), RATHER_MORE, 1.0)
            costs = [self._step_of(loads) for loads in alone]
            orders.insert(0, sorted(range(count), key=lambda microbatch: costs[microbatch]))
        return min(orders, key=self.ramp_s) if dealing != "drawn" else []

    def ramp_s(self, order: list[int]) -> float:
        """The step of a replica whose microbatches get lighter and lighter along `order`."""
        loads = np.empty(len(order))
        loads[order] = np.linspace(RATHER_MORE, 0.0, len(order))
        return self._step_of(loads)

    def _step_of(self, by_microbatch: Floats) -> float:
        """The step of a replica whose LLM microbatches have this encoder load."""
        loads = {}
        for name, bins in self.feeding.encoders.items():
            each = by_microbatch
            if bins.sharing == "pieces":
                each = np.repeat(by_microbatch, bins.bins)
            elif bins.sharing == "replica":
                each = by_microbatch.mean(keepdims=True)
            loads[name] = np.stack([each, each])[:, None, :]
        return self._played(loads, 0)


def play_batches(
    comparison: Comparison,
    names: Iterable[str],
    *,
    dealing: str = "drawn",
    count: int = BATCHES,
    seed: int = SEED,
    all_replicas: bool = False,
    progress: Progress = lambda name, done, total: None,
) -> dict[str, Steps]:
    """Steps of each named system over the same batches; the later of many large ones may be left out."""
    if dealing not in DEALINGS:
        hint = nearest(dealing, DEALINGS)
        raise UserError(field="dealing", value=dealing, problem="is not a dealing", hint=hint)
    batches, assumed = draw_batches(comparison.job, count=count, seed=seed), comparison.assumptions
    different = 1 if batches.are_even else count
    found: dict[str, Steps] = {}
    asked, rows = list(dict.fromkeys(names)), 0
    for place, name in enumerate(asked):
        system = comparison.systems[name]
        feeding = system.candidate.batch_assignment()
        own = different * len(system.schedule)
        if found and rows + own > MOST_ROWS:
            continue
        looks = LOOKS if rows + LOOKS * own <= MOST_ROWS else 1
        player = Player(
            system,
            feeding,
            slowdown=assumed.residence_slowdown,
            launch_s=assumed.launch_s,
            looks=None if all_replicas else looks,
        )
        order, steps = player.order(dealing), []
        for batch in range(count):
            progress(f"steps of {name}", place * count + batch, len(asked) * count)
            steps.append(player.step_s(batch_loads(batches, batch, feeding, dealing, order)))
        found[name] = Steps(system=name, dealing=dealing, steps_s=np.array(steps), plays=player.plays)
        rows += player.plays * len(system.schedule)
    return found


def batch_loads(
    batches: Batches, batch: int, feeding: BatchAssignment, dealing: str, order: list[int]
) -> dict[str, Floats]:
    """How loaded the encoder microbatches of one batch are under a dealing."""
    slots = deal_batch(batches.loads[batches.drawn[batch]], feeding, dealing, order)
    return find_loads(batches, batch, slots, feeding)
