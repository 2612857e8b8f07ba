"""What segments read beside their state: spans, positions, labels and dropout keys of one microbatch.

Everything is made on the host, once per microbatch, from samples; nothing here is read back from a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import torch
from torch import Tensor

from optimus.errors import UserError
from optimus.job.model import Encoder, Llm
from optimus.models.dropout import row_keys
from optimus.models.kernels import NUMERICS, Numerics
from optimus.models.rotary import Rotary, grid_table, sequence_table
from optimus.models.sample import IGNORED, Item, Placed, Sample
from optimus.models.token_order import Arrangement, arrange

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class SeamRows:
    """Of one LLM microbatch where tensor parallelism divides it: which encoder rows of this rank go where.

    Rows that arrive come from all ranks in order, and replace those of this rank's run of the sequence.
    """

    pieces: tuple[int, ...]  # rows of every piece that this rank holds, one after another
    leaving: Tensor  # int64: which of them go, by the rank they go to
    sent: tuple[int, ...]  # how many go to every rank
    received: tuple[int, ...]  # and how many come
    targets: Tensor  # int64: the row that each replaces

    def map(self, change: Change) -> SeamRows:
        return replace(self, leaving=change(self.leaving), targets=change(self.targets))


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderContext:
    """Of one bin of an encoder."""

    spans: tuple[int, ...]
    window_spans: tuple[int, ...]
    rotary: Rotary | None  # of images without learned positions
    positions: Tensor | None  # int64 (capacity,), into the learned table
    waves: Tensor | None  # (capacity, hidden), of sounds without learned positions
    keys: Tensor | None  # int64 (capacity,), of dropout

    def of(self, rows: slice) -> EncoderContext:
        """Where a rank holds these rows between products: heads see all of them."""
        return replace(
            self,
            positions=_cut(self.positions, rows),
            waves=_cut(self.waves, rows),
            keys=_cut(self.keys, rows),
        )

    def map(self, change: Change) -> EncoderContext:
        """Each of its tensors changed, as when they go to a device."""
        return replace(
            self,
            rotary=None if self.rotary is None else (change(self.rotary[0]), change(self.rotary[1])),
            positions=None if self.positions is None else change(self.positions),
            waves=None if self.waves is None else change(self.waves),
            keys=None if self.keys is None else change(self.keys),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LlmContext:
    """Of one microbatch of the LLM."""

    spans: tuple[int, ...]
    rotary: Rotary | None
    positions: Tensor | None  # int64 (n,), into the learned table
    labels: Tensor  # int64 (n,)
    scale: float  # of the summed loss
    targets: tuple[Tensor, ...]  # of every encoder's rows: the row they replace; n for nowhere
    keys: Tensor | None  # int64 (n,), of dropout
    seam: SeamRows | None = None  # instead of targets, where the sequence is divided

    def of(self, rows: slice, seam: SeamRows | None) -> LlmContext:
        """Where a rank holds these rows between products: heads and labels are of all of them."""
        positions, keys = _cut(self.positions, rows), _cut(self.keys, rows)
        return replace(self, positions=positions, keys=keys, targets=(), seam=seam)

    def map(self, change: Change) -> LlmContext:
        """Each of its tensors changed, as when they go to a device."""
        return replace(
            self,
            rotary=None if self.rotary is None else (change(self.rotary[0]), change(self.rotary[1])),
            positions=None if self.positions is None else change(self.positions),
            labels=change(self.labels),
            targets=tuple(map(change, self.targets)),
            keys=None if self.keys is None else change(self.keys),
            seam=None if self.seam is None else self.seam.map(change),
        )


def _cut(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]


# ---------------------------------------------------------------------------------------- encoders


def encoder_inputs(
    encoder: Encoder,
    items: Sequence[Placed],
    capacity: int,
    *,
    seed: int,
    step: int,
    dtype: torch.dtype = torch.float32,
    numerics: Numerics = NUMERICS,
) -> tuple[Tensor, EncoderContext]:
    """A bin: items one after another, then padding up to `capacity` tokens, a span of its own."""
    inputs = torch.zeros(capacity, encoder.patch_inputs, dtype=dtype)
    keys = torch.zeros(capacity, dtype=torch.int64)
    sound = encoder.modality == "audio"
    coordinates = torch.zeros(capacity, 1 if sound else 2, dtype=torch.int64)
    spans: list[int] = []
    window_spans: list[int] = []
    start = 0
    for sample, number, item in items:
        arrangement = _arranged(encoder, item)
        end = start + item.tokens
        assert end <= capacity, f"items of at least {end} tokens in a bin of {capacity}"
        inputs[start:end] = item.inputs[arrangement.order]
        coordinates[start:end] = arrangement.coordinates
        keys[start:end] = row_keys(arrangement.order, seed=seed, step=step, sample=sample, item=number)
        spans += arrangement.spans
        window_spans += arrangement.window_spans
        start = end
    padding = (capacity - start,) if capacity > start else ()
    learned, head_dim = encoder.positions > 0, encoder.stack.attention.head_dim
    return inputs, EncoderContext(
        spans=(*spans, *padding),
        window_spans=(*window_spans, *padding),
        rotary=None if learned or sound else grid_table(coordinates, head_dim, numerics.rope_theta, dtype),
        positions=_learned(encoder, coordinates) if learned else None,
        waves=_waves(encoder, coordinates, dtype) if sound and not learned else None,
        keys=keys if encoder.stack.dropout else None,
    )


def _arranged(encoder: Encoder, item: Item) -> Arrangement:
    expected = (item.tokens, encoder.patch_inputs)
    if tuple(item.inputs.shape) != expected:
        raise UserError(
            field=f"inputs of an item of {encoder.name}",
            value=tuple(item.inputs.shape),
            problem=f"do not have the shape {expected} of its grid {item.grid} and patch_inputs",
            hint="give one row of patch_inputs numbers per token of the grid",
        )
    arrangement = arrange(encoder, item.grid)
    if not encoder.positions:
        return arrangement
    sides = table_sides(encoder)
    if any(length > side for length, side in zip(item.grid[-2:], sides, strict=True)):
        shape = " x ".join(map(str, sides))
        raise UserError(
            field=f"grid of an item of {encoder.name}",
            value=item.grid,
            problem=f"is larger than {shape}: {encoder.positions} positions are learned",
            hint="resize the item, or give the encoder more positions",
        )
    return arrangement


def table_sides(encoder: Encoder) -> tuple[int, ...]:
    """How learned positions stand: of sounds in a row; of images in a square, or as near to one as divides.

    One more than a square is a square with a token of its own.
    """
    if encoder.modality == "audio":
        return (encoder.positions,)
    side = isqrt(encoder.positions)
    if encoder.positions - side * side > 1:
        side = next(height for height in range(side, 0, -1) if encoder.positions % height == 0)
        return side, encoder.positions // side
    return side, side


def _learned(encoder: Encoder, coordinates: Tensor) -> Tensor:
    """Row of the table: of an image, height times the table's width plus width."""
    if encoder.modality == "audio":
        return coordinates[:, 0].contiguous()
    return coordinates[:, 0] * table_sides(encoder)[1] + coordinates[:, 1]


def _waves(encoder: Encoder, coordinates: Tensor, dtype: torch.dtype) -> Tensor:
    """Sinusoidal positions as Whisper's: sines, then cosines."""
    half = encoder.stack.hidden // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / max(1, half - 1))
    angles = coordinates.double() * frequencies
    return torch.cat((angles.sin(), angles.cos()), 1).to(dtype)


def bin_targets(
    encoder: Encoder, items: Iterable[Placed], capacity: int, first_rows: Mapping[int, int], rows: int
) -> Tensor:
    """Where the output rows of a bin go in an LLM microbatch of `rows` rows; `rows` for nowhere.

    `first_rows` gives the first row of every sample of the microbatch, by the sample's number.
    """
    target = torch.full((capacity // encoder.projector.merge,), rows, dtype=torch.int64)
    start = 0
    for sample, _, item in items:
        tokens = arrange(encoder, item.grid).output_tokens
        end = start + len(tokens)
        if sample in first_rows:
            target[start:end] = first_rows[sample] + item.offset + tokens
        start = end
    return target


# ---------------------------------------------------------------------------------------- the LLM


def llm_inputs(
    llm: Llm,
    samples: Sequence[Sample],
    targets: Sequence[Tensor],
    scale: float,
    *,
    seed: int,
    step: int,
    dtype: torch.dtype = torch.float32,
    numerics: Numerics = NUMERICS,
    encoders: Sequence[Encoder] = (),
) -> tuple[Tensor, LlmContext]:
    """Token ids and context of samples one after another; multimodal rotary asks `encoders` for grids."""
    positions = torch.cat([_positions(llm, sample, numerics, encoders) for sample in samples], 1)
    keys = [row_keys(torch.arange(each.length), seed=seed, step=step, sample=each.number) for each in samples]
    labels = torch.cat([sample.labels for sample in samples])
    attention = llm.stack.attention
    rotary = None
    if not llm.positions:
        sections = numerics.rope_sections
        along = positions if sections else positions[0]
        rotary = sequence_table(along, attention.head_dim, numerics.rope_theta, dtype, sections)
    return torch.cat([sample.tokens for sample in samples]), LlmContext(
        spans=tuple(span for sample in samples for span in sample.spans),
        rotary=rotary,
        positions=positions[0].contiguous() if llm.positions else None,
        labels=torch.where(labels < 0, IGNORED, labels),
        scale=scale,
        targets=tuple(targets),
        keys=torch.cat(keys) if llm.stack.dropout else None,
    )


def _positions(llm: Llm, sample: Sample, numerics: Numerics, encoders: Sequence[Encoder]) -> Tensor:
    """(axes, length): counted in every document anew; with sections, items count along their own axes."""
    if llm.positions and max(sample.spans) > llm.positions:
        raise UserError(
            field="model.llm.positions",
            value=llm.positions,
            problem=f"is less than the {max(sample.spans)} tokens of sample {sample.number}",
            hint=f"use {max(sample.spans)} or more, or shorter samples",
        )
    axes = max(1, len(numerics.rope_sections))
    grids = _output_grids(sample, encoders) if axes > 1 else {}
    parts: list[Tensor] = []
    at = 0
    for span in sample.spans:
        next_position, end = 0, at + span
        while at < end:
            if at in grids:
                part = _grid_positions(grids[at], axes) + next_position
            else:
                stop = min((start for start in grids if at < start < end), default=end)
                part = torch.arange(next_position, next_position + stop - at).expand(axes, -1)
            parts.append(part)
            at += part.shape[1]
            next_position = int(part.max()) + 1
    return torch.cat(parts, 1)


def _output_grids(sample: Sample, encoders: Sequence[Encoder]) -> dict[int, tuple[int, ...]]:
    """LLM tokens of every item, by the place of the first."""
    by_name = {encoder.name: encoder for encoder in encoders}
    return {
        item.offset: arrange(by_name[name], item.grid).output_grid
        for name, items in sample.items.items()
        for item in items
    }


def _grid_positions(grid: tuple[int, ...], axes: int) -> Tensor:
    """Time, height and width of every token; a sound counts alike along all axes."""
    if len(grid) == 1:
        return torch.arange(grid[0]).expand(axes, -1)
    return torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij")).flatten(1)
