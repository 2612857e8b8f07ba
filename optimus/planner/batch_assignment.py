"""Describes how the sequences of a batch are assigned to replicas, microbatches and encoder bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from optimus.cost.priced_layer import PricedLayer
from optimus.job.layout import Layout
from optimus.planner.context import PlanningContext

Sharing = Literal["pieces", "all"]


@dataclass(frozen=True, kw_only=True)
class EncoderBins:
    """Bins over which the images of an LLM microbatch are distributed, and the load that one was priced at.

    `sharing` says which rows of the schedule a bin loads:
      pieces  encoder microbatch `m * bins + b` is bin b of LLM microbatch m
      all     microbatch m of all replicas together, split evenly
    """

    bins: int
    sharing: Sharing
    priced_sequences: float  # mean sequences whose load one bin (with `all`: all bins) was priced at
    pipelines: tuple[int, ...] = ()  # with `pieces`: the pipeline of every encoder microbatch of a replica


@dataclass(frozen=True, kw_only=True)
class BatchAssignment:
    """Assignment of a batch: each of `replicas` gets its own sequences, split into `microbatches`.

    Replicas run in parallel and the slowest ends the step. With `locked` replicas, every layer of each
    waits for all, and microbatch m takes as long as the slowest replica's.

    Encoders of `dealing_replicas` replicas may encode each other's items. `exchange_s` is the time of a
    microbatch for what then travels between replicas, as far as the schedule does not contain it.
    """

    replicas: int
    microbatches: int
    encoders: Mapping[str, EncoderBins] = field(default_factory=dict)
    locked: bool = False
    dealing_replicas: int = 1
    exchange_s: float = 0.0


def encoder_bins_on_llm_ranks(
    context: PlanningContext, layers: Sequence[PricedLayer], sequences: float, microbatches: int, llm: Layout
) -> dict[str, EncoderBins]:
    """Returns the bins of encoders that run on the ranks of an LLM stage.

    Whole images are dealt to the context-parallel ranks, and to the TP ranks of an encoder that is
    replicated, not tensor-parallel as the LLM is.
    """
    bins = {}
    for encoder in context.job.model.encoders:
        layout = next(layer.layout for layer in layers if layer.module == encoder.name)
        groups = llm.cp * llm.tp // layout.tp
        priced = context.busiest_group_sequences(encoder, sequences, groups)
        pipelines = tuple(range(groups)) * microbatches
        bins[encoder.name] = EncoderBins(
            bins=groups, sharing="pieces", priced_sequences=priced, pipelines=pipelines
        )
    return bins
