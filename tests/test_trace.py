"""The trace of a timeline: every op once, in a file that Perfetto shows and trace analysers understand."""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from busy_time import busy_s

from optimus.cli import run
from optimus.cli.flags import OK, USER_ERROR
from optimus.errors import UserError
from optimus.ir.op import Communicator, Lane, OpKind, Schedule
from optimus.job.read import find_job
from optimus.planner.compare import compare_systems
from optimus.render.trace import STREAM, write_trace
from optimus.schedule.schedule_builder import (
    KERNEL_ROW,
    KernelGraph,
    ScheduleBuilder,
    make_single_kernel_graph,
)
from optimus.schedule.simulator import Timeline, simulate_schedule

Event = dict[str, Any]
Played = tuple[Schedule, Timeline]
SMALL = "paper/small-a100"
AT = "--layout", "llm=pp1,tp4"  # the search over layouts has tests of its own
HTA_COMMUNICATION = re.compile(r"^nccl.*Kernel")  # as hta.utils.utils has them
HTA_NOT_COMPUTE = re.compile(r"(^nccl.*Kernel)|(.*(Memcpy)|(Memset))|(.*Sync)")


@functools.cache
def two_devices() -> Played:
    """An encoder, then the LLM on the next device; every lane, and an op that takes no time."""
    builder = ScheduleBuilder(("vision", "llm"), 2)
    previous: list[int] = []
    for device, module in enumerate((0, 1)):
        rows = [
            (3e-3, 0, 0, OpKind.FORWARD, module, Lane.COMPUTE, Communicator.NONE),
            (1e-3, 64, 1, OpKind.FORWARD, module, Lane.TP, Communicator.TP),
            (2e-3, 64, 2, OpKind.FORWARD, module, Lane.DP, Communicator.EP),
            (5e-3 / 3, 0, 3, OpKind.BACKWARD, module, Lane.COMPUTE, Communicator.NONE),
        ]
        edges = np.array([(1, 0), (2, 1), (3, 2)])
        layer = KernelGraph(rows=np.array(rows, KERNEL_ROW), edges=edges, entries=(0,), exits=(3,))
        gathered = builder.add(
            make_single_kernel_graph(OpKind.UNSHARD, Lane.DP, 4e-3, size_bytes=1e6), device=device
        )
        slack = builder.add(make_single_kernel_graph(OpKind.UNSHARD, Lane.HOST, 1e-3), device=device)
        waits = [gathered, slack, *previous]
        ran = builder.add(layer, device=device, chunk=1, microbatch=5, after=waits)
        previous = [
            builder.add(make_single_kernel_graph(OpKind.SEND_F, Lane.P2P, 1e-3), device=device, after=[ran])
        ]
        builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 0.0), device=device, after=[ran])
        reduced = builder.add(
            make_single_kernel_graph(OpKind.REDUCE_GRAD, Lane.DP, 4e-3), device=device, after=[ran]
        )
        builder.add(
            make_single_kernel_graph(OpKind.OPTIMIZER, Lane.COMPUTE, 1e-3), device=device, after=[reduced]
        )
    schedule = builder.build()
    return schedule, simulate_schedule(schedule)


@functools.cache
def small_job() -> Played:
    system = compare_systems(find_job(SMALL, layouts=[AT[1]]), names=["balanced-best"]).systems[
        "balanced-best"
    ]
    return system.schedule, system.timeline


def read(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    return found


def ops_of(trace: dict[str, Any]) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def nanoseconds(microseconds: float) -> int:
    return round(1000 * microseconds)


@pytest.mark.ci("plan file")
@pytest.mark.parametrize("make", [two_devices, small_job])
def test_every_busy_op_is_there_once_when_and_where_the_timeline_has_it(make: Any, tmp_path: Path) -> None:
    schedule, timeline = make()
    write_trace({"other": two_devices(), "this": (schedule, timeline)}, tmp_path / "step.json.gz")
    events = [event for event in ops_of(read(tmp_path / "step.json.gz")) if event["pid"] >= 1000]
    busy = timeline.finish_s > timeline.start_s
    assert sorted(event["args"]["op"] for event in events) == np.flatnonzero(busy).tolist()
    for event in events:
        op = schedule[event["args"]["op"]]
        assert event["pid"] == 1000 + op.device and event["tid"] == STREAM[op.lane]
        assert event["ts"] == pytest.approx(1e6 * timeline.start_s[op.id], abs=6e-4)
        assert event["ts"] + event["dur"] == pytest.approx(1e6 * timeline.finish_s[op.id], abs=6e-4)
        said = {name: event["args"][name] for name in ("module", "chunk", "microbatch", "segment", "bytes")}
        assert said == {name: getattr(op, name) for name in said} and event["args"]["kind"] == op.kind.word
    spent_s = sum(event["dur"] for event in events) / 1e6
    assert spent_s == pytest.approx(float((timeline.finish_s - timeline.start_s)[busy].sum()), rel=1e-6)


@pytest.mark.ci("plan file")
@pytest.mark.parametrize("make", [two_devices, small_job])
def test_a_thread_plays_one_event_at_a_time_and_in_order(make: Any, tmp_path: Path) -> None:
    write_trace({"a": make(), "b": make()}, tmp_path / "step.json.gz")
    threads = defaultdict(list)
    for event in ops_of(read(tmp_path / "step.json.gz")):
        begin = nanoseconds(event["ts"])
        threads[event["pid"], event["tid"]].append((begin, begin + nanoseconds(event["dur"])))
    for times in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(times))


@pytest.mark.parametrize("make", [two_devices, small_job])
def test_analysers_tell_communication_from_compute_by_name_and_host_from_gpu(
    make: Any, tmp_path: Path
) -> None:
    schedule, timeline = make()
    write_trace({"stage0": (schedule, timeline)}, tmp_path / "step.json.gz")
    for event in ops_of(read(tmp_path / "step.json.gz")):
        op = schedule[event["args"]["op"]]
        assert event["cat"] == ("cpu_op" if op.lane == Lane.HOST else "kernel")
        assert event["args"].get("stream") == (None if op.lane == Lane.HOST else STREAM[op.lane])
        is_traffic = op.lane in (Lane.TP, Lane.DP, Lane.P2P)
        assert bool(HTA_COMMUNICATION.match(event["name"])) == is_traffic
        assert bool(HTA_NOT_COMPUTE.match(event["name"])) == is_traffic


def test_names_and_colours_show_modules_at_a_glance(tmp_path: Path) -> None:
    write_trace({"stage0": two_devices()}, tmp_path / "step.json.gz")
    events = ops_of(read(tmp_path / "step.json.gz"))
    first = [event["name"] for event in events if event["pid"] == 0]
    assert first == [
        "ncclDevKernel_AllGather_DP gather segment 0 chunk 0 mb 0",
        "gather segment 0 chunk 0 mb 0",
        "vision F segment 0 chunk 1 mb 5",
        "ncclDevKernel_Collective_TP vision F segment 1 chunk 1 mb 5",
        "ncclDevKernel_SendRecv_EP vision F segment 2 chunk 1 mb 5",
        "vision B segment 3 chunk 1 mb 5",
        "ncclDevKernel_SendRecv_PP send-f segment 0 chunk 0 mb 0",
        "ncclDevKernel_ReduceScatter_DP reduce segment 0 chunk 0 mb 0",
        "optimizer",
    ]
    compute = [event for event in events if event["tid"] == STREAM[Lane.COMPUTE]]
    assert len({event["cname"] for event in compute}) == 5  # forward, backward of each; optimizer
    # Perfetto colours by what is left of a name without its numbers.
    assert len({re.sub(r"( )?\d+", "", event["name"]) for event in compute}) == 5


def test_systems_are_groups_of_named_processes_with_named_threads(tmp_path: Path) -> None:
    schedule, timeline = two_devices()
    named = replace(schedule, device_names=("stage 0", "encoders"))
    systems = {"balanced-best": two_devices(), "separate-gpus": (named, timeline), "fsdp": one_device()}
    write_trace(systems, tmp_path / "step.json")
    trace = read(tmp_path / "step.json")
    assert {"schemaVersion", "distributedInfo", "deviceProperties", "displayTimeUnit"} <= set(trace)
    labels = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in labels if e["name"] == "process_name"}
    assert processes == {
        0: "balanced-best stage 0",
        1: "balanced-best stage 1",
        1000: "separate-gpus stage 0",
        1001: "separate-gpus encoders",
        2000: "fsdp every GPU",
    }
    assert {part["id"]: part["name"] for part in trace["deviceProperties"]} == processes
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in labels if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in ops_of(trace)} == set(threads)
    words = ["stream 7 compute", "stream 20 tp", "stream 24 dp", "stream 28 p2p", "host"]
    assert [threads[0, tid] for tid in STREAM.values()] == words


def test_a_receive_is_not_shown_beside_its_send(tmp_path: Path) -> None:
    builder = ScheduleBuilder(("llm",), 2)
    sent = builder.add(make_single_kernel_graph(OpKind.SEND_F, Lane.P2P, 1e-3), device=0)
    builder.add(make_single_kernel_graph(OpKind.RECV_F, Lane.P2P, 0.0), device=1, after=[sent])
    both = Timeline(start_s=np.zeros(2), finish_s=np.full(2, 1e-3), step_s=1e-3)
    write_trace({"stage0": (builder.build(), both)}, tmp_path / "step.json")
    assert [event["args"]["kind"] for event in ops_of(read(tmp_path / "step.json"))] == ["send-f"]


@functools.cache
def one_device() -> Played:
    builder = ScheduleBuilder(("llm",), 1)
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 1e-3), device=0)
    schedule = builder.build()
    return schedule, simulate_schedule(schedule)


def test_the_same_systems_give_the_same_bytes_packed_or_not(tmp_path: Path) -> None:
    for name in ("one.json.gz", "two.json.gz", "plain.json"):
        write_trace({"stage0": two_devices()}, tmp_path / name)
    packed = (tmp_path / "one.json.gz").read_bytes()
    assert packed == (tmp_path / "two.json.gz").read_bytes()
    assert packed[3:8] == bytes(5)  # neither a file name nor a time in the header
    assert gzip.decompress(packed) == (tmp_path / "plain.json").read_bytes()


def write_rank_traces(schedule: Schedule, timeline: Timeline, folder: Path) -> None:
    """Splits a trace into a file per device, `rank_0.json.gz` and so on, for HolisticTraceAnalysis."""
    write_trace({"system": (schedule, timeline)}, folder / "all.json")
    trace = json.loads((folder / "all.json").read_text())
    (folder / "all.json").unlink()
    for rank in range(schedule.num_devices):
        head = trace | {
            "distributedInfo": trace["distributedInfo"] | {"rank": rank},
            "deviceProperties": [trace["deviceProperties"][rank]],
        }
        events = [event for event in head.pop("traceEvents") if event["pid"] == rank]
        lines = ",\n".join(json.dumps(event) for event in events)
        text = f'{json.dumps(head)[:-1]}, "traceEvents": [\n{lines}\n]}}\n'
        (folder / f"rank_{rank}.json.gz").write_bytes(gzip.compress(text.encode()))


def test_every_process_holds_the_ops_of_its_device(tmp_path: Path) -> None:
    schedule, timeline = two_devices()
    write_rank_traces(schedule, timeline, tmp_path)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["rank_0.json.gz", "rank_1.json.gz"]
    for rank, path in enumerate(paths):
        assert re.search(rf'"rank":\s+{rank},', gzip.decompress(path.read_bytes()).decode().splitlines()[0])
        assert {event["pid"] for event in read(path)["traceEvents"]} == {rank}
        assert {schedule[event["args"]["op"]].device for event in ops_of(read(path))} == {rank}


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_trace({"stage0": one_device()}, tmp_path / "missing" / "step.json.gz")


def test_simulate_writes_all_systems_into_one_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json.gz"
    assert run(["simulate", SMALL, *AT, "--system", "stage0", "balanced-best", "--trace", str(path)]) == OK
    assert capsys.readouterr().out.endswith(f"wrote {path} (open it at ui.perfetto.dev)\n")
    names = [part["name"] for part in read(path)["deviceProperties"]]
    assert {name.split()[0] for name in names} == {"stage0", "balanced-best"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [("step.gz", "is not a .json.gz or .json file"), ("no/step.json", "cannot be written")],
)
def test_simulate_says_before_the_work_that_a_name_is_wrong(
    name: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", "no-such-job", "--trace", str(tmp_path / name)]) == USER_ERROR
    shown = capsys.readouterr().err
    assert "--trace" in shown and problem in shown and "hint: " in shown


@pytest.mark.ci("plan file")
def test_the_trace_of_the_largest_job_of_the_paper_is_small(tmp_path: Path) -> None:
    systems = compare_systems(find_job("paper/strong-3072"), names=["stage0", "balanced-best"]).systems
    path = tmp_path / "step.json.gz"
    write_trace({name: (system.schedule, system.timeline) for name, system in systems.items()}, path)
    assert path.stat().st_size < 5_000_000


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["balanced-best", "paper"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pandas, at how the analyser calls it
def test_holistic_trace_analysis_finds_the_idle_time_that_we_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "HolisticTraceAnalysis is not installed: run make oracles"
    analysis = pytest.importorskip("hta.trace_analysis", reason=reason)
    files = pytest.importorskip("hta.common.trace_file", reason=reason)
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    system = compare_systems(find_job("paper/strong-3072"), names=[name]).systems[name]
    write_rank_traces(system.schedule, system.timeline, tmp_path)
    found = files.get_trace_files(str(tmp_path))
    assert sorted(found) == list(range(system.schedule.num_devices))
    idle_s = system.step_s - busy_s(system.schedule, system.timeline)
    for rank, file in found.items():  # one at a time: given several, it starts processes
        row = analysis.TraceAnalysis({rank: file}).get_temporal_breakdown(visualize=False).iloc[0]
        outside_s = system.step_s - row["kernel_time(us)"] / 1e6
        theirs_s = (row["idle_time(us)"] + row["non_compute_time(us)"]) / 1e6 + outside_s
        assert theirs_s == pytest.approx(idle_s[rank], rel=1e-6)
