"""Collective times reproduce NCCL measured inside a node and follow NCCL's model between nodes."""

from __future__ import annotations

from importlib import resources
from itertools import combinations, pairwise
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from optimus.cost.network import Collective, collective_s, count_distinct, exchange_s, send_s
from optimus.job.cluster import Cluster, Gpu, Link

FOLDER = resources.files("optimus.catalog") / "clusters"
RECORDS: dict[str, dict[str, Any]] = {
    record["gpu"]["curves"]: record
    for record in (
        yaml.safe_load(entry.read_text()) for entry in FOLDER.iterdir() if entry.name.endswith(".yaml")
    )
}
MIB = 2**20


def make_cluster(record: dict[str, Any]) -> Cluster:
    def make_link(fields: dict[str, Any]) -> Link:
        return Link(
            bandwidth_bytes_per_s=1e9 * fields["gb_per_s_per_gpu"], latency_s=1e-6 * fields["latency_us"]
        )

    gpu = record["gpu"]
    return Cluster(
        name=record["name"],
        gpu=Gpu(
            name=record["name"],
            peak_flops=1e12 * gpu["peak_tflops"],
            memory_bytes=1e9 * gpu["memory_gb"],
            memory_bandwidth_bytes_per_s=1e12 * gpu["memory_tb_per_s"],
            curves=gpu["curves"],
        ),
        gpus=4096,
        gpus_per_node=record["gpus_per_node"],
        within_node=make_link(record["within_node"]),
        between_nodes=make_link(record["between_nodes"]),
        reserve_bytes=1e9 * record["reserve_gb_per_gpu"],
    )


CLUSTERS = {curves: make_cluster(record) for curves, record in RECORDS.items()}
H100 = CLUSTERS["h100_sxm"]

collectives = st.sampled_from(list(Collective))
groups = st.tuples(st.integers(1, 600), st.sampled_from([1, 2, 4, 8, 16, 64]))


def bus_gb_per_s(cluster: Cluster, collective: Collective, size: float, *, ranks: int, stride: int) -> float:
    passes = 2 if collective is Collective.ALL_REDUCE else 1
    seconds = collective_s(cluster, collective, size, ranks=ranks, stride=stride)
    return 1e-9 * passes * (ranks - 1) / ranks * size / seconds


# GB/s at 2, 32 and 512 MiB (reference/hardware.md, section 4).
BUS = """
a100_sxm 2 all_reduce 44 150 193
a100_sxm 2 all_gather 28 109 150
a100_sxm 8 all_reduce 68 160 222
a100_sxm 8 reduce_scatter 54 140 213
h100_sxm 2 all_gather 63 181 258
h100_sxm 4 all_reduce 114 287 350
h100_sxm 4 all_gather 82 230 318
h100_sxm 4 reduce_scatter 90 237 310
h100_sxm 8 all_reduce 96 294 445
h100_sxm 8 all_gather 83 234 335
h100_sxm 8 reduce_scatter 103 264 336
h200_sxm 2 reduce_scatter 69 182 248
h200_sxm 8 all_reduce 98 298 460
h200_sxm 8 all_gather 76 238 337
b200_sxm 2 all_reduce 111 403 534
b200_sxm 4 all_gather 85 354 567
b200_sxm 8 all_gather 75 258 617
b200_sxm 8 reduce_scatter 87 274 613
"""


@pytest.mark.parametrize("row", BUS.split("\n")[1:-1])
def test_bus_bandwidth_inside_a_node(row: str) -> None:
    curves, ranks, name, *expected = row.split()
    for size, gb_per_s in zip((2 * MIB, 32 * MIB, 512 * MIB), expected, strict=True):
        found = bus_gb_per_s(CLUSTERS[curves], Collective(name), size, ranks=int(ranks), stride=1)
        assert found == pytest.approx(float(gb_per_s), rel=0.02)


def test_tensor_parallel_gather_of_the_paper() -> None:
    """2 x 2048 tokens x 12288 features in bf16 over 8 GPUs: the paper's table 1 says about 300 us."""
    seconds = collective_s(H100, Collective.ALL_GATHER, 2 * 2 * 2048 * 12288, ranks=8, stride=1)
    assert 280e-6 < seconds < 340e-6


def test_other_rank_counts_lie_between_the_measured_ones() -> None:
    times = [collective_s(H100, Collective.ALL_REDUCE, 1024, ranks=n, stride=1) for n in range(2, 9)]
    assert times == sorted(times)


def test_one_rank_and_no_bytes_cost_nothing() -> None:
    for collective in Collective:
        assert collective_s(H100, collective, 1e9, ranks=1, stride=8) == 0
        assert collective_s(H100, collective, 0, ranks=64, stride=8) == 0
    assert send_s(H100, 0, across_nodes=True) == 0


@pytest.mark.parametrize("collective", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER])
def test_data_parallel_traffic_fills_one_nic(collective: Collective) -> None:
    """tp 8 inside the node, so that neighbours in dp are 8 apart."""
    assert bus_gb_per_s(H100, collective, 8e9, ranks=16, stride=8) == pytest.approx(46, rel=0.01)
    assert bus_gb_per_s(H100, collective, 8e9, ranks=128, stride=8) == pytest.approx(46, rel=0.02)


def test_a_group_uses_the_nics_of_its_ranks() -> None:
    for stride, gb_per_s in ((8, 46), (4, 92), (2, 184)):
        found = bus_gb_per_s(H100, Collective.ALL_GATHER, 32e9, ranks=64, stride=stride)
        assert found == pytest.approx(gb_per_s, rel=0.02)
    # with all eight, NVLink's ring is the narrower one
    assert bus_gb_per_s(H100, Collective.ALL_GATHER, 32e9, ranks=64, stride=1) == pytest.approx(335, rel=0.02)


def test_nic_override() -> None:
    slow, fast = (
        collective_s(H100, Collective.ALL_GATHER, 8e9, ranks=16, stride=8, nic_bytes_per_s=gb * 1e9)
        for gb in (12.5, 25)
    )
    assert slow / fast == pytest.approx(2, rel=0.01)


def test_small_messages_between_nodes_follow_the_tuning_model() -> None:
    """NCCL's tuning.cc by hand, 64 nodes; its bandwidth term is nothing at one byte."""
    pat_us = 8.0 + 6 * 14.0 / 3.5 + 64 * 2.8
    found = collective_s(H100, Collective.ALL_GATHER, 1, ranks=64, stride=8)
    assert found == pytest.approx(1e-6 * pat_us, rel=1e-3)
    tree_us = 6.8 + 2 * (7 * 0.6 + 6 * 5.0)
    found = collective_s(H100, Collective.ALL_REDUCE, 1, ranks=512, stride=1)
    assert found == pytest.approx(1e-6 * tree_us, rel=1e-3)
    ring_us = 6.6 + (512 - 64) * 1.0 + 63 * 2.7
    found = collective_s(H100, Collective.ALL_GATHER, 1, ranks=512, stride=1)
    assert found == pytest.approx(1e-6 * ring_us, rel=1e-3)


def test_all_to_all_sends_only_the_outer_share_over_the_nic() -> None:
    inside = collective_s(H100, Collective.ALL_TO_ALL, 1e9, ranks=8, stride=1)
    outside = collective_s(H100, Collective.ALL_TO_ALL, 1e9, ranks=16, stride=1)
    assert inside == pytest.approx(7 / 8 * 1e9 / 315e9, rel=0.05)
    assert outside == pytest.approx(8 / 16 * 1e9 / 46e9, rel=0.01)


@pytest.mark.parametrize(("chosen", "experts", "places"), [(1, 8, 4), (3, 8, 4), (4, 12, 2), (4, 8, 8)])
def test_distinct_places_equal_an_enumeration(chosen: int, experts: int, places: int) -> None:
    picks = list(combinations(range(experts), chosen))
    mean = sum(len({expert % places for expert in pick}) for pick in picks) / len(picks)
    assert count_distinct(chosen, experts, places=places) == pytest.approx(mean)


def test_a_token_is_sent_to_every_expert_or_once_to_every_rank_and_node() -> None:
    """8 of 128 experts on 16 ranks of two nodes: 4 copies cross the NIC, or at most a node's one."""
    size = 2.0**30

    def seconds(*, chosen: int = 8, ranks: int = 16, once: bool) -> float:
        return exchange_s(H100, size, chosen=chosen, experts=128, ranks=ranks, deduplicated=once)

    nic = H100.between_nodes.bandwidth_bytes_per_s
    assert seconds(once=False) == collective_s(H100, Collective.ALL_TO_ALL, 8 * size, ranks=16, stride=1)
    assert seconds(once=False) == pytest.approx(4 * size / nic, rel=0.01)
    assert seconds(once=True) == pytest.approx(count_distinct(8, 128, places=2) / 2 * size / nic, rel=0.01)
    inside = size * count_distinct(8, 128, places=8)
    assert seconds(ranks=8, once=True) == collective_s(H100, Collective.ALL_TO_ALL, inside, ranks=8, stride=1)
    assert seconds(chosen=1, once=True) == pytest.approx(seconds(chosen=1, once=False), rel=0.01)


@given(collective=collectives, size=st.floats(1, 1e11), factor=st.floats(1, 100), group=groups)
def test_more_bytes_never_take_less_time(
    collective: Collective, size: float, factor: float, group: tuple[int, int]
) -> None:
    ranks, stride = group
    for cluster in CLUSTERS.values():
        small, large = (
            collective_s(cluster, collective, s, ranks=ranks, stride=stride) for s in (size, size * factor)
        )
        assert small <= large * 1.0001


@given(collective=collectives, size=st.floats(1, 1e10))
def test_more_nodes_never_take_less_time(collective: Collective, size: float) -> None:
    times = [collective_s(H100, collective, size, ranks=n, stride=8) for n in (1, 2, 4, 8, 32, 128)]
    assert all(fewer <= more * 1.0001 for fewer, more in pairwise(times))


def test_sends() -> None:
    size = 2 * 2048 * 12288
    assert send_s(H100, size, across_nodes=False) == pytest.approx(5.1e-6 + size / 396e9)
    assert send_s(H100, size, across_nodes=True) == pytest.approx(10e-6 + size / 46e9)


def test_every_cluster_names_its_sources() -> None:
    assert len(RECORDS) == 4
    for record in RECORDS.values():
        for block in (record, record["gpu"], record["within_node"], record["between_nodes"]):
            numbers = [key for key, value in block.items() if isinstance(value, int | float)]
            assert all(number in block["source"] for number in numbers)
