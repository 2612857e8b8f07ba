"""Saves and loads sharded state through DCP, in the files that DCP writes, without unpickling any of them.

DCP pickles the description of a checkpoint (`.metadata`), which its own reader unpickles, and so could run
what is planted there. The same description in JSON (`metadata.json`) is what is read here; values are read as
the raw bytes that they are in DCP's files.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from optimus.engine.checkpoint_folder import METADATA
from optimus.engine.checkpoint_state import Box, State, TensorShards
from optimus.errors import UserError
from optimus.ir.files import write_file_atomically

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
}


# ---------------------------------------------------------------------------- saving


class ShardedSavePlanner(DefaultSavePlanner):
    """Plans one item for every box; of boxes that several ranks hold, DCP has one rank write them."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [_write_item(name, shards, box) for name, shards in self._state.items() for box in shards.boxes]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        boxes = self._state[write_item.index.fqn].boxes
        return next(box.values for box in boxes if box.offsets == write_item.index.offset)


def _write_item(name: str, shards: TensorShards, box: Box) -> WriteItem:
    data = TensorWriteData(
        chunk=_chunk(box),
        properties=TensorProperties(dtype=box.values.dtype),
        size=torch.Size(shards.shape),
    )
    return WriteItem(index=MetadataIndex(name, box.offsets), type=WriteItemType.SHARD, tensor_data=data)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=box.values.shape)


class StateWriter(FileSystemWriter):
    """Writes DCP's files, each synced, and their description as JSON."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
        self._folder = folder

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        write_file_atomically(self._folder / METADATA, json.dumps(describe_metadata(metadata)))


def describe_metadata(metadata: Metadata) -> dict[str, Any]:
    """Returns the description of a checkpoint's tensors for JSON."""
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = []
        for chunk in tensor.chunks:
            stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            place = [stored.relative_path, stored.offset, stored.length]
            chunks.append([list(chunk.offsets), list(chunk.sizes), *place])
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
    return {"tensors": tensors}


# ---------------------------------------------------------------------------- loading


class ShardedLoadPlanner(LoadPlanner):
    """Plans to fill every box of a state; raises unless a checkpoint has all of its values."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._folder = state, folder

    def set_up_planner(
        self, state_dict: Mapping[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for name in self._state for item in self._read_items(name)])

    def _read_items(self, name: str) -> list[ReadItem]:
        shards, stored = self._state[name], self._stored.get(name)
        if stored is None:
            raise self._refusal(name, "is not in the checkpoint")
        assert isinstance(stored, TensorStorageMetadata)
        if tuple(stored.size) != shards.shape:
            raise self._refusal(
                name, f"has the shape {list(stored.size)}, and the model {list(shards.shape)}"
            )
        for box in shards.boxes:
            if box.values.dtype != stored.properties.dtype:
                raise self._refusal(name, f"is {stored.properties.dtype}, and the run {box.values.dtype}")
        items: list[ReadItem] = create_read_items_for_chunk_list(
            name, stored, [_chunk(box) for box in shards.boxes]
        )
        if sum(prod(item.lengths) for item in items) != sum(box.values.numel() for box in shards.boxes):
            raise self._refusal(name, "is stored in part only")
        return items

    def _refusal(self, name: str, problem: str) -> UserError:
        return UserError(
            field=name,
            problem=problem,
            hint="resume the job that saved it, with its model and run.dtype",
            file=str(self._folder),
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index.index
        assert index is not None
        return _narrow(
            self._state[read_item.dest_index.fqn].boxes[index].values,
            read_item.dest_offsets,
            read_item.lengths,
        )

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Does nothing: values are copied in place."""


class StateReader(FileSystemReader):
    """Reads DCP's files by the description in JSON."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata = read_metadata(self._folder)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(item.storage_index, []).append(item)
        for index in sorted(items, key=self._sort_key):
            values = self._read_chunk(index)
            for item in items[index]:
                target = planner.resolve_tensor(item)
                target.copy_(_narrow(values, item.storage_offsets, item.lengths))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _sort_key(self, index: MetadataIndex) -> tuple[str, int]:
        place = self.storage_data[index]
        return place.relative_path, place.offset

    def _read_chunk(self, index: MetadataIndex) -> Tensor:
        """Reads the bytes of a tensor from the archive that `torch.save` has written for it."""
        place, tensor = self.storage_data[index], self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(tensor, TensorStorageMetadata) and index.index is not None
        chunk, dtype = tensor.chunks[index.index], tensor.properties.dtype
        try:
            with (self._folder / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                archive = zipfile.ZipFile(io.BytesIO(stream.read(place.length)))
            (record,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
            if record.compress_type or record.file_size != prod(chunk.sizes) * dtype.itemsize:
                raise ValueError("its bytes are not those of such a tensor")
            content = bytearray(archive.read(record))
        except (
            OSError,
            ValueError,
            zipfile.BadZipFile,
            NotImplementedError,
            RuntimeError,
            EOFError,
        ) as error:
            raise _damaged(self._folder, index.fqn, f"cannot be read: {error}") from None
        return torch.frombuffer(content, dtype=dtype).view(chunk.sizes)


def read_metadata(folder: Path) -> Metadata:
    """Reads and checks the description of a checkpoint's tensors."""
    try:
        document = json.loads((folder / METADATA).read_bytes())
        tensors = {name: _read_tensor(name, entry) for name, entry in document["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, METADATA, f"cannot be read: {error!r}") from None
    return Metadata(
        state_dict_metadata={name: tensor for name, (tensor, _) in tensors.items()},
        storage_data={index: place for _, places in tensors.values() for index, place in places.items()},
    )


def _read_tensor(
    name: str, entry: Mapping[str, Any]
) -> tuple[TensorStorageMetadata, dict[MetadataIndex, _StorageInfo]]:
    dtype, shape = DTYPES[entry["dtype"]], _read_sizes(entry["shape"])
    chunks = list[ChunkStorageMetadata]()
    places = dict[MetadataIndex, _StorageInfo]()
    for offsets, sizes, file, offset, length in entry["chunks"]:
        chunk = ChunkStorageMetadata(offsets=_read_sizes(offsets), sizes=_read_sizes(sizes))
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            raise ValueError(f"{name}: a chunk has not the dimensions of the tensor")
        if any(at + size > whole for at, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"{name}: a chunk is outside of the tensor")
        if not isinstance(file, str) or Path(file).name != file or min(_read_sizes([offset, length])) < 0:
            raise ValueError(f"{name}: a chunk is in no file of the checkpoint")
        index = MetadataIndex(name, chunk.offsets, len(chunks))
        if index in places:
            raise ValueError(f"{name}: two chunks begin at {list(chunk.offsets)}")
        chunks.append(chunk)
        places[index] = _StorageInfo(file, offset, length)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks), places


def _read_sizes(values: Any) -> torch.Size:
    """Returns a list of whole numbers of 0 or more."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**60 for value in values):
        raise ValueError(f"{str(values)[:80]} are no sizes")
    return torch.Size(values)


def _narrow(tensor: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _damaged(folder: Path, field: str, problem: str) -> UserError:
    return UserError(field=field, problem=problem, hint="resume from another checkpoint", file=str(folder))
