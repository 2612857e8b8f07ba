"""Mutated files and lines, loaded as training does: the indexed sizes, trained or named as skipped."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from chat_data import chat, write_image, write_weights
from test_chat_dataset import assert_sizes
from test_data_index import mutate

from optimus.data.index_lengths import IndexedLengths, LengthsIndexer, LengthsTable
from optimus.data.jsonl_file import scan_jsonl
from optimus.data.media_headers import MediaFolder
from optimus.data.sample_index import IndexKey, SampleIndex
from optimus.data.token_counts import TokenCounter
from optimus.hf.chat_dataset import ChatDataset

NAMES = ("a.png", "b.jpg", "c.webp", "d.gif", "e.bmp", "f.tiff")


class Fuzzer:
    """Mutates a data set, and loads each of its samples."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, write_weights(folder / "model", "qwen2_5_vl", torch.float32)
        for name in NAMES:
            write_image(folder / name, (40, 30))
        self.files = {name: (folder / name).read_bytes() for name in NAMES}
        self.counter = TokenCounter(self.model)
        self.generator, self.seen = random.Random(2), Counter[str]()

    def open(self, lines: list[bytes]) -> ChatDataset:
        """Indexes lines as the command does, with a processor that is loaded once."""
        path, media = self.folder / "data.jsonl", MediaFolder(root=self.folder)
        path.write_bytes(b"\n".join(lines))
        file = scan_jsonl(path)
        indexer = LengthsIndexer(file=file, folder=media, counter=self.counter)
        indexed = IndexedLengths(samples=LengthsTable(["vision"]))
        for number in range(len(file)):
            indexed.add(file, number, indexer.measure(number))
        self.seen.update({f"not indexed: {reason}": count for reason, count in indexed.skipped.items()})
        key = IndexKey.make(file, model=self.model, folder=media, sequence_tokens=None)
        dataset = ChatDataset.open(file, SampleIndex.make(key, indexed), folder=media, model_dir=self.model)
        dataset.__dict__["_counter"] = self.counter
        return dataset

    def load_all(self, dataset: ChatDataset) -> None:
        for number in range(len(dataset)):
            sample = dataset.sample(number)
            assert_sizes(dataset, sample)
            assert bool(sample.skipped) <= bool((sample.labels < 0).all())
            self.seen["skipped" if sample.skipped else "trained"] += 1

    def mutate_files(self, rounds: int) -> None:
        """Mutates files of an indexed data set."""
        row = {name: json.dumps(chat("<image>what", "the cat", images=[name])).encode() for name in NAMES}
        dataset = self.open([row[name] for name in NAMES])
        for _ in range(rounds):
            for name, content in self.files.items():
                (self.folder / name).write_bytes(mutate(content, self.generator))
            self.load_all(dataset)
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)

    def mutate_lines(self, rounds: int) -> None:
        """Mutates lines, then indexes and loads what can be used."""
        rows = [chat("<image>what", "a", "and <image>", "the", images=[name, "a.png"]) for name in NAMES]
        for _ in range(rounds):
            lines = [mutate(json.dumps(row).encode(), self.generator).replace(b"\n", b" ") for row in rows]
            self.load_all(self.open(lines))


def _fuzz(folder: Path, rounds: int) -> Counter[str]:
    fuzzer = Fuzzer(folder)
    fuzzer.mutate_files(rounds)
    fuzzer.mutate_lines(rounds)
    return fuzzer.seen


@pytest.mark.ci("data")
def test_mutated_files_and_lines_are_trained_or_named(tmp_path: Path) -> None:
    seen = _fuzz(tmp_path, 15)
    assert min(seen["trained"], seen["skipped"], seen["not indexed: not JSON"]) > 5, seen


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_10_000_mutations_are_trained_or_named(tmp_path: Path) -> None:
    seen = _fuzz(tmp_path, 834)
    assert 9_900 < seen.total() <= 2 * 834 * len(NAMES)
