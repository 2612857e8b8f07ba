"""Prints how far plans of every system on 4 to 16 ranks are from one process, in float64.

`python tests/equality_figures.py 2` trains two steps; a second number is the least ranks of a plan to run.
A difference of the loss is relative to the loss, one of gradients or parameters to the largest of the model.
"""

from __future__ import annotations

import sys
from functools import partial

from engine_cases import CP, SIXTEEN, SYSTEMS, Case
from engine_worker import compare, limits, play

ERRORS = ("loss", "gradients", "parameters")
LEAST_RANKS = 4


def main(steps: int, least_ranks: int = LEAST_RANKS) -> None:
    cases = list_cases(least_ranks)
    header = "".join(f"{name:>12}" for name in ERRORS)
    print(f"{'plan':<68}{'ranks':>5}  {'system':<15}{'LLM':<20}{header}")  # noqa: T201
    worst = dict.fromkeys(ERRORS, 0.0)
    for case in cases:
        found = measure(case, steps)
        worst = {name: max(worst[name], found[name]) for name in ERRORS}
        where = f"{case.ranks:>5}  {case.system:<15}{case.plan.ranks.llm!s:<20}"
        print(f"{case.name:<68}{where}{_cells(found)}", flush=True)  # noqa: T201
    print(f"{f'largest of {len(cases)} plans':<110}{_cells(worst)}")  # noqa: T201


def list_cases(least_ranks: int = LEAST_RANKS) -> list[Case]:
    """Returns plans of all systems, context-parallel ones among them, on that many ranks or more."""
    return [case for case in (*SYSTEMS, *CP, *SIXTEEN) if case.ranks >= least_ranks]


def measure(case: Case, steps: int) -> dict[str, float]:
    """Returns the errors of a plan; raises if a rank failed."""
    with limits(case):
        found = play(case, partial(compare, steps=steps))
        if "error" in found:
            raise RuntimeError(f"{case.name}: {found['error']}")
    return {name: found[name] for name in ERRORS}


def _cells(errors: dict[str, float]) -> str:
    return "".join(f"{errors[name]:>12.1e}" for name in ERRORS)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
