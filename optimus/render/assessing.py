"""How sure a plan is, as the last lines of `optimus plan` and as keys of its object."""

from __future__ import annotations

from optimus.render.text import seconds, wrap
from optimus.sensitivity.assess import Assessed
from optimus.sensitivity.batch_steps import Steps
from optimus.sensitivity.win_rate import FEW_WINS, Otherwise, Rule, WinRate


def assessed_json(assessed: Assessed) -> dict[str, object]:
    """The keys `steps` and `sure`."""
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
                {"system": each.system, "wins": each.wins, "rule": _rule_json(each.rule)}
                for each in sure.otherwise
            ],
            "played": list(sure.steps_s),
            "left_out": dict(sure.left_out),
        },
    }


def _rule_json(rule: Rule | None) -> dict[str, object] | None:
    if rule is None:
        return None
    return {
        "words": str(rule),
        "assumption": rule.doubt.field,
        "at_least" if rule.above else "at_most": rule.value,
        "explains": rule.explains,
        "holds": rule.holds,
    }


def assessed_text(assessed: Assessed) -> list[str]:
    """Two lines: steps, and sure."""
    return [*wrap("steps", _steps_words(assessed)), *wrap("sure?", _sure_words(assessed.sure))]


def _steps_words(assessed: Assessed) -> str:
    own, *others = assessed.steps.values()
    batches = f"over {len(own.steps_s)} batches drawn from the workload"
    if own.plays == 1:
        batches += ", which are all alike"
    words = f"mean {seconds(own.mean_s)} s, p95 {seconds(own.p95_s)} s {batches}"
    if others:
        words += f" ({'; '.join(_other_words(steps) for steps in others)})"
    best = min(assessed.steps.values(), key=lambda steps: steps.mean_s)
    if best is not own and assessed.sure.winner == own.system:
        words += f": over these {best.system} is the faster"
    return words


def _other_words(steps: Steps) -> str:
    return f"{steps.system}: mean {seconds(steps.mean_s)} s, p95 {seconds(steps.p95_s)} s"


def _sure_words(sure: WinRate) -> str:
    words = f"same winner, {sure.winner}, in {sure.same} of {sure.of} perturbed cost models"
    if len(sure.steps_s) == 1:
        return f"{sure.winner} is the only system that was played under {sure.of} perturbed cost models"
    return "; ".join([words, *(_otherwise_words(each) for each in sure.otherwise)])


def _otherwise_words(other: Otherwise) -> str:
    """`three-phase wins in 12, 10 of them among the 40 where image tokens are -10 % or lower`."""
    words = f"{other.system} wins in {other.wins}"
    if other.rule is None:
        return words if other.wins < FEW_WINS else f"{words}, which no single assumption explains"
    some = "all" if other.rule.explains == other.wins else f"{other.rule.explains} of them"
    return f"{words}, {some} among the {other.rule.holds} where {other.rule}"
