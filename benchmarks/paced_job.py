"""The job of paced ranks with given durations: its plan, and the cuts of torch's schedules.

The LLM has 4 layers per rank of 10 ms forward, the encoder 3 per rank of 6.7 ms, half of the LLM's work; a
backward takes twice as long, half of that for weight gradients. To hide host overhead, no op is shorter
than 20 ms: an LLM chunk is 2 layers or more, and encoder layers run as blocks on a part of a microbatch.
With replicas, parameters are sharded over them, and gathers and reduces take a tenth of a step or more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from benchmarks.paced_clock import PacedLink
from benchmarks.paced_torch import CutSearch, PacedTorchVariant, Programs, TorchPipeline, balanced_cuts
from optimus.errors import UserError, one_of
from optimus.ir.plan import EncoderBlocks, Plan, Seconds
from optimus.planner.systems.pipeline_search import minimize_largest_stage
from optimus.planner.user_modules import plan_modules
from optimus.schedule.stage_costs import Cut

ENCODER = "vision"
LLM_LAYERS, ENCODER_LAYERS = 4, 3  # per rank
LAYER_S = 0.010
ENCODER_LAYER_S = LAYER_S * LLM_LAYERS / ENCODER_LAYERS / 2
MIN_OP_S = 0.020
CHUNKS = 2  # per rank, where there is a choice
ROWS, WIDTH = 4, 4  # of the tensor that stands for an activation
STEP_OVER_FORWARD = 3  # forward, and a backward twice as long
SIZES = (4, 8, 16, 32, 64)

# An activation stands for 4096 tokens of width 2048 in bf16, on a link of 16.8 GB/s: 2 ms with latency. All
# sends of a rank follow each other, as in plans, and so do all its collectives.
LINK = PacedLink(latency_s=0.001, bandwidth_bytes_per_s=2.0**24 * 1000, bytes_scale=2.0**18, lane="p2p")
BUCKET_SCALE = 64.0  # bytes of a parameter over those of an activation, with replicas


def _scaled_bytes(tensor: Any) -> float:
    """Scales flat tensors, which are parameters or gradients; activations are rows."""
    return float(tensor.nbytes) * (BUCKET_SCALE if tensor.dim() == 1 else 1.0)


REPLICAS_LINK = replace(LINK, size_of=_scaled_bytes)


@dataclass(frozen=True, kw_only=True)
class PacedJob:
    """The model on `ranks` ranks: `dp` pipelines of the LLM, with sharded parameters if more than one."""

    ranks: int
    dp: int = 1
    link: PacedLink = LINK

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
        """Encoder microbatches per LLM microbatch."""
        return min(4, self.pp // 2)

    @property
    def bound_s(self) -> float:
        """Mean seconds of all work, spread evenly over all ranks."""
        forward_s = LLM_LAYERS * LAYER_S + ENCODER_LAYERS * ENCODER_LAYER_S
        return self.microbatches * STEP_OVER_FORWARD * forward_s

    def plan(self) -> Plan:
        """Returns the plan from mean durations, with the order of the shortest claim at 16 ranks."""
        rows = torch.zeros(ROWS, WIDTH)
        stage_s = LLM_LAYERS // CHUNKS * LAYER_S
        stage = self._seconds(stage_s, rows, replicas=self.dp)
        piece_s = self.pp * ENCODER_LAYERS * ENCODER_LAYER_S / self.pieces
        count = round(piece_s / MIN_OP_S)
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

    def torch_variants(self) -> dict[str, CutSearch]:
        """Returns schedules with the encoder in stage 0, and with all layers in model order."""
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
        """Forward seconds of the encoder's layers, then of the LLM's."""
        encoder, llm = self.ranks * ENCODER_LAYERS, self.ranks * LLM_LAYERS
        return [ENCODER_LAYER_S] * encoder + [LAYER_S] * llm

    def _variant(self, pipeline: TorchPipeline, cut: Cut, programs: Programs) -> PacedTorchVariant:
        forward_s = tuple(sum(self._layers_s[a:b]) for a, b in pairwise(cut))
        backward_s = tuple(2 * seconds for seconds in forward_s)
        return PacedTorchVariant(
            pipeline=pipeline,
            programs=programs,
            link=self.link,
            layers=tuple(range(a, b) for a, b in pairwise(cut)),
            compute_s={"F": forward_s, "I": forward_s, "W": forward_s, "B": backward_s},
        )

    def _stage0(self, pipeline: TorchPipeline) -> CutSearch:
        """Puts the encoder in stage 0, and the LLM's layers evenly behind it, or few of them on its rank."""
        first, stages = self.ranks * ENCODER_LAYERS, self.ranks * pipeline.chunks
        layers = [1.0] * (self.ranks * LLM_LAYERS)
        sizes = [[b - a for a, b in pairwise(minimize_largest_stage(layers, stages - 1))]]
        if pipeline.chunks > 1:
            few = pipeline.chunks - 1  # one layer in every later chunk of that rank
            spread = [b - a for a, b in pairwise(minimize_largest_stage(layers[few:], stages - 1 - few))]
            for chunk in range(1, pipeline.chunks):
                spread.insert(chunk * self.ranks - 1, 1)
            sizes.append(spread)
        starts = tuple((0, *accumulate([first, *each])) for each in sizes)
        make = partial(self._variant, pipeline)
        return CutSearch(pipeline=pipeline, starts=starts, make=make, is_fixed=True)

    def _balanced(self, pipeline: TorchPipeline) -> CutSearch:
        starts = balanced_cuts(self._layers_s, self.ranks * pipeline.chunks)
        return CutSearch(pipeline=pipeline, starts=starts, make=partial(self._variant, pipeline))


def bucket(layers: int, replicas: int) -> torch.Tensor:
    """Returns a flat tensor of the parameters of `layers` layers, padded to equal shards on all replicas."""
    return torch.zeros(-(-layers * WIDTH * WIDTH // replicas) * replicas)
