"""Draws one LLM layer and the encoder kernels in its slots, from a step that ran over a slow link.

`python -m benchmarks.docs.slot_picture` (as root) writes docs/images/slots.svg.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from html import escape

from benchmarks.docs.pages import DOCS
from benchmarks.ranks import Report, prioritize_gloo_threads, run_pinned_ranks
from benchmarks.shaped import COMPARISONS, ShapedSetup, VariantRank, enter_link, prepare
from benchmarks.shaped_net import shaped_links
from optimus.ir.op import COMPUTE_OPS, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM

TARGET = DOCS / "images" / "slots.svg"
WARM_UP_STEPS = 3
WIDTH, LEFT, LANE, GAP = 1060, 90, 34, 14  # pixels
LineTimes = list[tuple[int, float, float]]  # line, begin, end


class ClockRecorder:
    """Recorder of the executor that reads the clock at begin and end of every line."""

    def __init__(self) -> None:
        self.lines: LineTimes = []
        self._began = 0.0

    def begin(self, line: int) -> None:
        self._began = time.perf_counter()

    def end(self, line: int) -> None:
        self.lines.append((line, self._began, time.perf_counter()))


def record(rank: int, setup: ShapedSetup, report: Report) -> LineTimes:
    """Runs warm-up steps on one rank, then records begin and end of every line of one step."""
    variant = VariantRank(setup, setup.comparison.ours)
    for _ in range(WARM_UP_STEPS):
        variant.step()
    prioritize_gloo_threads()
    recorder = ClockRecorder()
    variant.executor.replace_recorder(recorder)
    variant.step()
    return recorder.lines


class TimedLine:
    """One line of the program with its begin and end."""

    def __init__(self, plan: Plan, line: int, begin: float, end: float) -> None:
        module, kind, chunk, self.microbatch, self.place = plan.programs[0].rows[line].tolist()
        self.module, self.kind, self.begin, self.end = plan.names[module], OpKind(kind), begin, end
        phases = plan.template_of(self.module, self.kind, 0, chunk) if kind in COMPUTE_OPS else ()
        phase = phases[self.place] if phases else None
        self.phase_kind = phase.kind if phase else None
        self.name = phase.name if phase else self.kind.word
        self.layer = phase.layer if phase else -1

    @property
    def text(self) -> str:
        return f"{self.module} {self.kind.word}{self.microbatch} layer {self.layer} {self.name}"


def busiest_layer(lines: Sequence[TimedLine]) -> list[TimedLine]:
    """Returns the forward of the LLM layer with the most encoder seconds inside."""
    best: list[TimedLine] = []
    most = 0.0
    starts = [
        at
        for at, line in enumerate(lines)
        if (line.module, line.kind, line.name) == (LLM, OpKind.FORWARD, "norm1")
    ]
    for at in starts:
        first = lines[at]
        mine = [
            number
            for number, line in enumerate(lines)
            if (line.module, line.kind, line.microbatch) == (LLM, OpKind.FORWARD, first.microbatch)
            and (line.layer == first.layer or (line.name == "scatter2" and line.layer == first.layer + 1))
        ]
        inside = [
            line
            for line in lines[at : mine[-1] + 1]
            if line.module != LLM and line.phase_kind == OpKind.FORWARD
        ]
        spent = sum(line.end - line.begin for line in inside)
        if spent > most and lines[mine[-1]].end - first.begin < 0.2:
            best, most = list(lines[at : mine[-1] + 1]), spent
    return best


def draw(lines: Sequence[TimedLine], mbit: float) -> str:
    """Draws two lanes: the compute of the rank, and the link."""
    start, end = lines[0].begin, lines[-1].end
    scale = (WIDTH - LEFT - 10) / (end - start)
    parts = []

    def box(begin: float, until: float, lane: int, colour: str, text: str, shown: str) -> None:
        x, width = LEFT + (begin - start) * scale, max(1.0, (until - begin) * scale)
        y = 46 + lane * (LANE + GAP)
        parts.append(
            f"<g><title>{escape(text)}, {1e3 * (until - begin):.1f} ms</title>"
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" rx="2" fill="{colour}"/>'
        )
        if width > 7 * len(shown):
            parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 21}" class="in">{escape(shown)}</text>')
        parts.append("</g>")

    launched: dict[str, TimedLine] = {}
    for line in lines:
        if line.phase_kind == OpKind.LAUNCH and line.module == LLM:
            launched[line.name] = line
        elif line.phase_kind == OpKind.WAIT and line.module == LLM:
            begun = launched.pop(line.name, line)
            box(begun.begin, line.end, 1, "#8a8f98", f"{line.name} in flight", line.name)
            box(line.begin, line.end, 0, "#d9dce1", f"waiting for {line.name}", "")
        elif line.module == LLM:
            box(line.begin, line.end, 0, "#2f6db5", line.text, line.name)
        else:
            box(line.begin, line.end, 0, "#e08a2c", line.text, line.name)
    height = 46 + 2 * (LANE + GAP) + 24
    names = "".join(
        f'<text x="8" y="{46 + lane * (LANE + GAP) + 21}">{name}</text>'
        for lane, name in enumerate(("core", "link"))
    )
    title = (
        f"One LLM layer, forward, and the encoder in its slots: two ranks, {mbit:g} Mbit/s, "
        f"{1e3 * (end - start):.0f} ms as they ran"
    )
    legend = "blue: the LLM; orange: the encoder; light: waiting; grey: collectives from launch to wait"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        "<style>text{font:13px sans-serif;fill:#444}.in{fill:#fff;text-anchor:middle;font-size:11px}</style>"
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/><text x="8" y="18">{escape(title)}</text>'
        f'<text x="8" y="36" style="font-size:11px">{escape(legend)}</text>{names}{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Runs the step over a shaped link and draws it."""
    comparison = COMPARISONS["tp"]
    with shaped_links(2, mbit_per_s=comparison.mbit_per_s) as namespaces:
        setup = prepare(comparison, namespaces, lambda name, done, total: None)
        before = partial(enter_link, namespaces=namespaces)
        times = run_pinned_ranks(record, 2, setup, before=before)[0]
    lines = [TimedLine(setup.plans[comparison.ours], *line_times) for line_times in times]
    TARGET.write_text(draw(busiest_layer(lines), comparison.mbit_per_s))


if __name__ == "__main__":
    main()
