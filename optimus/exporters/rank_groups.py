"""Rank groups of every module: a rule for any number of GPUs, and the first groups written out."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from optimus.ir.op import Communicator, Ints
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM, Ranks

SCHEMA = "optimus.ranks/1"
SHOWN = 2048  # ranks of an axis' groups that are written out
GRID = ("pp_outer", "pp", "dp", "cp", "tp_outer", "tp")  # slowest first; the last counts fastest
RULE = (
    "Number the ranks 0, 1, ... in the module's grid, the last axis fastest. Ranks that differ only in "
    "`along` are a group; groups are ordered by the other axes. ep: every `size` consecutive ranks. An axis "
    "that is not listed has groups of one rank. An encoder's grid is the LLM's with pp and tp cut in two: "
    "its dp group runs along what is left of them as well."
)
ORDER = "tp-cp-ep-dp-pp"  # Megatron's default


def ranks_document(plan: Plan) -> dict[str, Any]:
    """What `ranks.json` holds."""
    ranks = plan.ranks
    return {
        "schema": SCHEMA,
        "plan": plan.name,
        "world": ranks.world,
        "rule": RULE,
        "modules": {name: _module(ranks, name) for name in plan.modules},
    }


def _module(ranks: Ranks, name: str) -> dict[str, Any]:
    shape = shape_of(ranks, name)
    groups = {axis: _groups(ranks, name, axis) for axis in ("tp", "cp", "dp", "pp", "ep")}
    return {
        "layout": asdict(ranks.layouts[name]),
        "megatron_order": ORDER if shape[0] == 1 else None,  # else pp lies between two parts of dp
        "grid": {"axes": list(GRID), "shape": list(shape)},
        "groups": {axis: found for axis, found in groups.items() if found["size"] > 1},
    }


def shape_of(ranks: Ranks, name: str) -> tuple[int, ...]:
    """The grid of a module: the LLM's, with pp and tp cut where the module's are smaller."""
    llm, own = ranks.llm, ranks.layouts[name]
    return llm.pp // own.pp, own.pp, llm.dp, llm.cp, llm.tp // own.tp, own.tp


def along(name: str, axis: str) -> tuple[str, ...]:
    """Axes of the grid in which the ranks of a group differ."""
    if axis == "dp":
        return "pp_outer", "dp", "cp", "tp_outer"
    return () if axis == "cp" and name != LLM else (axis,)


def all_groups(ranks: Ranks, name: str, axis: str) -> Ints:
    """Every group of an axis, a row each."""
    every = np.arange(ranks.world, dtype=np.int32)
    if axis == "ep":
        return every.reshape(-1, ranks.layouts[name].ep)
    inner = [GRID.index(each) for each in along(name, axis)]
    outer = [place for place in range(len(GRID)) if place not in inner]
    shape = shape_of(ranks, name)
    cut = every.reshape(shape).transpose(outer + inner)
    size = int(np.prod([shape[place] for place in inner]))
    found: Ints = cut.reshape(-1, size)
    return found


def _groups(ranks: Ranks, name: str, axis: str) -> dict[str, Any]:
    groups = all_groups(ranks, name, axis)
    first = tuple(groups[0].tolist())
    assert first == ranks.group_of(name, Communicator[axis.upper()], first[0]), (name, axis)
    return {
        "along": "consecutive" if axis == "ep" else list(along(name, axis)),
        "size": groups.shape[1],
        "count": groups.shape[0],
        "first": groups[: max(1, SHOWN // groups.shape[1])].tolist(),
    }
