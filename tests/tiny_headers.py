"""Headers of small plans: modules, layouts, templates and buckets of any shape."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from random import Random
from typing import Any

from optimus.ir.op import Communicator, Lane, OpKind
from optimus.ir.plan import (
    WHOLE_STAGE,
    Bucket,
    Phase,
    Plan,
    PlanClaims,
    PlannedChunk,
    PlannedModule,
    Template,
)
from optimus.ir.ranks import LLM, RankGrid
from optimus.job.layout import Layout

PARTS: dict[str, dict[str, Any]] = {
    "model": {"llm.layers": 4},
    "cluster": {"gpus": 8},
    "workload": {"sequences": 4},
    "profile": {"made": "up"},
}
HASHES = {
    part: hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    for part, fields in PARTS.items()
}


def tiny_header(rng: Random, *, few: bool) -> Plan:
    pp = rng.choice((2, 2, 3)) if few else rng.randint(1, 4)
    tp = 1 if few and pp > 2 else rng.choice((1, 1, 2) if few else (1, 2, 4))
    cp = 1 if few or pp * tp > 4 else rng.choice((1, 1, 2))
    pp = 1 if few and tp == 2 else pp
    llm = Layout(dp=rng.choice((1, 2)), pp=pp, cp=cp, tp=tp, chunks=1 if few else rng.choice((1, 1, 2)))
    if not few and rng.random() < 0.2 and llm.dp * tp > 1:
        llm = llm.with_(ep=2)
    layouts: dict[str, Layout] = {}
    for name in ("vit", "ears")[: rng.choice((0, 1)) if few and tp == 1 else 1 if few else rng.randint(0, 2)]:
        inner = Layout(pp=_divisor(rng, pp), tp=1 if few else _divisor(rng, tp))
        layouts[name] = inner.with_(dp=llm.gpus // inner.gpus)
    layouts[LLM] = llm
    microbatches = rng.choice((1, 2)) if few else rng.randint(2, 4)
    templates: dict[str, Template] = {}
    ranks = RankGrid(layouts=layouts)
    modules = {}
    for name, layout in layouts.items():
        kinds: tuple[OpKind, ...] = rng.choice(
            ((OpKind.FORWARD, OpKind.BACKWARD), (OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD))
        )
        if name != LLM and rng.random() < 0.2:
            kinds = (OpKind.FORWARD,)
        more = {} if name == LLM else _encoder(rng, ranks, name, microbatches, few=few)
        layers = 1 if few else rng.randint(1, 2)
        modules[name] = _module(rng, name, layout, kinds, templates, layers=layers, few=few, **more)
    if len(modules) > 1:
        modules[LLM] = _with_seam(modules[LLM], ranks, templates)
    return Plan(
        name="tiny",
        tool="tests",
        strategy="greedy",
        order="greedy",
        microbatches=microbatches,
        modules=modules,
        templates=templates,
        slowdown=rng.choice((0.0, 0.25, 0.5)),
        launch_s=rng.choice((0.0, 0.0, 0.01, 0.3)),
        capacity_bytes=0,
        memory=(),
        claims=PlanClaims(step_s=0.0, lagged_s=0.0, estimate_s=0.0, encoder_s={}),
        programs=(),
        bound_to=PARTS,
        hashes=HASHES,
        finish_s=tuple(float(rng.randint(0, 2)) for _ in range(llm.pp)),
    )


def _with_seam(llm: PlannedModule, ranks: RankGrid, templates: dict[str, Template]) -> PlannedModule:
    """The first forward gathers what reached other TP and CP ranks."""
    groups = [Communicator.TP] * (ranks.positions > 1) + [Communicator.CP] * (ranks.llm.cp > 1)
    if not groups:
        return llm
    first: list[Phase] = []
    for group in groups:
        after = (len(first) - 1,) if first else ()
        first.append(
            Phase(
                name="seam",
                kind=OpKind.LAUNCH,
                layer=0,
                duration_s=0.25,
                lane=Lane.TP,
                communicator=group,
                after=after,
            )
        )
        first.append(Phase(name="seam", kind=OpKind.WAIT, layer=0, after=(len(first) - 1,)))
    shift = len(first)
    rest = templates[llm.chunks[0].templates[OpKind.FORWARD]]
    moved = [replace(p, after=tuple(a + shift for a in p.after) if p.after else (shift - 1,)) for p in rest]
    templates["llm-F-first"] = (*first, *moved)
    chunk = replace(llm.chunks[0], templates={**llm.chunks[0].templates, OpKind.FORWARD: "llm-F-first"})
    return replace(llm, chunks=(chunk, *llm.chunks[1:]))


def _divisor(rng: Random, number: int) -> int:
    return rng.choice([divisor for divisor in range(1, number + 1) if number % divisor == 0])


def _encoder(rng: Random, ranks: RankGrid, name: str, microbatches: int, *, few: bool) -> dict[str, Any]:
    pieces = 1 if few else rng.choice((1, 1, 2))
    count = ranks.num_pipelines(name)
    pipelines = tuple(rng.randrange(count) for _ in range(microbatches * pieces))
    return {
        "microbatches_per_llm_microbatch": pieces,
        "pipelines": pipelines,
        "seam_bytes": rng.randint(1, 50),
        "seam_s": 0.125,
    }


def _module(
    rng: Random,
    name: str,
    layout: Layout,
    kinds: tuple[OpKind, ...],
    templates: dict[str, Template],
    *,
    layers: int,
    few: bool = False,
    **more: Any,
) -> PlannedModule:
    communicators = (
        [Communicator.TP] + [Communicator.CP] * (layout.cp > 1) + [Communicator.EP] * (layout.ep > 1)
    )
    for kind in kinds:
        templates[f"{name}-{kind.word}"] = _template(rng, kind, layers, communicators, few=few)
    named = {kind: f"{name}-{kind.word}" for kind in kinds}
    chunks = tuple(
        PlannedChunk(
            templates=named,
            layers=layers,
            saved_activation_bytes=rng.randint(1, 100),
            recomputed_bytes=rng.randint(0, 20),
            output_bytes=8,
            send_s=rng.choice((0.0, 0.25, 0.5)),
        )
        for _ in range(layout.virtual_stages)
    )
    buckets = tuple(
        () if len(kinds) == 1 else _buckets(rng, layout, layers, few=few) for _ in range(layout.pp)
    )
    return PlannedModule(layout=layout, chunks=chunks, buckets=buckets, **more)


def _template(
    rng: Random, kind: OpKind, layers: int, communicators: list[Communicator], *, few: bool
) -> Template:
    """Per layer: compute, maybe a collective with more compute beside it, the wait for both."""
    phases: list[Phase] = []
    for layer in range(layers):
        last = (len(phases) - 1,) if phases else ()
        first = len(phases)
        phases.append(_compute(rng, kind, layer, last))
        if rng.random() < (0.3 if few else 0.7):
            phases.append(
                Phase(
                    name="collective",
                    kind=OpKind.LAUNCH,
                    layer=layer,
                    duration_s=rng.choice((0.0, 0.5, 1.5)),
                    lane=rng.choice((Lane.TP, Lane.TP, Lane.DP)),
                    communicator=rng.choice(communicators),
                    after=(first,),
                )
            )
            beside = rng.random() < 0.5
            if beside:
                phases.append(_compute(rng, kind, layer, (first,)))
            waits = (first + 1, first + 2) if beside else (first + 1,)
            phases.append(Phase(name="wait", kind=OpKind.WAIT, layer=layer, after=waits))
    return tuple(phases)


def _compute(rng: Random, kind: OpKind, layer: int, after: tuple[int, ...]) -> Phase:
    return Phase(name="compute", kind=kind, layer=layer, duration_s=rng.randint(1, 8) / 4, after=after)


def _buckets(rng: Random, layout: Layout, layers: int, *, few: bool) -> tuple[Bucket, ...]:
    def bucket(chunk: int, first: int, end: int, lane: Lane = Lane.DP) -> Bucket:
        return Bucket(
            chunk=chunk,
            first_layer=first,
            end_layer=end,
            gather_s=rng.choice((0.0, 0.5)),
            gather_bytes=1,
            reduce_s=rng.choice((0.0, 1.0)),
            reduce_bytes=2,
            lane=lane,
            gates=chunk != WHOLE_STAGE or rng.random() < 0.8,
        )

    if few and layout.replica_ranks == 1 and rng.random() < 0.6:
        return ()
    found = [bucket(chunk, layer, layer + 1) for chunk in range(layout.chunks) for layer in range(layers)]
    if not few and rng.random() < 0.2:
        found.append(bucket(WHOLE_STAGE, 0, layers, Lane.HOST))
    return tuple(found)


def large_header(rng: Random, *, microbatches: int, layers: int) -> Plan:
    """Eight stages of two chunks, and two encoder pipelines side by side in each two of them."""
    layouts = {"vit": Layout(dp=16, pp=2, tp=2), LLM: Layout(dp=2, pp=8, tp=4, chunks=2)}
    count = RankGrid(layouts=layouts).num_pipelines("vit")
    templates: dict[str, Template] = {}
    kinds = (OpKind.FORWARD, OpKind.BACKWARD)
    pipelines = tuple(number % count for number in range(microbatches))
    seam: dict[str, Any] = {"pipelines": pipelines, "seam_bytes": 5, "seam_s": 0.125}
    modules = {
        name: _module(rng, name, layout, kinds, templates, layers=layers, **({} if name == LLM else seam))
        for name, layout in layouts.items()
    }
    modules[LLM] = _with_seam(modules[LLM], RankGrid(layouts=layouts), templates)
    header = replace(
        tiny_header(rng, few=True), microbatches=microbatches, modules=modules, templates=templates
    )
    return replace(header, slowdown=0.3, launch_s=0.001, finish_s=(1.0,) * 8)
