"""Defines named sets of assumptions of the cost model, each parameter with a sourced default."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from optimus.errors import UserError, nearest
from optimus.job.model import Recompute
from optimus.job.typed import Amount, read_typed
from optimus.job.yaml_parser import load_yaml

GB = 1e9
STACK_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions of the cost model; printed with every result.

    `dp_exposure` says which data-parallel traffic nothing can hide:
      chunks  what the data flow exposes: a gather before a chunk's first forward, a reduce
              after its last backward (the first chunk's, as in the paper's Table 1)
      all     every byte, before and after all compute
      lump    `dp_exposed_share` of the bytes before and after compute, the rest chunk by
              chunk under it, all on the NIC
      slack   the time of that share off the NIC (sync, norm, cast), all bytes in even chunks
    """

    name: str
    # A resident collective takes SMs from compute: 5-15 % in NCCL's default channel counts
    # (design note: profiled factor, default 10 %).
    residence_slowdown: float = 0.10
    # Host cost of one launch: 5 us is what eager PyTorch spends per operator on a server CPU.
    launch_s: float = 5e-6
    # Share of exposed TP communication that the framework already hides (0 for plain
    # Megatron-LM; up to 0.7 with userbuffer overlap in TransformerEngine).
    tp_overlapped_share: float = 0.0
    ep_overlapped_share: float = 0.0  # of the exchange of experts, under other microbatches
    # alltoall: a token is sent to each of its experts; flex (DeepEP, HybridEP): once to a rank and node.
    token_dispatcher: Literal["alltoall", "flex"] = "alltoall"
    # Megatron-LM's linears hide two gathers under dgrad and two scatters under wgrad per
    # layer; the paper counts four exposed collectives per direction.
    tp_backward: Literal["overlapped", "exposed"] = "overlapped"
    recompute: Recompute | None = None  # overrides `auto` of every module
    dp_exposure: Literal["chunks", "all", "lump", "slack"] = "chunks"
    dp_exposed_share: float = 0.35
    # Achieved NIC bandwidth per GPU for gather and reduce; None: the cluster's own.
    nic_gather_bytes_per_s: float | None = None
    nic_reduce_bytes_per_s: float | None = None
    p2p_latency_only: bool = False
    optimizer_time: bool = True
    fused_attention: bool = True  # FlashAttention: scores are never stored
    attention_kernel: Literal["best", "flash2"] = "best"  # FlashAttention-3 and cuDNN, or torch's own
    # Bytes over those of fused kernels: of norms with residuals and rotary embeddings, and of gated MLPs.
    rmsnorm_bytes_factor: float = 1.0
    layernorm_bytes_factor: float = 1.0
    gated_bytes_factor: float = 1.0
    gather_copies: bool = True  # fully sharded parameters are copied out of the buffer of each gather (FSDP2)
    efficiency: float = 1.0  # multiplies every achieved compute rate, and the memory bandwidth
    traffic_scale: float = 1.0  # multiplies the seconds of collectives and sends
    # Multiplies all seconds of kernels, links and launches (calibration); one number keeps their ratios.
    time_scale: float = 1.0

    def describe(self) -> dict[str, object]:
        """Returns the fields for plan files and tools, without scales that no calibration has changed."""
        scales = ("time_scale", "traffic_scale")
        return {name: value for name, value in asdict(self).items() if name not in scales or value != 1.0}

    def scaled(self, factor: float) -> Assumptions:
        """Returns a copy whose seconds are multiplied by `factor`."""
        return replace(self, time_scale=self.time_scale * factor, launch_s=self.launch_s * factor)


_DEFAULT = Assumptions(name="default")
# The paper's jobs: full recomputation and four exposed collectives per layer and direction.
_PAPER = replace(
    _DEFAULT,
    name="paper",
    residence_slowdown=0.0,
    launch_s=0.0,
    tp_backward="exposed",
    recompute="full",
    dp_exposure="all",
    optimizer_time=False,
)
# Idealised: 33 and 24 GB/s make all of GPT-175B's bytes take Table 1's 0.167 s and 0.458 s.
_CLEAN = replace(
    _DEFAULT,
    name="clean",
    residence_slowdown=0.0,
    launch_s=0.0,
    recompute="none",
    dp_exposure="lump",
    nic_gather_bytes_per_s=33 * GB,
    nic_reduce_bytes_per_s=24 * GB,
    p2p_latency_only=True,
    optimizer_time=False,
)
# torch without compilation: counted in layers of transformers (Llama, SigLIP) and in our own.
_EAGER = replace(
    _DEFAULT,
    name="eager",
    attention_kernel="flash2",
    rmsnorm_bytes_factor=9.2,
    layernorm_bytes_factor=1.66,
    gated_bytes_factor=1.56,
)
PRESETS = {
    preset.name: preset
    for preset in (
        _DEFAULT,  # Megatron with TransformerEngine: tuned attention, fused kernels
        replace(_DEFAULT, name="compiled", attention_kernel="flash2"),  # torch.compile, as torchtitan runs it
        _EAGER,
        replace(
            _EAGER,
            name="ours",
            rmsnorm_bytes_factor=8.56,
            layernorm_bytes_factor=1.41,
            gated_bytes_factor=2.11,
        ),
        _PAPER,
        replace(_PAPER, name="paper-first-chunk", dp_exposure="chunks"),
        _CLEAN,
        replace(_CLEAN, name="clean-slack", dp_exposure="slack"),
    )
}


# Trainers whose defaults a preset has. Neither overlaps TP traffic by default: Megatron's --tp-comm-overlap
# and torchtitan's enable_async_tensor_parallel are off.
STACKS = {"megatron": "default", "torchtitan": "compiled"}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A preset and the factors that a user's own steps add to it, as `optimus calibrate` writes them."""

    format: Literal["optimus.stack/1"]
    name: str
    base: str
    efficiency: Amount
    traffic_scale: Amount
    source: str = ""


def get_preset(name: str) -> Assumptions:
    """Returns the set of assumptions called `name`, or that of a file of `optimus calibrate`."""
    if name.endswith(STACK_ENDINGS):
        stack = read_typed(Stack, root := load_yaml(Path(name)))
        if stack.base.endswith(STACK_ENDINGS):
            raise root["base"].error("is a file", "name a preset: factors are those of all of a stack")
        return replace(
            get_preset(stack.base),
            name=stack.name,
            efficiency=stack.efficiency,
            traffic_scale=stack.traffic_scale,
        )
    name = STACKS.get(name, name)
    if name not in PRESETS:
        known = [*PRESETS, *STACKS]
        raise UserError(field="--preset", value=name, problem="is not a preset", hint=nearest(name, known))
    return PRESETS[name]
