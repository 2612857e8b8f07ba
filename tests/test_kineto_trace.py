"""Idle time in traces of torch.profiler equals counts by hand, by brute force, and that of the simulator."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_trace import write_rank_traces

from optimus.cli import run
from optimus.cli.flags import OK, USER_ERROR
from optimus.errors import UserError
from optimus.job.read import find_job
from optimus.planner.compare import compare_systems
from optimus.schedule.bubbles import CAUSES, sum_bubbles_by_cause
from optimus.schedule.kineto_trace import (
    DeviceTrace,
    Purpose,
    StepIdle,
    account_idle,
    average_steps,
    read_traces,
)


def read_trace(path: Path, groups: dict[str, str] | None = None) -> DeviceTrace:
    """Reads a file of one GPU."""
    (trace,) = read_traces(path, groups)
    return trace


def group(name: str) -> dict[str, Any]:
    """Names the process group of a collective, as the profiler does."""
    return {"Process Group Description": name}


TP, DP = group("TENSOR_MODEL_PARALLEL_GROUP"), group("mesh_dp_shard")


def kernel(begin: float, end: float, name: str = "gemm", *, at: int = 0, **args: Any) -> list[dict[str, Any]]:
    """A kernel, and its launch half a microsecond before `at`, or long before it begins."""
    number = int(1000 * begin) + len(name)
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at or begin - 900, "dur": 1}
    return [
        launch | {"args": {"correlation": number}},
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": begin, "dur": end - begin}
        | {"args": {"device": 0, "correlation": number, **args}},
    ]


def write(path: Path, *kernels: list[dict[str, Any]], **head: Any) -> Path:
    """Writes a trace, gzipped if the name says so."""
    text = json.dumps({"traceEvents": [event for each in kernels for event in each], **head})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def nccl(begin: float, end: float, kind: str, **args: Any) -> list[dict[str, Any]]:
    return kernel(begin, end, f"ncclDevKernel_{kind}", **({"Collective name": kind} | args))


def accounted(step: StepIdle) -> float:
    """Sums up what became of a step."""
    return step.busy_s + step.bubbles.total + step.host_s + step.launch_s + step.unknown_s


def test_every_cause_by_hand(tmp_path: Path) -> None:
    """A step of 2,000 us; what is waited for is the last communication to end before a kernel begins."""
    path = write(
        tmp_path / "rank.json.gz",
        nccl(1000, 1100, "SendRecv"),  # of no named group: a pipeline's
        kernel(1100, 1300),
        nccl(1250, 1400, "_allgather_base", **DP),
        kernel(1400, 1600),
        nccl(1500, 2900, "all_reduce", **DP),  # runs on behind everything, and is waited for by nothing
        nccl(1600, 1650, "allreduce", **TP),
        kernel(1660, 1800),  # queued, so that the last 10 us are the collective's too
        kernel(2000, 2500, at=1990),  # launched late
        nccl(2500, 2600, "SendRecv"),
        kernel(2600, 2800),
        nccl(2800, 3000, "reduce_scatter", **DP),
        distributedInfo={"rank": 3, "world_size": 8},
        deviceProperties=[{"id": 0, "name": "NVIDIA H100"}],
    )
    trace = read_trace(path)
    assert (trace.name, trace.device, trace.unknown_groups) == ("rank 3", "NVIDIA H100", ())
    (step,) = account_idle(trace)
    causes = {cause: round(1e6 * getattr(step.bubbles, cause)) for cause in CAUSES}
    assert causes == {
        "dp_all_gather": 100,
        "dp_reduce_scatter": 200,
        "pp_warmup": 100,
        "pp_cooldown": 0,
        "pp_other": 100,
        "tp": 60,
    }
    assert step.host_s == pytest.approx(200e-6) and step.step_s == pytest.approx(2000e-6)
    assert accounted(step) == pytest.approx(step.step_s)


def seconds(tmp_path: Path, *kernels: list[dict[str, Any]]) -> StepIdle:
    (step,) = account_idle(read_trace(write(tmp_path / "a.json", *kernels)))
    assert accounted(step) == pytest.approx(step.step_s)
    return step


def test_what_the_host_launches_late_is_the_hosts(tmp_path: Path) -> None:
    late = seconds(
        tmp_path, kernel(1000, 1100), nccl(1900, 2000, "all_gather", at=1890, **DP), kernel(2000, 2100)
    )
    assert late.host_s == pytest.approx(790e-6), "until the collective was launched"
    assert late.bubbles.dp_all_gather == pytest.approx(110e-6)
    overlapped = kernel(1000, 1100), nccl(1050, 1800, "reduce_scatter", **DP), kernel(2000, 2100, at=1995)
    assert seconds(tmp_path, *overlapped).host_s == pytest.approx(900e-6), "nothing waited for it"
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 1060, "dur": 900}
    waited = seconds(tmp_path, *overlapped, [call])
    assert waited.bubbles.dp_reduce_scatter == pytest.approx(700e-6), "the host waited for it"
    assert waited.host_s == pytest.approx(200e-6)


def test_steps_begin_with_the_first_kernel_that_they_launch(tmp_path: Path) -> None:
    marks = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{place}", "ts": ts, "dur": 1000}
        for place, ts in enumerate((0, 1000), start=4)
    ]
    kernels = [kernel(100, 600, at=50), kernel(700, 1200, at=60), kernel(1300, 1500, at=1100)]
    trace = read_trace(write(tmp_path / "a.json", *kernels, marks))
    assert np.array(trace.steps) == pytest.approx(np.array([(0.0, 1200e-6), (1200e-6, 1400e-6)]))
    first, second = account_idle(trace)
    assert first.busy_s == pytest.approx(1000e-6) and first.host_s == pytest.approx(0.0)
    assert first.launch_s == pytest.approx(200e-6), "what follows was launched in time"
    assert second.busy_s == pytest.approx(200e-6)


def test_kernels_of_before_the_first_mark_are_one_step(tmp_path: Path) -> None:
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "ts": 5000, "dur": 1000}
    trace = read_trace(write(tmp_path / "a.json", kernel(1000, 1100), kernel(1200, 1300), [mark]))
    assert len(trace.steps) == 1 and account_idle(trace)[0].step_s == pytest.approx(300e-6)


@pytest.mark.parametrize(
    ("kind", "args", "groups", "purpose"),
    [
        ("all_reduce", group("EXPERT_DATA_PARALLEL_GROUP"), {}, Purpose.REDUCE),
        ("alltoallv", group("EXPERT_MODEL_PARALLEL_GROUP"), {}, Purpose.TP),
        ("send", group("PIPELINE_MODEL_PARALLEL_GROUP"), {}, Purpose.PP),
        ("all_gather", group("mesh_cp"), {}, Purpose.TP),
        ("all_reduce", group("undefined"), {}, Purpose.UNKNOWN),
        ("all_reduce", group("undefined"), {"undefined": "tp"}, Purpose.TP),
        ("all_reduce", {"Process Group Name": "17"}, {"17": "dp"}, Purpose.REDUCE),
        ("all_reduce", {}, {"unnamed": "dp"}, Purpose.REDUCE),
        ("SendRecv", group("mesh_ep"), {}, Purpose.TP),
        ("recv", {}, {"unnamed": "tp"}, Purpose.TP),
        ("all_reduce", group("mesh_efsdp"), {}, Purpose.REDUCE),
        ("all_reduce", group("EMBEDDING_GROUP"), {}, Purpose.REDUCE),
        ("all_reduce", group("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"), {}, Purpose.REDUCE),
    ],
)
def test_what_a_collective_is_for(
    kind: str, args: dict[str, Any], groups: dict[str, str], purpose: Purpose, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.json", nccl(1000, 1100, kind, **args), kernel(1100, 1200))
    trace = read_trace(path, groups)
    assert trace.purpose.tolist() == [purpose, Purpose.COMPUTE]
    assert trace.unknown_groups == (("undefined",) if purpose == Purpose.UNKNOWN else ())


@pytest.mark.parametrize(
    ("name", "purpose"),
    [
        ("ncclKernel_SendRecv(ncclWorkElem)", Purpose.UNKNOWN),  # an all-to-all is one, too
        ("ncclKernel_AllGather_RING", Purpose.UNKNOWN),
        ("void hybrid_ep::dispatch_kernel<8>", Purpose.TP),
        ("void deep_ep::internode::combine", Purpose.TP),
        ("void cutlass::device_kernel<Sm90GemmDispatch>", Purpose.COMPUTE),
    ],
)
def test_what_a_kernel_without_a_group_is_for(name: str, purpose: Purpose, tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.json", kernel(1000, 1100, name)))
    assert trace.purpose.tolist() == [purpose]


def test_a_group_alone_reduces_gradients_and_copies_are_the_hosts(tmp_path: Path) -> None:
    info = {"rank": 0, "pg_config": [{"pg_name": "0", "pg_desc": "default_pg"}]}
    copy = kernel(1200, 1300, "Memcpy HtoD (Pinned -> Device)")
    copy[1]["cat"] = "gpu_memcpy"
    path = write(
        tmp_path / "a.json",
        kernel(1000, 1100),
        nccl(1050, 1200, "allreduce", **group("default_pg")),
        copy,
        kernel(1300, 1400),
        distributedInfo=info,
    )
    (step,) = account_idle(read_trace(path))
    assert step.bubbles.total == 0.0 and step.host_s == pytest.approx(200e-6), "the copy ended last"


spans = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 30), st.sampled_from(["gemm", *Purpose.__members__])),
    min_size=1,
    max_size=25,
)


@given(spans=spans)
def test_busy_time_equals_a_count_of_microseconds(
    spans: list[tuple[int, int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = {"PP": "SendRecv", "TP": "alltoall", "UNKNOWN": "allreduce", "GATHER": "_allgather_base"}
    computes, everywhere = np.zeros(300, bool), np.zeros(300, bool)
    events = []
    for begin, length, kind in spans:
        args = DP if kind == "GATHER" else {}
        span = 1000 + begin, 1000 + begin + length
        events.append(nccl(*span, names[kind], **args) if kind in names else kernel(*span))
        everywhere[begin : begin + length] = True
        computes[begin : begin + length] |= kind not in names
    path = write(tmp_path_factory.mktemp("trace") / "a.json", *events)
    (step,) = account_idle(read_trace(path))
    places = np.flatnonzero(everywhere)
    assert 1e6 * step.step_s == pytest.approx(places[-1] + 1 - places[0])
    assert 1e6 * step.busy_s == pytest.approx(computes.sum(), abs=1e-6)
    assert accounted(step) == pytest.approx(step.step_s)
    assert min(step.host_s, step.launch_s, step.unknown_s, *vars(step.bubbles).values()) >= 0


@pytest.mark.ci
@pytest.mark.parametrize("name", ["balanced-best", "fsdp"])
def test_a_simulated_step_has_the_idle_time_that_the_simulator_finds(name: str, tmp_path: Path) -> None:
    """Read back from its trace, which has neither launches, receives nor the idle time at both ends."""
    system = compare_systems(find_job("siglip-so400m-8b", "h100:64"), names=[name]).systems[name]
    write_rank_traces(system.schedule, system.timeline, tmp_path)
    bubbles = sum_bubbles_by_cause(system.schedule, system.timeline)
    for rank, expected in enumerate(bubbles):
        trace = read_trace(tmp_path / f"rank_{rank}.json.gz")
        (step,) = account_idle(trace)
        outside_s = system.step_s - step.step_s
        assert step.idle_s + outside_s == pytest.approx(expected.total, rel=1e-6, abs=1e-7)
        assert step.host_s == step.launch_s == step.unknown_s == 0
        assert step.bubbles.tp == pytest.approx(expected.tp, rel=0.02, abs=1e-3 * system.step_s)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"not json", "is not JSON"),
        (b"\x1f\x8bbroken", "cannot be read|is not JSON"),
        (gzip.compress(b"{}", mtime=0)[:12] + b"damaged", "is not JSON"),
        (b"{}", "has no traceEvents"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}]}',
            "no kernels",
        ),
    ],
)
def test_what_is_no_trace_of_a_gpu_is_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        read_trace(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "missing.json")


def test_two_gpus_in_a_file_are_two(tmp_path: Path) -> None:
    other = kernel(1500, 1600)
    other[1]["pid"] = 1
    traces = read_traces(write(tmp_path / "a.json", kernel(1000, 1100), other))
    assert [trace.name for trace in traces] == ["GPU 0", "GPU 1"]
    assert [len(trace.begin_s) for trace in traces] == [1, 1]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [
        write(
            tmp_path / f"rank_{rank}.json",
            kernel(1000, 1500),
            nccl(1500, 1600 + 100 * rank, "all_reduce", **group("mine")),
            kernel(1600 + 100 * rank, 2000),
            distributedInfo={"rank": rank},
        )
        for rank in range(2)
    ]
    files = [str(path) for path in ranks]
    assert run(["trace", *files, "--json"]) == OK
    result = json.loads(capsys.readouterr().out)
    assert result["mean"]["unknown_s"] == pytest.approx(150e-6)
    assert [each["name"] for each in result["traces"]] == ["rank 0", "rank 1"]
    assert result["traces"][1]["unknown_groups"] == ["mine"]
    assert run(["trace", *files]) == OK
    shown = capsys.readouterr().out
    assert "--group NAME=dp: mine" in shown and "rank 1" in shown and "15.0" in shown
    assert run(["trace", *files, "--group", "mine=tp", "--json"]) == OK
    result = json.loads(capsys.readouterr().out)
    assert result["mean"]["bubbles_s"]["tp"] == result["mean"]["fillable_s"] == pytest.approx(150e-6)
    alone = write(tmp_path / "rank_2.json", kernel(1000, 2000))  # in no group
    assert run(["trace", files[0], str(alone), "--group", "mine=tp", "--json"]) == OK
    capsys.readouterr()
    for wrong in ("mine=xp", "dp", "=dp", "other=dp"):
        assert run(["trace", *files, "--group", wrong]) == USER_ERROR, wrong
    assert run(["trace"]) == USER_ERROR
    mean = average_steps([step for path in ranks for step in account_idle(read_trace(path))])
    assert mean.busy_s == pytest.approx(850e-6)
