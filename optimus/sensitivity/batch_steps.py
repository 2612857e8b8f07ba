"""Simulates systems over drawn batches: the mean step and its 95th percentile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from optimus.errors import UserError, nearest
from optimus.ir.op import PARAMETER_TRAFFIC, Communicator, Floats, Ints, Lane, OpKind, Schedule
from optimus.ir.ranks import LLM
from optimus.planner.batch_assignment import BatchAssignment
from optimus.planner.compare import Comparison
from optimus.planner.systems.base import SimulatedSystem
from optimus.schedule.schedule_builder import repeat_for_replicas
from optimus.schedule.simulator import simulate_schedule
from optimus.sensitivity.dealt_items import sum_dealt_item_loads
from optimus.sensitivity.drawn_batches import (
    BATCHES,
    COMPUTE,
    DEALINGS,
    SEED,
    TOKENS,
    DrawnBatches,
    deal_batch_to_replicas,
    draw_batches,
    sum_encoder_loads,
)

MAX_SIMULATED_OPS = 25_000_000  # over all systems and batches,
MIN_BATCHES = 8  # but at least so many batches
GUESSES = 3  # of the slowest replica, each by another criterion,
MAX_GUESSED_OPS = 200_000  # beyond which one is enough
MAX_PROBED_OPS = 4_000_000  # to find the slack of every microbatch; of larger schedules it is not asked
PROBE_LOAD = 2.0  # load of one microbatch, relative to the mean, that probes how much slack it has
BEST, TODAY = "best", "today"
CHOOSE_OVER_BATCHES = 4
TAIL_DIVISOR = 4  # one criterion sums the last 1/TAIL_DIVISOR of a replica's microbatches

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchStepTimes:
    """Step times of one system, batch by batch."""

    system: str
    dealing: str
    steps_s: Floats
    simulations: int

    @property
    def mean_s(self) -> float:
        return float(self.steps_s.mean())

    @property
    def p95_s(self) -> float:
        return float(np.quantile(self.steps_s, 0.95, method="higher"))


class BatchSimulator:
    """Simulates one system with encoder ops scaled by the loads of a batch."""

    def __init__(
        self,
        system: SimulatedSystem,
        assignment: BatchAssignment,
        *,
        slowdown: float,
        launch_s: float,
        guesses: int | None = GUESSES,
    ) -> None:
        self.assignment, self.simulations = assignment, 0
        self._schedule, self._slowdown, self._launch_s = system.schedule, slowdown, launch_s
        self._guesses = guesses
        self._known: dict[bytes, float] = {}
        deals = bool((system.schedule.communicator == Communicator.DEAL).any())
        self._group = assignment.dealing_replicas if deals else 1  # replicas that wait for each other
        self._group_schedule = repeat_for_replicas(system.schedule, self._group) if deals else system.schedule
        if guesses is not None and len(self._group_schedule) > MAX_GUESSED_OPS:
            self._guesses = 1
        self._exchanged = _first_llm_rows(system.schedule, assignment.microbatches)
        self._rows = {name: self._find_rows(name) for name in assignment.encoders}
        self._seconds = {
            name: float(system.schedule.duration_s[rows[COMPUTE]].sum()) for name, rows in self._rows.items()
        }

    @property
    def ops_per_batch(self) -> int:
        """The most ops that are simulated for a batch; replicas of a group are simulated together."""
        groups = max(1, self.assignment.replicas // self._group)
        return len(self._group_schedule) * (groups if self._guesses is None else min(groups, self._guesses))

    def _find_rows(self, encoder: str) -> tuple[Ints, Ints]:
        """Returns an encoder's compute ops, and its traffic that grows with tokens (not of parameters)."""
        schedule = self._schedule
        of_encoder = schedule.module == schedule.modules.index(encoder)
        moves = of_encoder & (schedule.lane != Lane.COMPUTE) & (schedule.communicator != Communicator.DP)
        moves &= ~np.isin(schedule.kind, PARAMETER_TRAFFIC)
        return np.flatnonzero(of_encoder & (schedule.lane == Lane.COMPUTE)), np.flatnonzero(moves)

    def step_s(self, loads: Mapping[str, Floats], *, exchange_s: float = 0.0) -> float:
        """Returns the step of the slowest replica; replicas with equal loads are simulated once.

        Replicas that exchange rows inside the step are simulated together, since each exchange waits for all.
        Where the schedule has no exchange, every microbatch of the LLM waits `exchange_s` for it.
        """
        slow = {replica // self._group for replica in self._slow_replicas(loads)}
        return max(self._simulate(loads, group, exchange_s) for group in sorted(slow))

    def _slow_replicas(self, loads: Mapping[str, Floats]) -> list[int]:
        """Returns the replicas with the most load in all, in one microbatch, and near the end of the step."""
        replicas = max((load.shape[1] for load in loads.values()), default=1)
        if self._guesses is None or replicas == 1:
            return list(range(replicas))
        scores = np.zeros((GUESSES, replicas))
        for name, load in loads.items():
            compute = load[COMPUTE] * self._seconds[name] / load.shape[2]
            end = max(1, load.shape[2] // TAIL_DIVISOR)
            scores += [compute.sum(axis=1), compute.max(axis=1), compute[:, -end:].sum(axis=1)]
        return sorted(set(scores[: self._guesses].argmax(axis=1).tolist()))

    def _simulate(self, loads: Mapping[str, Floats], group: int, exchange_s: float = 0.0) -> float:
        """Returns the step of one group of replicas; of one replica, if all are alike."""
        alike = all(load.shape[1] == 1 for load in loads.values())
        replicas = range(1) if alike else range(group * self._group, (group + 1) * self._group)
        own = [
            {name: load[:, min(replica, load.shape[1] - 1)] for name, load in loads.items()}
            for replica in replicas
        ]
        arrays = [load.tobytes() for of_replica in own for load in of_replica.values()]
        key = b"".join([np.float64(exchange_s).tobytes(), *arrays])
        if key not in self._known:
            self.simulations += len(own)
            scaled = replace(
                self._schedule if alike else self._group_schedule,
                duration_s=np.concatenate([self._scaled_s(each, exchange_s) for each in own]),
            )
            timeline = simulate_schedule(scaled, slowdown=self._slowdown, launch_s=self._launch_s)
            self._known[key] = timeline.step_s
        return self._known[key]

    def _scaled_s(self, loads: Mapping[str, Floats], exchange_s: float) -> Floats:
        """Returns the seconds of every op of one replica."""
        duration_s = self._schedule.duration_s.copy()
        duration_s[self._exchanged] += exchange_s
        for name, load in loads.items():
            for which in (COMPUTE, TOKENS):
                rows = self._rows[name][which]
                at = self._schedule.microbatch[rows] if load.shape[1] > 1 else 0
                duration_s[rows] *= load[which][at]
        return duration_s

    def order(self, dealing: str) -> list[int]:
        """Returns the positions for microbatches, heaviest first: the best of a few orders."""
        count = self.assignment.microbatches
        orders = [list(range(count)), list(reversed(range(count)))]
        if dealing == "items" or (dealing == "reordered" and self.assignment.locked):
            return []  # the order of microbatches follows from loads, or they are even
        probed = count * len(self._schedule) <= MAX_PROBED_OPS
        if dealing in ("matched", "reordered") and probed:  # most slack: a heavy microbatch costs least
            alone = np.where(np.eye(count, dtype=bool), PROBE_LOAD, 1.0)
            costs = [self._step_of(loads) for loads in alone]
            orders.insert(0, sorted(range(count), key=lambda microbatch: costs[microbatch]))
        return min(orders, key=self.ramp_s) if dealing != "drawn" else []

    def ramp_s(self, order: list[int]) -> float:
        """Returns the step of a replica whose microbatches get lighter along `order`."""
        loads = np.empty(len(order))
        loads[order] = np.linspace(PROBE_LOAD, 0.0, len(order))
        return self._step_of(loads)

    def _step_of(self, by_microbatch: Floats) -> float:
        """Returns the step of a replica whose LLM microbatches have this encoder load."""
        loads = {}
        for name, bins in self.assignment.encoders.items():
            load = by_microbatch
            if bins.sharing == "pieces":
                load = np.repeat(by_microbatch, bins.bins)
            loads[name] = np.stack([load, load])[:, None, :]
        return self._simulate(loads, 0)


def _first_llm_rows(schedule: Schedule, microbatches: int) -> Ints:
    """Returns the first op of the LLM in every microbatch."""
    llm = (schedule.module == schedule.modules.index(LLM)) & (schedule.lane == Lane.COMPUTE)
    rows = np.flatnonzero(llm & (schedule.kind == OpKind.FORWARD))
    first = np.full(microbatches, len(schedule), np.int64)
    np.minimum.at(first, schedule.microbatch[rows], rows)
    return first[first < len(schedule)]


def simulate_batches(
    comparison: Comparison,
    names: Iterable[str],
    *,
    dealing: str = "drawn",
    count: int = BATCHES,
    seed: int = SEED,
    all_replicas: bool = False,
    progress: Progress = lambda name, done, total: None,
) -> dict[str, BatchStepTimes]:
    """Simulates each named system over the same batches: `count`, or as many as MAX_SIMULATED_OPS allow.

    With the dealing `best`, each system gets the faster of those that it can use; `today` stays as drawn.
    Where encoders cannot take items of other replicas, whole sequences are reordered instead.
    """
    if dealing not in (*DEALINGS, BEST):
        hint = nearest(dealing, [*DEALINGS, BEST])
        raise UserError(field="dealing", value=dealing, problem="is not a dealing", hint=hint)
    systems = {name: comparison.systems[name] for name in dict.fromkeys(names)}
    assumed = comparison.assumptions
    simulators = {
        name: BatchSimulator(
            system,
            system.candidate.batch_assignment(),
            slowdown=assumed.residence_slowdown,
            launch_s=assumed.launch_s,
            guesses=None if all_replicas else GUESSES,
        )
        for name, system in systems.items()
    }
    ops = sum(simulator.ops_per_batch for simulator in simulators.values())
    count = min(count, max(MIN_BATCHES, MAX_SIMULATED_OPS // max(ops, 1)))
    batches = draw_batches(comparison.job, count=count, seed=seed)
    by_system: dict[str, BatchStepTimes] = {}
    for place, (name, simulator) in enumerate(simulators.items()):
        chosen = _choose_dealing(systems[name], simulator, batches) if dealing == BEST else dealing
        if chosen == "items" and simulator.assignment.dealing_replicas == 1:
            chosen = "reordered"
        order, steps = simulator.order(chosen), []
        for batch in range(count):
            progress(f"steps of {name}", place * count + batch, len(systems) * count)
            steps.append(_step_s(simulator, batches, batch, chosen, order))
        by_system[name] = BatchStepTimes(
            system=name, dealing=chosen, steps_s=np.array(steps), simulations=simulator.simulations
        )
    return by_system


def _choose_dealing(system: SimulatedSystem, simulator: BatchSimulator, batches: DrawnBatches) -> str:
    """Returns the dealing with the shortest steps over a few batches, of those that a system can use.

    A plan that deals items is run so, whatever else might be faster.
    """
    plan = system.search_result.plan if system.search_result is not None else None
    if plan is not None and plan.dealing_replicas > 1:
        return "items"
    if system.name == TODAY or batches.are_even or not simulator.assignment.encoders:
        return "drawn"
    can_deal_items = simulator.assignment.dealing_replicas > 1
    means = {}
    for dealing in ("items", "reordered") if can_deal_items else ("reordered",):
        order, few = simulator.order(dealing), range(min(CHOOSE_OVER_BATCHES, len(batches)))
        means[dealing] = sum(_step_s(simulator, batches, batch, dealing, order) for batch in few)
    return min(means, key=means.__getitem__)


def _step_s(
    simulator: BatchSimulator, batches: DrawnBatches, batch: int, dealing: str, order: list[int]
) -> float:
    loads = encoder_loads_of_batch(batches, batch, simulator.assignment, dealing, order)
    uneven = dealing == "items" and not batches.are_even
    return simulator.step_s(loads, exchange_s=simulator.assignment.exchange_s if uneven else 0.0)


def encoder_loads_of_batch(
    batches: DrawnBatches, batch: int, assignment: BatchAssignment, dealing: str, order: list[int]
) -> dict[str, Floats]:
    """Returns the loads of the encoder microbatches of one batch under a dealing."""
    if dealing == "items":
        return sum_dealt_item_loads(batches, batch, assignment)
    slots = deal_batch_to_replicas(batches.loads[batches.drawn[batch]], assignment, dealing, order)
    return sum_encoder_loads(batches, batch, slots, assignment)
