"""What every target gives: files, what it cannot run, and the best that it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optimus.ir.plan import Plan


@dataclass(frozen=True, kw_only=True)
class NotSupported:
    """Something the plan holds that the target cannot run."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Price:
    """A system that the target can run, beside the plan's own step."""

    system: str
    step_s: float
    over_plan: float


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan for a target: texts by file name, and an account of what is lost."""

    plan: Plan
    target: str
    version: str  # that names and behaviour were checked against
    files: Mapping[str, str]
    not_supported: tuple[NotSupported, ...]
    as_written: Price | None  # about what the files run: encoders in the LLM's first stage
    best_there: Price | None  # none if no system that it can run was compared and fits


AS_WRITTEN = ("stage0",)


def best_of(plan: Plan, systems: Sequence[str]) -> Price | None:
    """The fastest of `systems` that was compared when the plan was made, and fits."""
    compared, unfit = plan.notes.get("systems_s"), plan.notes.get("systems_unfit", [])
    if not isinstance(compared, Mapping):
        return None
    times = {
        name: float(compared[name])
        for name in systems
        if isinstance(compared.get(name), int | float) and name not in unfit
    }
    if not times:
        return None
    fastest = min(times, key=lambda name: times[name])
    step_s = times[fastest]
    return Price(system=fastest, step_s=step_s, over_plan=step_s / plan.claims.step_s)


EMPTY_ENDS = NotSupported(
    what="a first or last virtual stage without layers",
    why="it keeps the embedding in the first and the head in the last; the files say so",
)


def price_words(plan: Plan, price: Price | None, systems: Sequence[str], *, about: bool = False) -> str:
    """The price for people."""
    if price is None:
        return f"unknown: {' and '.join(systems)} not compared when the plan was made, or too large"
    more = price.over_plan - 1
    beside = f"{abs(more):.1%} {'more' if more >= 0 else 'less'} than the plan's {plan.claims.step_s:.3f} s"
    return f"{'about ' if about else ''}{price.system}, {price.step_s:.3f} s per step: {beside}"


def comment(lines: Sequence[str]) -> list[str]:
    """Lines as comments of a shell or Python file."""
    return [f"# {line}".rstrip() for line in lines]


def account(plan: Plan, target: str, found: Sequence[NotSupported], systems: Sequence[str]) -> list[str]:
    """What stands at the head of a file: what the target cannot run, and what it costs."""
    lines = [f"{target} cannot run of this plan:"]
    lines += [f"- {each.what}: {each.why}" for each in found] or ["- nothing: it can run all of it"]
    written = price_words(plan, best_of(plan, AS_WRITTEN), AS_WRITTEN, about=True)
    best = price_words(plan, best_of(plan, systems), systems)
    return [*lines, f"What these settings run: {written}.", f"The best system that it can run: {best}."]
