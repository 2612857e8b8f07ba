"""torch's own schedules over divided stages: tensor parallelism by DTensor, on the links that ours meets too.

Encoder and LLM stand in one pipeline and are cut between the two halves of any layer. The LLM is divided by
DTensor, which gathers and scatters where it computes: nothing can run meanwhile. The encoder is whole on
every rank, with one image of a microbatch, as in ours. Replicas send each other nothing, and gradients of the
encoder are not summed over the ranks of a stage: both spare these schedules what ours has to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from benchmarks.divided_job import COLLECTIVE_S, LAYER_S, P2P_LINK, TOKENS, TP, WIDTH, DividedJob
from benchmarks.draws import Draws
from benchmarks.paced_backend import PacedNetwork
from benchmarks.paced_torch import PacedPipeline, Passing, TorchPipeline
from benchmarks.torch_cuts import Cuts, balanced
from benchmarks.torch_replay import Programs, replay_step
from optimus.engine.process_groups import ProcessGroups
from optimus.ir.op import OpKind
from optimus.planner.systems.layer_partition import smallest_maximum_cut
from optimus.schedule.stage_costs import Cut

DTYPE = torch.bfloat16
HALVES = (("qkv", "attention", "out"), ("up", "down"))  # kernels of a layer before and after its middle
EXCHANGES = 2  # of a half, in each direction


def half_s(half: int, kind: str) -> float:
    """Compute of half a layer: F, I, W, or B, which is both of them."""
    kinds = {
        "F": (OpKind.FORWARD,),
        "I": (OpKind.INPUT_GRAD,),
        "W": (OpKind.WEIGHT_GRAD,),
        "B": (OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD),
    }[kind]
    return sum(LAYER_S[each].get(kernel, 0.0) for each in kinds for kernel in HALVES[half % 2])


@dataclass(frozen=True, kw_only=True)
class DividedTorch:
    """A schedule of torch's over one cut of the half layers: which of them every virtual stage holds."""

    pipeline: TorchPipeline
    stages: tuple[range, ...]
    whole: int  # the first halves, which are not divided: those of the encoder

    def compute_s(self, kind: str, stage: int) -> float:
        return sum(half_s(half, kind) for half in self.stages[stage])

    def exchange_s(self, kind: str, stage: int) -> float:
        """Gradients of weights are made without."""
        divided = sum(half >= self.whole for half in self.stages[stage])
        return 0.0 if kind == "W" else EXCHANGES * COLLECTIVE_S * divided

    def drawn_s(self, draws: Draws, kind: str, stage: int, microbatch: int) -> float:
        named = f"{self.pipeline.schedule} of {len(self.stages)}"
        factor = draws.factor(module=named, kind=kind, virtual_stage=stage, microbatch=microbatch)
        return self.compute_s(kind, stage) * factor

    def replayed_s(self, draws: Draws, programs: Programs) -> float:
        """By the rules alone."""

        def seconds(kind: str, stage: int, microbatch: int) -> float:
            return self.drawn_s(draws, kind, stage, microbatch) + self.exchange_s(kind, stage)

        return replay_step(self.pipeline, programs, seconds, P2P_LINK)


def torch_variants(job: DividedJob) -> dict[str, Cuts[DividedTorch]]:
    """The encoder in stage 0, or all layers in model order: each with cuts to choose from."""
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


def _stage0(job: DividedJob, pipeline: TorchPipeline) -> Cuts[DividedTorch]:
    """The encoder as stage 0, and the LLM's layers evenly behind it."""
    first, halves = 2 * job.encoder_layers, _halves_s(job)
    start = (0, *(first + at for at in smallest_maximum_cut(halves[first:], job.pp - 1)))
    return replace(_cuts(job, pipeline, (start,)), is_fixed=True)


def _balanced(job: DividedJob, pipeline: TorchPipeline) -> Cuts[DividedTorch]:
    return _cuts(job, pipeline, balanced(_halves_s(job), job.pp * pipeline.chunks))


def _halves_s(job: DividedJob) -> list[float]:
    """What each takes, forward and backward: the encoder's, then the LLM's, which have exchanges."""
    whole, exchanges_s = 2 * job.encoder_layers, 2 * EXCHANGES * COLLECTIVE_S
    return [
        half_s(half, "F") + half_s(half, "B") + (exchanges_s if half >= whole else 0.0)
        for half in range(2 * (job.encoder_layers + job.pp))
    ]


def _cuts(job: DividedJob, pipeline: TorchPipeline, starts: tuple[Cut, ...]) -> Cuts[DividedTorch]:
    def variant(cut: Cut) -> DividedTorch:
        stages = tuple(range(a, b) for a, b in pairwise(cut))
        return DividedTorch(pipeline=pipeline, stages=stages, whole=2 * job.encoder_layers)

    return Cuts(pipeline=pipeline, starts=starts, variant=variant)


# ---------------------------------------------------------------------------- on every rank


class DividedStage(nn.Module):
    """Half layers on the rows that this rank holds: of an image, then of the sequence."""

    def __init__(self, variant: DividedTorch, stage: int, mesh: DeviceMesh, spend: Any) -> None:
        super().__init__()
        self._mesh, self._spend, self._split = mesh, partial(spend, stage=stage), variant.pipeline.splits
        self._divided = [half >= variant.whole for half in variant.stages[stage]]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full(shape, 1 / WIDTH, dtype=DTYPE))
            for divided in self._divided
            for shape in _shapes(WIDTH // TP if divided else WIDTH)
        )
        self.free = False

    def forward(self, rows: Tensor, microbatch: Tensor) -> Tensor:
        number = int(microbatch)
        if not rows.requires_grad:
            rows = rows.detach().requires_grad_()
        kind = "I" if self._split else "B"
        rows = Passing.apply(rows, lambda: self._spent(kind, number))
        weights = list(self.weights)
        if self._split:
            weights[0] = Passing.apply(weights[0], lambda: self._spent("W", number))
        for divided, columns, inner in zip(self._divided, weights[::2], weights[1::2], strict=True):
            rows = self._exchanged(rows, columns, inner) if divided else _alone(rows, columns, inner)
        found = rows.clone()  # torch detaches it in place, which a view does not allow
        self._spent("F", number)
        return found

    def _exchanged(self, rows: Tensor, columns: Tensor, inner: Tensor) -> Tensor:
        """All rows are gathered, and sums scattered to those who hold them."""
        x = self._placed(rows, Shard(0))
        gathered = x.redistribute(placements=[Replicate()])
        wide = torch.tanh(gathered @ self._placed(columns, Shard(1)))
        found = x + (wide @ self._placed(inner, Shard(0))).redistribute(placements=[Shard(0)])
        return found.to_local()

    def _placed(self, tensor: Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, [placement], run_check=False)

    def _spent(self, kind: str, microbatch: int) -> None:
        if not self.free:
            self._spend(kind=kind, microbatch=microbatch)


def _shapes(width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """A rank's columns of the first product, then its rows of the second."""
    return (WIDTH, width), (width, WIDTH)


def _alone(rows: Tensor, columns: Tensor, inner: Tensor) -> Tensor:
    return rows + torch.tanh(rows @ columns) @ inner


def make_pipelines(
    variants: Mapping[str, DividedTorch],
    draws: Draws,
    network: PacedNetwork,
    groups: ProcessGroups,
    pipeline: dist.ProcessGroup,
) -> dict[str, PacedPipeline]:
    """Of every variant, this rank's stages; `pipeline` joins the stages of one replica at its place."""
    sharing = groups.get("llm.tp")
    assert sharing is not None
    mesh = DeviceMesh.from_group(sharing, "cpu")

    def spend(variant: DividedTorch, stage: int, kind: str, microbatch: int) -> None:
        network.clock.compute(variant.drawn_s(draws, kind, stage, microbatch))

    return {
        name: PacedPipeline(
            variant.pipeline,
            clock=network.clock,
            seconds=lambda kind, stage, microbatch: 0.0,
            group=pipeline,
            make=partial(_make, variant, mesh, partial(spend, variant)),
        )
        for name, variant in variants.items()
    }


def _make(variant: DividedTorch, mesh: DeviceMesh, spend: Any, stage: int) -> DividedStage:
    return DividedStage(variant, stage, mesh, spend)
