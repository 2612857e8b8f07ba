"""Maps the tensors of a model folder to parameters of modules, by transformers' own conversions."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from optimus.errors import UserError, nearest
from optimus.hf.safetensors_file import TensorFile, read_header
from optimus.job.nodes import parse_json, read_text
from optimus.job.typed import read_typed

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 32_000_000  # some 300,000 tensors


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stored tensor as a box of a parameter: dimension `dims[d]` of the parameter is its dimension `d`.

    Dimensions of the parameter that no dimension of the tensor covers have size one in the box.
    """

    source: str
    target: str
    dims: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]


class Checkpoint:
    """A folder of safetensors files: which file holds which tensor, and their headers."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(
                field="folder",
                value=str(folder),
                problem="does not exist",
                hint="give the folder of a model that was downloaded",
            )
        index = self.folder / INDEX
        self.has_index = index.exists()
        if self.has_index:
            text = read_text(index, limit=MAX_INDEX_BYTES)
            root = parse_json(text, file=str(index), hint="copy the file again")
            self.weight_map: dict[str, str] = read_typed(dict[str, str], root["weight_map"])
        elif (self.folder / SINGLE).exists():
            self.weight_map = dict.fromkeys(read_header(self.folder / SINGLE).tensors, SINGLE)
        else:
            others = sorted(path.name for path in self.folder.glob("*.bin"))
            raise UserError(
                field="folder",
                problem=f"has no {INDEX} and no {SINGLE}"
                + (f" but {others[0]}, which runs code when loaded" if others else ""),
                hint="save the model as safetensors",
                file=str(self.folder),
            )
        if not self.weight_map:
            hint = "copy the model again"
            raise UserError(field="folder", problem="has no tensors", hint=hint, file=str(self.folder))
        for name in self.weight_map.values():
            if Path(name).name != name:
                raise UserError(
                    field="weight_map", value=name, problem="leaves the folder", hint="use plain names"
                )
        self._files: dict[str, TensorFile] = {}

    def file(self, name: str) -> TensorFile:
        """Returns the header of a file, read once; what it holds must be what the index says."""
        if name not in self._files:
            file = read_header(self.folder / name)
            listed = {tensor for tensor, of in self.weight_map.items() if of == name}
            for tensor, problem in (
                *((tensor, "is not in its file") for tensor in sorted(listed - set(file.tensors))),
                *((tensor, "is not in the index") for tensor in sorted(set(file.tensors) - listed)),
            ):
                hint = nearest(tensor, file.tensors if "not in its" in problem else listed)
                raise UserError(field=tensor, problem=problem, hint=hint, file=str(file.path))
            self._files[name] = file
        return self._files[name]

    def file_of(self, tensor: str) -> TensorFile:
        return self.file(self.weight_map[tensor])


class WeightMap:
    """Maps the parameters of a model to the stored tensors that make them up."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.state: dict[str, Tensor] = model.state_dict()
        self.tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._sources: dict[str, list[str]] = defaultdict(list)
        self._patterns: dict[str, str | None] = {}
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        for source in sorted(checkpoint.weight_map, key=dot_natural_key):
            target = self._rename(source)
            if target is not None:
                self._sources[target].append(source)
        self._pieces: dict[str, list[Piece]] = {}

    @cached_property
    def target_of(self) -> dict[str, str]:
        return {source: target for target, sources in self._sources.items() for source in sources}

    def _rename(self, source: str) -> str | None:
        """Returns the parameter that a stored tensor belongs to, as transformers' loader does."""
        prefix = self.model.base_model_prefix
        target, pattern = rename_source_key(source, self._renamings, self._converters, prefix, self.state)
        if target not in self.state and source in self.state:
            target, pattern = rename_source_key(source, [], [], prefix, self.state)
        self._patterns[source] = pattern
        if target in self.state:
            return str(target)
        ignored = self.model._keys_to_ignore_on_load_unexpected or ()
        if "rotary_emb.inv_freq" in target or any(re.search(words, target) for words in ignored):
            return None
        raise UserError(
            field=source,
            problem=f"is no parameter of {type(self.model).__name__}",
            hint=nearest(target, self.state),
            file=str(self.checkpoint.folder / self.checkpoint.weight_map[source]),
        )

    def pieces(self, name: str) -> list[Piece]:
        """Returns the stored tensors of a parameter; a missing or misshapen one is an error that names it."""
        name = self.tied.get(name, name) if self._sources.get(self.tied.get(name, name)) else name
        name = next(
            (end for end, of in self.tied.items() if of == name and not self._sources.get(name)), name
        )
        if name not in self._pieces:
            sources = self._sources.get(name)
            if not sources:
                index = INDEX if self.checkpoint.has_index else SINGLE
                raise UserError(
                    field=name,
                    problem="is missing",
                    hint=nearest(name, self.checkpoint.weight_map),
                    file=str(self.checkpoint.folder / index),
                )
            self._pieces[name] = self._place(name, sources)
        return self._pieces[name]

    def _place(self, target: str, sources: Sequence[str]) -> list[Piece]:
        pattern = self._patterns[sources[0]]
        operations: list[Any] = []
        if pattern is not None:
            converter = next(c for c in self._converters if pattern in c.source_patterns)
            operations = list(converter.operations)
            if len(converter.target_patterns) > 1:
                raise self._unsupported(target, sources[0], operations)
        shape = tuple(self.state[target].shape)
        groups: dict[str | None, list[str]] = defaultdict(list)
        for source in sources:
            groups[self._patterns[source]].append(source)
        order = [p for p in converter.source_patterns if p in groups] if pattern is not None else [None]
        placed = [piece for p in order for piece in self._boxes(target, groups[p], shape, operations)]
        return self._concatenated(target, shape, placed, operations)

    def _boxes(
        self, target: str, sources: Sequence[str], shape: tuple[int, ...], operations: Sequence[Any]
    ) -> list[Piece]:
        """Places the tensors of one source pattern, before they are concatenated with those of others."""
        dims, stacked = list(range(len(shape))), None
        for operation in operations:
            if isinstance(operation, MergeModulelist):
                stacked = operation.dim
                dims.remove(stacked)
            elif isinstance(operation, Transpose):
                stored = self._stored_shape(sources[0])
                if not operation.check_dims or stored != shape:
                    a, b = operation.dim0, operation.dim1
                    dims[a], dims[b] = dims[b], dims[a]
            elif not isinstance(operation, Concatenate):
                raise self._unsupported(target, sources[0], operations)
        if stacked is None and len(sources) > 1:
            raise UserError(
                field=sources[1],
                problem=f"is stored a second time as {sources[0]}",
                hint="remove one of the two",
                file=str(self.checkpoint.folder),
            )
        pieces = []
        for at, source in enumerate(sources):
            stored = self._stored_shape(source)
            size, start = [1] * len(shape), [0] * len(shape)
            if len(stored) != len(dims):
                raise self._misshapen(source, stored, shape)
            for dim, length in zip(dims, stored, strict=True):
                size[dim] = length
            if stacked is not None:
                start[stacked] = at
            pieces.append(
                Piece(source=source, target=target, dims=tuple(dims), start=tuple(start), size=tuple(size))
            )
        return pieces

    def _concatenated(
        self, target: str, shape: tuple[int, ...], pieces: list[Piece], operations: Sequence[Any]
    ) -> list[Piece]:
        """Moves boxes of each source pattern behind those before it; checks that they fill the whole."""
        along = next((operation.dim for operation in operations if isinstance(operation, Concatenate)), None)
        placed, offset, last = [], 0, None
        for piece in pieces:
            pattern = self._patterns[piece.source]
            if along is not None and last is not None and pattern != last[0]:
                offset += last[1]
            if along is not None:
                start = tuple(s + offset * (dim == along) for dim, s in enumerate(piece.start))
                last = (pattern, piece.size[along])
                piece = Piece(**{**piece.__dict__, "start": start})
            if any(s + n > whole for s, n, whole in zip(piece.start, piece.size, shape, strict=True)) or (
                along is None and any(n not in (1, whole) for n, whole in zip(piece.size, shape, strict=True))
            ):
                raise self._misshapen(piece.source, self._stored_shape(piece.source), shape)
            placed.append(piece)
        if sum(math.prod(piece.size) for piece in placed) != math.prod(shape):
            if len(placed) == 1:
                raise self._misshapen(placed[0].source, self._stored_shape(placed[0].source), shape)
            raise UserError(
                field=target,
                problem=f"of shape {shape} is not filled by its {len(placed)} stored tensors: one is missing",
                hint=f"stored are {placed[0].source} to {placed[-1].source}",
                file=str(self.checkpoint.folder / (INDEX if self.checkpoint.has_index else SINGLE)),
            )
        return placed

    def _stored_shape(self, source: str) -> tuple[int, ...]:
        return self.checkpoint.file_of(source).tensors[source].shape

    def _misshapen(self, source: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> UserError:
        return UserError(
            field=source,
            value=stored,
            problem=f"does not fit a parameter of shape {shape}",
            hint="check config.json against the files",
            file=str(self.checkpoint.file_of(source).path),
        )

    def _unsupported(self, target: str, source: str, operations: Sequence[Any]) -> UserError:
        return UserError(
            field=source,
            problem=f"becomes {target} by a conversion that is not supported: {operations}",
            hint="load and save the model once with transformers",
        )
