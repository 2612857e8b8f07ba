"""What noise leaves of a plan, as a line for people and as an object for tools."""

from __future__ import annotations

from statistics import fmean

from optimus.render.text import wrap
from optimus.sensitivity.noise import POLICIES, Level, UnderNoise


def noise_text(found: UnderNoise) -> list[str]:
    """`noise  static loses 1.2 points of speed-up, two-stream 0.8 (10 % jitter, ...; 8 seeds)`."""
    level = found.levels[-1]  # the worst
    if found.against is None:
        words = ", ".join(f"{policy} {level.over_floor(policy):.3f}" for policy in POLICIES)
        return wrap("noise", f"step over an equally noisy floor: {words} ({_conditions(level)})")
    first, *rest = (_points(found, policy, level) for policy in POLICIES)
    words = f"{POLICIES[0]} loses {first} points of speed-up over {found.against}"
    words = ", ".join([words, *(f"{policy} {lost}" for policy, lost in zip(POLICIES[1:], rest, strict=True))])
    return wrap("noise", f"{words} ({_conditions(level)})")


def noise_json(found: UnderNoise) -> dict[str, object]:
    """Means over seeds; points are hundredths of the speed-up that the plan claims."""
    return {
        "against": found.against,
        "claimed_speedup": found.claimed_speedup,
        "seeds": len(found.levels[0].floor_s),
        "levels": {level.noise.name: _level(found, level) for level in found.levels},
    }


def _level(found: UnderNoise, level: Level) -> dict[str, object]:
    return {
        "floor_s": fmean(level.floor_s),
        "against_s": fmean(level.other_s) if level.other_s else None,
        "policies": {
            policy: {
                "step_s": fmean(level.ours_s[policy]),
                "step_over_floor": level.over_floor(policy),
                "speedup": level.speedup(policy),
                "lost_points": found.lost_points(policy, level),
            }
            for policy in POLICIES
        },
    }


def _points(found: UnderNoise, policy: str, level: Level) -> str:
    lost = found.lost_points(policy, level)
    assert lost is not None, "there is a system to compare with"
    return f"{round(lost, 1) + 0.0:.1f}"  # never -0.0


def _conditions(level: Level) -> str:
    return f"{level.noise.name}; {len(level.floor_s)} seeds"
