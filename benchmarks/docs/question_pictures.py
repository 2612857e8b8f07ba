"""Draws the figures of docs/questions.md as SVG, each under a title that says what it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.docs.pages import Figures
from benchmarks.docs.question_figures import MULTI, RATIOS, STRONG, TOKENS, gain, simpler
from optimus.render.markup import FAINT, INK, render_svg_text, render_titled_svg
from optimus.render.palette import PARTS
from optimus.render.sweep_chart import FLOOR, OURS, SIMPLER
from optimus.schedule.bubbles import CAUSES

WIDTH, LEFT = 1000, 84
MATTERS = 0.02  # a gain below this decides nothing
STRONGEST = 0.12  # of a colour
REGIMES = ("filling wins", "neither matters", "a simpler system wins", "filling does not fit")
GREY = "#ededed"
BARS = {"optimus": OURS, "paper": "#56b4e9", "balanced-best": SIMPLER, "three-phase": "#cc79a7"}


def regime(point: Figures) -> str:
    """Returns the regime of a point of the sweep."""
    if "optimus" not in point["systems"]:
        return REGIMES[3]
    gained = round(gain(point), 3)  # as it is shown
    if gained >= MATTERS:
        return REGIMES[0]
    return REGIMES[1] if gained > -MATTERS else REGIMES[2]


def sweep_map(stored: Figures) -> str:
    """Draws the gain of filling, and its memory, by size of encoder and of images."""
    points = {(r, t): stored[f"sweep {r:g} {t} default"] for r in RATIOS for t in TOKENS}
    count = {name: sum(regime(point) == name for point in points.values()) for name in REGIMES}
    most = max(gain(point) for point in points.values() if "optimus" in point["systems"])
    title = (
        f"Filling wins at {count[REGIMES[0]]} of {len(points)} points, by up to {100 * most:.0f} %; "
        f"a simpler system at {count[REGIMES[2]]}; at {count[REGIMES[1]]} neither matters"
    )
    note = "GPT-175B, 512 H100, dp8 pp8 tp8, 128 sequences of 8,192 tokens; preset default, simulated"
    body = [
        render_svg_text(LEFT, 70, "faster than the best simpler system by, %", size=14, weight="bold"),
        *_cells(points, LEFT, _gain_cell),
        render_svg_text(LEFT + 460, 70, "memory beside that system's, GB", size=14, weight="bold"),
        *_cells(points, LEFT + 460, _memory_cell),
        render_svg_text(
            16, 468, f"{note}. b balanced-best, t three-phase, f fsdp: who is next.", size=12, colour=FAINT
        ),
    ]
    return render_titled_svg(title, body, width=WIDTH, height=480)


Cell = Callable[[Figures], tuple[str, str, str]]  # words, words below them, colour
SIDE, HIGH = 62, 54


def _cells(points: dict[tuple[float, int], Figures], left: int, draw: Cell) -> Iterator[str]:
    """Draws a map: encoders become larger to the right, images upwards."""
    for column, ratio in enumerate(RATIOS):
        for row, tokens in enumerate(reversed(TOKENS)):
            words, below, colour = draw(points[ratio, tokens])
            x, y = left + column * SIDE, 84 + row * HIGH
            yield f"<rect x='{x}' y='{y}' width='{SIDE - 2}' height='{HIGH - 2}' fill='{colour}'/>"
            yield render_svg_text(x + SIDE / 2 - 1, y + 25, words, size=14, anchor="middle")
            yield render_svg_text(x + SIDE / 2 - 1, y + 42, below, size=11, anchor="middle", colour=INK)
    bottom = 84 + len(TOKENS) * HIGH
    for column, ratio in enumerate(RATIOS):
        yield render_svg_text(
            left + column * SIDE + SIDE / 2, bottom + 16, f"{ratio:g}", size=12, anchor="middle"
        )
    yield render_svg_text(left, bottom + 34, "encoder's parameters over the LLM's", size=12, colour=FAINT)
    for row, tokens in enumerate(reversed(TOKENS)):
        yield render_svg_text(left - 6, 84 + row * HIGH + 30, f"{tokens:,}", size=12, anchor="end")
    yield render_svg_text(left - 6, 78, "tokens", size=12, anchor="end", colour=FAINT)


def _gain_cell(point: Figures) -> tuple[str, str, str]:
    name = simpler(point)[0][0]
    if "optimus" not in point["systems"]:
        return "no room", name, mixed(SIMPLER, 1.0)
    gained = round(gain(point), 3) + 0.0  # never -0.0
    strength = min(1.0, abs(gained) / STRONGEST)
    colour = GREY if abs(gained) < MATTERS else mixed(OURS if gained > 0 else SIMPLER, 0.25 + 0.75 * strength)
    return f"{100 * gained:+.1f}", name, colour


def _memory_cell(point: Figures) -> tuple[str, str, str]:
    other = simpler(point)[1]["peak_gb"]
    if "optimus" not in point["systems"]:
        return "no room", f"{other:.0f}", GREY
    ours = point["systems"]["optimus"]["peak_gb"]
    more = ours - other
    colour = mixed(SIMPLER if more > 0 else OURS, min(1.0, abs(more) / 30))
    return f"{round(more):+d}", f"{ours:.0f} / {other:.0f}", colour


def mixed(colour: str, strength: float) -> str:
    """Returns a colour light enough for text on it."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - 0.75 * strength * (255 - part)):02x}" for part in parts)


def bubble_bars(stored: Figures) -> str:
    """Draws the breakdown of a step before and after filling, at three sizes of cluster."""
    cases = {(p, gpus): stored[f"bubbles {gpus} {p}"] for p in ("default", "paper") for gpus in STRONG}
    shares = {p: [_used(cases[p, gpus]) for gpus in STRONG] for p in ("default", "paper")}
    first, second = (f"{100 * min(s):.0f} to {100 * max(s):.0f} %" for s in shares.values())
    title = f"Encoders use {first} of the LLM's idle time under preset default, {second} under paper"
    title += "; seconds of the mean GPU by what they go to: ViT-22B + GPT-175B, 1,536 sequences a step"
    longest = max(case["after"]["step_s"] for case in cases.values())
    body, y = [], 74
    for (name, gpus), case in cases.items():
        for when, words in (("before", "LLM alone"), ("after", "with encoders")):
            label = f"{gpus}, {name}, {words}" if when == "before" else words
            body.append(render_svg_text(252, y + 14, label, size=12, anchor="end"))
            body += _bar(case[when], y, longest)
            y += 20
        y += 12
    place = 16
    for words, colour, _ in PARTS.values():
        body.append(f"<rect x='{place}' y='{y + 6}' width='11' height='11' fill='{colour}'/>")
        body.append(render_svg_text(place + 15, y + 16, words.removeprefix("idle: "), size=12))
        place += 40 + round(6.2 * len(words.removeprefix("idle: ")))
    return render_titled_svg(title, body, width=WIDTH, height=y + 34)


def _used(case: Figures) -> float:
    """Returns the share of the LLM's idle time that encoders use."""
    idle = [sum(case[w][part] for part in CAUSES) for w in ("before", "after")]
    return float((idle[0] - idle[1]) / idle[0])


def _bar(seconds: Figures, y: int, longest_s: float) -> Iterator[str]:
    x, scale = 260.0, 660 / longest_s
    for part, (_, colour, _) in PARTS.items():
        wide = scale * seconds["encoders" if part == "encoder" else part]
        yield f"<rect x='{x:.2f}' y='{y}' width='{wide:.2f}' height='18' fill='{colour}'/>"
        x += wide
    yield render_svg_text(x + 6, y + 14, f"{seconds['step_s']:.2f} s", size=12)


def encoder_bars(stored: Figures) -> str:
    """Draws systems of jobs with several encoders, over the floor."""
    cases = {name: stored[f"encoders {name} default"] for name in MULTI}
    over = {name: {s: system["step_s"] / case["floor_s"] for s, system in case["systems"].items()}
            for name, case in cases.items()}  # fmt: skip
    first = sum(min(each[s] for s in BARS if s in each) == each.get("optimus") for each in over.values())
    title = f"With several encoders, optimus is the fastest of four systems in {first} of {len(over)} jobs"
    title += "; what a step takes longer than the LLM alone (floor), preset default"
    body, y = [], 74
    most = max(value for each in over.values() for s, value in each.items() if s in BARS)
    for name, each in over.items():
        body.append(render_svg_text(212, y + 38, name, size=13, anchor="end", weight="bold"))
        for system, colour in BARS.items():
            if system in each:
                wide = 520 * (each[system] - 1) / (most - 1)
                body.append(f"<rect x='220' y='{y}' width='{max(wide, 1):.1f}' height='15' fill='{colour}'/>")
                words = f"{system} {each[system]:.3f}"
                body.append(render_svg_text(226 + max(wide, 1), y + 12, words, size=12))
            y += 17
        y += 12
    body.append(f"<path stroke='{FLOOR}' d='M220 66V{y - 8}'/>")
    return render_titled_svg(title, body, width=WIDTH, height=y + 4)


PICTURES = {
    "questions-encoders.svg": encoder_bars,
    "questions-bubbles.svg": bubble_bars,
    "questions-sweep.svg": sweep_map,
}
