"""Writes the tables and pictures of docs/questions.md, from figures that it computes and stores.

Without arguments it computes every case (about 20 minutes of one core); with arguments the cases whose key
starts with one, such as `bubbles` or `sweep 0.5`; with `page` none. Every case is stored when it is computed.
"""

from __future__ import annotations

import sys

from benchmarks.docs.pages import DOCS, GOLDEN, Figures, compute_named, fill_tables, markdown, read_figures
from benchmarks.docs.question_figures import (
    CAPACITIES,
    MULTI,
    RATIOS,
    ROOMY,
    ROOMY_GB,
    SIZES,
    STRONG,
    TOKENS,
    WEAK,
    all_cases,
    gain,
    simpler,
)
from benchmarks.docs.question_pictures import PICTURES
from optimus.schedule.bubbles import CAUSES

PAGE = DOCS / "questions.md"
STORED = GOLDEN / "question_figures.json"
PRESETS = ("default", "paper")
OTHERS = ("balanced-best", "three-phase", "stage0", "fsdp")  # baselines: they schedule nothing into bubbles
PARTS = {
    "dp_all_gather": "idle: DP all-gather",
    "dp_reduce_scatter": "idle: DP reduce-scatter",
    "pp_warmup": "idle: PP warm-up",
    "pp_cooldown": "idle: PP cool-down",
    "pp_other": "idle: PP other",
    "tp": "idle: TP",
}
WORK = {"llm": "LLM compute", "encoders": "encoder compute", "optimizer": "optimizer"}


def encoders(stored: Figures) -> str:
    """Compares systems of jobs with two and three encoders."""
    header = ["job", "system", "step s", "over floor", "peak GB", "layouts of encoders"]
    rows = []
    for name in MULTI:
        point = stored[f"encoders {name} default"]
        rows.append([f"`{name}`", "LLM alone (floor)", f"{point['floor_s']:.3f}", "1.000", "", ""])
        for system in ("optimus", "optimus, one layout", "paper", "balanced-best", "three-phase", "fsdp"):
            if system not in point["systems"]:
                if system in point["missing"]:
                    rows.append([f"`{name}`", system, "does not fit", "", "", ""])
                continue
            system_figures = point["systems"][system]
            over = f"{system_figures['step_s'] / point['floor_s']:.3f}"
            row = [f"`{name}`", system, f"{system_figures['step_s']:.3f}", over, _gb(system_figures)]
            rows.append([*row, _layouts(system_figures)])
    return markdown(header, rows)


def _layouts(system_figures: Figures) -> str:
    """Formats the layout of each encoder, or one for all."""
    layouts: dict[str, str] = system_figures.get("layouts", {})
    if len(set(layouts.values())) == 1:
        return f"all {next(iter(layouts.values()))}"
    return "; ".join(f"{name} {layout}" for name, layout in layouts.items())


def _gb(system_figures: Figures) -> str:
    return f"{system_figures['peak_gb']:.1f}{'' if system_figures['fits'] else ' *'}"


def memory(stored: Figures) -> str:
    """Compares planned peaks, and ours with the most frugal baseline that fits."""
    header = ["job", "preset", *(f"{name} GB" for name in ("optimus", "paper", *OTHERS))]
    header += ["optimus over the most frugal", "states", "LLM activations", "encoder activations", "step"]
    rows = []
    for preset in PRESETS:
        for name in (*SIZES, *WEAK):
            systems = stored[f"memory {name} {preset}"]["systems"]
            names = ("optimus", "paper", *OTHERS)
            peaks = [_gb(systems[each]) if each in systems else "does not fit" for each in names]
            row, ours, other = [name, f"`{preset}`", *peaks], systems.get("optimus"), frugal(systems)
            if ours is None:
                rows.append([*row, "", "", "", "", ""])
                continue
            parts = [f"{ours['gb'][part] - other['gb'][part]:+.1f} GB" for part in other["gb"]]
            over = f"{100 * (ours['peak_gb'] / other['peak_gb'] - 1):+.0f} %"
            rows.append([*row, over, *parts, f"{ours['step_s'] / other['step_s']:.2f}"])
    return markdown(header, rows)


def frugal(systems: Figures) -> Figures:
    """Returns the baseline that fits with the least memory."""
    fitting = [systems[name] for name in OTHERS if name in systems and systems[name]["fits"]]
    least: Figures = min(fitting, key=lambda system: system["peak_gb"])
    return least


def capacity(stored: Figures) -> str:
    """Compares steps on GPUs with less memory; the fastest in bold."""
    systems = ("optimus", *OTHERS)
    rows = []
    for name in SIZES:
        point = stored[f"capacity {name} default"]
        for gigabytes in CAPACITIES:
            planned = point[str(gigabytes)]
            best = min((system["step_s"] for system in planned.values()), default=0.0)
            cells = ["" if s not in planned else _bold(planned[s]["step_s"], best) for s in systems]
            rows.append([name, str(gigabytes), *cells])
    return markdown(["job", "GB of a GPU", *(f"{system} s" for system in systems)], rows)


def _bold(step_s: float, best_s: float) -> str:
    return f"**{step_s:.3f}**" if step_s == best_s else f"{step_s:.3f}"


def bubbles(stored: Figures) -> str:
    """Breaks down the step of the mean GPU, without encoders and with them."""
    header = ["preset", "seconds of a GPU"]
    header += [f"{gpus}: {word}" for gpus in STRONG for word in ("LLM alone", "with encoders", "change")]
    rows = []
    for preset in PRESETS:
        cases = [stored[f"bubbles {gpus} {preset}"] for gpus in STRONG]
        lines = {words: [cause] for cause, words in PARTS.items()}
        lines["of it, encoders wait for their own TP"] = ["tp_of_encoders"]
        lines["**all idle**"] = list(CAUSES)
        lines |= {words: [part] for part, words in WORK.items()}
        lines["**step**"] = [*CAUSES, *WORK]
        for words, parts in lines.items():
            cells = []
            for case in cases:
                before, after = (sum(case[when][part] for part in parts) for when in ("before", "after"))
                cells += [f"{before:.3f}", f"{after:.3f}", f"{round(after - before, 3) + 0.0:+.3f}"]
            rows.append([f"`{preset}`", words, *cells])
    return markdown(header, rows)


def used(stored: Figures) -> str:
    """Shows how much of the encoders' compute idle time takes in, and how much longer the step is."""
    header = ["preset", "GPUs", "microbatches", "idle before", "encoder compute", "less idle", "slower LLM"]
    header += ["step longer by", "idle time used", "over floor", "balanced-best over floor"]
    rows = []
    for preset in PRESETS:
        for gpus in STRONG:
            case = stored[f"bubbles {gpus} {preset}"]
            before, after = case["before"], case["after"]
            idle = [sum(each[cause] for cause in CAUSES) for each in (before, after)]
            slower = sum(after[part] - before[part] for part in ("llm", "optimizer"))
            cells = [
                idle[0],
                after["encoders"],
                idle[0] - idle[1],
                slower,
                after["step_s"] - before["step_s"],
            ]
            share = f"{100 * (idle[0] - idle[1]) / idle[0]:.0f} %"
            over = [f"{s / case['floor_s']:.3f}" for s in (after["step_s"], case["balanced_best_s"])]
            row = [f"`{preset}`", str(gpus), str(case["microbatches"])]
            rows.append([*row, *(f"{cell:.3f}" for cell in cells), share, *over])
    return markdown(header, rows)


def sweep(stored: Figures) -> str:
    """Shows the gain of filling by size of encoder and images, and steps over the floor."""
    header = ["encoder tokens", *(f"{ratio:g} of the LLM" for ratio in RATIOS)]
    rows = []
    for tokens in TOKENS:
        cells = []
        for ratio in RATIOS:
            point = stored[f"sweep {ratio:g} {tokens} default"]
            name, other = simpler(point)
            floor_s = point["floor_s"]
            theirs = f"{other['step_s'] / floor_s:.3f} {SHORT[name]}"
            ours = point["systems"].get("optimus")
            cells.append(
                f"does not fit (- / {theirs})"
                if ours is None
                else f"{round(100 * gain(point), 1) + 0.0:+.1f} % ({ours['step_s'] / floor_s:.3f} / {theirs})"
            )
        rows.append([f"{tokens:,}", *cells])
    return markdown(header, rows)


SHORT = {"balanced-best": "b", "three-phase": "t", "fsdp": "f"}


def sweep_memory(stored: Figures) -> str:
    """Compares peaks of ours and of the best simpler system."""
    rows = []
    for tokens in TOKENS:
        cells = []
        for ratio in RATIOS:
            point = stored[f"sweep {ratio:g} {tokens} default"]
            ours = point["systems"].get("optimus")
            cells.append(f"{'-' if ours is None else _gb(ours)} / {_gb(simpler(point)[1])}")
        rows.append([f"{tokens:,}", *cells])
    return markdown(["encoder tokens", *(f"{ratio:g} of the LLM" for ratio in RATIOS)], rows)


def roomy(stored: Figures) -> str:
    """Shows the gain at points where memory decides, and with more memory."""
    header = ["encoder", "encoder tokens", "GB of a GPU", "optimus s", "best simpler s", "gain", "peaks GB"]
    rows = []
    for name in ROOMY:
        for part, gigabytes in (("sweep", CAPACITIES[0]), ("roomy", ROOMY_GB)):
            point = stored[f"{part} {name} default"]
            ours, (other, theirs) = point["systems"]["optimus"], simpler(point)
            ratio, tokens = name.split()
            row = [f"{ratio} of the LLM", f"{int(tokens):,}", str(gigabytes), f"{ours['step_s']:.3f}"]
            row += [f"{theirs['step_s']:.3f} {SHORT[other]}", f"{100 * gain(point):+.1f} %"]
            rows.append([*row, f"{ours['peak_gb']:.1f} / {theirs['peak_gb']:.1f}"])
    return markdown(header, rows)


TABLES = {
    "encoders": encoders,
    "memory": memory,
    "capacity": capacity,
    "used": used,
    "bubbles": bubbles,
    "sweep": sweep,
    "sweep-memory": sweep_memory,
    "roomy": roomy,
}


def fill(page: str, stored: Figures) -> str:
    """Returns the page with every table computed from stored figures."""
    return fill_tables(page, {name: make(stored) for name, make in TABLES.items()})


def read_stored() -> Figures:
    """Returns the stored figures by the key of their case."""
    return read_figures(STORED)


if __name__ == "__main__":
    if sys.argv[1:] != ["page"]:
        compute_named(STORED, {case.key: case.make for case in all_cases()}, sys.argv[1:])
    PAGE.write_text(fill(PAGE.read_text(), read_stored()))
    for file, draw in PICTURES.items():
        (DOCS / "images" / file).write_text(draw(read_stored()), encoding="utf-8", newline="\n")
