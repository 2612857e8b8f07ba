"""Saves and resumes the training of a `FilledModel`: weights, optimizer state and step, under any layout.

checkpoints = FilledCheckpoints(model, optimizer, "run/checkpoints")
for step in range(checkpoints.load(), 1000):
    ...
    if (step + 1) % 100 == 0:
        checkpoints.save(step + 1)
checkpoints.wait()
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.checkpoint import CheckpointWriter, find_newest, load_state, take_folder
from optimus.engine.checkpoint_folder import CheckpointConfig
from optimus.engine.checkpoint_state import HEAD, TensorShards, describe_tensor
from optimus.errors import UserError
from optimus.hf.filled_model import FilledModel


class FilledCheckpoints:
    """The checkpoints of a model and the optimizer of its parameters; all ranks make one.

    Rates and other options of the optimizer are the caller's to set, and what else a run needs to go on is
    `extra`, which JSON must be able to hold.
    """

    def __init__(
        self,
        model: FilledModel,
        optimizer: torch.optim.Optimizer,
        folder: str | Path,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
    ) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, Path(folder).absolute()
        self.extra: Mapping[str, Any] = {}  # of the checkpoint that was loaded
        self._group = dist.new_group(backend="gloo")
        self._lock = take_folder(self.folder, self._group)
        config = CheckpointConfig(keep_last=keep_last, keep_every=keep_every)
        self._writer = CheckpointWriter(self.folder, config, self._group)

    def load(self) -> int:
        """Loads the newest checkpoint that is whole; returns its step, or 0 if there is none."""
        newest = find_newest(self.folder, self._group)
        if newest is None:
            return 0
        path, manifest = newest
        saved = manifest.facts.get("parameters")
        if saved != self._describe_parameters():
            raise UserError(
                field=str(path),
                problem="is of a model with other parameters, or with others that train",
                hint="freeze parameters and add adapters as in the run that saved it",
            )
        _allocate_state(self.optimizer)
        load_state(path, self._state(), self._group)
        self.extra = manifest.facts["extra"]
        return manifest.step

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Begins to save the state after `step` steps; the caller may train on."""
        _allocate_state(self.optimizer)
        facts = {"parameters": self._describe_parameters(), "extra": dict(extra or {})}
        self._writer.save(step, facts, self._state())

    def wait(self) -> bool:
        """Waits until nothing is written; tells if what was written is complete."""
        return self._writer.wait()

    def _named(self) -> dict[str, Tensor]:
        """Returns parameters and persistent buffers of this rank; both ends of a tied one have one name."""
        tied = dict(getattr(self.model.model, "all_tied_weights_keys", None) or {})
        tensors: dict[str, Tensor] = {}
        for part in self.model.parts:
            for name, tensor in part.hf.state_dict(keep_vars=True).items():
                name = tied.get(name, name)
                if tensors.setdefault(name, tensor) is not tensor:
                    tensors[f"{name}{HEAD}"] = tensor
        return tensors

    def _describe_parameters(self) -> dict[str, Any]:
        """Returns the names that all ranks together have, and whether each trains."""
        mine = {name: tensor.requires_grad for name, tensor in self._named().items()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        names = {name: trains for each in everyone for name, trains in each.items()}
        return {name: names[name] for name in sorted(names) if not name.endswith(HEAD)}

    def _state(self) -> dict[str, TensorShards]:
        state: dict[str, list[TensorShards]] = {}
        for name, tensor in self._named().items():
            plain = name.removesuffix(HEAD)
            state.setdefault(f"model.{plain}", []).append(describe_tensor(tensor))
            for kind, value in self.optimizer.state.get(tensor, {}).items():
                if not isinstance(value, Tensor):
                    raise UserError(
                        field=f"optimizer state {kind} of {plain}",
                        value=value,
                        problem="is no tensor, and cannot be saved",
                        hint="use an optimizer of torch.optim",
                    )
                state.setdefault(f"optimizer.{plain}.{kind}", []).append(describe_tensor(value))
        return {
            name: TensorShards(shape=of[0].shape, boxes=tuple(box for each in of for box in each.boxes))
            for name, of in state.items()
        }


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer allocate the state of parameters that it has not updated yet, and change nothing."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fresh = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
    if not fresh:
        return
    rates, grads = [group["lr"] for group in optimizer.param_groups], [p.grad for p in parameters]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = None
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    for parameter in fresh:
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                value.zero_()  # steps taken, too
