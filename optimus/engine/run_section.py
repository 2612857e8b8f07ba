"""Reads and checks the `run:` section of a job file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optimus.engine.checkpoint_folder import CheckpointConfig
from optimus.engine.config import DTYPES, ON_NAN, ON_SPIKE, TRACKERS, RunPolicy, TrainingConfig
from optimus.engine.optimizer_config import (
    DECAYED,
    PROJECTOR,
    SCHEDULES,
    ModuleOptimizer,
    OptimizerConfig,
)
from optimus.errors import UserError, nearest, one_of
from optimus.job.model import Model

OPTIMIZER_HINT = "use optimizer: {lr: 1e-4, weight_decay: 0.01, clip: 1.0}"
ACCUMULATION = ("accumulate", "accumulation_steps", "gradient_accumulation", "gradient_accumulation_steps")
EVAL_HINT = "use eval: {every: 100, batches: 4}"
CHECKPOINT_HINT = "use checkpoint: {every: 100, keep_last: 2, keep_every: 1000}"
MODULE_HINT = "use a mapping such as {lr: 1e-5}"


def read_training_config(
    settings: Mapping[str, Any],
    *,
    steps: int | None,
    first_step: int = 0,
    run_dir: Path | None = None,
    count_memory: bool = False,
    checkpoint_every: int | None = None,
    resume: bool = False,
    log: tuple[str, ...] | None = None,
    model: Model | None = None,
) -> TrainingConfig:
    """Reads and checks a job's `run:` section; `steps` overrides it. `model` has the modules it may name."""
    default = TrainingConfig()
    _refuse_accumulation(settings)
    if steps is not None:
        _check_number("--steps", steps, default.steps)
    _check_number("--first-step", first_step, default.first_step)
    planned_steps = _read_number("run.steps", settings, default.steps)
    count = planned_steps if steps is None else steps
    if count_memory and count < 2:
        raise UserError(
            field="--memory",
            problem="needs two steps: the optimizer allocates its state in the first",
            hint="use --steps 2",
        )
    checkpoint = _read_checkpoint(settings, checkpoint_every)
    optimizer = _read_optimizer(
        _read_mapping("run.optimizer", settings, OPTIMIZER_HINT), planned_steps if "steps" in settings else 0
    )
    eval_every, eval_batches = _read_evaluation(settings)
    if model is not None:
        _check_modules(optimizer, model)
    return TrainingConfig(
        steps=count,
        first_step=first_step,
        seed=_read_number("run.seed", settings, default.seed),
        data_seed=_read_number("run.data_seed", settings, 0) if "data_seed" in settings else None,
        optimizer=optimizer,
        policy=_read_policy(settings, checkpoint),
        eval_every=eval_every,
        eval_batches=eval_batches,
        dtype=None
        if settings.get("dtype") is None
        else _read_choice("run.dtype", settings, DTYPES, "is not a dtype to compute in"),
        run_dir=run_dir,
        count_memory=count_memory,
        checkpoint=checkpoint,
        resume=resume,
        log=read_trackers("run.log", settings.get("log", ())) if log is None else log,
    )


def _refuse_accumulation(settings: Mapping[str, Any]) -> None:
    for name in ACCUMULATION:
        if name in settings:
            raise UserError(
                field=f"run.{name}",
                problem="is not a setting: gradients of all microbatches of a step are accumulated",
                hint="raise workload.sequences_per_step, which gives a step more microbatches",
            )


def _read_evaluation(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the steps between evaluations, and the batches of one."""
    if "eval" not in settings:
        return 0, 0
    section = _read_mapping("run.eval", settings, EVAL_HINT)
    _check_keys("run.eval", section, ("every", "batches"))
    every, batches = (_read_number(f"run.eval.{name}", section, 0) for name in ("every", "batches"))
    if not (every and batches):
        raise UserError(
            field=f"run.eval.{'batches' if every else 'every'}",
            problem="has to be at least 1",
            hint=EVAL_HINT,
        )
    return every, batches


def read_trackers(field: str, names: object) -> tuple[str, ...]:
    """Checks the names of trackers, and that their packages are installed."""
    if not isinstance(names, list | tuple):
        raise UserError(field=field, value=names, problem="is not a list", hint=f"use [{TRACKERS[0]}]")
    for name in names:
        if name not in TRACKERS:
            raise UserError(
                field=field, value=name, problem="is no tracker", hint=nearest(str(name), TRACKERS)
            )
        if find_spec(name) is None:
            hint = f"pip install 'optimus-mllm[{name}]', or leave it out of {field}"
            raise UserError(field=name, problem="is not installed", hint=hint)
    return tuple(dict.fromkeys(names))


def _read_policy(settings: Mapping[str, Any], checkpoint: CheckpointConfig) -> RunPolicy:
    default = RunPolicy()
    policy = RunPolicy(
        on_nan=_read_choice("run.on_nan", settings, ON_NAN, "is no policy"),
        on_spike=_read_choice("run.on_spike", settings, ON_SPIKE, "is no policy"),
        spike_factor=_read_number("run.spike_factor", settings, default.spike_factor),
        max_skipped=_read_number("run.max_skipped", settings, default.max_skipped),
    )
    for name in ("on_nan", "on_spike"):
        if getattr(policy, name) == "rewind" and not checkpoint.every:
            raise UserError(
                field=f"run.{name}",
                value="rewind",
                problem="goes back to a checkpoint, and none is saved",
                hint=f"add run.checkpoint.every, or use {name}: skip",
            )
    if policy.spike_factor <= 1:
        raise UserError(
            field="run.spike_factor",
            value=policy.spike_factor,
            problem="has to exceed 1: half of all steps exceed the median",
            hint=f"use spike_factor: {default.spike_factor:g}",
        )
    return policy


def _read_checkpoint(settings: Mapping[str, Any], every: int | None) -> CheckpointConfig:
    """Reads `run.checkpoint`; `every` overrides it."""
    given = _read_mapping("run.checkpoint", settings, CHECKPOINT_HINT)
    default = asdict(CheckpointConfig())
    _check_keys("run.checkpoint", given, default)
    numbers = {name: _read_number(f"run.checkpoint.{name}", given, usual) for name, usual in default.items()}
    if numbers["keep_last"] < 1:
        raise UserError(
            field="run.checkpoint.keep_last", value=0, problem="would keep none", hint="use keep_last: 1"
        )
    if every is not None:
        _check_number("--checkpoint-every", every, default["every"])
        numbers["every"] = every
    return CheckpointConfig(**numbers)


# ---------------------------------------------------------------------------- the optimizer


def _read_optimizer(settings: Mapping[str, Any], steps: int) -> OptimizerConfig:
    """Reads `run.optimizer`; a cosine ends with the job's `steps` unless it says otherwise."""
    _check_keys("run.optimizer", settings, OptimizerConfig.__dataclass_fields__)
    default = OptimizerConfig()
    numbers = {
        name: _read_number(f"run.optimizer.{name}", settings, getattr(default, name))
        for name in ("lr", "warmup_steps", "min_lr", "eps", "weight_decay", "clip")
    }
    optimizer = OptimizerConfig(
        **numbers,
        schedule=_read_choice("run.optimizer.schedule", settings, SCHEDULES, "is no schedule"),
        decay_steps=_read_number("run.optimizer.decay_steps", settings, steps),
        betas=_read_betas(settings.get("betas", default.betas)),
        decayed=_read_choice("run.optimizer.decayed", settings, DECAYED, "is no choice of parameters"),
        modules={
            name: _read_module(name, own)
            for name, own in _read_mapping("run.optimizer.modules", settings, MODULE_HINT).items()
        },
    )
    _check_schedule(optimizer, settings)
    return optimizer


def _check_schedule(optimizer: OptimizerConfig, settings: Mapping[str, Any]) -> None:
    if optimizer.schedule == "constant":
        for name in ("min_lr", "decay_steps"):
            if name in settings:
                raise UserError(
                    field=f"run.optimizer.{name}",
                    value=settings[name],
                    problem="is of a rate that falls, and the schedule is constant",
                    hint=f"use schedule: cosine, or leave out {name}",
                )
        return
    if optimizer.decay_steps <= optimizer.warmup_steps:
        raise UserError(
            field="run.optimizer.decay_steps",
            value=optimizer.decay_steps or None,
            problem=f"has to exceed warmup_steps, which is {optimizer.warmup_steps}"
            if optimizer.decay_steps
            else "is missing: a cosine has to end at some step",
            hint=f"use decay_steps: {10 * max(100, optimizer.warmup_steps)}, or steps of the run",
        )
    if optimizer.min_lr > optimizer.lr:
        raise UserError(
            field="run.optimizer.min_lr",
            value=optimizer.min_lr,
            problem=f"exceeds lr, which is {optimizer.lr}",
            hint=f"use min_lr: {optimizer.lr / 10}",
        )


def _read_betas(value: object) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 2:
        for beta in value:
            _check_number("run.optimizer.betas", beta, 0.9)
        if max(value) < 1:
            return float(value[0]), float(value[1])
    raise UserError(
        field="run.optimizer.betas",
        value=value,
        problem="are not two numbers from 0 to below 1",
        hint="use betas: [0.9, 0.95]",
    )


def _read_module(name: str, settings: object) -> ModuleOptimizer:
    field = f"run.optimizer.modules.{name}"
    if not isinstance(settings, Mapping):
        raise UserError(field=field, value=settings, problem="is not a mapping", hint=MODULE_HINT)
    _check_keys(field, settings, ModuleOptimizer.__dataclass_fields__)
    default = OptimizerConfig()
    return ModuleOptimizer(
        **{key: _read_number(f"{field}.{key}", settings, getattr(default, key)) for key in settings}
    )


def _check_modules(optimizer: OptimizerConfig, model: Model) -> None:
    """Raises if the optimizer names a module that the model does not have, or does not train."""
    trains: dict[str, bool] = {model.llm.name: model.llm.train}
    for encoder in model.encoders:
        trains |= {encoder.name: encoder.train, f"{encoder.name}.{PROJECTOR}": encoder.projector.train}
    _check_keys("run.optimizer.modules", optimizer.modules, trains)
    for name in optimizer.modules:
        if not trains[name]:
            raise UserError(
                field=f"run.optimizer.modules.{name}",
                problem="is of a module that is frozen",
                hint=f"leave it out, or train {name}",
            )


# ---------------------------------------------------------------------------- values


def _check_keys(field: str, settings: Mapping[str, Any], known: Iterable[str]) -> None:
    names = sorted(known)
    for name in settings:
        if name not in names:
            raise UserError(field=f"{field}.{name}", problem="is unknown", hint=nearest(str(name), names))


def _read_mapping(field: str, settings: Mapping[str, Any], hint: str) -> Mapping[str, Any]:
    value = settings.get(field.rpartition(".")[2], {})
    if not isinstance(value, Mapping):
        raise UserError(field=field, value=value, problem="is not a mapping", hint=hint)
    return value


def _read_choice(field: str, settings: Mapping[str, Any], choices: tuple[str, ...], problem: str) -> str:
    """Reads one of some names, by default the first."""
    name = field.rpartition(".")[2]
    value = settings.get(name, choices[0])
    if value not in choices:
        raise UserError(field=field, value=value, problem=problem, hint=f"use {name}: {one_of(choices)}")
    return str(value)


def _read_number(field: str, settings: Mapping[str, Any], usual: float) -> Any:
    value = settings.get(field.rpartition(".")[2], usual)
    _check_number(field, value, usual)
    return type(usual)(value)


def _check_number(field: str, value: object, usual: float) -> None:
    """Raises unless the value is a number of 0 or more, an integer if the usual one is."""
    whole = isinstance(usual, int)
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if is_number and 0 <= value < math.inf:  # type: ignore[operator]
        return
    name = field.removeprefix("run.").split(".")[-1]
    raise UserError(
        field=field,
        value=value,
        problem=f"is not a{' whole' if whole else ''} number of 0 or more",
        hint=f"use {name} {usual}" if name.startswith("--") else f"use {name}: {usual}",
    )
