"""Plans for modules that the cost model does not know: from measured seconds of whole stages and blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate

from optimus import __version__
from optimus.errors import UserError, one_of
from optimus.ir.binding import bind
from optimus.ir.module_times import EncoderBlocks, Seconds
from optimus.ir.op import OpKind
from optimus.ir.plan import Bucket, Claims, Phase, Plan, PlannedChunk, PlannedModule, Template
from optimus.ir.ranks import LLM
from optimus.job.layout import Layout
from optimus.planner.filled_plan import finish_plan
from optimus.planner.listed import STRATEGY
from optimus.planner.systems.colocated import even_counts
from optimus.planner.systems.pipeline import make_order
from optimus.schedule.list_fill import list_orders
from optimus.schedule.phases import DIGITS

UNLIMITED_BYTES = 2**50  # memory is not modelled here
TINY_S = 1e-9  # a bucket must take some time to be more than nothing


def plan_modules(
    *,
    stages: Sequence[Seconds],
    encoders: Mapping[str, EncoderBlocks],
    microbatches: int,
    ranks: int,
    pp: int,
    order: str = "",
) -> Plan:
    """A filled plan for an LLM of `stages` virtual stages on `pp` ranks each replica, beside its encoders.

    `order` is `1f1b`, `interleaved` or `zero-bubble`; one of the first two by default. The same numbers give
    the same plan on every rank.
    """
    chunks = _check(len(stages), pp, ranks, encoders)
    order = order or ("1f1b" if chunks == 1 else "interleaved")
    templates: dict[str, Template] = {}
    split = order == "zero-bubble"
    llm = Layout(dp=ranks // pp, pp=pp, chunks=chunks)
    modules = {
        name: _module(name, encoder, llm, microbatches, templates) for name, encoder in encoders.items()
    }
    made = tuple(_chunk(f"{LLM}.{at}", [stage], templates, split=split) for at, stage in enumerate(stages))
    buckets = tuple(
        tuple(_bucket(chunk, 0, [stages[chunk * pp + stage]]) for chunk in range(chunks))
        if llm.dp > 1
        else ()
        for stage in range(pp)
    )
    modules[LLM] = PlannedModule(layout=llm, chunks=made, buckets=buckets)
    told = {"stages": list(map(asdict, stages)), "encoders": {n: asdict(e) for n, e in encoders.items()}}
    fields, hashes = bind({"model": told, "cluster": {"ranks": ranks}, "workload": {}, "profile": {}})
    header = Plan(
        name="modules",
        tool=f"optimus {__version__}",
        strategy=STRATEGY,
        order=order,
        microbatches=microbatches,
        modules=modules,
        templates=templates,
        slowdown=0.0,
        launch_s=0.0,
        capacity_bytes=UNLIMITED_BYTES,
        memory=(),
        claims=Claims(step_s=0.0, estimate_s=0.0, encoder_s={}),
        programs=(),
        bound_to=fields,
        hashes=hashes,
        finish_s=(0.0,) * pp,
    )
    listed = make_order(order, stages=pp, chunks=chunks, microbatches=microbatches)
    plans = [
        finish_plan(found, orders, [{"parameters": 0}] * pp, estimate_s=0.0)
        for found, orders in list_orders(header, listed)
    ]
    best = min(plans, key=lambda filled: filled.step_s).plan
    return replace(best, claims=replace(best.claims, estimate_s=best.claims.step_s))


def _check(virtual_stages: int, pp: int, ranks: int, encoders: Mapping[str, EncoderBlocks]) -> int:
    """Chunks per rank."""
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
    counts = even_counts(len(blocks), stages)
    ends = list(accumulate(counts))
    parts = [blocks[end - count : end] for end, count in zip(ends, counts, strict=True)]
    chunks = tuple(_chunk(f"{name}.{at}", part, templates, split=False) for at, part in enumerate(parts))
    return PlannedModule(
        layout=layout,
        chunks=chunks,
        buckets=tuple(_buckets(part) if layout.dp > 1 else () for part in parts),
        pieces=encoder.pieces,
        pipelines=(0,) * (microbatches * encoder.pieces),
        seam_bytes=1,
        seam_s=round(blocks[-1].send_s, DIGITS),
    )


def _chunk(
    name: str, parts: Sequence[Seconds], templates: dict[str, Template], *, split: bool
) -> PlannedChunk:
    """One phase per block and kind; with `split`, backwards are I and W."""
    back = [(at, part) for at, part in reversed(list(enumerate(parts))) if part.backward_s > 0]
    phases = {OpKind.FORWARD: [(at, part.forward_s) for at, part in enumerate(parts)]}
    if split:
        phases[OpKind.INPUT_GRAD] = [(at, part.backward_s - part.weight_s) for at, part in back]
        phases[OpKind.WEIGHT_GRAD] = [(at, part.weight_s) for at, part in back]
    else:
        phases[OpKind.BACKWARD] = [(at, part.backward_s) for at, part in back]
    found = {}
    for kind, timed in phases.items():
        if timed:
            found[kind] = f"{name}.{kind.word}"
            templates[found[kind]] = tuple(
                Phase(
                    name="block",
                    kind=kind,
                    layer=layer,
                    duration_s=round(max(seconds, 0.0), DIGITS),
                    after=(place - 1,) if place else (),
                )
                for place, (layer, seconds) in enumerate(timed)
            )
    return PlannedChunk(
        templates=found, layers=len(parts), output_bytes=1, send_s=round(parts[-1].send_s, DIGITS)
    )


def _buckets(blocks: Sequence[Seconds]) -> tuple[Bucket, ...]:
    """Of an encoder's stage: one for every block if their traffic is known, else one for all."""
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
        gather_s=max(TINY_S, round(sum(block.gather_s for block in blocks), DIGITS)),
        gather_bytes=1,
        reduce_s=max(TINY_S, round(sum(block.reduce_s for block in blocks), DIGITS)),
        reduce_bytes=1,
    )
