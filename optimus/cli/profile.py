"""`optimus profile`: measures a job's segments and the links of this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from optimus.cli.console import check_writable, exceptions_from_signals, print_result, progress_bar
from optimus.cli.flags import OK, JobArgument, JsonFlag, OnFlag, describe_option, import_trainer
from optimus.cli.text import align_columns, format_next_commands, wrap_closing_line, wrap_text

if TYPE_CHECKING:
    from optimus.cost.measured_profile import LinkMeasurement, Profile, SegmentMeasurement
    from optimus.ir.op import OpKind
    from optimus.job.cluster import Cluster

SCHEMA = "optimus.profile-result/1"


@dataclass(frozen=True)
class ProfileCommand:
    """Measure a job's segments and this machine's links, for --profile."""

    job: JobArgument
    on: OnFlag = None
    output: Annotated[
        Path | None,
        describe_option(
            aliases=["-o"],
            metavar="PROFILE.yaml",
            help="the file to write; default: the job's name and .profile.yaml",
        ),
    ] = None
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.cost.profile_file import save_profile
        from optimus.ir.files import write_file_atomically
        from optimus.job.read import find_job

        job = find_job(self.job, self.on)
        output = self.output or Path(f"{job.name.replace('/', '-')}.profile.yaml")
        check_writable("--output", output, ".yaml")
        cluster_file = output.with_suffix(".cluster.yaml")
        check_writable("--output", cluster_file)
        segments, links, machine = (
            import_trainer(f"optimus.profiler.{name}") for name in ("segments", "links", "machine")
        )
        with exceptions_from_signals(), progress_bar("measuring") as progress:
            measured = segments.profile_job(job, progress=progress)
            progress("links", 0, 1)
            profile = replace(
                measured,
                name=output.name.removesuffix(".yaml"),
                links=links.measure_links(),
                slowdown=links.measure_slowdown_under_all_reduce(),
            )
            cluster = machine.describe_host_as_cluster(profile.links, ranks=job.cluster.gpus)
        digest = save_profile(profile, output)
        write_file_atomically(cluster_file, machine.format_cluster_file(cluster))
        lines = _profile_text(profile, cluster)
        lines += ["", *wrap_closing_line("wrote", f"{output} (sha256 {digest[:12]}) and {cluster_file}")]
        on = f"--on {cluster_file}:{cluster.gpus}"
        lines += format_next_commands(f"optimus plan {self.job} {on} --profile {output}")
        result = _profile_json(profile, file=output, cluster_file=cluster_file, digest=digest)
        print_result(result, lines, as_json=self.json)
        return OK


def _profile_json(profile: Profile, *, file: Path, cluster_file: Path, digest: str) -> dict[str, Any]:
    """Returns the object of `optimus profile --json`."""
    return {
        "schema": SCHEMA,
        "profile": str(file),
        "cluster": str(cluster_file),
        "sha256": digest,
        "measured": None if profile.measured is None else asdict(profile.measured),
        "segments": [{**asdict(row), "kind": row.kind.word} for row in profile.segments],
        "links": [asdict(link) for link in profile.links],
        "issue_s": profile.issue_s,
        "slowdown": profile.slowdown,
        "mapped_share": None,  # of a foreign trace; here everything was measured by name
    }


def _profile_text(profile: Profile, cluster: Cluster) -> list[str]:
    """Returns the machine, a row per segment and size, the links, and the rates of one core."""
    from optimus.cost.measured_profile import MEASURED_KINDS

    measured = profile.measured
    assert measured is not None
    lines = wrap_text(
        "measured",
        f"{measured.date} on {measured.host}, torch {measured.torch}, {measured.threads} thread, "
        f"{measured.dtype}{'; ' + measured.note if measured.note else ''}",
    )
    rows: dict[tuple[str, str, str, int, int], dict[OpKind, SegmentMeasurement]] = {}
    for row in profile.segments:
        key = row.module, row.layers, row.segment, row.tokens, row.tp
        rows.setdefault(key, {})[row.kind] = row
    table = [
        [*map(str, key), *(_milliseconds(kinds.get(kind)) for kind in MEASURED_KINDS)]
        for key, kinds in rows.items()
    ]
    header = ["module", "layers", "segment", "tokens", "tp", *(f"{kind.word} ms" for kind in MEASURED_KINDS)]
    lines += ["", *align_columns(header, table, left=3), ""]
    for link in profile.links:
        lines += wrap_text(link.operation.replace("_", "-"), _link_words(link))
    if profile.slowdown is not None:
        lines += wrap_text(
            "slow-down", f"matrix products take {profile.slowdown:.0%} longer under an all-reduce"
        )
    gpu = cluster.gpu
    rates = f"matrix product {gpu.peak_flops / 1e9:.0f} GFLOP/s"
    rates += f", copy {gpu.memory_bandwidth_bytes_per_s / 1e9:.1f} GB/s"
    return [*lines, *wrap_text(gpu.name, f"{rates}, memory {gpu.memory_bytes / 1e9:.1f} GB")]


def _link_words(link: LinkMeasurement) -> str:
    rate = f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s"
    return f"{link.latency_s * 1e6:.0f} us and {rate} between {link.ranks} ranks over {link.backend}"


def _milliseconds(row: SegmentMeasurement | None) -> str:
    return "-" if row is None else f"{row.median_s * 1e3:.3f}"
