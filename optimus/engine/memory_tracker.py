"""Counts the bytes of live tensors while a program runs, by component and line by line.

A dispatch mode sees each tensor when torch creates it; it belongs to the component of the line that runs.
Tensors that exist before the first line (parameters, gradients, optimizer) are counted separately: see
`_list_state_tensors`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.engine.config import MemoryUse
from optimus.engine.distributed_optimizer import DistributedOptimizer
from optimus.engine.executor import Executor
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.torch_private import on_storage_resize
from optimus.ir.op import Ints, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.protocols import Batch, Recorder
from optimus.verify.memory_replay import ALIVE, replay_live_bytes

LLM_ACTIVATIONS, ENCODER_ACTIVATIONS, SEAM, GATHERED, LOGITS = range(len(ALIVE))
COUNTED = ALIVE[:LOGITS]  # logits are counted among the LLM's activations
STATES = ("parameters", "gradients", "optimizer")
_DEVICE = torch.ops.prim.device.default  # op that fake tensors call


def measure_step_memory(rank: RankTrainer, batch: Batch) -> tuple[Tensor | None, MemoryUse]:
    """Runs one step, slower than others; returns its loss and the bytes it took."""
    executor, parameters = rank.executor, rank.parameters
    assert rank.optimizer is not None
    states = _list_state_tensors(parameters, rank.optimizer)
    states["parameters"] += [bucket.master for bucket in executor.buckets.frozen]
    known = chain.from_iterable(states.values())
    with executor.side_stream.inline(), MemoryTracker(executor, known, _moved_buffers(rank)) as tracker:
        loss = executor.step(batch)
    held = {name: _storage_bytes(tensors) for name, tensors in states.items()}
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    return loss, _compare(executor.plan, executor.groups.rank, tracker, held, dtype)


def _compare(
    plan: Plan, rank: int, tracker: MemoryTracker, states: Mapping[str, int], dtype: str
) -> MemoryUse:
    device = plan.ranks.class_of(rank)
    alive, fixed = replay_live_bytes(plan, device), plan.memory[device].fixed
    alive[:, LLM_ACTIVATIONS] += alive[:, LOGITS]
    alive = alive[:, :LOGITS]
    working = fixed["working"]  # counted with the component that allocates it
    planned = {name: fixed[name] for name in STATES}
    peak_bytes = tracker.peak_bytes
    live_bytes = tracker.live_bytes.sum(axis=1)
    before = np.concatenate([[0], live_bytes[:-1]])
    over = peak_bytes - alive.sum(axis=1) - working
    peaks = dict(zip(COUNTED, tracker.live_bytes.max(axis=0).tolist(), strict=True))
    return MemoryUse(
        rank=rank,
        planned={
            **planned,
            **dict(zip(COUNTED, alive.max(axis=0).tolist(), strict=True)),
            "working": working,
        },
        counted={**states, **peaks, "working": int((peak_bytes - np.maximum(before, live_bytes)).max())},
        planned_peak=sum(planned.values()) + int(alive.sum(axis=1).max()) + working,
        counted_peak=sum(states.values()) + int(peak_bytes.max()),
        dtype=dtype,
        lines_over=int((over > 0).sum()),
        most_over=max(0, int(over.max())),
        peak_line=int(peak_bytes.argmax()),
    )


class MemoryTracker(TorchDispatchMode):
    """Dispatch mode and recorder around one step of an executor; lines still reach the executor's recorder.

    `known` are tensors that are counted separately; the batch is not counted. `moved` are buffers that have
    memory for a part of the step. `live_bytes` holds the bytes alive at the end of every line, by component;
    `peak_bytes` the most while it ran.
    """

    def __init__(self, executor: Executor, known: Iterable[Tensor], moved: Iterable[Tensor] = ()) -> None:
        super().__init__()
        plan, self._executor = executor.plan, executor
        program = plan.programs[plan.ranks.class_of(executor.groups.rank)]
        self._component = _components(plan, program.rows)
        # By storage: those that are not counted; and those that are, with component and bytes.
        self._known: dict[int, weakref.ref[Any]] = {}
        self._alive: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        for buffer in moved:
            storage = buffer.untyped_storage()
            assert not storage.nbytes(), "a buffer is not freed"
            self._alive[storage._cdata] = weakref.ref(storage), GATHERED, 0
        for tensor in known:
            self._exclude_input(tensor)
        self._bytes, self._total = [0] * len(COUNTED), 0
        self._now, self._most, self._next = LLM_ACTIVATIONS, 0, 0
        self.live_bytes: Ints = np.zeros((len(program), len(COUNTED)), np.int64)
        self.peak_bytes: Ints = np.zeros(len(program), np.int64)
        self._recorder: Recorder

    def __enter__(self) -> MemoryTracker:
        self._recorder = self._executor.replace_recorder(self)
        self._resize_hook = on_storage_resize(self._resized)
        self._resize_hook.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resize_hook.__exit__(None, None, None)
        self._executor.replace_recorder(self._recorder)

    # ------------------------------------------------------------------------ as a recorder

    def begin(self, line: int) -> None:
        self._recorder.begin(line)
        self._now, self._most = int(self._component[line]), self._total
        passed = slice(self._next, line)  # lines that do nothing here
        self.live_bytes[passed], self.peak_bytes[passed], self._next = self._bytes, self._most, line + 1

    def end(self, line: int) -> None:
        self.live_bytes[line], self.peak_bytes[line] = self._bytes, self._most
        self._recorder.end(line)

    # ------------------------------------------------------------------------ as a mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:
            return func(*args)  # called more often than any tensor is created
        for tensor in _tensors_in(args, kwargs):
            self._exclude_input(tensor)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in((result,)):
            self._count_output(tensor)
        return result

    def _exclude_input(self, tensor: Tensor) -> None:
        """Excludes a tensor that an op reads and no op of the step created, such as the batch."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive and key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key))

    def _count_output(self, tensor: Tensor) -> None:
        """Counts a result of an op, unless it is a view of one of its inputs."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            if not self._alive[key][2]:
                storage.resize_(0)  # a view of a freed storage, which fake tensors would fill again
            self._resized(storage)
        elif key not in self._known:
            gone = weakref.ref(storage, lambda _: self._forget(key))
            self._alive[key] = gone, self._now, size
            self._add(self._now, size)

    def _resized(self, storage: Any) -> None:
        """Follows a storage that was freed or filled again, which no op shows."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive and self._alive[key][2] != size:
            gone, component, before = self._alive[key]
            self._alive[key] = gone, component, size
            self._add(component, size - before)

    def _forget(self, key: int) -> None:
        _, component, size = self._alive.pop(key)
        self._add(component, -size)

    def _add(self, component: int, size: int) -> None:
        self._bytes[component] += size
        self._total += size
        self._most = max(self._most, self._total)


def _tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[Tensor]:
    """Returns the tensors among the arguments or results of an op, also those in lists."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += _tensors_in(value)
    return tensors


def _list_state_tensors(
    parameters: Sequence[Tensor], optimizer: DistributedOptimizer
) -> dict[str, list[Tensor]]:
    """Returns the tensors that live all the time by component; the optimizer's exist after its first step."""
    buckets, adamw = optimizer.buckets, optimizer.adamw
    states = [] if adamw is None else adamw.state.values()
    moments = [value for state in states for value in state.values() if torch.is_tensor(value)]
    return {
        "parameters": list(parameters),
        "gradients": [part for bucket in buckets for part in (bucket.grad_buffer, bucket.reduced_grad)],
        "optimizer": [*(bucket.master for bucket in buckets), *moments],
    }


def _moved_buffers(rank: RankTrainer) -> Iterator[Tensor]:
    """Yields buffers of parameters and gradients that have memory only for a part of the step."""
    assert rank.optimizer is not None
    for bucket in (*rank.optimizer.buckets, *rank.executor.buckets.frozen):
        if bucket.reshards:
            yield bucket.param_buffer
    for bucket in rank.optimizer.buckets:
        if bucket.reduces_microbatches:
            yield bucket.grad_buffer


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Sums the storages of tensors, each counted once; scalars do not count."""
    return sum(
        {_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.dim()}.values()
    )


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _components(plan: Plan, rows: Ints) -> Ints:
    """Returns the component of every line, to which the tensors it creates belong."""
    module, kind = rows[:, 0], rows[:, 1]
    encoder = np.array([name != LLM for name in plan.modules] + [False])[module]
    component: Ints = np.where(encoder, ENCODER_ACTIVATIONS, LLM_ACTIVATIONS)
    component[kind == OpKind.RECV_SEAM] = SEAM
    return component
