"""The job of `benchmarks paced --tp`: a tiny model in the engine's own layers, with given durations.

A profile tells the planner the seconds of kernels, and the plan tells ranks. Links are so slow that tiny
tensors take as long as those of a large model: a collective of a layer a little longer than a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from benchmarks.paced_clock import PacedLink
from optimus.cost.assumptions import Assumptions, get_preset
from optimus.cost.measured_profile import LayerClass, Profile, SegmentMeasurement, hash_module_shape
from optimus.errors import UserError, one_of
from optimus.ir.op import OpKind
from optimus.ir.ranks import LLM
from optimus.job.attention import Attention
from optimus.job.cluster import FLAT, Cluster, Gpu, Link
from optimus.job.job import Job
from optimus.job.layout import LayoutConstraints, PartialLayout, SearchLimits
from optimus.job.model import Encoder, Llm, Mlp, Model, Projector, Stack
from optimus.job.workload import PackedSequence, Workload
from optimus.planner.context import PlanningContext
from optimus.planner.layouts import choose_smallest_context

VISION = "vision"
TOKENS, WIDTH, IMAGES, MERGE = 64, 32, (8, 8), 4  # images: LLM tokens of each, in a sequence
KERNEL_S, SMALL_S = 0.015, 0.002  # a product or attention; an embedding, a projector
COLLECTIVE_S = 0.020  # of a layer's rows, by two ranks
MESSAGE_S = 0.005  # of a rank's rows to the next stage
TP, MAX_STAGES = 2, 4
REPLICAS, SIZES = (1, 2, 4, 8, 16), (4, 8, 16, 32, 64)

# Seconds of every kernel of a layer, and of the ends, by kind. Norms take none: without tensor parallelism
# the engine runs a norm together with the GEMM behind it, and the plan has two lines.
LAYER_S: dict[OpKind, dict[str, float]] = {
    OpKind.FORWARD: {"norm1": 0.0, "qkv": KERNEL_S, "attention": KERNEL_S, "out": KERNEL_S,
             "norm2": 0.0, "up": KERNEL_S, "down": KERNEL_S},
    OpKind.INPUT_GRAD: {"norm1": 0.0, "qkv": KERNEL_S, "attention": 2 * KERNEL_S, "out": KERNEL_S,
             "norm2": 0.0, "up": KERNEL_S, "down": KERNEL_S},
    OpKind.WEIGHT_GRAD: {"qkv": KERNEL_S, "out": KERNEL_S, "up": KERNEL_S, "down": KERNEL_S},
}  # fmt: skip
END_S: dict[LayerClass, dict[OpKind, tuple[str, float]]] = {
    "embedding": {OpKind.FORWARD: ("embedding", SMALL_S), OpKind.WEIGHT_GRAD: ("embedding", SMALL_S)},
    "head": dict.fromkeys((OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD), ("head", KERNEL_S)),
    "projector": dict.fromkeys(
        (OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD), ("projector", SMALL_S)
    ),
}
PATCHES = {OpKind.FORWARD: ("patches", SMALL_S), OpKind.WEIGHT_GRAD: ("patches", SMALL_S)}


def _stack(layers: int, *, causal: bool, mlp_over_hidden: int) -> Stack:
    attention = Attention(heads=4, kv_heads=4, head_dim=WIDTH // 4, causal=causal)
    mlp = Mlp(width=mlp_over_hidden * WIDTH, gated=True)
    return Stack(hidden=WIDTH, layers=layers, attention=attention, mlp=mlp, norm="rmsnorm")


def _activation_bytes(tensor: Any) -> float:
    """Returns the bytes of activations; scalars and reductions at the end of a step take no time."""
    return float(tensor.nbytes) if tensor.dtype == torch.bfloat16 and tensor.dim() > 1 else 0.0


def _flat_bytes(tensor: Any) -> float:
    """Returns the bytes of flat parameters and gradients."""
    return float(tensor.nbytes) if tensor.dim() == 1 else 0.0


_TP_BYTES_PER_S = TOKENS * WIDTH * 2 * (TP - 1) / TP / COLLECTIVE_S
_NIC_BYTES_PER_S = TOKENS * WIDTH * 2 / TP / MESSAGE_S
TP_LINK = PacedLink(
    latency_s=0.0, bandwidth_bytes_per_s=_TP_BYTES_PER_S, size_of=_activation_bytes, lane="tp"
)
DP_LINK = PacedLink(latency_s=0.0, bandwidth_bytes_per_s=_NIC_BYTES_PER_S, size_of=_flat_bytes, lane="dp")
DEAL_LINK = replace(TP_LINK, bandwidth_bytes_per_s=_NIC_BYTES_PER_S / 2)  # beside gathers of parameters
P2P_LINK = PacedLink(
    latency_s=0.0, bandwidth_bytes_per_s=_NIC_BYTES_PER_S, size_of=_activation_bytes, lane="p2p"
)


def link_of(axis: str) -> PacedLink:
    """Returns the link of the groups of an axis."""
    return {"tp": TP_LINK, "dp": DP_LINK, "deal": DEAL_LINK}.get(axis.split(".")[-1], P2P_LINK)


def replicas_on(ranks: int, tp: int = TP) -> list[int]:
    """Returns the numbers of replicas that fit."""
    counts = [dp for dp in REPLICAS if ranks % (tp * dp) == 0 and 2 <= ranks // (tp * dp) <= MAX_STAGES]
    if not counts:
        raise UserError(
            field="--ranks",
            value=ranks,
            problem="is not a size of this bench",
            hint=f"with --tp use {one_of(map(str, SIZES))}",
        )
    return counts


SEQUENCE = PackedSequence(text=TOKENS - sum(IMAGES), items=((VISION, IMAGES),))


@dataclass(frozen=True, kw_only=True)
class TpJob:
    """`dp` replicas of LLM pipelines whose stages are tensor-parallel over `tp` ranks."""

    ranks: int
    dp: int = 2
    tp: int = TP
    mlp_over_hidden: int = 2  # width; more means more parameters, and no more seconds
    data: tuple[PackedSequence, ...] = (SEQUENCE,)
    encoder_work: float = (
        1.0  # over that of the LLM, which has a layer a stage; a layer of either takes as long
    )
    microbatches_per_stage: int = 4

    def __post_init__(self) -> None:
        if self.dp not in (fits := replicas_on(self.ranks, self.tp)):
            raise UserError(
                field="--dp",
                value=self.dp,
                problem=f"replicas of 2 to {MAX_STAGES} stages of {self.tp} do not fit on {self.ranks} ranks",
                hint=f"use {one_of(map(str, fits))}",
            )

    @property
    def pp(self) -> int:
        return self.ranks // self.dp // self.tp

    @property
    def microbatches(self) -> int:
        return self.microbatches_per_stage * self.pp

    @property
    def encoder_layers(self) -> int:
        return round(self.encoder_work * self.pp)

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.microbatches * self.dp

    @property
    def bound_s(self) -> float:
        """Mean compute of encoder and LLM, spread evenly over all ranks."""
        layer_s = sum(sum(kernels.values()) for kernels in LAYER_S.values())
        return self.microbatches * layer_s * (1 + self.encoder_layers / self.pp) * TP / self.tp

    @cached_property
    def job(self) -> Job:
        encoder = Encoder(
            name=VISION,
            modality="vision",
            stack=_stack(self.encoder_layers, causal=False, mlp_over_hidden=self.mlp_over_hidden),
            projector=Projector(widths=(WIDTH,), merge=MERGE),
            patch_inputs=12,
            recompute="none",
        )
        stack = _stack(self.pp, causal=True, mlp_over_hidden=self.mlp_over_hidden)
        llm = Llm(stack=stack, vocab=64, recompute="none")
        return Job(
            name="paced",
            model=Model(name="tiny", encoders=(encoder,), llm=llm),
            cluster=self._cluster,
            workload=Workload(sequence_tokens=TOKENS, sequences_per_step=self.sequences, sequences=self.data),
            layout=LayoutConstraints(
                modules={LLM: PartialLayout(dp=self.dp, pp=self.pp, cp=1, ep=1, tp=self.tp)},
                limits=SearchLimits(microbatch_sequences=(1,)),
            ),
        )

    @cached_property
    def llm_only(self) -> Job:
        """The LLM without encoders: its step is the floor."""
        model = replace(self.job.model, encoders=())
        sequence = PackedSequence(text=TOKENS, items=())
        return replace(self.job, model=model, workload=replace(self.job.workload, sequences=(sequence,)))

    @property
    def _cluster(self) -> Cluster:
        def link(bytes_per_s: float) -> Link:
            return Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0, source="paced")

        return Cluster(
            name="paced",
            gpu=Gpu(
                name="paced",
                peak_flops=1e15,
                memory_bytes=2.0**50,
                memory_bandwidth_bytes_per_s=1e15,
                curves=FLAT,
                source="paced",
            ),
            gpus=self.ranks,
            gpus_per_node=self.tp,
            within_node=link(_TP_BYTES_PER_S),
            between_nodes=link(_NIC_BYTES_PER_S),
            reserve_bytes=0.0,
        )

    def context(self, job: Job) -> PlanningContext:
        context, _ = choose_smallest_context(job, ASSUMPTIONS, profile_of(job))
        return context


# No slow-down under collectives, no launch cost, no optimizer.
ASSUMPTIONS: Assumptions = replace(
    get_preset("default"), residence_slowdown=0.0, launch_s=0.0, optimizer_time=False
)


def profile_of(job: Job) -> Profile:
    """Returns the seconds of every kernel as planners read them: the LLM at tp 2, an image at tp 1."""
    rows: list[SegmentMeasurement] = []
    for module in job.model.modules:
        tp = TP if module.name == LLM else 1
        tokens = TOKENS if module.name == LLM else IMAGES[0] * MERGE
        rows += _rows(module.name, tp, tokens)
    modules = tuple((module.name, hash_module_shape(module)) for module in job.model.modules)
    return Profile(name="paced", modules=modules, segments=tuple(rows), issue_s=0.0)


def _rows(module: str, tp: int, tokens: int) -> Iterator[SegmentMeasurement]:
    def row(layers: LayerClass, kind: OpKind, kernel: str, seconds: float) -> SegmentMeasurement:
        return SegmentMeasurement(
            module=module,
            layers=layers,
            segment=kernel,
            kernels=(kernel,),
            kind=kind,
            tokens=tokens,
            tp=tp,
            median_s=seconds,
            p25_s=seconds,
            p75_s=seconds,
            repetitions=1,
        )

    for kind, kernels in LAYER_S.items():
        for kernel, seconds in kernels.items():
            yield row("full", kind, kernel, seconds)
    last: LayerClass = "head" if module == LLM else "projector"
    first = END_S["embedding"] if module == LLM else PATCHES
    for layers, ends in (("embedding", first), (last, END_S[last])):
        for kind, (kernel, seconds) in ends.items():
            yield row(layers, kind, kernel, seconds)  # type: ignore[arg-type]
