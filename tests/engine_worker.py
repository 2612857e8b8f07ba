"""Runs cases on this host's ranks and compares every gradient with one process; prints one JSON line a case.

One parent imports everything, then forks the ranks: they start at once and share its memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from engine_bugs import BUGS
from engine_cases import CASES, Case
from one_process import OneProcess
from torch import Tensor
from torch import distributed as dist

from optimus.engine.batch_table import make_table
from optimus.engine.batches import SampleBatch
from optimus.engine.executor import Executor
from optimus.engine.groups import make_groups
from optimus.engine.rank_model import build_rank
from optimus.engine.synthetic import Synthetic
from optimus.program.ranks import LLM

TIMEOUT_S = 30
LEARNING = {"lr": 1e-3, "weight_decay": 0.01}


class RankRun:
    """One rank of a case."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.plan = case, rank, case.plan
        job = case.job
        self.data = Synthetic(job=job, seed=case.seed)
        self.per_step = job.workload.sequences_per_step
        tokens = case.sequences * job.workload.sequence_tokens
        self.model = build_rank(
            job.model,
            self.plan,
            rank,
            llm_tokens=tokens,
            dtype=torch.float64,
            seed=case.seed,
            numerics=case.all_numerics,
            fuse=not case.segments,
        )
        groups = make_groups(self.plan, rank, timeout_s=TIMEOUT_S)
        self.executor = Executor(
            self.plan,
            groups,
            self.model.chunks,
            self.model.shapes,
            device=torch.device("cpu"),
            tied=self.model.tied,
        )
        self.replica = self.plan.ranks.place(LLM, rank).dp

    def numbers(self, step: int) -> range:
        return range(step * self.per_step, (step + 1) * self.per_step)

    def batch(self, step: int) -> SampleBatch:
        numbers = self.numbers(step)
        own = len(numbers) // self.plan.ranks.llm.dp
        mine = numbers[self.replica * own : (self.replica + 1) * own]
        table = make_table(self.plan, [self.data.sizes(number) for number in mine])
        return SampleBatch(
            self.case.job.model,
            self.plan,
            self.plan.ranks.class_of(self.rank),
            table,
            self.data.sample,
            scale=1.0 / sum(self.data.labels(number) for number in numbers),
            seed=self.case.seed,
            step=step,
            dtype=torch.float64,
            numerics=self.case.all_numerics,
        )

    def step(self, step: int) -> float:
        loss = self.executor.step(self.batch(step))
        total = torch.zeros((), dtype=torch.float64) if loss is None else loss
        dist.all_reduce(total)
        return float(total)

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.model.parameters.items()
            if parameter.requires_grad
        }

    def optimizer(self) -> torch.optim.Optimizer | None:
        trained = self.model.trained
        return torch.optim.AdamW(trained, foreach=False, **LEARNING) if trained else None


def everybody(mine: Any) -> list[Any]:
    """What every rank has, on rank 0."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, found if dist.get_rank() == 0 else None)
    return found


def worst(given: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> float:
    """The largest difference of any rank, relative to the largest number of all; infinite if names miss."""
    scale = max((float(tensor.abs().max()) for tensor in expected.values()), default=1.0) or 1.0
    seen: set[str] = set()
    found = 0.0
    for of_rank in given:
        for name, tensor in of_rank.items():
            plain = name.removesuffix(" (head)")
            seen.add(plain)
            difference = float((tensor - expected[plain]).abs().max()) / scale
            found = max(found, difference if difference == difference else float("inf"))
    return found if seen == set(expected) else float("inf")


def compare(case: Case, rank: int, *, steps: int) -> dict[str, Any]:
    """Loss and gradients of one step, parameters after `steps`, and the same once more, bit by bit."""
    run = RankRun(case, rank)
    loss = run.step(0)
    gradients = everybody(run.gradients())
    digest = hashlib.sha256()
    optimizer = run.optimizer()
    for step in range(steps):
        run.step(step)
        if optimizer is not None:
            optimizer.step()
    for parameter in run.model.parameters.values():
        digest.update(parameter.detach().numpy().tobytes())
    digests = everybody(digest.hexdigest())
    named = run.model.parameters.items()
    learned = everybody({name: tensor.detach() for name, tensor in named if tensor.requires_grad})
    if rank:
        return {}
    one = OneProcess(case.job.model, seed=case.seed, numerics=case.all_numerics)
    samples = [run.data.sample(number) for number in run.numbers(0)]
    expected_loss, expected = one.loss_and_gradients(samples, 0)
    found = {
        "loss": abs(loss - expected_loss) / abs(expected_loss),
        "gradients": worst(gradients, expected),
        "digests": digests,
    }
    if steps:
        batches = [[run.data.sample(number) for number in run.numbers(step)] for step in range(steps)]
        one = OneProcess(case.job.model, seed=case.seed, numerics=case.all_numerics)
        one.train(batches, **LEARNING)
        trained = {name: p.detach() for name, p in one.parameters().items() if p.requires_grad}
        found["parameters"] = worst(learned, trained)
    return found


Work = Callable[[Case, int], dict[str, Any]]


def run_rank(rank: int, case: Case, store: Path, work: Work, result: Path) -> int:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), case.ranks),
        rank=rank,
        world_size=case.ranks,
        timeout=torch.distributed.distributed_c10d.timedelta(seconds=TIMEOUT_S),
    )
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


def main(what: str, names: list[str]) -> None:
    """Cases compared after `what` steps of training, or with `bugs` every bug on its case."""
    if what == "bugs":
        by_name = {case.name: case for case in CASES}
        for name, (of, plant) in BUGS.items():
            if not names or name in names:
                found = play(by_name[of], lambda case, rank: compare(case, rank, steps=2), plant)
                print(json.dumps({"name": name, **found}), flush=True)  # noqa: T201
        return
    for case in CASES:
        if not names or case.name in names:
            found = play(case, lambda case, rank: compare(case, rank, steps=int(what)))
            print(json.dumps({"name": case.name, **found}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
