"""Reads the `workload:` block: percentiles per encoder or a JSONL file of packed sequences."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from optimus.errors import UserError, nearest, show_value
from optimus.job.model import Encoder, Model
from optimus.job.schema import WorkloadBlock
from optimus.job.typed import Places
from optimus.job.workload import PackedSequence, TokenPercentiles, Workload, sequences_from_percentiles
from optimus.job.yaml_nodes import Node, read_text

MAX_LENGTHS_BYTES = 64 << 20
MAX_SEQUENCE_TOKENS = 1 << 24
MAX_SEQUENCES = 10_000_000
MAX_ITEMS = 4096  # of one kind in a sequence
DEFAULT_SEQUENCE_TOKENS = 8192
DEFAULT_SEQUENCES_PER_GPU = 2
DEFAULT_LEAST_SEQUENCES = 256
DEFAULT_SHARES = {"p50": 0.4, "p95": 0.8, "max": 0.9}  # of a sequence, over all encoders
DEFAULT_SOURCE = (
    "assumed, not measured: 8,192 tokens as in Qwen2.5-VL's first two pre-training stages (arXiv 2502.13923),"
    " 2 sequences per GPU and at least 256 a step, so that every GPU has work in every layout,"
    " and a median of 40 % encoder tokens (p95 80 %)"
)


def read_workload(places: Places, node: Node, model: Model, folder: Path) -> tuple[Workload, tuple[str, ...]]:
    """The workload of a job file, and what was assumed because the file leaves it out."""
    token_fields = {f"{encoder.name}_tokens": encoder.name for encoder in model.encoders}
    fields = (*WorkloadBlock.__dataclass_fields__, *token_fields)
    places.note("workload", node)
    places.refuse_unknown(node, "workload", fields)
    block = places.read(WorkloadBlock, node.without(*token_fields), "workload")
    _check_size(places, block)
    percentiles = {}
    for name, encoder in token_fields.items():
        if name in node.entries:
            percentiles[encoder] = places.read(TokenPercentiles, node.entries[name], f"workload.{name}")
            _check_percentiles(places, f"workload.{name}", percentiles[encoder], block.sequence_tokens)
    notes: tuple[str, ...] = ()
    if block.lengths is not None:
        if percentiles:
            stated = next(name for name in token_fields if name in node.entries)
            raise places.error(f"workload.{stated}", "stands beside workload.lengths", "state one of them")
        path = folder / block.lengths
        sequences = read_lengths(path, block.sequence_tokens, [encoder.name for encoder in model.encoders])
        source = block.source or f"{len(sequences):,} rows of {block.lengths}"
    else:
        if not percentiles and model.encoders:
            percentiles, notes = _default_percentiles(model, block.sequence_tokens)
        for name, encoder in token_fields.items():
            if encoder not in percentiles:
                raise places.error(f"workload.{name}", "is missing", "add {p50: ..., p95: ..., max: ...}")
        sequences = sequences_from_percentiles(block.sequence_tokens, percentiles)
        source = block.source or "percentiles stated in the job"
    workload = Workload(
        sequence_tokens=block.sequence_tokens,
        sequences_per_step=block.sequences_per_step,
        sequences=sequences,
        source=source,
    )
    return workload, notes


def default_workload(model: Model, gpus: int) -> tuple[Workload, tuple[str, ...]]:
    """What a job is planned for when nothing is known of its data, and the sentences that say so."""
    percentiles, notes = _default_percentiles(model, DEFAULT_SEQUENCE_TOKENS)
    wanted = max(DEFAULT_LEAST_SEQUENCES, DEFAULT_SEQUENCES_PER_GPU * gpus)
    sequences_per_step = -(-wanted // gpus) * gpus  # a multiple of the GPUs: any dp divides it
    workload = Workload(
        sequence_tokens=DEFAULT_SEQUENCE_TOKENS,
        sequences_per_step=sequences_per_step,
        sequences=sequences_from_percentiles(DEFAULT_SEQUENCE_TOKENS, percentiles),
        source=DEFAULT_SOURCE,
    )
    size = (
        f"workload: {sequences_per_step:,} sequences of {DEFAULT_SEQUENCE_TOKENS:,} tokens a step (assumed)"
    )
    return workload, (size, *notes)


def default_percentiles(encoder_count: int, sequence_tokens: int) -> TokenPercentiles:
    """A median of 40 % of the sequence, shared evenly among the encoders."""
    p50, p95, most = (
        max(1, round(share * sequence_tokens / encoder_count)) for share in DEFAULT_SHARES.values()
    )
    return TokenPercentiles(p50=p50, p95=p95, max=most)


def _default_percentiles(
    model: Model, sequence_tokens: int
) -> tuple[dict[str, TokenPercentiles], tuple[str, ...]]:
    found, notes = {}, []
    for encoder in model.encoders:
        found[encoder.name] = default_percentiles(len(model.encoders), sequence_tokens)
        notes.append(_default_note(encoder, found[encoder.name]))
    return found, tuple(notes)


def _default_note(encoder: Encoder, percentiles: TokenPercentiles) -> str:
    return (
        f"workload: {encoder.name} tokens per sequence p50 {percentiles.p50:,.0f},"
        f" p95 {percentiles.p95:,.0f}, max {percentiles.max:,.0f},"
        f" in items of at most {percentiles.item:,} (assumed)"
    )


def _check_size(places: Places, block: WorkloadBlock) -> None:
    for name, most in (("sequence_tokens", MAX_SEQUENCE_TOKENS), ("sequences_per_step", MAX_SEQUENCES)):
        value = getattr(block, name)
        if value > most:
            raise places.error(f"workload.{name}", f"is more than {most:,}", f"use at most {most:,}", value)


def _check_percentiles(places: Places, field: str, found: TokenPercentiles, sequence_tokens: int) -> None:
    ladder = [("p50", found.p50), ("p95", found.p95), ("max", found.max)]
    for (low_name, low), (high_name, high) in pairwise(ladder):
        if low > high:
            problem = f"is less than {field}.{low_name} = {low:g}"
            raise places.error(f"{field}.{high_name}", problem, f"use {low:g} or more", f"{high:g}")
    if found.max > sequence_tokens:
        problem = f"is more than workload.sequence_tokens = {sequence_tokens}"
        raise places.error(f"{field}.max", problem, f"use {sequence_tokens} or less", f"{found.max:g}")
    if found.max / found.item > MAX_ITEMS:
        problem = f"cuts {field}.max = {found.max:g} into more than {MAX_ITEMS:,} items"
        hint = f"use {math.ceil(found.max / MAX_ITEMS)} or more"
        raise places.error(f"{field}.item", problem, hint, found.item)


# A JSONL file of packed sequences ------------------------------------------------------


def read_lengths(path: Path, sequence_tokens: int, encoders: list[str]) -> tuple[PackedSequence, ...]:
    """One packed sequence per line: {"text": 4710, "vision": [1024, 1610]}."""
    text = read_text(path, limit=MAX_LENGTHS_BYTES)
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_Row(str(path), number, sequence_tokens, encoders).read(line))
    if not rows:
        hint = 'write one packed sequence per line: {"text": 4710, "vision": [1024, 1610]}'
        raise UserError(field=str(path), problem="has no rows", hint=hint)
    return tuple(rows)


class _Row:
    """One line of a lengths file."""

    def __init__(self, file: str, line: int, sequence_tokens: int, encoders: list[str]) -> None:
        self.file, self.line, self.limit, self.encoders = file, line, sequence_tokens, encoders

    def _error(self, field: str, problem: str, hint: str, value: object = None) -> UserError:
        return UserError(field=field, value=value, problem=problem, hint=hint, file=self.file, line=self.line)

    def read(self, line: str) -> PackedSequence:
        example = '{"text": 4710, "vision": [1024, 1610]}'
        try:
            row = json.loads(line, object_pairs_hook=self._pairs)
        except (ValueError, RecursionError):
            raise self._error("row", "is not valid JSON", f"write {example}", line) from None
        if not isinstance(row, dict):
            raise self._error("row", "is not an object", f"write {example}", line)
        for name in row:
            if name not in ("text", *self.encoders):
                known = nearest(name, ("text", *self.encoders))
                raise self._error(show_value(name), "is not a module of the model", known)
        if "text" not in row:
            raise self._error("text", "is missing", "add the number of text tokens")
        sequence = PackedSequence(
            text=self._count("text", row["text"], least=0),
            items=tuple((name, self._lengths(name, row[name])) for name in self.encoders if name in row),
        )
        if sequence.tokens > self.limit:
            problem = f"is more than workload.sequence_tokens = {self.limit}"
            hint = f"cut the row or use sequence_tokens: {sequence.tokens}"
            raise self._error("tokens of the row", problem, hint, sequence.tokens)
        return sequence

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise self._error(show_value(twice), "is given twice", "keep one")
        return found

    def _lengths(self, name: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, list):
            hint = f"write {name}: [1024, 1610], or [] for none"
            raise self._error(name, "is not a list of token counts", hint, value)
        return tuple(self._count(f"{name}[{i}]", item, least=1) for i, item in enumerate(value))

    def _count(self, field: str, value: object, *, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            problem = f"is not a whole number, {least} or more"
            raise self._error(field, problem, f"write the number of LLM tokens, {least} or more", value)
        return value
