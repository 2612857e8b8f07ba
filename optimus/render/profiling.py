"""A profile as text for people and as an object for tools."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from optimus.cost.measured import MEASURED_KINDS, LinkTime, Profile, SegmentTime
from optimus.ir.op import Kind
from optimus.job.cluster import Cluster
from optimus.render.text import columns, wrap

SCHEMA = "optimus.profile-result/1"


def profile_json(profile: Profile, *, file: Path, cluster_file: Path, digest: str) -> dict[str, Any]:
    """The object of `optimus profile --json`."""
    return {
        "schema": SCHEMA,
        "profile": str(file),
        "cluster": str(cluster_file),
        "sha256": digest,
        "measured": None if profile.measured is None else asdict(profile.measured),
        "segments": [{**asdict(row), "kind": row.kind.name} for row in profile.segments],
        "links": [asdict(link) for link in profile.links],
        "issue_s": profile.issue_s,
        "slowdown": profile.slowdown,
        "mapped_share": None,  # of a foreign trace; here everything was measured by name
    }


def profile_text(profile: Profile, cluster: Cluster) -> list[str]:
    """Where it was measured, a line per segment and size, links, and what a core achieves."""
    measured = profile.measured
    assert measured is not None
    lines = wrap(
        "measured",
        f"{measured.date} on {measured.host}, torch {measured.torch}, {measured.threads} thread, "
        f"{measured.dtype}{'; ' + measured.note if measured.note else ''}",
    )
    rows: dict[tuple[str, str, str, int, int], dict[Kind, SegmentTime]] = {}
    for row in profile.segments:
        key = row.module, row.layers, row.segment, row.tokens, row.tp
        rows.setdefault(key, {})[row.kind] = row
    table = [
        [*map(str, key), *(_milliseconds(kinds.get(kind)) for kind in MEASURED_KINDS)]
        for key, kinds in rows.items()
    ]
    header = ["module", "layers", "segment", "tokens", "tp", *(f"{kind.name} ms" for kind in MEASURED_KINDS)]
    lines += ["", *columns(header, table, left=3), ""]
    for link in profile.links:
        lines += wrap(link.operation.replace("_", "-"), _link_words(link))
    if profile.slowdown is not None:
        lines += wrap("slow-down", f"products take {profile.slowdown:.0%} longer under an all-reduce")
    gpu = cluster.gpu
    rate = (
        f"{gpu.peak_flops / 1e9:.0f} GFLOP/s in a product, {gpu.memory_bandwidth_bytes_per_s / 1e9:.1f} GB/s"
    )
    lines += wrap(gpu.name, f"{rate} in a copy, {gpu.memory_bytes / 1e9:.1f} GB")
    return lines


def _link_words(link: LinkTime) -> str:
    rate = f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s"
    return f"{link.latency_s * 1e6:.0f} us and {rate} between {link.ranks} ranks over {link.backend}"


def _milliseconds(row: SegmentTime | None) -> str:
    return "-" if row is None else f"{row.median_s * 1e3:.3f}"
