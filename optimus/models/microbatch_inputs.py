"""Builds the inputs and context of one microbatch, which segments read besides their state.

Everything is computed on the host, once per microbatch, from samples; nothing is read back from a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt

import torch
from torch import Tensor

from optimus.errors import UserError
from optimus.job.model import Encoder, Llm
from optimus.models.attention import Rotary, Spans, build_grid_rotary_table, build_sequence_rotary_table
from optimus.models.context_parallel import ContextShare
from optimus.models.deepstack import SideRows
from optimus.models.dropout import make_dropout_keys
from optimus.models.sample import (
    IGNORE_INDEX,
    PlacedItem,
    Sample,
    SampleItem,
    TokenOrder,
    compute_encoder_token_order,
)

TensorMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class SeamRoute:
    """Routes of encoder rows within a group of ranks, for one LLM microbatch and one rank.

    Received rows come from all ranks in order.
    """

    pieces: tuple[int, ...]  # number of rows of every encoder output that this rank holds
    leaving: Tensor  # int64: index of every row to send, ordered by destination
    sent: tuple[int, ...]  # number of rows to every rank
    received: tuple[int, ...]  # number of rows from every rank

    def map(self, function: TensorMap) -> SeamRoute:
        return replace(self, leaving=function(self.leaving))


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderMicrobatchContext:
    """Attention spans, positions and dropout keys of one encoder microbatch (a bin of items)."""

    spans: Spans
    window_spans: Spans
    rotary: Rotary | None  # for images without learned positions
    positions: Tensor | None  # int64 (capacity,), into the learned table; (capacity, 4) with weights
    sinusoids: Tensor | None  # (capacity, hidden), for sounds without learned positions
    dropout_keys: Tensor | None  # int64 (capacity,)
    position_weights: Tensor | None = None  # (capacity, 4), of learned positions that are interpolated
    side: SideRows = field(default_factory=SideRows)

    def shard(self, rows: slice) -> EncoderMicrobatchContext:
        """Returns the context of a rank that holds these rows between products; heads see all rows."""
        return replace(
            self,
            positions=_rows(self.positions, rows),
            position_weights=_rows(self.position_weights, rows),
            sinusoids=_rows(self.sinusoids, rows),
            dropout_keys=_rows(self.dropout_keys, rows),
        )

    def map(self, function: TensorMap) -> EncoderMicrobatchContext:
        """Returns the context with a function applied to each tensor, such as a copy to a device."""
        return replace(
            self,
            spans=self.spans.map(function),
            window_spans=self.window_spans.map(function),
            rotary=None if self.rotary is None else (function(self.rotary[0]), function(self.rotary[1])),
            positions=None if self.positions is None else function(self.positions),
            sinusoids=None if self.sinusoids is None else function(self.sinusoids),
            position_weights=None if self.position_weights is None else function(self.position_weights),
            dropout_keys=None if self.dropout_keys is None else function(self.dropout_keys),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LlmMicrobatchContext:
    """Attention spans, positions, labels and seam of one LLM microbatch."""

    spans: Spans
    rotary: Rotary | None
    positions: Tensor | None  # int64 (n,), into the learned table
    labels: Tensor  # int64 (n,)
    scale: float  # of the summed loss
    # Per encoder output, or for all rows that an exchange brought: the row that each replaces; n for none.
    targets: tuple[Tensor, ...]
    dropout_keys: Tensor | None  # int64 (n,)
    routes: Mapping[str, SeamRoute] = field(default_factory=dict)  # by axis: deal, tp, cp
    share: ContextShare | None = None  # of the rows, with context parallelism
    side: SideRows = field(default_factory=SideRows)

    def split_context(self, share: ContextShare) -> LlmMicrobatchContext:
        """Returns the context of a context-parallel rank; positions stay those of the whole sequence."""
        rows, rotary = share.rows, self.rotary
        return replace(
            self,
            rotary=None if rotary is None else (rotary[0][rows], rotary[1][rows]),
            positions=_rows(self.positions, rows),
            labels=self.labels[rows],
            dropout_keys=_rows(self.dropout_keys, rows),
            share=share,
        )

    def shard(self, rows: slice) -> LlmMicrobatchContext:
        """Returns the context of a rank that holds these rows between products; heads and labels see all."""
        positions, dropout_keys = _rows(self.positions, rows), _rows(self.dropout_keys, rows)
        return replace(self, positions=positions, dropout_keys=dropout_keys)

    def map(self, function: TensorMap) -> LlmMicrobatchContext:
        """Returns the context with a function applied to each tensor, such as a copy to a device."""
        return replace(
            self,
            spans=self.spans.map(function),
            rotary=None if self.rotary is None else (function(self.rotary[0]), function(self.rotary[1])),
            positions=None if self.positions is None else function(self.positions),
            labels=function(self.labels),
            targets=tuple(map(function, self.targets)),
            dropout_keys=None if self.dropout_keys is None else function(self.dropout_keys),
            routes={axis: route.map(function) for axis, route in self.routes.items()},
            share=None if self.share is None else self.share.map(function),
        )


def _rows(tensor: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    return None if tensor is None else tensor[rows]


# ---------------------------------------------------------------------------------------- encoders


def build_encoder_inputs(
    encoder: Encoder,
    items: Sequence[PlacedItem],
    capacity: int,
    *,
    seed: int,
    step: int | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, EncoderMicrobatchContext]:
    """Returns a bin: items one after another, then padding up to `capacity` tokens as one more span.

    Without a `step` nothing is dropped.
    """
    inputs = torch.zeros(capacity, encoder.patch_inputs, dtype=dtype)
    keys = torch.zeros(capacity, dtype=torch.int64)
    is_sound = encoder.modality == "audio"
    coordinates = torch.zeros(capacity, 1 if is_sound else 2, dtype=torch.int64)
    grids = torch.ones(capacity, 2, dtype=torch.int64)  # of the item of every row
    spans: list[int] = []
    window_spans: list[int] = []
    start = 0
    for sample, index, item in items:
        order = _checked_order(encoder, item)
        end = start + item.tokens
        assert end <= capacity, f"items of at least {end} tokens in a bin of {capacity}"
        inputs[start:end] = item.inputs[order.raster_index]
        coordinates[start:end] = order.coordinates
        if not is_sound:
            grids[start:end] = torch.tensor(item.grid[-2:])
        if step is not None:
            keys[start:end] = make_dropout_keys(
                order.raster_index, seed=seed, step=step, sample=sample, item=index
            )
        spans += order.spans
        window_spans += order.window_spans
        start = end
    padding = (capacity - start,) if capacity > start else ()
    learned, attention = encoder.positions > 0, encoder.stack.attention
    rotary = position_weights = None
    table_index = _table_index(encoder, coordinates) if learned else None
    if encoder.interpolates_positions:
        table_index, position_weights = _interpolated_index(encoder, coordinates, grids, dtype)
    if encoder.rotary:
        rotary = build_grid_rotary_table(coordinates, attention.head_dim, attention.rope.theta, dtype)
    return inputs, EncoderMicrobatchContext(
        spans=Spans.of((*spans, *padding)),
        window_spans=Spans.of((*window_spans, *padding)),
        rotary=rotary,
        positions=table_index,
        position_weights=position_weights,
        sinusoids=_sinusoids(encoder, coordinates, dtype) if is_sound and not learned else None,
        dropout_keys=keys if encoder.stack.dropout and step is not None else None,
    )


def _checked_order(encoder: Encoder, item: SampleItem) -> TokenOrder:
    expected = (item.tokens, encoder.patch_inputs)
    if tuple(item.inputs.shape) != expected:
        raise UserError(
            field=f"inputs of an item of {encoder.name}",
            value=tuple(item.inputs.shape),
            problem=f"do not have the shape {expected} of its grid {item.grid} and patch_inputs",
            hint="give one row of patch_inputs numbers per token of the grid",
        )
    order = compute_encoder_token_order(encoder, item.grid)
    if not fits_positions(encoder, item.grid):
        shape = " x ".join(map(str, position_grid_sides(encoder)))
        raise UserError(
            field=f"grid of an item of {encoder.name}",
            value=item.grid,
            problem=f"is larger than {shape}: {encoder.positions} positions are learned",
            hint="resize the item, or give the encoder more positions",
        )
    return order


def fits_positions(encoder: Encoder, grid: tuple[int, ...]) -> bool:
    """Tells whether an encoder has a position for every token of an item."""
    if not encoder.positions or encoder.interpolates_positions:
        return True
    return all(length <= side for length, side in zip(grid[-2:], position_grid_sides(encoder), strict=True))


def position_grid_sides(encoder: Encoder) -> tuple[int, ...]:
    """Returns the sides of the grid of learned positions: a row for sounds, for images nearly a square.

    A number that is one more than a square is a square and a class token.
    """
    if encoder.modality == "audio":
        return (encoder.positions,)
    side = isqrt(encoder.positions)
    if encoder.positions - side * side > 1:
        side = next(height for height in range(side, 0, -1) if encoder.positions % height == 0)
        return side, encoder.positions // side
    return side, side


def _table_index(encoder: Encoder, coordinates: Tensor) -> Tensor:
    """Returns the row of the learned table of every token: of an image, in raster order."""
    if encoder.modality == "audio":
        return coordinates[:, 0].contiguous()
    return coordinates[:, 0] * position_grid_sides(encoder)[1] + coordinates[:, 1]


def _interpolated_index(
    encoder: Encoder, coordinates: Tensor, grids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the four nearest of the learned positions and their weights: corners of the grids coincide.

    It computes in float32, as transformers.
    """
    side = isqrt(encoder.positions)
    places = coordinates.float() * (side - 1) / (grids - 1).clamp(min=1)
    nearest = places.floor().long()[:, :, None] + torch.arange(2)  # rows, axes, neighbours
    weights = (1 - (places[:, :, None] - nearest).abs()).clamp(min=0)
    nearest = nearest.clamp(max=side - 1)
    index = nearest[:, 0, :, None] * side + nearest[:, 1, None, :]
    products = weights[:, 0, :, None] * weights[:, 1, None, :]
    return index.flatten(1), products.flatten(1).to(dtype)


def _sinusoids(encoder: Encoder, coordinates: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns sinusoidal positions as Whisper's: sines, then cosines."""
    half = encoder.stack.hidden // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / max(1, half - 1))
    angles = coordinates.double() * frequencies
    return torch.cat((angles.sin(), angles.cos()), 1).to(dtype)


def find_llm_row_targets(
    encoder: Encoder, items: Iterable[PlacedItem], capacity: int, first_rows: Mapping[int, int], rows: int
) -> Tensor:
    """Returns the row of an LLM microbatch of `rows` rows that each output row of a bin replaces.

    `first_rows` maps a sample's number to its first row in the microbatch. Output rows of other samples and
    of padding get the target `rows`, past the end.
    """
    target = torch.full((capacity // encoder.projector.merge,), rows, dtype=torch.int64)
    start = 0
    for sample, _, item in items:
        positions = find_row_positions(encoder, item)
        end = start + len(positions)
        if sample in first_rows:
            target[start:end] = first_rows[sample] + positions
        start = end
    return target


def find_row_positions(encoder: Encoder, item: SampleItem) -> Tensor:
    """Returns the position in its sample of each output row of an item."""
    return item.find_positions(compute_encoder_token_order(encoder, item.grid).output_index)


# ---------------------------------------------------------------------------------------- the LLM


def build_llm_inputs(
    llm: Llm,
    samples: Sequence[Sample],
    targets: Sequence[Tensor],
    scale: float,
    *,
    seed: int,
    step: int | None,
    dtype: torch.dtype = torch.float32,
    encoders: Sequence[Encoder] = (),
) -> tuple[Tensor, LlmMicrobatchContext]:
    """Returns token ids and context of packed samples; multimodal rotary positions read `encoders`.

    Without a `step` nothing is dropped.
    """
    positions = torch.cat([_positions(llm, sample, encoders) for sample in samples], 1)
    keys = [
        make_dropout_keys(torch.arange(sample.length), seed=seed, step=step, sample=sample.number)
        for sample in samples
        if step is not None
    ]
    labels = torch.cat([sample.labels for sample in samples])
    attention, rope = llm.stack.attention, llm.stack.attention.rope
    rotary = None
    if llm.rotary:
        per_axis = positions if rope.sections else positions[0]
        interleaved = rope.interleaved_sections
        rotary = build_sequence_rotary_table(
            per_axis, attention.head_dim, rope.theta, dtype, rope.sections, interleaved=interleaved
        )
    return torch.cat([sample.tokens for sample in samples]), LlmMicrobatchContext(
        spans=Spans.of(span for sample in samples for span in sample.spans),
        rotary=rotary,
        positions=positions[0].contiguous() if llm.positions else None,
        labels=torch.where(labels < 0, IGNORE_INDEX, labels),
        scale=scale,
        targets=tuple(targets),
        dropout_keys=torch.cat(keys) if llm.stack.dropout and keys else None,
    )


def _positions(llm: Llm, sample: Sample, encoders: Sequence[Encoder]) -> Tensor:
    """Returns positions (axes, length) that restart in every document; with sections, items have axes."""
    if llm.positions and max(sample.spans) > llm.positions:
        raise UserError(
            field="model.llm.positions",
            value=llm.positions,
            problem=f"is less than the {max(sample.spans)} tokens of sample {sample.number}",
            hint=f"use {max(sample.spans)} or more, or shorter samples",
        )
    rope = llm.stack.attention.rope
    axes = max(1, len(rope.sections))
    for item in (item for items in sample.items.values() for item in items):
        _check_frames(sample, item, between_text=rope.interleaved_sections, axes=axes)
    of_items = _item_positions(sample, encoders, axes) if axes > 1 else {}
    runs: list[Tensor] = []
    start = 0
    for span in sample.spans:
        next_position, end = 0, start + span
        while start < end:
            if start in of_items:
                run = of_items[start]
            else:
                stop = min((offset for offset in of_items if start < offset < end), default=end)
                run = torch.arange(stop - start).expand(axes, -1)
            runs.append(run + next_position)
            start += run.shape[1]
            next_position += int(run[-2:].max()) + 1  # time may pass faster than positions
    return torch.cat(runs, 1)


def _item_positions(sample: Sample, encoders: Sequence[Encoder], axes: int) -> dict[int, Tensor]:
    """Returns positions (axes, tokens) of every item's LLM tokens, by the offset of the first."""
    by_name = {encoder.name: encoder for encoder in encoders}
    positions = {}
    for name, item in ((name, item) for name, items in sample.items.items() for item in items):
        for offset in item.frame_offsets or (item.offset,):
            frame = replace(item, grid=item.grid[-2:]) if item.frame_offsets else item
            positions[offset] = _grid_positions(by_name[name], frame, axes)
    return positions


def _check_frames(sample: Sample, item: SampleItem, *, between_text: bool, axes: int) -> None:
    """Raises unless frames of a video have offsets exactly where the model has text between them."""
    frames = item.grid[0] if len(item.grid) == 3 else 1
    field_name, count = f"frame_offsets of an item of sample {sample.number}", len(item.frame_offsets)
    if count != frames and (item.frame_offsets or (frames > 1 and between_text)):
        problem = f"are {count}, and its grid {item.grid} has {frames} frames with text between them"
        hint = "give the position of each frame's first LLM token"
        raise UserError(field=field_name, value=item.frame_offsets, problem=problem, hint=hint)
    if item.frame_offsets and axes > 1 and not between_text:
        problem = "are given, and frames of a video follow one another in this model"
        raise UserError(
            field=field_name, value=item.frame_offsets, problem=problem, hint="use `offset` alone"
        )


def _grid_positions(encoder: Encoder, item: SampleItem, axes: int) -> Tensor:
    """Returns time, height and width of every token; those of a sound are equal along all axes."""
    grid = compute_encoder_token_order(encoder, item.grid).output_grid
    if len(grid) == 1:
        return torch.arange(grid[0]).expand(axes, -1)
    times, *sides = map(torch.arange, grid)
    if encoder.tokens_per_second is not None:  # in float32, as transformers
        times = (times * (encoder.tokens_per_second * torch.tensor(item.seconds_per_frame))).long()
    return torch.stack(torch.meshgrid(times, *sides, indexing="ij")).flatten(1)
