"""Checks parameters that the first and the last stage of a pipeline share: an embedding and a head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from optimus.errors import UserError

SAMPLED_ELEMENTS = 4096  # of a parameter, compared to find ties that were not declared


def check_tied_ends(tied: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Raises unless both ends of a pipeline name as many tied parameters, of the same shapes, that train."""
    ends = [[tuple(parameter.shape) for parameter in tied], [parameter.requires_grad for parameter in tied]]
    by_end: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_end, ends, group)
    (first_shapes, first_trains), (last_shapes, last_trains) = by_end[0], by_end[-1]
    if first_shapes != last_shapes:
        raise UserError(
            field="tied",
            problem=f"has shapes {first_shapes} on the first stage, and {last_shapes} on the last",
            hint="name the same parameter on both, or on neither",
        )
    if first_trains != last_trains:
        raise UserError(
            field="tied",
            problem="trains on one of the first and the last stage, and is frozen on the other",
            hint="freeze both ends or neither",
        )


def reject_undeclared_ties(stages: Sequence[nn.Module], *, is_first: bool, is_last: bool) -> None:
    """Raises if an embedding of the first stage has the values of a parameter of the last.

    Their gradients would not be summed, and the two would drift apart without a word. Every rank calls it.
    """
    embeddings = dict(_sample_embeddings(stages[0])) if is_first else {}
    matrices = dict(_sample_matrices(stages[-1])) if is_last else {}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (embeddings, matrices))
    heads = {digest: name for _, of_rank in by_rank for name, digest in of_rank.items()}
    for of_rank, _ in by_rank:
        for name, digest in of_rank.items():
            if digest in heads:
                raise UserError(
                    field="tied",
                    problem=f"leaves out {name} of the first stage, which equals {heads[digest]} of the last",
                    hint="pass tied=[parameter] on both ranks, or tied=() if they are two parameters",
                )


def _sample_embeddings(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding):
            yield from _sample(f"{name}.weight", part.weight)


def _sample_matrices(module: nn.Module) -> Iterator[tuple[str, str]]:
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2 and id(parameter) not in embeddings:
            yield from _sample(name, parameter)


def _sample(name: str, parameter: Tensor) -> Iterator[tuple[str, str]]:
    """Yields a digest of shape, dtype and some elements; nothing if these are all equal."""
    local = parameter.detach()
    local = (local.to_local() if isinstance(local, DTensor) else local).flatten()
    sample = local[:: max(1, len(local) // SAMPLED_ELEMENTS)].cpu().contiguous()
    if len(sample) and not bool((sample == sample[0]).all()):
        content = sample.view(torch.uint8).numpy().tobytes()
        yield name, f"{tuple(parameter.shape)} {parameter.dtype} {sha256(content).hexdigest()}"
