"""Draws the candidates of the search: step against peak memory, and the reason against each rejected one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from optimus.render.format_numbers import GB, format_gigabytes, format_seconds
from optimus.render.markup import (
    choose_tick_spacing,
    escape_markup,
    render_axis,
    render_legend,
    render_marker_line,
    render_note,
    render_section,
    render_table,
)
from optimus.render.report_data import CandidatePoint, TriedCandidates

WIDE, TALL, LETTER = 980.0, 300.0, 6.8  # px of the picture and of a letter, to place names
SORTS = {
    "chosen": "this plan",
    "system": "another system",
    "layout": "another encoder layout",
    "rejected": "rejected",
}
UNKNOWN = "What else was tried is not in the plan file: name its job with --job to see it."
MAX_LISTED = 200
NAMED = ("chosen", "system")


def _candidates_title(candidates: TriedCandidates) -> str:
    """Says `Of 16 encoder layouts 4 were scheduled; rejected: 3 for memory`."""
    rejected = [point for point in candidates.points if point.sort == "rejected" and point.step_s is None]
    sorts = Counter(point.reason.partition(":")[0] for point in rejected)
    reasons = ", ".join(f"{count} for {sort}" for sort, count in sorted(sorts.items()))
    fit = sum(point.sort in ("chosen", "layout") for point in candidates.points)
    of = max(fit, candidates.considered)
    words = f"Of {of} encoder layouts {fit} {'was' if fit == 1 else 'were'} scheduled"
    return f"{words}; rejected: {reasons}" if reasons else words


def render_candidates_section(candidates: TriedCandidates | None) -> str:
    """Returns the scatter plot and its table, or one line if nothing is known."""
    if candidates is None:
        return f"<section id='tried'><p class='note'>{escape_markup(UNKNOWN)}</p></section>"
    present = [sort for sort in SORTS if any(point.sort == sort for point in candidates.points)]
    listed = sorted(candidates.points, key=_rank)[:MAX_LISTED]
    rows = [
        [
            SORTS[point.sort],
            point.name,
            point.reason,
            "-" if point.step_s is None else format_seconds(point.step_s),
            "-" if point.peak_bytes is None else format_gigabytes(point.peak_bytes),
        ]
        for point in listed
    ]
    more = len(candidates.points) - len(listed)
    return render_section(
        "tried",
        _candidates_title(candidates),
        render_legend((f"d-{sort}", SORTS[sort]) for sort in present),
        _scatter(candidates),
        render_note(
            "Up is slower, right is more memory. Candidates that were not scheduled are at the top edge."
            + (f" {more} more are not listed." if more else "")
        ),
        render_table(["", "what", "why not, or how", "step s", "peak GB"], rows, left=3),
    )


def _rank(point: CandidatePoint) -> tuple[int, float]:
    return list(SORTS).index(point.sort), point.step_s or 0.0


def _scatter(candidates: TriedCandidates) -> str:
    """Draws a dot per candidate, with names of systems where there is room; the tooltip shows all."""
    shown = [point for point in candidates.points if point.peak_bytes is not None]
    frame = _ScatterAxes.around(candidates, shown)
    ordered = sorted(shown, key=lambda point: (point.sort == "chosen", point.sort in NAMED, point.name))
    labels = _labels(ordered, frame, frame.x(candidates.capacity_bytes))
    dots = [_dot(point, frame, labels.get(place)) for place, point in enumerate(ordered)]
    marks = "".join(
        f"<s style='bottom:{100 * frame.y(step_s):.2f}%'>{step_s:.{frame.digits}f} s</s>"
        for step_s in frame.ticks
    )
    line = render_marker_line(frame.x(candidates.capacity_bytes), "capacity")
    under = render_axis(frame.right / GB, "GB", first=frame.left / GB)
    return f"<div class='scatter'>{marks}{line}{''.join(dots)}</div><div class='under'>{under}</div>"


@dataclass(frozen=True, kw_only=True)
class _ScatterAxes:
    """Ranges of the axes: bytes to the right, seconds up."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, candidates: TriedCandidates, shown: Sequence[CandidatePoint]) -> _ScatterAxes:
        sizes = [min(point.peak_bytes or 0.0, 2 * candidates.capacity_bytes) for point in shown]
        steps = [point.step_s for point in shown if point.step_s is not None]
        left, right = min(sizes), max([candidates.capacity_bytes, *sizes])
        wide, tall = (right - left) or right, (max(steps) - min(steps)) or max(steps)
        return cls(
            left=max(0.0, left - 0.1 * wide),
            right=right + 0.05 * wide,
            low=max(0.0, min(steps) - 0.12 * tall),
            high=max(steps) + 0.18 * tall,
        )

    def x(self, size_bytes: float) -> float:
        return min(1.0, (size_bytes - self.left) / (self.right - self.left))

    def y(self, step_s: float | None) -> float:
        return 1.0 if step_s is None else (step_s - self.low) / (self.high - self.low)

    @property
    def tick(self) -> float:
        return choose_tick_spacing(self.high - self.low, 5)

    @property
    def digits(self) -> int:
        return max(0, -int(f"{self.tick:e}".partition("e")[2]))

    @property
    def ticks(self) -> list[float]:
        first = ceil(self.low / self.tick)
        return [place * self.tick for place in range(first, int(self.high / self.tick) + 1)]


def _labels(points: Sequence[CandidatePoint], frame: _ScatterAxes, capacity: float) -> dict[int, str]:
    """Places the name of each named dot right, left, above or below it; nowhere if all are taken."""
    spots = [(frame.x(point.peak_bytes or 0.0) * WIDE, frame.y(point.step_s) * TALL) for point in points]
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in spots]
    taken.append((capacity * WIDE - 2, 0.0, capacity * WIDE + 2, TALL))
    sides: dict[int, str] = {}
    for place in reversed(range(len(points))):
        if points[place].sort not in NAMED:
            continue
        x, y = spots[place]
        width = LETTER * len(_name(points[place]))
        for side, left, low in (
            ("right", x + 12, y - 8),
            ("left", x - 12 - width, y - 8),
            ("above", x - width / 2, y + 9),
            ("below", x - width / 2, y - 25),
        ):
            box = (left, low, left + width, low + 16)
            if left >= 0 and box[2] <= WIDE and not any(_overlap(box, rectangle) for rectangle in taken):
                taken.append(box)
                sides[place] = side
                break
    return sides


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _name(point: CandidatePoint) -> str:
    return "this plan" if point.sort == "chosen" else point.name


def _dot(point: CandidatePoint, frame: _ScatterAxes, side: str | None) -> str:
    assert point.peak_bytes is not None
    step = "not scheduled" if point.step_s is None else f"{format_seconds(point.step_s)} s"
    tip = f"{point.name}: {step}, {format_gigabytes(point.peak_bytes)} GB; {point.reason}"
    label = f"<b class='{side}'>{escape_markup(_name(point))}</b>" if side else ""
    at = f"left:{100 * frame.x(point.peak_bytes):.2f}%;bottom:{100 * frame.y(point.step_s):.2f}%"
    return f"<i class='dot d-{point.sort}' style='{at}' title='{escape_markup(tip)}'>{label}</i>"
