"""Counts the tokens of every sample of a chat data set, in worker processes, in the order of the file."""

from __future__ import annotations

import json
import multiprocessing
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from optimus.data.chat_format import parse_chat_sample
from optimus.data.chat_source import ChatSource
from optimus.data.jsonl_file import SkippedSample, SkipReason
from optimus.data.media_headers import MediaFolder
from optimus.data.token_counts import SampleLengths, TokenCounter
from optimus.errors import UserError
from optimus.ir.op import Ints

CHUNK = 256  # samples of one task of a worker
CHUNKS_PER_WORKER = 16  # at least: a worker takes seconds to import transformers
SHOWN = 5  # skipped samples of a reason that are named

Progress = Callable[[str, int, int], None]  # name of the file, samples done, samples in total
Results = list[SampleLengths | SkippedSample]
SkippedExamples = dict[SkipReason, list[tuple[int, str]]]  # line and detail of the first of each reason


class LengthsTable:
    """Lengths of samples in columns: 8 bytes for text and labels, and for each encoder and item."""

    def __init__(self, encoders: Iterable[str]) -> None:
        self.text = array("q")
        self.labels = array("q")
        self.items = {name: array("q") for name in encoders}  # of all samples, one after the other
        self._ends = {name: array("q", [0]) for name in self.items}

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, place: int) -> SampleLengths:
        items = {}
        for name, lengths in self.items.items():
            begin, end = self._ends[name][place : place + 2]
            items[name] = tuple(lengths[begin:end])
        return SampleLengths(text=self.text[place], items=items, labels=self.labels[place])

    def append(self, sample: SampleLengths) -> None:
        self.text.append(sample.text)
        self.labels.append(sample.labels)
        for name, lengths in self.items.items():
            lengths.extend(sample.items.get(name, ()))
            self._ends[name].append(len(lengths))

    def totals(self) -> dict[str, Ints]:
        """Returns the tokens of every sample, of the text and of each encoder."""
        columns: dict[str, Ints] = {"text": np.array(self.text, dtype=np.int64)}
        for name, lengths in self.items.items():
            sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.array(lengths, dtype=np.int64))])
            columns[name] = np.diff(sums[np.array(self._ends[name], dtype=np.int64)])
        return columns

    def tokens(self) -> Ints:
        """Returns the tokens of every sample."""
        tokens: Ints = np.sum(list(self.totals().values()), axis=0, dtype=np.int64)
        return tokens

    def join(self, groups: Iterable[Iterable[int]]) -> LengthsTable:
        """Returns the lengths of groups of samples, such as packed sequences."""
        joined = LengthsTable(self.items)
        for places in groups:
            samples = [self[place] for place in places]
            items = {name: sum((sample.items[name] for sample in samples), ()) for name in self.items}
            text, labels = (sum(getattr(sample, name) for sample in samples) for name in ("text", "labels"))
            joined.append(SampleLengths(text=text, items=items, labels=labels))
        return joined

    def rows(self) -> str:
        """Returns the rows that `workload: {lengths: FILE}` reads."""
        samples = (self[place] for place in range(len(self)))
        return "".join(json.dumps({"text": sample.text, **sample.items}) + "\n" for sample in samples)

    def columns(self) -> dict[str, Ints]:
        """Returns all columns by name, for a file."""
        named = {"text": self.text, "labels": self.labels}
        for name, lengths in self.items.items():
            named |= {f"items.{name}": lengths, f"ends.{name}": self._ends[name]}
        return {name: np.array(column, dtype=np.int64) for name, column in named.items()}

    @classmethod
    def of_columns(cls, columns: Mapping[str, Ints]) -> LengthsTable:
        """Returns the table whose `columns` were written."""
        read = {name: array("q", column.astype(np.int64).tobytes()) for name, column in columns.items()}
        table = cls(name.removeprefix("items.") for name in columns if name.startswith("items."))
        table.text, table.labels = read["text"], read["labels"]
        for name in table.items:
            table.items[name], table._ends[name] = read[f"items.{name}"], read[f"ends.{name}"]
        return table


@dataclass(kw_only=True)
class IndexedLengths:
    """Lengths of the samples that can be used, and the others by reason."""

    samples: LengthsTable
    numbers: array[int] = field(default_factory=lambda: array("q"))  # of these samples in the file
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    examples: SkippedExamples = field(default_factory=dict)

    def add(self, file: ChatSource, number: int, result: SampleLengths | SkippedSample) -> None:
        """Adds the result of one sample."""
        if isinstance(result, SampleLengths):
            self.samples.append(result)
            self.numbers.append(number)
            return
        self.skipped[result.reason] += 1
        examples = self.examples.setdefault(result.reason, [])
        if len(examples) < SHOWN:
            examples.append((int(file.lines[number]), result.detail))


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthsIndexer:
    """Measures samples of one data set by number, the same in any process."""

    file: ChatSource
    folder: MediaFolder
    counter: TokenCounter
    sequence_tokens: int | None = None  # longer samples are skipped

    def measure(self, number: int) -> SampleLengths | SkippedSample:
        """Returns the lengths of a sample, or the reason against it."""
        try:
            lengths = self.counter.count(parse_chat_sample(self.file.read(number)), self.folder)
        except SkippedSample as skipped:
            return skipped
        if self.sequence_tokens is not None and lengths.tokens > self.sequence_tokens:
            return SkippedSample(SkipReason.TOO_LONG, f"{lengths.tokens:,} tokens")
        return lengths


def index_lengths(
    file: ChatSource,
    *,
    model: Path,
    folder: MediaFolder,
    sequence_tokens: int | None = None,
    workers: int = 1,
    progress: Progress,
) -> IndexedLengths:
    """Measures all samples of a file; the result does not depend on the number of workers."""
    indexer = LengthsIndexer(
        file=file,
        folder=folder,
        counter=TokenCounter(model),
        sequence_tokens=sequence_tokens,
    )
    indexed, total = (
        IndexedLengths(samples=LengthsTable(encoder.name for encoder in indexer.counter.encoders.values())),
        len(file),
    )
    chunks = [range(begin, min(begin + CHUNK, total)) for begin in range(0, total, CHUNK)]
    for chunk, results in zip(chunks, _measure_chunks(indexer, chunks, workers), strict=True):
        for number, result in zip(chunk, results, strict=True):
            indexed.add(file, number, result)
        progress(file.path.name, chunk.stop, total)
    return indexed


def _measure_chunks(indexer: LengthsIndexer, chunks: list[range], workers: int) -> Iterator[Results]:
    """Yields the results of every chunk in order."""
    workers = min(workers, len(chunks) // CHUNKS_PER_WORKER)
    if workers <= 1:
        yield from (list(map(indexer.measure, chunk)) for chunk in chunks)
        return
    context = multiprocessing.get_context("spawn")  # tokenizers and torch have threads, which fork loses
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin_worker, initargs=(indexer,)
    ) as pool:
        try:
            yield from pool.map(_measure_chunk, chunks)
        except BrokenProcessPool:
            raise UserError(
                field=str(indexer.file.path),
                problem="ended a worker process, which was killed or ran out of memory",
                hint="use --workers 1 to see at which sample",
            ) from None


_worker: list[LengthsIndexer] = []  # of this process; tasks of a pool have no other place for it


def _begin_worker(indexer: LengthsIndexer) -> None:
    _worker[:] = [indexer]


def _measure_chunk(chunk: range) -> Results:
    (indexer,) = _worker
    return list(map(indexer.measure, chunk))
