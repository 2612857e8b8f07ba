"""Chooses what trains and what is recomputed: freezes parameters by name, checkpoints activations."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from optimus.errors import UserError, nearest


def freeze(model: Any, *patterns: str) -> None:
    """Freezes the parameters of a split model whose names match: `model.visual.*`."""
    for parameter in _matching(model, patterns):
        parameter.requires_grad_(False)


def train_only(model: Any, *patterns: str) -> None:
    """Freezes all parameters of a split model but those whose names match: `*.merger.*`."""
    matching = _matching(model, patterns)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in matching:
        parameter.requires_grad_(True)


def _matching(model: Any, patterns: Sequence[str]) -> list[nn.Parameter]:
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise UserError(field=pattern, problem="matches no parameter", hint=nearest(pattern, named))
    matching = {name for name in named if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for ends in model.all_tied_weights_keys.items():  # one parameter, though two ranks may hold an end each
        if matching & set(ends):
            matching |= set(ends)
    return [parameter for name, parameter in named.items() if name in matching]


def checkpoint_activations(parts: Sequence[nn.Module]) -> None:
    """Recomputes the activations of transformers' layers in backward; sets parts to train."""
    for part in parts:
        part.train()
        part.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
