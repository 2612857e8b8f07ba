"""The page of a plan: what it says is what the plan holds, in one file that needs nothing else."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tiny_plans import tiny_plan

import optimus
from optimus.cli import run
from optimus.cli.flags import OK, USER_ERROR
from optimus.errors import UserError
from optimus.ir.op import Lane, OpKind
from optimus.ir.plan import Plan
from optimus.ir.planfile import hash_plan, save_plan
from optimus.job.read import find_job
from optimus.planner.plan_replay import replay_llm_alone, replay_plan
from optimus.planner.planning import PlanningResult, make_plan
from optimus.render import timeline_chart
from optimus.render.format_numbers import format_gigabytes, format_seconds
from optimus.render.html_report import render_report_page, rerun_comparison
from optimus.render.report_data import ReportData, gather_report_data
from optimus.render.timeline_chart import TICK_S, pack_timelines
from optimus.schedule.bubbles import CAUSES, average_bubbles, sum_bubbles_by_cause
from optimus.sensitivity.tornado import Tornado, TornadoBar

ROOT = Path(__file__).parents[1]
SMALL, LARGE = "paper/small-a100", "paper/strong-3072"
EVIL = "</script></title><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;\x00\ud800"


@functools.cache
def planned() -> PlanningResult:
    return make_plan(find_job(SMALL, layouts=["llm=pp1,tp4"]), systems=["stage0", "three-phase"])


@functools.cache
def data() -> ReportData:
    return gather_report_data(planned().plan, comparison=planned().comparison)


@functools.cache
def alone() -> ReportData:
    """The data comes from the plan file and nothing else."""
    return gather_report_data(planned().plan)


class Page(HTMLParser):
    """Collects what a browser would find: tags with attributes, and text by the tag it stands in."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open = [""]
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "path", "rect"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self._open.pop() == tag, f"{tag} is closed in another place than it was opened"

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1], data))

    def of(self, tag: str) -> list[str]:
        return [text for place, text in self.texts if place == tag]


def unpacked(scene: dict[str, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """Begin and end in ticks, name, microbatch + 1 and slack, as the script reads them."""
    raw = zlib.decompress(base64.b64decode(scene["data"]))
    values, value, shift = list[int](), 0, 0
    for byte in raw:
        value |= (byte & 127) << shift
        shift += 7
        if not byte & 128:
            values.append(value)
            value = shift = 0
    gap, spent, name, microbatch, slack = np.array(values).reshape(5, -1)
    begin, end, place = np.zeros_like(gap), np.zeros_like(gap), 0
    for count in scene["counts"]:
        mine = slice(place, place + count)
        end[mine] = np.cumsum(gap[mine] + spent[mine])
        begin[mine] = end[mine] - spent[mine]
        place += count
    return begin, end, name, microbatch, slack


# ---------------------------------------------------------------- what it says


@pytest.mark.ci
def test_titles_say_the_figures_of_the_plan() -> None:
    plan, system = planned().plan, planned().system
    page = Page(render_report_page(data()))
    where, timeline, memory, sure, tried = page.of("h2")
    idle = system.bubbles.total / planned().step_s
    hidden = planned().hidden_strict
    share = f"{100 * hidden:.0f} %" if hidden > 0 else "nothing"
    assert where.startswith(
        f"Filling hides {share} of the encoder; {100 * idle:.0f} % of the step is left idle"
    )
    before = replay_llm_alone(plan).timeline.step_s
    assert (
        f"{format_seconds(planned().step_s)} s instead of {format_seconds(before)} s for the LLM alone"
        in timeline
    )
    assert (
        f"{format_seconds(sum(plan.claims.encoder_s.values()) / len(plan.programs))} s compute per GPU"
        in timeline
    )
    peak = max(held.peak for held in plan.memory)
    assert f"needs {format_gigabytes(peak)} of {format_gigabytes(plan.capacity_bytes)} GB" in memory
    assert "of 20 perturbed replays" in sure
    found = planned().search_result
    own = {module.layout for module in plan.encoders.values()}
    scheduled = 1 + sum({each.layout} != own for each in found.tried)
    assert tried.startswith(f"Of {found.considered} encoder layouts {scheduled} were scheduled")
    head = page.of("h1")[0]
    assert head.startswith(f"{format_seconds(planned().step_s)} s a step on {plan.ranks.world} GPUs")
    assert f"{planned().step_s / planned().floor_s:.3f} times the floor" in head


def test_without_the_job_it_says_what_it_does_not_know() -> None:
    page = Page(render_report_page(alone()))
    assert len(page.of("h2")) == 4
    assert any("name its job with --job" in text for text in page.of("p"))
    assert any("Only this plan was simulated again" in text for text in page.of("p"))
    assert {bar.name for bar in alone().breakdown.bars} == set(planned().systems)
    assert [bar.is_reported for bar in alone().breakdown.bars if bar.parts] == [True]


def test_the_foot_says_where_figures_come_from() -> None:
    foot = " ".join(Page(render_report_page(alone())).of("p")[-3:])
    assert "analytic, uncalibrated" in foot and "preset default" in foot
    assert hash_plan(planned().plan) in foot and optimus.__version__ in foot
    assert "power limits" in foot


def test_parts_of_bars_are_the_bubbles_of_the_table_and_sum_to_the_step() -> None:
    for bar in data().breakdown.bars:
        assert sum(bar.parts.values()) == pytest.approx(bar.step_s)
        bubbles = planned().systems[bar.name].bubbles
        assert sum(bar.parts[cause] for cause in CAUSES) == pytest.approx(bubbles.total, rel=1e-3)
        if bar.name == planned().plan.strategy:  # replayed with every TP block, which the table counts as one
            lowered = planned().search_result.filled.lowered
            bubbles = average_bubbles(sum_bubbles_by_cause(lowered.schedule, lowered.timeline))
        for cause in CAUSES:
            assert bar.parts[cause] == pytest.approx(getattr(bubbles, cause), abs=1e-9)


def test_memory_over_the_step_peaks_at_the_claim() -> None:
    memory = data().memory
    highest = memory.fixed_bytes + sum(memory.alive.values()).max()  # type: ignore[union-attr]
    assert highest == memory.peak_bytes == max(held.peak for held in planned().plan.memory)
    assert np.all(np.diff(memory.times_s) >= 0) and memory.times_s[-1] <= memory.step_s


def test_faster_traffic_and_compute_shorten_the_step() -> None:
    for row in data().tornado.wide:
        lower_is_faster = row.name in (
            "image tokens",
            "compute of fully sharded modules",
            "slow-down under collectives",
            "a launch",
        )
        rises = row.low_s < row.high_s
        assert rises == lower_is_faster or row.low_s == row.high_s
        least, most = sorted((row.low_s, row.high_s))
        assert least - 1e-9 <= planned().step_s <= most + 1e-9
    assert data().tornado.winner in planned().systems
    assert alone().tornado.winner is None


def test_a_finer_analysis_takes_the_place_of_ours() -> None:
    rows = tuple(
        TornadoBar(
            name=name, low_label="0 %", high_label="80 %", low_s=1.0, high_s=high,
            winner_low="paper", winner_high="three-phase",
        )
        for name, high in (("TP traffic overlapped", 2.0), ("DP", 1.5))
    )  # fmt: skip
    given = Tornado(step_s=1.2, wide=rows, winner="paper", how="200 cost models")
    html = render_report_page(replace(data(), tornado=given))
    assert "paper is the fastest in 2 of 4 perturbed replays, else three-phase" in html
    assert "200 cost models." in html


def test_every_rejected_layout_stands_with_its_reason() -> None:
    page = Page(render_report_page(data()))
    cells = page.of("td")
    for each in planned().rejected:
        assert each.label in cells and each.reason in cells


# ---------------------------------------------------------------- what the script is given


def test_every_kernel_is_packed_where_it_was_played() -> None:
    scenes, what = pack_timelines(data().timelines)
    assert what == "kernels"
    for scene, given in zip(scenes, data().timelines, strict=True):
        begin, end, name, microbatch, slack = unpacked(scene)
        schedule, timeline = given.schedule, given.timeline
        ticks = np.rint(timeline.start_s / TICK_S), np.rint(timeline.finish_s / TICK_S)
        work = (schedule.lane == Lane.COMPUTE) & (ticks[1] > ticks[0])
        idle = np.array([words.startswith("idle") for words in scene["names"]])[name]
        lane = np.repeat(np.arange(len(scene["counts"])) % len(timeline_chart.LANES), scene["counts"])
        own = (lane == 0) & ~idle
        assert own.sum() == work.sum()
        assert sorted(begin[own].tolist()) == sorted(ticks[0][work].tolist())
        assert (end - begin)[own].sum() == pytest.approx((ticks[1] - ticks[0])[work].sum())
        assert slack[own].max() * timeline_chart.SLACK_TICK_S <= timeline.step_s
        assert microbatch.max() == schedule.microbatch.max() + 1
        # Work and idle time of a compute lane fill the step.
        row = np.repeat(np.arange(len(scene["counts"])), scene["counts"])
        for device in range(len(scene["rows"])):
            mine = row == device * len(timeline_chart.LANES)
            filled = (end - begin)[mine].sum()
            assert filled == pytest.approx(timeline.step_s / TICK_S, abs=2)


def test_a_plan_too_large_for_kernels_is_drawn_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = sum(len(json.dumps(scene)) for scene in pack_timelines(data().timelines)[0])
    monkeypatch.setattr(timeline_chart, "MAX_PACKED_BYTES", kernels - 1)
    scenes, what = pack_timelines(data().timelines)
    assert what == "ops" and sum(len(json.dumps(scene)) for scene in scenes) < kernels
    assert "not their kernels" in render_report_page(data())
    monkeypatch.setattr(timeline_chart, "MAX_PACKED_BYTES", 10)
    html = render_report_page(data())
    assert "id='data'" not in html and "<div id='still'" in html


# ---------------------------------------------------------------- the file


def test_it_asks_for_nothing_else_and_is_whole_without_its_script() -> None:
    html = render_report_page(data())
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(", html)
    page = Page(html)
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object", "embed")]
    assert not any({"src", "href", "onerror", "onload"} & set(given) for _, given in page.tags)
    still = html[html.index("<div id='still'") : html.index("<div id='live' hidden>")]
    assert still.count("<g transform") == sum(len(scene.rows) for scene in data().timelines)
    assert "@media print" in html and "prefers-color-scheme:dark" in html


@pytest.mark.ci
def test_the_same_plan_gives_the_same_bytes() -> None:
    again = gather_report_data(
        make_plan(find_job(SMALL, layouts=["llm=pp1,tp4"]), systems=["stage0", "three-phase"]).plan
    )
    assert render_report_page(again) == render_report_page(alone())


def test_names_may_hold_markup() -> None:
    plan = planned().plan
    evil = replace(
        plan,
        name=EVIL,
        order=EVIL,
        tool=EVIL,
        notes={"systems_s": {EVIL: 1.0, "x": "y"}, "floor_s": EVIL, "preset": {"name": EVIL}, "mfu": True},
    )
    html = render_report_page(gather_report_data(evil, digest="0" * 64))
    page = Page(html)
    assert html.encode()
    assert [given for tag, given in page.tags if tag == "script"] == [
        {"type": "application/json", "id": "data"}, {}
    ]  # fmt: skip
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert page.of("p")[0].startswith("</script></title>")


@pytest.mark.parametrize("seed", range(4))
def test_any_plan_has_a_page(seed: int) -> None:
    plan = tiny_plan(Random(seed))
    html = render_report_page(gather_report_data(plan))
    assert len(Page(html).of("h2")) == 4
    assert format_seconds(plan.claims.step_s) in html


@pytest.mark.ci
def test_writing_the_verb(tmp_path: Path) -> None:
    path = optimus.report(planned(), tmp_path / "page.html", trace=tmp_path / "trace.json.gz")
    assert path.read_text() == render_report_page(data())
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]


@pytest.mark.ci
def test_a_job_must_be_the_plan_s() -> None:
    with pytest.raises(UserError, match="model"):
        rerun_comparison(planned().plan, find_job("paper/A"))
    again = rerun_comparison(planned().plan, find_job(SMALL, layouts=["llm=pp1,tp4"]))
    assert set(again.systems) == set(planned().systems)
    for name, system in again.systems.items():
        assert system.step_s == planned().systems[name].step_s


# ---------------------------------------------------------------- the command


@functools.cache
def kept(folder: Path) -> Path:
    path = folder / "small.plan.json"
    save_plan(planned().plan, path)
    return path


@pytest.mark.ci
def test_the_command_writes_beside_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = kept(tmp_path)
    assert run(["report", str(plan), "--json", "--trace", str(tmp_path / "t.json.gz")]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "schema": "optimus.report/1",
        "html": str(tmp_path / "small.html"),
        "trace": str(tmp_path / "t.json.gz"),
    }
    assert (tmp_path / "small.html").read_text() == render_report_page(alone())
    assert run(["report", str(plan), "--job", SMALL, "-o", str(tmp_path / "job.html")]) == OK
    assert "wrote" in capsys.readouterr().out
    assert len(Page((tmp_path / "job.html").read_text()).of("h2")) == 5


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--on", "h100:8"], "needs --job"),
        (["-o", "page.pdf"], "is not a .html file"),
        (["--job", "paper/A"], "the plan was made for"),
        (["--trace", "trace.txt"], "is not a .json.gz"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert run(["report", str(kept(tmp_path)), *arguments]) == USER_ERROR
    assert problem in capsys.readouterr().err


@pytest.mark.ci
def test_it_leaves_torch_alone(tmp_path: Path) -> None:
    script = (
        "import sys; from optimus.cli import run\n"
        f"assert run(['report', {str(kept(tmp_path))!r}]) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- large plans, and the policy


@functools.cache
def large() -> Plan:
    return make_plan(find_job(LARGE), systems=["balanced-best"]).plan


@pytest.mark.ci
def test_3072_gpus_fit_in_a_small_file() -> None:
    plan = large()
    replayed = replay_plan(plan)
    assert len(replayed.schedule) > 70_000
    found = gather_report_data(plan)
    html = render_report_page(found)
    assert len(html.encode()) < 400_000
    assert pack_timelines(found.timelines)[1] == "kernels"
    where, timeline, memory, sure = Page(html).of("h2")
    assert f"{format_seconds(plan.claims.step_s)} s" in timeline
    assert f"hides {100 * plan.notes['hidden_share_strict']:.0f} %" in where
    assert f"{format_gigabytes(max(held.peak for held in plan.memory))} of 80.0 GB" in memory
    assert "compute efficiency" in sure
    llm = replayed.schedule.module == plan.names.index("llm")
    before = replay_llm_alone(plan)
    counted = [
        int((schedule.kind[mine] == OpKind.FORWARD).sum())
        for schedule, mine in ((replayed.schedule, llm), (before.schedule, before.schedule.module == 1))
    ]
    assert counted[0] == counted[1]


def test_a_page_names_the_only_script_that_runs() -> None:
    """The hash is that of the text between the tags, as browsers compute it."""
    html = render_report_page(data())
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert script is not None and policy is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy[1] and policy[1].startswith("default-src 'none';")
