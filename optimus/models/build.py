"""Builds any range of a module's layers, with values that depend on the seed and a parameter's name alone.

Layers are counted as the planner counts them: an embedding, the transformer's layers, a head or projector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optimus.errors import UserError
from optimus.job.model import Encoder, Llm
from optimus.models.dropout import hashed
from optimus.models.encoder import Patches, Project
from optimus.models.layers import Attend, Down, Out, Qkv, Up
from optimus.models.llm import Embedding, Head
from optimus.models.numerics import KERNELS, NUMERICS, Kernels, Numerics
from optimus.models.segment import Segment

Module = Encoder | Llm
SPREAD = 0.02  # standard deviation of weights and biases
_LAYER = ("qkv", "attention", "out", "up", "down")


def layer_count(module: Module) -> int:
    """With both ends."""
    return module.stack.layers + 2


def build_layers(
    module: Module,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    first: int = 0,
    end: int | None = None,
    numerics: Numerics = NUMERICS,
    compute: Kernels = KERNELS,
) -> list[list[Segment]]:
    """Layers `first` up to `end` (not included) of a module, each a list of segments."""
    refuse_unsupported(module)
    end = layer_count(module) if end is None else end
    assert 0 <= first <= end <= layer_count(module), f"layers {first}:{end} of {layer_count(module)}"
    where = {"dtype": dtype, "device": device}
    layers = [_layer(module, layer, numerics, compute, where) for layer in range(first, end)]
    _tie(module, first, end, layers)
    with torch.no_grad():
        for name, parameter in named_parameters(module, layers, first=first):
            initialise(parameter, name, seed)
    _freeze(module, layers, first)
    return layers


def _layer(
    module: Module, layer: int, numerics: Numerics, compute: Kernels, where: dict[str, Any]
) -> list[Segment]:
    last = layer_count(module) - 1
    if layer in (0, last) and isinstance(module, Llm):
        return [Head(module, numerics, compute, **where) if layer else Embedding(module, numerics, **where)]
    if layer in (0, last) and isinstance(module, Encoder):
        return [(Project if layer else Patches)(module, numerics, compute, **where)]
    stack, place = module.stack, f"{module.name}.layers.{layer - 1}"
    return [
        Qkv(stack, numerics, compute, **where),
        Attend(stack, layer - 1, compute),
        Out(stack, numerics, compute, f"{place}.out", **where),
        Up(stack, numerics, compute, **where),
        Down(stack, numerics, compute, f"{place}.down", **where),
    ]


def _tie(module: Module, first: int, end: int, layers: Sequence[Sequence[Segment]]) -> None:
    """Where a range holds both ends of a tied LLM, they share one parameter."""
    if isinstance(module, Llm) and module.tied and first == 0 and end == layer_count(module):
        layers[-1][0].weight = layers[0][0].weight


def _freeze(module: Module, layers: Sequence[Sequence[Segment]], first: int) -> None:
    for layer in layers:
        for segment in layer:
            segment.requires_grad_(module.train)
            if isinstance(segment, Project):
                segment.linears.requires_grad_(segment.projector.train)


# ---------------------------------------------------------------------------------------- names and values


def segment_name(module: Module, layer: int, segment: int = 0) -> str:
    """`llm.embedding`, `vision.layers.3.qkv`: the same wherever the segment runs."""
    is_llm = isinstance(module, Llm)
    if layer == 0:
        return f"{module.name}.{'embedding' if is_llm else 'patches'}"
    if layer == layer_count(module) - 1:
        return f"{module.name}.{'head' if is_llm else 'projector'}"
    return f"{module.name}.layers.{layer - 1}.{_LAYER[segment]}"


def global_name(module: Module, layer: int, segment: int, parameter: str) -> str:
    """A parameter's name in checkpoints; a tied head's matrix is the embedding's."""
    name = f"{segment_name(module, layer, segment)}.{parameter}"
    tied = isinstance(module, Llm) and module.tied
    return f"{module.name}.embedding.weight" if tied and name == f"{module.name}.head.weight" else name


def named_parameters(
    module: Module, layers: Sequence[Sequence[Segment]], *, first: int = 0
) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters of a range of layers, shared ones once."""
    seen: set[int] = set()
    for layer, segments in enumerate(layers, first):
        for number, segment in enumerate(segments):
            for name, parameter in segment.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield global_name(module, layer, number, name), parameter


def initialise(parameter: Tensor, name: str, seed: int) -> None:
    """Ones for norms, else normal numbers drawn on the host in float32, so that every type has the same."""
    if parameter.is_meta:
        return
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
        return
    generator = torch.Generator().manual_seed(hashed("parameter", seed, name) & (2**63 - 1))
    values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, SPREAD, generator=generator)
    parameter.copy_(values)


def refuse_unsupported(module: Module) -> None:
    """Names the first field that the engine cannot run."""
    stack, attention = module.stack, module.stack.attention
    problems: list[tuple[str, object, bool]] = [
        ("stack.experts", "given", stack.experts is not None),
        ("stack.attention.latent", "given", attention.latent is not None),
        ("feeds", getattr(module, "feeds", (0,)), isinstance(module, Encoder) and module.feeds != (0,)),
        (
            "stack.attention.window_tokens",
            attention.window_tokens,
            isinstance(module, Llm) and attention.window_tokens is not None,
        ),
    ]
    for field, value, found in problems:
        if found:
            raise UserError(
                field=f"model.{module.name}.{field}",
                value=value,
                problem="can be planned, but the engine does not run it yet",
                hint="leave it out, or only plan",
            )
