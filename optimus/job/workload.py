"""Describes the data of a step, sequences and the items in them, and reads it from `workload:`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, fmean, pstdev

from optimus.errors import UserError
from optimus.job.data_source import DataSource
from optimus.job.model import Encoder, Model
from optimus.job.nodes import DocumentNode, is_file, parse_json, read_text
from optimus.job.typed import Amount, Count, Share, Whole, read_typed, refuse_unknown_keys

DRAWS = 256  # sequences that stand for a distribution given by percentiles
DEFAULT_ITEM_TOKENS = 1024  # LLM tokens of one image or clip when only totals are given
P95_SIGMAS = NormalDist().inv_cdf(0.95)
MAX_LENGTHS_BYTES = 64 << 20
MAX_SEQUENCE_TOKENS = 1 << 24
MAX_SEQUENCES = 10_000_000
CAPACITY_SIGMAS = 3.0  # by which the tokens of a step may exceed their mean
MAX_ITEMS = 4096  # of one kind in a sequence
DEFAULT_SEQUENCE_TOKENS = 8192
DEFAULT_SEQUENCES_PER_GPU = 2
DEFAULT_LEAST_SEQUENCES = 256
LEAVE_OUT = "leave it out: lengths are those of the data"
DEFAULT_SHARES = {"p50": 0.4, "p95": 0.8, "max": 0.9}  # of a sequence, over all encoders
DEFAULT_SOURCE = (
    "assumed, not measured: 8,192 tokens as in Qwen2.5-VL's first two pre-training stages (arXiv 2502.13923),"
    " 2 sequences per GPU and at least 256 a step, so that every GPU has work in every layout,"
    " and a median of 40 % encoder tokens (p95 80 %)"
)


@dataclass(frozen=True, kw_only=True)
class TokenLoad:
    """Tokens that a module processes, and the sum of squared attention spans among them."""

    tokens: float
    squares: float

    def times(self, factor: float) -> TokenLoad:
        return TokenLoad(tokens=self.tokens * factor, squares=self.squares * factor)

    def merged(self, count: int) -> TokenLoad:
        """Returns the load of later layers, where `count` tokens of an attention span are one."""
        return TokenLoad(tokens=self.tokens / count, squares=self.squares / count**2)

    @property
    def span(self) -> float:
        """Token-weighted mean length of an attention span."""
        return self.squares / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, kw_only=True)
class PackedSequence:
    """A packed sequence: text tokens, and the LLM tokens of every image, video or sound in it."""

    text: int
    items: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def lengths(self, encoder: str) -> tuple[int, ...]:
        return next((lengths for name, lengths in self.items if name == encoder), ())

    @property
    def tokens(self) -> int:
        return self.text + sum(sum(lengths) for _, lengths in self.items)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Data of a step, which draws `sequences_per_step` from the distribution `sequences`."""

    sequence_tokens: int
    sequences_per_step: int
    sequences: tuple[PackedSequence, ...]
    source: str = field(default="", compare=False)

    def llm_load(self) -> TokenLoad:
        """Returns the load of one sequence, packed to its full length, with causal attention over all."""
        return TokenLoad(tokens=self.sequence_tokens, squares=float(self.sequence_tokens) ** 2)

    def encoder_load(self, encoder: str, merge: int) -> TokenLoad:
        """Returns the load of the mean sequence in encoder tokens (`merge` of them per LLM token)."""
        lengths = [n * merge for sequence in self.sequences for n in sequence.lengths(encoder)]
        count = len(self.sequences)
        return TokenLoad(tokens=sum(lengths) / count, squares=sum(n * n for n in lengths) / count)

    def step_capacity(self, encoder: str, merge: int) -> int:
        """Returns the encoder tokens that a step has room for: the mean and three standard deviations.

        Samples beyond it are carried to the next step.
        """
        totals = [sum(sequence.lengths(encoder)) for sequence in self.sequences]
        count, largest = self.sequences_per_step, max(totals)
        usual = count * fmean(totals) + CAPACITY_SIGMAS * math.sqrt(count) * pstdev(totals)
        return min(max(math.ceil(usual), largest), count * largest) * merge

    def bin_tokens(self, encoder: str, merge: int, *, groups: int, columns: int, bins: int) -> int:
        """Returns the encoder tokens that one of the `bins` of a column must hold in a full step.

        Sequences are dealt to groups of replicas and to columns, items to bins: a part gets no more than an
        even share and its largest, a bin up to three items, since it makes up for others of its pipeline.
        """
        sequence = max(sum(sequence.lengths(encoder)) for sequence in self.sequences) * merge
        item = max((n for sequence in self.sequences for n in sequence.lengths(encoder)), default=0) * merge
        group = self.step_capacity(encoder, merge) / groups + sequence * (groups > 1)
        column = group / columns + sequence * (columns > 1)
        return math.ceil(column / bins) + 3 * item

    def share_of_tokens(self, encoder: str) -> float:
        """Returns the mean share of a sequence's LLM tokens that come from this encoder."""
        total = sum(sum(sequence.lengths(encoder)) for sequence in self.sequences)
        return total / len(self.sequences) / self.sequence_tokens


def assign_to_emptiest_bins(sizes: list[int], bins: int) -> tuple[list[int], list[int]]:
    """Assigns items in order, each to the emptiest bin; returns every item's bin and every bin's total."""
    filled, places = [0] * bins, []
    for size in sizes:
        place = filled.index(min(filled))
        places.append(place)
        filled[place] += size
    return places, filled


@dataclass(frozen=True, kw_only=True)
class TokenPercentiles:
    """LLM tokens per sequence of one encoder, log-normal through p50 and p95, cut at `max`."""

    p50: Amount
    p95: Amount
    max: Amount
    text_only_share: Share = 0.0
    item: Count = DEFAULT_ITEM_TOKENS

    def draws(self) -> list[int]:
        """Returns `DRAWS` evenly spaced quantiles, text-only sequences first."""
        text_only = round(DRAWS * self.text_only_share)
        sigma = math.log(self.p95 / self.p50) / P95_SIGMAS
        spread = NormalDist(math.log(self.p50), sigma) if sigma > 0 else None
        totals = [0] * text_only
        for index in range(DRAWS - text_only):
            quantile = (index + 0.5) / (DRAWS - text_only)
            value = math.exp(spread.inv_cdf(quantile)) if spread else self.p50
            totals.append(round(min(value, self.max)))
        return totals

    def split(self, total: int) -> tuple[int, ...]:
        """Splits a sequence's total into items of at most `item` tokens, as evenly as possible."""
        if total == 0:
            return ()
        count = math.ceil(total / self.item)
        return tuple(total // count + (1 if index < total % count else 0) for index in range(count))


def build_sequences_from_percentiles(
    sequence_tokens: int, by_encoder: dict[str, TokenPercentiles]
) -> tuple[PackedSequence, ...]:
    """Builds packed sequences for percentiles of every encoder.

    Quantiles of different encoders are paired with a fixed stride, so that a sequence that is long in one
    kind of item is not always long in all. Tokens that do not fit are cut.
    """
    sequences = []
    drawn = {name: percentiles.draws() for name, percentiles in by_encoder.items()}
    for index in range(DRAWS):
        room, items = sequence_tokens, []
        for position, (name, percentiles) in enumerate(by_encoder.items()):
            total = min(room, drawn[name][(index * (1 + 2 * 37 * position)) % DRAWS])
            room -= total
            items.append((name, percentiles.split(total)))
        sequences.append(PackedSequence(text=room, items=tuple(items)))
    return tuple(sequences)


# ---------------------------------------------------------------------------- `workload:` of a job file


@dataclass(frozen=True, kw_only=True)
class WorkloadBlock:
    """`workload:` of a job file without its `<encoder>_tokens` entries."""

    sequence_tokens: Count
    sequences_per_step: Count
    lengths: str | None = None
    source: str = ""


def read_workload(
    node: DocumentNode, model: Model, folder: Path, data: DataSource | None = None
) -> tuple[Workload, tuple[str, ...]]:
    """Reads the workload of a job file; also returns notes on what was assumed.

    With `data`, lengths are those of its index, and others are refused.
    """
    token_fields = {f"{encoder.name}_tokens": encoder.name for encoder in model.encoders}
    refuse_unknown_keys(node, (*WorkloadBlock.__dataclass_fields__, *token_fields))
    block = read_typed(WorkloadBlock, node.without(*token_fields))
    _check_size(node, block)
    percentiles = {}
    for name, encoder in token_fields.items():
        if name in node:
            percentiles[encoder] = read_typed(TokenPercentiles, node[name])
            _check_percentiles(node[name], percentiles[encoder], block.sequence_tokens)
    notes: tuple[str, ...] = ()
    path = None if block.lengths is None else folder / block.lengths
    if percentiles and (path is not None or data is not None):
        stated = next(name for name in token_fields if name in node)
        if data is not None:
            raise node[stated].error("is given together with data, whose lengths are counted", LEAVE_OUT)
        raise node[stated].error("is given together with workload.lengths", "state one of them")
    if data is not None:
        path = _find_data_lengths(node, path, data)
    if path is not None:
        sequences = _read_lengths(path, block.sequence_tokens, [encoder.name for encoder in model.encoders])
        source = block.source or f"{len(sequences):,} rows of {block.lengths or path.name}"
    else:
        if not percentiles and model.encoders:
            percentiles, notes = _assume_percentiles(model, block.sequence_tokens)
        for name, encoder in token_fields.items():
            if encoder not in percentiles:
                raise node[name].error("is missing", "add {p50: ..., p95: ..., max: ...}")
        sequences = build_sequences_from_percentiles(block.sequence_tokens, percentiles)
        source = block.source or "percentiles stated in the job"
    workload = Workload(
        sequence_tokens=block.sequence_tokens,
        sequences_per_step=block.sequences_per_step,
        sequences=sequences,
        source=source,
    )
    return workload, notes


def _find_data_lengths(node: DocumentNode, stated: Path | None, data: DataSource) -> Path:
    """Returns the file with the lengths of a job's data; raises if it is missing or others are stated."""
    if stated is not None and stated.resolve() != data.lengths.resolve():
        raise node["lengths"].error(f"is not {data.lengths}, the lengths of data", LEAVE_OUT)
    if not is_file(data.lengths):
        raise node.root["data"].error("has no lengths yet", f"run {data.command}", shown=False)
    packed = data.read_packed_tokens()
    if packed is not None and packed != data.sequence_tokens:
        length = f"{packed} tokens" if packed else "no length"
        problem = f"is another length than that of {data.index}, which packs samples to {length}"
        raise node["sequence_tokens"].error(problem, f"run {data.command}")
    return data.lengths


def assume_workload(model: Model, gpus: int) -> tuple[Workload, tuple[str, ...]]:
    """Returns the assumed workload of a model without data, and notes that say so."""
    percentiles, notes = _assume_percentiles(model, DEFAULT_SEQUENCE_TOKENS)
    wanted = max(DEFAULT_LEAST_SEQUENCES, DEFAULT_SEQUENCES_PER_GPU * gpus)
    sequences_per_step = -(-wanted // gpus) * gpus  # a multiple of the GPUs: any dp divides it
    workload = Workload(
        sequence_tokens=DEFAULT_SEQUENCE_TOKENS,
        sequences_per_step=sequences_per_step,
        sequences=build_sequences_from_percentiles(DEFAULT_SEQUENCE_TOKENS, percentiles),
        source=DEFAULT_SOURCE,
    )
    size = (
        f"workload: {sequences_per_step:,} sequences of {DEFAULT_SEQUENCE_TOKENS:,} tokens a step (assumed)"
    )
    return workload, (size, *notes)


def assume_percentiles(
    encoder_count: int, sequence_tokens: int, tokens_per_item: int = 0
) -> TokenPercentiles:
    """Returns a median of 40 % of the sequence, shared evenly among the encoders."""
    p50, p95, most = (
        max(1, round(share * sequence_tokens / encoder_count)) for share in DEFAULT_SHARES.values()
    )
    return TokenPercentiles(p50=p50, p95=p95, max=most, item=tokens_per_item or DEFAULT_ITEM_TOKENS)


def _assume_percentiles(
    model: Model, sequence_tokens: int
) -> tuple[dict[str, TokenPercentiles], tuple[str, ...]]:
    by_encoder, notes = {}, []
    for encoder in model.encoders:
        count, tokens_per_item = len(model.encoders), encoder.tokens_per_item
        by_encoder[encoder.name] = assume_percentiles(count, sequence_tokens, tokens_per_item)
        notes.append(_default_note(encoder, by_encoder[encoder.name]))
    return by_encoder, tuple(notes)


def _default_note(encoder: Encoder, percentiles: TokenPercentiles) -> str:
    return (
        f"workload: {encoder.name} tokens per sequence p50 {percentiles.p50:,.0f},"
        f" p95 {percentiles.p95:,.0f}, max {percentiles.max:,.0f},"
        f" in items of at most {percentiles.item:,} (assumed)"
    )


def _check_size(node: DocumentNode, block: WorkloadBlock) -> None:
    for name, most in (("sequence_tokens", MAX_SEQUENCE_TOKENS), ("sequences_per_step", MAX_SEQUENCES)):
        if getattr(block, name) > most:
            raise node[name].error(f"is more than {most:,}", f"use at most {most:,}")


def _check_percentiles(node: DocumentNode, percentiles: TokenPercentiles, sequence_tokens: int) -> None:
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


# ---------------------------------------------------------------------------- JSONL of packed sequences


def read_sequence_lengths(path: Path) -> list[PackedSequence]:
    """Reads the tokens of every sequence and of its items, of any encoders, without a model."""
    sequences = []
    for row in _read_rows(path):
        entries = row.entries()
        text = read_typed(Whole, entries.pop("text")) if "text" in entries else 0
        items = tuple((name, read_typed(tuple[Count, ...], node)) for name, node in entries.items())
        sequences.append(PackedSequence(text=text, items=items))
    return sequences


def _read_lengths(path: Path, sequence_tokens: int, encoders: list[str]) -> tuple[PackedSequence, ...]:
    return tuple(_read_sequence(row, sequence_tokens, encoders) for row in _read_rows(path))


def _read_rows(path: Path) -> Iterator[DocumentNode]:
    """Yields one packed sequence per line: {"text": 4710, "vision": [1024, 1610]}."""
    hint = 'write one packed sequence per line: {"text": 4710, "vision": [1024, 1610]}'
    is_empty = True
    for number, line in enumerate(read_text(path, limit=MAX_LENGTHS_BYTES).split("\n"), start=1):
        if line.strip():
            is_empty = False
            yield parse_json(line, file=str(path), line=number, name="tokens of the row", hint=hint)
    if is_empty:
        raise UserError(field=str(path), problem="has no rows", hint=hint)


def _read_sequence(row: DocumentNode, sequence_tokens: int, encoders: list[str]) -> PackedSequence:
    refuse_unknown_keys(row, ("text", *encoders), "is not a module of the model")
    if "text" not in row:
        raise row["text"].error("is missing", "add the number of text tokens")
    items = tuple((name, read_typed(tuple[Count, ...], row[name])) for name in encoders if name in row)
    sequence = PackedSequence(text=read_typed(Whole, row["text"]), items=items)
    if sequence.tokens > sequence_tokens:
        problem = f"is more than workload.sequence_tokens = {sequence_tokens}"
        hint = f"cut the row or use sequence_tokens: {sequence.tokens}"
        raise row.error(problem, hint, sequence.tokens)
    return sequence
