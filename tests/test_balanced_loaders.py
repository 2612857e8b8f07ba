"""Loaders of torch, torchdata, torchtitan and transformers give every rank its batches, once."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice
from typing import Any

import pytest
from balanced_worker import BATCH_SIZE, CASES, EPOCHS, LOADS, MICROBATCHES, SAMPLES
from torch.utils.data import DataLoader
from worker_lines import run_cases

from optimus.data import BalancedBatchSampler

pytestmark = [
    pytest.mark.ci("data"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # called by torchdata 0.11
]


def make(rank: int = 1, **options: Any) -> BalancedBatchSampler:
    options |= {"microbatches": MICROBATCHES, "num_replicas": 2}
    return BalancedBatchSampler(LOADS, BATCH_SIZE, rank=rank, **options)


def expected(rank: int = 1, epochs: int = EPOCHS) -> list[list[int]]:
    sampler = make(rank)
    return [batch for _ in range(epochs) for batch in sampler]


def collate(rows: list[int]) -> list[int]:
    return rows


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torch_goes_from_epoch_to_epoch(workers: int) -> None:
    loader = DataLoader(range(SAMPLES), batch_sampler=make(), collate_fn=collate, num_workers=workers)
    assert [batch for _ in range(EPOCHS) for batch in loader] == expected()
    assert len(loader) == len(expected()) // EPOCHS


def resume(make_loader: Any, seen: int) -> list[list[int]]:
    """Iterates, saves, and goes on with another loader to the end of the third epoch."""
    loader = make_loader()
    begun: list[list[int]] = []
    while len(begun) < seen:
        begun += islice(loader, seen - len(begun))
    state = loader.state_dict()
    other = make_loader()
    other.load_state_dict(state)
    rest = EPOCHS - seen // len(loader)
    return begun + [batch for _ in range(rest) for batch in other]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seen", [0, 3, 12])  # of 8 batches an epoch
def test_a_stateful_loader_resumes_behind_the_last_batch_that_it_gave(workers: int, seen: int) -> None:
    """Workers have read on, so the sampler's own state is further."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def build() -> Any:
        return StatefulDataLoader(
            range(SAMPLES), batch_sampler=make(), collate_fn=collate, num_workers=workers
        )

    assert resume(build, seen) == expected()


def test_a_loader_of_torchtitan_resumes() -> None:
    from torchtitan.components.dataloader import ParallelAwareDataloader

    def build() -> Any:
        return ParallelAwareDataloader(range(SAMPLES), 1, 2, batch_sampler=make(), collate_fn=collate)

    assert resume(build, 5) == expected()


def test_a_trainer_of_transformers_is_not_sharded_again_and_resumes() -> None:
    """Two ranks run whole, stopped inside an epoch, and stopped at the end of one."""
    for line in run_cases("balanced_worker.py", [case.name for case in CASES], timeout_s=220):
        assert line["ranks"] == [expected(rank) for rank in range(2)], line["name"]
        counts = Counter(chain.from_iterable(chain.from_iterable(line["ranks"])))
        assert set(counts.values()) == {EPOCHS} and len(counts) == SAMPLES
        assert "would be sharded over ranks again" in line["refused"]
