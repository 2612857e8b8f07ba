"""Rates and groups of the optimizer, beside torch's and transformers'."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import optimization

import optimus
from optimus.engine.distributed_optimizer import DistributedOptimizer
from optimus.engine.optimizer_config import ModuleOptimizer, OptimizerConfig, ParamGroup
from optimus.engine.run_section import read_training_config
from optimus.engine.sharded_bucket import ShardedBucket
from optimus.errors import UserError

STEPS = 1000
CPU = torch.device("cpu")


def reference(name: str, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> LRScheduler:
    scheduler: LRScheduler = getattr(optimization, name)(optimizer, *args, **options)
    return scheduler


@pytest.mark.parametrize("warmup", [0, 1, 100, 999])
@pytest.mark.parametrize(
    ("settings", "scheduler", "options"),
    [
        ({}, "get_constant_schedule_with_warmup", {}),
        ({"schedule": "cosine"}, "get_cosine_schedule_with_warmup", {"num_training_steps": STEPS}),
        (
            {"schedule": "cosine", "min_lr": 3e-5},
            "get_cosine_with_min_lr_schedule_with_warmup",
            {"num_training_steps": STEPS, "min_lr": 3e-5},
        ),
    ],
)
def test_rates_are_those_of_transformers(
    settings: dict[str, Any], scheduler: str, options: dict[str, Any], warmup: int
) -> None:
    """Of every step, of modules with a rate of their own, too."""
    section = {"steps": STEPS, "optimizer": {"lr": 3e-4, "warmup_steps": warmup, **settings}}
    config = read_training_config(section, steps=7).optimizer
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 2e-6}]
    adamw = torch.optim.AdamW(groups, lr=3e-4)
    rates = reference(scheduler, adamw, warmup, **options)
    for step in range(STEPS + 1):
        expected, of_module = rates.get_last_lr()
        factor = config.lr_factor(step)
        assert 3e-4 * factor == pytest.approx(expected, rel=1e-12, abs=1e-20), step
        assert 2e-6 * factor == pytest.approx(of_module, rel=1e-12, abs=1e-20), step
        adamw.step()
        rates.step()
    assert config.lr_factor(10 * STEPS) == config.lr_factor(STEPS)  # transformers' would rise again


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"optimizer": {"warmup": 3}}, "run.optimizer.warmup is unknown\nhint: did you mean warmup_steps"),
        ({"optimizer": {"schedule": "linear"}}, "is no schedule"),
        ({"optimizer": {"schedule": "cosine"}}, "run.optimizer.decay_steps is missing"),
        ({"optimizer": {"decay_steps": 5}}, "the schedule is constant"),
        ({"steps": 9, "optimizer": {"schedule": "cosine", "warmup_steps": 9}}, "has to exceed warmup_steps"),
        ({"steps": 9, "optimizer": {"schedule": "cosine", "min_lr": 1}}, "exceeds lr, which is 0.0001"),
        ({"optimizer": {"betas": [0.9]}}, "are not two numbers"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "are not two numbers"),
        ({"optimizer": {"decayed": "norms"}}, "is no choice of parameters"),
        (
            {"optimizer": {"modules": {"vison": {"lr": 1}}}},
            "modules.vison is unknown\nhint: did you mean vision",
        ),
        ({"optimizer": {"modules": {"vision": 1}}}, "is not a mapping"),
        ({"optimizer": {"modules": {"vision": {"rate": 1}}}}, "modules.vision.rate is unknown"),
        ({"optimizer": {"modules": {"llm": {"lr": -1}}}}, "is not a number of 0 or more"),
    ],
)
def test_what_no_optimizer_has_is_refused_by_name(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        read_training_config(settings, steps=None, model=optimus.find_job("cpu/tiny-vl").model)
    assert problem in str(refused.value)


def test_one_dimension_does_not_decay_and_modules_have_rates_of_their_own() -> None:
    config = OptimizerConfig(
        lr=1.0,
        weight_decay=0.1,
        modules={
            "vision": ModuleOptimizer(lr=2.0),
            "vision.projector": ModuleOptimizer(lr=3.0, weight_decay=0.5),
        },
    )
    expected = {
        ("llm.layers.0.qkv.weight", 2): (0.1, 1.0),
        ("llm.layers.0.qkv.norm.weight", 1): (0.0, 1.0),
        ("llm.embedding.weight", 2): (0.1, 1.0),
        ("vision.patches.bias", 1): (0.0, 2.0),
        ("vision.layers.0.qkv.weight", 2): (0.1, 2.0),
        ("vision.projector.linears.0.weight", 2): (0.5, 3.0),
        ("vision.projector.norm.weight", 1): (0.0, 3.0),
    }
    for (name, dims), group in expected.items():
        assert config.group_of(name, dims) == group
    everything = OptimizerConfig(weight_decay=0.1, decayed="all")
    assert everything.group_of("llm.layers.0.qkv.norm.weight", 1) == (0.1, everything.lr)


def test_masters_are_one_tensor_for_each_group_that_follows_another() -> None:
    """All of them are updated, and their places are those of the bucket's flat buffer."""
    shapes = [(3, 5), (2, 2), (7,), (4,), (2, 3)]
    bucket = ShardedBucket([nn.Parameter(torch.ones(shape)) for shape in shapes], None)

    def group_of(parameter: Tensor) -> ParamGroup:
        return ParamGroup(weight_decay=float(parameter.dim() > 1), lr=0.5)

    optimizer = DistributedOptimizer([bucket], [], config=OptimizerConfig(), group_of=group_of, device=CPU)
    tensors = sorted(optimizer.tensors(), key=lambda tensor: tensor.begin)
    assert [(tensor.begin, tensor.end) for tensor in tensors] == [(0, 19), (19, 30), (30, 36)]
    assert all(before.end == after.begin for before, after in pairwise(tensors))
    assert optimizer.adamw is not None and len(optimizer.adamw.param_groups) == 2
    assert optimizer.set_learning_rate(3) == 1e-4
    optimizer.adamw.step()
    assert bucket.master[:19].eq(0.5).all() and bucket.master[19:30].eq(1.0).all()
    assert bucket.master[30:].eq(0.5).all()
