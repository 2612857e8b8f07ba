"""Results of benchmarks, and their text and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optimus.cli.text import align_columns, wrap_text
from optimus.render.format_numbers import format_seconds

SCHEMA = "optimus.bench/1"
EVENLY = "all work evenly on all ranks"
PASTE = (
    "please paste the object that `python -m benchmarks gpu --json` prints into an issue, also if something "
    "failed: it names versions, GPUs and figures, no host, user or path but those of error messages"
)

Figures = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class VariantTime:
    """Step time of one variant. Fields that a benchmark does not measure are None."""

    step_s: float  # median
    over_ours: float
    over_ours_low: float | None = None  # 95 % interval
    over_ours_high: float | None = None
    step_low_s: float | None = None  # shortest and longest step that counts
    step_high_s: float | None = None
    predicted_s: float | None = None  # by a replay that uses no measurement of this step
    error: float | None = None  # step over prediction, less 1
    steps: int | None = None  # that count
    disturbed: int | None = None  # steps that do not count because the host was late

    def stated(self) -> dict[str, Any]:
        """Returns the fields that were measured."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Step times of all variants; `problems` lists expectations that do not hold.

    Of `gpu` also the environment, and for every section its figures or its `error`; variants and bound are
    those of the section `step`, and None if it failed.
    """

    bench: str
    variants: Mapping[str, VariantTime]
    ours: str  # name of our variant
    bound_s: float | None
    ours_over_bound: float | None
    bound: str = EVENLY  # description of the bound
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    rankings: Mapping[str, tuple[str, ...]] | None = None  # of systems, shortest step first
    environment: Figures | None = None
    sections: Mapping[str, Figures] | None = None

    @property
    def ok(self) -> bool:
        return not self.problems


def to_json(result: BenchResult) -> dict[str, Any]:
    """Returns the object of `python -m benchmarks ... --json`, without fields that were not measured."""
    fields = {
        "schema": SCHEMA,
        "bench": result.bench,
        "ok": result.ok,
        "ours": result.ours,
        "variants": {name: variant.stated() for name, variant in result.variants.items()},
        "bound": result.bound,
        "bound_s": result.bound_s,
        "ours_over_bound": result.ours_over_bound,
        "problems": list(result.problems),
        "notes": list(result.notes),
    }
    if result.rankings is not None:
        fields["rankings"] = {name: list(ranking) for name, ranking in result.rankings.items()}
    if result.environment is not None and result.sections is not None:
        fields["environment"] = dict(result.environment)
        fields["sections"] = {name: dict(section) for name, section in result.sections.items()}
    return fields


def to_text(result: BenchResult) -> list[str]:
    """Returns a line per section, a line per variant with the shortest step first, the bound, and notes."""
    lines: list[str] = []
    if result.environment is not None and result.sections is not None:
        lines += _sections_text(result.environment, result.sections)
    if result.variants:
        lines += _variants_text(result)
        lines += [""] if result.sections is not None else []
    for problem in result.problems:
        lines += wrap_text("NO", problem)
    for note in result.notes:
        lines += wrap_text("note", note)
    return [*lines, *wrap_text("next", PASTE)] if result.sections is not None else lines


# ---------------------------------------------------------------------------- variants


def _variants_text(result: BenchResult) -> list[str]:
    variants = sorted(result.variants.items(), key=lambda item: item[1].step_s)
    shown = [
        (header, cell) for header, cell in _COLUMNS.items() if any(cell(variant) for _, variant in variants)
    ]
    rows = [[name, *(cell(variant) for _, cell in shown)] for name, variant in variants]
    lines = align_columns(["variant", *(header for header, _ in shown)], rows)
    assert result.bound_s is not None
    bound = f"{format_seconds(result.bound_s)} s, {result.bound}"
    return [*lines, "", *wrap_text("bound", f"{bound}; ours takes {result.ours_over_bound:.3f} of it")]


def _interval(variant: VariantTime) -> str:
    if variant.over_ours_low is None or variant.over_ours_high is None:
        return ""
    return f"{variant.over_ours_low:.3f} to {variant.over_ours_high:.3f}"


def _range(variant: VariantTime) -> str:
    if variant.step_low_s is None or variant.step_high_s is None:
        return ""
    return f"{format_seconds(variant.step_low_s)} to {format_seconds(variant.step_high_s)}"


_COLUMNS: dict[str, Callable[[VariantTime], str]] = {
    "step s": lambda variant: format_seconds(variant.step_s),
    "over ours": lambda variant: f"{variant.over_ours:.3f}",
    "95 % interval": _interval,
    "range s": _range,
    "replayed s": lambda variant: "" if variant.predicted_s is None else format_seconds(variant.predicted_s),
    "error": lambda variant: "" if variant.error is None else f"{100 * variant.error:+.2f} %",
    "steps": lambda variant: "" if variant.steps is None else str(variant.steps),
    "disturbed": lambda variant: "" if variant.disturbed is None else str(variant.disturbed),
}


# ---------------------------------------------------------------------------- sections of `gpu`


def _sections_text(environment: Figures, sections: Mapping[str, Figures]) -> list[str]:
    lines = wrap_text("environment", _environment(environment))
    for name, section in sections.items():
        text = f"FAILED: {section['error']}" if "error" in section else _SECTIONS[name](section)
        lines += ["", name, *wrap_text("", text, indent=2)]
    return [*lines, ""]


def _environment(environment: Figures) -> str:
    gpu = environment.get("gpu")
    devices = f"{environment['world']} x {gpu}" if gpu else f"{environment['world']} ranks on CPU cores"
    known = [name for name in ("nccl", "cuda", "driver") if environment.get(name)]
    versions = [f"torch {environment['torch']}", *(f"{name} {environment[name]}" for name in known)]
    versions += [] if known else [environment["backend"]]
    variables = [f"{name}={value}" for name, value in environment["variables"].items()]
    return ", ".join([devices, *versions, *variables])


def _order(section: Figures) -> str:
    by_verdict: dict[str, list[str]] = {}
    for name, check in section["checks"].items():
        by_verdict.setdefault(check["verdict"], []).append(name.replace("_", " "))
    return "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in by_verdict.items())


def _slot(section: Figures) -> str:
    entry, waiter = section["entry_delay"], section["waiter_delay"]
    return (
        f"a kernel enqueued behind the launch of an all-gather ({_size(section['size_bytes'])}, "
        f"{_time(section['collective_s'])}) begins {_spread(entry)} later than without the launch; "
        f"the waiter continues {_spread(waiter)} after the end of the all-gather"
    )


def _slowdown(section: Figures) -> str:
    return (
        f"under a resident collective a GEMM takes {_share(section['gemm'])} longer, an elementwise kernel "
        f"{_share(section['elementwise'])}; a GEMM under one that waits for a late rank "
        f"{_share(section['gemm_beside_a_waiting_collective'])}; plans assume {_share(section['assumed'])}"
    )


def _overlap(section: Figures) -> str:
    traced = section["hidden_share"]
    in_trace = section["kernels"] if traced is None else f"{_share(traced)} in the trace"
    return (
        f"of a float32 reduce-scatter ({_size(section['size_bytes'])}, {_time(section['reduce_scatter_s'])}) "
        f"{_share(section['hidden_share_by_time'])} are hidden by the clock, {in_trace}"
    )


def _collectives(section: Figures) -> str:
    parts = []
    for name, curve in section.items():
        bandwidth = curve["bandwidth_bytes_per_s"]
        shown = (
            "no bandwidth: larger ones are not slower" if bandwidth is None else f"{bandwidth / 1e9:.3g} GB/s"
        )
        parts.append(f"{name} {_time(curve['latency_s'])} and {shown}")
    return "; ".join(parts)


def _step(section: Figures) -> str:
    equality = "unequal: see below" if section["unequal"] else "equal loss and gradients"
    over = f"{section['ours_over_bound']:.3f} of the bound"
    return f"{len(section['variants'])} variants, {equality}; ours takes {over}"


def _train(section: Figures) -> str:
    planned = _time(section["planned_step_s"])
    text = f"{section['layouts']['llm']}: {_time(section['step_s'])} with AdamW, planned {planned}"
    if "peak_memory_bytes" in section:
        planned = _size(section["planned_peak_memory_bytes"])
        text += f"; at most {_size(section['peak_memory_bytes'])} allocated, {planned} planned with reserves"
    return text


_SECTIONS: dict[str, Callable[[Figures], str]] = {
    "communicator_order": _order,
    "slot_entry_delay_s": _slot,
    "compute_slowdown": _slowdown,
    "reduce_scatter_under_compute": _overlap,
    "collectives": _collectives,
    "step": _step,
    "train": _train,
    "train_tp": _train,
}


def _time(value_s: float) -> str:
    """Formats seconds with the unit that fits."""
    size = abs(value_s)
    factor, unit = (1.0, "s") if size >= 1 else (1e3, "ms") if size >= 1e-3 else (1e6, "us")
    return f"{value_s * factor:.3g} {unit}"


def _spread(quartiles: Figures) -> str:
    return f"{_time(quartiles['median_s'])} ({_time(quartiles['p25_s'])} to {_time(quartiles['p75_s'])})"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _size(size_bytes: float) -> str:
    factor, unit = (1e9, "GB") if size_bytes >= 1e9 else (1e6, "MB") if size_bytes >= 1e6 else (1e3, "kB")
    return f"{size_bytes / factor:.3g} {unit}"
