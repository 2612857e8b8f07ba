"""`benchmarks gpu` without a GPU: its arithmetic, failing sections, and a smoke test on gloo."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import gpu_sections

from benchmarks import gpu
from benchmarks.__main__ import run
from benchmarks.gpu import TRAINED, bench_gpu, conclude
from benchmarks.gpu_overlap import hidden_in, overlap, union
from benchmarks.gpu_ranks import TOO_LATE, failure, run_sections
from benchmarks.gpu_step import cluster_name, cluster_of, step_job
from benchmarks.gpu_streams import fit_line, ring_link
from benchmarks.report import BenchResult, to_json, to_text
from benchmarks.variants import OURS
from optimus.cost.network import Collective, collective_s
from optimus.environment import tuning
from optimus.errors import DoesNotFit, UserError
from optimus.job.cluster import FLAT, Cluster, Gpu, Link

SECTIONS = (
    "communicator_order",
    "slot_entry_delay_s",
    "compute_slowdown",
    "reduce_scatter_under_compute",
    "collectives",
    "step",
    "train",
    "train_tp",
)


# ---------------------------------------------------------------- lines and links


def test_points_on_a_line_give_its_latency_and_bandwidth() -> None:
    points = [(size, 2e-5 + size / 3e11) for size in (2**16, 2**18, 2**21, 2**24, 2**26, 2**28)]
    latency_s, bandwidth = fit_line(points)
    assert latency_s == pytest.approx(2e-5, rel=1e-9)
    assert bandwidth == pytest.approx(3e11, rel=1e-9)


def test_the_line_is_that_of_least_relative_squares() -> None:
    chance = random.Random(3)
    sizes = [2.0**power for power in range(16, 29, 2)]
    seconds = [(2e-5 + size / 3e11) * chance.uniform(0.8, 1.25) for size in sizes]
    equations = np.array([[1 / t, size / t] for size, t in zip(sizes, seconds, strict=True)])
    (latency, slope), *_ = np.linalg.lstsq(equations, np.ones(len(sizes)), rcond=None)
    found = fit_line(list(zip(sizes, seconds, strict=True)))
    assert found == pytest.approx((latency, 1 / slope), rel=1e-6)


def test_no_latency_is_below_0_and_no_bandwidth_comes_from_noise() -> None:
    latency_s, bandwidth = fit_line([(1.0, 0.5), (2.0, 2.0)])  # x / t: 2 and 1
    assert latency_s == 0 and bandwidth == pytest.approx((2**2 + 1**2) / (2 + 1))
    assert fit_line([(1.0, 2.0), (2.0, 1.0)])[1] is None


def test_the_link_of_a_ring_is_found_again() -> None:
    link = Link(bandwidth_bytes_per_s=4e11, latency_s=3e-6)
    chip = Gpu(name="x", peak_flops=1, memory_bytes=1, memory_bandwidth_bytes_per_s=1, curves=FLAT)
    cluster = Cluster(
        name="x", gpu=chip, gpus=8, gpus_per_node=8, within_node=link, between_nodes=link, reserve_bytes=0
    )
    points = [
        (size, collective_s(cluster, Collective.ALL_GATHER, size, ranks=8, stride=1))
        for size in (2**16, 2**28)
    ]
    found = ring_link(*fit_line(points), ranks=8)
    assert found["latency_s"] == pytest.approx(3e-6)
    assert found["bandwidth_bytes_per_s"] == pytest.approx(4e11)
    assert ring_link(1.0, None, 2)["bandwidth_bytes_per_s"] is None


# ---------------------------------------------------------------- traces


def kernel(name: str, begin: float, length: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "args": {"stream": 7}}


def test_overlap_of_intervals() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert overlap([(0, 4), (5, 6)], [(1, 2), (3, 5.5), (9, 10)]) == pytest.approx(1 + 1 + 0.5)
    assert overlap([], [(0, 1)]) == 0


def test_the_hidden_share_of_a_trace() -> None:
    """Only kernels count: an annotation of the same collective is as long as it, and is none."""
    trace = {
        "traceEvents": [
            kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 100, 40),
            kernel("nccl:_reduce_scatter_base", 100, 40, cat="gpu_user_annotation"),
            kernel("sm90_xmma_gemm_bf16bf16_bf16f32", 80, 30),  # 10 of them beside it
            kernel("sm90_xmma_gemm_bf16bf16_bf16f32", 112, 20),  # all 20
            kernel("vectorized_elementwise_kernel", 115, 5),  # at the same time
            {"ph": "M", "name": "process_name", "pid": 0},
        ]
    }
    found = hidden_in(trace)
    assert found is not None
    assert found["hidden_share"] == pytest.approx(30 / 40)
    assert found["nccl_s"] == pytest.approx(40e-6) and found["kernels_s"] == pytest.approx(50e-6)
    assert hidden_in({"traceEvents": [kernel("gemm", 0, 1)]}) is None


# ---------------------------------------------------------------- what is decided, and what is concluded


def test_gpus_are_found_in_the_catalog_by_their_names() -> None:
    assert cluster_name("NVIDIA H100 80GB HBM3") == "h100"
    assert cluster_name("NVIDIA A100-SXM4-40GB") == "a100"
    assert cluster_name("NVIDIA GH200 480GB") == cluster_name("Tesla V100-SXM2-32GB") == "h100"
    assert cluster_of("NVIDIA B200", 4).gpus == 4
    job = step_job(4, "NVIDIA A100-SXM4-40GB", 42_000_000_000, ())
    assert (job.cluster.gpu.name, job.cluster.gpu.memory_bytes) == ("a100-sxm-80gb", 0.75 * 42e9)
    assert job.layout.of("llm").stated() == {"pp": 4, "tp": 1}
    assert step_job(8, "NVIDIA H100", None, ["llm=pp4,tp1"]).layout.of("llm").pp == 4


def test_only_tuning_variables_are_reported() -> None:
    assert tuning({"NCCL_ALGO": "Ring", "NCCL_HOSTID": "secret", "HOME": "/"}) == {"NCCL_ALGO": "Ring"}


def sections_found() -> dict[str, dict[str, Any]]:
    order = {"rule": "it waits", "verdict": "fail"}
    step: dict[str, Any] = {
        "variants": {
            OURS: {"step_s": 2.0, "over_ours": 1.0},
            "balanced ZBV": {"step_s": 3.0, "over_ours": 1.5},
        },
        "bound_s": 1.6,
        "ours_over_bound": 1.25,
        "unequal": [],
        "tolerance": 0.02,
        "losses": {OURS: {"loss": 6.0, "squares": 1.0}},
        "layouts": {"llm": "dp1 pp8 tp1"},
        "job": "gpu/bench-vl",
        "microbatches": 16,
        "rounds": 14,
        "quiet": "quiet",
    }
    train: dict[str, Any] = {
        "step_s": 2.5,
        "planned_step_s": 2.0,
        "loss": 6.01,
        "last_loss": 7.0,
        "squares": 1.0,
    }
    found: dict[str, dict[str, Any]] = {name: {"error": "not run"} for name in SECTIONS}
    return found | {"communicator_order": {"checks": {"a": order}}, "step": step, "train": train}


def test_problems_are_errors_broken_rules_and_unequal_losses() -> None:
    found = conclude({"backend": "nccl", "gpu": "NVIDIA H100", "world": 8}, sections_found())
    trained = found.variants[TRAINED["train"]]
    assert trained.over_ours == pytest.approx(1.25) and trained.error == pytest.approx(0.25)
    assert TRAINED["train_tp"] not in found.variants
    assert (found.bound_s, found.ours_over_bound) == (1.6, 1.25)
    assert not found.ok
    assert "collectives: not run" in found.problems and "not so: it waits" in found.problems
    (unequal,) = [problem for problem in found.problems if problem.startswith("loss")]
    assert "last step: 7.0, ours 6.0" in unequal
    on_cpu = conclude({"backend": "gloo", "world": 2}, sections_found())
    assert not any("it waits" in problem for problem in on_cpu.problems)
    assert "no GPUs here" in on_cpu.notes[0]


def test_one_gpu_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match="needs two GPUs"):
        bench_gpu()
    assert [gpu._world(count) for count in (0, 2, 3, 7, 8, 16)] == [2, 2, 2, 4, 8, 8]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpu", "--ranks", "4"], "one on each GPU"),
        (["gpu", "--against", "balanced ZBV"], "is for `real`"),
        (["real", "--layout", "llm=pp2,tp1"], "is for `gpu`"),
        (["gpu", "--rounds", "0"], "is too few"),
        (["gpu", "--layout", "llm=pp3,tp1"], "llm.pp = 3 does not divide"),
    ],
)
def test_impossible_options_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words]) == 2
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- ranks


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_section_that_fails_affects_no_other() -> None:
    heard: list[str] = []
    sections = {
        "first": gpu_sections.works,
        "fails": gpu_sections.fails,
        "dies": gpu_sections.dies,
        "second": gpu_sections.works,
        "nothing": gpu_sections.returns_nan,
        "apart": gpu_sections.works,
    }
    found = run_sections(
        sections,
        2,
        on_gpu=False,
        in_new_ranks=("apart",),
        progress=lambda name, done, total: heard.append(name),
    )
    assert list(found) == list(sections)
    assert found["first"] == found["second"] == found["apart"] == {"ranks": [0, 1]}
    assert found["fails"]["error"] == "ZeroDivisionError: no such kernel"
    assert any("gpu_sections.py" in line for line in found["fails"]["trace"])
    assert found["dies"]["error"] and "JSON" in found["nothing"]["error"]
    assert [name for name in heard if name in sections] == list(sections)


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_section_that_hangs_is_ended_and_later_ones_do_not_start() -> None:
    sections = {"hangs": gpu_sections.hangs, "late": gpu_sections.works}
    found = run_sections(sections, 2, on_gpu=False, section_limit_s=4.0, total_limit_s=4.0)
    assert "no answer after" in found["hangs"]["error"]
    assert found["late"] == {"error": TOO_LATE}


def test_a_failure_is_described_by_the_last_line_of_its_traceback() -> None:
    assert failure("") == {"error": "failed without a word"}
    assert failure("no plan") == {"error": "no plan"}
    assert failure("a\nb\n\nOSError: c\n") == {"error": "OSError: c", "trace": ["a", "b", "OSError: c"]}


# ---------------------------------------------------------------- all of it


@pytest.fixture(scope="module")
def smoke() -> BenchResult:
    return bench_gpu()


@pytest.mark.ci("engine")
@pytest.mark.timeout(300)
def test_all_sections_run_on_gloo_and_keep_the_contract(smoke: BenchResult) -> None:
    found = json.loads(json.dumps(to_json(smoke), allow_nan=False))
    assert found["ok"], found["problems"]
    assert found["schema"] == "optimus.bench/1" and found["bench"] == "gpu"
    assert tuple(found["sections"]) == SECTIONS
    assert not [name for name, section in found["sections"].items() if "error" in section]
    assert found["environment"]["backend"] == "gloo" and found["environment"]["world"] == 2
    assert found["bound_s"] > 0 and found["ours_over_bound"] > 0
    assert {OURS, *TRAINED.values(), "balanced 1F1B"} <= set(found["variants"])
    assert all({"step_s", "over_ours"} <= set(variant) for variant in found["variants"].values())
    verdicts = {check["verdict"] for check in found["sections"]["communicator_order"]["checks"].values()}
    assert "not measured on cpu" in verdicts
    for curve in found["sections"]["collectives"].values():
        assert len(curve["sizes"]) == 6 and {"latency_s", "bandwidth_bytes_per_s", "link"} <= set(curve)
    rows = found["sections"]["compute_slowdown"]["rows"]
    assert {(row["kernel"], row["collective"]) for row in rows} == {
        (kernel, collective)
        for kernel in ("gemm", "elementwise")
        for collective in ("all_gather", "reduce_scatter")
    }


@pytest.mark.ci("engine")
@pytest.mark.timeout(300)
def test_the_result_is_printed_as_text_and_as_one_object(
    smoke: BenchResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(to_text(smoke))
    assert all(f"\n{name}\n" in text for name in SECTIONS)
    assert "its figures mean nothing" in text and "into an issue" in text and "FAILED" not in text
    monkeypatch.setattr(gpu, "bench_gpu", lambda **given: smoke)
    assert run(["gpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sections"]["step"]["unequal"] == []


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_sections_are_reported_also_if_another_fails_or_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_plan(*args: Any, **given: Any) -> None:
        raise DoesNotFit("nothing fits", "use more GPUs")

    monkeypatch.setattr(gpu, "prepare_step", no_plan)
    monkeypatch.setitem(gpu.STREAMS, "compute_slowdown", gpu_sections.fails)
    found = bench_gpu()
    assert found.sections is not None and tuple(found.sections) == SECTIONS
    failed = {name: section["error"] for name, section in found.sections.items() if "error" in section}
    assert failed == {
        "compute_slowdown": "ZeroDivisionError: no such kernel",
        "step": "no: nothing fits",
        "train": "no: nothing fits",
        "train_tp": "no: nothing fits",
    }
    assert (found.ok, found.variants, found.bound_s) == (False, {}, None)
    assert json.dumps(to_json(found), allow_nan=False)
    assert "FAILED: no: nothing fits" in "\n".join(to_text(found))
