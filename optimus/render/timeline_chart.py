"""Draws stages over time, before and after: an SVG for paper, and data that the script zooms into."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from optimus.ir.op import Lane, OpKind
from optimus.ir.ranks import LLM
from optimus.render.colours import FILLS
from optimus.render.markup import key, note, section
from optimus.render.pack_timeline import LANES, SLACK_TICK_S, TICK_S, packed_scenes
from optimus.render.picture import BOX_PX, STRIP_PX, WIDTH, Scale, axis_svg, clean, row_svg
from optimus.render.report_data import Scene
from optimus.render.units import seconds

MAX_SVG_BYTES = 160_000
HELP = (
    "Click the picture, then zoom with the wheel or + and -, move by dragging or with the arrow keys; "
    "0 shows the whole step. Below every compute lane: TP traffic, DP traffic, messages."
)


def timeline_title(scenes: Sequence[Scene]) -> str:
    """`The encoder (0.217 s compute per GPU) makes the step 0.326 s longer: 2.444 s instead of ...`."""
    step_s = scenes[-1].timeline.step_s
    if len(scenes) == 1:
        return f"A step takes {seconds(step_s)} s"
    alone_s = scenes[0].timeline.step_s
    more = step_s - alone_s
    several = len(scenes[-1].schedule.modules) > 3  # the LLM and what is of all modules are two
    who, make = ("encoders", "make") if several else ("encoder", "makes")
    work = f"The {who} ({seconds(_encoder_s(scenes[-1]))} s compute per GPU)"
    if more < 0.0005:
        return f"{work} {make} the step no longer: {seconds(alone_s)} s, as the LLM alone"
    return (
        f"{work} {make} the step {seconds(more)} s longer: "
        f"{seconds(step_s)} s instead of {seconds(alone_s)} s for the LLM alone"
    )


def _encoder_s(scene: Scene) -> float:
    """Encoder compute of the mean device, as replayed."""
    schedule, timeline = scene.schedule, scene.timeline
    other = np.array([name != LLM for name in schedule.modules])[schedule.module]
    mine = other & (schedule.lane == Lane.COMPUTE) & (schedule.kind != OpKind.OPTIMIZER)
    return float((timeline.finish_s - timeline.start_s)[mine].sum()) / schedule.num_devices


def timeline_section(scenes: Sequence[Scene]) -> str:
    """The picture for paper, then the place and the data of the live one."""
    data, what = packed_scenes(scenes)
    svg = _svg(scenes)
    live_fills = {place for each in data for place in each["fills"]}
    words = [
        (f"f-{place}", label)
        for place, (label, (light, _)) in enumerate(FILLS.items())
        if place in live_fills or f"'{light}'" in svg
    ]
    scene = scenes[-1]
    remarks = ["Area is time: where ops are narrower than a pixel, they share it by their time."]
    if len(scene.devices) < scene.schedule.num_devices:
        count = scene.schedule.num_devices
        remarks.append(f"{len(scene.devices)} of {count} device classes are drawn: one of every stage.")
    if what == "ops":
        remarks.append("The plan is large: ops are drawn, not their kernels; --trace has them all.")
    live = "" if not what else _live(data, scenes)
    return section(
        "timeline",
        timeline_title(scenes),
        key(words),
        f"<div id='still' class='scroll'>{svg}</div>",
        live,
        note(" ".join(remarks)),
    )


def _svg(scenes: Sequence[Scene]) -> str:
    """All scenes on one time scale, boxes as coarse as the bytes ask for."""
    for box_px in BOX_PX:
        found = _drawn(scenes, box_px)
        if len(found) <= MAX_SVG_BYTES:
            break
    return found


def _drawn(scenes: Sequence[Scene], box_px: float) -> str:
    scale = Scale(max(scene.timeline.step_s for scene in scenes))
    body, top = list[str](), 2
    for scene in scenes:
        words = f"{scene.label}: {seconds(scene.timeline.step_s)} s"
        body.append(f"<text x='16' y='{top + 14}' font-size='14' font-weight='bold'>{clean(words)}</text>")
        top += 22
        height = max(9, min(16, 200 // len(scene.rows)))
        for row in scene.rows:
            body += row_svg(row, scale, top, height, box_px)
            top += height + STRIP_PX + 3
        body += axis_svg(scale, scene.timeline.step_s, top)
        top += 34
    size = f"viewBox='0 0 {WIDTH} {top}' width='{WIDTH}' height='{top}'"
    return "\n".join([f"<svg {size} role='img' aria-label='stages over time'>", *body, "</svg>"])


def _live(data: list[dict[str, Any]], scenes: Sequence[Scene]) -> str:
    found = {
        "tick": TICK_S,
        "slackTick": SLACK_TICK_S,
        "lanes": [lane.name.lower() for lane in LANES],
        "light": [light for light, _ in FILLS.values()],
        "dark": [dark for _, dark in FILLS.values()],
        "slot": slot_window(scenes[-1]),
        "scenes": data,
    }
    # Inside a script only `</` and `<!--` could end it.
    written = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    buttons = "".join(
        f"<button type='button' data-do='{what}'>{words}</button>"
        for what, words in (
            ("in", "zoom in"),
            ("out", "zoom out"),
            ("all", "whole step"),
            *([("slot", "a filled TP gap")] if found["slot"] else []),
        )
    )
    return (
        f"<div id='live' hidden><div class='tools'>{buttons}<span id='span'></span></div>"
        "<canvas id='stage' tabindex='0' role='img' aria-label='stages over time, zoomable'></canvas>"
        f"<div id='tip' hidden></div>{note(HELP)}</div>"
        f"<script type='application/json' id='data'>{written}</script>"
    )


def slot_window(scene: Scene) -> list[float] | None:
    """Begin, end and row of a short window around encoder kernels under TP traffic of the LLM."""
    schedule, timeline = scene.schedule, scene.timeline
    llm = schedule.modules.index(LLM)
    for row, device in enumerate(scene.devices):
        here = schedule.device == device
        traffic = np.flatnonzero(here & (schedule.lane == Lane.TP) & (schedule.module == llm))
        work = np.flatnonzero(
            here
            & (schedule.lane == Lane.COMPUTE)
            & (schedule.module != llm)
            & (schedule.kind != OpKind.OPTIMIZER)
        )
        work = work[timeline.finish_s[work] > timeline.start_s[work]]
        if not len(traffic) or not len(work):
            continue
        traffic = traffic[np.argsort(timeline.start_s[traffic], kind="stable")]
        behind = np.searchsorted(timeline.start_s[traffic], timeline.start_s[work], side="right") - 1
        inside = timeline.finish_s[traffic[behind]] >= timeline.finish_s[work] - 1e-9
        found = np.flatnonzero((behind >= 0) & inside)
        if len(found):
            gap = traffic[behind[found[len(found) // 2]]]
            begin, end = float(timeline.start_s[gap]), float(timeline.finish_s[gap])
            return [max(0.0, begin - 4 * (end - begin)), end + 4 * (end - begin), row]
    return None
