"""Checkpoints load under any layout, are complete or absent, and are refused if anything in them changed."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from faults import ROOT
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist

from optimus.engine.checkpoint import CheckpointWriter, find_newest, load_state
from optimus.engine.checkpoint_folder import (
    MANIFEST,
    CheckpointConfig,
    list_checkpoints,
    list_expired,
    lock_folder,
    name_checkpoint,
)
from optimus.engine.checkpoint_state import TensorShards, describe_tensor, list_shard_boxes
from optimus.errors import UserError
from optimus.models.collectives import ParamSplit, TpGroup

TINY = "cpu/tiny-vl"
TINY_FILE = ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml"
KEEP_ALL = CheckpointConfig(every=1, keep_last=100)


# ---------------------------------------------------------------------------- boxes


@given(
    dim=st.integers(0, 1),
    blocks=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=3),
    other=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    tp=st.integers(1, 4),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_runs_of_all_shards_make_up_the_parameter(
    dim: int, blocks: list[tuple[int, int]], other: list[int], tp: int, cuts: list[float]
) -> None:
    """Every value of a parameter is in exactly one box, whatever its shards and their runs are."""
    split = ParamSplit(dim=dim, blocks=tuple(blocks))
    shape = [*other]
    shape.insert(dim, split.shard_length(1))
    parameter = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    whole, seen = torch.zeros(shape), torch.zeros(shape)
    for rank in range(tp):
        shard = split.shard(parameter, rank, tp)
        flat = shard.flatten()
        ends = sorted({0, len(flat), *(round(cut * len(flat)) for cut in cuts)})
        for begin, end in pairwise(ends):
            for box in list_shard_boxes(
                flat[begin:end], tuple(shard.shape), begin, split, TpGroup(rank=rank, size=tp)
            ):
                place = tuple(
                    slice(at, at + size) for at, size in zip(box.offsets, box.values.shape, strict=True)
                )
                whole[place] = box.values
                seen[place] += 1
    assert torch.equal(whole, parameter) and torch.equal(seen, torch.ones(shape))


# ---------------------------------------------------------------------------- one process


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.new_group()
    dist.destroy_process_group()


def make_state(seed: int) -> dict[str, TensorShards]:
    torch.manual_seed(seed)
    tensors = {
        "model.a": torch.randn(40, 30),
        "model.b": torch.randn(7, dtype=torch.bfloat16),
        "optimizer.a.exp_avg": torch.randn(40, 30, dtype=torch.float64),
        "optimizer.step": torch.tensor(float(seed)),
    }
    return {name: describe_tensor(tensor) for name, tensor in tensors.items()}


def values(state: dict[str, TensorShards]) -> dict[str, Tensor]:
    return {name: shards.boxes[0].values for name, shards in state.items()}


def save(folder: Path, group: dist.ProcessGroup, *steps: int, config: CheckpointConfig = KEEP_ALL) -> None:
    for step in steps:
        writer = CheckpointWriter(folder, config, group)
        writer.save(step, {"seed": step}, make_state(step))
        assert writer.wait()


def test_values_come_back_with_their_bits(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 5)
    newest = find_newest(tmp_path, group)
    assert newest is not None and newest[1].step == 5 and newest[1].facts == {"seed": 5}
    other = make_state(6)
    load_state(newest[0], other, group)
    expected = values(make_state(5))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in values(other).items())


def test_a_state_that_the_checkpoint_does_not_have_is_refused(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    save(tmp_path, group, 1)
    path = tmp_path / name_checkpoint(1)
    for name, tensor, problem in (
        ("model.c", torch.zeros(2), "is not in the checkpoint"),
        ("model.a", torch.zeros(40, 31), "has the shape [40, 30], and the model [40, 31]"),
        ("model.b", torch.zeros(7), "is torch.bfloat16, and the run torch.float32"),
    ):
        with pytest.raises(UserError) as caught:
            load_state(path, {name: describe_tensor(tensor)}, group)
        assert caught.value.field == name and problem in str(caught.value)


def test_old_checkpoints_go_when_a_new_one_is_complete(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, *range(1, 9), config=CheckpointConfig(every=1, keep_last=2, keep_every=3))
    assert [path.name for path in list_checkpoints(tmp_path)] == [name_checkpoint(n) for n in (8, 7, 6, 3)]
    assert not list(tmp_path.glob(".*.tmp"))


def test_the_policy_of_keeping() -> None:
    paths = [Path(name_checkpoint(step)) for step in (120, 100, 80, 60, 40, 20)]
    assert [p.name[-3:] for p in list_expired(paths, CheckpointConfig(keep_last=2))] == [
        "080",
        "060",
        "040",
        "020",
    ]
    kept = CheckpointConfig(keep_last=1, keep_every=50)
    assert [p.name[-3:] for p in list_expired(paths, kept)] == ["080", "060", "040", "020"]


def test_a_folder_has_one_writer_and_no_leftovers(tmp_path: Path) -> None:
    leftover = tmp_path / ".step-00000004.0123abcd.tmp"
    leftover.mkdir()
    lock = lock_folder(tmp_path)
    assert not leftover.exists()
    lines = (
        "from optimus.engine import checkpoint_folder as c; c.LOCK_WAIT_S = 0.2; c.lock_folder(c.Path({!r}))"
    )
    other = lines.format(str(tmp_path))
    done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False)
    assert "another run writes" in done.stderr
    lock.close()
    assert subprocess.run([sys.executable, "-c", other], check=False).returncode == 0


# ---------------------------------------------------------------------------- corruptions


def flip(path: Path, other: Path, choose: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, other: Path, choose: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: choose.randrange(path.stat().st_size)])


def zero_page(path: Path, other: Path, choose: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = choose.randrange(len(content)) // 512 * 512
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)


def append(path: Path, other: Path, choose: random.Random) -> None:
    path.write_bytes(path.read_bytes() + choose.randbytes(1 + choose.randrange(64)))


def delete(path: Path, other: Path, choose: random.Random) -> None:
    path.unlink()


def take_stale(path: Path, other: Path, choose: random.Random) -> None:
    shutil.copyfile(other / path.name, path)


def swap(path: Path, other: Path, choose: random.Random) -> None:
    twin = choose.choice([file for file in path.parent.iterdir() if file != path])
    content = path.read_bytes()
    path.write_bytes(twin.read_bytes())
    twin.write_bytes(content)


def link(path: Path, other: Path, choose: random.Random) -> None:
    """Leaves the bytes as they are, and the file outside of the checkpoint."""
    outside = path.parent.parent / "outside"
    shutil.move(path, outside)
    path.symlink_to(choose.choice([outside, Path("/dev/zero")]))


def take_directory(path: Path, other: Path, choose: random.Random) -> None:
    shutil.rmtree(path.parent)
    shutil.copytree(other, path.parent)


def edit_manifest(path: Path, other: Path, choose: random.Random) -> None:
    """Changes one value and leaves the rest as it is."""
    manifest = path.parent / MANIFEST
    document = json.loads(manifest.read_text())
    choose.choice(
        [
            lambda: document.update(step=document["step"] + 1),
            lambda: document["facts"].update(seed=7),
            document["files"].popitem,
            lambda: document.update(format=2),
            lambda: document["files"].update({"../x": [0, ""]}),
        ]
    )()
    manifest.write_text(json.dumps(document, indent=1))


CORRUPTIONS = (
    flip,
    truncate,
    zero_page,
    append,
    delete,
    take_stale,
    swap,
    link,
    take_directory,
    edit_manifest,
)


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.ci("survival"))])
def test_no_corruption_is_loaded(
    tmp_path: Path, group: dist.ProcessGroup, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """A checkpoint in which anything changed is named and not used; the one before it is."""
    folder = tmp_path / "run"
    folder.mkdir()
    save(folder, group, 1, 2)
    first, second = (folder / name_checkpoint(step) for step in (1, 2))
    whole = tmp_path / "whole"
    shutil.copytree(second, whole)
    original = {path.name: path.read_bytes() for path in whole.iterdir()}
    choose, unchanged = random.Random(0), 0
    for number in range(count):
        path = second / choose.choice(sorted(original))
        CORRUPTIONS[number % len(CORRUPTIONS)](path, first, choose)
        is_linked = any(path.is_symlink() for path in second.iterdir())
        if not is_linked and contents(second) == original:
            unchanged += 1  # zeros where zeros were
            continue
        newest = find_newest(folder, group)
        assert newest is not None and newest[1].step == 1, (number, path.name)
        assert f"warning: {second} has" in capsys.readouterr().err
        shutil.rmtree(second)
        shutil.copytree(whole, second)
    assert unchanged < count / 20


def test_without_a_whole_checkpoint_nothing_is_loaded(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 1)
    (tmp_path / name_checkpoint(1) / MANIFEST).unlink()
    with pytest.raises(UserError, match="none of them is whole"):
        find_newest(tmp_path, group)


# ---------------------------------------------------------------------------- disks


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_disk_leaves_the_previous_checkpoint(
    tmp_path: Path, group: dist.ProcessGroup, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk has room for the first checkpoint and ever more pages of the second, up to all of it."""
    outcomes, disk, pages = list[bool](), tmp_path / "disk", 0
    disk.mkdir()
    save(tmp_path, group, 1)
    first = tmp_path / name_checkpoint(1)
    needed = sum(-(-len(content) // 4096) for content in contents(first).values())
    while not outcomes or not outcomes[-1]:
        assert pages < 3 * needed, "it never fits"
        size = f"size={(needed + pages) * 4096 + 65536}"
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], check=False)
        if mounted.returncode:
            pytest.skip("this container mounts nothing")
        try:
            shutil.copytree(first, disk / first.name)
            writer = CheckpointWriter(disk, KEEP_ALL, group)
            (disk / "filler").write_bytes(bytes(65536 - 4096 * 4))
            writer.save(2, {}, make_state(2))
            outcomes.append(writer.wait())
            assert contents(disk / first.name) == contents(first)
            assert len(list_checkpoints(disk)) == 1 + outcomes[-1] and not list(disk.glob(".*.tmp"))
        finally:
            subprocess.run(["umount", str(disk)], check=True)
        pages += 1
    assert len(outcomes) > 5 and not any(outcomes[:-1])
    assert capfd.readouterr().err.count("No space left on device") == len(outcomes) - 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("call", range(6))
def test_a_failing_disk_leaves_the_previous_checkpoint(
    tmp_path: Path,
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
    call: int,
) -> None:
    """One after the other, each sync of a file or directory fails; a sync after the rename is too late."""
    save(tmp_path, group, 1)
    before, sync, calls = contents(tmp_path / name_checkpoint(1)), os.fsync, iter(range(1000))

    def fail(handle: int) -> None:
        if next(calls) == call:
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fail)
    writer = CheckpointWriter(tmp_path, KEEP_ALL, group)
    writer.save(2, {}, make_state(2))
    is_complete = writer.wait()
    assert contents(tmp_path / name_checkpoint(1)) == before
    written = capfd.readouterr().err
    if not is_complete:
        assert "the checkpoint of step 2 is not saved" in written and os.strerror(number) in written
    assert next(calls) > call, "fewer files are synced than this test believes"


# ---------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    run(["plan", TINY, "-o", str(path), "--no-sure"])
    return path


def command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "optimus", *words]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(words: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(words), env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def losses(run_dir: Path) -> dict[int, float]:
    """Returns the losses of steps; of a step that was trained twice, the last."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def start_and_wait_for(path: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """Starts a command; returns when it has made a file or a directory."""
    process = subprocess.Popen(command(words), env=ENVIRONMENT)
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.ci("survival")
@pytest.mark.timeout(300)
def test_a_run_stopped_by_sigterm_goes_on_bit_by_bit(plan: Path, tmp_path: Path) -> None:
    train = ["train", TINY, "--plan", str(plan), "--steps", "12", "--run-dir"]
    run([*train, str(tmp_path / "whole")])
    stopped = [*train, str(tmp_path / "stopped"), "--checkpoint-every", "5"]
    process = start_and_wait_for(tmp_path / "stopped" / "metrics.jsonl", stopped)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    done = len(losses(tmp_path / "stopped"))
    assert 1 <= done < 12
    (newest, *_) = list_checkpoints(tmp_path / "stopped" / "checkpoints")
    assert newest.name == name_checkpoint(done)
    assert "has checkpoints of an earlier run" in run(stopped, code=2).stderr
    resumed = run([*stopped, "--resume"])
    assert f"step {done} is next" in resumed.stderr
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


@pytest.mark.ci("survival")
@pytest.mark.timeout(300)
def test_other_data_than_the_run_had_is_refused(plan: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(TINY_FILE.read_text() + "\nrun: {seed: 1}\n")
    train = ["train", "--plan", str(plan), "--run-dir", str(tmp_path), "--checkpoint-every", "1", "--steps"]
    run([*train, "1", TINY])
    refused = run([*train, "2", "--resume", str(job)], code=2)
    assert "run.seed = 1 is 0 in the checkpoints" in refused.stderr


@pytest.mark.ci("survival")
@pytest.mark.timeout(300)
def test_a_killed_rank_is_started_again(plan: Path, tmp_path: Path) -> None:
    train = ["train", TINY, "--plan", str(plan), "--steps", "8", "--run-dir"]
    run([*train, str(tmp_path / "whole")])
    words = [*train, str(tmp_path / "killed"), "--checkpoint-every", "2", "--restarts", "1"]
    process = start_and_wait_for(tmp_path / "killed" / "checkpoints" / name_checkpoint(2), words)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert process.wait(120) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


PAIRS = ("same plan", "two ranks to eight", "tied ends apart to one")


@pytest.mark.ci("survival")
@pytest.mark.timeout(600)
def test_a_run_goes_on_under_another_plan() -> None:
    compare_pairs(PAIRS)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_runs_go_on_under_other_plans() -> None:
    compare_pairs(())


def compare_pairs(names: tuple[str, ...]) -> None:
    worker = [sys.executable, str(ROOT / "tests" / "checkpoint_worker.py"), *names]
    done = subprocess.run(worker, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    pairs = list(map(json.loads, done.stdout.splitlines()))
    assert len(pairs) >= (len(names) or 12)
    for pair in pairs:
        print(pair)  # noqa: T201
        assert "error" not in pair, pair["error"]
        assert pair["tensors"] > 100 and not pair["different"], pair["name"]
        assert pair["worst"] <= (0.0 if pair["name"] == "same plan" else 1e-14), pair["name"]
