"""Runs cases on this host's ranks and compares every gradient with one process; prints one JSON line a case.

One parent imports everything, then forks the ranks: they start at once and share its memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from async_device import DEVICE, AsyncNetwork, installed
from context_parallel_bugs import CP_BUGS
from engine_bugs import BUGS
from engine_cases import (
    CASES,
    CP,
    CP_SHARDED,
    CURVES,
    DEALT,
    HALF,
    SHARDED,
    SIXTEEN,
    SYSTEMS,
    TP,
    TP_SHARDED,
    Case,
)
from one_process import OneProcess, plain_adamw
from sharding_bugs import SHARDING_BUGS
from stream_bugs import STREAM_BUGS
from strict_network import MANY_QUEUES, StrictNetwork
from tensor_parallel_bugs import TP_BUGS
from torch import Tensor
from torch import distributed as dist

from optimus.data import dealing
from optimus.engine import fill_schedule, rank_trainer
from optimus.engine.buckets import ReplicatedBucket, view_as_params
from optimus.engine.config import TrainingConfig
from optimus.engine.optimizer_config import ModuleOptimizer, OptimizerConfig
from optimus.engine.process_groups import build_tp_group, make_process_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.sharded_bucket import ShardedBucket
from optimus.engine.synthetic_data import SyntheticDataset
from optimus.job import workload
from optimus.models.build import build_layers, named_parameters
from optimus.models.collectives import ParamSplit, all_gather_single
from optimus.models.sample import ItemKeys, Sample, SampleItem
from optimus.planner import context

TIMEOUT_S = 30
# NETWORK=strict: gloo with NCCL's rules; unconnected: the same without `connect_groups`; "strict 8": with 8
# launch queues; async: strict, and steps run on streams as on a GPU.
NETWORK, *QUEUES = os.environ.get("NETWORK", "gloo").split()
STRICT = (AsyncNetwork if NETWORK == "async" else StrictNetwork)(
    queues=int(QUEUES[0]) if QUEUES else MANY_QUEUES, timeout_s=5 if NETWORK == "unconnected" else TIMEOUT_S
)
LR = 1e-3
EVAL_BATCHES = 2
OPTIMIZER = OptimizerConfig(
    lr=LR,
    weight_decay=0.05,
    betas=(0.9, 0.95),
    schedule="cosine",
    decay_steps=60,
    min_lr=LR / 10,
    modules={
        "vision": ModuleOptimizer(lr=LR / 2),
        "vision.projector": ModuleOptimizer(lr=2 * LR),
        "audio.projector": ModuleOptimizer(lr=LR / 3),
    },
)


class VariedDataset(SyntheticDataset):
    """Images that are videos of two frames where they can be, and two documents in every sample."""

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        sample = super().sample(number)
        varied = {name: tuple(map(_as_video, made)) for name, made in sample.items.items()}
        starts = [item.offset for of_encoder in varied.values() for item in of_encoder if item.offset]
        cut = starts[number % len(starts)] if starts else sample.length // 2
        return replace(sample, items=varied, documents=(cut, sample.length - cut))


def _as_video(item: SampleItem) -> SampleItem:
    height, width = item.grid if len(item.grid) == 2 else (0, 0)
    return item if height < 4 else replace(item, grid=(height // 2, 2, width))


class RankRun:
    """One rank of a case."""

    learning = OPTIMIZER

    def __init__(self, case: Case, rank: int, **options: Any) -> None:
        self.case, self.rank, self.plan = case, rank, case.plan
        self.dtype = getattr(torch, case.dtype)
        if case.varied:
            options = {"dataset": VariedDataset(job=case.job, seed=case.seed), **options}
        self.built = RankTrainer(
            case.job,
            self.plan,
            TrainingConfig(
                seed=case.seed, optimizer=replace(self.learning, clip=case.clip), eval_batches=EVAL_BATCHES
            ),
            make_process_groups(self.plan, rank, timeout_s=TIMEOUT_S),
            dtype=self.dtype,
            device=torch.device("cpu"),
            recorder=self,
            fuse=not case.segments,
            bucket_type=ShardedBucket if case.sharded else ReplicatedBucket,
            **options,
        )
        self.model, self.data, self.buckets = (
            self.built.model,
            self.built.dataset,
            self.built.executor.buckets,
        )
        self.executor, self.batch = self.built.executor, self.built.batch
        STRICT.sealed = NETWORK in ("strict", "async")
        named = {name: p for name, p in self.model.parameters.items() if p.requires_grad}
        self._learns = None if case.sharded or not named else plain_adamw(named, self.learning)
        self.narrow = 0
        self.trains = False  # the first step shows gradients, and changes nothing

    @property
    def trains(self) -> bool:
        """True if steps change parameters."""
        return self._trains

    @trains.setter
    def trains(self, trains: bool) -> None:
        self._trains = trains
        self.executor.optimizer = self.built.optimizer if trains else None

    @cached_property
    def splits(self) -> dict[str, ParamSplit]:
        """Shards of the parameters of all ranks, by name."""
        return {
            name: split
            for module in self.case.job.model.modules
            for name, _, split in named_parameters(
                module, build_layers(module, dtype=self.dtype, device="meta")
            )
            if split is not None
        }

    def numbers(self, step: int) -> list[int]:
        return self.built.step_samples.numbers(step)

    def play(self, step: int) -> float:
        if self._learns is not None:
            self._learns[0].zero_grad()
        if self.built.optimizer is not None:
            self.built.optimizer.set_learning_rate(step)
        batch = self.batch(step)
        with DEVICE.running() if NETWORK == "async" else nullcontext():
            loss = self.executor.step(batch)
        if self.trains and self._learns is not None:
            for part in self._learns:
                part.step()
        total = torch.zeros((), dtype=torch.float64) if loss is None else loss.double()
        dist.all_reduce(total)
        return float(total)

    def begin(self, line: int) -> None:
        DEVICE.line = line

    def end(self, line: int) -> None:
        """After every line of the program: whether gradients are still wide, and in their bucket."""
        if self.case.sharded:
            self.narrow += sum(
                view.dtype != (torch.float64 if self.dtype == torch.float64 else torch.float32)
                or parameter.grad is None
                or parameter.grad.data_ptr() != view.data_ptr()
                for bucket in self.buckets
                if isinstance(bucket, ShardedBucket)
                for parameter, view in zip(bucket.parameters, bucket.grad_views, strict=True)
            )

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of the whole batch, by name."""
        for bucket in self.buckets:
            if isinstance(bucket, ShardedBucket) and bucket.group is not None:
                bucket.begin_gradients()
                all_gather_single(bucket.grad_buffer, bucket.reduced_grad, bucket.group)
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.model.parameters.items()
            if parameter.requires_grad
        }

    def learned(self) -> dict[str, Tensor]:
        """Parameters that changed, as the next step would see them."""
        for bucket in (*self.buckets, *self.buckets.frozen):
            bucket.gather()
            bucket.wait_gathered()
        named = self.model.parameters.items()
        return {name: parameter.detach() for name, parameter in named if parameter.requires_grad}

    def masters(self) -> dict[str, Tensor]:
        """Returns the masters of all replicas, in the type in which they are updated."""
        names = {id(parameter): name for name, parameter in self.model.parameters.items()}
        found = {}
        for bucket in self.buckets:
            assert isinstance(bucket, ShardedBucket)
            flat = torch.empty_like(bucket.grad_buffer)
            if bucket.group is None:
                flat.copy_(bucket.master.detach())
            else:
                all_gather_single(flat, bucket.master.detach(), bucket.group)
            views = view_as_params(flat, bucket.parameters)
            found.update({names[id(p)]: view for p, view in zip(bucket.parameters, views, strict=True)})
        return found


def everybody(mine: Any) -> list[Any]:
    """Returns the values of all ranks on rank 0."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, found if dist.get_rank() == 0 else None)
    return found


def worst(given: list[dict[str, Tensor]], expected: dict[str, Tensor], run: RankRun | None = None) -> float:
    """The largest difference of any rank, relative to the largest number of all; infinite if names miss."""
    scale = max((float(tensor.abs().max()) for tensor in expected.values()), default=1.0) or 1.0
    seen: set[str] = set()
    found = 0.0
    for rank, of_rank in enumerate(given):
        for name, tensor in of_rank.items():
            plain = _plain(name)
            seen.add(plain)
            right = expected[plain] if run is None else part_of(run, rank, plain, expected)
            difference = float((tensor - right).abs().max()) / scale
            found = max(found, difference if difference == difference else float("inf"))
    return found if seen == set(expected) else float("inf")


def part_of(run: RankRun, rank: int, name: str, whole: dict[str, Tensor]) -> Tensor:
    """Returns the part of a parameter that a rank holds."""
    tp_group = build_tp_group(run.plan, name.split(".")[0], rank)
    split = run.splits.get(name)
    return whole[name] if split is None else split.shard(whole[name], tp_group.rank, tp_group.size)


def compare(case: Case, rank: int, *, steps: int) -> dict[str, Any]:
    """Loss and gradients of one step, parameters after `steps`, and the same once more, bit by bit."""
    run = RankRun(case, rank)
    loss = run.play(0)
    gradients = everybody(run.gradients())
    digest = hashlib.sha256()
    run.trains = True
    for step in range(steps):
        run.play(step)
    mine = run.learned()
    for parameter in run.model.parameters.values():
        digest.update(parameter.detach().numpy().tobytes())
    digests, learned = everybody(digest.hexdigest()), everybody(mine)
    if rank:
        return {}
    one = OneProcess(case.job.model, seed=case.seed)
    samples = [run.data.sample(number) for number in run.numbers(0)]
    expected_loss, expected = one.loss_and_gradients(samples, 0)
    if run.built.optimizer is not None:
        assert not run.narrow and run.built.optimizer.grad_norm is not None
        assert run.built.optimizer.grad_norm > case.clip
    found = {
        "loss": abs(loss - expected_loss) / abs(expected_loss),
        "gradients": worst(gradients, expected, run),
        "digests": digests,
        "carried": sum(run.built.step_samples.count_carried(step) for step in range(steps)),
        "moved": count_moved_items(run),
    }
    if steps:
        batches = [[run.data.sample(number) for number in run.numbers(step)] for step in range(steps)]
        one = OneProcess(case.job.model, seed=case.seed)
        one.train(batches, clip=case.clip, config=OPTIMIZER)
        trained = {name: p.detach() for name, p in one.parameters().items() if p.requires_grad}
        found["parameters"] = worst(learned, trained, run)
    return found


def count_moved_items(run: RankRun) -> int:
    """Returns the items of the first step that another replica of the group encodes than reads."""
    table = run.built.batch_plan(0)
    homes = {
        number: replica
        for replica, of_replica in enumerate(table.samples)
        for number in chain.from_iterable(of_replica)
    }
    return sum(
        homes[item.sample] != replica
        for of_encoder in table.bins.values()
        for replica, bins in enumerate(of_encoder)
        for item in chain.from_iterable(bins)
    )


def curve(case: Case, rank: int, *, steps: int) -> dict[str, Any]:
    """Losses of training; of one process, too, if it is the first plan."""
    run = RankRun(case, rank)
    run.trains = True
    losses = [run.play(step) for step in range(steps)]
    carried = sum(run.built.step_samples.count_carried(step) for step in range(steps))
    found: dict[str, Any] = {"losses": losses, "carried": carried}
    if rank == 0 and case == CURVES[0]:
        batches = [[run.data.sample(number) for number in run.numbers(step)] for step in range(steps)]
        found["one process"] = OneProcess(case.job.model, seed=case.seed).train(batches, config=OPTIMIZER)
    return found


def compare_logs(case: Case, rank: int, *, steps: int) -> dict[str, Any]:
    """Losses of training with masters in parts, and with all of them everywhere."""
    logs = []
    for each in (replace(case, clip=0.0), replace(case, clip=0.0, sharded=False)):
        run = RankRun(each, rank)
        run.trains = True
        logs.append([run.play(step) for step in range(steps)])
    return {"sharded": logs[0], "whole": logs[1]}


def compare_half(case: Case, rank: int, *, steps: int) -> dict[str, Any]:
    """Errors of gradients against float64: ours, and of one process in the same type with wide gradients."""
    run = RankRun(case, rank)
    run.play(0)
    gradients, narrow = everybody(run.gradients()), everybody(run.narrow)
    run.trains = True
    for step in range(steps):
        run.play(step)
    learned = everybody(run.masters())
    if rank:
        return {}
    model, samples = case.job.model, [run.data.sample(number) for number in run.numbers(0)]
    exact, half = (OneProcess(model, dtype=dtype, seed=case.seed) for dtype in (torch.float64, run.dtype))
    expected, other = (one.loss_and_gradients(samples, 0)[1] for one in (exact, half))
    batches = [[run.data.sample(number) for number in run.numbers(step)] for step in range(steps)]
    exact.train(batches, clip=case.clip, config=OPTIMIZER)
    trained = {name: p.detach() for name, p in exact.parameters().items() if p.requires_grad}
    begun = OneProcess(model, seed=case.seed).parameters()
    moved = {name: tensor - begun[name].detach() for name, tensor in trained.items()}
    return {
        "ours": max(error(of_rank, expected) for of_rank in gradients),
        "one process": error(other, expected),
        "narrow": sum(narrow),
        "moved": max(
            error({n: t.double() - begun[_plain(n)].detach() for n, t in of_rank.items()}, moved)
            for of_rank in learned
        ),
    }


def error(given: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the error of all numbers together, relative to all of them."""
    pairs = [(tensor.double(), expected[_plain(name)]) for name, tensor in given.items()]
    wrong = sum(float((found - right).square().sum()) for found, right in pairs)
    return math.sqrt(wrong / (sum(float(right.square().sum()) for _, right in pairs) or 1.0))


def _plain(name: str) -> str:
    return name.removesuffix(" (head)")


Work = Callable[[Case, int], dict[str, Any]]


def run_rank(rank: int, case: Case, store: Path, work: Work, result: Path) -> int:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    if NETWORK != "gloo":
        STRICT.register()
    if NETWORK == "unconnected":
        for module in (rank_trainer, fill_schedule):
            patch.object(module, "connect_groups", lambda *_: None).start()
    dist.init_process_group(
        "gloo" if NETWORK == "gloo" else "strict",
        store=dist.FileStore(str(store), case.ranks),
        rank=rank,
        world_size=case.ranks,
        timeout=torch.distributed.distributed_c10d.timedelta(seconds=TIMEOUT_S),
    )
    with installed() if NETWORK == "async" else nullcontext():
        found = work(case, rank)
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    return 0


def play(
    case: Case, work: Work, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> dict[str, Any]:
    """Forks the ranks of a case; what rank 0 found, or the errors of all ranks."""
    _ = case.plan  # made once, for all
    with tempfile.TemporaryDirectory() as folder:
        store, result = Path(folder, "store"), Path(folder, "result")
        children = []
        for rank in range(case.ranks):
            child = os.fork()
            if not child:
                code = 1
                try:
                    with around():
                        code = run_rank(rank, case, store, work, result)
                except BaseException:
                    Path(folder, f"error{rank}").write_text(traceback.format_exc())
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
            return {"error": "\n".join(errors) or f"exit codes {codes}"}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


@contextmanager
def limits(case: Case) -> Iterator[None]:
    """Sets the room of a step and the replicas that deal to each other to those of a case."""
    with (
        patch.object(workload, "CAPACITY_SIGMAS", case.sigmas),
        patch.object(dealing, "MAX_REPLICAS", case.dealing),
        patch.object(context, "SMALL_ENCODER_SHARE", context.SMALL_ENCODER_SHARE * case.small_encoders),
    ):
        yield


def main(what: str, names: list[str]) -> None:
    """Cases after `what` steps of training; with `bugs` every bug on its case; `bf16` in that type.

    All plain ones if none is named; `sharded`, `tp` and `cp` are all of those.
    """
    if what.endswith("bugs"):
        every = (*CASES, *SHARDED, *HALF, *TP, *TP_SHARDED, *CP, *DEALT, *SYSTEMS)
        by_name = {case.name: case for case in every}
        special = {"sharding": SHARDING_BUGS, "tp": TP_BUGS, "cp": CP_BUGS, "stream": STREAM_BUGS}
        bugs = special.get(what.removesuffix("-bugs"), BUGS)
        for name, (of, plant) in bugs.items():
            if not names or name in names:
                look = compare_half if by_name[of].dtype != "float64" else compare
                with limits(by_name[of]):
                    found = play(by_name[of], partial(look, steps=2), plant)
                print(json.dumps({"name": name, **found}), flush=True)  # noqa: T201
        return
    look = {"bf16": compare_half, "logs": compare_logs, "curves": curve}.get(what, compare)
    steps = {"bf16": 3, "logs": 50, "curves": 50}.get(what) or int(what)
    groups = {
        "sharded": SHARDED,
        "tp": TP,
        "tp-sharded": TP_SHARDED,
        "cp": CP,
        "cp-sharded": CP_SHARDED,
        "dealt": DEALT,
        "systems": SYSTEMS,
        "sixteen": SIXTEEN,
        "curves": CURVES,
    }
    if names and names[0] not in groups:
        every = (*CASES, *HALF, *chain.from_iterable(groups.values()))
        by_name = {case.name: case for case in every}
        cases = [by_name[name] for name in names]
    else:
        cases = HALF if what == "bf16" else groups[names[0]] if names else CASES
    for case in cases:
        with limits(case):
            found = play(case, partial(look, steps=steps))
        print(json.dumps({"name": case.name, **found}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
