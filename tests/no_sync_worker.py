"""Plays one step of cases while nothing may read a device value on the host; prints one JSON line a case."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from engine_cases import CASES, SHARDED, TP, Case
from engine_worker import RankRun, everybody, play
from host_reads import no_host_reads
from torch import Tensor

from optimus.engine.rank_trainer import RankTrainer
from optimus.models.kernels import TORCH_LINEAR, KernelSet, LinearKernels
from optimus.models.layer_ops import MlpUp, PreNorm, QkvLinear
from optimus.models.segment import State

Plant = Callable[[], AbstractContextManager[Any]]


def _changed(owner: type, change: Callable[[State], None]) -> AbstractContextManager[Any]:
    """A segment that also does something with the state that it makes."""
    original = owner.forward_saving  # type: ignore[attr-defined]

    def forward_saving(self: Any, *args: Any) -> tuple[State, Any]:
        found: tuple[State, Any] = original(self, *args)
        change(found[0])
        return found

    return patch.object(owner, "forward_saving", forward_saving)


def _item() -> AbstractContextManager[Any]:
    return _changed(MlpUp, lambda state: print(end="") if state[0].sum().item() > 1e9 else None)  # noqa: T201


def _mask() -> AbstractContextManager[Any]:
    def change(state: State) -> None:
        rows = state[0].detach()
        rows[rows > 1e9] = rows.new_zeros(())

    return _changed(PreNorm, change)


def _list() -> AbstractContextManager[Any]:
    return _changed(QkvLinear, lambda state: state[0].detach().tolist())


def _backward() -> AbstractContextManager[Any]:
    """In a weight gradient, which runs behind the backward."""
    original = TORCH_LINEAR.add_weight_gradient

    def add(weight: Tensor, gradient: Tensor, rows: Tensor) -> None:
        if bool(gradient.isfinite().all()):
            original(weight, gradient, rows)

    kernels = KernelSet(linear=LinearKernels(add_weight_gradient=add))
    defaults = RankTrainer.__init__.__kwdefaults__ or {}
    return patch.object(RankTrainer.__init__, "__kwdefaults__", {**defaults, "kernels": kernels})


PLANTS: dict[str, Plant] = {"item": _item, "mask": _mask, "list": _list, "backward": _backward}


def work(case: Case, rank: int) -> dict[str, Any]:
    """Ops of one step on every rank, none of which read anything on the host."""
    run = RankRun(case, rank)
    if run.built.optimizer is not None:
        run.trains = True
        run.built.optimizer.adamw = None  # norm and clipping, but not what changes parameters
    batch = run.batch(0)
    with no_host_reads() as count:
        run.executor.step(batch)
        mine = count()
    return {"ops": everybody(mine)}


def main(what: str, names: list[str]) -> None:
    """The named cases as they are, or with `planted` every plant on the first of them."""
    cases = [case for case in (*CASES, *SHARDED, *TP) if case.name in names]
    runs: list[tuple[str, Case, Plant]] = [(case.name, case, nullcontext) for case in cases]
    if what == "planted":
        runs = [(name, cases[0], plant) for name, plant in PLANTS.items()]
    for name, case, around in runs:
        print(json.dumps({"name": name, **play(case, work, around)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
