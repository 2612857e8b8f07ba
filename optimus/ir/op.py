"""Defines the units of work: kinds of ops, lanes, kernel names, and schedules as columns of ops."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class OpKind(IntEnum):
    """Action of an op, of one of its phases, or of a line of a program.

    Members have the names of `torch.distributed.pipelining` where it has one.
    """

    FORWARD = 0
    RECOMPUTE = 1  # forward again, as a phase of a backward
    BACKWARD = 2  # gradients of the input and of the weights
    INPUT_GRAD = 3
    WEIGHT_GRAD = 4
    LAUNCH = 5  # of a tensor-, context- or expert-parallel collective
    WAIT = 6
    SEND_F = 7  # activations to the next virtual stage
    RECV_F = 8
    SEND_B = 9  # their gradient to the previous virtual stage
    RECV_B = 10
    SEND_SEAM = 11  # encoder outputs to LLM stage 0
    RECV_SEAM = 12
    SEND_SEAM_B = 13  # their gradient back
    RECV_SEAM_B = 14
    UNSHARD = 15  # data-parallel all-gather of parameters
    REDUCE_GRAD = 16  # data-parallel reduce-scatter of gradients
    OPTIMIZER = 17  # tied embeddings, clipping, update
    UNSHARD_B = 18  # all-gather of parameters that were resharded after the forward, for the backward

    @property
    def short(self) -> str:
        """Name inside an op such as `2F0`."""
        return _LETTERS.get(self, self.name)

    @property
    def word(self) -> str:
        """Name in plan files, profiles and traces."""
        return _LETTERS.get(self) or _FILE_WORDS.get(self) or self.name.lower().replace("_", "-")


_LETTERS = {
    OpKind.FORWARD: "F",
    OpKind.RECOMPUTE: "R",
    OpKind.BACKWARD: "B",
    OpKind.INPUT_GRAD: "I",
    OpKind.WEIGHT_GRAD: "W",
}
_FILE_WORDS = {
    OpKind.UNSHARD: "gather",
    OpKind.UNSHARD_B: "gather-b",
    OpKind.REDUCE_GRAD: "reduce",
    OpKind.OPTIMIZER: "finish",
}
KIND_OF_WORD = {kind.word: kind for kind in OpKind}

COMPUTE_OPS = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)  # these have phases
COMPUTE_PHASES = (OpKind.FORWARD, OpKind.RECOMPUTE, *COMPUTE_OPS[1:])
COLLECTIVE_PHASES = (OpKind.LAUNCH, OpKind.WAIT)
SENDS = (OpKind.SEND_F, OpKind.SEND_B, OpKind.SEND_SEAM, OpKind.SEND_SEAM_B)
RECVS = (OpKind.RECV_F, OpKind.RECV_B, OpKind.RECV_SEAM, OpKind.RECV_SEAM_B)
PARAMETER_TRAFFIC = (OpKind.UNSHARD, OpKind.UNSHARD_B, OpKind.REDUCE_GRAD)
SEAMS = (OpKind.SEND_SEAM, OpKind.RECV_SEAM, OpKind.SEND_SEAM_B, OpKind.RECV_SEAM_B)
KIND_OF_SHORT = {kind.short: kind for kind in OpKind}
_SHORT_FORM = re.compile(r"(?:([^:\s]+):)?(0|[1-9][0-9]*)([A-Z_]+)(0|[1-9][0-9]*)")
_IS_SEND = np.isin(range(len(OpKind)), SENDS)
_IS_RECV = np.isin(range(len(OpKind)), RECVS)


class Lane(IntEnum):
    """Resource of a device that runs one op at a time."""

    COMPUTE = 0
    TP = 1  # links inside a node
    DP = 2  # the NIC: data-parallel traffic of all modules shares it
    P2P = 3
    HOST = 4


NUM_LANES = len(Lane)


class Communicator(IntEnum):
    """Group that a collective spans; several share a lane (CP and EP use the node's links or the NIC)."""

    NONE = -1
    TP = 0
    CP = 1
    EP = 2
    DP = 3
    DEAL = 4  # replicas of the LLM that deal images to each other's encoder pipelines
    PP = 5


class ShortOpName(NamedTuple):
    """Short form of an op: `2F0` is chunk 2, forward, microbatch 0; `vision:0F3` is an encoder's."""

    kind: OpKind
    chunk: int
    microbatch: int
    module: str = ""  # of an encoder

    def __str__(self) -> str:
        prefix = f"{self.module}:" if self.module else ""
        return f"{prefix}{self.chunk}{self.kind.short}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> ShortOpName:
        """Reads what `str` writes; raises ValueError for any other text."""
        match = _SHORT_FORM.fullmatch(text)
        if match is None or match[3] not in KIND_OF_SHORT:
            raise ValueError(f"{text!r} is not the short form of an op, such as 2F0")
        return cls(KIND_OF_SHORT[match[3]], int(match[2]), int(match[4]), match[1] or "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledOp:
    """Row of a schedule."""

    id: int
    kind: OpKind
    module: str
    chunk: int
    segment: int
    microbatch: int
    device: int
    lane: Lane
    communicator: int
    bytes: int
    deps: tuple[int, ...]
    duration_s: float
    label: str = ""  # `layer 3 qkv`, where it is known


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Ops as columns. Row order within a device is that device's program order.

    Each lane of a device runs its ops first-in, first-out in that order; an op
    starts when its lane is free and every op in its `deps` has finished.
    `duration_s` is unslowed: replays apply the slow-down.
    A receive occupies no lane: its one dependency is its send, and it ends with it.
    """

    modules: tuple[str, ...]  # the last is "all": traffic and updates of several modules at once
    num_devices: int
    kind: Ints
    module: Ints
    chunk: Ints
    segment: Ints
    microbatch: Ints
    device: Ints
    lane: Ints
    communicator: Ints
    bytes: Ints
    duration_s: Floats
    dep_offset: Ints  # deps of op i are deps[dep_offset[i]:dep_offset[i + 1]]
    deps: Ints
    # Ops of one meeting (a collective seen by several devices) start together; None, or -1: none.
    meeting: Ints | None = None
    device_names: tuple[str, ...] = ()  # if devices are not the stages of a pipeline
    labels: tuple[str, ...] = ()
    label: Ints | None = None  # place in `labels`, -1: none

    def device_name(self, device: int) -> str:
        """Returns the name of a device in tables and pictures."""
        if self.device_names:
            return self.device_names[device]
        return "every GPU" if self.num_devices == 1 else f"stage {device}"

    @property
    def is_send(self) -> Bools:
        """Mask of the ops that send."""
        return _IS_SEND[self.kind]

    @property
    def is_recv(self) -> Bools:
        """Mask of the ops that receive."""
        return _IS_RECV[self.kind]

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, index: int) -> ScheduledOp:
        return ScheduledOp(
            id=index,
            kind=OpKind(self.kind[index]),
            module=self.modules[self.module[index]],
            chunk=int(self.chunk[index]),
            segment=int(self.segment[index]),
            microbatch=int(self.microbatch[index]),
            device=int(self.device[index]),
            lane=Lane(self.lane[index]),
            communicator=int(self.communicator[index]),
            bytes=int(self.bytes[index]),
            deps=tuple(int(d) for d in self.deps_of(index)),
            duration_s=float(self.duration_s[index]),
            label="" if self.label is None or self.label[index] < 0 else self.labels[self.label[index]],
        )

    def __iter__(self) -> Iterator[ScheduledOp]:
        return (self[index] for index in range(len(self)))

    def deps_of(self, index: int) -> Ints:
        return self.deps[self.dep_offset[index] : self.dep_offset[index + 1]]


# ---------------------------------------------------------------------------- kernels


class KernelName(StrEnum):
    """Kernels and collectives of a layer and of a module's ends."""

    NORM1 = "norm1"
    LATENT = "latent"  # compressed queries, keys and values
    QKV = "qkv"
    ATTENTION = "attention"
    OUT = "out"
    NORM2 = "norm2"
    UP = "up"
    DOWN = "down"
    ROUTER = "router"
    EXPERTS = "experts"
    SIDE = "side"  # matrices of a layer besides attention and MLP
    PATCHES = "patches"
    PROJECTOR = "projector"
    EMBEDDING = "embedding"
    HEAD = "head"
    HEAD_NORM = "head.norm"
    CHEAP = "cheap"  # norms and the non-linearity of a layer, recomputed together
    GATHER1 = "gather1"  # input of QKV, over the TP group
    SCATTER1 = "scatter1"  # output of attention
    GATHER2 = "gather2"  # input of the MLP
    SCATTER2 = "scatter2"  # output of the MLP
    CONTEXT = "context"  # keys and values, over the CP group
    DISPATCH = "dispatch"  # tokens to experts
    COMBINE = "combine"  # tokens back from experts
    SEAM = "seam"  # encoder outputs at LLM stage 0

    @property
    def dgrad(self) -> str:
        """Name of the input gradient's kernel."""
        return f"{self}.dgrad"

    @property
    def wgrad(self) -> str:
        """Name of the weight gradient's kernel."""
        return f"{self}.wgrad"

    @property
    def gather(self) -> str:
        """Name of an all-gather for this kernel."""
        return f"{self}.gather"

    @property
    def scatter(self) -> str:
        """Name of a reduce-scatter for this kernel."""
        return f"{self}.scatter"


REGATHER_NAMES = (KernelName.QKV.gather, KernelName.UP.gather)  # of inputs, for weight gradients

NamedPhase = tuple[str, OpKind | None]


def list_recomputed_kernels(phases: Iterable[NamedPhase]) -> tuple[str, ...]:
    """Returns the names of the phases that compute a forward again, each once."""
    return tuple(dict.fromkeys(name for name, kind in phases if kind == OpKind.RECOMPUTE))


def regathers_inputs(phases: Iterable[NamedPhase]) -> bool:
    """Returns whether a phase gathers the input of a column-parallel linear a second time."""
    return any(kind == OpKind.LAUNCH and name in REGATHER_NAMES for name, kind in phases)
