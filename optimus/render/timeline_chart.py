"""Draws stages over time: an SVG for paper, and packed data that the page's script zooms into.

Kernels repeat: differences of their times and indices of their names deflate to about one byte a kernel.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimus.ir.op import PARAMETER_TRAFFIC, Floats, Ints, Lane, OpKind, Schedule
from optimus.ir.ranks import LLM
from optimus.render.format_numbers import format_seconds
from optimus.render.markup import escape_markup, render_legend, render_note, render_section
from optimus.render.palette import CAUSE_FILLS, ENCODER_WORK, FILLS, LLM_WORK, OPTIMIZER, TRAFFIC
from optimus.render.report_data import TimelineData
from optimus.render.timeline_svg import (
    BOX_PX,
    STRIP_PX,
    WIDTH,
    TimeScale,
    render_device_row,
    render_time_axis,
)
from optimus.schedule.bubbles import CAUSES, find_idle_intervals

MAX_SVG_BYTES = 160_000
TICK_S = 1e-7  # resolution of times in the packed data
SLACK_TICK_S = 1e-6
LANES = (Lane.COMPUTE, Lane.TP, Lane.DP, Lane.P2P)  # drawn lanes; the packed data holds their index
MAX_PACKED_BYTES = 720_000  # of all timelines; above it kernels are merged into ops, or left out
_FILL = {label: place for place, label in enumerate(FILLS)}
_WAITS_FOR = {"dp": "DP", "tp": "TP", "pp": "the pipeline"}
HELP = (
    "Click the picture, then zoom with the wheel or + and -, move by dragging or with the arrow keys; "
    "0 shows the whole step. Below every compute lane: TP traffic, DP traffic, messages."
)


def _timeline_title(timelines: Sequence[TimelineData]) -> str:
    """Says `The encoder (0.217 s compute per GPU) makes the step 0.326 s longer: 2.444 s instead of ...`."""
    step_s = timelines[-1].timeline.step_s
    if len(timelines) == 1:
        return f"A step takes {format_seconds(step_s)} s"
    alone_s = timelines[0].timeline.step_s
    more = step_s - alone_s
    several = len(timelines[-1].schedule.modules) > 3  # `llm` and `all` are two of them
    who, make = ("encoders", "make") if several else ("encoder", "makes")
    work = f"The {who} ({format_seconds(_encoder_s(timelines[-1]))} s compute per GPU)"
    if more < 0.0005:
        return f"{work} {make} the step no longer: {format_seconds(alone_s)} s, as the LLM alone"
    return (
        f"{work} {make} the step {format_seconds(more)} s longer: "
        f"{format_seconds(step_s)} s instead of {format_seconds(alone_s)} s for the LLM alone"
    )


def _encoder_s(data: TimelineData) -> float:
    """Returns the encoder compute of the mean device, in seconds."""
    schedule, timeline = data.schedule, data.timeline
    is_encoder = np.array([name != LLM for name in schedule.modules])[schedule.module]
    compute = is_encoder & (schedule.lane == Lane.COMPUTE) & (schedule.kind != OpKind.OPTIMIZER)
    return float((timeline.finish_s - timeline.start_s)[compute].sum()) / schedule.num_devices


def render_timeline_section(timelines: Sequence[TimelineData]) -> str:
    """Returns the SVG for paper, then the canvas and the data of the zoomable chart."""
    packed, detail = pack_timelines(timelines)
    svg = _svg(timelines)
    live_fills = {place for timeline in packed for place in timeline["fills"]}
    words = [
        (f"f-{place}", label)
        for place, (label, (light, _)) in enumerate(FILLS.items())
        if place in live_fills or f"'{light}'" in svg
    ]
    replay = timelines[-1]
    remarks = ["Area is time: where ops are narrower than a pixel, they share it by their time."]
    if len(replay.devices) < replay.schedule.num_devices:
        count = replay.schedule.num_devices
        remarks.append(f"{len(replay.devices)} of {count} device classes are drawn: one of every stage.")
    if detail == "ops":
        remarks.append("The plan is large: ops are drawn, not their kernels; --trace has them all.")
    live = _live(packed, timelines) if detail else ""
    return render_section(
        "timeline",
        _timeline_title(timelines),
        render_legend(words),
        f"<div id='still' class='scroll'>{svg}</div>",
        live,
        render_note(" ".join(remarks)),
    )


def _svg(timelines: Sequence[TimelineData]) -> str:
    """Draws all timelines on one time scale, with coarser boxes until MAX_SVG_BYTES holds."""
    for box_px in BOX_PX:
        svg = _draw(timelines, box_px)
        if len(svg) <= MAX_SVG_BYTES:
            break
    return svg


def _draw(timelines: Sequence[TimelineData], box_px: float) -> str:
    scale = TimeScale(max(data.timeline.step_s for data in timelines))
    body, top = list[str](), 2
    for data in timelines:
        words = f"{data.label}: {format_seconds(data.timeline.step_s)} s"
        body.append(
            f"<text x='16' y='{top + 14}' font-size='14' font-weight='bold'>{escape_markup(words)}</text>"
        )
        top += 22
        height = max(9, min(16, 200 // len(data.rows)))
        for row in data.rows:
            body += render_device_row(row, scale, top, height, box_px)
            top += height + STRIP_PX + 3
        body += render_time_axis(scale, data.timeline.step_s, top)
        top += 34
    size = f"viewBox='0 0 {WIDTH} {top}' width='{WIDTH}' height='{top}'"
    return "\n".join([f"<svg {size} role='img' aria-label='stages over time'>", *body, "</svg>"])


def _live(packed: list[dict[str, Any]], timelines: Sequence[TimelineData]) -> str:
    page_data = {
        "tick": TICK_S,
        "slackTick": SLACK_TICK_S,
        "lanes": [lane.name.lower() for lane in LANES],
        "light": [light for light, _ in FILLS.values()],
        "dark": [dark for _, dark in FILLS.values()],
        "slot": _find_filled_tp_gap(timelines[-1]),
        "scenes": packed,
    }
    # Inside a script only `</` and `<!--` could end it.
    written = json.dumps(page_data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    buttons = "".join(
        f"<button type='button' data-do='{what}'>{words}</button>"
        for what, words in (
            ("in", "zoom in"),
            ("out", "zoom out"),
            ("all", "whole step"),
            *([("slot", "a filled TP gap")] if page_data["slot"] else []),
        )
    )
    return (
        f"<div id='live' hidden><div class='tools'>{buttons}<span id='span'></span></div>"
        "<canvas id='stage' tabindex='0' role='img' aria-label='stages over time, zoomable'></canvas>"
        f"<div id='tip' hidden></div>{render_note(HELP)}</div>"
        f"<script type='application/json' id='data'>{written}</script>"
    )


def _find_filled_tp_gap(data: TimelineData) -> list[float] | None:
    """Returns begin, end and row of a short window around encoder kernels under TP traffic of the LLM."""
    schedule, timeline = data.schedule, data.timeline
    llm = schedule.modules.index(LLM)
    for row, device in enumerate(data.devices):
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
        hidden = np.flatnonzero((behind >= 0) & inside)
        if len(hidden):
            gap = traffic[behind[hidden[len(hidden) // 2]]]
            begin, end = float(timeline.start_s[gap]), float(timeline.finish_s[gap])
            return [max(0.0, begin - 4 * (end - begin)), end + 4 * (end - begin), row]
    return None


# ---------------------------------------------------------------------------- data for the script


@dataclass(frozen=True, kw_only=True, eq=False)
class _LaneItems:
    """Kernels and idle intervals of all lanes, as columns in order of row, lane and time."""

    row: Ints
    lane: Ints
    begin: Ints  # in units of TICK_S
    end: Ints
    name: Ints  # index into `names`
    microbatch: Ints  # -1: belongs to no microbatch
    slack: Ints  # in units of SLACK_TICK_S; 0 for idle time
    names: list[tuple[str, int]]  # label, and index into FILLS


def pack_timelines(timelines: Sequence[TimelineData]) -> tuple[list[dict[str, Any]], str]:
    """Packs timelines for the script; also returns the detail: `kernels`, `ops`, or empty if too large."""
    items = [_items(data) for data in timelines]
    for detail, merge in (("kernels", lambda kernels: kernels), ("ops", _merge_kernels)):
        packed = [_pack(data, merge(kernels)) for data, kernels in zip(timelines, items, strict=True)]
        if sum(len(json.dumps(timeline)) for timeline in packed) <= MAX_PACKED_BYTES:
            return packed, detail
    return [], ""


def _pack(data: TimelineData, items: _LaneItems) -> dict[str, Any]:
    key = items.row * len(LANES) + items.lane
    opens = np.append(True, key[1:] != key[:-1])[: len(key)]
    before = np.where(opens, 0, np.append(0, items.end[:-1])[: len(key)])
    columns = (items.begin - before, items.end - items.begin, items.name, items.microbatch + 1, items.slack)
    counts = np.bincount(key, minlength=len(data.devices) * len(LANES))
    raw = b"".join(_varints(column) for column in columns)
    return {
        "label": data.label,
        "step": data.timeline.step_s,
        "rows": [data.schedule.device_name(device) for device in data.devices],
        "counts": counts.tolist(),
        "names": [words for words, _ in items.names],
        "fills": [fill for _, fill in items.names],
        "data": base64.b64encode(zlib.compress(raw, 9)).decode(),
    }


def _varints(values: Ints) -> bytes:
    """Encodes seven bits a byte, the lowest first; the highest bit says that more follow."""
    if values.min(initial=0) < 0:
        raise AssertionError("a lane runs one op at a time")
    rest = values.astype(np.uint64)
    columns: list[Ints] = []
    while not columns or rest.any():
        columns.append((rest & np.uint64(127)).astype(np.uint8))
        rest >>= np.uint64(7)
    digits = np.stack(columns, axis=1)
    used = digits.shape[1] - np.argmax(digits[:, ::-1] != 0, axis=1)
    used[~digits.any(axis=1)] = 1
    place = np.arange(digits.shape[1])[None, :]
    digits |= np.where(place < used[:, None] - 1, 128, 0).astype(np.uint8)
    return bytes(digits[place < used[:, None]].tobytes())


# ---------------------------------------------------------------------------- what lanes do


def _items(data: TimelineData) -> _LaneItems:
    """Returns the ops of all lanes, and the idle time of the compute lane with its cause."""
    schedule, timeline = data.schedule, data.timeline
    row_of: Ints = np.full(schedule.num_devices, -1, np.int64)
    row_of[list(data.devices)] = np.arange(len(data.devices))
    lane_of: Ints = np.full(len(Lane), -1, np.int64)
    lane_of[list(LANES)] = np.arange(len(LANES))
    shown = (row_of[schedule.device] >= 0) & (lane_of[schedule.lane] >= 0)
    ops = np.flatnonzero(shown & ~schedule.is_recv & (schedule.kind != OpKind.WAIT))
    number, names = _label_ops(schedule, ops)
    idle = find_idle_intervals(schedule, timeline)
    gaps = np.flatnonzero(row_of[idle.device] >= 0)
    words = [f"idle: {cause}, waits for {_WAITS_FOR[cause.partition('_')[0]]}" for cause in CAUSES]
    fills = [_FILL[label] for label in CAUSE_FILLS]
    nothing = np.zeros(len(gaps), np.int64)
    columns = {
        "row": (row_of[schedule.device[ops]], row_of[idle.device[gaps]]),
        "lane": (lane_of[schedule.lane[ops]], nothing),
        "begin": (_ticks(timeline.start_s[ops]), _ticks(idle.begin_s[gaps])),
        "end": (_ticks(timeline.finish_s[ops]), _ticks(idle.end_s[gaps])),
        "name": (number, len(names) + idle.cause[gaps].astype(np.int64)),
        "microbatch": (_microbatches(schedule, ops), nothing - 1),
        "slack": (np.rint(data.slack_s[ops] / SLACK_TICK_S).astype(np.int64), nothing),
    }
    joined = {name: np.concatenate(pair) for name, pair in columns.items()}
    nonempty = np.flatnonzero(joined["end"] > joined["begin"])
    keys = [joined[name][nonempty] for name in ("begin", "lane", "row")]
    order = nonempty[np.lexsort(keys)]
    return _LaneItems(
        **{name: column[order] for name, column in joined.items()},
        names=[*names, *zip(words, fills, strict=True)],
    )


def _ticks(times_s: Floats) -> Ints:
    return np.rint(times_s / TICK_S).astype(np.int64)


def _microbatches(schedule: Schedule, ops: Ints) -> Ints:
    of_none = np.isin(schedule.kind[ops], (*PARAMETER_TRAFFIC, OpKind.OPTIMIZER))
    return np.where(of_none, -1, schedule.microbatch[ops]).astype(np.int64)


def _label_ops(schedule: Schedule, ops: Ints) -> tuple[Ints, list[tuple[str, int]]]:
    """Returns every op's index into labels, and the labels (`llm F layer 3 qkv, chunk 2`) with colours."""
    label = np.full(len(ops), -1, np.int64) if schedule.label is None else schedule.label[ops]
    parts = (schedule.module[ops], schedule.kind[ops], schedule.chunk[ops], label, schedule.lane[ops])
    columns = np.stack([part.astype(np.int64) for part in parts], axis=1)
    if not len(ops):
        return np.zeros(0, np.int64), []
    distinct, number = np.unique(columns, axis=0, return_inverse=True)
    return number.ravel(), [_label_op(schedule, *row) for row in distinct.tolist()]


def _label_op(
    schedule: Schedule, module: int, kind: int, chunk: int, label: int, lane: int
) -> tuple[str, int]:
    if kind == OpKind.OPTIMIZER:
        return "optimizer", _FILL[OPTIMIZER.label]
    module_name = schedule.modules[module]
    kernel = schedule.labels[label] if label >= 0 else ""
    if kind in TRAFFIC:
        return f"{module_name} {TRAFFIC[OpKind(kind)].label}, chunk {chunk}", _FILL[
            TRAFFIC[OpKind(kind)].label
        ]
    if lane == Lane.P2P:
        return f"{module_name} send, chunk {chunk}", _FILL["messages between stages"]
    if lane != Lane.COMPUTE:
        return f"{module_name} collective, {kernel}, chunk {chunk}", _FILL["TP traffic"]
    fills = LLM_WORK if module_name == "llm" else ENCODER_WORK
    fill = fills.get(OpKind(kind), OPTIMIZER)
    return f"{module_name} {OpKind(kind).word} {kernel}, chunk {chunk}", _FILL[fill.label]


def _merge_kernels(items: _LaneItems) -> _LaneItems:
    """Merges neighbouring kernels of an op that look the same; drops collectives of layers."""
    kept = np.flatnonzero(items.lane != LANES.index(Lane.TP))
    row, lane, name, microbatch = (c[kept] for c in (items.row, items.lane, items.name, items.microbatch))
    begin, end = items.begin[kept], items.end[kept]
    fill = np.array([place for _, place in items.names])[name]
    alike = np.stack([row, lane, microbatch, fill])
    same = np.all(alike[:, 1:] == alike[:, :-1], axis=0) & (begin[1:] == end[:-1])
    same &= name[1:] < len(items.names) - len(CAUSES)  # every idle interval keeps its cause
    first = np.flatnonzero(np.append(True, ~same))
    last = np.append(first[1:], len(kept)) - 1
    return _LaneItems(
        row=row[first],
        lane=lane[first],
        begin=begin[first],
        end=end[last],
        name=name[first],
        microbatch=microbatch[first],
        slack=np.minimum.reduceat(items.slack[kept], first),
        names=items.names,
    )
