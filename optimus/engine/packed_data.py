"""Packs the samples of a data set into sequences of one length, in another order each epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from optimus.engine.batch_plan import SampleSizes
from optimus.models.dropout import hash64
from optimus.models.sample import ItemKeys, Sample, pack_samples
from optimus.protocols import Dataset


@dataclass(frozen=True, kw_only=True)
class PackedDataset:
    """Packed sequences by number; implements `protocols.Dataset`.

    A number is a place in an endless run of epochs, so a run that resumes at a step reads on where it
    stopped, under any plan and world size.
    """

    dataset: Dataset
    sequences: Sequence[tuple[int, ...]]  # numbers of the samples of each, from `data.packing`
    length: int
    seed: int = 0
    held_out: int = 0  # sequences that no epoch has; they have the numbers -1, -2 and so on

    def sizes(self, number: int) -> SampleSizes:
        """Returns the sizes of all items of a sequence, without loading its samples."""
        items: dict[str, tuple[int, ...]] = {}
        for member in self.members(number):
            for encoder, sizes in self.dataset.sizes(member).items.items():
                items[encoder] = (*items.get(encoder, ()), *sizes)
        return SampleSizes(number=number, items=items)

    def labels(self, number: int) -> int:
        """Returns how many labels of a sequence enter the loss."""
        return sum(map(self.dataset.labels, self.members(number)))

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        """Loads the samples of a sequence and packs them."""
        samples, first = list[Sample](), Counter[str]()  # first: items of the samples before, by encoder
        for member in self.members(number):
            own = None if items is None else frozenset((name, index - first[name]) for name, index in items)
            samples.append(self.dataset.sample(member, own))
            first.update({name: len(of_member) for name, of_member in samples[-1].items.items()})
        return pack_samples(samples, number=number, length=self.length)

    def members(self, number: int) -> tuple[int, ...]:
        """Returns the numbers of the samples in a sequence."""
        held_out, trained = self._parts
        if number < 0:
            return self.sequences[held_out[-1 - number]]
        epoch, place = divmod(number, len(trained))
        return self.sequences[trained[int(_epoch_order(self.seed, epoch, len(trained))[place])]]

    @cached_property
    def _parts(self) -> tuple[Sequence[int], Sequence[int]]:
        """Returns held-out sequences, equal for every seed so that runs can be compared, and the others."""
        if not self.held_out:
            return (), range(len(self.sequences))
        drawn = _epoch_order("held out", 0, len(self.sequences)).tolist()
        return drawn[: self.held_out], sorted(drawn[self.held_out :])


@lru_cache(maxsize=2)  # a step may end one epoch and begin the next
def _epoch_order(seed: int | str, epoch: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash64("epoch", seed, epoch) & (2**63 - 1))
    return torch.randperm(count, generator=generator)
