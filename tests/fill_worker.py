"""Trains small modules by `FillSchedule` and compares with one process; prints one JSON line a case."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from engine_worker import everybody, play, worst
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from optimus.engine.fill_schedule import FillSchedule
from optimus.engine.process_groups import replica_mesh
from optimus.ir.plan import EncoderBlocks, Plan, Seconds
from optimus.ir.ranks import LLM
from optimus.planner.user_modules import plan_modules

WIDTH, ROWS, IMAGES = 4, 3, 2  # of a microbatch; rows of one piece
TRAINED = Seconds(forward_s=1.0, backward_s=2.0, weight_s=1.0)
STEPS, RATE = 2, 0.5
FROZEN = Seconds(forward_s=1.0, backward_s=0.0)


@dataclass(frozen=True, kw_only=True)
class FillCase:
    """Encoders are pp, pieces, and how many of their four blocks are frozen."""

    name: str
    ranks: int
    pp: int
    chunks: int = 1
    microbatches: int = 4
    order: str = ""
    encoders: tuple[tuple[int, int, int], ...] = ((1, 1, 0),)
    wrap: str = ""  # "ddp", "fsdp", or "nested": FSDP2 around every linear, too

    @property
    def replicas(self) -> int:
        return self.ranks // self.pp

    @cached_property
    def plan(self) -> Plan:
        return plan_modules(
            stages=[TRAINED] * (self.pp * self.chunks),
            encoders={
                f"encoder{at}": EncoderBlocks(
                    blocks=[FROZEN] * frozen + [TRAINED] * (4 - frozen), pp=pp, pieces=pieces
                )
                for at, (pp, pieces, frozen) in enumerate(self.encoders)
            },
            microbatches=self.microbatches,
            ranks=self.ranks,
            pp=self.pp,
            order=self.order,
        )


CASES = [
    FillCase(name="one encoder", ranks=2, pp=2),
    FillCase(name="two encoders", ranks=2, pp=2, encoders=((1, 1, 0), (2, 1, 0))),
    FillCase(name="encoder pp 2", ranks=4, pp=4, encoders=((2, 1, 0),)),
    FillCase(name="pieces", ranks=2, pp=2, encoders=((1, 2, 0),)),
    FillCase(name="zero-bubble", ranks=2, pp=2, order="zero-bubble", encoders=((2, 1, 0), (1, 2, 0))),
    FillCase(name="two by two", ranks=4, pp=2, encoders=((1, 1, 0), (2, 2, 0))),
    FillCase(name="interleaved", ranks=2, pp=2, chunks=2),
    FillCase(name="zero-bubble interleaved", ranks=2, pp=2, chunks=2, order="zero-bubble"),
    FillCase(name="frozen encoder", ranks=2, pp=2, encoders=((2, 1, 4), (1, 1, 0))),
    FillCase(name="frozen trunk", ranks=2, pp=2, encoders=((2, 1, 2),)),
    FillCase(name="no encoder", ranks=2, pp=2, encoders=()),
    FillCase(name="DDP", ranks=4, pp=2, encoders=((1, 1, 0), (2, 2, 0)), wrap="ddp"),
    FillCase(name="FSDP2", ranks=4, pp=2, encoders=((1, 1, 0), (2, 2, 2)), wrap="fsdp"),
    FillCase(name="FSDP2 zero-bubble", ranks=4, pp=2, chunks=2, order="zero-bubble", wrap="fsdp"),
    FillCase(name="FSDP2 nested", ranks=4, pp=2, chunks=2, encoders=((1, 2, 0),), wrap="nested"),
    FillCase(name="FSDP2 replicas", ranks=4, pp=1, encoders=((1, 1, 1),), wrap="nested"),
    FillCase(name="FSDP2 idle replicas", ranks=4, pp=4, microbatches=2, wrap="fsdp"),
    FillCase(name="FSDP2 frozen", ranks=4, pp=2, encoders=((1, 1, 4), (2, 1, 4)), wrap="nested"),
]


# ---------------------------------------------------------------------------- modules


class Stage(nn.Module):  # type: ignore[misc]
    """The first of the LLM also takes the rows of encoders, each with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *encoded: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        for number, rows in enumerate(encoded):
            found = found + (number + 1) * rows.tanh().mean(0)
        return found.tanh()


class Shift(nn.Module):  # type: ignore[misc]
    """Autograd gives its parameter the very tensor that it hands back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(IMAGES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Scale(nn.Module):  # type: ignore[misc]
    """Autograd gives its parameter one number for all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def make_stages(case: FillCase) -> list[Stage]:
    torch.manual_seed(1)
    return [Stage().double() for _ in range(case.pp * case.chunks)]


def make_encoders(case: FillCase) -> dict[str, list[nn.Module]]:
    torch.manual_seed(2)
    found: dict[str, list[nn.Module]] = {}
    for at, (_, _, frozen) in enumerate(case.encoders):
        tanh = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        blocks = [nn.Linear(WIDTH, WIDTH), Shift(), tanh, Scale()]
        for number, block in enumerate(blocks):
            block.double().requires_grad_(number >= frozen)
        found[f"encoder{at}"] = blocks
    return found


def wrapped(case: FillCase, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if case.wrap == "ddp":
        learns = any(parameter.requires_grad for parameter in module.parameters())
        return DistributedDataParallel(module, process_group=mesh.get_group()) if learns else module
    if case.wrap == "nested":
        for part in module.children():
            if isinstance(part, nn.Linear):
                fully_shard(part, mesh=mesh)
    return fully_shard(module, mesh=mesh) if case.wrap else module


def wrap_all(
    case: FillCase, rank: int, stages: dict[int, nn.Module], encoders: dict[str, list[nn.Module]]
) -> None:
    """As a user might: all stages, and blocks that this rank runs."""
    plan = case.plan
    mesh = replica_mesh(plan, LLM)
    for number in stages:
        stages[number] = wrapped(case, stages[number], mesh)
    for name, blocks in encoders.items():
        mesh, pp = replica_mesh(plan, name), plan.modules[name].layout.pp
        first = plan.ranks.stage_of(name, plan.ranks.class_of(rank)) * len(blocks) // pp
        for at in range(first, first + len(blocks) // pp):
            blocks[at] = wrapped(case, blocks[at], mesh)


def in_parts(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """True if modules hold the parameters that they held: FSDP2 swaps them for whole ones and back."""
    return all(before[name] is parameter for name, parameter in after.items())


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def make_batch(case: FillCase, replica: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3 + replica)

    def rows(count: int) -> Tensor:
        return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)

    images = {
        f"encoder{at}": rows(case.microbatches * pieces * IMAGES)
        for at, (_, pieces, _) in enumerate(case.encoders)
    }
    return rows(case.microbatches * ROWS), images, rows(case.microbatches * ROWS)


def named(stages: Mapping[int, nn.Module], encoders: Mapping[str, list[nn.Module]]) -> dict[str, Tensor]:
    """Trained parameters; stages by their virtual number."""
    modules: dict[str, nn.Module] = {f"stage{number}": stage for number, stage in stages.items()}
    modules |= {f"{name}.{at}": block for name, blocks in encoders.items() for at, block in enumerate(blocks)}
    return {
        f"{name}.{own}": parameter
        for name, module in modules.items()
        for own, parameter in module.named_parameters()
        if parameter.requires_grad
    }


# ---------------------------------------------------------------------------- both ways


def learn(parameters: Iterable[Tensor]) -> None:
    """Updates parameters as an optimizer would."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(RATE * parameter.grad)
                parameter.grad = None


def one_process(case: FillCase) -> list[tuple[dict[str, Tensor], list[list[float]], list[Tensor]]]:
    """Of every step: gradients of the mean over microbatches and replicas; losses and outputs of each."""
    stages, encoders = make_stages(case), make_encoders(case)
    found = []
    for _ in range(STEPS):
        found.append(one_step(case, stages, encoders))
        learn(named(dict(enumerate(stages)), encoders).values())
    return found


def one_step(
    case: FillCase, stages: list[Stage], encoders: dict[str, list[nn.Module]]
) -> tuple[dict[str, Tensor], list[list[float]], list[Tensor]]:
    losses: list[list[float]] = []
    outputs = []
    for replica in range(case.replicas):
        x, images, target = make_batch(case, replica)
        losses.append([])
        made = []
        for at in range(case.microbatches):
            encoded: list[Tensor] = []
            for name, blocks in encoders.items():
                pieces = len(images[name]) // IMAGES // case.microbatches
                parts = images[name].split(IMAGES)[at * pieces : (at + 1) * pieces]
                encoded += [nn.Sequential(*blocks)(part) for part in parts]
            state = stages[0](x[at * ROWS : (at + 1) * ROWS], *encoded)
            for stage in stages[1:]:
                state = stage(state)
            loss = loss_fn(state, target[at * ROWS : (at + 1) * ROWS])
            (loss / (case.microbatches * case.replicas)).backward()
            losses[-1].append(float(loss.detach()))
            made.append(state.detach())
        outputs.append(torch.cat(made))
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in named(dict(enumerate(stages)), encoders).items()
    }
    return found, losses, outputs


def compare(case: FillCase, rank: int) -> dict[str, Any]:
    """Of steps that learn, each after an `eval`: differences of gradients, losses and outputs."""
    plan, every = case.plan, make_stages(case)
    stage = plan.ranks.stage_of(LLM, plan.ranks.class_of(rank))
    replica = plan.ranks.place(LLM, rank).dp
    mine: dict[int, nn.Module] = {number: every[number] for number in range(stage, len(every), case.pp)}
    encoders = make_encoders(case)
    plain = named(mine, encoders)
    if case.wrap:
        wrap_all(case, rank, mine, encoders)
    parameters = plain if case.wrap == "ddp" else named(mine, encoders)
    schedule = FillSchedule(list(mine.values()), encoders, plan, loss_fn=loss_fn)
    x, images, target = make_batch(case, replica)
    seen = []
    for _ in range(STEPS):
        before = [parameter.grad for parameter in parameters.values()]
        of_eval: list[Tensor] = []
        output = schedule.eval(x, target=target, losses=of_eval, **images)
        untouched = all(was is p.grad for was, p in zip(before, parameters.values(), strict=True))
        untouched = untouched and (case.wrap == "ddp" or in_parts(parameters, named(mine, encoders)))
        losses: list[Tensor] = []
        again = schedule.step(x, target=target, losses=losses, **images)
        seen.append(
            {
                "untouched": untouched,
                "replica": replica,
                "eval losses": [float(loss) for loss in of_eval],
                "losses": [float(loss) for loss in losses],
                "eval output": output,
                "output": again,
                "gradients": {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None},
            }
        )
        learn(parameters.values())
    assert schedule.step(x, target=target, return_outputs=False, **images) is None
    given = [everybody(one) for one in seen]
    if rank:
        return {}
    found = {"gradients": 0.0, "losses": 0.0, "eval": 0.0, "untouched": True, "last ranks": 0}
    for step, (expected, losses_of, outputs_of) in zip(given, one_process(case), strict=True):
        found["gradients"] = max(found["gradients"], worst([one["gradients"] for one in step], expected))
        for one in step:
            found["untouched"] = found["untouched"] and one["untouched"]
            if one["output"] is None:
                assert not one["losses"] and not one["eval losses"] and one["eval output"] is None
                continue
            found["last ranks"] += 1
            pairs = zip(one["losses"], losses_of[one["replica"]], strict=True)
            found["losses"] = max(found["losses"], *(abs(a - b) for a, b in pairs))
            difference = float((one["output"] - outputs_of[one["replica"]]).abs().max())
            found["losses"] = max(found["losses"], difference)
            same = one["eval losses"] == one["losses"] and torch.equal(one["eval output"], one["output"])
            found["eval"] = max(found["eval"], 0.0 if same else 1.0)
    return found


def main(names: list[str]) -> None:
    for case in CASES:
        if not names or case.name in names:
            found = play(cast(Any, case), cast(Any, compare))
            print(json.dumps({"name": case.name, "replicas": case.replicas, **found}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
