"""Trains small modules by `FillSchedule` and compares with one process; prints one JSON line a case."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from engine_worker import everybody, play, worst
from torch import Tensor, nn

from optimus.engine.fill_schedule import FillSchedule
from optimus.program.module_times import EncoderBlocks, Seconds
from optimus.program.plan import Plan
from optimus.program.ranks import LLM
from optimus.systems.modules import plan_modules

WIDTH, ROWS, IMAGES = 4, 3, 2  # of a microbatch; rows of one piece
TRAINED = Seconds(forward_s=1.0, backward_s=2.0, weight_s=1.0)
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


def one_process(case: FillCase) -> tuple[dict[str, Tensor], list[list[float]], list[Tensor]]:
    """Gradients of the mean over microbatches and replicas; losses and outputs of every replica."""
    stages, encoders = make_stages(case), make_encoders(case)
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
    """Of two steps, each after an `eval`: differences of gradients, losses and outputs."""
    plan, every = case.plan, make_stages(case)
    stage = plan.ranks.stage_of(LLM, plan.ranks.class_of(rank))
    replica = plan.ranks.place(LLM, rank).dp
    mine = {number: every[number] for number in range(stage, len(every), case.pp)}
    encoders = make_encoders(case)
    parameters = named(mine, encoders)
    schedule = FillSchedule(list(mine.values()), encoders, plan, loss_fn=loss_fn)
    x, images, target = make_batch(case, replica)
    seen = []
    for _ in range(2):
        before = [parameter.grad for parameter in parameters.values()]
        of_eval: list[Tensor] = []
        output = schedule.eval(x, target=target, losses=of_eval, **images)
        untouched = all(was is p.grad for was, p in zip(before, parameters.values(), strict=True))
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
                "gradients": {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None},
            }
        )
    assert schedule.step(x, target=target, return_outputs=False, **images) is None
    given = [everybody(one) for one in seen]
    if rank:
        return {}
    expected, losses_of, outputs_of = one_process(case)
    found = {"gradients": 0.0, "losses": 0.0, "eval": 0.0, "untouched": True, "last ranks": 0}
    for step in given:
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
