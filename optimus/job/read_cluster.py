"""Reads the `cluster:` block and the short form `h100:512`."""

from __future__ import annotations

from pathlib import Path

from optimus.errors import UserError
from optimus.job import catalog
from optimus.job.cluster import GB, Cluster, Gpu, Link
from optimus.job.schema import ClusterBlock, LinkBlock
from optimus.job.typed import Places
from optimus.job.yaml_nodes import Node, load_yaml, merged

ENDINGS = (".yaml", ".yml")  # of a cluster's own file


def read_cluster(places: Places, node: Node, folder: Path = Path()) -> Cluster:
    """The cluster of a job file in `folder`: what it states, over the file it uses if it uses one."""
    use = node.entries.get("use")
    if use is not None:
        places.note("cluster.use", use)
        name = use.value if isinstance(use.value, str) else str(use.value)
        if name.endswith(ENDINGS):
            base = load_yaml(folder / name)
        else:
            base = catalog.find("clusters", name, field="cluster.use", where=use).without("aliases")
        node = merged(base, node.without("use"))
    block = places.read(ClusterBlock, node, "cluster")
    return Cluster(
        name=block.name,
        gpu=Gpu(
            name=block.gpu.name or block.name,
            peak_flops=block.gpu.peak_tflops * 1e12,
            memory_bytes=block.gpu.memory_gb * GB,
            memory_bandwidth_bytes_per_s=block.gpu.memory_tb_per_s * 1e12,
            curves=block.gpu.curves,
            source=block.gpu.source,
        ),
        gpus=block.gpus,
        gpus_per_node=block.gpus_per_node,
        within_node=_link(block.within_node),
        between_nodes=_link(block.between_nodes),
        reserve_bytes=block.reserve_gb_per_gpu * GB,
    )


def _link(block: LinkBlock) -> Link:
    return Link(
        bandwidth_bytes_per_s=block.gb_per_s_per_gpu * GB,
        latency_s=block.latency_us * 1e-6,
        source=block.source,
    )


def cluster_node(on: str) -> Node:
    """`h100:512` (or `machine.yaml:2`) as the block a job file would hold."""
    name, _, count = on.rpartition(":")
    if not (count.isascii() and count.isdigit() and 0 < len(count) < 10 and int(count) > 0):
        raise UserError(
            field="--on",
            value=on,
            problem="is not CLUSTER:GPUS",
            hint="write for example --on h100:512",
        )
    if not name.endswith(ENDINGS):
        catalog.find("clusters", name, field="--on")
    entries: dict[str, str | int] = {"use": name, "gpus": int(count)}
    nodes = {key: Node(value=value, file="--on", line=None) for key, value in entries.items()}
    return Node(value=nodes, file="--on", line=None)
