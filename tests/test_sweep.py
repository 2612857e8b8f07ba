"""A job over a range: points as planning there says, impossible ones with their reason, the picture."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import optimus
from optimus.cli import run
from optimus.cli.flags import NO, OK, USER_ERROR
from optimus.cli.sweep import build_sweep_json, format_sweep
from optimus.errors import UserError
from optimus.job.job import CurrentRun
from optimus.job.layout import Layout, LayoutConstraints, PartialLayout
from optimus.job.read import find_job
from optimus.planner.planning import make_plan
from optimus.render.sweep_chart import render_sweep_page, render_sweep_svg, summarize_sweep
from optimus.sensitivity.job_sweep import JobSweep, SweepFigures, SweepPoint, sweep_job

TINY = "cpu/tiny-vl"
FLAT = ["llm=pp1"]


@pytest.fixture(scope="module")
def swept() -> JobSweep:
    """Batches of a small job, of which one does not divide over two replicas."""
    job = find_job(TINY, None, [*FLAT, "llm=tp1"])
    return sweep_job(job, batch=(8, 2, 7, 4, 2), systems=["stage0", "three-phase"])


def made(*rates: float | None, simpler: float = 0.9) -> JobSweep:
    """A sweep by hand over 8, 16, ... GPUs: tokens per second and GPU of each point."""
    points = []
    for place, rate in enumerate(rates):
        point = SweepPoint(value=8 << place, gpus=8 << place, tokens=1 << 20)
        if rate is None:
            points.append(replace(point, reason="too < small"))
            continue
        step_s = point.tokens / point.gpus / rate
        plan = SweepFigures(
            layouts={"vision": Layout(dp=8), "llm": Layout(dp=8)},
            step_s=step_s,
            floor_s=0.8 * step_s,
            simpler="three-phase",
            simpler_s=step_s / simpler,
            peak_bytes=6e10,
            capacity_bytes=8e10,
        )
        points.append(replace(point, plan=plan))
    return JobSweep(
        job="a & b", axis="gpus", strategy="optimus", preset="default", gpu="h100", points=tuple(points)
    )


# ---------------------------------------------------------------- points


def test_points_are_sorted_and_what_cannot_run_has_its_reason(swept: JobSweep) -> None:
    assert [point.value for point in swept.points] == [2, 4, 7, 8]
    assert [point.value for point, _ in swept.possible] == [2, 4, 8]
    odd = swept.points[2]
    assert odd.plan is None and "workload.sequences_per_step = 7 is not a multiple of dp = 2" in odd.reason


def test_a_point_is_what_planning_there_gives(swept: JobSweep) -> None:
    job = find_job(TINY, None, [*FLAT, "llm=tp1"]).replace(sequences_per_step=4)
    plan = make_plan(job, strategy="optimus", systems=["stage0", "three-phase"])
    point = swept.points[1]
    assert point.plan is not None and plan.simpler is not None
    assert (point.plan.step_s, point.plan.floor_s) == (plan.step_s, plan.floor_s)
    assert point.plan.peak_bytes == plan.memory.total
    assert point.plan.simpler == plan.simpler.name
    assert point.plan.simpler_s == pytest.approx(plan.simpler.step_s)
    assert point.plan.speedup == pytest.approx(plan.speedup[plan.simpler.name])
    rate = point.tokens_per_s_per_gpu(point.plan.step_s)
    assert rate == pytest.approx(plan.system.tokens_per_s_per_gpu, rel=1e-9)


@pytest.mark.ci("plan file")
def test_layout_axes_and_gpus_are_ranges_too() -> None:
    job = find_job(TINY, None, FLAT)
    wide = sweep_job(job, tp=(1, 2, 3), systems=[])
    assert [str(plan.layouts["llm"]) for _, plan in wide.possible] == ["dp2 pp1 tp1", "dp1 pp1 tp2"]
    assert "layout.llm.tp = 3 does not divide cluster.gpus = 2" in wide.points[2].reason
    assert all(plan.simpler is None and plan.speedup is None for _, plan in wide.possible)
    many = optimus.sweep(find_job(TINY, None, [*FLAT, "llm=dp2,tp1"]), gpus=(1, 2, 4), systems=[])
    assert [plan.layouts["llm"].dp for _, plan in many.possible] == [1, 2, 4]  # dp follows
    assert {point.tokens for point in many.points} == {8 * 256}  # the batch does not


def test_progress_goes_on_over_all_points() -> None:
    seen: list[tuple[str, int, int]] = []
    sweep_job(
        find_job(TINY, None, [*FLAT, "llm=tp1"]),
        batch=(2, 4),
        systems=[],
        progress=lambda name, done, total: seen.append((name, done, total)),
    )
    done = [at for _, at, _ in seen]
    assert done == sorted(done) and {total for *_, total in seen} == {200} and done[-1] < 200
    assert seen[0][0] == "batch 2: llm-only" and any(name.startswith("batch 4") for name, *_ in seen)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "--gpus"),
        ({"gpus": (2,), "pp": (2,)}, "--pp"),
        ({"tp": (0,)}, "--tp"),
        ({"gpus": (2,), "strategy": "papper"}, "--strategy"),
        ({"gpus": (2,), "systems": ["stage1"]}, "--system"),
    ],
)
def test_a_wrong_question_is_refused_as_a_whole(given: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as error:
        sweep_job(find_job(TINY), **given)
    assert error.value.field == field


def test_a_job_is_replaced_with_what_follows_from_it() -> None:
    llm = PartialLayout(dp=1, pp=2, tp=1)
    today = CurrentRun(llm=llm, measured_step_s=3.0, measured_memory_bytes=1e9)
    job = replace(find_job(TINY), layout=LayoutConstraints(modules={"llm": llm}), today=today)
    assert job.replace() == job == job.replace(gpus=2, sequences_per_step=8)
    more = job.replace(gpus=4)
    assert more.cluster.gpus == 4 and more.workload == job.workload
    assert more.layout.of("llm") == PartialLayout(pp=2, tp=1)
    assert more.today == CurrentRun(llm=PartialLayout(pp=2, tp=1))
    longer = job.replace(sequences_per_step=16)
    assert longer.workload.sequences_per_step == 16 and longer.layout == job.layout
    assert longer.today == CurrentRun(llm=llm)


# ---------------------------------------------------------------- the picture


def circles(svg: str) -> list[tuple[float, float, str]]:
    root = ElementTree.fromstring(svg)
    return [
        (float(dot.get("cx", "")), float(dot.get("cy", "")), dot.get("fill", ""))
        for dot in root.iter("{http://www.w3.org/2000/svg}circle")
    ]


def test_the_picture_is_to_scale() -> None:
    """Doublings are equally far apart, heights are in proportion from 0, and all of it is inside."""
    svg = render_sweep_svg(made(3000.0, None, 1500.0))
    dots = [(x, y) for x, y, colour in circles(svg) if colour == "#0072b2"]
    assert len(dots) == 2 and len(circles(svg)) == 6
    root = ElementTree.fromstring(svg)
    labels = {text.text: float(text.get("x", "")) for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert labels["16"] - labels["8"] == pytest.approx(labels["32"] - labels["16"], abs=0.2)
    assert [labels["8"], labels["32"]] == pytest.approx([x for x, _ in dots])
    bottom = max(float(m) for m in re.findall(r"M84 ([\d.]+)H", svg))
    assert (bottom - dots[0][1]) / (bottom - dots[1][1]) == pytest.approx(2.0, abs=0.01)
    assert all(0 < x < 1000 and 0 < y < bottom for x, y, _ in circles(svg))
    assert svg.count("not possible") == 1 and "too &lt; small" in svg and "a &amp; b" in svg
    assert svg == render_sweep_svg(made(3000.0, None, 1500.0))


def test_the_title_says_the_conclusion() -> None:
    assert summarize_sweep(made(3000.0, None, 1500.0)) == (
        "a & b: 3000 tokens/s/GPU at 8 GPUs, 50 % of that at 32; "
        "optimus 1.111 times as fast as the best simpler system"
    )
    assert summarize_sweep(made(1500.0, 3000.0)).startswith(
        "a & b: 3000 tokens/s/GPU at 16 GPUs, 50 % of that at 8;"
    )
    assert summarize_sweep(made(1500.0)).startswith("a & b: 1500 tokens/s/GPU at 8 GPUs; optimus")
    assert summarize_sweep(made(None, None)) == "a & b: possible at none of 2 values of GPUs"
    assert circles(render_sweep_svg(made(None, None))) == []


def test_table_page_and_object_hold_every_point() -> None:
    sweep = made(3000.0, None, simpler=0.99)
    text = "\n".join(format_sweep(sweep))
    assert "not possible: too < small" in text
    assert re.search(
        r"^ +8 +dp8 pp1 tp1 .* 1\.250 +3000 +60\.0 +three-phase .* 1\.010 +no$", text, re.MULTILINE
    )
    page = render_sweep_page(sweep)
    assert page.count("<tr>") == 3 and "<svg" in page and "too &lt; small" in page and "src=" not in page
    found = build_sweep_json(sweep, file=None)
    again: dict[str, Any] = json.loads(json.dumps(found))
    assert again == found
    first, second = again["points"]
    assert first["worth"] is False and first["tokens_per_s_per_gpu"] == pytest.approx(3000.0)
    assert second == {"value": 16, "gpus": 16, "possible": False, "reason": "too < small"}


# ---------------------------------------------------------------- the command


def test_the_command_writes_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "sweep.svg"
    words = ["sweep", TINY, "--layout", "llm=pp1", "--tp", "1,3", "--system", "stage0"]
    assert run([*words, "-o", str(svg), "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "optimus.sweep/1" and found["over"] == "tp" and found["picture"] == str(svg)
    assert [point["possible"] for point in found["points"]] == [True, False]
    assert len(circles(svg.read_text())) == 3


def test_nothing_possible_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", TINY, "--tp", "3"]) == NO
    assert "not possible: layout.llm.tp = 3" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a sweep needs a range"),
        (("--gpus", "two"), "--gpus = two is not a whole number"),
        (("--gpus", "2", "--batch", "8"), "a sweep has one range"),
        (("--gpus", "2", "-o", "a.png"), "is not a .svg or .html file"),
        (("--gpus", "2", "--preset", "papper"), "--preset"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", TINY, *words]) == USER_ERROR
    shown = capsys.readouterr()
    assert message in shown.err and "hint: " in shown.err and shown.out == ""
