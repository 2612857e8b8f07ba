"""Gives the ranks of a DataLoader batches of equal load, drawn from the lengths of all samples.

For trainers in which ranks wait for each other (FSDP, DDP). The samples of a step are drawn at random, and
then dealt over its microbatches and ranks. What is learned stays the same if the loss is a sum over labels
divided by their number in the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from optimus.data.dealing import deal_microbatches
from optimus.errors import UserError
from optimus.ir.op import Floats, Ints
from optimus.job.workload import PackedSequence, read_sequence_lengths

Cost = Callable[[PackedSequence], float]


def count_passes(sequence: PackedSequence) -> float:
    """Returns the tokens of a sample, those of items twice: they run through an encoder and the LLM."""
    return 2.0 * sequence.tokens - sequence.text


class BalancedBatchSampler:
    """Batches of one rank, for `batch_sampler` of a DataLoader.

    `lengths` are the loads of samples, or a file of `optimus data index` whose rows `cost` prices. A step has
    `microbatches` batches of `batch_size` samples on each of `num_replicas` data-parallel ranks. Rank and
    number of ranks are those of torch.distributed if they are left out.

    The order of an epoch follows from `seed` and the epoch alone, and the position is the number of the step:
    a run that resumes at `start_step` on other ranks has the same samples in every step of the same size.
    An epoch has every sample once. Its last step is filled with the epoch's first samples, or left out with
    `drop_last`.
    """

    def __init__(
        self,
        lengths: Sequence[float] | Path | str,
        batch_size: int,
        *,
        microbatches: int = 1,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        start_step: int = 0,
        cost: Cost = count_passes,
    ) -> None:
        if (num_replicas is None) != (rank is None):
            raise UserError(
                field="BalancedBatchSampler",
                problem=f"got {'num_replicas' if rank is None else 'rank'} without the other",
                hint="give num_replicas and rank, or neither: then they are those of torch.distributed",
            )
        if num_replicas is None or rank is None:
            rank, num_replicas = _find_rank()
        self.loads = _read_loads(lengths, cost)
        self.microbatches, self.num_replicas, self.rank = microbatches, num_replicas, rank
        self.seed, self.drop_last = seed, drop_last
        self._batch_size = batch_size
        self._check(start_step)
        self.epoch, step = divmod(start_step, self.steps_per_epoch)
        self._first = self._yielded = step * microbatches  # batches of this epoch
        self._order: tuple[int, Ints] = (-1, np.empty(0, np.int64))

    @property
    def samples_per_step(self) -> int:
        """Samples of all ranks in a step."""
        return self._batch_size * self.microbatches * self.num_replicas

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""
        samples = len(self.loads) + (0 if self.drop_last else self.samples_per_step - 1)
        return samples // self.samples_per_step

    @property
    def batch_size(self) -> int:
        """Samples of a batch; raises on several ranks, where only wrappers that shard batches ask for it."""
        if self.num_replicas > 1:
            raise UserError(
                field="BalancedBatchSampler",
                problem="gives this rank's batches already, and would be sharded over ranks again",
                hint="do not give its DataLoader to accelerator.prepare; in a Trainer, return it from"
                " get_train_dataloader",
            )
        return self._batch_size

    @property
    def batch_sampler(self) -> BalancedBatchSampler:
        """This sampler: the Trainer of transformers sets the epoch of a sampler inside another alone."""
        return self

    def __len__(self) -> int:
        return self.steps_per_epoch * self.microbatches

    def __iter__(self) -> Iterator[list[int]]:
        if self._yielded >= len(self):  # a loop that took every batch without asking for one more
            self.epoch, self._first = self.epoch + 1, 0
        self._yielded = self._first
        while self._yielded < len(self):
            step, first = divmod(self._yielded, self.microbatches)
            for microbatch in self.deal_step(self.epoch, step)[first:]:
                self._yielded += 1
                yield microbatch[self.rank]
        self.epoch, self._first, self._yielded = self.epoch + 1, 0, 0

    def draw_step(self, epoch: int, step: int) -> Ints:
        """Returns the samples of all ranks in a step, in the order in which they are drawn."""
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.loads)))
        places = np.arange(step * self.samples_per_step, (step + 1) * self.samples_per_step)
        drawn: Ints = self._order[1][places % len(self.loads)]
        return drawn

    def deal_step(self, epoch: int, step: int) -> list[list[list[int]]]:
        """Returns the samples of a step by microbatch and rank."""
        drawn = self.draw_step(epoch, step)
        dealt = deal_microbatches(self.loads[drawn].tolist(), self.microbatches, self.num_replicas)
        return [[drawn[places].tolist() for places in ranks] for ranks in dealt]

    # ------------------------------------------------------------------------ position

    def set_epoch(self, epoch: int) -> None:
        """Begins another epoch; the current one goes on where it is."""
        if epoch != self.epoch:
            self.epoch, self._first, self._yielded = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position behind the last batch that was yielded, and what it depends on."""
        step, microbatch = divmod(self._yielded, self.microbatches)
        position = {"epoch": self.epoch, "step": step, "microbatch": microbatch}
        return position | self._order_constants() | self._step_constants()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position; raises if the state is of another order of samples, or of other microbatches."""
        constants = self._order_constants()
        if state["microbatch"]:
            constants |= self._step_constants()
        for name, value in constants.items():
            if state[name] != value:
                raise UserError(
                    field=name,
                    value=value,
                    problem=f"was {state[name]} when the state was saved",
                    hint="between steps the number of ranks may change, but not the samples of a step"
                    if name in self._step_constants()
                    else "use the same, or begin an epoch with set_epoch",
                )
        self.epoch = state["epoch"]
        self._first = self._yielded = state["step"] * self.microbatches + state["microbatch"]

    def _order_constants(self) -> dict[str, Any]:
        """Returns what decides the samples of every step."""
        return {
            "seed": self.seed,
            "drop_last": self.drop_last,
            "samples": len(self.loads),
            "samples_per_step": self.samples_per_step,
        }

    def _step_constants(self) -> dict[str, Any]:
        """Returns what decides the microbatches of a step."""
        return {"num_replicas": self.num_replicas, "microbatches": self.microbatches}

    def _check(self, start_step: int) -> None:
        counts = {"batch_size": self._batch_size, "microbatches": self.microbatches}
        for name, value in {**counts, "num_replicas": self.num_replicas}.items():
            if value < 1:
                raise UserError(field=name, value=value, problem="is not positive", hint="use 1 or more")
        if not 0 <= self.rank < self.num_replicas:
            hint = f"use 0 to {self.num_replicas - 1}"
            raise UserError(field="rank", value=self.rank, problem="is not a rank", hint=hint)
        if start_step < 0:
            hint = "use the number of steps that were trained"
            raise UserError(field="start_step", value=start_step, problem="is negative", hint=hint)
        if not self.steps_per_epoch:
            problem = f"are fewer than the {self.samples_per_step} of a step, so an epoch has none"
            hint = "use drop_last=False or smaller steps"
            raise UserError(field="samples", value=len(self.loads), problem=problem, hint=hint)


def _find_rank() -> tuple[int, int]:
    """Returns the rank and the number of ranks of torch.distributed."""
    from torch import distributed

    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _read_loads(lengths: Sequence[float] | Path | str, cost: Cost) -> Floats:
    if isinstance(lengths, str | Path):
        lengths = [cost(sequence) for sequence in read_sequence_lengths(Path(lengths))]
    loads: Floats = np.asarray(lengths, np.float64)
    if loads.ndim != 1 or not len(loads) or not np.isfinite(loads).all() or loads.min() < 0:
        raise UserError(
            field="lengths",
            value=tuple(loads.shape),
            problem="are not loads of samples",
            hint="give one finite number, 0 or more, for each sample, or a file of optimus data index",
        )
    return loads
