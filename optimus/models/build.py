"""Builds any range of a module's layers, with values that depend on the seed and a parameter's name alone.

Layers are counted as the planner counts them: an embedding, the transformer's layers, a head or projector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optimus.errors import UserError, one_of
from optimus.job.model import Encoder, Llm
from optimus.models.dropout import hashed
from optimus.models.encoder_ends import Patches, Project
from optimus.models.kernels import KERNELS, NUMERICS, Kernels, Numerics
from optimus.models.layer_ops import JOIN
from optimus.models.llm_ends import Embedding, Head
from optimus.models.param_split import ParamSplit
from optimus.models.segment import Segment, SequentialSegment
from optimus.models.tensor_parallel import NO_TP, TpCollective, TpGroup
from optimus.models.transformer_layer import Attend, Down, Out, Qkv, Up

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
    tp_group: TpGroup = NO_TP,
    fed: bool = True,
) -> list[list[Segment]]:
    """Layers `first` up to `end` (not included) of a module, each a list of segments.

    `tp_group` says which shard of every layer this rank holds, `fed` whether encoder rows need gradients.
    """
    refuse_unsupported(module, tp_group.size)
    end = layer_count(module) if end is None else end
    assert 0 <= first <= end <= layer_count(module), f"layers {first}:{end} of {layer_count(module)}"
    where = {"dtype": dtype, "device": device}
    layers = [_layer(module, layer, numerics, compute, tp_group, fed, where) for layer in range(first, end)]
    _tie(module, first, end, layers)
    with torch.no_grad():
        for name, parameter, split in parameters_with_splits(module, layers, first=first):
            initialise(parameter, name, seed, split, tp_group)
    _freeze(module, layers)
    return layers


def _layer(
    module: Module,
    layer: int,
    numerics: Numerics,
    compute: Kernels,
    tp_group: TpGroup,
    fed: bool,
    where: dict[str, Any],
) -> list[Segment]:
    last = layer_count(module) - 1
    if layer == 0 and isinstance(module, Llm):
        return [Embedding(module, numerics, tp_group, fed=fed, **where)]
    if layer == last and isinstance(module, Llm):
        return [Head(module, numerics, compute, tp_group, **where)]
    if layer in (0, last) and isinstance(module, Encoder):
        return [(Project if layer else Patches)(module, numerics, compute, **where)]
    stack, place = module.stack, f"{module.name}.layers.{layer - 1}"
    return [
        Qkv(stack, numerics, compute, tp_group, **where),
        Attend(stack, layer - 1, compute),
        Out(stack, numerics, compute, f"{place}.out", tp_group, **where),
        Up(stack, numerics, compute, tp_group, **where),
        Down(stack, numerics, compute, f"{place}.down", tp_group, **where),
    ]


def tensor_parallel_layer(layer: Sequence[Segment]) -> list[Segment]:
    """A layer of which several ranks hold a share, as they play it: parts with exchanges between them."""
    found: list[Segment] = []
    for part in (part for segment in layer for part in segment.tp_segments()):
        if found and found[-1].kernels == JOIN and not isinstance(part, TpCollective):
            found[-1] = SequentialSegment(
                (found[-1], part), part.kernels
            )  # nothing is ever scheduled between them
        else:
            found.append(part)
    return found


def _tie(module: Module, first: int, end: int, layers: Sequence[Sequence[Segment]]) -> None:
    """Where a range holds both ends of a tied LLM, they share one parameter."""
    if isinstance(module, Llm) and module.tied and first == 0 and end == layer_count(module):
        layers[-1][0].weight = layers[0][0].weight


def _freeze(module: Module, layers: Sequence[Sequence[Segment]]) -> None:
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
    return ((name, parameter) for name, parameter, _ in parameters_with_splits(module, layers, first=first))


def parameters_with_splits(
    module: Module, layers: Sequence[Sequence[Segment]], *, first: int = 0
) -> Iterator[tuple[str, nn.Parameter, ParamSplit | None]]:
    """The same, with how tensor parallelism divides each; None if it is whole on every rank."""
    seen: set[int] = set()
    for layer, segments in enumerate(layers, first):
        for number, segment in enumerate(segments):
            for name, parameter in segment.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield global_name(module, layer, number, name), parameter, segment.splits.get(name)


def initialise(
    parameter: Tensor, name: str, seed: int, split: ParamSplit | None = None, tp_group: TpGroup = NO_TP
) -> None:
    """Ones for norms, else normal numbers drawn on the host in float32, so that every type has the same.

    Of a parameter that is divided, all numbers are drawn, and this rank takes its part of them.
    """
    if parameter.is_meta:
        return
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
        return
    shape = list(parameter.shape)
    if split is not None:
        shape[split.dim] = split.length(1)
    generator = torch.Generator().manual_seed(hashed("parameter", seed, name) & (2**63 - 1))
    values = torch.empty(shape, dtype=torch.float32).normal_(0.0, SPREAD, generator=generator)
    parameter.copy_(values if split is None else split.part(values, tp_group.rank, tp_group.size))


def refuse_unsupported(module: Module, tp: int = 1) -> None:
    """Names the first field that the engine cannot run."""
    refuse_heads(module, tp)
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


def refuse_heads(module: Module, tp: int) -> None:
    """Whether every rank gets heads with the keys and values that they attend to."""
    attention = module.stack.attention
    heads, groups = attention.heads, attention.kv_heads
    if heads == groups or (heads % tp == 0 and groups % tp == 0):
        return
    raise UserError(
        field=f"layout.{module.name}.tp",
        value=tp,
        problem=f"does not divide {heads} heads that share {groups} heads of keys and values",
        hint=f"use {one_of(str(n) for n in range(1, groups + 1) if heads % n == 0 and groups % n == 0)}",
    )
