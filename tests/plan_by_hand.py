"""Small plans of any layout, whose lines stand in the plainest order: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from optimus.ir.binding import flatten_and_hash_parts
from optimus.ir.op import Communicator, Lane, OpKind
from optimus.ir.plan import (
    Bucket,
    DeviceClassMemory,
    Phase,
    Plan,
    PlanClaims,
    PlannedChunk,
    PlannedModule,
    Program,
)
from optimus.ir.ranks import LLM, RankGrid
from optimus.job.layout import Layout

PARTS = {
    "model": {"llm": {"stack": {"layers": 4, "width": 512}}, "encoders": [{"name": "vit", "source": "x"}]},
    "cluster": {"gpus": 8, "gpu": {"name": "H100", "source": "vendor"}},
}
Row = tuple[int, int, int, int, int]


def template(kind: OpKind, seconds: float) -> tuple[Phase, ...]:
    """Compute, a collective beside it, and the wait for both."""
    launch = Phase(
        name="all-gather",
        kind=OpKind.LAUNCH,
        layer=0,
        duration_s=0.1,
        bytes=64,
        lane=Lane.TP,
        communicator=Communicator.TP,
        after=(0,),
    )
    return (
        Phase(name="attention", kind=kind, layer=0, duration_s=seconds),
        launch,
        Phase(name="wait", kind=OpKind.WAIT, layer=0, communicator=Communicator.TP, after=(0, 1)),
    )


def module(layout: Layout, prefix: str, **more: object) -> PlannedModule:
    names = {kind: f"{prefix}-{kind.word}" for kind in (OpKind.FORWARD, OpKind.BACKWARD)}
    chunk = PlannedChunk(
        templates=names,
        layers=1,
        saved_activation_bytes=1000,
        recomputed_bytes=10,
        output_bytes=100,
        send_s=0.05,
    )
    buckets = tuple(
        Bucket(
            chunk=number,
            first_layer=0,
            end_layer=1,
            gather_s=0.2,
            gather_bytes=32,
            reduce_s=0.3,
            reduce_bytes=64,
        )
        for number in range(layout.chunks)
    )
    return PlannedModule(
        layout=layout,
        chunks=(chunk,) * layout.virtual_stages,
        buckets=(buckets,) * layout.pp,
        **more,  # type: ignore[arg-type]
    )


def plan_by_hand(
    llm: Layout, *encoders: Layout, microbatches: int = 4, pieces: int = 1, name: str = "hand"
) -> Plan:
    """A plan with encoders `enc0`, `enc1` ... whose microbatches go round their pipelines."""
    layouts = {**{f"enc{number}": layout for number, layout in enumerate(encoders)}, LLM: llm}
    ranks = RankGrid(layouts=layouts)
    modules, templates = {}, {}
    for place, (module_name, layout) in enumerate(layouts.items()):
        more: dict[str, object] = {}
        if module_name != LLM:
            count = ranks.num_pipelines(module_name)
            pipelines = tuple(number % count for number in range(microbatches * pieces))
            more = {
                "microbatches_per_llm_microbatch": pieces,
                "pipelines": pipelines,
                "seam_bytes": 7,
                "seam_s": 0.01,
            }
        modules[module_name] = module(layout, module_name, **more)
        for kind in (OpKind.FORWARD, OpKind.BACKWARD):
            templates[f"{module_name}-{kind.word}"] = template(kind, 1.0 + place / 7 + kind)
    bound_to, hashes = flatten_and_hash_parts(PARTS)
    of_class = DeviceClassMemory(
        fixed={"parameters": 10**9, "optimizer": 10**10},
        llm_activations=5000,
        encoder_activations=100,
        seam=7,
    )
    unplayed = Plan(
        name=name,
        tool="optimus 0.1",
        strategy="fill",
        order="gpipe",
        microbatches=microbatches,
        modules=modules,
        templates=templates,
        slowdown=0.05,
        launch_s=5e-06,
        capacity_bytes=80 * 10**9,
        memory=(of_class,) * ranks.num_classes,
        claims=PlanClaims(
            step_s=12.5, lagged_s=12.5, estimate_s=12.25, encoder_s={"before": 0.5, "slots": 1.5}
        ),
        programs=(),
        bound_to=bound_to,
        hashes=hashes,
        notes={"why": "first of its kind", "figures": [1, 2.5]},
        finish_s=(0.5,) * llm.pp,
    )
    programs = tuple(Program.of(list(rows(unplayed, device))) for device in range(ranks.num_classes))
    return replace(unplayed, programs=programs)


def rows(plan: Plan, device: int) -> Iterator[Row]:
    """The lines of one class."""
    numbers = {name: number for number, name in enumerate(plan.names)}
    for name, number in numbers.items():
        for bucket in range(len(plan.modules[name].buckets[0]) if name in plan.modules else 0):
            yield number, OpKind.UNSHARD, bucket, 0, bucket
    for name in plan.encoders:
        for microbatch in own(plan, name, device):
            yield from op(plan, name, device, OpKind.FORWARD, 0, microbatch)
    for backwards in (False, True):
        for chunk in sorted(range(plan.modules[LLM].layout.chunks), reverse=backwards):
            for microbatch in range(plan.microbatches):
                yield from op(
                    plan, LLM, device, OpKind.BACKWARD if backwards else OpKind.FORWARD, chunk, microbatch
                )
    for name in plan.encoders:
        for microbatch in own(plan, name, device):
            yield from op(plan, name, device, OpKind.BACKWARD, 0, microbatch)
    for name, number in numbers.items():
        for bucket in range(len(plan.modules[name].buckets[0]) if name in plan.modules else 0):
            yield number, OpKind.REDUCE_GRAD, bucket, 0, bucket
    yield len(plan.names) - 1, OpKind.OPTIMIZER, 0, 0, 0


def own(plan: Plan, name: str, device: int) -> list[int]:
    pipeline = plan.ranks.pipeline_of(name, device)
    return [number for number, other in enumerate(plan.modules[name].pipelines) if other == pipeline]


def op(plan: Plan, name: str, device: int, kind: OpKind, chunk: int, microbatch: int) -> Iterator[Row]:
    """The phases of one op, with its transfers around them."""
    number, layout, ranks = plan.names.index(name), plan.modules[name].layout, plan.ranks
    stage = ranks.stage_of(name, device)
    virtual, last = chunk * layout.pp + stage, layout.virtual_stages - 1
    forward = kind == OpKind.FORWARD
    if (virtual > 0 if forward else virtual < last) and layout.pp > 1:
        yield number, OpKind.RECV_F if forward else OpKind.RECV_B, chunk, microbatch, 0
    at_seam = ranks.entry_of(device) != device
    if name != LLM and virtual == last and not forward and at_seam:
        yield number, OpKind.RECV_SEAM_B, 0, microbatch, 0
    if name == LLM and virtual == 0 and forward:
        yield from seam(plan, device, microbatch, OpKind.RECV_SEAM)
    for phase in range(
        len(plan.template_of(name, OpKind.FORWARD if forward else OpKind.BACKWARD, stage, chunk))
    ):
        yield number, kind, chunk, microbatch, phase
    if (virtual < last if forward else virtual > 0) and layout.pp > 1:
        yield number, OpKind.SEND_F if forward else OpKind.SEND_B, chunk, microbatch, 0
    if name != LLM and virtual == last and forward and at_seam:
        yield number, OpKind.SEND_SEAM, 0, microbatch, 0
    if name == LLM and virtual == 0 and not forward:
        yield from seam(plan, device, microbatch, OpKind.SEND_SEAM_B)


def seam(plan: Plan, device: int, microbatch: int, kind: OpKind) -> Iterator[Row]:
    """The transfers at LLM stage 0 of the encoder microbatches that feed an LLM microbatch."""
    ranks = plan.ranks
    senders = [other for other in range(ranks.num_classes) if ranks.entry_of(other) == device != other]
    for name, planned in plan.encoders.items():
        last = [other for other in senders if ranks.stage_of(name, other) == planned.layout.pp - 1]
        count = planned.microbatches_per_llm_microbatch
        for piece in range(microbatch * count, (microbatch + 1) * count):
            for other in last:
                if ranks.pipeline_of(name, other) == planned.pipelines[piece]:
                    yield plan.names.index(name), kind, 0, piece, 0


def two_pipelines() -> Plan:
    return plan_by_hand(Layout(dp=1, pp=4, tp=2), Layout(dp=2, pp=2, tp=2), microbatches=2)


def two_encoders() -> Plan:
    encoders = Layout(dp=8, pp=2, tp=1), Layout(dp=4, pp=1, tp=4)
    return plan_by_hand(Layout(dp=2, pp=2, tp=4, chunks=2), *encoders, microbatches=2, pieces=2)


def llm_alone() -> Plan:
    return plan_by_hand(Layout(dp=2, pp=2, cp=2, ep=4, tp=1), microbatches=3)
