"""Computes and writes the table of docs/noise.md (about two minutes)."""

from __future__ import annotations

from statistics import fmean

from benchmarks.docs.pages import DOCS, fill_tables, markdown
from optimus.job.read import find_job
from optimus.planner.planning import make_plan
from optimus.sensitivity.noise_study import POLICIES, simulate_under_noise

PAGE = DOCS / "noise.md"
CASES = [(f"strong-{gpus}", preset) for gpus in (3072, 1536) for preset in ("clean", "default")]
HEADER = ["job, preset", "noise", "floor s", "balanced-best s"]
HEADER += [f"{policy}{word}" for policy in POLICIES for word in (" s", " over floor", " speed-up", " lost")]


def rows(job: str, preset: str) -> list[str]:
    """Returns the lines of one case, one for every noise."""
    planned = make_plan(
        find_job(f"paper/{job}"), strategy="optimus", assumptions=preset, systems=["balanced-best"]
    )
    noise = simulate_under_noise(planned.plan, planned.comparison)
    lines = []
    for level in noise.levels:
        cells = [f"{job}, {preset}", level.noise.name]
        cells += [f"{fmean(steps):.3f}" for steps in (level.floor_s, level.other_s)]
        for policy in POLICIES:
            speedup, lost = level.speedup(policy), noise.lost_points(policy, level)
            assert speedup is not None and lost is not None
            over = level.over_floor(policy)
            shown = f"{round(lost, 1) + 0.0:.1f}"  # never -0.0
            cells += [f"{fmean(level.ours_s[policy]):.3f}", f"{over:.3f}", f"{speedup:.3f}", shown]
        lines.append(cells)
    return markdown(HEADER, lines).splitlines()[2:]


def table() -> str:
    """Returns the table of all cases."""
    return "\n".join([markdown(HEADER, []), *(line for case in CASES for line in rows(*case))])


if __name__ == "__main__":
    PAGE.write_text(fill_tables(PAGE.read_text(), {"noise": table()}))
