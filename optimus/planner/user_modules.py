"""Plans modules that the cost model does not know, from measured seconds of stages and encoder blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from random import Random

from optimus import __version__
from optimus.errors import UserError, one_of
from optimus.ir.binding import flatten_and_hash_parts
from optimus.ir.op import Communicator, KernelName, Lane, OpKind
from optimus.ir.plan import (
    Bucket,
    EncoderBlocks,
    Phase,
    Plan,
    PlanClaims,
    PlannedChunk,
    PlannedModule,
    Seconds,
    Template,
)
from optimus.ir.ranks import LLM
from optimus.job.layout import Layout
from optimus.planner.filled_plan import FilledPlan
from optimus.planner.systems.colocated_plan import split_layers_evenly
from optimus.planner.systems.pipeline import build_op_order
from optimus.schedule.fill import Fill, FillResult
from optimus.schedule.llm_timeline import LlmTimeline
from optimus.schedule.lower import lower_to_programs
from optimus.schedule.op_phases import SECONDS_DIGITS

UNLIMITED_BYTES = 2**50  # memory is not modelled here
SHIFT_SHARES = (0.0, 0.05, 0.1, 0.2)  # of the LLM's own step: how much later the LLM begins
MAX_REASSIGNMENTS = 60  # replays that the search for a better assignment may take
MAX_REASSIGNED_LINES = 40_000  # program lines that it may replay in all
TINY_S = 1e-9  # least time of a bucket: a bucket of 0 s would be left out


def plan_modules(
    *,
    stages: Sequence[Seconds],
    encoders: Mapping[str, EncoderBlocks],
    microbatches: int,
    ranks: int,
    pp: int,
    order: str = "",
    dealing_replicas: int = 1,
    deal_s: float = 0.0,
) -> Plan:
    """Plans an LLM of `stages` virtual stages, `pp` ranks per replica, with encoders in its bubbles.

    `order` is `1f1b`, `interleaved` or `zero-bubble`; one of the first two by default. Images of
    `dealing_replicas` replicas may be encoded on any of them; `deal_s` is the time of the exchange of their
    rows. Equal inputs give the same plan on every rank.
    """
    chunks = _check(len(stages), pp, ranks, encoders, dealing_replicas)
    order = order or ("1f1b" if chunks == 1 else "interleaved")
    templates: dict[str, Template] = {}
    split = order == "zero-bubble"
    llm = Layout(dp=ranks // pp, pp=pp, chunks=chunks)
    modules = {
        name: _module(name, encoder, llm, microbatches, templates) for name, encoder in encoders.items()
    }
    llm_chunks = tuple(
        _chunk(f"{LLM}.{at}", [stage], templates, split=split) for at, stage in enumerate(stages)
    )
    if dealing_replicas > 1:
        trains = any(block.backward_s > 0 for encoder in encoders.values() for block in encoder.blocks)
        _add_exchanges(templates, llm_chunks[0], deal_s, trains=trains)
    modules[LLM] = PlannedModule(layout=llm, chunks=llm_chunks, buckets=_llm_buckets(stages, llm))
    model = {"stages": list(map(asdict, stages)), "encoders": {n: asdict(e) for n, e in encoders.items()}}
    fields, hashes = flatten_and_hash_parts(
        {"model": model, "cluster": {"ranks": ranks}, "workload": {}, "profile": {}}
    )
    header = Plan(
        name="modules",
        tool=f"optimus {__version__}",
        strategy="optimus",
        order=order,
        microbatches=microbatches,
        modules=modules,
        templates=templates,
        slowdown=0.0,
        launch_s=0.0,
        capacity_bytes=UNLIMITED_BYTES,
        memory=(),
        claims=PlanClaims(step_s=0.0, lagged_s=0.0, estimate_s=0.0, encoder_s={}),
        programs=(),
        bound_to=fields,
        hashes=hashes,
        finish_s=(0.0,) * pp,
        dealing_replicas=dealing_replicas,
    )
    pipeline = build_op_order(order, stages=pp, chunks=chunks, microbatches=microbatches)
    return _fill(header, LlmTimeline(header, pipeline)).plan


def _fill(header: Plan, base: LlmTimeline) -> FilledPlan:
    """Fills the bubbles of `base` with encoder work and returns the fastest plan, by replay.

    Tries several assignments of encoder microbatches to pipelines and several shifts of the LLM.
    """
    headers = [_assigned(header, reverse=reverse) for reverse in (False, True)]
    shifts_s = [share * base.step_s for share in SHIFT_SHARES]
    drafts = [
        fill.schedule_encoders(shift_s)
        for fill in (Fill(each, base) for each in headers)
        for shift_s in shifts_s
    ]
    drafts.append(_reassigned(min(drafts, key=_replayed_s), base))
    tightened = [draft.fill.shorten(draft) for draft in drafts]
    fixed = [{"parameters": 0}] * header.ranks.num_classes
    best = min([*drafts, *tightened], key=_replayed_s)
    return FilledPlan(header=best.fill.header, orders=best.orders(), fixed=fixed, estimate_s=best.step_s)


def _replayed_s(arranged: FillResult) -> float:
    return lower_to_programs(arranged.fill.header, arranged.orders()).timeline.step_s


def _assigned(header: Plan, *, reverse: bool) -> Plan:
    """Assigns encoder microbatches to pipelines in rounds, from the first pipeline on or from the last."""
    pipelines = {}
    for name, module in header.encoders.items():
        count = header.ranks.num_pipelines(name)
        first_to_last = [number % count for number in range(len(module.pipelines))]
        pipelines[name] = [count - 1 - each for each in first_to_last] if reverse else first_to_last
    return _with_pipelines(header, pipelines)


def _reassigned(best: FillResult, base: LlmTimeline) -> FillResult:
    """Moves encoder microbatches to other pipelines, or swaps them, while the replayed step gets no longer.

    Rounds are uneven where pieces are many or the LLM leaves some stages idle for longer than others. The
    random numbers are the same on every rank.
    """
    random, best_s = Random(0), _replayed_s(best)
    header = best.fill.header
    movable = [name for name in header.encoders if header.ranks.num_pipelines(name) > 1]
    for _ in range(min(MAX_REASSIGNMENTS, MAX_REASSIGNED_LINES // len(best.turn)) if movable else 0):
        header = best.fill.header
        name = random.choice(movable)
        pipelines = list(header.modules[name].pipelines)
        here, there = (random.randrange(len(pipelines)) for _ in range(2))
        if random.random() < 0.5:
            pipelines[here], pipelines[there] = pipelines[there], pipelines[here]
        else:
            pipelines[here] = random.randrange(header.ranks.num_pipelines(name))
        draft = Fill(_with_pipelines(header, {name: pipelines}), base).schedule_encoders(best.shift_s)
        draft_s = _replayed_s(draft)
        if draft_s <= best_s:
            best, best_s = draft, draft_s
    return best


def _with_pipelines(header: Plan, pipelines: Mapping[str, Sequence[int]]) -> Plan:
    changed = {
        name: replace(header.modules[name], pipelines=tuple(numbers)) for name, numbers in pipelines.items()
    }
    return replace(header, modules={**header.modules, **changed})


def _check(
    virtual_stages: int, pp: int, ranks: int, encoders: Mapping[str, EncoderBlocks], dealing_replicas: int
) -> int:
    """Refuses counts that do not divide; returns the chunks per rank."""
    if ranks // pp % dealing_replicas:
        raise UserError(
            field="dealing_replicas",
            value=dealing_replicas,
            problem=f"does not divide {ranks // pp} replicas",
            hint=f"use {one_of(str(n) for n in range(1, ranks // pp + 1) if ranks // pp % n == 0)}",
        )
    if ranks % pp or virtual_stages % pp:
        raise UserError(
            field="pp",
            value=pp,
            problem=f"does not divide {ranks} ranks and {virtual_stages} stages",
            hint="give as many stages to every rank",
        )
    for name, encoder in encoders.items():
        if len(encoder.blocks) < encoder.pp:
            raise UserError(
                field=f"encoders.{name}.pp",
                value=encoder.pp,
                problem=f"is more than its {len(encoder.blocks)} blocks",
                hint="give every stage a block",
            )
        if pp % encoder.pp:
            fits = one_of(str(n) for n in range(1, pp + 1) if pp % n == 0)
            raise UserError(
                field=f"encoders.{name}.pp",
                value=encoder.pp,
                problem=f"does not divide pp = {pp}",
                hint=f"use {fits}",
            )
    return virtual_stages // pp


def _module(
    name: str, encoder: EncoderBlocks, llm: Layout, microbatches: int, templates: dict[str, Template]
) -> PlannedModule:
    layout = Layout(dp=llm.gpus // encoder.pp, pp=encoder.pp)
    blocks, stages = encoder.blocks, encoder.pp
    counts = split_layers_evenly(len(blocks), stages)
    ends = list(accumulate(counts))
    parts = [blocks[end - count : end] for end, count in zip(ends, counts, strict=True)]
    chunks = tuple(_chunk(f"{name}.{at}", part, templates, split=False) for at, part in enumerate(parts))
    return PlannedModule(
        layout=layout,
        chunks=chunks,
        buckets=tuple(_buckets(part) if layout.dp > 1 else () for part in parts),
        microbatches_per_llm_microbatch=encoder.pieces,
        pipelines=(0,) * (microbatches * encoder.pieces),
        seam_bytes=1,
        seam_s=round(blocks[-1].send_s, SECONDS_DIGITS),
    )


def _chunk(
    name: str, parts: Sequence[Seconds], templates: dict[str, Template], *, split: bool
) -> PlannedChunk:
    """Builds a chunk with one phase per block and kind; with `split`, backwards are I and W."""
    back = [(at, part) for at, part in reversed(list(enumerate(parts))) if part.backward_s > 0]
    phases = {OpKind.FORWARD: [(at, part.forward_s) for at, part in enumerate(parts)]}
    if split:
        phases[OpKind.INPUT_GRAD] = [(at, part.backward_s - part.weight_s) for at, part in back]
        phases[OpKind.WEIGHT_GRAD] = [(at, part.weight_s) for at, part in back]
    else:
        phases[OpKind.BACKWARD] = [(at, part.backward_s) for at, part in back]
    names = {}
    for kind, timed in phases.items():
        if timed:
            names[kind] = f"{name}.{kind.word}"
            templates[names[kind]] = tuple(
                Phase(
                    name="block",
                    kind=kind,
                    layer=layer,
                    duration_s=round(max(seconds, 0.0), SECONDS_DIGITS),
                    after=(place - 1,) if place else (),
                )
                for place, (layer, seconds) in enumerate(timed)
            )
    return PlannedChunk(
        templates=names, layers=len(parts), output_bytes=1, send_s=round(parts[-1].send_s, SECONDS_DIGITS)
    )


def _add_exchanges(
    templates: dict[str, Template], chunk: PlannedChunk, seconds: float, *, trains: bool
) -> None:
    """Lets the first virtual stage begin with the exchange of encoder rows, and end with its adjoint."""

    def exchange(name: str, first: int, after: tuple[int, ...]) -> Template:
        launch = Phase(
            name=f"{name}.deal",
            kind=OpKind.LAUNCH,
            layer=0,
            duration_s=round(seconds, SECONDS_DIGITS),
            bytes=1,
            lane=Lane.TP,
            communicator=Communicator.DEAL,
            after=after,
        )
        wait = replace(launch, kind=OpKind.WAIT, duration_s=0.0, bytes=0, lane=Lane.COMPUTE, after=(first,))
        return launch, wait

    for kind, name in chunk.templates.items():
        phases = templates[name]
        if kind == OpKind.FORWARD:
            later = (
                replace(phase, after=tuple(place + 2 for place in phase.after) or (1,)) for phase in phases
            )
            templates[name] = (*exchange(KernelName.SEAM.gather, 0, ()), *later)
        elif kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD) and trains:
            end = len(phases)
            templates[name] = (*phases, *exchange(KernelName.SEAM.scatter, end, (end - 1,)))


def _llm_buckets(stages: Sequence[Seconds], layout: Layout) -> tuple[tuple[Bucket, ...], ...]:
    """Returns the buckets of every stage of the LLM: one per chunk, none without replicas."""
    chunks = range(layout.chunks if layout.dp > 1 else 0)
    return tuple(
        tuple(_bucket(chunk, 0, [stages[chunk * layout.pp + stage]]) for chunk in chunks)
        for stage in range(layout.pp)
    )


def _buckets(blocks: Sequence[Seconds]) -> tuple[Bucket, ...]:
    """Returns the buckets of an encoder's stage: one per block if their traffic is known, else one."""
    if not any(block.backward_s for block in blocks):
        return ()
    if not any(block.gather_s or block.reduce_s for block in blocks):
        return (_bucket(0, 0, blocks),)
    return tuple(_bucket(0, at, [block]) for at, block in enumerate(blocks) if block.backward_s)


def _bucket(chunk: int, first: int, blocks: Sequence[Seconds]) -> Bucket:
    return Bucket(
        chunk=chunk,
        first_layer=first,
        end_layer=first + len(blocks),
        gather_s=max(TINY_S, round(sum(block.gather_s for block in blocks), SECONDS_DIGITS)),
        gather_bytes=1,
        reduce_s=max(TINY_S, round(sum(block.reduce_s for block in blocks), SECONDS_DIGITS)),
        reduce_bytes=1,
    )
