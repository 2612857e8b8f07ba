"""Draws what was tried: step against peak memory, and the reason against everything that was not taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from optimus.render.markup import axis, key, line_at, note, section, table, text, tick_of
from optimus.render.report_data import Point, Tries
from optimus.render.units import GB, gigabytes, seconds

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


def tried_title(tries: Tries) -> str:
    """`Of 16 encoder layouts 4 were scheduled; rejected: 3 for memory`."""
    rejected = [point for point in tries.points if point.sort == "rejected" and point.step_s is None]
    sorts = Counter(point.reason.partition(":")[0] for point in rejected)
    reasons = ", ".join(f"{count} for {sort}" for sort, count in sorted(sorts.items()))
    fit = sum(point.sort in ("chosen", "layout") for point in tries.points)
    of = max(fit, tries.considered)
    words = f"Of {of} encoder layouts {fit} {'was' if fit == 1 else 'were'} scheduled"
    return f"{words}; rejected: {reasons}" if reasons else words


def tried_section(tries: Tries | None) -> str:
    """The picture and its table, or one line if nothing is known."""
    if tries is None:
        return f"<section id='tried'><p class='note'>{text(UNKNOWN)}</p></section>"
    present = [sort for sort in SORTS if any(point.sort == sort for point in tries.points)]
    listed = sorted(tries.points, key=_rank)[:MAX_LISTED]
    rows = [
        [
            SORTS[point.sort],
            point.name,
            point.reason,
            "-" if point.step_s is None else seconds(point.step_s),
            "-" if point.peak_bytes is None else gigabytes(point.peak_bytes),
        ]
        for point in listed
    ]
    more = len(tries.points) - len(listed)
    return section(
        "tried",
        tried_title(tries),
        key((f"d-{sort}", SORTS[sort]) for sort in present),
        _scatter(tries),
        note(
            "Up is slower, right is more memory. What was not scheduled stands on the top edge."
            + (f" {more} more are not listed." if more else "")
        ),
        table(["", "what", "why not, or how", "step s", "peak GB"], rows, left=3),
    )


def _rank(point: Point) -> tuple[int, float]:
    return list(SORTS).index(point.sort), point.step_s or 0.0


def _scatter(tries: Tries) -> str:
    """Dots by place, names of systems beside them where there is room; the mouse shows all of them."""
    shown = [point for point in tries.points if point.peak_bytes is not None]
    frame = Frame.around(tries, shown)
    ordered = sorted(shown, key=lambda point: (point.sort == "chosen", point.sort in NAMED, point.name))
    labels = _labels(ordered, frame, frame.x(tries.capacity_bytes))
    dots = [_dot(point, frame, labels.get(place)) for place, point in enumerate(ordered)]
    marks = "".join(
        f"<s style='bottom:{100 * frame.y(step_s):.2f}%'>{step_s:.{frame.digits}f} s</s>"
        for step_s in frame.ticks
    )
    line = line_at(frame.x(tries.capacity_bytes), "capacity")
    under = axis(frame.right / GB, "GB", first=frame.left / GB)
    return f"<div class='scatter'>{marks}{line}{''.join(dots)}</div><div class='under'>{under}</div>"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What the axes span: bytes to the right, seconds up."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, tries: Tries, shown: Sequence[Point]) -> Frame:
        sizes = [min(point.peak_bytes or 0.0, 2 * tries.capacity_bytes) for point in shown]
        steps = [point.step_s for point in shown if point.step_s is not None]
        left, right = min(sizes), max([tries.capacity_bytes, *sizes])
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
        return tick_of(self.high - self.low, 5)

    @property
    def digits(self) -> int:
        return max(0, -int(f"{self.tick:e}".partition("e")[2]))

    @property
    def ticks(self) -> list[float]:
        first = ceil(self.low / self.tick)
        return [place * self.tick for place in range(first, int(self.high / self.tick) + 1)]


def _labels(points: Sequence[Point], frame: Frame, capacity: float) -> dict[int, str]:
    """Where each named dot has its name: right, left, above or below; nowhere if all are taken."""
    spots = [(frame.x(point.peak_bytes or 0.0) * WIDE, frame.y(point.step_s) * TALL) for point in points]
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in spots]
    taken.append((capacity * WIDE - 2, 0.0, capacity * WIDE + 2, TALL))
    found: dict[int, str] = {}
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
            if left >= 0 and box[2] <= WIDE and not any(_meet(box, other) for other in taken):
                taken.append(box)
                found[place] = side
                break
    return found


def _meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _name(point: Point) -> str:
    return "this plan" if point.sort == "chosen" else point.name


def _dot(point: Point, frame: Frame, side: str | None) -> str:
    assert point.peak_bytes is not None
    step = "not scheduled" if point.step_s is None else f"{seconds(point.step_s)} s"
    tip = f"{point.name}: {step}, {gigabytes(point.peak_bytes)} GB; {point.reason}"
    label = f"<b class='{side}'>{text(_name(point))}</b>" if side else ""
    at = f"left:{100 * frame.x(point.peak_bytes):.2f}%;bottom:{100 * frame.y(point.step_s):.2f}%"
    return f"<i class='dot d-{point.sort}' style='{at}' title='{text(tip)}'>{label}</i>"
