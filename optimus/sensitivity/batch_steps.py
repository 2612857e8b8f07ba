"""Simulates systems over drawn batches: the mean step and its 95th percentile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from optimus.errors import UserError, nearest
from optimus.ir.op import PARAMETER_TRAFFIC, Communicator, Floats, Ints, Lane, OpKind, Schedule
from optimus.ir.ranks import LLM
from optimus.planner.batch_assignment import BatchAssignment
from optimus.planner.compare import Comparison
from optimus.planner.forked import compute_by_key
from optimus.planner.systems.base import SimulatedSystem
from optimus.schedule.longest_path import LongestPath
from optimus.schedule.schedule_builder import repeat_for_replicas
from optimus.sensitivity.dealt_items import sum_dealt_item_loads
from optimus.sensitivity.drawn_batches import (
    BATCHES,
    COMPUTE,
    DEALINGS,
    SEED,
    DrawnBatches,
    deal_batch_to_replicas,
    draw_batches,
    sum_encoder_loads,
)

MAX_SIMULATED_OPS = 250_000_000  # over all systems and batches,
MIN_BATCHES = 8  # but at least so many batches
GUESSES = 3  # of the slowest replica, each by another criterion
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
    """Times one system with encoder ops scaled by the loads of batches, as longest paths in its order."""

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
        schedule = self._schedule = system.full_schedule
        self._slowdown, self._launch_s = slowdown, launch_s
        self._guesses = guesses
        self._known: dict[bytes, float] = {}
        deals = bool((schedule.communicator == Communicator.DEAL).any())
        self._replicas = assignment.dealing_replicas if deals else 1  # that wait for each other
        self._rows = {name: self._find_rows(name) for name in assignment.encoders}
        self._seconds = {
            name: float(schedule.duration_s[rows[COMPUTE]].sum()) for name, rows in self._rows.items()
        }
        self._paths: dict[int, LongestPath] = {}  # by replicas
        self._microbatches = int(schedule.microbatch.max(initial=0)) + 1

    @property
    def ops_per_batch(self) -> int:
        """The most ops that are timed for a batch; replicas that wait for each other are timed together."""
        if self.assignment.locked:  # all replicas wait for the slowest, which is timed
            return len(self._schedule)
        groups = max(1, self.assignment.replicas // self._replicas)
        guesses = groups if self._guesses is None else min(groups, self._guesses)
        return len(self._schedule) * self._replicas * guesses

    def _find_rows(self, encoder: str) -> tuple[Ints, Ints]:
        """Returns an encoder's compute ops, and its traffic that grows with tokens (not of parameters)."""
        schedule = self._schedule
        of_encoder = schedule.module == schedule.modules.index(encoder)
        moves = of_encoder & (schedule.lane != Lane.COMPUTE) & (schedule.communicator != Communicator.DP)
        moves &= ~np.isin(schedule.kind, PARAMETER_TRAFFIC)
        return np.flatnonzero(of_encoder & (schedule.lane == Lane.COMPUTE)), np.flatnonzero(moves)

    def steps_s(self, batches: Iterable[Mapping[str, Floats]], *, exchange_s: float = 0.0) -> Floats:
        """Returns the step of the slowest replica for the loads of every batch; equal loads are timed once.

        Replicas that exchange rows inside the step are timed together, since each exchange waits for all.
        Where the schedule has no exchange, every microbatch of the LLM waits `exchange_s` for it.
        """
        columns: dict[bytes, Floats] = {}  # factors of all that must be timed
        keys = []
        for loads in batches:
            slow = {replica // self._replicas for replica in self._slow_replicas(loads)}
            factors = [self._factors(loads, group) for group in sorted(slow)]
            own = {np.float64(exchange_s).tobytes() + each.tobytes(): each for each in factors}
            columns |= {key: each for key, each in own.items() if key not in self._known}
            keys.append(list(own))
        by_size: dict[int, list[bytes]] = {}
        for key, each in columns.items():
            by_size.setdefault(len(each), []).append(key)
        for replicas, same in by_size.items():
            self.simulations += replicas * len(same)
            steps_s = self._time(replicas, np.stack([columns[key] for key in same], axis=-1), exchange_s)
            self._known.update(zip(same, steps_s.tolist(), strict=True))
        return np.array([max(self._known[key] for key in own) for own in keys])

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

    def _factors(self, loads: Mapping[str, Floats], group: int) -> Floats:
        """Returns the factors of a group of replicas, by replica (one, if all are alike) and group of ops."""
        alike = all(load.shape[1] == 1 for load in loads.values())
        replicas = range(1) if alike else range(group * self._replicas, (group + 1) * self._replicas)
        return np.stack(
            [
                np.concatenate([[1.0], *(self._spread(load, replica) for load in loads.values())])
                for replica in replicas
            ]
        )

    def _spread(self, load: Floats, replica: int) -> Floats:
        """Returns the loads of one encoder for compute and traffic, microbatch by microbatch."""
        own = load[:, min(replica, load.shape[1] - 1)]
        missing = self._microbatches - own.shape[1]
        return np.pad(own, ((0, 0), (0, missing)), mode="edge").ravel()  # one microbatch stands for all

    @cached_property
    def _group(self) -> Ints:
        """The place of every op's factor in `_factors`: 0 for what does not depend on loads."""
        group = np.zeros(len(self._schedule), np.int64)
        for place, rows in enumerate(chain.from_iterable(self._rows.values())):
            group[rows] = 1 + place * self._microbatches + self._schedule.microbatch[rows]
        return group

    def _time(self, replicas: int, factors: Floats, exchange_s: float) -> Floats:
        """Returns the steps of a group of replicas for factors by replica, group of ops and column."""
        if replicas not in self._paths:
            repeated = repeat_for_replicas(self._schedule, replicas) if replicas > 1 else self._schedule
            self._paths[replicas] = LongestPath(repeated, slowdown=self._slowdown, launch_s=self._launch_s)
        added_s = np.zeros(len(self._schedule))
        added_s[_first_llm_rows(self._schedule, self.assignment.microbatches)] = exchange_s
        groups = [self._group + replica * factors.shape[1] for replica in range(replicas)]
        return self._paths[replicas].steps_s(
            np.concatenate(groups),
            factors.reshape(-1, factors.shape[2]),
            slowdown=self._slowdown,
            launch_s=self._launch_s,
            added_s=np.tile(added_s, replicas) if exchange_s else None,
        )

    def order(self, dealing: str) -> list[int]:
        """Returns the positions for microbatches, heaviest first: the best of a few orders."""
        count = self.assignment.microbatches
        orders = [list(range(count)), list(reversed(range(count)))]
        if dealing == "items" or (dealing == "reordered" and self.assignment.locked):
            return []  # the order of microbatches follows from loads, or they are even
        if dealing in ("matched", "reordered"):  # most slack: a heavy microbatch costs least
            costs = self._steps_of(np.where(np.eye(count, dtype=bool), PROBE_LOAD, 1.0))
            orders.insert(0, sorted(range(count), key=costs.tolist().__getitem__))
        ramps = np.empty((len(orders), count))  # microbatches get lighter along each order
        for ramp, order in zip(ramps, orders, strict=True):
            ramp[order] = np.linspace(PROBE_LOAD, 0.0, count)
        return orders[int(self._steps_of(ramps).argmin())] if dealing != "drawn" else []

    def _steps_of(self, by_microbatch: Floats) -> Floats:
        """Returns steps of a replica whose LLM microbatches have the encoder load of each row."""
        return self.steps_s(
            {
                name: np.tile(row.repeat(bins.bins if bins.sharing == "pieces" else 1), (2, 1, 1))
                for name, bins in self.assignment.encoders.items()
            }
            for row in by_microbatch
        )


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
    cores: int = 1,
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
    twins = {
        name: next((n for n in systems if systems[n].schedule is system.schedule), name)
        for name, system in systems.items()
    }
    alone = {name: name if TODAY in (name, twins[name]) else twins[name] for name in systems}

    def time_system(name: str) -> BatchStepTimes:
        simulator = simulators[name]
        chosen = _choose_dealing(systems[name], simulator, batches) if dealing == BEST else dealing
        if chosen == "items" and simulator.assignment.dealing_replicas == 1:
            chosen = "reordered"
        steps_s = _time_batches(simulator, batches, range(count), chosen)
        return BatchStepTimes(system=name, dealing=chosen, steps_s=steps_s, simulations=simulator.simulations)

    timed = compute_by_key(
        time_system,
        {name: float(simulators[name].ops_per_batch) for name in dict.fromkeys(alone.values())},
        cores=cores,
        report=lambda name: progress(f"steps of {name}", list(systems).index(name), len(systems)),
    )
    return {name: replace(timed[twin], system=name) for name, twin in alone.items()}


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
    few = range(min(CHOOSE_OVER_BATCHES, len(batches)))
    dealings = ("items", "reordered") if can_deal_items else ("reordered",)
    return min(dealings, key=lambda dealing: _time_batches(simulator, batches, few, dealing).sum())


def _time_batches(
    simulator: BatchSimulator, batches: DrawnBatches, chosen: Iterable[int], dealing: str
) -> Floats:
    """Returns the steps of some of the batches under a dealing."""
    assignment, order = simulator.assignment, simulator.order(dealing)
    uneven = dealing == "items" and not batches.are_even
    return simulator.steps_s(
        (encoder_loads_of_batch(batches, batch, assignment, dealing, order) for batch in chosen),
        exchange_s=assignment.exchange_s if uneven else 0.0,
    )


def encoder_loads_of_batch(
    batches: DrawnBatches, batch: int, assignment: BatchAssignment, dealing: str, order: list[int]
) -> dict[str, Floats]:
    """Returns the loads of the encoder microbatches of one batch under a dealing."""
    if dealing == "items":
        return sum_dealt_item_loads(batches, batch, assignment)
    slots = deal_batch_to_replicas(batches.loads[batches.drawn[batch]], assignment, dealing, order)
    return sum_encoder_loads(batches, batch, slots, assignment)
