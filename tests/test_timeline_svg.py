"""The picture of a timeline: what it shows is what the timeline holds, in a file that any browser opens."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from busy_time import busy_s

from optimus.errors import DoesNotFit, UserError
from optimus.ir.op import Communicator, Lane, OpKind
from optimus.job.read import find_job
from optimus.planner.compare import Comparison, compare_systems
from optimus.planner.systems.base import SimulatedSystem
from optimus.render.palette import IDLE_DP, IDLE_PP, IDLE_TP, STACK
from optimus.render.timeline_svg import PLOT, build_timeline_rows, render_timeline_svg, write_timeline_svg
from optimus.schedule.bubbles import average_bubbles, sum_bubbles_by_cause
from optimus.schedule.pipeline_orders import (
    PipelineOrder,
    build_1f1b_order,
    build_interleaved_1f1b_order,
    build_zero_bubble_order,
)
from optimus.schedule.schedule_builder import (
    KERNEL_ROW,
    KernelGraph,
    ScheduleBuilder,
    make_single_kernel_graph,
)
from optimus.schedule.simulator import simulate_schedule

SVG = "{http://www.w3.org/2000/svg}"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "strong-3072.svg"
COMMAND = (
    "optimus simulate paper/strong-3072 --system stage0 balanced-best --picture docs/images/strong-3072.svg"
)


def op_of(kind: OpKind, module: int, seconds: float, layers: int = 2) -> KernelGraph:
    """Compute kernels with an exposed collective between each two of them."""
    compute = (seconds, 0, 0, kind, module, Lane.COMPUTE, Communicator.NONE)
    rows = [compute, (seconds / 5, 0, 1, kind, module, Lane.TP, Communicator.TP)] * layers
    rows.append(rows[0])
    edges = [(row, row - 1) for row in range(1, len(rows))]
    last = len(rows) - 1
    return KernelGraph(
        rows=np.array(rows, KERNEL_ROW), edges=np.array(edges, np.int64), entries=(0,), exits=(last,)
    )


def system_of(
    order: PipelineOrder, *, layers: int = 2, name: str = "stage0", fits: bool = True
) -> SimulatedSystem:
    """A pipeline whose first stage is an encoder's, with gathers, reduces and an optimizer."""
    stages = len(order)
    templates = {
        (kind, module): op_of(kind, module, seconds, layers)
        for kind, seconds in (
            (OpKind.FORWARD, 1e-3),
            (OpKind.BACKWARD, 2e-3),
            (OpKind.INPUT_GRAD, 1e-3),
            (OpKind.WEIGHT_GRAD, 1e-3),
        )
        for module in (0, 1)
    }
    builder = ScheduleBuilder(("vision", "llm"), stages)
    blocks: dict[tuple[int, OpKind, int, int], int] = {}
    reduces = []
    for stage, ops in enumerate(order):
        previous = builder.add(make_single_kernel_graph(OpKind.UNSHARD, Lane.DP, 3e-3), device=stage)
        for op in ops:
            previous = builder.add(
                templates[op.kind, 0 if (stage, op.chunk) == (0, 0) else 1], device=stage,
                chunk=op.chunk, microbatch=op.microbatch, after=[previous],
            )  # fmt: skip
            blocks[stage, op.kind, op.chunk, op.microbatch] = previous
        reduces.append(
            builder.add(
                make_single_kernel_graph(OpKind.REDUCE_GRAD, Lane.DP, 4e-3), device=stage, after=[previous]
            )
        )
    for (stage, kind, chunk, microbatch), block in blocks.items():
        step = {OpKind.FORWARD: -1, OpKind.BACKWARD: 1, OpKind.INPUT_GRAD: 1, OpKind.WEIGHT_GRAD: 0}[kind]
        there, place = divmod(chunk * stages + stage + step, stages)
        if step and (place, kind, there, microbatch) in blocks:
            builder.wait([block], [blocks[place, kind, there, microbatch]])
    for stage in range(stages):
        builder.add(
            make_single_kernel_graph(OpKind.OPTIMIZER, Lane.COMPUTE, 1e-3), device=stage, after=reduces
        )
    schedule = builder.build()
    timeline = simulate_schedule(schedule)
    return replace(
        a_system(), name=name, fits=fits, step_s=timeline.step_s, schedule=schedule, timeline=timeline,
        bubbles=average_bubbles(sum_bubbles_by_cause(schedule, timeline)),
    )  # fmt: skip


@functools.cache
def a_system() -> SimulatedSystem:
    """For what a picture does not show."""
    return compare_systems(find_job("paper/small-a100", layouts=["llm=pp1,tp4"]), names=["stage0"]).systems[
        "stage0"
    ]


@functools.cache
def small() -> SimulatedSystem:
    return system_of(build_1f1b_order(stages=4, microbatches=6))


@functools.cache
def split() -> SimulatedSystem:
    return system_of(build_zero_bubble_order(stages=4, chunks=2, microbatches=8), name="balanced-best")


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text")]


def widths(svg: str) -> list[float]:
    """Of every row: how far its lane reaches, in px."""
    found = re.findall(r"d='M0 0h(\d+)v\d+H0z'", svg)
    return [int(units) / 4 for units in found]


@pytest.mark.parametrize("make", [small, split])
def test_idle_time_in_the_picture_is_the_bubbles_of_the_table_by_cause(
    make: Callable[[], SimulatedSystem],
) -> None:
    system = make()
    bubbles = sum_bubbles_by_cause(system.schedule, system.timeline)
    busy = busy_s(system.schedule, system.timeline)
    for row, expected, work in zip(build_timeline_rows(system), bubbles, busy, strict=True):
        shown = row.intervals
        spent = np.bincount(shown.fill, shown.end_s - shown.begin_s, minlength=len(STACK))
        assert np.all(shown.begin_s[1:] == shown.end_s[:-1]) and shown.begin_s[0] == 0.0
        assert shown.end_s[-1] == system.step_s
        assert spent[STACK.index(IDLE_TP)] == pytest.approx(expected.tp)
        in_dp = expected.dp_all_gather + expected.dp_reduce_scatter
        assert spent[STACK.index(IDLE_DP)] == pytest.approx(in_dp)
        in_pp = expected.pp_warmup + expected.pp_cooldown + expected.pp_other
        assert spent[STACK.index(IDLE_PP)] == pytest.approx(in_pp)
        assert spent[: STACK.index(IDLE_TP)].sum() == pytest.approx(work)


def test_every_device_has_a_row_and_all_rows_share_one_time_scale() -> None:
    svg = render_timeline_svg([small(), split()], job="job")
    labels = [text for text in texts(svg) if text.startswith("stage")]
    assert labels == [f"stage {device}" for device in range(4)] * 2
    longest = max(small().step_s, split().step_s)
    expected = [PLOT * system.step_s / longest for system in (small(), split()) for _ in range(4)]
    assert widths(svg) == pytest.approx(expected, abs=0.25)


def test_the_headline_says_how_long_a_step_is_how_idle_and_whether_it_fits() -> None:
    svg = render_timeline_svg([replace(small(), fits=False)], job="paper/X")
    idle = 100 * small().bubbles.total / small().step_s
    headline = f"paper/X, stage0: {small().step_s:.4f} s a step, {idle:.0f} % of GPU time idle"
    assert texts(svg)[0] == f"{headline}; does not fit in memory"
    assert ET.fromstring(svg).findtext(f"{SVG}title") == texts(svg)[0]


def test_the_legend_names_what_is_in_the_picture_and_nothing_else() -> None:
    always = {"optimizer", "idle: waits for TP", "idle: waits for DP", "idle: waits for the pipeline"}
    always |= {"LLM forward", "LLM backward", "encoder forward", "encoder backward"}
    always |= {"DP all-gather", "DP reduce-scatter"}
    for system, more in (
        (small(), set[str]()),
        (split(), {"LLM weight gradient", "encoder weight gradient"}),
    ):
        words = texts(render_timeline_svg([system], job="job"))
        legend = [w for w in words if not w.startswith("stage") and not re.match(r"[\d.]+( s)?$", w)]
        assert set(legend[1:-1]) == always | more


def test_names_may_hold_markup_and_what_xml_forbids() -> None:
    name = "</text><script>alert('&amp;')</script>\x00\x1b\ud800"
    svg = render_timeline_svg([small()], job=name, note=name)
    root = ET.fromstring(svg.encode())
    assert not list(root.iter(f"{SVG}script"))
    assert texts(svg)[0].startswith("</text><script>alert('&amp;')</script>\\x00\\x1b\\ud800, stage0")


def test_the_picture_stands_on_a_background_of_its_own_and_asks_the_network_for_nothing() -> None:
    svg = render_timeline_svg([small()], job="job")
    first = next(ET.fromstring(svg).iter(f"{SVG}rect"))
    assert (first.get("width"), first.get("height"), first.get("fill")) == ("100%", "100%", "#ffffff")
    assert re.findall(r"https?://[^']*", svg) == ["http://www.w3.org/2000/svg"]


def test_the_same_systems_give_the_same_bytes() -> None:
    again = system_of(build_1f1b_order(stages=4, microbatches=6))
    assert render_timeline_svg([small()], job="job") == render_timeline_svg([again], job="job")


@pytest.mark.ci
def test_128_microbatches_on_16_stages_make_a_small_file() -> None:
    wide = system_of(build_interleaved_1f1b_order(stages=16, chunks=4, microbatches=128), layers=4)
    assert len(wide.schedule) > 100_000
    svg = render_timeline_svg([wide, wide, wide], job="job")
    assert len(svg.encode()) < 300_000
    assert len(widths(svg)) == 48
    ET.fromstring(svg)


def test_ops_that_are_wide_enough_are_boxes_of_their_own() -> None:
    one = system_of(build_1f1b_order(stages=1, microbatches=3))
    lines = re.findall(
        r"<path stroke='#ffffff' stroke-width='2' d='([^']*)'", render_timeline_svg([one], job="job")
    )
    assert lines[0].count("M") == 5  # between three forwards and three backwards


def test_writing_says_what_is_wrong(tmp_path: Path) -> None:
    comparison = a_comparison({"stage0": small()}, {})
    write_timeline_svg(comparison, tmp_path / "picture.svg")
    ET.parse(tmp_path / "picture.svg")
    with pytest.raises(UserError, match="cannot be written"):
        write_timeline_svg(comparison, tmp_path / "missing" / "picture.svg")
    with pytest.raises(DoesNotFit, match="fsdp: too large"):
        write_timeline_svg(a_comparison({}, {"fsdp": "too large"}), tmp_path / "picture.svg")


def a_comparison(systems: dict[str, SimulatedSystem], missing: dict[str, str]) -> Comparison:
    from optimus.cost.assumptions import get_preset
    from optimus.planner.layouts import choose_smallest_context
    from optimus.planner.systems.llm_only import LlmOnlySystem
    from optimus.planner.systems.pipeline_search import first_fitting_pipeline

    job, assumptions = find_job("paper/A"), get_preset("default")
    context, _ = choose_smallest_context(job, assumptions)
    return Comparison(
        job=job, assumptions=assumptions, context=context, systems=systems, missing=missing,
        llm_only=LlmOnlySystem().simulate_candidate(first_fitting_pipeline(context, (job.model.llm,))),
        floor_1f1b_s=1.0, rejected=(), considered=1, compared=1, search_s=0.0,
    )  # fmt: skip


@pytest.mark.ci
def test_the_picture_of_the_readme_is_what_the_command_draws_today(tmp_path: Path) -> None:
    names = COMMAND.split("--system ")[1].split(" --")[0].split()
    write_timeline_svg(compare_systems(find_job("paper/strong-3072"), names=names), tmp_path / "now.svg")
    shown, now = (path.read_text(encoding="utf-8") for path in (PICTURE, tmp_path / "now.svg"))
    # Figures of the headlines to three digits, rows, legend and axes; not bytes, which may differ in a pixel.
    assert texts(shown) == texts(now), f"the picture is stale: {COMMAND}"
    assert widths(shown) == pytest.approx(widths(now), abs=1.0), f"the picture is stale: {COMMAND}"
