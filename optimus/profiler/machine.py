"""Describes this host as a cluster whose devices are cores: what it has, and what one core achieves."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch

from optimus.cost.measured_profile import LinkMeasurement, MeasurementConditions
from optimus.environment import usable_cores
from optimus.job.cluster import FLAT, GB, Cluster, Gpu, Link

MATMUL_ROWS = 512
COPY_BYTES = 64 * 2**20
MEASURE_S = 0.3  # per rate
RESERVE_BYTES = 0.5 * GB  # a Python process with torch loaded
DTYPE = "float32"


def describe_measurement(note: str = "", *, dtype: str = DTYPE) -> MeasurementConditions:
    """Returns the conditions of a measurement: this host, today, one thread."""
    return MeasurementConditions(
        host=platform.node() or "unknown",
        date=datetime.now(UTC).date().isoformat(),
        torch=str(torch.__version__),
        threads=1,
        dtype=dtype,
        note=note,
    )


def describe_host_as_cluster(
    links: Sequence[LinkMeasurement], *, ranks: int | None = None, measure_s: float = MEASURE_S
) -> Cluster:
    """Returns this host as one node of `ranks` cores (default: all), joined by the measured `links`."""
    cores = usable_cores()
    ranks = ranks or cores
    send = next(link for link in links if link.operation == "send")
    peak, copy = _measure_peak_flops(measure_s), _measure_copy_bytes_per_s(measure_s)
    shared = f"; {ranks} ranks share {cores} cores and would be slower at once" if ranks > cores else ""
    source = f"measured on {_processor()}, {datetime.now(UTC).date().isoformat()}, one thread"
    link = Link(
        bandwidth_bytes_per_s=send.bandwidth_bytes_per_s,
        latency_s=send.latency_s,
        source=f"sends between two processes over {send.backend}, {source}",
    )
    return Cluster(
        name=f"cpu-{platform.node() or 'host'}",
        gpu=Gpu(
            name="cpu-core",
            peak_flops=peak,
            memory_bytes=_memory_bytes() / max(ranks, cores),
            memory_bandwidth_bytes_per_s=copy,
            curves=FLAT,
            source=f"peak: float32 product of {MATMUL_ROWS} rows; bandwidth: a copy, read and "
            f"written bytes; {source}; memory: the host's over its cores{shared}",
        ),
        gpus=ranks,
        gpus_per_node=ranks,
        within_node=link,
        between_nodes=link,  # there is one node
        reserve_bytes=RESERVE_BYTES,
    )


def format_cluster_file(cluster: Cluster) -> str:
    """Formats a cluster file, for `cluster: {use: FILE.yaml, gpus: 2}` in a job or `--on FILE.yaml:2`."""

    def link(name: str, of: Link) -> list[str]:
        return [
            f"{name}:",
            f"  gb_per_s_per_gpu: {of.bandwidth_bytes_per_s / GB:.4g}",
            f"  latency_us: {of.latency_s * 1e6:.4g}",
            f"  source: {json.dumps(of.source)}",
        ]

    gpu = cluster.gpu
    lines = [
        "# A cluster for Optimus: this machine, its cores in place of GPUs. A job file overrides any line.",
        f"name: {json.dumps(cluster.name)}",
        f"gpus: {cluster.gpus}",
        f"gpus_per_node: {cluster.gpus_per_node}",
        "gpu:",
        f"  name: {json.dumps(gpu.name)}",
        f"  peak_tflops: {gpu.peak_flops / 1e12:.4g}",
        f"  memory_gb: {gpu.memory_bytes / GB:.4g}",
        f"  memory_tb_per_s: {gpu.memory_bandwidth_bytes_per_s / 1e12:.4g}",
        f"  curves: {gpu.curves}  # no GPU's curves: every product at the peak, collectives as rings",
        f"  source: {json.dumps(gpu.source)}",
        *link("within_node", cluster.within_node),
        *link("between_nodes", cluster.between_nodes),
        f"reserve_gb_per_gpu: {cluster.reserve_bytes / GB:.4g}",
    ]
    return "\n".join(lines) + "\n"


def _measure_peak_flops(measure_s: float = MEASURE_S) -> float:
    """Measures the FLOP/s of a float32 product on one core: the best repetition."""
    a, b = torch.rand(2, MATMUL_ROWS, MATMUL_ROWS)
    with limit_torch_to_one_thread():
        return 2 * MATMUL_ROWS**3 / _best_s(lambda: torch.mm(a, b), measure_s)


def _measure_copy_bytes_per_s(measure_s: float = MEASURE_S) -> float:
    """Measures the bytes read and written per second by a copy on one core: the best repetition."""
    source = torch.rand(COPY_BYTES // 4)
    target = torch.empty_like(source)
    with limit_torch_to_one_thread():
        return 2 * COPY_BYTES / _best_s(lambda: target.copy_(source), measure_s)


@contextmanager
def limit_torch_to_one_thread() -> Iterator[None]:
    """Runs the block with one torch thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _best_s(work: Callable[[], object], measure_s: float) -> float:
    work()
    best, end = float("inf"), time.perf_counter() + measure_s
    while (begin := time.perf_counter()) < end or best == float("inf"):
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def _memory_bytes() -> float:
    """Returns the memory of the host or of its container, whichever is less."""
    held = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        return min(held, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such limit, or `max`
        return held


def _processor() -> str:
    """Returns the host's name of its processor, printable characters only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = platform.processor()
    return "".join(letter for letter in name or platform.machine() if letter.isprintable())
