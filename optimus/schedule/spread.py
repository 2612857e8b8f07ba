"""An encoder replicated over many GPUs in small groups, each with its share of the images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from optimus.cost.memory import Memory, states
from optimus.cost.module import PricedLayer
from optimus.job.layout import Layout
from optimus.job.model import Encoder
from optimus.program.op import Kind, Lane
from optimus.schedule.build import Template, single
from optimus.schedule.setting import Setting
from optimus.schedule.traffic import ParameterTraffic, parameter_traffic


@dataclass(frozen=True, kw_only=True, eq=False)
class SpreadEncoder:
    """What one group of `layout.tp` GPUs does for an encoder."""

    setting: Setting
    encoder: Encoder
    layout: Layout
    layers: tuple[PricedLayer, ...]  # for one piece
    pieces: int  # of a group: in a step, or in one microbatch of the LLM
    recompute: str

    def template(self, kind: Kind) -> Template:
        """The rows of one piece."""
        chunks = self.setting.chunks
        return chunks.template(chunks.make(self.layers), kind)

    @cached_property
    def traffic(self) -> ParameterTraffic:
        precision = self.setting.job.model.precision
        return parameter_traffic(self.layers, self.setting.prices, precision)

    @property
    def gather(self) -> Template:
        return single(Kind.GATHER, Lane.DP, self.traffic.gather_s, size_bytes=self.traffic.gather_bytes)

    @property
    def reduce(self) -> Template:
        return single(Kind.REDUCE, Lane.DP, self.traffic.reduce_s, size_bytes=self.traffic.reduce_bytes)

    @property
    def states(self) -> Memory:
        return states(self.layers, self.setting.job.model.precision)

    @property
    def kept_bytes(self) -> float:
        """Activations of one piece."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def working_bytes(self) -> float:
        return max(layer.working_bytes for layer in self.layers)

    @property
    def output_bytes(self) -> float:
        return self.layers[-1].output_bytes


def spread_over_all(setting: Setting, encoder: Encoder, *, tp: int, recompute: str) -> SpreadEncoder:
    """Over every GPU of the job, for a whole step: images are dealt out whole, as evenly as can be."""
    workload = setting.job.workload
    layout = Layout(dp=setting.job.cluster.gpus // tp, tp=tp)
    items = sum(len(s.lengths(encoder.name)) for s in workload.sequences) / len(workload.sequences)
    pieces, share = 0, 0.0
    if items > 0:
        own = math.ceil(items * workload.sequences_per_step / layout.dp) / items  # sequences' worth
        pieces = math.ceil(own / setting.microbatch_sequences)
        share = own / pieces
    return SpreadEncoder(
        setting=setting,
        encoder=encoder,
        layout=layout,
        layers=setting.encoder_layers(encoder, layout, share, recompute),
        pieces=pieces,
        recompute=recompute,
    )


def serve_replicas(
    setting: Setting, encoder: Encoder, *, tp: int, recompute: str, gpus: int, sequences: float
) -> SpreadEncoder:
    """Over `gpus` GPUs that feed all LLM replicas: a piece is a group's part of one microbatch of each."""
    layout = Layout(dp=gpus // tp, tp=tp)
    share = setting.layout.dp * sequences / layout.dp
    return SpreadEncoder(
        setting=setting,
        encoder=encoder,
        layout=layout,
        layers=setting.encoder_layers(encoder, layout, share, recompute),
        pieces=1,
        recompute=recompute,
    )


def encoder_choices(setting: Setting, encoder: Encoder) -> Iterator[tuple[int, str]]:
    """(tp, recomputation) to try, least recomputation first."""
    for policy in setting.policies((encoder,)):
        for tp in (1, 2, 4, 8):
            if setting.layout.tp % tp == 0 and encoder.stack.attention.heads % tp == 0:
                yield tp, policy[0][1]
