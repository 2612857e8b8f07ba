"""Packs documents into sequences of a fixed length: first-fit decreasing inside a window of documents.

A window keeps packing streamable and the order of samples near that of the data set: a sequence holds only
documents of one window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

WINDOW = 1024  # documents that are packed together


def pack_documents(
    lengths: Iterable[int], sequence_tokens: int, *, window: int = WINDOW
) -> Iterator[tuple[int, ...]]:
    """Yields the numbers of the documents of every sequence; each is in one sequence, in ascending order.

    A document must not be longer than `sequence_tokens`.
    """
    documents = enumerate(lengths)
    while batch := list(islice(documents, window)):
        yield from _first_fit_decreasing(batch, sequence_tokens)


def _first_fit_decreasing(documents: Sequence[tuple[int, int]], capacity: int) -> list[tuple[int, ...]]:
    """Packs (number, length) pairs; sequences come in the order of their first document."""
    sequences: list[list[int]] = []
    room: list[int] = []
    for number, length in sorted(documents, key=lambda pair: (-pair[1], pair[0])):
        assert 0 <= length <= capacity, f"document {number} has {length} tokens, a sequence {capacity}"
        place = next((place for place, free in enumerate(room) if free >= length), len(room))
        if place == len(room):
            sequences.append([])
            room.append(capacity)
        sequences[place].append(number)
        room[place] -= length
    return sorted(tuple(sorted(sequence)) for sequence in sequences)
