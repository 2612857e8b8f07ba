"""Who owns what is right for every rank, up to a hundred thousand of them, and the same as Megatron's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from plan_by_hand import plan_by_hand

from optimus.ir.op import Communicator, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM, RankCoordinates, RankGrid
from optimus.job.layout import Layout

TP, CP, EP, DP, PP = Communicator.TP, Communicator.CP, Communicator.EP, Communicator.DP, Communicator.PP
LARGE = [
    RankGrid(layouts={"vit": Layout(dp=6248, pp=4, tp=4), LLM: Layout(dp=781, pp=16, tp=8, chunks=2)}),
    RankGrid(
        layouts={
            "vit": Layout(dp=12480, pp=4, tp=2),
            "audio": Layout(dp=49920, pp=2, tp=1),
            LLM: Layout(dp=780, pp=8, cp=2, tp=8),
        }
    ),
]
SMALL = [
    ({LLM: Layout(dp=2, pp=2, tp=2, cp=2)}),
    ({"vit": Layout(dp=2, pp=2, tp=2), LLM: Layout(dp=1, pp=4, tp=2)}),
    ({"vit": Layout(dp=12, pp=2, tp=1), "audio": Layout(dp=6, pp=1, tp=4), LLM: Layout(dp=3, pp=2, tp=4)}),
    ({"vit": Layout(dp=16, pp=2, tp=2), LLM: Layout(dp=2, pp=4, cp=2, tp=4)}),
    ({"vit": Layout(dp=8, pp=1, tp=2), LLM: Layout(dp=2, pp=2, tp=4, chunks=3)}),
    ({"vit": Layout(dp=4, pp=2, tp=2), LLM: Layout(dp=2, pp=2, cp=2, ep=4, tp=2)}),
]


# ---------------------------------------------------------------------------- examples of the paper


def test_two_encoder_pipelines_lie_in_one_llm_pipeline() -> None:
    ranks = RankGrid(layouts={"vit": Layout(dp=2, pp=2, tp=2), LLM: Layout(dp=1, pp=4, tp=2)})
    assert ranks.world == 8 and ranks.num_classes == 4
    assert [ranks.pipeline_of("vit", device) for device in range(4)] == [0, 0, 1, 1]
    assert [ranks.stage_of("vit", device) for device in range(4)] == [0, 1, 0, 1]
    assert [ranks.next_stage("vit", device) for device in range(4)] == [1, 0, 3, 2]
    assert ranks.place("vit", 5) == RankCoordinates(dp=1, pp=0, cp=0, tp=1)
    assert ranks.group_of("vit", TP, 5) == (4, 5)
    assert ranks.group_of("vit", PP, 5) == (5, 7)
    assert ranks.group_of("vit", DP, 5) == (1, 5)
    assert ranks.group_of(LLM, PP, 5) == (1, 3, 5, 7)


def test_two_encoder_pipelines_lie_in_one_tp_group() -> None:
    """Encoder TP 1 in LLM TP 2: the two ranks of a stage belong to different pipelines and classes."""
    ranks = RankGrid(layouts={"vit": Layout(dp=4, pp=2, tp=1), LLM: Layout(dp=1, pp=4, tp=2)})
    assert ranks.num_classes == 8
    assert [ranks.pipeline_of("vit", device) for device in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert ranks.group_classes(LLM, TP, 0) == (0, 1)
    assert ranks.group_classes("vit", DP, 0) == (0, 1, 4, 5)


# ---------------------------------------------------------------------------- every rank of a large job


def grid(ranks: RankGrid) -> NDArray[np.int64]:
    """Ranks by LLM stage, replica, context and TP: written down once more, by other means."""
    llm = ranks.llm
    return np.arange(ranks.world).reshape(llm.pp, llm.dp, llm.cp, llm.tp)


def groups_on_grid(ranks: RankGrid, module: str, communicator: Communicator) -> NDArray[np.int64]:
    """All groups of a module, one per row, by cutting the grid."""
    llm, layout = ranks.llm, ranks.layouts[module]
    # LLM stage = a * pp + p, TP rank = b * tp + t
    shape = (llm.pp // layout.pp, layout.pp, llm.dp, llm.cp, llm.tp // layout.tp, layout.tp)
    a, p, d, c, b, t = range(6)
    inner = {TP: (t,), PP: (p,), CP: (c,) if module == LLM else (), DP: (a, d, c, b)}[communicator]
    outer = tuple(axis for axis in range(6) if axis not in inner)
    cut = np.arange(ranks.world).reshape(shape).transpose(outer + inner)
    size = int(np.prod([shape[axis] for axis in inner]))
    return cut.reshape(-1, size)


@pytest.mark.ci("plan file")
@pytest.mark.parametrize("ranks", LARGE, ids=["pp16", "cp2"])
def test_coordinates_of_a_large_job_cover_every_layout(ranks: RankGrid) -> None:
    world = grid(ranks)
    for stage, replica, context, t in np.ndindex(world.shape):
        rank = ranks.rank_of(stage, replica, context, t)
        assert rank == world[stage, replica, context, t]
        assert ranks.place(LLM, rank) == RankCoordinates(dp=replica, pp=stage, cp=context, tp=t)
        assert ranks.class_of(rank) == ranks.class_at(stage, context, t // ranks.block)
    for module, layout in ranks.layouts.items():
        places = [ranks.place(module, rank) for rank in range(ranks.world)]
        found = np.array([(place.dp, place.pp, place.cp, place.tp) for place in places])
        cells = np.ravel_multi_index(tuple(found.T), (layout.dp, layout.pp, layout.cp, layout.tp))
        assert np.array_equal(np.sort(cells), np.arange(ranks.world))  # unique, and all of them


@pytest.mark.ci("plan file")
@pytest.mark.parametrize("ranks", LARGE, ids=["pp16", "cp2"])
@pytest.mark.parametrize("communicator", [TP, CP, DP, PP], ids=lambda communicator: communicator.name)
def test_groups_of_a_large_job_partition_the_world(ranks: RankGrid, communicator: Communicator) -> None:
    for module, layout in ranks.layouts.items():
        groups = groups_on_grid(ranks, module, communicator)
        sizes = {TP: layout.tp, CP: layout.cp, PP: layout.pp, DP: layout.dp * layout.cp}
        assert groups.shape == (ranks.world // sizes[communicator], sizes[communicator])
        assert np.array_equal(np.sort(groups, axis=None), np.arange(ranks.world))
        small = groups.shape[1] <= 16
        for group in np.sort(groups, axis=1).tolist():
            for rank in group if small else (group[0], group[len(group) // 2], group[-1]):
                assert ranks.group_of(module, communicator, rank) == tuple(group)


@pytest.mark.ci("plan file")
@pytest.mark.parametrize("ranks", LARGE, ids=["pp16", "cp2"])
def test_peers_of_a_large_job(ranks: RankGrid) -> None:
    """The same arithmetic that takes one rank takes them all."""
    every: Any = np.arange(ranks.world)
    classes: Any = ranks.class_of(every)
    counted = np.bincount(classes, minlength=ranks.num_classes)
    assert counted.tolist() == [ranks.llm.dp * ranks.block] * ranks.num_classes  # each has as many ranks
    assert np.array_equal(ranks.member(classes, every), every)
    here = ranks.place(LLM, every)
    entries: Any = ranks.rank_of(0, here.dp, here.cp, here.tp)
    assert np.array_equal(ranks.member(ranks.entry_of(classes), every), entries)
    for module, layout in ranks.layouts.items():
        place = ranks.place(module, every)
        after = ranks.member(ranks.next_stage(module, classes), every)
        then = ranks.place(module, after)
        assert np.array_equal(then.pp, (place.pp + 1) % layout.pp)
        for axis in ("dp", "cp", "tp"):
            assert np.array_equal(getattr(then, axis), getattr(place, axis))
        assert np.array_equal(ranks.member(ranks.next_stage(module, ranks.class_of(after), -1), after), every)
        assert np.array_equal(ranks.stage_of(module, classes), place.pp)
        if module != LLM:
            pipelines = place.dp % ranks.num_pipelines(module)
            assert np.array_equal(ranks.pipeline_of(module, classes), pipelines)
    for rank in range(0, ranks.world, 97):
        device = ranks.class_of(rank)
        assert device == classes[rank] and ranks.member(ranks.entry_of(device), rank) == entries[rank]


# ---------------------------------------------------------------------------- classes, Megatron, transfers


@pytest.mark.parametrize("layouts", SMALL)
def test_classes_that_meet_are_the_classes_of_the_group(layouts: dict[str, Layout]) -> None:
    ranks = RankGrid(layouts=layouts)
    for module, layout in layouts.items():
        for communicator in (TP, CP, EP, DP, PP):
            for rank in range(ranks.world):
                group = ranks.group_of(module, communicator, rank)
                assert rank in group and list(group) == sorted(set(group))
                assert all(ranks.group_of(module, communicator, other) == group for other in group)
                met = ranks.group_classes(module, communicator, ranks.class_of(rank))
                of_group = {ranks.class_of(other) for other in group}
                if layout.ep > 1 and communicator in (EP, DP):  # experts' groups meet the whole stage's
                    assert of_group <= set(met)
                else:
                    assert of_group == set(met) and len(met) == len(of_group)


@pytest.fixture(scope="module")
def rank_generator() -> Any:
    return pytest.importorskip("megatron.core.parallel_state", exc_type=ImportError).RankGenerator


@pytest.mark.parametrize(
    "llm",
    [
        Layout(dp=2, pp=4, tp=2),
        Layout(dp=3, pp=2, cp=2, tp=4),
        Layout(dp=8, pp=1, tp=1),
        Layout(dp=4, pp=3, cp=4, tp=2),
        Layout(dp=4, pp=2, cp=2, tp=2, ep=8),
        Layout(dp=8, pp=2, tp=2, ep=4),
        Layout(dp=48, pp=8, tp=8),
    ],
    ids=str,
)
@pytest.mark.ci("plan file")
def test_groups_of_the_llm_are_megatrons(rank_generator: Any, llm: Layout) -> None:
    """As parallel_state makes them: experts, without tensor parallelism, from a generator of their own."""
    ranks, order = RankGrid(layouts={LLM: llm}), "tp-cp-ep-dp-pp"
    dense = rank_generator(tp=llm.tp, ep=1, dp=llm.dp, pp=llm.pp, cp=llm.cp, order=order)
    expert_dp = llm.expert_replica_ranks
    expert = rank_generator(tp=1, ep=llm.ep, dp=expert_dp, pp=llm.pp, cp=1, order=order)
    theirs = {
        TP: dense.get_ranks("tp"),
        CP: dense.get_ranks("cp"),
        PP: dense.get_ranks("pp"),
        DP: dense.get_ranks("dp-cp"),
        EP: expert.get_ranks("ep"),
    }
    for communicator, groups in theirs.items():
        ours = {ranks.group_of(LLM, communicator, rank) for rank in range(ranks.world)}
        assert ours == {tuple(sorted(group)) for group in groups}


def peer(plan: Plan, name: str, kind: OpKind, device: int, microbatch: int) -> int:
    """The class at the other end of a transfer."""
    ranks = plan.ranks
    if kind in (OpKind.SEND_F, OpKind.RECV_B):
        return ranks.next_stage(name, device)
    if kind in (OpKind.SEND_B, OpKind.RECV_F):
        return ranks.next_stage(name, device, step=-1)
    if kind in (OpKind.SEND_SEAM, OpKind.RECV_SEAM_B):
        return ranks.entry_of(device)
    module = plan.modules[name]
    (sender,) = (
        other
        for other in range(ranks.num_classes)
        if ranks.entry_of(other) == device
        and ranks.stage_of(name, other) == module.layout.pp - 1
        and ranks.pipeline_of(name, other) == module.pipelines[microbatch]
    )
    return sender


RECEIVE = {
    OpKind.SEND_F: OpKind.RECV_F,
    OpKind.SEND_B: OpKind.RECV_B,
    OpKind.SEND_SEAM: OpKind.RECV_SEAM,
    OpKind.SEND_SEAM_B: OpKind.RECV_SEAM_B,
}


@pytest.mark.parametrize("layouts", SMALL)
@pytest.mark.parametrize("pieces", [1, 3])
def test_every_send_of_every_rank_has_its_receive(layouts: dict[str, Layout], pieces: int) -> None:
    encoders = [layout for name, layout in layouts.items() if name != LLM]
    plan = plan_by_hand(layouts[LLM], *encoders, microbatches=6, pieces=pieces)
    ranks, sends, receives = plan.ranks, Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
    for rank in range(ranks.world):
        device = ranks.class_of(rank)
        for number, kind, chunk, microbatch, _ in plan.programs[device].rows.tolist():
            name, stage = plan.names[number], None
            if kind not in RECEIVE and kind not in RECEIVE.values():
                continue
            other = ranks.member(peer(plan, name, OpKind(kind), device, microbatch), rank)
            if kind in (OpKind.SEND_F, OpKind.RECV_F, OpKind.SEND_B, OpKind.RECV_B):
                pp = plan.modules[name].layout.pp
                stage = chunk * pp + ranks.stage_of(name, device)  # of F's end: the one that made the data
                stage -= kind == OpKind.RECV_F
                stage -= kind == OpKind.SEND_B
            if kind in RECEIVE:
                sends[rank, other, name, RECEIVE[OpKind(kind)], stage, microbatch] += 1
            else:
                receives[other, rank, name, OpKind(kind), stage, microbatch] += 1
    assert sends == receives
    assert set(sends.values()) <= {1}
    assert sum(sends.values()) > 0 or ranks.llm.pp == 1
