"""Packs what every lane of a replay does, kernel by kernel, into a few bytes each for the script of the page.

Kernels repeat: differences of their times, and numbers of their names, deflate to about one byte a kernel.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimus.ir.op import Floats, Ints, Lane, OpKind, Schedule
from optimus.render.boxes import ENCODER, LLM, OPTIMIZER, TRAFFIC
from optimus.render.colours import CAUSE_FILLS, FILLS
from optimus.render.report_data import Scene
from optimus.schedule.bubbles import CAUSES, find_idle

TICK_S = 1e-7  # of times
SLACK_TICK_S = 1e-6
LANES = (Lane.COMPUTE, Lane.TP, Lane.DP, Lane.P2P)  # those that are drawn, by number
MAX_BYTES = 720_000  # of all scenes with their names; above it kernels are joined to ops, or left out
_FILL = {label: place for place, label in enumerate(FILLS)}
_WAITS_FOR = {"dp": "DP", "tp": "TP", "pp": "the pipeline"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Items:
    """What lanes do, as columns in order of row, lane and time."""

    row: Ints
    lane: Ints
    begin: Ints  # ticks
    end: Ints
    name: Ints  # in `names`
    microbatch: Ints  # -1: of none
    slack: Ints  # slack ticks; of idle time 0
    names: list[tuple[str, int]]  # words, and place in FILLS


def packed_scenes(scenes: Sequence[Scene]) -> tuple[list[dict[str, Any]], str]:
    """All scenes for the script, and what they hold: kernels, ops, or nothing where both are too many."""
    items = [_items(scene) for scene in scenes]
    for what, join in (("kernels", lambda each: each), ("ops", _joined)):
        found = [_packed(scene, join(each)) for scene, each in zip(scenes, items, strict=True)]
        if sum(len(json.dumps(each)) for each in found) <= MAX_BYTES:
            return found, what
    return [], ""


def _packed(scene: Scene, items: Items) -> dict[str, Any]:
    key = items.row * len(LANES) + items.lane
    opens = np.append(True, key[1:] != key[:-1])[: len(key)]
    before = np.where(opens, 0, np.append(0, items.end[:-1])[: len(key)])
    columns = (items.begin - before, items.end - items.begin, items.name, items.microbatch + 1, items.slack)
    counts = np.bincount(key, minlength=len(scene.devices) * len(LANES))
    raw = b"".join(_varints(column) for column in columns)
    return {
        "label": scene.label,
        "step": scene.timeline.step_s,
        "rows": [scene.schedule.device_name(device) for device in scene.devices],
        "counts": counts.tolist(),
        "names": [words for words, _ in items.names],
        "fills": [fill for _, fill in items.names],
        "data": base64.b64encode(zlib.compress(raw, 9)).decode(),
    }


def _varints(values: Ints) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    if values.min(initial=0) < 0:
        raise AssertionError("lanes play one op at a time")
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


def _items(scene: Scene) -> Items:
    """Ops of all lanes, and idle time of the compute lane with its cause."""
    schedule, timeline = scene.schedule, scene.timeline
    row_of: Ints = np.full(schedule.num_devices, -1, np.int64)
    row_of[list(scene.devices)] = np.arange(len(scene.devices))
    lane_of: Ints = np.full(len(Lane), -1, np.int64)
    lane_of[list(LANES)] = np.arange(len(LANES))
    shown = (row_of[schedule.device] >= 0) & (lane_of[schedule.lane] >= 0)
    ops = np.flatnonzero(shown & ~schedule.is_recv & (schedule.kind != OpKind.WAIT))
    number, names = _names(schedule, ops)
    idle = find_idle(schedule, timeline)
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
        "slack": (np.rint(scene.slack_s[ops] / SLACK_TICK_S).astype(np.int64), nothing),
    }
    joined = {name: np.concatenate(pair) for name, pair in columns.items()}
    some = np.flatnonzero(joined["end"] > joined["begin"])
    order = some[np.lexsort((joined["begin"][some], joined["lane"][some], joined["row"][some]))]
    return Items(
        **{name: column[order] for name, column in joined.items()},
        names=[*names, *zip(words, fills, strict=True)],
    )


def _ticks(times_s: Floats) -> Ints:
    return np.rint(times_s / TICK_S).astype(np.int64)


def _microbatches(schedule: Schedule, ops: Ints) -> Ints:
    of_none = np.isin(schedule.kind[ops], (OpKind.UNSHARD, OpKind.REDUCE_GRAD, OpKind.OPTIMIZER))
    return np.where(of_none, -1, schedule.microbatch[ops]).astype(np.int64)


def _names(schedule: Schedule, ops: Ints) -> tuple[Ints, list[tuple[str, int]]]:
    """`llm F layer 3 qkv, chunk 2` and its colour, each once; and the number of every op's."""
    label = np.full(len(ops), -1, np.int64) if schedule.label is None else schedule.label[ops]
    parts = (schedule.module[ops], schedule.kind[ops], schedule.chunk[ops], label, schedule.lane[ops])
    columns = np.stack([part.astype(np.int64) for part in parts], axis=1)
    if not len(ops):
        return np.zeros(0, np.int64), []
    distinct, number = np.unique(columns, axis=0, return_inverse=True)
    return number.ravel(), [_name(schedule, *row) for row in distinct.tolist()]


def _name(schedule: Schedule, module: int, kind: int, chunk: int, label: int, lane: int) -> tuple[str, int]:
    if kind == OpKind.OPTIMIZER:
        return "optimizer", _FILL[OPTIMIZER.label]
    whose = schedule.modules[module]
    what = schedule.labels[label] if label >= 0 else ""
    if kind in TRAFFIC:
        return f"{whose} {TRAFFIC[OpKind(kind)].label}, chunk {chunk}", _FILL[TRAFFIC[OpKind(kind)].label]
    if lane == Lane.P2P:
        return f"{whose} send, chunk {chunk}", _FILL["messages between stages"]
    if lane != Lane.COMPUTE:
        return f"{whose} collective, {what}, chunk {chunk}", _FILL["TP traffic"]
    fills = LLM if whose == "llm" else ENCODER
    fill = fills.get(OpKind(kind), OPTIMIZER)
    return f"{whose} {OpKind(kind).word} {what}, chunk {chunk}", _FILL[fill.label]


def _joined(items: Items) -> Items:
    """Neighbouring kernels of an op that look the same as one item; collectives of layers are left out."""
    kept = np.flatnonzero(items.lane != LANES.index(Lane.TP))
    row, lane, name, microbatch = (c[kept] for c in (items.row, items.lane, items.name, items.microbatch))
    begin, end = items.begin[kept], items.end[kept]
    fill = np.array([place for _, place in items.names])[name]
    alike = np.stack([row, lane, microbatch, fill])
    same = np.all(alike[:, 1:] == alike[:, :-1], axis=0) & (begin[1:] == end[:-1])
    same &= name[1:] < len(items.names) - len(CAUSES)  # every idle interval keeps its cause
    first = np.flatnonzero(np.append(True, ~same))
    last = np.append(first[1:], len(kept)) - 1
    return Items(
        row=row[first],
        lane=lane[first],
        begin=begin[first],
        end=end[last],
        name=name[first],
        microbatch=microbatch[first],
        slack=np.minimum.reduceat(items.slack[kept], first),
        names=items.names,
    )
