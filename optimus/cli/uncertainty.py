"""Formats the recommendation, and how sure it is: drawn batches, perturbed cost models and noise."""

from __future__ import annotations

from statistics import fmean

from optimus.cli.text import wrap_text
from optimus.planner.planning import MIN_SPEEDUP_WORTH_FILLING
from optimus.sensitivity.noise_study import POLICIES, NoiseStudy, StepsUnderNoise
from optimus.sensitivity.perturb import MOST_OF_FULL_SHARDING
from optimus.sensitivity.recommend import RecommendedPlan
from optimus.sensitivity.recommendation import Recommendation
from optimus.sensitivity.win_rate import WinRate, WinRule

FULL_SHARDING_REMARK = (
    f"cost models draw 0 to {MOST_OF_FULL_SHARDING - 1:.0%} more compute for fully sharded modules than the "
    "table assumes: published runs took that much more (optimus accuracy)"
)


def format_recommendation(planned: RecommendedPlan) -> list[str]:
    """Returns what to run and why, and how far a plan of another system is from it."""
    recommendation, strategy = planned.recommendation, planned.plan.strategy
    first, *reasons = recommendation.sentence.split("; ")
    lines = wrap_text("recommended", first)
    if len(recommendation.drawn) > 1 and recommendation.steps.simulations > 1:
        steps = ", ".join(f"{name} {each.mean_s:.4g} s" for name, each in recommendation.drawn.items())
        lines += wrap_text("", f"over drawn batches, not at their mean as above: {steps}")
    for reason in reasons:
        lines += wrap_text("", reason)
    if any("fully sharded modules" in reason for reason in reasons):
        lines += wrap_text("", FULL_SHARDING_REMARK)
    reference = planned.reference
    if reference is not None and reference.name != recommendation.name:
        speedup = planned.speedup.get(reference.name, 1.0)
        lines += wrap_text("", f"{speedup:.3f} times the speed of {reference.name} at the mean of the data")
    if strategy != recommendation.name:
        asked = f"{strategy}, as --strategy asks"
        if strategy in recommendation.drawn:
            longer = recommendation.drawn[strategy].mean_s / recommendation.steps.mean_s
            asked += f": {longer:.3f} times the step of {recommendation.name}"
        lines += wrap_text("planned", asked)
    return lines


def build_uncertainty_json(recommendation: Recommendation) -> dict[str, object]:
    """Returns the keys `recommended`, `recommendation`, `drawn` and `sure`."""
    return {
        "recommended": recommendation.name,
        "recommendation": recommendation.sentence,
        "margin": MIN_SPEEDUP_WORTH_FILLING,
        "drawn": {
            name: {
                "mean_s": steps.mean_s,
                "p95_s": steps.p95_s,
                "batches": len(steps.steps_s),
                "dealing": steps.dealing,
            }
            for name, steps in recommendation.drawn.items()
        },
        "sure": None if recommendation.sure is None else _sure_json(recommendation.sure),
    }


def _sure_json(sure: WinRate) -> dict[str, object]:
    return {
        "holds": sure.holds,
        "of": sure.of,
        "better": [
            {"system": other.system, "wins": other.wins, "rule": _rule_json(other.rule)}
            for other in sure.better
        ],
        "simulated": list(sure.perturbed.steps_s),
        "left_out": {name: f"the same as {twin}" for name, twin in sure.perturbed.same_as.items()},
    }


def _rule_json(rule: WinRule | None) -> dict[str, object] | None:
    if rule is None:
        return None
    return {
        "words": str(rule),
        "assumption": rule.parameter.field,
        "at_least" if rule.above else "at_most": rule.value,
        "explains": rule.explains,
        "holds": rule.holds,
    }


def format_noise(noise: NoiseStudy) -> list[str]:
    """Formats `noise  static loses 1.2 points of speed-up, two-stream 0.8 (10 % jitter, ...; 8 seeds)`."""
    level = noise.levels[-1]  # the worst
    if noise.against is None:
        words = ", ".join(f"{policy} {level.over_floor(policy):.3f}" for policy in POLICIES)
        return wrap_text("noise", f"step over an equally noisy floor: {words} ({_conditions(level)})")
    first, *rest = (_points(noise, policy, level) for policy in POLICIES)
    words = f"{POLICIES[0]} loses {first} points of speed-up over {noise.against}"
    words = ", ".join([words, *(f"{policy} {lost}" for policy, lost in zip(POLICIES[1:], rest, strict=True))])
    return wrap_text("noise", f"{words} ({_conditions(level)})")


def build_noise_json(noise: NoiseStudy) -> dict[str, object]:
    """Returns means over seeds; points are hundredths of the speed-up that the plan claims."""
    return {
        "against": noise.against,
        "claimed_speedup": noise.claimed_speedup,
        "seeds": len(noise.levels[0].floor_s),
        "levels": {level.noise.name: _level_json(noise, level) for level in noise.levels},
    }


def _level_json(noise: NoiseStudy, level: StepsUnderNoise) -> dict[str, object]:
    return {
        "floor_s": fmean(level.floor_s),
        "against_s": fmean(level.other_s) if level.other_s else None,
        "policies": {
            policy: {
                "step_s": fmean(level.ours_s[policy]),
                "step_over_floor": level.over_floor(policy),
                "speedup": level.speedup(policy),
                "lost_points": noise.lost_points(policy, level),
            }
            for policy in POLICIES
        },
    }


def _points(noise: NoiseStudy, policy: str, level: StepsUnderNoise) -> str:
    lost = noise.lost_points(policy, level)
    assert lost is not None, "there is a system to compare with"
    return f"{round(lost, 1) + 0.0:.1f}"  # never -0.0


def _conditions(level: StepsUnderNoise) -> str:
    return f"{level.noise.name}; {len(level.floor_s)} seeds"
