"""Draws the memory of the worst rank: its components beside the capacity, and over the step."""

from __future__ import annotations

import numpy as np

from optimus.ir.op import Floats
from optimus.render.colours import memory_class
from optimus.render.markup import axis, key, line_at, note, percent, section, table, text
from optimus.render.report_data import WorstRank
from optimus.render.units import GB, gigabytes

WIDTH, HEIGHT = 1000, 200  # of the curve, in its own units
ROOM = 1.04


def memory_title(memory: WorstRank) -> str:
    """`The worst rank (stage 0) needs 58.5 of 80.0 GB: 21.5 GB are left`."""
    needs = (
        f"The worst rank ({memory.name}) needs {_gb(memory.peak_bytes)} of {_gb(memory.capacity_bytes)} GB"
    )
    left = memory.capacity_bytes - memory.peak_bytes
    return f"{needs}: {_gb(left)} GB are left" if left >= 0 else f"{needs}: {_gb(-left)} GB too much"


def memory_section(memory: WorstRank) -> str:
    """The bar of components, the curve over time, the figures."""
    longest = ROOM * max(memory.peak_bytes, memory.capacity_bytes)
    words = [(memory_class(name), f"{name} {_gb(size)} GB") for name, size in memory.components.items()]
    pieces = "".join(
        f"<i class='{memory_class(name)}' style='width:{100 * size / longest:.3f}%' "
        f"title='{text(name)} {_gb(size)} GB, {percent(size / memory.peak_bytes, 1)}'></i>"
        for name, size in memory.components.items()
    )
    line = line_at(memory.capacity_bytes / longest, "capacity")
    chart = (
        "<div class='bars'><div class='bar own'><div class='name'>at its peak</div>"
        f"<div class='line'>{pieces}</div></div>\n<div class='over'>{line}</div></div>"
        f"{axis(longest / GB, 'GB')}"
    )
    return section(
        "memory",
        memory_title(memory),
        key(words),
        chart,
        _curve(memory, longest),
        note(
            "Over the step, what is always there is at the bottom. Activations live from their forward to "
            "their backward, in the order of the program."
        ),
        table(["component", "GB", "% of the peak"], _rows(memory)),
    )


def _rows(memory: WorstRank) -> list[list[str]]:
    sizes = memory.components.items()
    return [[name, _gb(size), f"{100 * size / memory.peak_bytes:.1f}"] for name, size in sizes]


def _curve(memory: WorstRank, longest: float) -> str:
    """Stacked step functions; the SVG is stretched, so that it holds shapes and no words."""
    base: Floats = np.full(len(memory.times_s), float(memory.fixed_bytes))
    layers = [("m-fixed", base)]
    for name, sizes in memory.alive.items():
        base = base + sizes
        layers.append((memory_class(name), base))
    paths = [
        f"<path class='{name}' d='{_steps(memory.times_s, top, memory.step_s, longest)}'/>"
        for name, top in reversed(layers)
    ]
    capacity = 100 * (1 - memory.capacity_bytes / longest)
    return (
        f"<div class='curve'><b>over the step</b><svg viewBox='0 0 {WIDTH} {HEIGHT}' "
        f"preserveAspectRatio='none' role='img' aria-label='memory over the step'>{''.join(paths)}</svg>"
        f"<u style='top:{capacity:.2f}%'><span>capacity {_gb(memory.capacity_bytes)} GB</span></u></div>"
        f"{axis(memory.step_s, 's')}"
    )


def _steps(times: Floats, values: Floats, end: float, longest: float) -> str:
    """An outline with the highest value of every unit of width."""
    edges = np.searchsorted(times, np.linspace(0.0, end, WIDTH + 1))
    first = np.maximum(edges[:-1] - 1, 0)  # what was alive when the unit begins
    pairs = np.stack([first, np.maximum(edges[1:], first + 1)], axis=1).ravel()
    highest = np.maximum.reduceat(np.append(values, 0.0), pairs)[::2]
    heights = np.round(HEIGHT * (1 - highest / longest), 1)
    changes = np.flatnonzero(np.append(True, heights[1:] != heights[:-1]))
    parts = [f"H{x}V{y:g}" for x, y in zip(changes.tolist(), heights[changes].tolist(), strict=True)]
    return f"M0 {HEIGHT}{''.join(parts)}H{WIDTH}V{HEIGHT}z"


def _gb(size: float) -> str:
    return gigabytes(size)
