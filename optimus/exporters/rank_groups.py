"""Describes the rank groups of every module: a rule for any number of GPUs, and the first groups."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from optimus.ir.op import Communicator, Ints
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM, RankGrid

SCHEMA = "optimus.ranks/1"
MAX_LISTED_RANKS = 2048  # of the groups of one axis
GRID = ("pp_outer", "pp", "dp", "cp", "tp_outer", "tp")  # slowest first; the last counts fastest
RULE = (
    "Number the ranks 0, 1, ... in the module's grid, the last axis fastest. Ranks that differ only in "
    "`along` are a group; groups are ordered by the other axes. ep: every `size` consecutive ranks. An axis "
    "that is not listed has groups of one rank. An encoder's grid is the LLM's with pp and tp cut in two: "
    "its dp group runs along what is left of them as well."
)
ORDER = "tp-cp-ep-dp-pp"  # Megatron's default


def describe_rank_groups(plan: Plan) -> dict[str, Any]:
    """Returns the contents of `ranks.json`."""
    ranks = plan.ranks
    return {
        "schema": SCHEMA,
        "plan": plan.name,
        "world": ranks.world,
        "rule": RULE,
        "modules": {name: _module(ranks, name) for name in plan.modules},
    }


def _module(ranks: RankGrid, name: str) -> dict[str, Any]:
    shape = _grid_shape(ranks, name)
    groups = {axis: _groups(ranks, name, axis) for axis in ("tp", "cp", "dp", "pp", "ep")}
    return {
        "layout": asdict(ranks.layouts[name]),
        "megatron_order": ORDER if shape[0] == 1 else None,  # else pp is between two parts of dp
        "grid": {"axes": list(GRID), "shape": list(shape)},
        "groups": {axis: group for axis, group in groups.items() if group["size"] > 1},
    }


def _grid_shape(ranks: RankGrid, name: str) -> tuple[int, ...]:
    """Returns the grid of a module: the LLM's, with pp and tp split where the module's are smaller."""
    llm, module = ranks.llm, ranks.layouts[name]
    return llm.pp // module.pp, module.pp, llm.dp, llm.cp, llm.tp // module.tp, module.tp


def _group_axes(name: str, axis: str) -> tuple[str, ...]:
    """Returns the axes of the grid along which the ranks of a group differ."""
    if axis == "dp":
        return "pp_outer", "dp", "cp", "tp_outer"
    return () if axis == "cp" and name != LLM else (axis,)


def _list_groups(ranks: RankGrid, name: str, axis: str) -> Ints:
    """Returns every group of an axis, one per row."""
    all_ranks = np.arange(ranks.world, dtype=np.int32)
    if axis == "ep":
        return all_ranks.reshape(-1, ranks.layouts[name].ep)
    inner = [GRID.index(dim) for dim in _group_axes(name, axis)]
    outer = [place for place in range(len(GRID)) if place not in inner]
    shape = _grid_shape(ranks, name)
    cut = all_ranks.reshape(shape).transpose(outer + inner)
    size = int(np.prod([shape[place] for place in inner]))
    groups: Ints = cut.reshape(-1, size)
    return groups


def _groups(ranks: RankGrid, name: str, axis: str) -> dict[str, Any]:
    groups = _list_groups(ranks, name, axis)
    first = tuple(groups[0].tolist())
    assert first == ranks.group_of(name, Communicator[axis.upper()], first[0]), (name, axis)
    return {
        "along": "consecutive" if axis == "ep" else list(_group_axes(name, axis)),
        "size": groups.shape[1],
        "count": groups.shape[0],
        "first": groups[: max(1, MAX_LISTED_RANKS // groups.shape[1])].tolist(),
    }
