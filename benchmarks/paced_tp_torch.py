"""Runs torch's own schedules over tensor-parallel stages: DTensor, on the links of our engine.

Encoder and LLM form one pipeline that is cut between the halves of any layer. DTensor shards the LLM and
gathers and scatters in the middle of compute, so nothing overlaps. The encoder is replicated on every rank,
with one image of a microbatch, as in ours. Replicas send each other nothing, and gradients of the encoder are
not summed over the ranks of a stage: both spare these schedules work that ours does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from benchmarks.paced_backend import PacedNetwork
from benchmarks.paced_torch import (
    CutSearch,
    PacedPipeline,
    PacedTorchVariant,
    Programs,
    SpendInBackward,
    TorchPipeline,
    balanced_cuts,
)
from benchmarks.paced_tp_job import COLLECTIVE_S, LAYER_S, P2P_LINK, TOKENS, TP, WIDTH, TpJob, link_of
from optimus.engine.process_groups import make_process_groups
from optimus.ir.op import Communicator, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.planner.systems.pipeline_search import minimize_largest_stage
from optimus.schedule.stage_costs import Cut

DTYPE = torch.bfloat16
HALVES = (("qkv", "attention", "out"), ("up", "down"))  # kernels of a layer before and after its middle
COLLECTIVES = 2  # of a half of the LLM, in each direction
KINDS: dict[str, tuple[OpKind, ...]] = {
    "F": (OpKind.FORWARD,),
    "I": (OpKind.INPUT_GRAD,),
    "W": (OpKind.WEIGHT_GRAD,),
    "B": (OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD),
}


def half_s(half: int, kind: str) -> float:
    """Returns the compute seconds of half a layer."""
    return sum(LAYER_S[op].get(kernel, 0.0) for op in KINDS[kind] for kernel in HALVES[half % 2])


def torch_variants(job: TpJob) -> dict[str, CutSearch]:
    """Returns schedules with the encoder in stage 0, and with all layers in model order."""
    once = TorchPipeline(
        schedule="1F1B", num_microbatches=job.microbatches, rows=TOKENS // TP, width=WIDTH, dtype=DTYPE
    )
    twice = replace(once, schedule="Interleaved1F1B", chunks=2)
    return {
        "stage0 1F1B": _stage0(job, once),
        "balanced 1F1B": _balanced(job, once),
        "balanced Interleaved": _balanced(job, twice),
        "balanced ZBV": _balanced(job, replace(twice, schedule="ZBVZeroBubble")),
    }


def _stage0(job: TpJob, pipeline: TorchPipeline) -> CutSearch:
    """Puts the encoder in stage 0, and the LLM's layers evenly behind it."""
    first, halves = 2 * job.encoder_layers, _halves_s(job)
    start = (0, *(first + at for at in minimize_largest_stage(halves[first:], job.pp - 1)))
    make = partial(_variant, job, pipeline)
    return CutSearch(pipeline=pipeline, starts=(start,), make=make, is_fixed=True)


def _balanced(job: TpJob, pipeline: TorchPipeline) -> CutSearch:
    starts = balanced_cuts(_halves_s(job), job.pp * pipeline.chunks)
    return CutSearch(pipeline=pipeline, starts=starts, make=partial(_variant, job, pipeline))


def _halves_s(job: TpJob) -> list[float]:
    """Returns forward and backward seconds of every half, of the LLM with collectives."""
    encoder, collectives_s = 2 * job.encoder_layers, 2 * COLLECTIVES * COLLECTIVE_S
    return [
        half_s(half, "F") + half_s(half, "B") + (collectives_s if half >= encoder else 0.0)
        for half in range(2 * (job.encoder_layers + job.pp))
    ]


def _variant(job: TpJob, pipeline: TorchPipeline, cut: Cut, programs: Programs) -> PacedTorchVariant:
    stages = tuple(range(a, b) for a, b in pairwise(cut))
    sharded = [sum(half >= 2 * job.encoder_layers for half in halves) for halves in stages]
    collective_s = tuple(COLLECTIVES * COLLECTIVE_S * count for count in sharded)
    return PacedTorchVariant(
        pipeline=pipeline,
        programs=programs,
        link=P2P_LINK,
        layers=stages,
        compute_s=_sum_halves(stages, range(2 * (job.encoder_layers + job.pp))),
        encoder_s=_sum_halves(stages, range(2 * job.encoder_layers)),
        collective_s={
            kind: (0.0,) * len(stages) if kind == "W" else collective_s for kind in KINDS
        },  # weight gradients need no collective
    )


def _sum_halves(stages: Sequence[range], counted: range) -> dict[str, tuple[float, ...]]:
    """Returns the compute seconds of every stage, by kind: of those halves of layers that are counted."""
    return {
        kind: tuple(sum(half_s(half, kind) for half in halves if half in counted) for halves in stages)
        for kind in KINDS
    }


# ---------------------------------------------------------------------------- on every rank


class DTensorStage(nn.Module):
    """Half layers on this rank's rows: of an image in the encoder, of the sequence in the LLM."""

    def __init__(
        self, variant: PacedTorchVariant, encoder_halves: int, mesh: DeviceMesh, spend: Any, stage: int
    ) -> None:
        super().__init__()
        self._mesh, self._spend, self._split = mesh, partial(spend, stage=stage), variant.pipeline.splits
        self._is_sharded = [half >= encoder_halves for half in variant.layers[stage]]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full(shape, 1 / WIDTH, dtype=DTYPE))
            for is_sharded in self._is_sharded
            for shape in _shapes(WIDTH // TP if is_sharded else WIDTH)
        )
        self.is_free = False

    def forward(self, rows: Tensor, microbatch: Tensor) -> Tensor:
        number = int(microbatch)
        if not rows.requires_grad:
            rows = rows.detach().requires_grad_()
        kind = "I" if self._split else "B"
        rows = SpendInBackward.apply(rows, lambda: self._spent(kind, number))
        weights = list(self.weights)
        if self._split:
            weights[0] = SpendInBackward.apply(weights[0], lambda: self._spent("W", number))
        for is_sharded, columns, inner in zip(self._is_sharded, weights[::2], weights[1::2], strict=True):
            rows = self._sharded(rows, columns, inner) if is_sharded else _replicated(rows, columns, inner)
        output = rows.clone()  # torch detaches it in place, which a view does not allow
        self._spent("F", number)
        return output

    def _sharded(self, rows: Tensor, columns: Tensor, inner: Tensor) -> Tensor:
        """Gathers all rows, and scatters the sums."""
        x = self._placed(rows, Shard(0))
        gathered = x.redistribute(placements=[Replicate()])
        wide = torch.tanh(gathered @ self._placed(columns, Shard(1)))
        output = x + (wide @ self._placed(inner, Shard(0))).redistribute(placements=[Shard(0)])
        return output.to_local()

    def _placed(self, tensor: Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, [placement], run_check=False)

    def _spent(self, kind: str, microbatch: int) -> None:
        if not self.is_free:
            self._spend(kind=kind, microbatch=microbatch)


def _shapes(width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes of a rank's columns of the first GEMM and rows of the second."""
    return (WIDTH, width), (width, WIDTH)


def _replicated(rows: Tensor, columns: Tensor, inner: Tensor) -> Tensor:
    return rows + torch.tanh(rows @ columns) @ inner


def make_pipelines(
    job: TpJob,
    variants: Mapping[str, PacedTorchVariant],
    seconds: Callable[[PacedTorchVariant, str, int, int], float],  # of kind, stage and microbatch
    network: PacedNetwork,
    plan: Plan,
    *,
    timeout_s: float,
) -> dict[str, PacedPipeline]:
    """Returns this rank's stages of every variant, with the groups of a plan's LLM."""
    rank = dist.get_rank()
    groups = make_process_groups(plan, rank, timeout_s=timeout_s, backend="paced", options_of=link_of)
    pipeline = dist.new_group(
        list(plan.ranks.group_of(LLM, Communicator.PP, rank)),
        backend="paced",
        pg_options=P2P_LINK,
        use_local_synchronization=True,
    )
    tp_group = groups.get("llm.tp")
    assert tp_group is not None
    mesh = DeviceMesh.from_group(tp_group, "cpu")

    def spend(variant: PacedTorchVariant, stage: int, kind: str, microbatch: int) -> None:
        network.clock.compute(seconds(variant, kind, stage, microbatch))

    return {
        name: PacedPipeline(
            variant.pipeline,
            clock=network.clock,
            seconds=lambda kind, stage, microbatch: 0.0,
            group=pipeline,
            make=partial(DTensorStage, variant, 2 * job.encoder_layers, mesh, partial(spend, variant)),
        )
        for name, variant in variants.items()
    }
