"""Encoders that divide the LLM's TP groups, seen as one: all blocks of such a group do the same together.

Where every LLM microbatch is dealt in equal pieces to the pipelines side by side in a TP group, it is enough
to schedule one of them. A *folded* header has one class for all blocks, and a piece for each round of pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optimus.ir.plan import Plan, Program


def unfold(header: Plan, folded: Plan, orders: Sequence[Program]) -> tuple[Plan, list[Program]]:
    """The header of all blocks with its pipelines, and the orders of all its classes."""
    ranks, across = header.ranks, {}
    modules = dict(header.modules)
    for name, module in header.encoders.items():
        across[name] = ranks.llm.tp // module.layout.tp
        few = np.array(folded.modules[name].pipelines)
        number = np.arange(len(few) * across[name])
        pipelines = few[number // across[name]] * across[name] + number % across[name]
        modules[name] = replace(module, pipelines=tuple(pipelines.tolist()))
    return replace(header, modules=modules), [
        _unfolded(header, folded, orders, device, across) for device in range(ranks.num_classes)
    ]


def _unfolded(
    header: Plan, folded: Plan, orders: Sequence[Program], device: int, across: dict[str, int]
) -> Program:
    """What a class plays: the folded one's phases, of the pieces that are its own."""
    ranks = header.ranks
    stage, context, position = ranks.coordinates(device)
    rows = orders[folded.ranks.class_at(stage, context, 0)].rows.copy()
    for number, name in enumerate(header.names):
        if name in across:
            own = position * ranks.block // header.modules[name].layout.tp
            mine = rows[:, 0] == number
            rows[mine, 3] = rows[mine, 3] * across[name] + own
    return Program.of(rows)
