"""Samples come from worker processes as they are, ahead of time; killed workers are replaced or named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from faults import ROOT, alive
from torch import distributed as dist
from torch import multiprocessing as mp

from optimus.engine.batch_plan import SampleSizes
from optimus.engine.metrics_log import reduce_metrics
from optimus.engine.prefetched_data import PrefetchedDataset, Request
from optimus.errors import UserError
from optimus.models.sample import ItemKeys, Sample, SampleItem

pytestmark = [pytest.mark.ci("data"), pytest.mark.timeout(120)]


@dataclass(frozen=True)
class Numbered:
    """Samples that say in a file who loaded them when; `fatal` kills its process, once or always."""

    folder: Path
    fatal: int = -1
    always: bool = False
    endless: bool = False

    def sizes(self, number: int) -> SampleSizes:
        return SampleSizes(number=number, items={"vision": (4,)})

    def labels(self, number: int) -> int:
        return number

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        killed = self.folder / f"killed-{number}"
        if number == self.fatal and (self.always or not killed.exists()):
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / f"loaded-{number}").write_text(str(os.getpid()))
        if self.endless:
            time.sleep(1000)
        rows = 4 if items is None or ("vision", 0) in items else 0
        item = SampleItem(offset=1, grid=(2, 2), inputs=torch.full((rows, 3), float(number)))
        ids = torch.arange(number, number + 6)
        return Sample(number=number, tokens=ids, labels=ids - 1, items={"vision": (item,)}, skipped=("why",))


def whole(numbers: Iterable[int]) -> list[Request]:
    return [(number, None) for number in numbers]


def assert_is(sample: Sample, number: int) -> None:
    assert sample.number == number and sample.tokens.tolist() == list(range(number, number + 6))
    assert sample.skipped == ("why",) and sample.items["vision"][0].inputs.unique().tolist() == [number]


def test_samples_are_loaded_before_they_are_asked_for_by_other_processes(tmp_path: Path) -> None:
    data = PrefetchedDataset(Numbered(tmp_path), workers=2)
    try:
        data.start(whole(range(5)))
        data.wait()
        assert all((tmp_path / f"loaded-{number}").exists() for number in range(5))
        for number in (3, 0, 1):
            assert_is(data.sample(number), number)
        data.start(whole([4, 6]))  # 2 is forgotten
        assert set(data._loading) == {(4, None), (6, None)}
        assert_is(data.sample(9), 9)  # not announced
        assert_is(data.sample(4), 4)
        loaders = {path.read_text() for path in tmp_path.glob("loaded-*")}
        assert str(os.getpid()) not in loaders and len(loaders) <= 2
        assert data.labels(7) == 7 and data.sizes(7).items == {"vision": (4,)}
        assert data.waited_s > 0 and data.restarts == 0
    finally:
        data.close()


def test_workers_prepare_the_items_that_are_asked_for(tmp_path: Path) -> None:
    data = PrefetchedDataset(Numbered(tmp_path), workers=1)
    try:
        encoded, none = frozenset({("vision", 0)}), frozenset[tuple[str, int]]()
        data.start([(1, encoded), (2, none)])
        data.wait()
        assert_is(data.sample(1, encoded), 1)
        assert len(data.sample(2, none).items["vision"][0].inputs) == 0
        data.start([(3, none)])
        assert_is(data.sample(3), 3)  # not what was started
    finally:
        data.close()


def test_workers_that_are_killed_are_replaced(tmp_path: Path) -> None:
    data = PrefetchedDataset(Numbered(tmp_path, fatal=1), workers=2)
    try:
        data.start(whole(range(4)))
        for number in range(4):
            assert_is(data.sample(number), number)
        assert data.restarts == 1
        data.start(whole(range(4, 8)))
        data.wait()
        os.kill(int((tmp_path / "loaded-4").read_text()), signal.SIGKILL)
        data.start(whole(range(4, 8)))
        for number in range(4, 8):
            assert_is(data.sample(number), number)
    finally:
        data.close()


def test_a_sample_that_kills_every_worker_is_named(tmp_path: Path) -> None:
    data = PrefetchedDataset(Numbered(tmp_path, fatal=2, always=True), workers=1)
    try:
        data.start(whole(range(4)))
        assert_is(data.sample(0), 0)
        with pytest.raises(UserError, match="sample 2 ended 3 worker processes"):
            data.sample(2)
        assert_is(data.sample(3), 3)
    finally:
        data.close()


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, "tests")
from test_prefetched_data import Numbered, whole
from optimus.engine.prefetched_data import PrefetchedDataset
if __name__ == "__main__":
    folder, is_endless = Path(sys.argv[1]), sys.argv[2] == "busy"
    data = PrefetchedDataset(Numbered(folder, endless=is_endless), workers=2)
    data.start(whole(range(8)))
    while len(list(folder.glob("loaded-*"))) < (2 if is_endless else 8):
        time.sleep(0.05)
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():  # forks workers, or tracks resources
            (folder / f"loaded-child-{child}").write_text(child)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("workers", ["idle", "busy"])
def test_workers_end_with_a_rank_that_is_killed(workers: str, tmp_path: Path) -> None:
    """None is left after 5 s, nor the process that forked them, also in the middle of a sample."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    ran = subprocess.run([sys.executable, script, tmp_path, workers], cwd=ROOT, env=environment, check=False)
    assert ran.returncode == -signal.SIGKILL
    started = {int(path.read_text()) for path in tmp_path.glob("loaded-*")}
    deadline = time.monotonic() + 5
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(started) >= 3 and not any(map(alive, started))


WAITED_S = (0.0, 3.0, 0.5)  # by rank


def reduce_on_rank(rank: int, store: str) -> None:
    ranks = len(WAITED_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    loss = torch.tensor(2.5) if rank == 1 else None
    stopped_by = 15 if rank == 2 else 0
    sums, maxima = [float(rank), 1.0], [WAITED_S[rank], stopped_by]
    assert reduce_metrics(loss, sums, maxima, torch.device("cpu")) == ([2.5, 3.0, 3.0], [3.0, 15.0])
    dist.destroy_process_group()


def test_a_step_waits_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    mp.start_processes(reduce_on_rank, (str(tmp_path / "store"),), nprocs=len(WAITED_S), start_method="fork")
