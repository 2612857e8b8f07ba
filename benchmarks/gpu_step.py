"""A whole step of a multimodal job by our engine, beside torch's own schedules over the same layers."""

from __future__ import annotations

import time
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from benchmarks.alternating import Timed, alternate, total_loss, unequal_losses, variant_times
from benchmarks.communicators import TIMEOUT_S
from benchmarks.gpu_ranks import Place
from benchmarks.gpu_streams import watch_of
from benchmarks.torch_stages import Prepared, layers_in_order, stage_of_layers, summed_loss
from benchmarks.variants import OURS, SEED, Load, Variants
from optimus.engine.config import TrainingConfig
from optimus.engine.process_groups import make_groups
from optimus.engine.rank_trainer import RankTrainer

WARM_UP = 2
LEAST_ROUNDS, ROUNDS, MOST_S = 2, 14, 60.0  # as many as fit
ALONE = 5  # times that all layers run on one device
TRAINED = 6  # steps with an optimizer
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}


def step(place: Place, prepared: Prepared, rounds: int | None) -> dict[str, Any]:
    """Forward and backward of one batch, every variant once a round, in reversed order every other round.

    The bound is the work of one replica on as many devices: all layers of a microbatch, timed on one device
    with nothing beside them, times microbatches, over the ranks of the replica.
    """
    plan, dtype = prepared.plan, _dtype(place)
    bound_s = _alone_s(place, prepared) * plan.microbatches * plan.ranks.llm.dp / plan.ranks.world
    timed = _time_variants(place, prepared, rounds)
    times = variant_times(timed.seconds, OURS)
    return {
        "variants": {
            name: {key: value for key, value in asdict(each).items() if value is not None}
            for name, each in times.items()
        },
        "bound_s": bound_s,
        "ours_over_bound": times[OURS].step_s / bound_s,
        "planned_bound_s": prepared.bound_s,
        "losses": {name: {"loss": loss, "squares": sums} for name, (loss, sums) in timed.losses.items()},
        "unequal": unequal_losses(timed.losses, OURS, tolerance=TOLERANCE[dtype]),
        "tolerance": TOLERANCE[dtype],
        "job": prepared.job.name,
        "layouts": {name: str(layout) for name, layout in plan.ranks.layouts.items()},
        "microbatches": plan.microbatches,
        "encoder_share": prepared.encoder_share,
        "rounds": len(timed.seconds[OURS]),
        "quiet": timed.words,
    }


def _time_variants(place: Place, prepared: Prepared, rounds: int | None) -> Timed:
    """As many rounds as fit, if none are asked for."""
    built: list[str] = []

    def tell_built(name: str) -> None:
        built.append(name)
        place.tell((len(built), len(prepared.variants) + 1))

    variants = Variants(prepared, device=place.device, dtype=_dtype(place), built=tell_built)
    losses: dict[str, tuple[float, float]] = {}
    round_s = 0.0
    for _ in range(WARM_UP if place.on_gpu else 1):
        begin = time.perf_counter()
        losses = {
            name: (total_loss(run(), place.device), variants.squares(name))
            for name, run in variants.steps.items()
        }
        round_s = place.gathered(time.perf_counter() - begin)[0]
    fitting = min(ROUNDS, int(MOST_S / round_s)) if place.on_gpu else 0
    count = rounds or max(LEAST_ROUNDS, fitting)
    return alternate(
        variants.steps,
        count,
        lambda done: place.tell((done, count)),
        losses,
        host=place.host,
        settle=place.idle,
        repeats=1,  # GPUs do not mind who else uses the CPU
    )


def _dtype(place: Place) -> torch.dtype:
    return torch.bfloat16 if place.on_gpu else torch.float32


def _alone_s(place: Place, prepared: Prepared) -> float:
    """Forward and backward of one microbatch through all layers on one device, plain autograd."""
    watch, dtype = watch_of(place), _dtype(place)
    load = Load(prepared.job, prepared.plan, device=place.device, dtype=dtype)
    whole = stage_of_layers(
        layers_in_order(prepared.job.model), load.contexts(), seed=SEED, dtype=dtype, device="meta"
    ).to_empty(device=place.device)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    pixels, ids, labels = (tensor[: len(tensor) // len(load.numbers)] for tensor in load.tensors())
    seconds = []
    for _ in range(ALONE):
        whole.zero_grad(set_to_none=True)
        place.settle()
        begin = watch.mark()
        summed_loss(whole(pixels, ids=ids), labels).backward()
        end = watch.mark()
        place.idle()
        seconds.append(watch.seconds(begin, end))
    return float(median(place.gathered(median(seconds))))


def train(place: Place, prepared: Prepared) -> dict[str, Any]:
    """A plan as `optimus train` plays it: sharded, masters in float32, norm and AdamW.

    At a learning rate of 0 every step has the loss and the gradients of the first.
    """
    trainer = _trainer(place, prepared)
    batch, seconds, losses = trainer.batch(0), [], []
    steps = TRAINED if place.on_gpu else 2
    for number in range(steps):
        place.settle()
        begin = time.perf_counter()
        loss = trainer.executor.step(batch)
        place.settle()
        seconds.append(time.perf_counter() - begin)
        losses.append(total_loss(loss, place.device))
        place.tell((number + 1, steps))
    assert trainer.optimizer is not None and trainer.optimizer.norm is not None
    return {
        "step_s": median(seconds[1:]),
        "planned_step_s": prepared.plan.claims.step_s,
        "loss": losses[0],
        "last_loss": losses[-1],
        "squares": float(trainer.optimizer.norm) ** 2,
        "layouts": {name: str(layout) for name, layout in prepared.plan.ranks.layouts.items()},
        **_memory(place, prepared),
    }


def _trainer(place: Place, prepared: Prepared) -> RankTrainer:
    return RankTrainer(
        prepared.job,
        prepared.plan,
        TrainingConfig(learning_rate=0.0, weight_decay=0.0, clip=0.0, seed=SEED),
        make_groups(prepared.plan, place.rank, timeout_s=TIMEOUT_S),
        dtype=_dtype(place),
        device=place.device,
    )


def _memory(place: Place, prepared: Prepared) -> dict[str, Any]:
    """The most that any rank's allocator held, beside the plan's."""
    if not place.on_gpu:
        return {}
    most = max(place.gathered(torch.cuda.max_memory_allocated(place.device)))
    planned = max(held.peak for held in prepared.plan.memory)
    return {"peak_memory_bytes": most, "planned_peak_memory_bytes": planned}
