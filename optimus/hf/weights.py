"""Streams a rank's own weights from a model folder, and writes a folder from parts spread over ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from optimus.errors import UserError
from optimus.hf.checkpoint import INDEX, Checkpoint, Piece, WeightMap
from optimus.hf.safetensors_file import TensorEntry, TensorFile, TensorFileWriter, read_rows

COPIED = (".json", ".jinja", ".model", ".tiktoken", ".txt")  # configuration, processor, tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Bytes of tensors read from files, and bytes of tensors that the parts own."""

    read_bytes: int
    own_bytes: int


def own_tensors(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers of parts, but for adapters, by the model's own names."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.hf.state_dict(keep_vars=True).items():
            if ".lora_" not in name:
                tensors.setdefault(name.replace(".base_layer.", "."), tensor)
    return tensors


def load_weights(
    model: Any, parts: Sequence[nn.Module], folder: str | Path, *, cast: bool = False, device: str = "cpu"
) -> LoadReport:
    """Gives parts on `meta` memory and fills it with their tensors of a folder, reading nothing else.

    Stored dtypes must be those of the parameters unless `cast`. Sharded parameters get their rows only.
    """
    weights = WeightMap(model, Checkpoint(folder))
    for name in own_tensors(parts):
        _check_dtype(weights, name, cast=cast)
    materialize(model, parts, device)
    read = own = 0
    with torch.no_grad():
        for name, tensor in _distinct(own_tensors(parts)):
            local, first = _local_rows(tensor)
            own += local.nbytes
            for piece in weights.pieces(name):
                read += _read_piece(weights.checkpoint, piece, local, first)
    return LoadReport(read_bytes=read, own_bytes=own)


def _distinct(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Leaves out the second name of a tied parameter that is one tensor here."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _check_dtype(weights: WeightMap, name: str, *, cast: bool) -> None:
    for piece in weights.pieces(name):
        file = weights.checkpoint.file_of(piece.source)
        check_dtype(file, piece.source, weights.state[name].dtype, cast=cast)


def check_dtype(file: TensorFile, source: str, wanted: torch.dtype, *, cast: bool) -> None:
    """Raises an error if a stored tensor has another dtype than its parameter, unless `cast`."""
    stored = file.tensors[source].dtype
    if stored != wanted and not cast:
        raise UserError(
            field=source,
            value=str(stored).removeprefix("torch."),
            problem=f"is not {str(wanted).removeprefix('torch.')} as the model",
            hint="give load_model and load_weights the wanted dtype (cast=True)",
            file=str(file.path),
        )


def materialize(model: Any, parts: Sequence[nn.Module], device: str = "cpu") -> None:
    """Gives parts on `meta` memory; buffers that no file holds are computed, a tied parameter stays one."""
    for part in parts:
        if any(tensor.is_meta for tensor in (*part.parameters(), *part.buffers())):
            part.to_empty(device=device)
            _init_buffers(part)
    embeddings = [p.text.embed_tokens for p in parts if getattr(p, "is_first", False) and hasattr(p, "text")]
    heads = [p.hf.lm_head for p in parts if getattr(p, "is_last", False) and hasattr(p, "text")]
    if getattr(model, "all_tied_weights_keys", None):
        for embedding, head in zip(embeddings, heads, strict=False):
            if not isinstance(embedding.weight, DTensor):
                head.weight = embedding.weight


def _init_buffers(part: nn.Module) -> None:
    """Computes buffers that no file holds (rotary frequencies, position ids) as transformers does."""
    for path, module in part.named_modules():
        names = [n for n in module._buffers if n in module._non_persistent_buffers_set]
        for name in names:
            module._buffers[name].fill_(_unset(module._buffers[name]))
        if names:
            _owner(part.hf, path.removeprefix("hf.").removeprefix("hf"))._init_weights(module)
        for name in names:
            buffer = module._buffers[name]
            if bool((buffer == _unset(buffer)).any()):
                raise UserError(
                    field=f"{path}.{name}",
                    problem="is a buffer that transformers does not compute again",
                    hint="use a family that a test compares equal",
                )


def _unset(buffer: Any) -> int | float:
    info = torch.finfo if buffer.is_floating_point() else torch.iinfo
    return info(buffer.dtype).min  # type: ignore[no-any-return]


def _owner(hf: Any, path: str) -> Any:
    """Returns the innermost model around a module: its `_init_weights` knows the module."""
    owner = module = hf
    for name in filter(None, path.split(".")):
        module = module._modules[name]
        owner = module if hasattr(module, "_init_weights") else owner
    return owner


def _local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Returns a tensor's rows on this rank and the number of the first; FSDP2 shards dimension 0."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    first, end = 0, tensor.shape[0]
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard(0):
            each = -(-(end - first) // tensor.device_mesh.size(dim))
            rank = tensor.device_mesh.get_local_rank(dim)
            first, end = min(first + rank * each, end), min(first + (rank + 1) * each, end)
        elif not placement.is_replicate():
            raise UserError(
                field="placements", value=str(placement), problem="is not loaded", hint="use Shard(0)"
            )
    return tensor.to_local(), first


def _read_piece(checkpoint: Checkpoint, piece: Piece, local: Tensor, first: int) -> int:
    """Reads the part of a stored tensor that is among rows `first` and on of its parameter."""
    if not local.ndim:
        return read_rows(checkpoint.file_of(piece.source), piece.source, local)
    begin = max(piece.start[0], first)
    end = min(piece.start[0] + piece.size[0], first + len(local))
    if begin >= end:
        return 0
    target = local[begin - first : end - first]
    for dim in range(1, local.ndim):
        target = target.narrow(dim, piece.start[dim], piece.size[dim])
    target = target.permute(*piece.dims, *(d for d in range(local.ndim) if d not in piece.dims))
    target = target.reshape(target.shape[: len(piece.dims)]) if len(piece.dims) < local.ndim else target
    file = checkpoint.file_of(piece.source)
    entry = file.tensors[piece.source]
    whole = tuple(target.shape) == entry.shape
    row = begin - piece.start[0] if piece.dims and piece.dims[0] == 0 else 0
    if target.is_contiguous() and target.dtype == entry.dtype and target.device.type == "cpu":
        return read_rows(file, piece.source, target, row)
    shape = tuple(target.shape) if whole or (piece.dims and piece.dims[0] == 0) else entry.shape
    stored = torch.empty(shape, dtype=entry.dtype)
    read = read_rows(file, piece.source, stored, row)
    if stored.shape != target.shape:  # rows of the parameter are no rows of the stored tensor
        dim = piece.dims.index(0)
        stored = stored.narrow(dim, begin - piece.start[0], end - begin)
    target.copy_(stored)
    return read


def stored_tensor(piece: Piece, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor as its file holds it, from its box of a whole parameter."""
    box = parameter.detach()
    for dim, (start, size) in enumerate(zip(piece.start, piece.size, strict=True)):
        box = box.narrow(dim, start, size)
    if piece.dims:
        box = box.permute(*piece.dims, *(d for d in range(box.ndim) if d not in piece.dims))
        box = box.reshape(box.shape[: len(piece.dims)])
    return box.to(device="cpu", dtype=dtype).contiguous()


def save_weights(model: Any, parts: Sequence[nn.Module], folder: str | Path, into: str | Path) -> None:
    """Writes parts of one process, together a whole model, as the folder that they were loaded from."""
    _save(model, own_tensors(parts), Path(folder), Path(into), rank=0, ranks=1)


def save_weights_distributed(
    model: Any, parts: Sequence[nn.Module], folder: str | Path, into: str | Path
) -> None:
    """Writes parts of all ranks as the folder that they were loaded from.

    Each file is written by one rank. Tensors arrive one at a time from the first rank that owns them;
    replicas send nothing. All ranks call this together.
    """
    _save(
        model, own_tensors(parts), Path(folder), Path(into), rank=dist.get_rank(), ranks=dist.get_world_size()
    )


def _save(model: Any, own: dict[str, Tensor], folder: Path, into: Path, *, rank: int, ranks: int) -> None:
    weights = WeightMap(model, Checkpoint(folder))
    owners: list[set[str]] = [set(own)]
    if ranks > 1:
        owners = [set() for _ in range(ranks)]
        dist.all_gather_object(owners, set(own))
    whole = _WholeTensors(own)

    def collect(source: str, entry: TensorEntry, writer: int) -> Tensor | None:
        return _fetch(weights, source, entry.dtype, owners, writer, rank, whole)

    write_folder(weights.checkpoint, into, collect, rank=rank, ranks=ranks)


def write_folder(
    checkpoint: Checkpoint,
    into: Path,
    collect: Callable[[str, TensorEntry, int], Tensor | None],
    *,
    rank: int,
    ranks: int,
) -> None:
    """Writes a folder like another, each file by one rank; all ranks call this together.

    `collect` has the name of a stored tensor, its entry and the writing rank; there it returns the tensor.
    """
    _refuse_same_folder(checkpoint.folder, into)
    into.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(sorted(set(checkpoint.weight_map.values()))):
        writer, file = number % ranks, checkpoint.file(name)
        output = TensorFileWriter(into / name, file) if rank == writer else None
        for source, entry in file.tensors.items():
            tensor = collect(source, entry, writer)
            if output is not None:
                assert tensor is not None
                output.write(source, tensor)
        if output is not None:
            output.close()
    if rank == 0:
        _copy_files(checkpoint.folder, into)
    if ranks > 1:
        dist.barrier()


class _WholeTensors:
    """Gathers sharded parameters, keeping the last few: a file's tensors alternate between parameters."""

    KEPT = 3

    def __init__(self, own: dict[str, Tensor]) -> None:
        self.own = own
        self._whole: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        tensor = self.own[name]
        if not isinstance(tensor, DTensor):
            return tensor
        if name not in self._whole:
            if len(self._whole) == self.KEPT:
                del self._whole[next(iter(self._whole))]
            self._whole[name] = tensor.full_tensor()
        return self._whole[name]


def _fetch(
    weights: WeightMap,
    source: str,
    dtype: torch.dtype,
    owners: Sequence[set[str]],
    writer: int,
    rank: int,
    whole: Callable[[str], Tensor],
) -> Tensor | None:
    """Returns a stored tensor on the writing rank; all ranks that own its parameter gather it together."""
    target = weights.target_of.get(source)
    if target is None:
        raise UserError(
            field=source, problem="is ignored by transformers and cannot be saved", hint="remove it"
        )
    ends = [target, *(a for a, b in weights.tied.items() if b == target), weights.tied.get(target, target)]
    name = next((end for end in ends if any(end in names for names in owners)), None)
    if name is None:
        raise UserError(
            field=source, problem="is in no part", hint="give every stage and block to one rank or more"
        )
    owner = next(at for at, names in enumerate(owners) if name in names)
    piece = next(piece for piece in weights.pieces(target) if piece.source == source)
    tensor = stored_tensor(piece, whole(name), dtype) if name in owners[rank] else None
    if owner == writer:
        return tensor
    if rank == owner:
        assert tensor is not None
        dist.send(tensor, writer)
    if rank == writer:
        tensor = torch.empty(weights.checkpoint.file_of(source).tensors[source].shape, dtype=dtype)
        dist.recv(tensor, owner)
    return tensor


def _refuse_same_folder(folder: Path, into: Path) -> None:
    """Raises an error if weights would be written over those that are read."""
    if folder.resolve() == into.resolve():
        raise UserError(
            field="into", value=str(into), problem="is the folder of the weights", hint="use another"
        )


def _copy_files(folder: Path, into: Path) -> None:
    """Copies index, configuration and processor files."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and (path.suffix in COPIED or path.name == INDEX):
            shutil.copyfile(path, into / path.name)
