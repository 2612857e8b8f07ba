"""Packed samples train as they do alone, and every epoch has each of them once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from engine_cases import Case
from one_process import OneProcess
from tiny_models import random_samples, tiny_model

from optimus.data.packing import pack_documents
from optimus.data.step_samples import StepSamples
from optimus.engine.batch_plan import SampleSizes
from optimus.engine.packed_data import PackedDataset
from optimus.engine.rank_trainer import RankTrainer
from optimus.errors import UserError
from optimus.models.sample import ItemKeys, Sample, SampleItem, pack_samples


class Listed:
    """Samples of a list as a data set."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def sizes(self, number: int) -> SampleSizes:
        items = {name: tuple(i.tokens for i in items) for name, items in self.sample(number).items.items()}
        return SampleSizes(number=number, items=items)

    def labels(self, number: int) -> int:
        return int((self.sample(number).labels >= 0).sum())

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        sample = self.samples[number]
        kept = {
            name: tuple(
                item if items is None or (name, index) in items else replace(item, inputs=item.inputs[:0])
                for index, item in enumerate(of_encoder)
            )
            for name, of_encoder in sample.items.items()
        }
        return replace(sample, items=kept)


@pytest.mark.parametrize("llm", ["llama", "qwen"])
def test_packed_samples_have_the_loss_and_gradients_of_samples_alone(llm: str) -> None:
    model = tiny_model(llm)
    samples = [
        *random_samples(model, 3, seed=1, length=24),
        *random_samples(model, 2, seed=2, length=31, first=3),
        *random_samples(model, 1, seed=3, length=40, first=5, documents=True),
    ]
    sequences = tuple(pack_documents([sample.length for sample in samples], 100))
    packed = PackedDataset(dataset=Listed(samples), sequences=sequences, length=100)
    assert len(sequences) == 2 and any(any(sample.items.values()) for sample in samples)
    loss, gradients = OneProcess(model).loss_and_gradients([packed.sample(n) for n in range(2)])
    expected, alone = OneProcess(model).loss_and_gradients(samples)
    assert abs(loss - expected) < 1e-12 * abs(expected)
    scale = max(float(gradient.abs().max()) for gradient in alone.values())
    for name, gradient in alone.items():
        assert float((gradients[name] - gradient).abs().max()) < 1e-12 * scale, name


def test_a_packed_sample_is_its_samples_one_after_the_other() -> None:
    video = SampleItem(offset=2, grid=(2, 2, 2), inputs=torch.ones(8, 4), frame_offsets=(2, 5))
    first = Sample(number=7, tokens=torch.arange(5), labels=torch.arange(5), documents=(2, 3))
    other = Sample(
        number=8, tokens=torch.arange(9), labels=torch.full((9,), -100), items={"vision": (video,)}
    )
    packed = pack_samples([first, other], number=3, length=16)
    assert packed.tokens.tolist() == [*range(5), *range(9), 0, 0]
    assert packed.labels.tolist() == [*range(5), *[-100] * 11]
    assert packed.documents == (2, 3, 9, 2) and sum(packed.documents) == packed.length == 16
    (moved,) = packed.items["vision"]
    assert (packed.number, moved.offset, moved.frame_offsets) == (3, 7, (7, 10))
    assert pack_samples([first, other], number=3, length=14).documents == (2, 3, 9)
    with pytest.raises(UserError, match="14"):
        pack_samples([first, other], number=3, length=13)


def test_items_that_are_needed_are_asked_of_the_samples_that_have_them() -> None:
    samples = random_samples(tiny_model("llama"), 6, seed=1, length=24)
    packed = PackedDataset(dataset=Listed(samples), sequences=((0, 1, 2, 3, 4, 5),), length=150)
    whole = packed.sample(0)
    keys = [(name, index) for name, items in whole.items.items() for index in range(len(items))]
    needed = frozenset(keys[::2])
    assert len({name for name, _ in keys}) == 2 and len(keys) > 6
    sample = packed.sample(0, needed)
    for name, index in keys:
        item, full = sample.items[name][index], whole.items[name][index]
        assert (item.offset, item.grid) == (full.offset, full.grid)
        assert torch.equal(item.inputs, full.inputs if (name, index) in needed else full.inputs[:0])


def test_every_epoch_has_each_sample_once_in_another_order_that_the_seed_decides() -> None:
    samples = random_samples(tiny_model("llama"), 50, length=10)
    sequences = tuple(pack_documents([10] * 50, 30))
    packed = PackedDataset(dataset=Listed(samples), sequences=sequences, length=30, seed=4)
    count = len(sequences)
    epochs = [[packed.members(number) for number in range(e * count, (e + 1) * count)] for e in range(3)]
    for epoch in epochs:
        assert Counter(number for members in epoch for number in members) == Counter(range(50))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = PackedDataset(dataset=Listed(samples), sequences=sequences, length=30, seed=4)
    other = PackedDataset(dataset=Listed(samples), sequences=sequences, length=30, seed=5)
    numbers = range(2 * count, 3 * count)  # a run that resumes in the third epoch
    assert [again.members(number) for number in numbers] == epochs[2]
    assert [other.members(number) for number in numbers] != epochs[2]
    for number in range(count):
        sample, sizes = packed.sample(number), packed.sizes(number)
        assert sizes.items == {n: tuple(i.tokens for i in items) for n, items in sample.items.items()}
        assert packed.labels(number) == int((sample.labels >= 0).sum())


class Drawn:
    """Samples with up to three images, whose sizes have a long tail."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths: list[int] = torch.randint(5, 40, (count,), generator=generator).tolist()
        images = (torch.randn(count, 3, generator=generator) * 1.2).exp().ceil().clamp(max=6).long() * 4
        kept = torch.randint(0, 3, (count,), generator=generator)
        self.images = [tuple(row[:n]) for row, n in zip(images.tolist(), kept.tolist(), strict=True)]

    def sizes(self, number: int) -> SampleSizes:
        return SampleSizes(number=number, items={"vision": self.images[number]})

    def labels(self, number: int) -> int:
        return self.lengths[number]

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        raise NotImplementedError


def _samples_of_steps(case: Case, packed: PackedDataset, steps: range) -> list[list[int]]:
    """Returns the samples in the batch plans of all replicas, step by step."""
    plan, workload = case.plan, case.job.workload
    trainers = []
    for replica in range(0, plan.ranks.llm.dp, plan.dealing_replicas):
        trainer = RankTrainer.__new__(RankTrainer)  # neither model nor process groups
        trainer.plan, trainer.dataset, trainer.replica = plan, packed, replica
        capacity = {"vision": workload.step_capacity("vision", 4)}
        per_step = workload.sequences_per_step
        trainer.step_samples = StepSamples(trainer._count_tokens, per_step, capacity)
        trainers.append(trainer)
    found = []
    for step in steps:
        groups = [trainer.batch_plan(step).samples for trainer in trainers]
        sequences = [n for group in groups for of_replica in group for batch in of_replica for n in batch]
        assert len(set(sequences)) == workload.sequences_per_step
        found.append(sorted(sample for number in sequences for sample in packed.members(number)))
    return found


@pytest.mark.ci("data")
def test_a_run_that_resumes_under_another_plan_and_world_size_has_the_same_samples() -> None:
    """1,000 steps from step 137 on, over many epochs, of 2, 4 and 8 ranks with 1, 2 and 4 replicas."""
    data = Drawn(900)
    sequences = tuple(pack_documents(data.lengths, 64))
    packed = PackedDataset(dataset=data, sequences=sequences, length=64, seed=7)
    cases = [
        Case(name="a", ranks=2, pp=2, microbatches=8),
        Case(name="b", ranks=4, pp=2, microbatches=2, sequences=2),
        Case(name="c", ranks=8, pp=2, tp=2, microbatches=4),
        Case(name="d", ranks=8, pp=2, microbatches=2),
    ]
    assert {case.job.workload.sequences_per_step for case in cases} == {8}
    assert {case.plan.ranks.llm.dp for case in cases} == {1, 2, 4}
    first, *others = [_samples_of_steps(case, packed, range(137, 1137)) for case in cases]
    assert all(other == first for other in others)
    whole = _samples_of_steps(cases[0], packed, range(200))
    assert whole[137:] == first[:63]
    assert len({tuple(step) for step in first}) > 900  # neither constant nor of one epoch
