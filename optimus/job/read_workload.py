"""Reads the `workload:` block: percentiles per encoder or a JSONL file of packed sequences."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

from optimus.errors import UserError
from optimus.job.model import Encoder, Model
from optimus.job.nodes import Node, parse_json, read_text
from optimus.job.schema import WorkloadBlock
from optimus.job.typed import Count, Whole, read, refuse_unknown
from optimus.job.workload import PackedSequence, TokenPercentiles, Workload, sequences_from_percentiles

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


def read_workload(node: Node, model: Model, folder: Path) -> tuple[Workload, tuple[str, ...]]:
    """The workload of a job file, and what was assumed because the file leaves it out."""
    token_fields = {f"{encoder.name}_tokens": encoder.name for encoder in model.encoders}
    refuse_unknown(node, (*WorkloadBlock.__dataclass_fields__, *token_fields))
    block = read(WorkloadBlock, node.without(*token_fields))
    _check_size(node, block)
    percentiles = {}
    for name, encoder in token_fields.items():
        if name in node:
            percentiles[encoder] = read(TokenPercentiles, node[name])
            _check_percentiles(node[name], percentiles[encoder], block.sequence_tokens)
    notes: tuple[str, ...] = ()
    if block.lengths is not None:
        if percentiles:
            stated = next(name for name in token_fields if name in node)
            raise node[stated].error("stands beside workload.lengths", "state one of them")
        path = folder / block.lengths
        sequences = read_lengths(path, block.sequence_tokens, [encoder.name for encoder in model.encoders])
        source = block.source or f"{len(sequences):,} rows of {block.lengths}"
    else:
        if not percentiles and model.encoders:
            percentiles, notes = _default_percentiles(model, block.sequence_tokens)
        for name, encoder in token_fields.items():
            if encoder not in percentiles:
                raise node[name].error("is missing", "add {p50: ..., p95: ..., max: ...}")
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
    """Returns the assumed workload of a model without data, and notes that say so."""
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
    by_encoder, notes = {}, []
    for encoder in model.encoders:
        by_encoder[encoder.name] = default_percentiles(len(model.encoders), sequence_tokens)
        notes.append(_default_note(encoder, by_encoder[encoder.name]))
    return by_encoder, tuple(notes)


def _default_note(encoder: Encoder, percentiles: TokenPercentiles) -> str:
    return (
        f"workload: {encoder.name} tokens per sequence p50 {percentiles.p50:,.0f},"
        f" p95 {percentiles.p95:,.0f}, max {percentiles.max:,.0f},"
        f" in items of at most {percentiles.item:,} (assumed)"
    )


def _check_size(node: Node, block: WorkloadBlock) -> None:
    for name, most in (("sequence_tokens", MAX_SEQUENCE_TOKENS), ("sequences_per_step", MAX_SEQUENCES)):
        if getattr(block, name) > most:
            raise node[name].error(f"is more than {most:,}", f"use at most {most:,}")


def _check_percentiles(node: Node, percentiles: TokenPercentiles, sequence_tokens: int) -> None:
    ladder = [("p50", percentiles.p50), ("p95", percentiles.p95), ("max", percentiles.max)]
    for (low_name, low), (high_name, high) in pairwise(ladder):
        if low > high:
            problem = f"is less than {node[low_name].field} = {low:g}"
            raise node[high_name].error(problem, f"use {low:g} or more")
    if percentiles.max > sequence_tokens:
        problem = f"is more than workload.sequence_tokens = {sequence_tokens}"
        raise node["max"].error(problem, f"use {sequence_tokens} or less")
    if percentiles.max / percentiles.item > MAX_ITEMS:
        problem = f"cuts {node['max'].field} = {percentiles.max:g} into more than {MAX_ITEMS:,} items"
        hint = f"use {math.ceil(percentiles.max / MAX_ITEMS)} or more"
        raise node["item"].error(problem, hint, percentiles.item)


# A JSONL file of packed sequences ------------------------------------------------------


def read_lengths(path: Path, sequence_tokens: int, encoders: list[str]) -> tuple[PackedSequence, ...]:
    """Reads one packed sequence per line: {"text": 4710, "vision": [1024, 1610]}."""
    hint = 'write one packed sequence per line: {"text": 4710, "vision": [1024, 1610]}'
    sequences = []
    for number, line in enumerate(read_text(path, limit=MAX_LENGTHS_BYTES).split("\n"), start=1):
        if line.strip():
            row = parse_json(line, file=str(path), line=number, name="tokens of the row", hint=hint)
            sequences.append(_read_sequence(row, sequence_tokens, encoders))
    if not sequences:
        raise UserError(field=str(path), problem="has no rows", hint=hint)
    return tuple(sequences)


def _read_sequence(row: Node, sequence_tokens: int, encoders: list[str]) -> PackedSequence:
    refuse_unknown(row, ("text", *encoders), "is not a module of the model")
    if "text" not in row:
        raise row["text"].error("is missing", "add the number of text tokens")
    items = tuple((name, read(tuple[Count, ...], row[name])) for name in encoders if name in row)
    sequence = PackedSequence(text=read(Whole, row["text"]), items=items)
    if sequence.tokens > sequence_tokens:
        problem = f"is more than workload.sequence_tokens = {sequence_tokens}"
        hint = f"cut the row or use sequence_tokens: {sequence.tokens}"
        raise row.error(problem, hint, sequence.tokens)
    return sequence
