"""The one IR: a schedule is columns of ops in program order, with an `Op` view for readers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]


class Kind(IntEnum):
    """What an op does. Unknown kinds in a file are refused."""

    F = 0  # forward
    R = 1  # recomputed forward
    B = 2  # backward, whole
    I = 3  # noqa: E741  backward, gradient of the input only
    W = 4  # backward, gradient of the weights only
    LAUNCH = 5
    WAIT = 6
    SEND = 7
    RECV = 8
    GATHER = 9  # data-parallel all-gather of parameters
    REDUCE = 10  # data-parallel reduce-scatter of gradients
    FINISH = 11  # tied embeddings, clipping, optimizer


COLLECTIVE = (Kind.LAUNCH, Kind.WAIT)  # of one that divided layers have


class Lane(IntEnum):
    """What an op occupies on its device; one op at a time per lane."""

    COMPUTE = 0
    TP = 1  # links inside a node
    DP = 2  # the NIC: data-parallel traffic of all modules shares it
    P2P = 3
    HOST = 4


NUM_LANES = len(Lane)


class Communicator(IntEnum):
    """Whose traffic an op is; several share a lane (cp and ep use the node's links, or the NIC)."""

    NONE = -1
    TP = 0
    CP = 1
    EP = 2
    DP = 3
    PP = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One entry of a schedule, as a reader sees it."""

    id: int
    kind: Kind
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

    Each lane of a device plays its ops first-in, first-out in that order; an op
    starts when its lane is free and every op in its `deps` has finished.
    `duration_s` is unslowed: whoever replays the schedule applies slow-down.
    A RECV occupies no lane: its one dependency is its SEND, and it ends with it.
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
    device_names: tuple[str, ...] = ()  # where they are not simply the stages of a pipeline
    labels: tuple[str, ...] = ()
    label: Ints | None = None  # place in `labels`, -1: none

    def device_name(self, device: int) -> str:
        """As tables and pictures call a device."""
        if self.device_names:
            return self.device_names[device]
        return "every GPU" if self.num_devices == 1 else f"stage {device}"

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, index: int) -> Op:
        return Op(
            id=index,
            kind=Kind(self.kind[index]),
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

    def __iter__(self) -> Iterator[Op]:
        return (self[index] for index in range(len(self)))

    def deps_of(self, index: int) -> Ints:
        return self.deps[self.dep_offset[index] : self.dep_offset[index + 1]]
