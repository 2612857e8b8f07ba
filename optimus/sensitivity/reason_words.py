"""Says in one sentence how two steps differ and where: `2.41 s, 6.0 % slower than ...: +0.11 s ...`."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, log10

from optimus.sensitivity.time_breakdown import WORDS

# Causes that belong together in a sentence; all others are named as they are.
TOGETHER = {
    "pp_warmup": "pipeline warm-up and cool-down",
    "pp_cooldown": "pipeline warm-up and cool-down",
    "tp": "tensor-parallel waits",
    "dp_all_gather": "data-parallel waits",
    "dp_reduce_scatter": "data-parallel waits",
}
WORTH_SAYING = 0.05  # of the largest part
LEAST_DIGITS, MOST_DIGITS, ALIKE_DIGITS = 2, 6, 3


def compared_words(
    plan_s: float,
    other_s: float,
    differences_s: Mapping[str, float],
    *,
    not_hidden_s: tuple[float, float] | None,
    alike: bool,
) -> str:
    """How a layout's step compares with the plan's; `not_hidden_s`: what encoders add, there and here."""
    total, share = other_s - plan_s, abs(other_s / plan_s - 1)
    digits = ALIKE_DIGITS if alike else _digits(total)
    step, own = f"{other_s:.{digits}f} s", f"the plan's {plan_s:.{digits}f} s"
    if alike:
        words = f"{step}, as long as {own}"
    elif total > 0:
        words = f"{step}, {share:.1%} slower than {own}".replace("%", " %")
    else:
        words = f"{step}, {share:.1%} less than {own}: the plan's search missed it".replace("%", " %")
    parts = _parts(differences_s, total)
    words += f": {', '.join(f'{value:+.{digits}f} s {name}' for name, value in parts)}" if parts else ""
    if not_hidden_s is None or alike:
        return words
    before, here = not_hidden_s
    return (
        f"{words}; encoders add {here:.{digits}f} s to the LLM's step here, {before:.{digits}f} s in the plan"
    )


def _parts(differences_s: Mapping[str, float], total: float) -> list[tuple[str, float]]:
    """Those worth saying: what makes up the difference first, what goes against it last."""
    found: dict[str, float] = {}
    for name, value in differences_s.items():
        words = TOGETHER.get(name, WORDS[name])
        found[words] = found.get(words, 0.0) + value
    least = WORTH_SAYING * max(map(abs, found.values()), default=0.0)
    shown = [(words, value) for words, value in found.items() if value and abs(value) >= least]
    return sorted(shown, key=lambda part: -part[1] if total > 0 else part[1])


def _digits(value: float) -> int:
    """After the point, so that two figures of `value` are seen."""
    return min(MOST_DIGITS, max(LEAST_DIGITS, 1 - floor(log10(abs(value)))))
