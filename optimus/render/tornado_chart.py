"""Draws how sure the step is: what it becomes when assumptions are wrong, widest first."""

from __future__ import annotations

from optimus.errors import one_of
from optimus.render.markup import key, line_at, note, section, table, text
from optimus.render.units import seconds
from optimus.sensitivity.tornado import Perturbed, Tornado

ROOM = 1.15  # of each side beyond the longest bar
WINNERS_SHOWN = 5


def sure_title(sure: Tornado) -> str:
    """`The step depends most on compute efficiency: 2.909 s (+19 %) if it is 20 % lower`."""
    most = max(sure.wide, key=_reach)
    worse_low = most.low_s >= most.high_s
    step, label = (most.low_s, most.low_label) if worse_low else (most.high_s, most.high_label)
    change = f"{100 * (step / sure.step_s - 1):+.0f} %"
    title = f"The step depends most on {most.name}: {seconds(step)} s ({change}) at {label}"
    if sure.winner is None:
        return title
    winners = _winners(sure)
    same = sum(winner == sure.winner for winner in winners)
    others = sorted({winner for winner in winners if winner != sure.winner})[:WINNERS_SHOWN]
    wins = f"{sure.winner} is the fastest in {same} of {len(winners)} perturbed replays"
    wins += f", else {one_of(others)}" if others else ""
    return f"{wins}; the plan's step moves most with {most.name}"


def _reach(row: Perturbed) -> float:
    return abs(row.high_s - row.low_s)


def _winners(sure: Tornado) -> list[str]:
    rows = (*sure.wide, *sure.narrow)
    return [winner for row in rows for winner in (row.winner_low, row.winner_high) if winner is not None]


def sure_section(sure: Tornado) -> str:
    """The tornado and its figures."""
    narrow = {row.name: row for row in sure.narrow}
    rows = sorted(sure.wide, key=_reach, reverse=True)
    ends = [end for row in rows for end in (row.low_s, row.high_s)]
    reach = ROOM * max(1e-9, *(abs(end - sure.step_s) for end in ends))
    left = max(0.0, sure.step_s - reach)
    bars = "\n".join(_row(sure, row, narrow.get(row.name), left, 2 * reach) for row in rows)
    middle = line_at((sure.step_s - left) / (2 * reach), f"{seconds(sure.step_s)} s")
    amounts = dict.fromkeys(row.high_label.lstrip("+") for row in (*rows, *sure.narrow))
    words = [
        (f"t-{name}", f"{label} lower or higher")
        for name, label in zip(("wide", "narrow"), amounts, strict=False)
    ]
    return section(
        "sure",
        sure_title(sure),
        key(words) if len(amounts) <= 2 else "",
        f"<div class='bars tornado'>{bars}\n<div class='over'>{middle}</div></div>",
        note(f"{sure.how[:1].upper()}{sure.how[1:]}." if sure.how else ""),
        table(*_figures(sure, rows, narrow)),
    )


def _row(sure: Tornado, wide: Perturbed, narrow: Perturbed | None, left: float, width: float) -> str:
    pieces = [_piece("t-wide", wide, left, width)]
    if narrow is not None:
        pieces.append(_piece("t-narrow", narrow, left, width))
    ends = f"{wide.low_label}: {seconds(wide.low_s)} s, {wide.high_label}: {seconds(wide.high_s)} s"
    return (
        f"<div class='bar'><div class='name'>{text(wide.name)} <span class='step'>{text(ends)}</span></div>"
        f"<div class='line'>{''.join(pieces)}</div></div>"
    )


def _piece(name: str, row: Perturbed, left: float, width: float) -> str:
    begin, end = sorted((row.low_s, row.high_s))
    tip = f"{row.name}: {row.low_label} {seconds(row.low_s)} s, {row.high_label} {seconds(row.high_s)} s"
    place = f"left:{100 * (begin - left) / width:.3f}%;width:{max(0.1, 100 * (end - begin) / width):.3f}%"
    return f"<i class='{name}' style='{place}' title='{text(tip)}'></i>"


def _figures(
    sure: Tornado, rows: list[Perturbed], narrow: dict[str, Perturbed]
) -> tuple[list[str], list[list[str]]]:
    """A row per assumption; where another system wins than with nothing perturbed, it is named."""
    body = []
    for row in rows:
        low, high = _cell(sure, row, high=False), _cell(sure, row, high=True)
        inner = narrow.get(row.name)
        between = [] if inner is None else [_cell(sure, inner, high=False), _cell(sure, inner, high=True)]
        body.append([row.name, low, *between, high])
    width = max(len(cells) for cells in body)
    header = [
        "step s if it is",
        *(["lower", "higher"] if width == 3 else ["lowest", "lower", "higher", "highest"]),
    ]
    return header, [[*cells[:2], *[""] * (width - len(cells)), *cells[2:]] for cells in body]


def _cell(sure: Tornado, row: Perturbed, *, high: bool) -> str:
    label, step_s, winner = (
        (row.high_label, row.high_s, row.winner_high) if high else (row.low_label, row.low_s, row.winner_low)
    )
    change = round(100 * (step_s / sure.step_s - 1), 1) + 0.0  # never -0.0
    cell = f"{label}: {seconds(step_s)} ({change:+.1f} %)"
    return cell if winner == sure.winner else f"{cell}, {winner} wins"
