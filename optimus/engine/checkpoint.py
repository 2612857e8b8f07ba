"""Saves checkpoints beside training, and loads them after they are verified, under any layout."""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from optimus.engine.checkpoint_folder import (
    MANIFEST,
    METADATA,
    CheckpointConfig,
    Manifest,
    damaged,
    describe_file,
    list_checkpoints,
    list_expired,
    lock_folder,
    name_checkpoint,
    remove_checkpoint,
    verify_files,
)
from optimus.engine.checkpoint_state import State, copy_state, stage
from optimus.engine.checkpoint_storage import (
    ShardedLoadPlanner,
    ShardedSavePlanner,
    StateReader,
    StateWriter,
)
from optimus.errors import OptimusError, UserError
from optimus.ir.files import sync_directory, write_file_atomically


def run_on_first(act: Callable[[], object], group: dist.ProcessGroup) -> tuple[str, str]:
    """Runs a function on the first rank; returns its result, or what went wrong, on all ranks."""
    outcome: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            outcome = [(str(act()), "")]
        except OSError as error:
            outcome = [("", error.strerror or str(error))]
        except OptimusError as error:
            outcome = [("", str(error).splitlines()[0].removeprefix("error: "))]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    result: tuple[str, str] = outcome[0]
    return result


def take_folder(folder: Path, group: dist.ProcessGroup) -> list[BinaryIO]:
    """Locks a folder of checkpoints for this run; returns the lock, which the first rank keeps open.

    Raises, on all ranks, if another run writes there.
    """
    locks: list[BinaryIO] = []
    _, problem = run_on_first(lambda: locks.append(lock_folder(folder)), group)
    if problem:
        raise UserError(field=str(folder), problem=problem, hint="end that run, or use another folder")
    return locks


# ---------------------------------------------------------------------------- loading


def find_newest(folder: Path, group: dist.ProcessGroup | None) -> tuple[Path, Manifest] | None:
    """Returns the newest checkpoint that verifies, the same on all ranks; says which ones do not.

    Raises if there are checkpoints and none verifies. Ranks share the work of reading.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    listed: list[Any] = [list_checkpoints(folder) if rank == 0 else None]
    dist.broadcast_object_list(listed, group=group, group_src=0)
    for path in listed[0]:
        problems: list[Any] = [None] * world
        manifest: Manifest | None = None
        try:
            manifest = Manifest.load(path)
            verify_files(path, manifest, part=rank, parts=world)
            problem = ""
        except OptimusError as error:
            problem = str(error)
        dist.all_gather_object(problems, problem, group=group)
        if not any(problems):
            assert manifest is not None
            return path, manifest
        if rank == 0:
            first = next(filter(None, problems)).splitlines()[0].removeprefix("error: ")
            sys.stderr.write(f"warning: {first}; it is not used\n")
    if listed[0]:
        raise UserError(
            field=str(folder),
            problem="has checkpoints, and none of them is whole",
            hint="restore one of them, or begin again in another --run-dir",
        )
    return None


def load_state(folder: Path, state: State, group: dist.ProcessGroup | None) -> None:
    """Fills a state from a checkpoint, whatever layout wrote it; all ranks of the group call it."""
    try:
        dcp.load(
            {},
            storage_reader=StateReader(folder),
            planner=ShardedLoadPlanner(state, folder),
            process_group=group,
        )
    except CheckpointException as error:
        raise _first_failure(error, folder) from None


def load_alone(folder: Path, state: State) -> None:
    """Fills a state from a checkpoint in one process, without a process group."""
    reader, planner = StateReader(folder), ShardedLoadPlanner(state, folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner({}, metadata)
    reader.read_data(planner.create_local_plan(), planner)


def _first_failure(error: CheckpointException, folder: Path) -> OptimusError:
    cause = error.failures[min(error.failures)][0]
    return cause if isinstance(cause, OptimusError) else damaged(folder, f"cannot be read: {cause}")


# ---------------------------------------------------------------------------- saving


class CheckpointWriter:
    """Saves the state of all ranks, in a thread of each; the ranks train on while it writes.

    Every rank calls every method at the same steps. Only one checkpoint is written at a time: `save` waits
    for the previous one. What cannot be written is said once, and training goes on. `group` has all ranks and
    no other user: threads and training communicate at the same time.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, group: dist.ProcessGroup) -> None:
        self._folder, self._config, self._group = folder, config, group
        self._rank = dist.get_rank(group)
        self._staged: State = {}
        self._thread = ThreadPoolExecutor(1, "optimus checkpoint")
        self._writing: Future[str] | None = None
        self.last_saved: Path | None = None
        self._step = -1

    def save(self, step: int, facts: Mapping[str, Any], state: State) -> None:
        """Copies a state and begins to write it; returns when it may change.

        Boxes of a rank are the same each time, so that memory for the copy is allocated once.
        """
        self.wait()
        self._staged = self._staged or stage(state)
        copy_state(self._staged, state)
        self._step = step
        self._writing = self._thread.submit(self._write, step, facts)

    def wait(self) -> bool:
        """Waits until nothing is written; tells if what was written is complete."""
        if self._writing is None:
            return True
        problem, self._writing = self._writing.result(), None
        if not problem:
            self.last_saved = self._folder / name_checkpoint(self._step)
        elif self._rank == 0:
            sys.stderr.write(
                f"warning: the checkpoint of step {self._step} is not saved: {problem}; "
                "training goes on, and the previous one is kept\n"
            )
        return not problem

    def _write(self, step: int, facts: Mapping[str, Any]) -> str:
        """Writes a checkpoint; returns what went wrong, the same on all ranks, or nothing."""
        temporary, problem = run_on_first(lambda: self._make_temporary(step), self._group)
        if problem:
            return problem
        folder = Path(temporary)
        try:
            dcp.save(
                {},
                storage_writer=StateWriter(folder),
                planner=ShardedSavePlanner(self._staged),
                process_group=self._group,
            )
            files, mine = self._describe_files(folder), ""
        except CheckpointException as error:
            files, mine = {}, str(error.failures[min(error.failures)][0]).splitlines()[0]
        except OSError as error:
            files, mine = {}, str(error)
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, (files, mine), group=self._group)
        problem = next((problem for _, problem in everyone if problem), "")
        if not problem:
            manifest = Manifest(
                step=step, facts=facts, files={name: each[name] for each, _ in everyone for name in each}
            )
            _, problem = run_on_first(lambda: self._complete(folder, manifest), self._group)
        if problem and self._rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return problem

    def _make_temporary(self, step: int) -> Path:
        temporary = self._folder / f".{name_checkpoint(step)}.{secrets.token_hex(8)}.tmp"
        temporary.mkdir(mode=0o777)
        return temporary

    def _describe_files(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Returns lengths and SHA-256 of the files that this rank has written."""
        paths = list(folder.glob(f"__{self._rank}_*"))
        if self._rank == 0:
            paths += [folder / METADATA, folder / ".metadata"]
        return {path.name: describe_file(path) for path in paths}

    def _complete(self, folder: Path, manifest: Manifest) -> None:
        """Gives a checkpoint its name; removes those that are no longer to be kept."""
        write_file_atomically(folder / MANIFEST, manifest.dumps())
        path = self._folder / name_checkpoint(manifest.step)
        if path.exists():  # of a run that went back behind it
            remove_checkpoint(path)
        folder.rename(path)
        sync_directory(self._folder)
        for old in list_expired(list_checkpoints(self._folder), self._config):
            remove_checkpoint(old)
