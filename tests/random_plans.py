"""Plans that no strategy would make: phases in any order that the rules allow, at any price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

from optimus.ir.binding import flatten_and_hash_parts
from optimus.ir.op import OpKind, regathers_inputs
from optimus.ir.plan import Bucket, Plan, PlannedChunk, PlannedModule, Program, Template
from optimus.ir.ranks import LLM
from optimus.job.model import Encoder, Llm
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan
from optimus.planner.layouts import encoder_layout_error
from optimus.planner.systems.colocated_plan import (
    ColocatedEncoder,
    ColocatedPlanBuilder,
    Sharding,
    encoder_layout_on_llm_gpus,
)
from optimus.planner.systems.pipeline import PipelineCandidate, available_op_orders
from optimus.schedule.op_phases import SECONDS_DIGITS, expand_op_into_phases
from optimus.schedule.pipeline_orders import (
    PipelineOrder,
    build_interleaved_1f1b_order,
    minimal_warmup_counts,
)

ROOM_BYTES = 10**15


# ---------------------------------------------------------------------------- headers


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """A plan before anything is arranged."""

    header: Plan
    order: PipelineOrder
    fixed: Sequence[Mapping[str, int]]


def random_draft(rng: Random, context: PlanningContext) -> Draft:
    """The LLM in one of the known op orders, every encoder in a layout of its own."""
    llm = random_llm(rng, context)
    encoders = [_random_choice(rng, context, llm, encoder) for encoder in context.job.model.encoders]
    replicas = rng.choice([n for n in range(1, llm.layout.dp + 1) if llm.layout.dp % n == 0])
    colocated = ColocatedPlanBuilder(context, llm, encoders, dealing_replicas=replicas)
    header = colocated.header(strategy="random")
    if rng.random() < 0.3:
        header = _with_split_backwards(rng, header, encoders)
    if rng.random() < 0.7:
        header = _with_random_costs(rng, header)
    header = bound(replace(header, capacity_bytes=ROOM_BYTES), context)
    return Draft(header=header, order=llm.order, fixed=colocated.fixed_bytes())


def bound(plan: Plan, context: PlanningContext) -> Plan:
    """The plan with what it was made for, on GPUs of the memory that it has."""
    parts: dict[str, Any] = {
        part: asdict(getattr(context.job, part)) for part in ("model", "cluster", "workload")
    }
    parts["cluster"]["gpu"]["memory_bytes"] = plan.capacity_bytes
    bound_to, hashes = flatten_and_hash_parts({**parts, "profile": asdict(context.cost_model.profile)})
    return replace(plan, bound_to=bound_to, hashes=hashes)


def random_llm(rng: Random, context: PlanningContext, *, splits: bool = True) -> PipelineCandidate:
    """A random pipeline of the LLM alone. `splits`: backwards may be I and W."""
    return random_pipeline(rng, context, (context.job.model.llm,), splits=splits)


def random_pipeline(
    rng: Random, context: PlanningContext, modules: tuple[Encoder | Llm, ...], *, splits: bool = True
) -> PipelineCandidate:
    """Cut anywhere: some virtual stages may be empty. One stage of all modules may be sharded like FSDP's."""
    size, stages = context.microbatch_sequences, context.layout.pp
    divided = context.microbatches(size)
    assert divided is not None
    microbatches = divided[0]
    policy = rng.choice(list(context.recompute_policies(modules)))
    layers = context.layers(modules, size, policy)
    chunks = rng.choice((1, 1, 2, 3)) if microbatches % stages == 0 else 1
    known = available_op_orders(stages=stages, chunks=chunks, microbatches=microbatches) or ("interleaved",)
    name = rng.choice([name for name in known if splits or name != "zero-bubble"])
    explicit_order = None
    if name == "interleaved" and rng.random() < 0.5:
        warmup = minimal_warmup_counts(stages, chunks)
        explicit_order = build_interleaved_1f1b_order(
            stages=stages, chunks=chunks, microbatches=microbatches, warmup=warmup
        )
    inner = sorted(rng.randint(0, len(layers)) for _ in range(stages * chunks - 1))
    alone = stages * chunks == 1 and context.layout.dp > 1 and len(modules) > 1
    return PipelineCandidate(
        context=context,
        layers=layers,
        cut=(0, *inner, len(layers)),
        order_name=name,
        microbatches=microbatches,
        layout=context.layout.with_(chunks=chunks),
        sequences=size,
        policy=policy,
        explicit_order=explicit_order,
        sharding=rng.choice(tuple(Sharding)) if alone else Sharding.OPTIMIZER,
    )


def _random_choice(
    rng: Random, context: PlanningContext, llm: PipelineCandidate, encoder: Encoder
) -> ColocatedEncoder:
    sizes = [(pp, tp) for pp in range(1, llm.layout.pp + 1) for tp in (1, 2, 4, 8)]
    inside = [(pp, tp) for pp, tp in sizes if llm.layout.pp % pp == 0 and llm.layout.tp % tp == 0]
    layouts = [encoder_layout_on_llm_gpus(llm.layout, pp=pp, tp=tp) for pp, tp in inside]
    layout = rng.choice(
        [layout for layout in layouts if encoder_layout_error(context, encoder, layout) is None]
    )
    pipelines = llm.layout.gpus // llm.layout.dp // (layout.pp * layout.tp)
    pieces = rng.choice((1, 1, 2, 3))
    recompute = dict(rng.choice(list(context.recompute_policies((encoder,)))))[encoder.name]
    return ColocatedEncoder(
        encoder=encoder,
        layout=layout,
        layers=context.encoder_layers(encoder, layout, llm.sequences / pieces, recompute),
        pieces=pieces,
        pipelines=tuple(rng.randrange(pipelines) for _ in range(llm.microbatches * pieces)),
        recompute=recompute,
    )


def _with_split_backwards(rng: Random, plan: Plan, choices: Sequence[ColocatedEncoder]) -> Plan:
    """Backwards of encoder stages as I and W, where both have something to do."""
    modules, templates = dict(plan.modules), dict(plan.templates)
    for choice in choices:
        name, chunks = choice.encoder.name, []
        for stage, (chunk, layers) in enumerate(zip(modules[name].chunks, choice.stages, strict=True)):
            halves = {
                kind: expand_op_into_phases(layers, kind) for kind in (OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)
            }
            if all(halves.values()) and rng.random() < 0.8:
                named = {kind: f"{name}.{kind.word}.{stage}" for kind in halves}
                templates |= {named[kind]: halves[kind] for kind in halves}
                own = {OpKind.FORWARD: chunk.templates[OpKind.FORWARD], **named}
                chunk = replace(chunk, templates=own, recomputed_bytes=rng.randrange(1000))
            chunks.append(chunk)
        names = {template for chunk in chunks for template in chunk.templates.values()}
        phases = [(phase.name, phase.kind) for template in names for phase in templates[template]]
        modules[name] = replace(modules[name], chunks=tuple(chunks), regather=regathers_inputs(phases))
    return replace(plan, modules=modules, templates=templates)


class _Seconds:
    """Durations that tie, vanish or differ widely."""

    def __init__(self, rng: Random) -> None:
        self._rng, self._same = rng, rng.random() < 0.4
        self._zeros = rng.choice((0.0, 0.2, 0.9))

    def __call__(self) -> float:
        if self._rng.random() < self._zeros:
            return 0.0
        return 1.0 if self._same else round(10.0 ** self._rng.uniform(-6, -2), SECONDS_DIGITS)


def _with_random_costs(rng: Random, plan: Plan) -> Plan:
    seconds = _Seconds(rng)

    def timed(template: Template) -> Template:
        return tuple(
            phase if phase.kind == OpKind.WAIT else replace(phase, duration_s=seconds()) for phase in template
        )

    def bucket(found: Bucket) -> Bucket:
        return replace(found, gather_s=seconds(), reduce_s=seconds())

    def chunk(found: PlannedChunk) -> PlannedChunk:
        return replace(found, send_s=seconds())

    def module(found: PlannedModule) -> PlannedModule:
        return replace(
            found,
            chunks=tuple(map(chunk, found.chunks)),
            buckets=tuple(tuple(map(bucket, stage)) for stage in found.buckets),
            seam_s=seconds(),
        )

    return replace(
        plan,
        templates={name: timed(template) for name, template in plan.templates.items()},
        modules={name: module(found) for name, found in plan.modules.items()},
        finish_s=tuple(seconds() for _ in plan.finish_s),
        slowdown=rng.choice((0.0, 0.1)),
        launch_s=rng.choice((0.0, 5e-6)),
    )


# ---------------------------------------------------------------------------- arrangements


@dataclass(kw_only=True, eq=False, slots=True)
class _Op:
    """One op of all classes that play it together."""

    row: tuple[int, int, int, int]  # module, kind, chunk, microbatch
    glued: list[bool]  # by phase: nothing may stand between it and the one before
    classes: list[int]
    place: int = 0  # of the next phase
    missing: int = 0  # inputs that are not there yet
    feeds: list[_Op] = field(default_factory=list)


def random_arrangement(rng: Random, plan: Plan, order: PipelineOrder) -> list[Program]:
    """Returns a program for every class: a random order of phases, each behind what it needs."""
    ready = [op for op in _all_ops(plan, order) if not op.missing]
    played: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(plan.ranks.num_classes)]
    stays = rng.choice((0.0, 0.5, 0.95))  # how often an op goes on with its next phase
    while ready:
        op = ready[rng.randrange(len(ready))]
        while True:
            for device in op.classes:
                played[device].append((*op.row, op.place))
            op.place += 1
            if op.place == len(op.glued) or not (op.glued[op.place] or rng.random() < stays):
                break
        if op.place == len(op.glued):
            ready.remove(op)
            for fed in op.feeds:
                fed.missing -= 1
                if not fed.missing:
                    ready.append(fed)
    return [Program.of(rows) for rows in played]


def _all_ops(plan: Plan, order: PipelineOrder) -> list[_Op]:
    """Every op with its inputs counted, in the words of the specification."""
    ops: dict[tuple[str, OpKind, int, int], _Op] = {}  # by module, kind, virtual stage, microbatch
    for name, module in plan.modules.items():
        for virtual, chunk in enumerate(module.chunks):
            for kind, template in chunk.templates.items():
                for microbatch in range(plan.microbatches * module.microbatches_per_llm_microbatch):
                    glued = [
                        name == LLM and phase.kind == OpKind.LAUNCH for phase in plan.templates[template]
                    ]
                    row = plan.names.index(name), kind, virtual // module.layout.pp, microbatch
                    classes = _classes(plan, name, virtual % module.layout.pp, microbatch)
                    ops[name, kind, virtual, microbatch] = _Op(row=row, glued=glued, classes=classes)
    entry = min(at for at, chunk in enumerate(plan.modules[LLM].chunks) if chunk.templates)
    for (name, kind, virtual, microbatch), op in ops.items():
        pieces = plan.modules[name].microbatches_per_llm_microbatch
        last = max(at for at, chunk in enumerate(plan.modules[name].chunks) if chunk.templates)
        before: list[_Op | None] = []
        if kind == OpKind.FORWARD:
            before.append(ops.get((name, kind, virtual - 1, microbatch)))
        elif kind == OpKind.WEIGHT_GRAD:
            before.append(ops[name, OpKind.INPUT_GRAD, virtual, microbatch])
        else:
            gradient = (
                (name, virtual + 1, microbatch) if virtual < last else (LLM, entry, microbatch // pieces)
            )
            before.append(ops[name, OpKind.FORWARD, virtual, microbatch])
            if virtual < last or name != LLM:
                before += [
                    ops.get((gradient[0], half, *gradient[1:]))
                    for half in (OpKind.BACKWARD, OpKind.INPUT_GRAD)
                ]
        if kind == OpKind.FORWARD and name != LLM and virtual == last:
            op.feeds.append(ops[LLM, kind, entry, microbatch // pieces])
            op.feeds[-1].missing += 1
        for source in filter(None, before):
            source.feeds.append(op)
            op.missing += 1
    for stage, explicit_order in enumerate(order):
        keys = [(LLM, op.kind, op.chunk * len(order) + stage, op.microbatch) for op in explicit_order]
        own = [ops[key] for key in keys if key in ops]
        for one, following in pairwise(own):
            one.feeds.append(following)
            following.missing += 1
    return list(ops.values())


def _classes(plan: Plan, name: str, stage: int, microbatch: int) -> list[int]:
    """The device classes that play an op, all at the same time."""
    ranks, module = plan.ranks, plan.modules[name]
    pipeline = 0 if name == LLM else module.pipelines[microbatch]
    return [
        device
        for device in range(ranks.num_classes)
        if ranks.stage_of(name, device) == stage and ranks.pipeline_of(name, device) == pipeline
    ]


def random_plan(rng: Random, context: PlanningContext) -> Plan:
    """A random arrangement of a random draft, lowered."""
    draft = random_draft(rng, context)
    orders = random_arrangement(rng, draft.header, draft.order)
    return FilledPlan(header=draft.header, orders=orders, fixed=draft.fixed, estimate_s=0.0).plan
