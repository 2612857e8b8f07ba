"""Writes timelines as Chrome traces in the shape of PyTorch's profiler, for Perfetto and trace analysers.

Every device is a process, every lane a thread that is numbered as a CUDA stream. Perfetto colours an event by
its name without the digits, so the name begins with module and kind; chrome://tracing reads `cname`.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from optimus.ir.files import open_atomically
from optimus.ir.op import SENDS, Communicator, Lane, OpKind, Schedule, ScheduledOp
from optimus.schedule.simulator import Timeline

STREAM = {Lane.COMPUTE: 7, Lane.TP: 20, Lane.DP: 24, Lane.P2P: 28, Lane.HOST: 32}
PIDS_PER_SYSTEM = 1000

# Functions of NCCL's kernels. A schedule does not say which collective a layer runs.
NCCL = {OpKind.UNSHARD: "AllGather", OpKind.UNSHARD_B: "AllGather", OpKind.REDUCE_GRAD: "ReduceScatter"}
NCCL |= dict.fromkeys(SENDS, "SendRecv")
ANY_COLLECTIVE = "Collective"

# Names of chrome://tracing; as in the pictures, encoders are orange and the LLM is blue.
LLM_COLOURS = ("thread_state_runnable", "rail_response")  # forward, backward
ENCODER_COLOURS = ("rail_idle", "bad")
TRAFFIC_COLOUR, OTHER_COLOUR = "generic_work", "grey"

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Process:
    """One device of one system."""

    pid: int
    name: str
    device: int
    schedule: Schedule
    timeline: Timeline


def write_trace(systems: Mapping[str, tuple[Schedule, Timeline]], path: Path) -> None:
    """Writes all systems to one file, each a group of processes; gzipped if the name ends in .gz.

    After the metadata, one event per line; the same bytes every time.
    """
    processes = [
        _Process(
            pid=PIDS_PER_SYSTEM * number + device,
            name=f"{name} {schedule.device_name(device)}",
            device=device,
            schedule=schedule,
            timeline=timeline,
        )
        for number, (name, (schedule, timeline)) in enumerate(systems.items())
        for device in range(schedule.num_devices)
    ]
    head = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": len(processes)},
        "deviceProperties": [{"id": process.pid, "name": process.name} for process in processes],
        "displayTimeUnit": "ms",
        "otherData": {"source": "simulated by Optimus"},
    }
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    events = chain.from_iterable(chain(_labels(process), _events(process)) for process in processes)
    with _open(path) as out:
        out.write(f'{json.dumps(head)[:-1]}, "traceEvents": [')
        for place, event in enumerate(events):
            out.write(f"{',' if place else ''}\n{encode(event)}")
        out.write("\n]}\n")


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    with open_atomically(path) as raw:
        packed = path.suffix == ".gz"
        binary = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) if packed else raw
        text = io.TextIOWrapper(binary, encoding="utf-8", newline="\n")
        yield text
        text.flush()
        text.detach()
        if packed:
            binary.close()  # not `raw`, which is open until it has its name


def _labels(process: _Process) -> Iterator[Event]:
    """Yields names and order of a process and of the threads that have events."""
    here = process.schedule.device == process.device
    lanes = [lane for lane in Lane if np.any(process.schedule.lane[here] == lane)]
    yield _label("process_name", process.pid, 0, name=process.name)
    yield _label("process_sort_index", process.pid, 0, sort_index=process.pid)
    for lane in lanes:
        name = "host" if lane == Lane.HOST else f"stream {STREAM[lane]} {lane.name.lower()}"
        yield _label("thread_name", process.pid, STREAM[lane], name=name)
        yield _label("thread_sort_index", process.pid, STREAM[lane], sort_index=STREAM[lane])


def _label(what: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"ph": "M", "name": what, "ts": 0.0, "pid": pid, "tid": tid, "args": args}


def _events(process: _Process) -> Iterator[Event]:
    """Yields the ops of a device in order of time, except those shorter than a nanosecond.

    Receives are left out: they occupy no lane and repeat the send on the other device.
    """
    schedule, timeline = process.schedule, process.timeline
    begin, end = (np.rint(1e9 * times).astype(np.int64) for times in (timeline.start_s, timeline.finish_s))
    here = (schedule.device == process.device) & ~schedule.is_recv
    shown = np.flatnonzero(here & (end > begin))
    shown = shown[np.argsort(begin[shown], kind="stable")]
    for place, begin_ns, end_ns in zip(
        shown.tolist(), begin[shown].tolist(), end[shown].tolist(), strict=True
    ):
        yield _event(process.pid, schedule[place], begin_ns, end_ns)


def _event(pid: int, op: ScheduledOp, begin_ns: int, end_ns: int) -> Event:
    on_host = op.lane == Lane.HOST
    stream = STREAM[op.lane]
    args: dict[str, Any] = {}
    if not on_host:
        args = {"device": op.device, "stream": stream, "correlation": op.id}
    if op.lane not in (Lane.COMPUTE, Lane.HOST):
        args |= {"Process Group Description": Communicator(op.communicator).name.lower()}
    return {
        "ph": "X",
        "cat": "cpu_op" if on_host else "kernel",
        "name": _name(op),
        "pid": pid,
        "tid": stream,
        "ts": begin_ns / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
        "cname": _colour(op),
        "args": {
            **args,
            "op": op.id,
            "module": op.module,
            "kind": op.kind.word,
            "chunk": op.chunk,
            "microbatch": op.microbatch,
            "segment": op.segment,
            "bytes": op.bytes,
        },
    }


def _name(op: ScheduledOp) -> str:
    """Returns `vision F layer 3 qkv chunk 0 mb 12`; traffic begins with the name of an NCCL kernel."""
    if op.kind == OpKind.OPTIMIZER:
        return "optimizer"
    module = "" if op.module == "all" else f"{op.module} "
    kernel = op.label or f"segment {op.segment}"
    name = f"{module}{op.kind.word} {kernel} chunk {op.chunk} mb {op.microbatch}"
    if op.lane in (Lane.COMPUTE, Lane.HOST):
        return name
    # NCCL runs an all-to-all as sends and receives.
    all_to_all = op.communicator in (Communicator.EP, Communicator.DEAL)
    function = "SendRecv" if all_to_all else NCCL.get(op.kind, _collective(op.label))
    group = Communicator(op.communicator).name
    return f"ncclDevKernel_{function}_{group} {name}"


def _collective(label: str) -> str:
    """Returns the NCCL function of a collective inside a layer, as far as its label tells."""
    known = {"gather": "AllGather", "scatter": "ReduceScatter"}
    return next((function for word, function in known.items() if word in label), ANY_COLLECTIVE)


def _colour(op: ScheduledOp) -> str:
    if op.lane != Lane.COMPUTE:
        return TRAFFIC_COLOUR
    if op.module == "all":
        return OTHER_COLOUR
    colours = LLM_COLOURS if op.module == "llm" else ENCODER_COLOURS
    return colours[op.kind not in (OpKind.FORWARD, OpKind.RECOMPUTE)]
