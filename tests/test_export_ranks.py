"""Exported rank groups: made from the rule in ranks.json they are the engine's, and Megatron's."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from plan_by_hand import plan_by_hand

from optimus.exporters.exported_plan import format_json
from optimus.exporters.rank_groups import describe_rank_groups
from optimus.ir.op import Communicator
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.layout import Layout


def random_layouts(rng: Random) -> tuple[Layout, list[Layout]]:
    """An LLM's layout of at most 128 ranks, and encoders in layouts of their own beside it."""
    while True:
        llm = Layout(
            dp=rng.choice((1, 2, 3)),
            pp=rng.choice((1, 2, 3, 4)),
            cp=rng.choice((1, 1, 2)),
            tp=rng.choice((1, 2, 4)),
        )
        encoders = []
        for _ in range(rng.choice((1, 2))):
            pp = rng.choice([n for n in range(1, llm.pp + 1) if llm.pp % n == 0])
            tp = rng.choice([n for n in (1, 2, 4) if llm.tp % n == 0])
            encoders.append(Layout(dp=llm.gpus // (pp * tp), pp=pp, tp=tp))
        if 1 < llm.gpus <= 128 and any((e.pp, e.tp) != (llm.pp, llm.tp) for e in encoders):
            return llm, encoders


def by_rule(module: dict[str, Any], axis: str, world: int) -> list[list[int]]:
    """The groups that a reader of ranks.json makes from the rule."""
    every = np.arange(world)
    if axis not in module["groups"]:
        return every.reshape(-1, 1).tolist()
    found = module["groups"][axis]
    if axis == "ep":
        return every.reshape(-1, found["size"]).tolist()
    axes = module["grid"]["axes"]
    inner = [axes.index(name) for name in found["along"]]
    outer = [place for place in range(len(axes)) if place not in inner]
    cut = every.reshape(module["grid"]["shape"]).transpose(outer + inner)
    return cut.reshape(found["count"], found["size"]).tolist()


def megatrons_groups(generator: Any, llm: Layout, own: Layout, axis: str) -> list[list[int]]:
    """As Megatron numbers them in the order tp-cp-ep-dp-pp.

    Stages of an encoder that has fewer than the LLM repeat: `cp` of its generator, which an encoder does
    not use, counts the repetitions, outermost.
    """
    if axis == "ep":
        dp = own.expert_replica_ranks
        made = generator(tp=1, ep=own.ep, dp=dp, pp=own.pp, cp=1, order="tp-cp-ep-dp-pp")
        return [sorted(group) for group in made.get_ranks("ep")]
    again = llm.pp // own.pp
    if own is llm or again == 1:
        order, dp, cp = "tp-cp-ep-dp-pp", own.dp, own.cp
    else:
        order, dp, cp = "tp-ep-dp-pp-cp", own.dp // again, again
    made = generator(tp=own.tp, ep=1, dp=dp, pp=own.pp, cp=cp, order=order)
    if axis == "cp" and own is not llm:
        return [[rank] for rank in range(llm.gpus)]
    return [sorted(group) for group in made.get_ranks("dp-cp" if axis == "dp" else axis)]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_are_megatrons(seed: int) -> None:
    """Every group of every rank of every module, made by a reader from the rule in ranks.json."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state", exc_type=ImportError)
    llm, encoders = random_layouts(Random(seed))
    if llm.cp == 1 and seed % 3 == 0:  # some with experts
        llm = llm.with_(ep=llm.dp * llm.tp)
    plan = plan_by_hand(llm, *encoders)
    document = json.loads(export_ranks(plan))
    assert document["world"] == llm.gpus
    for name, module in document["modules"].items():
        own = plan.modules[name].layout
        assert (module["megatron_order"] is None) == (llm.pp != own.pp)
        for axis in ("tp", "cp", "dp", "pp", "ep"):
            ours = by_rule(module, axis, llm.gpus)
            theirs = megatrons_groups(parallel_state.RankGenerator, llm, own, axis)
            assert sorted(ours) == sorted(theirs), (name, axis)
            for group in ours:
                for rank in group:
                    assert plan.ranks.group_of(name, Communicator[axis.upper()], rank) == tuple(group)
            if axis in module["groups"]:
                assert module["groups"][axis]["first"] == ours[: len(module["groups"][axis]["first"])]


def export_ranks(plan: Plan) -> str:
    return format_json(describe_rank_groups(plan))


def test_ranks_of_a_hundred_thousand_gpus_are_a_short_file() -> None:
    llm = Layout(dp=781, pp=16, tp=8, chunks=2)
    plan = plan_by_hand(llm, Layout(dp=6248, pp=4, tp=4), microbatches=1)
    text = export_ranks(plan)
    assert len(text) < 300_000
    assert json.loads(text)["modules"][LLM]["groups"]["pp"]["count"] == 781 * 8
