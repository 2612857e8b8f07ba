"""Reads the `cluster:` block and the short form `h100:512`."""

from __future__ import annotations

from pathlib import Path

from optimus.errors import UserError
from optimus.job import catalog
from optimus.job.cluster import GB, Cluster, Gpu, Link
from optimus.job.nodes import Node, Position, YamlMapping, argument, load_yaml, merged
from optimus.job.schema import ClusterBlock, LinkBlock
from optimus.job.typed import read

ENDINGS = (".yaml", ".yml")  # of a cluster's own file


def expand_cluster(node: Node, folder: Path = Path()) -> Node:
    """The block `cluster:` over the file that its `use` names, a path below `folder` or a catalog name."""
    if "use" not in node:
        return node
    name = str(node["use"].value)
    if name.endswith(ENDINGS):
        base = load_yaml(folder / name)
    else:
        base = catalog.find("clusters", name, where=node["use"]).without("aliases")
    return node.replaced(merged(base.value, node.without("use").value))


def read_cluster(node: Node) -> Cluster:
    """The cluster of an expanded block `cluster:`."""
    block = read(ClusterBlock, node)
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


def place_on(root: Node, on: str) -> Node:
    """The block `cluster:` of a job file that is placed on `h100:512` or `machine.yaml:2`."""
    name, _, count = on.rpartition(":")
    if not (count.isascii() and count.isdigit() and 0 < len(count) < 10 and int(count) > 0):
        raise UserError(
            field="--on",
            value=on,
            problem="is not CLUSTER:GPUS",
            hint="write for example --on h100:512",
        )
    if not name.endswith(ENDINGS):
        catalog.find("clusters", name, where=argument("--on", name))
    position: Position = ("--on", None)
    block = YamlMapping({"use": name, "gpus": int(count)}, {"use": position, "gpus": position})
    return expand_cluster(root["cluster"].replaced(block, position))
