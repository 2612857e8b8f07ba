"""Two ranks on two cores, timed: our engine beside torch's own schedules over the same layers.

Variants alternate in one run, in reversed order every other round. A repetition during which other processes
took more than a few per cent of the machine is dropped and repeated. Medians, and a bootstrap over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.bench.alternating import Timed, alternate, check_losses, total_loss, variant_times
from optimus.bench.real_job import Prepared, Progress, chosen_variants, prepare
from optimus.bench.real_ranks import TIMEOUT_S, run_pinned_ranks
from optimus.bench.result import BenchResult, VariantTime
from optimus.bench.torch_stages import TorchRun
from optimus.engine.batch_table import make_table
from optimus.engine.batches import SampleBatch
from optimus.engine.executor import Executor
from optimus.engine.groups import make_groups
from optimus.engine.rank_model import build_rank
from optimus.engine.synthetic import Synthetic
from optimus.job.job import Job
from optimus.job.model import Encoder
from optimus.models.context import EncoderContext, LlmContext, bin_targets, encoder_inputs, llm_inputs
from optimus.models.sample import Sample, loss_scale, placed_items
from optimus.program.plan import Plan
from optimus.program.ranks import LLM

OURS = "optimus"
SEED = 0
WARM_UP = 2  # steps of each variant
ROUNDS = 28


# ---------------------------------------------------------------------------- on every rank


class _Variants:
    """All variants on one rank, ready to step on the same batch."""

    def __init__(self, prepared: Prepared) -> None:
        job, plan = prepared.job, prepared.plan
        data = Synthetic(job=job, seed=SEED)
        samples = [data.sample(number) for number in range(job.workload.sequences_per_step)]
        scale = loss_scale(samples)
        ours, mine = _ours(job, plan, data, scale)
        self.steps: dict[str, Callable[[], Tensor | None]] = {OURS: ours}
        self.parameters: dict[str, list[Tensor]] = {OURS: mine}
        (encoder,) = job.model.encoders
        made = [_encoder_inputs(encoder, sample) for sample in samples]
        pixels, ids = torch.cat([inputs for inputs, _ in made]), torch.cat([s.tokens for s in samples])
        labels = torch.cat([sample.labels for sample in samples])
        contexts: dict[str, EncoderContext | LlmContext] = {encoder.name: made[0][1]}
        contexts[LLM] = _llm_context(job, samples[0], scale)
        for variant in prepared.variants:
            count = plan.microbatches
            run = TorchRun(job.model, variant, contexts, microbatches=count, scale=scale, seed=SEED)
            self.steps[variant.name] = partial(run.step, pixels, ids, labels)
            self.parameters[variant.name] = run.parameters

    def squares(self, name: str) -> float:
        """Sum of squares of all gradients of the model after a step."""
        found = [p.grad.double().square().sum() for p in self.parameters[name] if p.grad is not None]
        total = torch.stack(found).sum().reshape(1)
        dist.all_reduce(total)
        return float(total)


def _ours(
    job: Job, plan: Plan, data: Synthetic, scale: float
) -> tuple[Callable[[], Tensor | None], list[Tensor]]:
    """Our step, and parameters of this rank, so that each of the model is on one of them."""
    rank, samples = dist.get_rank(), job.workload.sequences_per_step
    groups = make_groups(plan, rank, timeout_s=TIMEOUT_S)
    model = build_rank(
        job.model, plan, groups, llm_tokens=job.workload.sequence_tokens, dtype=torch.float32, seed=SEED
    )
    executor = Executor(plan, groups, model.chunks, model.shapes, device=torch.device("cpu"), tied=model.tied)
    table = make_table(plan, [data.sizes(number) for number in range(samples)])
    batch = SampleBatch(
        job.model,
        plan,
        rank,
        table,
        data.sample,
        scale=scale,
        seed=SEED,
        step=0,
        dtype=torch.float32,
    )
    mine = [
        parameter
        for name, parameter in model.parameters.items()
        if rank == 0 or name.startswith(f"{LLM}.")  # both ranks hold the whole encoder
    ]
    return partial(executor.step, batch), mine


def _encoder_inputs(encoder: Encoder, sample: Sample) -> tuple[Tensor, EncoderContext]:
    items = placed_items(sample, encoder.name)
    tokens = sum(item.tokens for _, _, item in items)
    return encoder_inputs(encoder, items, tokens, seed=SEED, step=0, dtype=torch.float32)


def _llm_context(job: Job, sample: Sample, scale: float) -> LlmContext:
    (encoder,) = job.model.encoders
    items = placed_items(sample, encoder.name)
    tokens = sum(item.tokens for _, _, item in items)
    target = bin_targets(encoder, items, tokens, {sample.number: 0}, sample.length)
    how: dict[str, Any] = {"seed": SEED, "step": 0, "dtype": torch.float32}
    return llm_inputs(job.model.llm, [sample], [target], scale, **how)[1]


def time_variants(rank: int, prepared: Prepared, rounds: int, tell: Callable[[int], None]) -> Timed:
    """Every variant once a round; what rank 0 measured counts."""
    variants = _Variants(prepared)
    losses: dict[str, tuple[float, float]] = {}
    for _ in range(WARM_UP):
        losses = {name: (total_loss(step()), variants.squares(name)) for name, step in variants.steps.items()}
    return alternate(variants.steps, rounds, tell, losses)


# ---------------------------------------------------------------------------- results


def bench_real(
    *,
    rounds: int = ROUNDS,
    against: Sequence[str] = (),
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Profiles, plans, runs all variants or those `against` which we are to stand, and compares."""
    prepared = prepare(chosen_variants(against), progress)
    progress("starting ranks", 0, rounds)
    timed = run_pinned_ranks(
        time_variants, 2, prepared, rounds, hear=lambda done: progress("timing", done, rounds)
    )[0]
    check_losses(timed.losses, OURS)
    return compare(prepared, timed, rounds)


def compare(prepared: Prepared, timed: Timed, rounds: int) -> BenchResult:
    """Medians, and how sure the ratios are."""
    variants, plan = variant_times(timed.seconds, OURS), prepared.plan
    notes = (
        f"our plan: {prepared.how}; predicted {plan.claims.step_s:.3f} s",
        f"encoder work is {prepared.encoder_share:.2f} of the LLM's; {plan.microbatches} microbatches",
        *_best_balanced(variants),
        f"{rounds} rounds; {timed.words}",
    )
    return BenchResult(
        bench="real",
        variants=variants,
        ours=OURS,
        bound_s=prepared.bound_s,
        ours_over_bound=variants[OURS].step_s / prepared.bound_s,
        notes=notes,
    )


def _best_balanced(variants: Mapping[str, VariantTime]) -> list[str]:
    """How sure it is that we are faster than the best variant without filling, if one ran."""
    balanced = [name for name in variants if name.startswith("balanced")]
    if not balanced:
        return []
    best = min(balanced, key=lambda name: variants[name].step_s)
    sure = variants[best]
    interval = f"95 % interval {sure.over_ours_low:.3f} to {sure.over_ours_high:.3f}"
    return [f"best balanced variant: {best}, {sure.over_ours:.3f} of ours, {interval}"]
