"""The tables of docs/models.md: run this file to compute their figures and write all of them anew.

Cases named as arguments (`"internvl3-78b 40 %"`) are computed alone; the others keep what is stored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from model_figures import ALL_CASES, OTHERS, SECONDS, TABLE_CASES, TAIL_CASES, Case, Figures, figures
from validation_tables import markdown

from optimus.sensitivity.drawn_batches import DEALINGS

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
STORED = Path(__file__).parent / "golden" / "model_figures.json"
SYSTEMS = ("optimus", *OTHERS)


def steps(stored: Figures) -> str:
    """Every microbatch at the mean: seconds, and over the floor."""
    header = ["model", "images, mean %", "encoders alone s", "floor s", *SYSTEMS]
    rows = []
    for case, found in _stored(TABLE_CASES, stored):
        floor_s, made = found["floor"]["s"], found["systems"]
        seconds = {name: made[name]["step_s"] for name in SYSTEMS if name in made}
        cells = {name: f"{value:.2f} ({value / floor_s:.3f})" for name, value in seconds.items()}
        alone = f"{found['bounds']['encoder_s']:.2f}"
        rows.append([*_head(case, found), alone, f"{floor_s:.2f}", *_cells(found, cells, seconds)])
    return markdown(header, rows)


def batches(stored: Figures) -> str:
    """Mean and p95 over drawn batches."""
    header = ["model", "images, mean %", *SYSTEMS]
    rows = []
    for case, found in _stored(TABLE_CASES, stored):
        drawn = {name: made["batches"]["drawn"] for name, made in found["systems"].items()}
        cells = {name: f"{mean:.2f} ({p95:.2f})" for name, (mean, p95) in drawn.items()}
        means = {name: mean for name, (mean, _) in drawn.items()}
        rows.append([*_head(case, found), *_cells(found, cells, means)])
    return markdown(header, rows)


def worth(stored: Figures) -> str:
    """Which step brings what: out of stage 0, into bubbles, and against the best that fills none."""
    header = ["model", "images, mean %", "stage0 / balanced-best", "balanced-best / optimus"]
    header += ["best other", "best other / optimus", "best other over batches", "its mean / optimus"]
    header += ["best other, TP overlapped", "its time / optimus"]
    rows = []
    for case, found in _stored(TABLE_CASES, stored):
        fitting = {name: made for name, made in found["systems"].items() if made["fits"]}
        seconds = {name: made["step_s"] for name, made in fitting.items()}
        means = {name: made["batches"]["drawn"][0] for name, made in fitting.items()}
        overlapped = {name: made["overlapped_s"] for name, made in fitting.items()}
        row = _head(case, found)
        row += [_ratio(seconds, "stage0", "balanced-best"), _ratio(seconds, "balanced-best", "optimus")]
        for figure in (seconds, means, overlapped):
            best = min((name for name in figure if name != "optimus"), key=lambda name: figure[name])
            row += [best, _ratio(figure, best, "optimus")]
        rows.append(row)
    return markdown(header, rows)


def plans(stored: Figures) -> str:
    """What was chosen, and what it needs."""
    header = ["model", "images, mean %", "system", "what was chosen", "GB of the worst rank", "search s"]
    rows = []
    for case, found in _stored(TABLE_CASES, stored):
        made = {name: each for name, each in found["systems"].items() if each["fits"]}
        best = min((name for name in made if name != "optimus"), key=lambda name: made[name]["step_s"])
        for name in ("optimus", best):
            shown = [name, made[name]["how"], f"{made[name]['memory_gb']:.1f}"]
            rows.append([*_head(case, found), *shown, str(found[SECONDS]) if name == "optimus" else ""])
    return markdown(header, rows)


def tail(stored: Figures) -> str:
    """Mean and p95 under every dealing, of batches with a long tail."""
    header = ["model", "images, mean %", "system", "mean microbatches s", *(f"`{name}`" for name in DEALINGS)]
    rows = []
    for case, found in _stored(TAIL_CASES, stored):
        for name in SYSTEMS:
            if name in found["systems"]:
                made = found["systems"][name]
                dealt = [f"{mean:.2f} ({p95:.2f})" for mean, p95 in made["batches"].values()]
                rows.append([*_head(case, found), name, f"{made['step_s']:.2f}", *dealt])
    return markdown(header, rows)


def missing(stored: Figures) -> str:
    """The cases that were not computed yet."""
    absent = [f"`{case.key}`" for case in ALL_CASES if case.key not in stored]
    return f"Not computed yet: {', '.join(absent)}." if absent else "All cases were computed."


def _stored(cases: Iterable[Case], stored: Figures) -> Iterator[tuple[Case, Figures]]:
    return ((case, stored[case.key]) for case in cases if case.key in stored)


def _head(case: Case, found: Figures) -> list[str]:
    return [case.model, f"{100 * found['mean_share']:.1f}"]


def _cells(found: Figures, cells: dict[str, str], seconds: dict[str, float]) -> list[str]:
    """One cell per system: the fastest that fits in bold, a star where it does not fit."""
    made = found["systems"]
    fastest = min((name for name in seconds if made[name]["fits"]), key=lambda name: seconds[name])
    shown = []
    for name in SYSTEMS:
        cell = cells.get(name, "no")
        fits = name not in made or made[name]["fits"]
        shown.append(f"**{cell}**" if name == fastest else cell + ("" if fits else " *"))
    return shown


def _ratio(seconds: dict[str, float], name: str, other: str) -> str:
    both = name in seconds and other in seconds
    return f"{seconds[name] / seconds[other]:.3f}" if both else "does not fit"


TABLES = {
    "steps": steps,
    "batches": batches,
    "worth": worth,
    "plans": plans,
    "tail": tail,
    "missing": missing,
}


def fill(page: str, stored: Figures) -> str:
    """The page with every table between its markers made from stored figures."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        assert begin in page, f"no place for {name}"
        before, rest = page.split(begin, 1)
        page = before + begin + make(stored) + "\n" + end + rest.split(end, 1)[1]
    return page


def read_stored() -> Figures:
    found: Figures = json.loads(STORED.read_text())
    return found


def store(found: Figures) -> None:
    """In the order of the cases, whatever the order in which they were computed."""
    ordered = {case.key: found[case.key] for case in ALL_CASES if case.key in found}
    STORED.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    wanted = sys.argv[1:] or [case.key for case in ALL_CASES]
    for case in ALL_CASES:
        if case.key in wanted:
            fresh = {case.key: figures(case)}
            store({**read_stored(), **fresh})
    PAGE.write_text(fill(PAGE.read_text(), read_stored()))
