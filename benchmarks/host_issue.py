"""Measures the CPU time of one rank's host to issue a whole step of a large plan.

Layers, layouts, lines and groups are those of the job; widths and lengths are as small as they can be, and
collectives of a fake group are over at once. What is left is what a host does: Python, torch, launches.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from optimus.engine.config import TrainingConfig
from optimus.engine.process_groups import ProcessGroups, make_process_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.torch_private import fake_process_group
from optimus.ir.plan import Plan
from optimus.job.job import Job
from optimus.job.model import Model, Stack
from optimus.job.read import find_job
from optimus.job.workload import PackedSequence
from optimus.models.collectives import AsyncCollective, TpGroup
from optimus.planner.planning import make_plan

STEPS, BARE_CALLS = 5, 20_000


def _tiny_stack(stack: Stack, tp: int) -> Stack:
    attention = replace(stack.attention, heads=tp, kv_heads=tp, head_dim=2)
    return replace(stack, hidden=2 * tp, attention=attention, mlp=replace(stack.mlp, width=tp))


def tiny(job: Job, plan: Plan) -> tuple[Job, Plan]:
    """Returns the job and plan with all widths and lengths as small as their layout allows."""
    tp = plan.ranks.llm.tp
    llm = replace(
        job.model.llm,
        stack=_tiny_stack(job.model.llm.stack, tp),
        vocab=tp,
        positions=8 * tp * bool(job.model.llm.positions),
    )
    encoders, modules, lengths = [], dict(plan.modules), {}
    for encoder in job.model.encoders:
        projector = replace(encoder.projector, widths=(llm.stack.hidden,) * len(encoder.projector.widths))
        encoders.append(
            replace(
                encoder,
                stack=_tiny_stack(encoder.stack, plan.modules[encoder.name].layout.tp),
                projector=projector,
                patch_inputs=2,
                positions=64 * bool(encoder.positions),
            )
        )
        module = plan.modules[encoder.name]
        room = projector.merge * module.layout.tp
        modules[encoder.name] = replace(module, bin_tokens=room)
        # A whole image in every encoder microbatch.
        lengths[encoder.name] = (module.layout.tp,) * module.microbatches_per_llm_microbatch
    images = sum(sum(own) for own in lengths.values())
    tokens = -(-(images + 1) // tp) * tp
    sequence = PackedSequence(text=tokens - images, items=tuple(lengths.items()))
    workload = replace(
        job.workload,
        sequence_tokens=tokens,
        sequences_per_step=plan.microbatches * plan.ranks.llm.dp,
        sequences=(sequence,),
    )
    model = Model(name="tiny", encoders=tuple(encoders), llm=llm)
    return replace(job, model=model, workload=workload), replace(plan, modules=modules)


class FakeTpGroup(TpGroup):
    """Tensor-parallel group that exchanges nothing: torch's fake backend lacks unequal all-to-all."""

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncCollective:
        came = rows.new_empty(sum(received), *rows.shape[1:])
        return AsyncCollective(None, lambda: came)


class FakeGroups(ProcessGroups):
    """Process groups whose exchanges of rows return at once."""

    def tp_group(self, plan: Plan, module: str) -> TpGroup:
        return _faked(super().tp_group(plan, module))

    def deal_group(self, plan: Plan) -> TpGroup:
        return _faked(super().deal_group(plan))


def _faked(group: TpGroup) -> TpGroup:
    return FakeTpGroup(rank=group.rank, size=group.size, group=group.group)


def issue_s(job: Job, plan: Plan, rank: int) -> tuple[float, float]:
    """Returns the least CPU seconds of a whole step, and of a bare call of torch.

    The first step, which allocates, is left out.
    """
    torch.set_num_threads(1)
    small, small_plan = tiny(job, plan)
    with fake_process_group(rank, plan.ranks.world):
        real = make_process_groups(small_plan, rank, timeout_s=60)
        groups = FakeGroups(rank=rank, members=real.members, groups=real.groups)
        one = RankTrainer(
            small, small_plan, TrainingConfig(), groups, dtype=torch.float32, device=torch.device("cpu")
        )
        batch, steps, bare = one.batch(0), [], []
        # oneDNN would make a primitive at every call, which is a kernel's work and not a launch.
        with one.executor.side_stream.inline(), torch.backends.mkldnn.flags(enabled=False):
            for _ in range(1 + STEPS):
                gc.collect()
                gc.disable()
                begin = time.process_time()
                one.executor.step(batch)
                steps.append(time.process_time() - begin)
                bare.append(_bare_call_s())
                gc.enable()
    return min(steps[1:]), min(bare)


def _bare_call_s() -> float:
    """Returns the seconds of a product of tiny matrices: the current speed of this host."""
    matrix = torch.ones(2, 2)
    begin = time.process_time()
    for _ in range(BARE_CALLS):
        torch.mm(matrix, matrix)
    return (time.process_time() - begin) / BARE_CALLS


def main(name: str, strategy: str, ranks: list[int]) -> None:
    """Prints the host seconds of a step of each rank."""
    job = find_job(name)
    plan = make_plan(job, strategy=strategy, systems=()).plan
    for rank in ranks:
        seconds, bare_s = issue_s(job, plan, rank)
        lines = len(plan.programs[plan.ranks.class_of(rank)])
        of = f"{lines} lines, {seconds:.3f} s of {plan.claims.step_s:.3f} s"
        calls = f"a line is {seconds / lines / bare_s:.1f} bare calls of {bare_s * 1e6:.2f} us"
        print(f"{name} {strategy} rank {rank}: {of}; {calls}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], list(map(int, sys.argv[3:])))
