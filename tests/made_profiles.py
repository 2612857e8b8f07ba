"""Profiles made from the cost model's own prices, or from any other function of place and size."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from optimus.cost.assumptions import get_preset
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.measured_profile import (
    MEASURED_KINDS,
    LayerClass,
    MeasurementConditions,
    Profile,
    SegmentMeasurement,
    classify_layer,
    hash_module_shape,
)
from optimus.cost.priced_layer import PricedLayer, price_encoder_layers, price_llm_layers
from optimus.ir.op import Lane, OpKind
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.job.model import Encoder, Llm

SEGMENTS = {
    "qkv": ("norm1", "latent", "qkv"),
    "attention": ("attention",),
    "out": ("out",),
    "up": ("norm2", "up"),
    "down": ("down",),
    "embedding": ("embedding",),
    "head": ("head",),
    "patches": ("patches",),
    "projector": ("projector",),
}
HERE = MeasurementConditions(host="test", date="2026-01-02", torch="2.13.0", threads=1, dtype="float32")


def priced(
    job: Job, module: Encoder | Llm, sequences: float, *, tp: int = 1, profile: Profile | None = None
) -> tuple[PricedLayer, ...]:
    cost_model = ClusterCostModel(
        cluster=job.cluster, assumptions=get_preset("default"), profile=profile or Profile()
    )
    layout = Layout(dp=1, pp=1, tp=tp)
    if isinstance(module, Encoder):
        load = job.workload.encoder_load(module.name, module.projector.merge).times(sequences)
        return price_encoder_layers(module, load, layout, cost_model, "none")
    return price_llm_layers(module, job.workload.llm_load().times(sequences), layout, cost_model, "none")


def sorts(module: Encoder | Llm) -> list[LayerClass]:
    """The sort of every layer as the planner counts them."""
    last: LayerClass = "projector" if isinstance(module, Encoder) else "head"
    stack = module.stack
    return ["embedding", *(classify_layer(stack, index) for index in range(stack.layers)), last]


def segment_s(layer: PricedLayer, kind: OpKind, kernels: tuple[str, ...]) -> float:
    return sum(
        kernel.duration_s
        for kernel in layer.kernels[kind]
        if kernel.lane == Lane.COMPUTE and kernel.name.partition(".")[0] in kernels
    )


def made_profile(
    job: Job,
    seconds: Callable[[float], float] = lambda analytic_s: analytic_s,
    *,
    sequences: Iterable[float] = (1,),
    tp: int = 1,
    kinds: Iterable[OpKind] = MEASURED_KINDS,
) -> Profile:
    """A profile whose medians are `seconds` of what the formula says."""
    rows = [
        SegmentMeasurement(
            module=module.name,
            layers=sort,
            segment=segment,
            kernels=kernels,
            kind=kind,
            tokens=round(_tokens(job, module) * size),
            tp=tp,
            median_s=seconds(found),
            p25_s=0.9 * seconds(found),
            p75_s=1.2 * seconds(found),
            repetitions=15,
        )
        for module in job.model.modules
        for size in sequences
        for sort, layer in _one_of_each(module, priced(job, module, size, tp=tp)).items()
        for segment, kernels in SEGMENTS.items()
        for kind in kinds
        if (found := segment_s(layer, kind, kernels)) > 0
    ]
    return Profile(
        name="made",
        measured=HERE,
        modules=tuple(sorted((module.name, hash_module_shape(module)) for module in job.model.modules)),
        segments=tuple(rows),
    )


def _tokens(job: Job, module: Encoder | Llm) -> float:
    if isinstance(module, Encoder):
        return job.workload.encoder_load(module.name, module.projector.merge).tokens
    return job.workload.llm_load().tokens


def _one_of_each(module: Encoder | Llm, layers: tuple[PricedLayer, ...]) -> dict[LayerClass, PricedLayer]:
    return dict(zip(sorts(module), layers, strict=True))
