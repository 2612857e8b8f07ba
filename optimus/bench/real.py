"""Two ranks on two cores, timed: our engine beside torch's own schedules over the same layers.

Variants alternate in one run, in reversed order every other round. A repetition during which other processes
took more than a few per cent of the machine is dropped and repeated. Medians, and a bootstrap over rounds.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from optimus.bench.real_ranks import TIMEOUT_S, run_pinned_ranks
from optimus.bench.result import BenchResult, VariantTime
from optimus.bench.torch_stages import Cut, TorchRun, Variant, layers_in_order
from optimus.cost.assumptions import preset
from optimus.cost.measured import Profile
from optimus.engine.batch_table import make_table
from optimus.engine.batches import SampleBatch
from optimus.engine.executor import Executor
from optimus.engine.groups import make_groups
from optimus.engine.rank_model import build_rank
from optimus.engine.synthetic import Synthetic
from optimus.job.job import Job
from optimus.job.model import Encoder
from optimus.job.read import find_job
from optimus.models.build import layer_count
from optimus.models.context import EncoderContext, LlmContext, bin_targets, encoder_inputs, llm_inputs
from optimus.models.sample import Sample, loss_scale, placed_items
from optimus.profiler.links import measure_links
from optimus.profiler.machine import describe_machine
from optimus.profiler.segments import profile_job
from optimus.program.op import Kind
from optimus.program.plan import Plan
from optimus.program.ranks import LLM
from optimus.search.layouts import decide_setting
from optimus.systems.balance import smallest_maximum_cut
from optimus.systems.listed import Beside, list_plan, llm_pipeline
from optimus.systems.setting import Setting

JOB = "cpu/bench-vl"
OURS = "optimus"
SEED = 0
FOREIGN_SHARE = 0.06  # of both cores: more by other processes, and a repetition does not count
MOST_REPEATS = 4  # of one repetition
DRAWS = 2000  # of the bootstrap
WARM_UP = 2  # steps of each variant
ROUNDS = 28
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What one rank 0 measured: seconds of every repetition that counts, by variant."""

    seconds: Mapping[str, list[float]]
    losses: Mapping[str, tuple[float, float]]  # and the sum of squares of gradients
    dropped: int
    kept: int  # repetitions that count although they were disturbed: no better one came
    foreign: float  # median share of other processes in what counts


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is measured and decided before any rank starts."""

    job: Job
    plan: Plan
    variants: tuple[Variant, ...]
    bound_s: float
    encoder_share: float
    how: str


# ---------------------------------------------------------------------------- before the ranks start


def prepare(progress: Progress) -> Prepared:
    """Profiles this machine, plans with it, and cuts the same layers for torch's schedules."""
    job = find_job(JOB)
    progress("profile", 0, 1)
    (profile,) = run_pinned_ranks(_profile, 1, job)
    links = measure_links()
    profile = replace(profile, name="of this machine", links=links)
    job = replace(job, cluster=describe_machine(links, ranks=2))
    setting, _ = decide_setting(job, preset("default"), profile)
    plan, how = best_plan(setting)
    weights = layer_seconds(setting)
    encoder = sum(layer_count(module) for module in job.model.encoders)
    rounds, there_and_back = ((0, 2), (1, 3)), ((0, 3), (1, 2))  # quarters on each rank
    variants = (
        Variant(name="stage0 1F1B", schedule="1F1B", cut=stage0_cut(weights, encoder, 2)),
        Variant(name="stage0 Interleaved", schedule="Interleaved1F1B", cut=stage0_cut(weights, encoder, 4)),
        Variant(name="balanced 1F1B", schedule="1F1B", cut=even_cut(weights, ((0,), (1,)))),
        Variant(name="balanced Interleaved", schedule="Interleaved1F1B", cut=even_cut(weights, rounds)),
        Variant(
            name="balanced InterleavedZB",
            schedule="InterleavedZeroBubble",
            cut=even_cut(weights, rounds),
        ),
        Variant(name="balanced ZBV", schedule="ZBVZeroBubble", cut=even_cut(weights, there_and_back)),
    )
    total = sum(weights)
    return Prepared(
        job=job,
        plan=plan,
        variants=variants,
        bound_s=total * plan.microbatches / 2,
        encoder_share=sum(weights[:encoder]) / sum(weights[encoder:]),
        how=how,
    )


def _profile(rank: int, job: Job, tell: Callable[[int], None]) -> Profile:
    """On a core of its own, under the conditions of the ranks that will be timed."""
    return profile_job(job)


def best_plan(setting: Setting) -> tuple[Plan, str]:
    """The best of a few LLM orders, by replay."""
    found: list[tuple[float, int, Plan, str]] = []
    for chunks, order in ((1, "1f1b"), (2, "interleaved"), (1, "zero-bubble"), (2, "zero-bubble")):
        llm = llm_pipeline(setting, chunks=chunks, order_name=order)
        beside = {encoder.name: Beside() for encoder in setting.job.model.encoders}
        filled = list_plan(setting, llm, beside)
        found.append((filled.step_s, len(found), filled.plan, f"{order}, {chunks} chunks a rank"))
    _, _, plan, how = min(found)
    return plan, how


def layer_seconds(setting: Setting) -> list[float]:
    """Forward and backward (whole or split, whichever is shorter), of every layer in model order."""
    model, policy = setting.job.model, tuple((m.name, "none") for m in setting.job.model.modules)
    layers = setting.layers(model.modules, setting.microbatch_sequences, policy)
    sums = setting.sums(layers)
    split = sums.layer_seconds(Kind.I) + sums.layer_seconds(Kind.W)
    seconds = sums.layer_seconds(Kind.F) + np.minimum(sums.layer_seconds(Kind.B), split)
    assert len(seconds) == len(layers_in_order(model))
    return [float(each) for each in seconds]


def even_cut(weights: Sequence[float], ranks: tuple[tuple[int, ...], ...]) -> Cut:
    """Of all cuts into parts that `ranks` hold: the least for the busiest rank, then the shortest parts."""
    parts, sums = sum(map(len, ranks)), [0.0, *accumulate(weights)]

    def cost(inner: tuple[int, ...]) -> tuple[float, float]:
        seconds = [sums[b] - sums[a] for a, b in pairwise((0, *inner, len(weights)))]
        return max(sum(seconds[part] for part in mine) for mine in ranks), max(seconds)

    best = min(combinations(range(1, len(weights)), parts - 1), key=cost)
    return (0, *best, len(weights))


def stage0_cut(weights: Sequence[float], encoder: int, parts: int) -> Cut:
    """The LLM cut evenly, the whole encoder in front of its first part."""
    inner = smallest_maximum_cut(weights[encoder:], parts)
    return (0, *(encoder + at for at in inner[1:]))


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
    model = build_rank(
        job.model, plan, rank, llm_tokens=job.workload.sequence_tokens, dtype=torch.float32, seed=SEED
    )
    groups = make_groups(plan, rank, timeout_s=TIMEOUT_S)
    executor = Executor(plan, groups, model.chunks, model.shapes, device=torch.device("cpu"), tied=model.tied)
    table = make_table(plan, [data.sizes(number) for number in range(samples)])
    batch = SampleBatch(
        job.model,
        plan,
        plan.ranks.class_of(rank),
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
    names = list(variants.steps)
    losses: dict[str, tuple[float, float]] = {}
    for _ in range(WARM_UP):
        losses = {name: (_loss(variants.steps[name]()), variants.squares(name)) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    foreign, dropped, kept = [], 0, 0
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            for attempt in range(MOST_REPEATS):
                took, share = _repetition(variants.steps[name])
                if share <= FOREIGN_SHARE or attempt == MOST_REPEATS - 1:
                    break
                dropped += 1
            seconds[name].append(took)
            foreign.append(share)
            kept += share > FOREIGN_SHARE
        tell(number + 1)
    return Timed(seconds=seconds, losses=losses, dropped=dropped, kept=kept, foreign=median(foreign))


def _loss(loss: Tensor | None) -> float:
    total = torch.zeros(1) if loss is None else loss.reshape(1).float().clone()
    dist.all_reduce(total)
    return float(total)


def _repetition(step: Callable[[], Tensor | None]) -> tuple[float, float]:
    """Seconds from when all begin until all are done, and the share of other processes; rank 0's of both."""
    dist.barrier()
    own, busy, begin = time.process_time(), busy_s(), time.perf_counter()
    step()
    dist.barrier()
    took = time.perf_counter() - begin
    spent = torch.tensor([time.process_time() - own], dtype=torch.float64)
    busy = busy_s() - busy
    dist.all_reduce(spent)
    share = max(0.0, busy - float(spent)) / (took * (os.cpu_count() or 1))
    found = torch.tensor([took, share], dtype=torch.float64)
    dist.broadcast(found, 0)
    return float(found[0]), float(found[1])


def busy_s() -> float:
    """CPU seconds of all processes of this machine since it started; of a kernel that counts them."""
    with Path("/proc/stat").open() as file:
        fields = [int(word) for word in file.readline().split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------------- results


def bench_real(*, rounds: int = ROUNDS, progress: Progress = lambda name, done, total: None) -> BenchResult:
    """Profiles, plans, runs all variants, and compares."""
    prepared = prepare(progress)
    progress("starting ranks", 0, rounds)
    timed = run_pinned_ranks(
        time_variants, 2, prepared, rounds, hear=lambda done: progress("timing", done, rounds)
    )[0]
    _check_losses(timed.losses)
    return compare(prepared, timed, rounds)


def _check_losses(losses: Mapping[str, tuple[float, float]]) -> None:
    """All variants compute the same loss and gradients, or their times say nothing."""
    for name, found in losses.items():
        for what, theirs, ours in zip(("loss", "gradients"), found, losses[OURS], strict=True):
            assert abs(theirs - ours) <= 1e-3 * abs(ours), f"{what} of {name}: {theirs}, ours {ours}"


def compare(prepared: Prepared, timed: Timed, rounds: int) -> BenchResult:
    """Medians, and how sure the ratios are."""
    ours = timed.seconds[OURS]
    variants = {}
    for name, seconds in timed.seconds.items():
        low, high = bootstrap(seconds, ours)
        variants[name] = VariantTime(
            step_s=median(seconds),
            over_ours=median(their / our for their, our in zip(seconds, ours, strict=True)),
            over_ours_low=low,
            over_ours_high=high,
        )
    balanced = [name for name in variants if name.startswith("balanced")]
    best = min(balanced, key=lambda name: variants[name].step_s)
    share, sure = 100 * timed.foreign, variants[best]
    plan = prepared.plan
    interval = f"95 % interval {sure.over_ours_low:.3f} to {sure.over_ours_high:.3f}"
    dropped = f"{timed.dropped} repetitions dropped for more than {100 * FOREIGN_SHARE:.0f} %"
    dropped += f", {timed.kept} kept in spite of it" if timed.kept else ""
    notes = (
        f"our plan: {prepared.how}; predicted {plan.claims.step_s:.3f} s",
        f"encoder work is {prepared.encoder_share:.2f} of the LLM's; {plan.microbatches} microbatches",
        f"best balanced variant: {best}, {sure.over_ours:.3f} of ours, {interval}",
        f"{rounds} rounds; other processes took {share:.1f} % (median) of what counts; {dropped}",
    )
    return BenchResult(
        bench="real",
        variants=variants,
        ours=OURS,
        bound_s=prepared.bound_s,
        ours_over_bound=median(ours) / prepared.bound_s,
        notes=notes,
    )


def bootstrap(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """95 % of the median ratio of a round, over rounds drawn with replacement.

    The speed of a shared machine drifts by more than what is compared; within a round it has less time to.
    """
    chance = random.Random(0)
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    found = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS)]
