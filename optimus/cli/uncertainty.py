"""Formats how sure a plan is: drawn batches, perturbed cost models and noise."""

from __future__ import annotations

from statistics import fmean

from optimus.cli.text import wrap_text
from optimus.render.format_numbers import format_seconds
from optimus.sensitivity.assess import PlanAssessment
from optimus.sensitivity.batch_steps import BatchStepTimes
from optimus.sensitivity.noise_study import POLICIES, NoiseStudy, StepsUnderNoise
from optimus.sensitivity.win_rate import MIN_WINS_FOR_RULE, OtherWinner, WinRate, WinRule

DEALING_WORDS = {"drawn": "as drawn", "reordered": "sequences re-dealt", "items": "items dealt"}


def build_uncertainty_json(assessed: PlanAssessment) -> dict[str, object]:
    """Returns the keys `steps` and `sure`."""
    sure = assessed.sure
    return {
        "steps": {
            name: {
                "mean_s": steps.mean_s,
                "p95_s": steps.p95_s,
                "batches": len(steps.steps_s),
                "dealing": steps.dealing,
            }
            for name, steps in assessed.steps.items()
        },
        "sure": {
            "winner": sure.winner,
            "same": sure.same,
            "of": sure.of,
            "otherwise": [
                {"system": rival.system, "wins": rival.wins, "rule": _rule_json(rival.rule)}
                for rival in sure.otherwise
            ],
            "played": list(sure.steps_s),
            "left_out": dict(sure.left_out),
        },
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


def format_uncertainty(assessed: PlanAssessment) -> list[str]:
    """Returns the steps over drawn batches, and how often the plan wins."""
    return [*wrap_text("steps", _steps_words(assessed)), *wrap_text("sure?", _sure_words(assessed.sure))]


def _steps_words(assessed: PlanAssessment) -> str:
    plan, *rivals = assessed.steps.values()
    batches = f"over {len(plan.steps_s)} batches drawn from the workload"
    dealt = "which are all alike" if plan.simulations == 1 else DEALING_WORDS[plan.dealing]
    words = f"{_batch_steps(plan)} {batches}, {dealt}"
    if rivals:
        words += f" ({'; '.join(_rival_steps(steps) for steps in rivals)})"
    best = min(assessed.steps.values(), key=lambda steps: steps.mean_s)
    if best is not plan and assessed.sure.winner == plan.system:
        words += f": over these {best.system} is the faster"
    return words


def _rival_steps(steps: BatchStepTimes) -> str:
    dealt = "" if steps.simulations == 1 else f", {DEALING_WORDS[steps.dealing]}"
    return f"{steps.system}: {_batch_steps(steps)}{dealt}"


def _batch_steps(steps: BatchStepTimes) -> str:
    return f"mean {format_seconds(steps.mean_s)} s, p95 {format_seconds(steps.p95_s)} s"


def _sure_words(sure: WinRate) -> str:
    words = f"same winner, {sure.winner}, in {sure.same} of {sure.of} perturbed cost models"
    if len(sure.steps_s) == 1:
        return f"{sure.winner} is the only system that was simulated under {sure.of} perturbed cost models"
    return "; ".join([words, *(_rival_words(rival) for rival in sure.otherwise)])


def _rival_words(rival: OtherWinner) -> str:
    """Formats `three-phase wins in 12, 10 of them among the 40 where image tokens are -10 % or lower`."""
    words = f"{rival.system} wins in {rival.wins}"
    if rival.rule is None:
        return words if rival.wins < MIN_WINS_FOR_RULE else f"{words}, which no single assumption explains"
    share = "all" if rival.rule.explains == rival.wins else f"{rival.rule.explains} of them"
    return f"{words}, {share} among the {rival.rule.holds} where {rival.rule}"


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
