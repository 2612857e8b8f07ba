"""Computes bytes on a rank by component, over the ops of its program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optimus.cost.priced_layer import PricedLayer
from optimus.job.model import Precision

# Buffers of one NCCL communicator (aiconfigurator-core 0.12.0, h100_sxm.yaml `nccl_mem`:
# 342 MiB for 2 GPUs, 392 MiB for 4 and 8; labelled unofficial there).
COMMUNICATOR_BYTES = {1: 0, 2: 342 * 2**20}
COMMUNICATOR_BYTES_MANY = 392 * 2**20

MESSAGES_IN_FLIGHT = 4  # of a module at a time: one sent and one received, in both directions

NOT_MODELLED = (
    "allocator fragmentation beyond the reserve",
    "power limits other than the usual ones, and clocks that differ between GPUs",
    "host stalls and data loading",
    "contention with other jobs on the fabric",
    "variation between microbatches, except in the recommendation (each costs the mean of the workload)",
    "uneven experts",
    "stragglers, restarts and checkpoints",
)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at its peak, by component."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    llm_activations: float = 0.0
    encoder_activations: float = 0.0
    logits: float = 0.0
    seam: float = 0.0
    communicators: float = 0.0
    reserve: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.states
            + self.llm_activations
            + self.encoder_activations
            + self.logits
            + self.seam
            + self.communicators
            + self.reserve
        )

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_state_memory(layers: Iterable[PricedLayer], precision: Precision) -> RankMemory:
    """Returns the model states on a rank: bf16 parameters, gradients, and the sharded optimizer.

    Parameters and gradients are the paper's k (DP_enc P_enc + DP_llm P_llm) / n with k = 6;
    the optimizer's 12 bytes are divided over the ranks that hold the same parameters.
    """
    parameters = gradients = optimizer = 0.0
    for layer in layers:
        held = layer.parameters + layer.expert_parameters
        parameters += held * precision.parameter_bytes
        if layer.trained:
            gradients += held * precision.gradient_bytes
            optimizer += layer.shard_parameters * precision.optimizer_bytes
    return RankMemory(parameters=parameters, gradients=gradients, optimizer=optimizer)


def sharded_state_memory(
    layers: Iterable[PricedLayer], precision: Precision, *, keeps_gathered: bool
) -> RankMemory:
    """Returns the model states on a rank of ZeRO-3, or of ZeRO-2 if parameters are kept gathered.

    Trained parameters are cast from the masters when they are gathered: they have no other shard.
    """
    parameters = gradients = optimizer = 0.0
    for layer in layers:
        whole, shard = layer.parameters + layer.expert_parameters, layer.shard_parameters
        held = whole if keeps_gathered else 0.0 if layer.trained else shard
        parameters += held * precision.parameter_bytes
        if layer.trained:
            gradients += shard * precision.gradient_bytes
            optimizer += shard * precision.optimizer_bytes
    return RankMemory(parameters=parameters, gradients=gradients, optimizer=optimizer)


def transient_bytes(layers: Iterable[PricedLayer]) -> float:
    """Returns the bytes that one layer needs while it runs, and of messages in flight between stages."""
    held = list(layers)
    messages = max((MESSAGES_IN_FLIGHT * x.output_bytes * (x.layout.pp > 1) for x in held), default=0.0)
    return max((x.transient_bytes for x in held), default=0.0) + messages


def communicator_bytes(*group_sizes: int) -> float:
    """Returns the NCCL buffers of one communicator per group of more than one rank."""
    return float(sum(COMMUNICATOR_BYTES.get(size, COMMUNICATOR_BYTES_MANY) for size in group_sizes))
