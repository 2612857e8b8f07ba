"""This machine as a cluster: links measured between processes, rates of a core, and no GPU's curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimus.cost import compute, network
from optimus.cost.measured_profile import LinkMeasurement, MessageTime
from optimus.cost.network import Collective
from optimus.errors import UserError
from optimus.job.cluster import FLAT, Cluster
from optimus.job.read import find_job, load_cluster, load_job
from optimus.profiler import links, machine

TINY = "cpu/tiny-vl"


def times(*pairs: tuple[int, float]) -> list[MessageTime]:
    return [
        MessageTime(size_bytes=size, median_s=seconds, p25_s=seconds, p75_s=seconds, repetitions=3)
        for size, seconds in pairs
    ]


def tiny_cluster() -> Cluster:
    return find_job(TINY).cluster


# ---------------------------------------------------------------- links


def test_a_link_is_the_latency_of_small_and_the_bandwidth_of_large_messages() -> None:
    found = links.fit_latency_and_bandwidth("send", times((0, 5e-5), (1_000_000, 1.05e-3), (1000, 6e-5)))
    assert found.latency_s == 5e-5 and found.bandwidth_bytes_per_s == pytest.approx(1e9)
    noisy = links.fit_latency_and_bandwidth("send", times((64, 2e-4), (1_000_000, 1e-4)))
    assert 0 < noisy.bandwidth_bytes_per_s < 1e12  # unknown, but a number


def test_repetitions_are_summed_up_by_quartiles() -> None:
    found = links.summarize_repetitions(64, [5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.p25_s, found.median_s, found.p75_s, found.repetitions) == (2.0, 3.0, 4.0, 5)


@pytest.mark.ci("engine")
def test_two_processes_measure_their_links() -> None:
    send, reduce = links.measure_links(sizes=(64, 1 << 20), repetitions=5, timeout_s=60)
    for link in (send, reduce):
        assert link.backend == "gloo" and link.ranks == 2
        assert [size.size_bytes for size in link.sizes] == [64, 1 << 20]
        assert 0 < link.latency_s < 1 and 1e6 < link.bandwidth_bytes_per_s < 1e12
        assert all(size.p25_s <= size.median_s <= size.p75_s for size in link.sizes)


class World:
    """A clock that products move on, by more while a collective is under way, which takes 10 s."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown, self.now_s, self.ends_s = slowdown, 0.0, 0.0

    def clock(self) -> float:
        return self.now_s

    def launch(self) -> World:
        self.ends_s = self.now_s + 10.0
        return self

    def is_completed(self) -> bool:
        return self.now_s >= self.ends_s

    def wait(self) -> None:
        assert self.is_completed()

    def compute(self) -> None:
        self.now_s += 0.01 * (1.0 if self.is_completed() else 1.0 + self.slowdown)


@pytest.mark.parametrize("slowdown", [0.0, 0.1, 0.42, 3.0])
def test_what_compute_pays_for_a_collective_is_found(slowdown: float) -> None:
    world = World(slowdown)
    found = links._measure_slowdown_under(world.compute, world.launch, 5, clock=world.clock)
    assert found == pytest.approx(slowdown, abs=1e-9)


@pytest.mark.alone  # on cores that others use, products alone take as long
@pytest.mark.ci("engine")
def test_two_processes_measure_what_compute_pays_for_a_collective() -> None:
    """Gloo copies and adds on the core that computes: it cannot be for nothing."""
    assert 0.02 < links.measure_slowdown_under_all_reduce(repetitions=5) < 20


@pytest.mark.ci("engine")
def test_processes_that_take_too_long_are_ended() -> None:
    with pytest.raises(links.LinkMeasurementError, match="in time") as caught:
        links.measure_links(timeout_s=0.01)
    assert "hint: " in str(caught.value)


# ---------------------------------------------------------------- the machine


def machine_here(ranks: int = 2) -> Cluster:
    send = LinkMeasurement(
        operation="send", backend="gloo", ranks=2, latency_s=5e-5, bandwidth_bytes_per_s=2e9
    )
    return machine.describe_host_as_cluster([send], ranks=ranks, measure_s=0.02)


def test_this_machine_is_a_cluster_that_jobs_can_run_on(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    cluster = machine_here()
    assert torch.get_num_threads() == threads
    assert cluster.gpu.curves == FLAT and cluster.gpu.name == "cpu-core"
    assert 1e8 < cluster.gpu.peak_flops < 1e13 and 1e8 < cluster.gpu.memory_bandwidth_bytes_per_s < 1e12
    file = tmp_path / "machine.yaml"
    file.write_text(machine.format_cluster_file(cluster))
    found = load_cluster(f"{file}:2")
    assert (found.name, found.gpus, found.gpu.source) == (cluster.name, 2, cluster.gpu.source)
    assert found.gpu.peak_flops == pytest.approx(cluster.gpu.peak_flops, rel=1e-3)
    assert found.within_node.latency_s == pytest.approx(5e-5)
    assert find_job(TINY, on=f"{file}:2").cluster == found
    (tmp_path / "job.yaml").write_text(
        "format: optimus.job/1\nmodel: {use: siglip-so400m-8b}\ncluster: {use: machine.yaml, gpus: 2}\n"
    )
    assert load_job(tmp_path / "job.yaml").cluster == found  # paths start at the job file


def test_a_cluster_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        find_job(TINY, on=f"{tmp_path / 'none.yaml'}:2")
    with pytest.raises(UserError, match="is not CLUSTER:GPUS"):
        find_job(TINY, on="none.yaml")


def test_more_ranks_than_cores_are_said_to_share_them() -> None:
    assert "64 ranks share" in machine_here(ranks=64).gpu.source
    assert "share" not in machine_here(ranks=1).gpu.source


# ---------------------------------------------------------------- flat curves


@pytest.mark.parametrize("size", [(1, 1, 1), (64, 300, 17), (4096, 4096, 4096)])
def test_without_curves_products_reach_the_peak(size: tuple[int, int, int]) -> None:
    gpu = replace(tiny_cluster().gpu, memory_bandwidth_bytes_per_s=1e18)
    m, n, k = size
    assert compute.gemm_s(gpu, m, n, k) == pytest.approx(2 * m * n * k / gpu.peak_flops)
    attention_s = compute.attention_s(gpu, flops=1e9, tokens=512, head_dim=24, causal=True)
    assert attention_s == pytest.approx(1e9 / gpu.peak_flops)


def test_without_curves_collectives_are_rings_over_the_links() -> None:
    cluster = replace(tiny_cluster(), gpus=8, gpus_per_node=4)
    far = replace(cluster.between_nodes, bandwidth_bytes_per_s=1e8, latency_s=1e-3)
    cluster = replace(cluster, between_nodes=far)
    near = cluster.within_node
    one, two = (
        network.collective_s(cluster, kind, 4e6, ranks=4, stride=1)
        for kind in (Collective.ALL_GATHER, Collective.ALL_REDUCE)
    )
    assert one == pytest.approx(3 * (near.latency_s + 1e6 / near.bandwidth_bytes_per_s))
    assert two == pytest.approx(2 * one)
    across = network.collective_s(cluster, Collective.REDUCE_SCATTER, 4e6, ranks=2, stride=4)
    assert across == pytest.approx(1e-3 + 2e6 / 1e8)
    faster = network.collective_s(
        cluster, Collective.REDUCE_SCATTER, 4e6, ranks=2, stride=4, nic_bytes_per_s=1e9
    )
    assert faster == pytest.approx(1e-3 + 2e6 / 1e9)
