"""The tables of docs/paper.md: run this file to compute their figures and write both anew."""

from __future__ import annotations

import json
from pathlib import Path

from paper_figures import (
    DUAL,
    RECOMPUTATION,
    SECONDS,
    SMALL_LAYOUTS,
    SWEEP_TOKENS,
    WEAK,
    Case,
    Figures,
    all_cases,
    figures,
)
from validation_tables import markdown

PAGE = Path(__file__).parents[1] / "docs" / "paper.md"
STORED = Path(__file__).parent / "golden" / "paper_figures.json"

# What the paper measured (arXiv 2408.03505, tables 5 and 7): seconds, MFU and hidden shares in per cent.
TABLE_5 = {1536: (10.65, 10.43, 9.80, 34.4), 2048: (8.26, 8.06, 7.29, 34.6), 3072: (5.91, 5.87, 4.87, 34.6)}
TABLE_7 = {1536: (34.3, 57.5, 322.2), 2048: (45.8, 69.3, 89.6), 3072: (68.7, 85.0, 15.1)}
DUAL_OVER_MEGATRON = dict(zip(DUAL, (1.25, 1.26, 1.27), strict=True))
SMALL = {"Alpa": 8.61, "FSDP": 3.20, "Megatron-LM": 3.42, "balanced": 3.04, "Optimus": 2.78}
RECOMPUTED = 4 / 3  # the paper's MFU counts the forward of all layers twice


def table_7(stored: Figures) -> str:
    """Hidden shares by the algorithm's own books, and what the step shows of the encoders."""
    header = ["GPUs", "preset", "layout", "encoder", "coarse %", "fine %", "strict %", "estimate s", "step s"]
    rows = []
    for gpus, (coarse, fine, _) in TABLE_7.items():
        rows.append([str(gpus), "**paper's own**", "not stated", "", f"{coarse}", f"{fine}", "", "", ""])
        for name in ("paper", "clean"):
            for which, words in (("chosen", "chosen"), ("best_estimate", "best estimate")):
                found = stored[f"strong-{gpus} {name}"][which]
                shares = [f"{100 * found[share]:.1f}" for share in ("coarse", "fine", "strict")]
                seconds = [f"{found['estimate_s']:.3f}", f"{found['step_s']:.3f}"]
                rows.append([str(gpus), f"`{name}`", words, _layout(found), *shares, *seconds])
    return markdown(header, rows)


def search(stored: Figures) -> str:
    """Seconds of the search."""
    header = ["GPUs", "paper, one core", "ours, `paper`", "ours, `clean`"]
    rows = [
        [
            str(gpus),
            f"{theirs} s",
            *(f"{stored[f'strong-{gpus} {name}'][SECONDS]} s" for name in ("paper", "clean")),
        ]
        for gpus, (*_, theirs) in TABLE_7.items()
    ]
    return markdown(header, rows)


def estimate(stored: Figures) -> str:
    """From the algorithm's estimate to the claim."""
    header = ["GPUs", "preset", "encoder", "moved", "LLM alone", "estimate", "bare programs", "step"]
    rows = []
    for gpus in TABLE_7:
        for name in ("paper", "clean"):
            for which in ("chosen", "best_estimate"):
                found = stored[f"strong-{gpus} {name}"][which]
                seconds = [f"{found[s]:.3f}" for s in ("llm_s", "estimate_s", "bare_s", "step_s")]
                rows.append([str(gpus), f"`{name}`", _layout(found), str(found["moved"]), *seconds])
    return markdown(header, rows)


def table_5(stored: Figures) -> str:
    """Steps and speed-ups of strong scaling."""
    header = ["GPUs", "", "stage0 s", "balanced s", "balanced-best s", "paper's system s"]
    header += ["over stage0", "over balanced", "over balanced-best", "MFU %"]
    rows = []
    for gpus, (stage0, balanced, optimus, mfu) in TABLE_5.items():
        speedups = [f"{stage0 / optimus:.2f}x", f"{balanced / optimus:.2f}x", ""]
        model = f"{mfu / RECOMPUTED:.1f}"
        rows.append([f"{gpus}", "paper", f"{stage0}", f"{balanced}", "", f"{optimus:.2f}", *speedups, model])
        for name in ("paper", "default"):
            found = stored[f"strong-{gpus} {name}"]
            mfu = 100 * found["model_flops_share_s"] / found["chosen"]["step_s"]
            row = [f"{gpus}", f"ours, `{name}`", *_steps(found), *_speedups(found), f"{mfu:.1f}"]
            rows.append(row)
    return markdown(header, rows)


def weak(stored: Figures) -> str:
    """Weak scaling and two encoders: speed-ups only, for the paper prints no seconds."""
    header = ["job", "paper", "", "preset", "over stage0", "over balanced", "over balanced-best"]
    header += ["coarse %", "fine %", "strict %"]
    rows = []
    for job in (*WEAK, *DUAL):
        theirs = f"{DUAL_OVER_MEGATRON[job]}x" if job in DUAL else "up to 1.22x"
        other = "" if job in DUAL else "up to 1.18x"
        for name in ("paper", "default"):
            found = stored[f"{job} {name}"]
            shares = [f"{100 * found['chosen'][share]:.1f}" for share in ("coarse", "fine", "strict")]
            rows.append([f"`{job}`", theirs, other, f"`{name}`", *_speedups(found), *shares])
    return markdown(header, rows)


def small(stored: Figures) -> str:
    """The small comparison."""
    header = ["", "LLM layout", "Alpa s", "FSDP s", "Megatron-LM s", "balanced s", "Optimus s"]
    header += ["over Megatron-LM", "over balanced"]
    base = SMALL["Optimus"]
    over = [f"{SMALL[name] / base:.2f}x" for name in ("Megatron-LM", "balanced")]
    rows = [["paper", "not stated", *(f"{seconds:.2f}" for seconds in SMALL.values()), *over]]
    for name in ("paper", "default"):
        for layout in SMALL_LAYOUTS:
            found = stored[Case(job="small-a100", preset=name, layout=layout).key]
            steps = _steps(found, "fsdp", "stage0", "balanced")
            words = layout.replace(",", " ") or "left open"
            rows.append([f"ours, `{name}`", words, "", *steps, *_speedups(found, "stage0", "balanced")])
    return markdown(header, rows)


def sweep(stored: Figures) -> str:
    """What the paper leaves unstated, varied."""
    header = ["encoder tokens", "recomputation", "encoder alone s", "coarse %", "fine %", "strict %"]
    header += ["over stage0", "over balanced", "over balanced-best"]
    rows = []
    for tokens in SWEEP_TOKENS:
        for recompute in RECOMPUTATION:
            case = Case(job="strong-3072", preset="paper", tokens=tokens, recompute=recompute)
            found = stored[case.key]
            shares = [f"{100 * found['chosen'][share]:.1f}" for share in ("coarse", "fine", "strict")]
            rows.append([f"{tokens:,}", recompute, f"{found['encoder_s']:.2f}", *shares, *_speedups(found)])
    return markdown(header, rows)


def _layout(found: Figures) -> str:
    return f"{found['layout']}{', adjusted' if found['adjusted'] else ''}"


def _steps(found: Figures, *names: str) -> list[str]:
    """Seconds of systems, then of the plan; a star where a system does not fit in memory."""
    made = found["systems"]
    asked = names or ("stage0", "balanced", "balanced-best")
    steps = [f"{made[name]['step_s']:.2f}{'' if made[name]['fits'] else ' *'}" for name in asked]
    return [*steps, f"{found['chosen']['step_s']:.2f}"]


def _speedups(found: Figures, *names: str) -> list[str]:
    made = found["systems"]
    asked = names or ("stage0", "balanced", "balanced-best")
    return [
        f"{made[name]['step_s'] / found['chosen']['step_s']:.2f}x{'' if made[name]['fits'] else ' *'}"
        for name in asked
    ]


TABLES = {
    "table-7": table_7,
    "search": search,
    "estimate": estimate,
    "table-5": table_5,
    "weak": weak,
    "small": small,
    "sweep": sweep,
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


if __name__ == "__main__":
    STORED.write_text(json.dumps({case.key: figures(case) for case in all_cases()}, indent=1) + "\n")
    PAGE.write_text(fill(PAGE.read_text(), read_stored()))
