"""Describes the data of a step: number and lengths of sequences, and the items in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist

from optimus.job.typed import Amount, Count, Share

DRAWS = 256  # sequences that stand for a distribution given by percentiles
DEFAULT_ITEM_TOKENS = 1024  # LLM tokens of one image or clip when only totals are given
P95_SIGMAS = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Tokens a module processes, and the sum of squared attention spans among them."""

    tokens: float
    squares: float

    def times(self, factor: float) -> Load:
        return Load(tokens=self.tokens * factor, squares=self.squares * factor)

    @property
    def span(self) -> float:
        """Token-weighted mean length of what attends to itself."""
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
    """`sequences` is a distribution: a step draws `sequences_per_step` of them."""

    sequence_tokens: int
    sequences_per_step: int
    sequences: tuple[PackedSequence, ...]
    source: str = field(default="", compare=False)

    def llm_load(self) -> Load:
        """Load of one sequence, packed to its full length, with causal attention over all of it."""
        return Load(tokens=self.sequence_tokens, squares=float(self.sequence_tokens) ** 2)

    def encoder_load(self, encoder: str, merge: int) -> Load:
        """Load of the mean sequence in encoder tokens (`merge` of them per LLM token)."""
        lengths = [n * merge for sequence in self.sequences for n in sequence.lengths(encoder)]
        count = len(self.sequences)
        return Load(tokens=sum(lengths) / count, squares=sum(n * n for n in lengths) / count)

    def bin_tokens(self, encoder: str, merge: int, sequences: int, pieces: int) -> int:
        """Encoder tokens for which a piece of a microbatch needs room, whatever sequences it gets.

        Whole items are dealt to the piece that has least: none gets more than its share and one item.
        """
        totals = [sum(sequence.lengths(encoder)) for sequence in self.sequences]
        largest = max((n for sequence in self.sequences for n in sequence.lengths(encoder)), default=0)
        whole = sequences * max(totals)
        if pieces == 1:
            return whole * merge
        if len(set(self.sequences)) == 1:
            return max(deal(list(self.sequences[0].lengths(encoder)) * sequences, pieces)[1]) * merge
        return min(whole, -(-whole // pieces) + largest) * merge

    def share_of_tokens(self, encoder: str) -> float:
        """Mean share of a sequence's LLM tokens that come from this encoder."""
        total = sum(sum(sequence.lengths(encoder)) for sequence in self.sequences)
        return total / len(self.sequences) / self.sequence_tokens


def deal(sizes: list[int], bins: int) -> tuple[list[int], list[int]]:
    """The bin of every item, each dealt in order to the one that has least, and what every bin gets."""
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
        """`DRAWS` evenly spaced quantiles, text-only sequences first."""
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
        """A sequence's total as items of at most `item` tokens, as even as can be."""
        if total == 0:
            return ()
        count = math.ceil(total / self.item)
        return tuple(total // count + (1 if index < total % count else 0) for index in range(count))


def sequences_from_percentiles(
    sequence_tokens: int, by_encoder: dict[str, TokenPercentiles]
) -> tuple[PackedSequence, ...]:
    """Packed sequences for percentiles of every encoder.

    Quantiles of different encoders are paired with a fixed stride, so that a sequence
    long in one kind of item is not always long in all. What does not fit is cut.
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
