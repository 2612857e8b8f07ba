"""Builds any range of a module's layers, with values that depend only on the seed and a parameter's name.

Layers are numbered as plans number them: an embedding, the transformer layers, a head or projector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optimus.errors import UserError, one_of
from optimus.job.model import Encoder, Llm
from optimus.job.own_layers import find_unsupported
from optimus.models.collectives import NO_TP, ParamSplit, TpGroup
from optimus.models.deepstack import AddRows, GiveRows
from optimus.models.dropout import hash64
from optimus.models.end_layers import EncoderProjector, LossHead, PatchEmbedding, TokenEmbedding
from optimus.models.kernels import KERNELS, KernelSet
from optimus.models.layer_ops import RESIDUAL_ADD, SideHook
from optimus.models.segment import Segment, SequentialSegment
from optimus.models.tensor_parallel import TpCollective
from optimus.models.transformer_layer import build_layer_segments

Module = Encoder | Llm
INIT_STD = 0.02  # standard deviation of initial weights and biases
_SEGMENT_NAMES = ("qkv", "attention", "out", "up", "down")


def count_layers(module: Module) -> int:
    """Returns the number of layers, with embedding and head or projector."""
    return module.stack.layers + 2


def build_layers(
    module: Module,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int | None = 0,
    first: int = 0,
    end: int | None = None,
    compute: KernelSet = KERNELS,
    tp_group: TpGroup = NO_TP,
    cp_group: TpGroup = NO_TP,
    encoders_train: bool = True,
    deepstack: int = 0,
) -> list[list[Segment]]:
    """Builds the layers `first` up to but not including `end` of a module, each as a list of segments.

    The rank in `tp_group` decides which shards of parameters are built; ranks of `cp_group` hold the same
    parameters and other tokens. `encoders_train` says whether any
    encoder of an LLM needs gradients. With `seed` None, only norms have values. Rows
    of encoders are added behind `deepstack` layers of an LLM too.
    """
    _refuse_uneven_heads(module, tp_group.size)
    unsupported = find_unsupported(module)
    if unsupported is not None:
        raise unsupported
    end = count_layers(module) if end is None else end
    assert 0 <= first <= end <= count_layers(module), f"layers {first}:{end} of {count_layers(module)}"
    options: dict[str, Any] = {"tp_group": tp_group, "cp_group": cp_group, "dtype": dtype, "device": device}
    layers = [
        _build_layer(module, layer, compute, encoders_train=encoders_train, deepstack=deepstack, **options)
        for layer in range(first, end)
    ]
    _tie(module, first, end, layers)
    if seed is not None:
        with torch.no_grad():
            for name, parameter, split in named_parameters(module, layers, first=first):
                _initialize(parameter, name, seed, split, tp_group)
    _freeze(module, layers)
    return layers


def _build_layer(
    module: Module,
    layer: int,
    compute: KernelSet,
    *,
    tp_group: TpGroup,
    cp_group: TpGroup,
    encoders_train: bool,
    deepstack: int,
    **factory_kwargs: Any,
) -> list[Segment]:
    last = count_layers(module) - 1
    if layer == 0 and isinstance(module, Llm):
        options = {"encoders_train": encoders_train, "deepstack": deepstack, **factory_kwargs}
        return [TokenEmbedding(module, tp_group, cp_group, **options)]
    if layer == last and isinstance(module, Llm):
        return [LossHead(module, compute, tp_group, **factory_kwargs)]
    if layer in (0, last) and isinstance(module, Encoder):
        end_layer = EncoderProjector if layer else PatchEmbedding
        return [end_layer(module, compute, **factory_kwargs)]
    name = f"{module.name}.layers.{layer - 1}"
    side = _side_hook(module, layer - 1, deepstack)
    return build_layer_segments(
        module.stack, layer - 1, name, compute, tp_group, cp_group, side, **factory_kwargs
    )


def _side_hook(module: Module, layer: int, deepstack: int) -> SideHook:
    """Returns what a layer does with its output besides passing it on."""
    if isinstance(module, Llm):
        return AddRows(layer) if layer < deepstack else None
    given = module.deepstack_layers
    return GiveRows(given.index(layer)) if layer in given else None


def insert_collectives(layer: Sequence[Segment]) -> list[Segment]:
    """Returns the segments of a tensor- or context-parallel layer with the collectives between them.

    A residual add runs together with the next segment, since nothing is scheduled between them.
    """
    segments: list[Segment] = []
    for segment in (part for whole in layer for part in whole.parallel_segments()):
        after_add = segments and segments[-1].kernels == RESIDUAL_ADD
        if after_add and not isinstance(segment, TpCollective):
            segments[-1] = SequentialSegment((segments[-1], segment), segment.kernels)
        else:
            segments.append(segment)
    return segments


def _tie(module: Module, first: int, end: int, layers: Sequence[Sequence[Segment]]) -> None:
    """Lets embedding and head of a tied LLM share one parameter, if the range has both."""
    if isinstance(module, Llm) and module.tied and first == 0 and end == count_layers(module):
        layers[-1][0].weight = layers[0][0].weight


def _freeze(module: Module, layers: Sequence[Sequence[Segment]]) -> None:
    for layer in layers:
        for segment in layer:
            segment.requires_grad_(module.train)
            if isinstance(segment, EncoderProjector):
                segment.linears.requires_grad_(segment.projector.train)
                segment.deepstack.requires_grad_(segment.projector.train)


# ---------------------------------------------------------------------------------------- names and values


def segment_name(module: Module, layer: int, segment: int = 0) -> str:
    """Returns a name such as `llm.embedding` or `vision.layers.3.qkv`, the same in every layout."""
    is_llm = isinstance(module, Llm)
    if layer == 0:
        return f"{module.name}.{'embedding' if is_llm else 'patches'}"
    if layer == count_layers(module) - 1:
        return f"{module.name}.{'head' if is_llm else 'projector'}"
    return f"{module.name}.layers.{layer - 1}.{_SEGMENT_NAMES[segment]}"


def named_parameters(
    module: Module, layers: Sequence[Sequence[Segment]], *, first: int = 0
) -> Iterator[tuple[str, nn.Parameter, ParamSplit | None]]:
    """Yields the parameters of a range of layers by their names in checkpoints, shared ones once.

    The third value is how tensor parallelism shards the parameter; None if it is replicated.
    """
    seen: set[int] = set()
    for layer, segments in enumerate(layers, first):
        for index, segment in enumerate(segments):
            for name, parameter in segment.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield _global_name(module, layer, index, name), parameter, segment.splits.get(name)


def _global_name(module: Module, layer: int, segment: int, parameter: str) -> str:
    """Returns a parameter's name in checkpoints; a tied head has the name of the embedding."""
    name = f"{segment_name(module, layer, segment)}.{parameter}"
    tied = isinstance(module, Llm) and module.tied
    return f"{module.name}.embedding.weight" if tied and name == f"{module.name}.head.weight" else name


def _initialize(parameter: Tensor, name: str, seed: int, split: ParamSplit | None, tp_group: TpGroup) -> None:
    """Sets weights of norms to one, others to normal values drawn in float32, equal for every dtype.

    All values of a sharded parameter are drawn; this rank takes its shard of them.
    """
    if parameter.is_meta:
        return
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
        return
    shape = list(parameter.shape)
    if split is not None:
        shape[split.dim] = split.shard_length(1)
    generator = torch.Generator().manual_seed(hash64("parameter", seed, name) & (2**63 - 1))
    values = torch.empty(shape, dtype=torch.float32).normal_(0.0, INIT_STD, generator=generator)
    parameter.copy_(values if split is None else split.shard(values, tp_group.rank, tp_group.size))


# ---------------------------------------------------------------------------------------- refusals


def _refuse_uneven_heads(module: Module, tp: int) -> None:
    """Raises an error unless every rank gets query heads together with their keys and values."""
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
