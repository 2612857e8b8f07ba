"""A job of given times for paced ranks: what the planner is told, and how torch's schedules cut the model.

The LLM has 4 layers per rank of 10 ms forward, the encoder 3 per rank of 6.7 ms, half of the LLM's work; a
backward takes twice as long, half of that for weight gradients. So that host overhead hides, no op is shorter
than 20 ms: an LLM chunk is 2 layers or more, and encoder layers run as blocks on a part of a microbatch.
With replicas, parameters are sharded over them, and gathers and reduces take a tenth of a step or more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from benchmarks.paced_torch import TorchPipeline
from benchmarks.pacing import Link
from benchmarks.torch_cuts import Cuts, balanced
from optimus.errors import UserError, one_of
from optimus.ir.module_times import EncoderBlocks, Seconds
from optimus.ir.plan import Plan
from optimus.planner.systems.layer_partition import smallest_maximum_cut
from optimus.planner.user_modules import plan_modules
from optimus.schedule.stage_costs import Cut

ENCODER = "vision"
LLM_LAYERS, ENCODER_LAYERS = 4, 3  # per rank
LAYER_S = 0.010
ENCODER_LAYER_S = LAYER_S * LLM_LAYERS / ENCODER_LAYERS / 2
SHORTEST_S = 0.020
CHUNKS = 2  # per rank, where there is a choice
ROWS, WIDTH = 4, 4  # of the tensor that stands for an activation
WHOLE_STEP = 3  # forward, and a backward twice as long
SIZES = (4, 8, 16, 32, 64)

# An activation stands for 4096 tokens of width 2048 in bf16, on a link of 16.8 GB/s: 2 ms with latency. All
# sends of a rank follow each other, as in plans, and so do all its collectives.
LINK = Link(latency_s=0.001, bandwidth_bytes_per_s=2.0**24 * 1000, bytes_scale=2.0**18, lane="p2p")
BUCKET_SCALE = 64.0  # with replicas, a matrix of parameters stands for so many times an activation


def _bytes_meant(tensor: Any) -> float:
    """Activations are rows; what is flat are parameters, or gradients, that travel together."""
    return float(tensor.nbytes) * (BUCKET_SCALE if tensor.dim() == 1 else 1.0)


LINK_OF_REPLICAS = replace(LINK, size_of=_bytes_meant)


@dataclass(frozen=True, kw_only=True)
class TorchVariant:
    """A schedule of torch and the mean forward seconds of its virtual stages."""

    pipeline: TorchPipeline
    forward_s: tuple[float, ...]

    def mean_s(self, kind: str, stage: int) -> float:
        return self.forward_s[stage] * (2 if kind == "B" else 1)

    @property
    def least_s(self) -> float:
        """What the longest rank computes; no step is shorter."""
        ranks = len(self.forward_s) // self.pipeline.chunks
        return max(
            self.pipeline.num_microbatches
            * WHOLE_STEP
            * sum(self.forward_s[stage] for stage in self.pipeline.stages_of(rank, ranks))
            for rank in range(ranks)
        )


@dataclass(frozen=True, kw_only=True)
class PacedJob:
    """The model on so many ranks: `dp` pipelines of the LLM, each with a replica of its own of everything."""

    ranks: int
    dp: int = 1
    link: Link = LINK

    def __post_init__(self) -> None:
        if self.ranks not in SIZES:
            raise UserError(
                field="--ranks",
                value=self.ranks,
                problem="is not a size of this bench",
                hint=f"use {', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]}",
            )
        if self.ranks % (2 * self.dp):
            raise UserError(
                field="--dp",
                value=self.dp,
                problem=f"replicas of two stages or more do not fit on {self.ranks} ranks",
                hint=f"use {one_of(str(dp) for dp in (1, 2, 4, 8) if self.ranks % (2 * dp) == 0)}",
            )

    @property
    def pp(self) -> int:
        return self.ranks // self.dp

    @property
    def microbatches(self) -> int:
        return 2 * self.pp

    @property
    def pieces(self) -> int:
        """Encoder microbatches in one of the LLM's."""
        return min(4, self.pp // 2)

    @property
    def bound_s(self) -> float:
        """All work, by its means, evenly on all ranks."""
        forward_s = LLM_LAYERS * LAYER_S + ENCODER_LAYERS * ENCODER_LAYER_S
        return self.microbatches * WHOLE_STEP * forward_s

    def plan(self) -> Plan:
        """Made from means: draws are unknown here. The order with the shortest claim, at 16 ranks."""
        rows = torch.zeros(ROWS, WIDTH)
        stage_s = LLM_LAYERS // CHUNKS * LAYER_S
        stage = self._seconds(stage_s, rows, replicas=self.dp)
        piece_s = self.pp * ENCODER_LAYERS * ENCODER_LAYER_S / self.pieces
        count = round(piece_s / SHORTEST_S)
        block = self._seconds(piece_s / count, rows[: ROWS // self.pieces], replicas=self.ranks)
        return plan_modules(
            stages=[stage] * (self.pp * CHUNKS),
            encoders={ENCODER: EncoderBlocks(blocks=[block] * count, pieces=self.pieces)},
            microbatches=self.microbatches,
            ranks=self.ranks,
            pp=self.pp,
            order="zero-bubble",
        )

    def _seconds(self, forward_s: float, sent: torch.Tensor, *, replicas: int) -> Seconds:
        moves_s = self.link.collective_s([bucket(1, replicas)], ranks=replicas) if self.dp > 1 else 0.0
        return Seconds(
            forward_s=forward_s,
            backward_s=2 * forward_s,
            weight_s=forward_s,
            send_s=self.link.message_s(sent),
            gather_s=moves_s,
            reduce_s=moves_s,
        )

    def torch_variants(self) -> dict[str, Cuts[TorchVariant]]:
        """The encoder in stage 0, or all layers in model order: each with cuts to choose from."""
        once = TorchPipeline(schedule="1F1B", num_microbatches=self.microbatches, rows=ROWS, width=WIDTH)
        twice = replace(once, schedule="Interleaved1F1B", chunks=CHUNKS)
        zbv = replace(twice, schedule="ZBVZeroBubble")
        return {
            "stage0 1F1B": self._stage0(once),
            "stage0 Interleaved": self._stage0(twice),
            "balanced 1F1B": self._balanced(once),
            "balanced Interleaved": self._balanced(twice),
            "balanced ZBV": self._balanced(zbv),
        }

    @property
    def _layers_s(self) -> list[float]:
        """Forwards of the encoder's, then of the LLM's."""
        encoder, llm = self.ranks * ENCODER_LAYERS, self.ranks * LLM_LAYERS
        return [ENCODER_LAYER_S] * encoder + [LAYER_S] * llm

    def _variant(self, pipeline: TorchPipeline, cut: Cut) -> TorchVariant:
        forward_s = tuple(sum(self._layers_s[a:b]) for a, b in pairwise(cut))
        return TorchVariant(pipeline=pipeline, forward_s=forward_s)

    def _stage0(self, pipeline: TorchPipeline) -> Cuts[TorchVariant]:
        """The encoder as stage 0, and the LLM's layers evenly behind it; or few of them on its rank."""
        first, stages = self.ranks * ENCODER_LAYERS, self.ranks * pipeline.chunks
        layers = [1.0] * (self.ranks * LLM_LAYERS)
        sizes = [[b - a for a, b in pairwise(smallest_maximum_cut(layers, stages - 1))]]
        if pipeline.chunks > 1:
            few = pipeline.chunks - 1  # one layer in every later chunk of that rank
            spread = [b - a for a, b in pairwise(smallest_maximum_cut(layers[few:], stages - 1 - few))]
            for chunk in range(1, pipeline.chunks):
                spread.insert(chunk * self.ranks - 1, 1)
            sizes.append(spread)
        starts = tuple((0, *accumulate([first, *each])) for each in sizes)
        return Cuts(pipeline=pipeline, starts=starts, variant=partial(self._variant, pipeline), is_fixed=True)

    def _balanced(self, pipeline: TorchPipeline) -> Cuts[TorchVariant]:
        starts = balanced(self._layers_s, self.ranks * pipeline.chunks)
        return Cuts(pipeline=pipeline, starts=starts, variant=partial(self._variant, pipeline))


def bucket(layers: int, replicas: int) -> torch.Tensor:
    """As large as the parameters of some layers, each a matrix, in equal parts on all replicas."""
    return torch.zeros(-(-layers * WIDTH * WIDTH // replicas) * replicas)
