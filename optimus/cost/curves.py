"""Looks up measured kernels and collectives between the points that were measured."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt

from optimus.errors import UserError, nearest
from optimus.job.cluster import FLAT

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Grid:
    """Positive values at every crossing of sorted axes, kept as logarithms."""

    log_axes: tuple[Floats, ...]
    log_values: Floats

    def at(self, *point: float) -> float:
        """Straight lines in the logarithms; beyond an edge, the value at the edge."""
        cube = self.log_values
        for axis, coordinate in zip(self.log_axes, point, strict=True):
            place = float(np.interp(math.log(coordinate), axis, np.arange(len(axis))))  # stops at the edges
            low = min(int(place), len(axis) - 2)
            cube = cube[low] + (place - low) * (cube[low + 1] - cube[low])
        return math.exp(float(cube))

    def clamp(self, *point: float) -> tuple[float, ...]:
        """The nearest point inside the grid."""
        edges = zip(self.log_axes, point, strict=True)
        return tuple(min(max(x, math.exp(axis[0])), math.exp(axis[-1])) for axis, x in edges)

    def outside(self, *point: float) -> bool:
        """True where `at` extrapolates: the caller should warn."""
        return any(not math.isclose(x, y) for x, y in zip(point, self.clamp(*point), strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """What was measured on one system; the csv files say where, how and in which units."""

    gemm: Grid  # (m, n, k) -> fraction of peak
    attention: Mapping[bool, Grid]  # causal -> (head_dim, tokens) -> fraction of peak, forward
    collectives: Mapping[str, Grid]  # name -> (ranks, bytes) -> seconds inside one node


@functools.cache
def load_curves(system: str) -> Curves:
    """The curves of `catalog/curves/<system>`; `flat` reaches the peak everywhere and has no collectives."""
    if system == FLAT:
        return Curves(gemm=_flat(3), attention={False: _flat(2), True: _flat(2)}, collectives={})
    folder = resources.files("optimus.catalog") / "curves"
    known = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if system not in known:
        hint = nearest(system, known)
        raise UserError(field="gpu.curves", value=system, problem="is not measured", hint=hint)
    gemm, attention, collectives = (
        _read_rows((folder / system / f"{name}.csv").read_text(encoding="utf-8"))
        for name in ("gemm", "attention", "collectives")
    )
    return Curves(
        gemm=_to_grid(gemm),
        attention={bool(int(key)): _to_grid(rows) for key, rows in _split_by_first(attention).items()},
        collectives={key: _to_grid(rows) for key, rows in _split_by_first(collectives).items()},
    )


def _flat(dimensions: int) -> Grid:
    """1 at every point, of any size."""
    return Grid((np.log([1.0, 2.0]),) * dimensions, np.zeros((2,) * dimensions))


def _read_rows(text: str) -> list[list[str]]:
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return list(csv.reader(lines))[1:]


def _split_by_first(rows: Sequence[Sequence[str]]) -> dict[str, list[Sequence[str]]]:
    groups: dict[str, list[Sequence[str]]] = {}
    for first, *rest in rows:
        groups.setdefault(first, []).append(rest)
    return groups


def _to_grid(rows: Sequence[Sequence[str]]) -> Grid:
    logs = np.log(np.array(rows, dtype=np.float64))
    logs = logs[np.lexsort(logs.T[-2::-1])]  # first column slowest, as in the shape below
    axes = tuple(np.unique(column) for column in logs.T[:-1])
    shape = tuple(len(axis) for axis in axes)
    assert len(logs) == math.prod(shape), f"{len(logs)} rows do not fill a grid of {shape}"
    return Grid(axes, logs[:, -1].reshape(shape))
