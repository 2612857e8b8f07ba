"""Holds which system to run and why: the rule, its evidence, and the same sentence for all readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optimus.ir.ranks import LLM
from optimus.planner.planning import MIN_SPEEDUP_WORTH_FILLING
from optimus.planner.systems.base import OVERLAPPED_TP_SHARE, SimulatedSystem
from optimus.planner.systems.registry import SYSTEMS, fills_bubbles
from optimus.sensitivity.batch_steps import BatchStepTimes
from optimus.sensitivity.win_rate import PerturbedSteps, WinRate

NEARLY_FULL = 0.95  # of a GPU's memory: what needs more is not preferred for simplicity
ROUNDING = 1e-9  # of a step, so that equal systems stay equal
FILLED = "optimus"


@dataclass(frozen=True, kw_only=True, eq=False)
class Recommendation:
    """The system to run: the simplest of those about as fast as any over drawn batches and cost models.

    A system that leaves little memory is not preferred to one that leaves more.
    """

    name: str
    systems: Mapping[str, SimulatedSystem]  # those that may be the fastest
    capacity_bytes: float
    drawn: Mapping[str, BatchStepTimes]  # systems that may be the fastest, and today's; fastest first
    planned: tuple[str, ...]  # those of them that can be planned, in the same order
    sure: WinRate | None  # None: not computed
    # Systems that are taken around a pipeline, as they are at their best around a fully sharded LLM, and by
    # what share those take more in the mean of the cost models.
    sharded: Mapping[str, tuple[SimulatedSystem, float]] = field(default_factory=dict)

    @property
    def system(self) -> SimulatedSystem:
        return self.systems[self.name]

    @property
    def steps(self) -> BatchStepTimes:
        """Steps of the recommended system over the batches."""
        return self.drawn[self.name]

    @property
    def fastest(self) -> str:
        """The fastest system over the batches, of those that can be planned."""
        return self.planned[0]

    @property
    def next_best(self) -> str | None:
        """The fastest other system that can be planned, is not the same and takes no less."""
        steps = self.steps
        slower = (name for name in self.planned if self.drawn[name].mean_s >= steps.mean_s)
        return next((n for n in slower if (self.drawn[n].steps_s != steps.steps_s).any()), None)

    @property
    def passed_over(self) -> Mapping[str, str]:
        """Systems that are faster or as fast and simpler, and why they are not recommended."""
        order, reasons = list(SYSTEMS).index, dict[str, str]()
        robust = list_robust(self.excess)
        limit_s = MIN_SPEEDUP_WORTH_FILLING * min(self.drawn[name].mean_s for name in robust)
        for name in self.planned:
            mean_s, is_simpler = self.drawn[name].mean_s, order(name) < order(self.name)
            if name not in robust and (mean_s < self.steps.mean_s or (is_simpler and mean_s <= limit_s)):
                reasons[name] = self._explain_cost_models(name)
            elif name in robust and is_simpler and mean_s <= limit_s:
                share = self.systems[name].peak_bytes / self.capacity_bytes
                reasons[name] = f"needs {share:.1%} of the memory, more than {NEARLY_FULL:.0%}"
        return reasons

    def _explain_cost_models(self, name: str) -> str:
        """Returns what a system takes more in the mean of the cost models, and where most of it."""
        assert self.sure is not None, "only cost models rule a system out"
        more, rule = (
            self.excess[name] - self.excess[self.name],
            self.sure.perturbed.find_loss_rule(name, self.name),
        )
        where = "" if rule is None else f", above all where {rule}"
        return f"takes {more:.1%} more in the mean of {self.sure.of} perturbed cost models{where}"

    @property
    def excess(self) -> Mapping[str, float]:
        """By system, the share by which its step is over the fastest, in the mean over cost models."""
        return compute_excess(self.planned, None if self.sure is None else self.sure.perturbed)

    @property
    def memory_share(self) -> float:
        return self.system.peak_bytes / self.capacity_bytes

    @property
    def best_unfilled(self) -> str | None:
        """The fastest system that fills no bubbles, if possible one that no cost models rule out."""
        robust, unfilled = list_robust(self.excess), [n for n in self.planned if not fills_bubbles(n)]
        return next((name for name in unfilled if name in robust), next(iter(unfilled), None))

    @property
    def filling_speedup(self) -> float | None:
        """Mean step of `best_unfilled` over that of `optimus`; None: not compared."""
        if FILLED not in self.drawn or self.best_unfilled is None:
            return None
        return self.drawn[self.best_unfilled].mean_s / self.drawn[FILLED].mean_s

    @property
    def _with_tp_overlapped(self) -> str:
        """Says if filling is still worth it where TP traffic is overlapped already; empty if it never is."""
        filled = self.systems.get(FILLED)
        simpler = [s.overlapped_step_s for n, s in self.systems.items() if not fills_bubbles(n)]
        gain = self.filling_speedup
        if filled is None or gain is None or gain < MIN_SPEEDUP_WORTH_FILLING:
            return ""
        less = 1 - filled.overlapped_step_s / min(simpler)
        still = ", also" if 1 / (1 - less) >= MIN_SPEEDUP_WORTH_FILLING else ", but not"
        gains = f"{abs(less):.1%} {'less' if less > 0 else 'more'} time"
        return f"{still} with {OVERLAPPED_TP_SHARE:.0%} of the TP traffic overlapped already: {gains}"

    @property
    def _layouts(self) -> str:
        """The layout of the LLM, and of encoders that have another."""
        result = self.system.search_result
        assert result is not None, "what is recommended has a plan"
        modules = result.filled.header.modules
        llm = f"llm {modules[LLM].layout}{', fully sharded' * (self.name == FILLED and result.llm.locked)}"
        others = [f"{n} {m.layout}" for n, m in modules.items() if m.layout != modules[LLM].layout]
        return f"{llm} ({', '.join(others)})" if others else llm

    @property
    def reasons(self) -> list[str]:
        """Why this system: what the fastest and the next best take, what filling gains, and the memory."""
        reasons, margin = [], f"{MIN_SPEEDUP_WORTH_FILLING - 1:.0%}"
        fastest_s, mean_s, passed_over = self.drawn[self.fastest].mean_s, self.steps.mean_s, self.passed_over
        if fastest_s < mean_s:
            allowed = f"within the {margin} in which the simpler system is recommended"
            if self.fastest in passed_over:
                allowed = f"but {passed_over[self.fastest]}"
            share = f"{1 - fastest_s / mean_s:.1%} less"
            reasons.append(f"{self.fastest} takes {fastest_s:.4g} s, {share}, {allowed}")
        if self.next_best is not None:
            next_s = self.drawn[self.next_best].mean_s
            longer = f"{next_s / mean_s - 1:.1%} longer"
            reasons.append(f"the next best, {self.next_best}, takes {next_s:.4g} s, {longer}")
        for name, (system, more) in self.sharded.items():
            takes = f"around a fully sharded LLM it takes {system.step_s:.4g} s at the mean of the data"
            of = f"{more:.1%} more in the mean of the perturbed cost models"
            reasons.append(f"{name} is that around a pipeline of the LLM: {takes}, but {of}")
        for name, why in passed_over.items():
            if name not in (self.fastest, FILLED):
                simpler = list(SYSTEMS).index(name) < list(SYSTEMS).index(self.name)
                reasons.append(f"{name} {'is simpler' if simpler else 'takes less'}, but {why}")
        gain = self.filling_speedup
        if FILLED in passed_over:
            less = 1 - self.drawn[FILLED].mean_s / mean_s
            takes = f"takes {less:.1%} less time than {self.name}, but {passed_over[FILLED]}"
            takes = takes if self.fastest != FILLED else "is not worth that"
            reasons.append(f"filling bubbles ({FILLED}) {takes}")
        elif gain is not None:
            gained = "gains nothing here"
            if gain >= 1.0005:
                gained = f"takes {1 - 1 / gain:.1%} less time than {self.best_unfilled}"
            worth = "worth it" if gain >= MIN_SPEEDUP_WORTH_FILLING else f"not worth it below {margin}"
            reasons.append(f"filling bubbles ({FILLED}) {gained} ({worth}{self._with_tp_overlapped})")
        overlapped = min(self.planned, key=lambda name: self.systems[name].overlapped_step_s)
        less = 1 - self.systems[overlapped].overlapped_step_s / self.system.overlapped_step_s
        if less > MIN_SPEEDUP_WORTH_FILLING - 1:
            already = f"{OVERLAPPED_TP_SHARE:.0%} of your TP traffic is overlapped already"
            reasons.append(f"if {already}, {overlapped} takes {less:.1%} less at the mean of the data")
        if self.memory_share > NEARLY_FULL:
            full = f"{self.name} needs {self.memory_share:.0%} of the memory, which leaves little room"
            reasons.append(full)
        return reasons

    @property
    def sentence(self) -> str:
        """The recommendation in one sentence, the same in the terminal, JSON, plan file and report."""
        steps = self.steps
        words = f"run {self.name} on {self._layouts}: {steps.mean_s:.4g} s a step"
        if steps.simulations > 1:
            words += f" over {len(steps.steps_s)} drawn batches (p95 {steps.p95_s:.4g})"
        words += f", {self.system.peak_bytes / 1e9:.1f} of {self.capacity_bytes / 1e9:.0f} GB at p99 of steps"
        return "; ".join([words, *self.reasons, *([] if self.sure is None else [self.sure.sentence])])

    @property
    def notes(self) -> dict[str, Any]:
        """Entries of the plan file for its readers."""
        drawn = {n: {"mean_s": each.mean_s, "p95_s": each.p95_s} for n, each in self.drawn.items()}
        return {"recommended": self.name, "recommendation": self.sentence, "drawn": drawn}


def compute_excess(names: Iterable[str], perturbed: PerturbedSteps | None) -> dict[str, float]:
    """Returns by system the share by which its step is over the fastest, in the mean over cost models.

    That is what a system costs if it is not known which of them is true; 0 without cost models.
    """
    if perturbed is None or not perturbed.models:
        return dict.fromkeys(names, 0.0)
    return {name: perturbed.mean_excess(name) for name in names}


def list_robust(excess: Mapping[str, float]) -> list[str]:
    """Returns the systems that cost models do not rule out: they cost at most the margin more than others."""
    most = min(excess.values()) + MIN_SPEEDUP_WORTH_FILLING - 1
    return [name for name, share in excess.items() if share <= most + ROUNDING]


def choose_simplest(
    means_s: Mapping[str, float], shares: Mapping[str, float], excess: Mapping[str, float]
) -> str:
    """Returns the simplest of the systems about as fast as the fastest that leaves memory.

    Systems that cost models rule out do not count. `shares` are those of the memory. If none of the fast
    ones leaves enough, that which leaves the most is taken.
    """
    robust = list_robust(excess)
    limit_s = MIN_SPEEDUP_WORTH_FILLING * min(means_s[name] for name in robust)
    close = {name: shares[name] for name in robust if means_s[name] <= limit_s}
    most = max(NEARLY_FULL, min(close.values()))
    return min((name for name, share in close.items() if share <= most), key=list(SYSTEMS).index)
