"""Compares two plans: layouts, figures, and which lines were added, removed or moved."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest

from optimus.ir.plan import Plan
from optimus.ir.plan_lines import format_program_lines
from optimus.ir.planfile import plan_header_fields

FOR_READERS = ("name", "tool", "notes")  # nothing depends on them


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """Setting that differs between the plans; None if a plan has no such module."""

    field: str
    a: str | None
    b: str | None


@dataclass(frozen=True, kw_only=True)
class FirstDifferingLine:
    """First line that differs: its position and its text in each plan (None after the end of a program)."""

    device: int
    line: int  # of the class's program, counted from 1
    a: str | None
    b: str | None


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """Difference of plan B from plan A."""

    names: tuple[str, str]
    step_s: tuple[float, float]
    peak_bytes: tuple[int, int]  # of the worst device class
    layouts: tuple[SettingChange, ...]
    settings: tuple[SettingChange, ...]
    fields: tuple[str, ...]  # of the header, that differ
    lines: tuple[int, int]
    only_a: int
    only_b: int
    moved: int  # fewest moves that put the common lines into the same order
    first: FirstDifferingLine | None

    @property
    def ratio(self) -> float | None:
        """Step of B over step of A."""
        a, b = self.step_s
        return b / a if a > 0 else None

    @property
    def same(self) -> bool:
        """True if both plans run the same lines at the same cost."""
        return self.first is None and set(self.fields) <= set(FOR_READERS)


def compare_plans(a: Plan, b: Plan) -> PlanDifference:
    """Returns all differences of plan B from plan A."""
    only_a = only_b = moved = 0
    first, none = None, list[str]()
    for device, (lines_a, lines_b) in enumerate(zip_longest(_lines(a), _lines(b), fillvalue=none)):
        if lines_a != lines_b:
            first = first or _first(device, lines_a, lines_b)
            kept = _kept(lines_a, lines_b)
            only_a, only_b = only_a + len(lines_a) - len(kept), only_b + len(lines_b) - len(kept)
            moved += len(kept) - _longest_increasing(kept)
    header_a, header_b = plan_header_fields(a), plan_header_fields(b)
    return PlanDifference(
        names=(a.name, b.name),
        step_s=(a.claims.step_s, b.claims.step_s),
        peak_bytes=(_peak(a), _peak(b)),
        layouts=_changes(_layouts(a), _layouts(b)),
        settings=_changes(_settings(a), _settings(b)),
        fields=tuple(name for name in header_a if header_a[name] != header_b[name]),
        lines=(sum(map(len, a.programs)), sum(map(len, b.programs))),
        only_a=only_a,
        only_b=only_b,
        moved=moved,
        first=first,
    )


def _lines(plan: Plan) -> list[list[str]]:
    return [format_program_lines(program, plan.names) for program in plan.programs]


def _peak(plan: Plan) -> int:
    return max((of_class.peak for of_class in plan.memory), default=0)


def _layouts(plan: Plan) -> dict[str, str]:
    return {name: str(module.layout) for name, module in plan.modules.items()}


def _settings(plan: Plan) -> dict[str, str]:
    settings = {"strategy": plan.strategy, "order": plan.order, "microbatches": str(plan.microbatches)}
    for name, module in plan.modules.items():
        settings[f"{name}.recompute"] = module.recompute
        settings[f"{name}.pieces"] = str(module.microbatches_per_llm_microbatch)
    return settings


def _changes(a: dict[str, str], b: dict[str, str]) -> tuple[SettingChange, ...]:
    fields = [field for field in {**a, **b} if a.get(field) != b.get(field)]
    return tuple(SettingChange(field=field, a=a.get(field), b=b.get(field)) for field in fields)


def _first(device: int, a: list[str], b: list[str]) -> FirstDifferingLine:
    pairs = enumerate(zip_longest(a, b), start=1)
    line, (text_a, text_b) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return FirstDifferingLine(device=device, line=line, a=text_a, b=text_b)


def _kept(a: list[str], b: list[str]) -> list[int]:
    """Returns the indices in B of the lines of A that B also has, in A's order; equal lines match in turn."""
    places = {key: place for place, key in enumerate(_numbered(b))}
    return [places[key] for key in _numbered(a) if key in places]


def _numbered(lines: list[str]) -> list[tuple[str, int]]:
    seen: Counter[str] = Counter()
    numbered = []
    for line in lines:
        numbered.append((line, seen[line]))
        seen[line] += 1
    return numbered


def _longest_increasing(places: list[int]) -> int:
    """Returns the length of the longest increasing subsequence: lines that need not move."""
    ends: list[int] = []  # smallest end of an increasing subsequence of each length
    for place in places:
        at = bisect_left(ends, place)
        ends[at : at + 1] = [place]
    return len(ends)
