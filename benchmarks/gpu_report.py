"""The result of `python -m benchmarks gpu`: a line per section for people, everything for tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.report import bench_json, closing_text, variants_text
from optimus.cli.text import wrap

PASTE = (
    "please paste the object that `python -m benchmarks gpu --json` prints into an issue, also if something "
    "failed: it names versions, GPUs and figures, no host, user or path but those of error messages"
)
Section = Mapping[str, Any]


def gpu_json(result: Any) -> dict[str, Any]:
    """The object of every bench, with where it ran and what each section found."""
    found = bench_json(result)
    return {
        **found,
        "environment": dict(result.environment),
        "sections": {name: dict(section) for name, section in result.sections.items()},
    }


def gpu_text(result: Any) -> list[str]:
    """Where, a line per section, the variants of the step, what is wrong, and what to do with it."""
    lines = wrap("environment", _where(result.environment))
    for name, section in result.sections.items():
        lines += ["", name]
        said = f"FAILED: {section['error']}" if "error" in section else _WORDS[name](section)
        lines += wrap("", said, indent=2)
    lines.append("")
    if result.variants:
        lines += [*variants_text(result), ""]
    return [*lines, *closing_text(result), *wrap("next", PASTE)]


def _where(environment: Section) -> str:
    gpu = environment.get("gpu")
    on = f"{environment['world']} x {gpu}" if gpu else f"{environment['world']} ranks on CPU cores"
    known = [name for name in ("nccl", "cuda", "driver") if environment.get(name)]
    versions = [f"torch {environment['torch']}", *(f"{name} {environment[name]}" for name in known)]
    versions += [] if known else [environment["backend"]]
    set_to = [f"{name}={value}" for name, value in environment["variables"].items()]
    return ", ".join([on, *versions, *set_to])


def _order(section: Section) -> str:
    by_verdict: dict[str, list[str]] = {}
    for name, check in section["checks"].items():
        by_verdict.setdefault(check["verdict"], []).append(name.replace("_", " "))
    return "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in by_verdict.items())


def _slot(section: Section) -> str:
    entry, waiter = section["entry_delay"], section["waiter_delay"]
    return (
        f"a kernel behind the launch of an all-gather ({_size(section['size_bytes'])}, "
        f"{_time(section['collective_s'])}) begins {_spread(entry)} later than without; "
        f"who waits goes on {_spread(waiter)} after its end"
    )


def _slowdown(section: Section) -> str:
    return (
        f"beside a resident collective a GEMM takes {_share(section['gemm'])} longer, an elementwise kernel "
        f"{_share(section['elementwise'])}; a GEMM beside one that waits for a late rank "
        f"{_share(section['gemm_beside_a_waiting_collective'])}; plans assume {_share(section['assumed'])}"
    )


def _reduced(section: Section) -> str:
    traced = section["hidden_share"]
    in_trace = section["kernels"] if traced is None else f"{_share(traced)} in the trace"
    return (
        f"of a float32 reduce-scatter ({_size(section['size_bytes'])}, {_time(section['reduce_scatter_s'])}) "
        f"{_share(section['hidden_share_by_time'])} are hidden by the clock, {in_trace}"
    )


def _collectives(section: Section) -> str:
    parts = []
    for name, curve in section.items():
        rate = curve["bandwidth_bytes_per_s"]
        shown = "no bandwidth: larger ones are not slower" if rate is None else f"{rate / 1e9:.3g} GB/s"
        parts.append(f"{name} {_time(curve['latency_s'])} and {shown}")
    return "; ".join(parts)


def _step(section: Section) -> str:
    same = "unequal: see below" if section["unequal"] else "equal loss and gradients"
    over = f"{section['ours_over_bound']:.3f} of the bound"
    return f"{len(section['variants'])} variants, {same}; ours takes {over}"


def _train(section: Section) -> str:
    planned = _time(section["planned_step_s"])
    found = f"{section['layouts']['llm']}: {_time(section['step_s'])} with AdamW, planned {planned}"
    if "peak_memory_bytes" in section:
        planned = _size(section["planned_peak_memory_bytes"])
        found += f"; at most {_size(section['peak_memory_bytes'])} allocated, {planned} planned with reserves"
    return found


_WORDS: dict[str, Callable[[Section], str]] = {
    "communicator_order": _order,
    "slot_entry_delay_s": _slot,
    "compute_slowdown": _slowdown,
    "reduce_scatter_under_compute": _reduced,
    "collectives": _collectives,
    "step": _step,
    "train": _train,
    "train_tp": _train,
}


def _time(value_s: float) -> str:
    """With the unit that fits."""
    size = abs(value_s)
    factor, unit = (1.0, "s") if size >= 1 else (1e3, "ms") if size >= 1e-3 else (1e6, "us")
    return f"{value_s * factor:.3g} {unit}"


def _spread(found: Section) -> str:
    return f"{_time(found['median_s'])} ({_time(found['p25_s'])} to {_time(found['p75_s'])})"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _size(size_bytes: float) -> str:
    factor, unit = (1e9, "GB") if size_bytes >= 1e9 else (1e6, "MB") if size_bytes >= 1e6 else (1e3, "kB")
    return f"{size_bytes / factor:.3g} {unit}"
