"""Streams weights of a model folder into shards of our own layers, and writes them back under their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.build_rank import RankModel
from optimus.engine.process_groups import build_tp_group
from optimus.errors import UserError
from optimus.hf.checkpoint import Checkpoint, Piece, WeightMap
from optimus.hf.load import load_model
from optimus.hf.maps.llava_siglip import LLAVA_SIGLIP
from optimus.hf.maps.qwen2_5_vl import QWEN2_5_VL
from optimus.hf.maps.qwen3_vl import QWEN3_VL
from optimus.hf.maps.weight_names import FamilyMap
from optimus.hf.safetensors_file import TensorEntry, read_columns, read_rows
from optimus.hf.weights import LoadReport, check_dtype, write_folder
from optimus.ir.plan import Plan
from optimus.job.model import Model
from optimus.job.own_layers import refuse_untrainable
from optimus.models.collectives import ParamSplit

FAMILY_MAPS: dict[str, FamilyMap] = {"llava": LLAVA_SIGLIP, "qwen2_5_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL}


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTensor:
    """A parameter of our own layers, or one tensor-parallel rank's shard of it."""

    name: str
    tensor: Tensor
    split: ParamSplit | None = None
    tp_rank: int = 0
    tp_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """A run of rows or columns (`dim`) of a stored tensor, and where a shard has it."""

    source: str
    dim: int
    first: int  # of the stored tensor
    at: int  # of the shard
    length: int


def list_layer_tensors(model: RankModel, plan: Plan, rank: int) -> list[LayerTensor]:
    """Returns the parameters that a rank holds; the head of a tied embedding has the embedding's name."""
    tensors = []
    for name, tensor in model.parameters.items():
        plain = name.removesuffix(" (head)")
        tp_group = build_tp_group(plan, plain.split(".")[0], rank)
        tensors.append(
            LayerTensor(
                name=plain,
                tensor=tensor.detach(),
                split=model.splits.get(plain),
                tp_rank=tp_group.rank,
                tp_size=tp_group.size,
            )
        )
    return tensors


class LayerWeights:
    """Maps the shards of our own layers to the stored tensors that make them up."""

    def __init__(self, model: Model, folder: str | Path) -> None:
        refuse_untrainable(model)
        self.checkpoint = Checkpoint(folder)
        self.weights = WeightMap(load_model(folder), self.checkpoint)
        if model.llm.tied != bool(self.weights.tied):
            raise UserError(
                field="text_config.tie_word_embeddings",
                value=not model.llm.tied,
                problem="is not tie_word_embeddings of the outer object",
                hint="set both alike: to false if the files have weights of the head",
                file=str(self.checkpoint.folder / "config.json"),
            )
        self.names = FAMILY_MAPS[model.family]
        self._layers = model.encoders[0].stack.layers

    def parts(self, tensor: LayerTensor) -> list[Part]:
        """Returns the parts of stored tensors that fill a shard; heads that pad it are in none of them."""
        dim = tensor.split.dim if tensor.split is not None else 0
        sources, begin = [], 0
        for name in self.names.theirs(tensor.name):
            piece = self.piece(name)
            sources.append((piece.source, begin, piece.size[dim]))
            begin += piece.size[dim]
        split = tensor.split or ParamSplit(dim=0, blocks=((begin, 1),))
        size = tensor.tp_size if tensor.split is not None else 1
        if begin != split.shard_length(1):
            raise UserError(
                field=sources[0][0],
                value=begin,
                problem=f"rows make no {tensor.name} of {split.shard_length(1)} rows",
                hint="check config.json against the files",
                file=str(self.checkpoint.folder),
            )
        return [
            Part(source=source, dim=dim, first=low - start, at=at + low - first, length=high - low)
            for first, at, length in split.shard_runs(tensor.tp_rank if size > 1 else 0, size)
            for source, start, count in sources
            if (low := max(first, start)) < (high := min(first + length, start + count))
        ]

    def piece(self, name: str) -> Piece:
        """Returns the stored tensor of a parameter of transformers, which must be stored as it is."""
        (piece, *more) = self.weights.pieces(name)
        assert not more and piece.dims == tuple(range(len(piece.dims))), f"{name} is stored in pieces"
        return piece

    def refuse_unmapped(self, mapped: Iterable[str]) -> None:
        """Raises an error for a stored tensor that our layers would leave out although it has an effect."""
        known = {self.piece(name).source for name in mapped}
        for source, target in self.weights.target_of.items():
            if source not in known and not self.names.has_no_effect(target, self._layers):
                raise UserError(
                    field=source,
                    problem="is a tensor that our own layers have no place for",
                    hint="run this model's transformers modules in FillSchedule",
                    file=str(self.checkpoint.folder),
                )


def load_layers(
    model: Model, tensors: Sequence[LayerTensor], folder: str | Path, *, cast: bool = False
) -> LoadReport:
    """Fills shards of our own layers from a folder, reading nothing else.

    Stored dtypes must be those of the parameters unless `cast`.
    """
    weights = LayerWeights(model, folder)
    read = own = 0
    for tensor in tensors:
        tensor.tensor.zero_()
        own += tensor.tensor.nbytes
        for part in weights.parts(tensor):
            file = weights.checkpoint.file_of(part.source)
            check_dtype(file, part.source, tensor.tensor.dtype, cast=cast)
            target = tensor.tensor.narrow(part.dim, part.at, part.length)
            stored = target
            if (
                not target.is_contiguous()
                or target.dtype != file.tensors[part.source].dtype
                or target.is_cuda
            ):
                stored = torch.empty(target.shape, dtype=file.tensors[part.source].dtype)
            read += (read_columns if part.dim else read_rows)(file, part.source, stored, part.first)
            if stored is not target:
                target.copy_(stored)
    return LoadReport(read_bytes=read, own_bytes=own)


# ---------------------------------------------------------------------------------------- out


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a stored tensor that one rank holds."""

    rank: int
    name: str
    part: Part


def save_layers(model: Model, tensors: Sequence[LayerTensor], folder: str | Path, into: str | Path) -> None:
    """Writes the layers of all ranks as the folder that they were loaded from; all ranks call this together.

    Each file is written by one rank. Tensors arrive one at a time, from one rank for every shard; what our
    layers do not have is copied.
    """
    weights = LayerWeights(model, folder)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    shares = _gather_shares(weights, tensors, rank, ranks)
    weights.refuse_unmapped(name for share in shares.values() for name in weights.names.theirs(share[0].name))
    own = {tensor.name: tensor.tensor for tensor in reversed(tensors)}

    def collect(source: str, entry: TensorEntry, writer: int) -> Tensor | None:
        whole = torch.empty(entry.shape, dtype=entry.dtype) if rank == writer else None
        if source in shares:
            _collect(shares[source], own, whole, entry.dtype, writer, rank)
        elif whole is not None:
            read_rows(weights.checkpoint.file_of(source), source, whole)
        return whole

    write_folder(weights.checkpoint, Path(into), collect, rank=rank, ranks=ranks)


def _gather_shares(
    weights: LayerWeights, tensors: Sequence[LayerTensor], rank: int, ranks: int
) -> dict[str, list[Share]]:
    """Returns the ranks that send parts of each stored tensor: of replicas, the first."""
    mine = [
        Share(rank=rank, name=tensor.name, part=part) for tensor in tensors for part in weights.parts(tensor)
    ]
    everyone = [mine]
    if ranks > 1:
        everyone = [[] for _ in range(ranks)]
        dist.all_gather_object(everyone, mine)
    shares: dict[tuple[str, int], Share] = {}
    for of_rank in everyone:
        for share in of_rank:
            shares.setdefault((share.part.source, share.part.first), share)
    by_source: dict[str, list[Share]] = {}
    for share in shares.values():
        by_source.setdefault(share.part.source, []).append(share)
    return by_source


def _collect(
    shares: Sequence[Share],
    own: Mapping[str, Tensor],
    whole: Tensor | None,
    dtype: torch.dtype,
    writer: int,
    rank: int,
) -> None:
    """Fills a stored tensor on the writing rank from the ranks that share it."""
    for share in shares:
        part = share.part
        if rank == share.rank:
            sent = own[share.name].narrow(part.dim, part.at, part.length).to("cpu", dtype).contiguous()
            if rank != writer:
                dist.send(sent, writer)
        if whole is not None:
            target = whole.flatten(1) if whole.ndim > 2 else whole
            target = target.narrow(part.dim, part.first, part.length)
            if rank != share.rank:
                sent = torch.empty(target.shape, dtype=dtype)
                dist.recv(sent, share.rank)
            target.copy_(sent.view(target.shape))
