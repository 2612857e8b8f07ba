"""Measures the time of planning, and writes its table and picture of docs/scheduler.md.

Each case is planned in a process of its own, with all systems, by one core with a warm compile cache; the CPU
seconds of the whole process count, the least of `REPEATS`. On a quiet machine this takes about ten minutes.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.docs.pages import DOCS, ROOT, fill_tables, markdown
from optimus.job.job import Job
from optimus.job.layout import PartialLayout
from optimus.job.read import find_job
from optimus.render.markup import FAINT, FONT, PAPER, render_svg_text

PAGE, PICTURE = DOCS / "scheduler.md", DOCS / "images" / "search-time.svg"
REPEATS = 3
TARGETS = {
    "paper/strong-3072": 5,
    "paper/strong-1536": 10,
    "100,352 GPUs, PP 16, 64 microbatches": 15,
    "qwen2.5-vl-72b on 512 GPUs, layout open": 60,
}
GROWTH = {
    "GPUs": [f"gpus {gpus}" for gpus in (768, 3072, 12288, 49152, 98304)],
    "microbatches": [f"microbatches {count}" for count in (8, 16, 32, 64, 128)],
    "stages": [f"stages {count}" for count in (4, 8, 16, 32)],
}
COLOURS = "#0072b2", "#d55e00", "#009e73"
LABEL_PITCH = 16
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000, 400, 70, 180, 60, 50


def job_of(case: str) -> Job:
    """Returns the job of a case: a catalog job, or one with a size changed."""
    if case.startswith("paper/"):
        return find_job(case)
    if case.startswith("qwen"):
        return find_job("qwen2.5-vl-72b", "h100:512")
    if case.startswith("100,352"):
        return grown(gpus=100352, stages=16, microbatches=64)
    axis, size = case.split()
    return grown(**{axis: int(size)})


def grown(*, gpus: int = 3072, stages: int = 8, microbatches: int = 16) -> Job:
    """Returns ViT-22B and GPT-175B at tp 8, with two sequences in a microbatch."""
    job = find_job("paper/strong-3072").replace(gpus=gpus)
    sequences = gpus // (8 * stages) * 2 * microbatches
    layout = replace(job.layout, modules={"llm": PartialLayout(pp=stages, tp=8)})
    return replace(job, workload=replace(job.workload, sequences_per_step=sequences), layout=layout)


def plan_once(case: str) -> None:
    """Plans in this process, and prints its times."""
    from optimus.planner.planning import make_plan

    planned = make_plan(job_of(case))
    used = resource.getrusage(resource.RUSAGE_SELF)
    times = {
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": planned.comparison.search_s,
        "step_s": planned.step_s,
    }
    sys.stdout.write(json.dumps({**times, "ops": len(planned.system.schedule)}))


def measured(case: str, repeats: int = REPEATS) -> dict[str, float]:
    """Returns the times of the process with the least CPU time."""
    command = [sys.executable, "-m", "benchmarks.docs.search_times", case]
    runs = [
        json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
        for _ in range(repeats)
    ]
    return min(runs, key=lambda run: float(run["cpu_s"]))


def table(times: dict[str, dict[str, float]]) -> str:
    """Returns the table of CPU seconds beside their targets."""
    header = ["job", "CPU s", "aimed at", "ops of the plan"]
    rows = [
        [case, f"{times[case]['cpu_s']:.1f}", f"{limit} s", f"{times[case]['ops']:,.0f}"]
        for case, limit in TARGETS.items()
    ]
    return markdown(header, rows)


def picture(times: dict[str, dict[str, float]]) -> str:
    """Draws CPU seconds against each axis, both logarithmic."""
    series = {
        name: [(int(case.split()[1]), times[case]["cpu_s"]) for case in cases]
        for name, cases in GROWTH.items()
    }
    every = [seconds for points in series.values() for _, seconds in points]
    low, high = math.log(min(every) / 1.3), math.log(max(every) * 1.3)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def y(seconds: float) -> float:
        return bottom - (math.log(seconds) - low) / (high - low) * (bottom - TOP)

    first, last = series["GPUs"][0], series["GPUs"][-1]
    title = (
        f"Planning does not grow with the GPUs: {first[1]:.0f} s of CPU at {first[0]:,}, "
        f"{last[1]:.0f} s at {last[0]:,}; it grows with microbatches"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        render_svg_text(LEFT, 28, title, size=15, weight="bold"),
    ]
    for tick in (2, 5, 10, 20, 50, 100):
        if low <= math.log(tick) <= high:
            parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{right}" stroke="{FAINT}"/>')
            parts.append(render_svg_text(LEFT - 8, y(tick) + 4, f"{tick} s", size=12, anchor="end"))
    label_y = -math.inf
    for colour, (name, points) in sorted(
        zip(COLOURS, series.items(), strict=True), key=lambda axis: y(axis[1][1][-1][1])
    ):
        label_y = max(label_y + LABEL_PITCH, y(points[-1][1]) + 4)
        parts += line(points, colour, y, right)
        parts.append(render_svg_text(right + 10, label_y, name, size=13, colour=colour, weight="bold"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def line(points: Sequence[tuple[int, float]], colour: str, y: object, right: int) -> list[str]:
    """Draws one axis: its points from left to right, each with its value."""
    assert callable(y)
    begin, end = math.log(points[0][0]), math.log(points[-1][0])
    places = [LEFT + 20 + (math.log(v) - begin) / (end - begin) * (right - LEFT - 40) for v, _ in points]
    path = " ".join(f"{x:.1f},{y(seconds):.1f}" for x, (_, seconds) in zip(places, points, strict=True))
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for x, (value, seconds) in zip(places, points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y(seconds):.1f}" r="3.5" fill="{colour}"/>')
        parts.append(
            render_svg_text(x, y(seconds) - 8, f"{value:,}", anchor="middle", size=11, colour=colour)
        )
    return parts


def main() -> None:
    """Measures every case, and writes the picture and the table."""
    cases = [*TARGETS, *(case for cases in GROWTH.values() for case in cases)]
    times = {}
    for case in cases:
        times[case] = measured(case, REPEATS if case in TARGETS else 1)
        sys.stderr.write(f"{case}: {times[case]}\n")
    PICTURE.write_text(picture(times))
    PAGE.write_text(fill_tables(PAGE.read_text(), {"times": table(times)}))


if __name__ == "__main__":
    plan_once(sys.argv[1]) if len(sys.argv) > 1 else main()
