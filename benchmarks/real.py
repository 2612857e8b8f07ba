"""Two ranks on two cores, timed: our engine beside torch's own schedules over the same layers.

Variants alternate in one run, in reversed order every other round. A repetition during which other processes
took more than a few per cent of the machine is dropped and repeated. Medians, and a bootstrap over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.alternating import Timed, alternate, check_losses, total_loss, variant_times
from benchmarks.real_job import Progress, chosen_variants, prepare
from benchmarks.real_ranks import run_pinned_ranks
from benchmarks.result import BenchResult, VariantTime
from benchmarks.torch_stages import Prepared
from benchmarks.variants import OURS, Variants

WARM_UP = 2  # steps of each variant
ROUNDS = 28


# ---------------------------------------------------------------------------- on every rank


def time_variants(rank: int, prepared: Prepared, rounds: int, tell: Callable[[int], None]) -> Timed:
    """Every variant once a round; what rank 0 measured counts."""
    variants = Variants(prepared)
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
