"""Draws the picture of the README: one step with the encoder in stage 0, and with its work in idle time.

Both steps are plans that the validator accepts, replayed: four stages, eight microbatches, an LLM stage takes
1 forward and 2 backward, the encoder 1.2 forward and 2.4 backward per microbatch.

    python -m benchmarks.docs.readme_picture
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.docs.pages import DOCS
from optimus import EncoderBlocks, Seconds, plan_modules
from optimus.ir.op import Lane, OpKind
from optimus.planner.plan_replay import replay_plan
from optimus.verify.validator import check_plan

STAGES, MICROBATCHES, BLOCKS = 4, 8, 4
LLM = Seconds(forward_s=1.0, backward_s=2.0)
BLOCK = Seconds(forward_s=0.3, backward_s=0.6)
WIDTH, LEFT, RIGHT, ROW, GAP = 1000, 76, 16, 26, 4
INK, FAINT, IDLE = "#1f2328", "#59636e", "#eceff2"
COLOURS = {
    ("llm", OpKind.FORWARD): "#8ec5f0",
    ("llm", OpKind.BACKWARD): "#2f74b5",
    ("vision", OpKind.FORWARD): "#ffb000",
    ("vision", OpKind.BACKWARD): "#d9480f",
}
Box = tuple[int, float, float, str, OpKind, int]  # stage, start, end, module, kind, microbatch


def filled() -> tuple[float, list[Box]]:
    """Returns the step and the boxes of a plan with encoder work in the LLM's idle time."""
    encoder = EncoderBlocks(blocks=(BLOCK,) * BLOCKS)
    return _replayed([LLM] * STAGES, {"vision": encoder})


def in_stage_0() -> tuple[float, list[Box]]:
    """Returns the step and the boxes of 1F1B with the whole encoder in the first stage."""
    forward_s, backward_s = BLOCKS * BLOCK.forward_s, BLOCKS * BLOCK.backward_s
    first = Seconds(forward_s=LLM.forward_s + forward_s, backward_s=LLM.backward_s + backward_s)
    step_s, boxes = _replayed([first, *[LLM] * (STAGES - 1)], {})
    split: list[Box] = []
    for stage, start, end, module, kind, microbatch in boxes:
        if stage == 0:  # the encoder's forward comes first, its backward last
            cut = start + forward_s if kind == OpKind.FORWARD else end - backward_s
            parts = ("vision", "llm") if kind == OpKind.FORWARD else ("llm", "vision")
            split += [(0, start, cut, parts[0], kind, microbatch), (0, cut, end, parts[1], kind, microbatch)]
        else:
            split.append((stage, start, end, module, kind, microbatch))
    return step_s, split


def _replayed(stages: list[Seconds], encoders: dict[str, EncoderBlocks]) -> tuple[float, list[Box]]:
    plan = plan_modules(stages=stages, encoders=encoders, microbatches=MICROBATCHES, ranks=STAGES, pp=STAGES)
    assert check_plan(plan).ok
    replayed = replay_plan(plan)
    starts, ends = replayed.timeline.start_s.tolist(), replayed.timeline.finish_s.tolist()
    boxes: list[Box] = [
        (op.device, start, end, op.module, op.kind, op.microbatch)
        for op, start, end in zip(replayed.schedule, starts, ends, strict=True)
        if op.lane == Lane.COMPUTE and op.kind in (OpKind.FORWARD, OpKind.BACKWARD) and end > start
    ]
    return plan.claims.step_s, _joined(boxes)


def _joined(boxes: list[Box]) -> list[Box]:
    """Joins the blocks of one encoder op that run back to back."""
    joined: list[Box] = []
    for box in sorted(boxes):
        if joined and joined[-1][0] == box[0] and joined[-1][3:] == box[3:] and box[1] - joined[-1][2] < 1e-6:
            joined[-1] = (*joined[-1][:2], box[2], *joined[-1][3:])
        else:
            joined.append(box)
    return joined


def picture() -> str:
    """Returns both steps on one time axis, as SVG."""
    stage0_s, stage0 = in_stage_0()
    filled_s, boxes = filled()
    scale = (WIDTH - LEFT - RIGHT) / stage0_s
    panel = STAGES * (ROW + GAP)
    height = 64 + 2 * (panel + 56)
    title = f"encoder in the first stage: {stage0_s:.1f}"
    saved = f"Optimus, encoder work in the idle time of all stages: {filled_s:.1f}"
    view = f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="system-ui, sans-serif" font-size="13"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {view}>',
        f"<title>{title}; {saved}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *_legend(),
        *_panel(68, title, stage0_s, stage0, scale),
        *_panel(
            68 + panel + 56, f"{saved} ({stage0_s / filled_s:.2f} times as fast)", filled_s, boxes, scale
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _legend() -> Iterator[str]:
    names = ("LLM forward", "LLM backward", "encoder forward", "encoder backward", "idle")
    for place, (name, colour) in enumerate(zip(names, (*COLOURS.values(), IDLE), strict=True)):
        x = LEFT + 160 * place
        yield f'<rect x="{x}" y="14" width="14" height="14" rx="2" fill="{colour}" stroke="#00000022"/>'
        yield f'<text x="{x + 20}" y="26" fill="{INK}">{name}</text>'


def _panel(top: int, title: str, step_s: float, boxes: list[Box], scale: float) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="{top - 10}" fill="{INK}" font-size="15" font-weight="600">{title}</text>'
    for stage in range(STAGES):
        y = top + stage * (ROW + GAP)
        yield f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end" fill="{FAINT}">stage {stage}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{step_s * scale:.1f}" height="{ROW}" fill="{IDLE}"/>'
    for stage, start, end, module, kind, microbatch in boxes:
        x, y, width = LEFT + start * scale, top + stage * (ROW + GAP), (end - start) * scale
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{max(1.0, width - 1):.1f}" height="{ROW}" rx="1.5" '
            f'fill="{COLOURS[module, kind]}"/>'
        )
        if width > 12:
            ink = "#ffffff" if kind == OpKind.BACKWARD else INK
            yield (
                f'<text x="{x + width / 2:.1f}" y="{y + 18}" text-anchor="middle" fill="{ink}" '
                f'font-size="12">{microbatch + 1}</text>'
            )


if __name__ == "__main__":
    (DOCS / "images" / "filled-step.svg").write_text(picture())
