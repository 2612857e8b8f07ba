"""Compares the lines of a plan with those its header asks for: each exactly once, on its owner."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import numpy as np

from optimus.ir.op import Ints, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.verify.expected_lines import Asked, Block, Lines, backward_kind

SearchResult = Iterator[tuple[str, str]]  # where, problem
_LARGEST = 2**53  # of a number of bytes: sums stay exact
_NUM_VERBS = len(OpKind)


def check_header(plan: Plan) -> SearchResult:
    """What is wrong with the tables that say which lines are needed."""
    if LLM not in plan.modules or list(plan.modules)[-1] != LLM:
        yield "modules", f"the last module is not {LLM}"
        return
    layouts = list(_layout_problems(plan))
    yield from layouts
    if layouts:
        return
    for name in plan.modules:
        yield from _module_problems(plan, name)
    yield from _number_problems(plan)
    stages = plan.ranks.llm.pp
    if len(plan.finish_s) not in (0, stages):
        yield "finish_s", f"{len(plan.finish_s)} entries for {stages} LLM stages"
    if len(plan.programs) != plan.ranks.num_classes:
        yield "programs", f"{len(plan.programs)} programs for {plan.ranks.num_classes} device classes"


def _layout_problems(plan: Plan) -> SearchResult:
    llm = plan.modules[LLM].layout
    lines = sum(len(program) for program in plan.programs)
    if not 1 <= plan.microbatches <= max(lines, 1):  # so that tables made from it cannot be large
        yield "microbatches", f"{plan.microbatches} of them in {lines} lines"
    for name, module in plan.modules.items():
        layout = module.layout
        if min(layout.dp, layout.pp, layout.cp, layout.ep, layout.tp, layout.chunks) < 1:
            yield name, f"layout {layout} has an axis below 1"
        elif layout.gpus != llm.gpus:
            yield name, f"layout {layout} uses {layout.gpus} GPUs, the LLM {llm.gpus}"
        elif llm.pp % layout.pp or llm.tp % layout.tp:
            yield name, f"pp and tp of layout {layout} do not divide the LLM's, {llm}"
        elif name != LLM and (layout.cp, layout.ep, layout.chunks) != (1, 1, 1):
            yield name, f"layout {layout}: an encoder has cp, ep and chunks of 1"
        elif len(module.chunks) != layout.virtual_stages or len(module.buckets) != layout.pp:
            yield name, f"has {len(module.chunks)} chunks and buckets of {len(module.buckets)} stages"


def _module_problems(plan: Plan, name: str) -> SearchResult:
    module = plan.modules[name]
    if name != LLM:
        owners, pipelines = module.pipelines, plan.ranks.num_pipelines(name)
        if module.pieces < 1 or len(owners) != plan.microbatches * module.pieces:
            yield name, f"{len(owners)} pipelines for {plan.microbatches} x {module.pieces} microbatches"
        elif not all(0 <= owner < pipelines for owner in owners):
            yield name, f"a microbatch on a pipeline that is none of its {pipelines}"
    asked = False  # whether the gradient of the stage before is needed
    for virtual, chunk in enumerate(module.chunks):
        kinds = {kind for kind, template in chunk.templates.items() if plan.templates[template]}
        if OpKind.FORWARD not in kinds or len(kinds) != len(chunk.templates):
            yield f"{name} virtual stage {virtual}", "has no forward or a template without phases"
        if (OpKind.BACKWARD in kinds and len(kinds) > 2) or (
            OpKind.WEIGHT_GRAD in kinds and OpKind.INPUT_GRAD not in kinds
        ):
            yield f"{name} virtual stage {virtual}", "has another backward than B, I, or I and W"
        backward = backward_kind(plan, name, virtual) is not None
        if asked and not backward:
            yield f"{name} virtual stage {virtual}", "has no backward, but one before it needs its gradient"
        asked = asked or backward
    if name != LLM and asked and backward_kind(plan, LLM, 0) is None:
        yield name, "needs a gradient, but the LLM's first virtual stage has no backward"


def _number_problems(plan: Plan) -> SearchResult:
    """Seconds and bytes with which nothing can be computed."""
    seconds = [plan.slowdown, plan.launch_s, *plan.finish_s]
    sizes = [plan.capacity_bytes]
    for template in plan.templates.values():
        seconds += [phase.duration_s for phase in template]
    for module in plan.modules.values():
        seconds.append(module.seam_s)
        sizes.append(module.seam_bytes)
        for chunk in module.chunks:
            seconds.append(chunk.send_s)
            sizes += [chunk.kept_bytes, chunk.made_again_bytes]
        for bucket in (bucket for stage in module.buckets for bucket in stage):
            seconds += [bucket.gather_s, bucket.reduce_s]
    if not all(isfinite(value) and value >= 0 for value in seconds):
        yield "header", "a duration is negative or not finite"
    if not all(0 <= value <= _LARGEST for value in sizes):
        yield "header", "a size in bytes is negative or too large"
    for name, template in plan.templates.items():
        if any(not 0 <= dep < place for place, phase in enumerate(template) for dep in phase.after):
            yield f"template {name}", "a phase comes after one that does not stand before it"


def check_coverage(lines: Lines, asked: Asked) -> SearchResult:
    """Missing, repeated and foreign lines; remembers where the lines are if there are none of these."""
    plan, blocks = lines.plan, list(asked.blocks())
    wanted = sum(len(block.microbatches) * len(block.places) for block in blocks)
    if wanted > 4 * len(lines) + 10_000:
        yield "programs", f"{len(lines)} lines where the header asks for {wanted}"
        return
    size = _sizes(plan, blocks)
    columns = (lines.module, lines.kind, lines.chunk, lines.microbatch, lines.place)
    known = np.ones(len(lines), bool)
    for column, limit in zip(columns, size, strict=True):
        known &= (column >= 0) & (column < limit)
    for line in np.flatnonzero(~known).tolist():
        yield lines.text(line), "is not asked for: out of range"
    rows = np.flatnonzero(known)
    keys = lines.device[rows]
    for column, limit in zip(columns, size, strict=True):
        keys = keys * limit + column[rows]
    order = np.argsort(keys, kind="stable")
    expected = _keys(plan, blocks, size)
    if len(rows) == len(lines) and np.array_equal(keys[order], expected):
        lines.locate(blocks, order)
        return
    found, first = np.unique(keys, return_index=True)
    for line in rows[first[~np.isin(found, expected)]].tolist():
        yield lines.text(line), "is not asked for: not this class's, or no such op"
    for at in (np.flatnonzero(np.diff(keys[order]) == 0) + 1).tolist():
        yield lines.text(int(rows[order[at]])), "stands there again"
    for key in expected[~np.isin(expected, found)].tolist():
        yield _name(plan, key, size), "is missing"


def _sizes(plan: Plan, blocks: list[Block]) -> tuple[int, ...]:
    """What module, kind, chunk, microbatch and place stay below."""
    return (
        len(plan.names),
        _NUM_VERBS,
        1 + max(block.where.chunk for block in blocks),
        1 + max((int(block.microbatches[-1]) for block in blocks if len(block.microbatches)), default=0),
        1 + max((int(block.places[-1]) for block in blocks if len(block.places)), default=0),
    )


def _keys(plan: Plan, blocks: list[Block], size: tuple[int, ...]) -> Ints:
    """Every line asked for as one number; ascending, because blocks come in this order."""
    modules, kinds, chunks, microbatches, places = size
    number = {name: index for index, name in enumerate(plan.names)}
    parts = []
    for (device, name, kind, chunk), rows, columns in blocks:
        first = ((device * modules + number[name]) * kinds + kind) * chunks + chunk
        parts.append((((first * microbatches + rows) * places)[:, None] + columns).ravel())
    keys: Ints = np.concatenate(parts)
    return keys


def _name(plan: Plan, key: int, size: tuple[int, ...]) -> str:
    """A line that stands nowhere, as it would be written."""
    words = []
    for limit in reversed(size):
        key, value = divmod(key, limit)
        words.append(value)
    place, microbatch, chunk, kind, module = words
    return f"class {key}: {plan.names[module]}.{OpKind(kind).word} {chunk} {microbatch} {place}"
