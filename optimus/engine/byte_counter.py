"""Counts the bytes of tensors that are alive while a program plays, by component and line by line.

Tensors are seen as torch makes them, and belong to whoever played when they were made. What is there before
the first line (parameters, gradients, optimizer) is counted apart: see `states_of`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optimus.engine.executor import Executor, Recorder
from optimus.engine.optimizer import Optimizer
from optimus.program.op import Ints
from optimus.program.plan import Plan, Verb
from optimus.program.proof.alive import ACTIVATIONS
from optimus.program.ranks import LLM

LLM_ACTIVATIONS, ENCODER_ACTIVATIONS, SEAM = range(len(ACTIVATIONS))


class ByteCounter(TorchDispatchMode):
    """Entered around one step of an executor, whose recorder is told of lines as before.

    `known` are tensors that are counted apart; the batch is not counted. `kept` is what lives at the end of
    every line, by component; `most` what lived at most while it ran.
    """

    def __init__(self, executor: Executor, known: Iterable[Tensor]) -> None:
        super().__init__()
        plan, self._executor = executor.plan, executor
        program = plan.programs[plan.ranks.class_of(executor.groups.rank)]
        self._component = _components(plan, program.rows)
        self._known = {_key(tensor) for tensor in known}
        self._alive: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # component and bytes, by storage
        self._bytes: Ints = np.zeros(len(ACTIVATIONS), np.int64)
        self._now, self._most, self._next = LLM_ACTIVATIONS, 0, 0
        self.kept: Ints = np.zeros((len(program), len(ACTIVATIONS)), np.int64)
        self.most: Ints = np.zeros(len(program), np.int64)
        self._recorder: Recorder

    def __enter__(self) -> ByteCounter:
        self._recorder = self._executor.recorded(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._executor.recorded(self._recorder)

    # ------------------------------------------------------------------------ as a recorder

    def begin(self, line: int) -> None:
        self._recorder.begin(line)
        self._now, self._most = int(self._component[line]), int(self._bytes.sum())
        passed = slice(self._next, line)  # lines that do nothing here
        self.kept[passed], self.most[passed], self._next = self._bytes, self._most, line + 1

    def end(self, line: int) -> None:
        self._look_again()
        self.kept[line], self.most[line] = self._bytes, self._most
        self._recorder.end(line)

    # ------------------------------------------------------------------------ as a mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._meet(leaf)
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self._most = max(self._most, int(self._bytes.sum()))
        return found

    def _see(self, tensor: Tensor) -> None:
        key, storage = _key(tensor), tensor.untyped_storage()
        if key in self._alive or key in self._known:
            return
        gone = weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = gone, self._now, storage.nbytes()
        self._bytes[self._now] += storage.nbytes()

    def _meet(self, tensor: Tensor) -> None:
        """What an op reads: from before the step, as its batch is, or made in it and perhaps refilled."""
        key = _key(tensor)
        if key not in self._alive:
            self._known.add(key)
        else:
            self._update(key)

    def _update(self, key: int) -> None:
        gone, component, size = self._alive[key]
        storage = gone()
        if storage is not None and storage.nbytes() != size:
            self._alive[key] = gone, component, storage.nbytes()
            self._bytes[component] += storage.nbytes() - size

    def _forget(self, key: int) -> None:
        _, component, size = self._alive.pop(key)
        self._bytes[component] -= size

    def _look_again(self) -> None:
        """Storages may have been emptied or filled, which nobody is told."""
        for key in list(self._alive):
            self._update(key)
        self._most = max(self._most, int(self._bytes.sum()))


def states_of(parameters: Sequence[Tensor], optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """What is there all the time, as the plan names it; the optimizer's from its first step on."""
    buckets, adamw = optimizer.buckets, optimizer.adamw
    kept = {} if adamw is None else adamw.state
    moments = [each for state in kept.values() for each in state.values() if torch.is_tensor(each)]
    return {
        "parameters": list(parameters),
        "gradients": [bucket.gradients for bucket in buckets],
        "optimizer": [*(bucket.master for bucket in buckets), *moments],
    }


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each counted once; single numbers do not count."""
    return sum({_key(each): each.untyped_storage().nbytes() for each in tensors if each.dim()}.values())


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _components(plan: Plan, rows: Ints) -> Ints:
    """Whose tensors every line makes."""
    module, verb = rows[:, 0], rows[:, 1]
    encoder = np.array([name != LLM for name in plan.modules] + [False])[module]
    found: Ints = np.where(encoder, ENCODER_ACTIVATIONS, LLM_ACTIVATIONS)
    found[verb == Verb.RECV_SEAM] = SEAM
    return found
