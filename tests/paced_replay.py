"""Computes the step of a plan line by line: a third, tiny implementation that reads programs only.

Every rank runs its lines in order. Computing waits for its inputs; all messages of a rank
follow each other on one lane; a reduce starts when its last member has come to it.
"""

from __future__ import annotations

from collections.abc import Callable

from optimus.ir.op import SEAMS, SENDS, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM

PhaseSeconds = Callable[[str, str, int, int, int], float]  # of module, kind, virtual stage, microbatch, place
Key = tuple[str, str, int, int]  # what, module, virtual stage that made it, microbatch


def replay_lines(
    plan: Plan, phase_s: PhaseSeconds, message_s: Callable[[str], float], reduce_s: float
) -> float:
    """Returns when the last rank is done, of one LLM pipeline whose encoders have one stage."""
    devices = range(len(plan.programs))
    rows = [program.rows.tolist() for program in plan.programs]
    at, now, free = [0 for _ in devices], [0.0 for _ in devices], [0.0 for _ in devices]
    arrived_s: list[dict[Key, float]] = [{} for _ in devices]  # arrival of data, by rank
    reducing: dict[tuple[str, int], list[float]] = {}
    moved = True
    while moved:
        moved = False
        for device in devices:
            while at[device] < len(rows[device]):
                number, number_of_kind, chunk, microbatch, place = rows[device][at[device]]
                name = plan.names[number] if number < len(plan.names) else ""
                virtual = device if name == LLM else 0
                virtual += chunk * len(plan.programs)
                kind = OpKind(number_of_kind)
                if kind <= OpKind.WEIGHT_GRAD:
                    if place == 0:
                        needed = _needed(plan, name, kind, virtual, microbatch)
                        if any(key not in arrived_s[device] for key in needed):
                            break
                        now[device] = max([now[device], *(arrived_s[device][key] for key in needed)])
                    now[device] += phase_s(name, kind.word, virtual, microbatch, place)
                    arrived_s[device][kind.word, name, virtual, microbatch] = now[device]
                elif kind in SENDS:
                    made, to = _message(plan, name, kind, virtual, microbatch, device)
                    free[device] = max(free[device], now[device]) + message_s(name if kind in SEAMS else LLM)
                    for key in made:
                        if key in arrived_s[device]:
                            arrived_s[to][key] = free[device]
                elif kind == OpKind.REDUCE_GRAD:
                    reducing.setdefault((name, place), []).append(now[device])
                at[device] += 1
                moved = True
    assert all(at[device] == len(rows[device]) for device in devices), "deadlock"
    ends = [max(starts) + reduce_s for starts in reducing.values()]
    return max([*now, *free, *ends])


def _needed(plan: Plan, name: str, kind: OpKind, virtual: int, microbatch: int) -> list[Key]:
    """Returns the data that the first phase of an op waits for."""
    last = len(plan.modules[name].chunks) - 1
    if kind == OpKind.WEIGHT_GRAD:
        return [("I", name, virtual, microbatch)]
    if kind == OpKind.FORWARD:
        if virtual:
            return [("F", name, virtual - 1, microbatch)]
        return [
            ("F", encoder, 0, microbatch * module.microbatches_per_llm_microbatch + piece)
            for encoder, module in (plan.encoders.items() if name == LLM else ())
            for piece in range(module.microbatches_per_llm_microbatch)
        ]
    own: list[Key] = [("F", name, virtual, microbatch)]
    if name != LLM:
        return [*own, ("I", LLM, 0, microbatch // plan.modules[name].microbatches_per_llm_microbatch)]
    return own if virtual == last else [*own, ("I", name, virtual + 1, microbatch)]


def _message(
    plan: Plan, name: str, kind: OpKind, virtual: int, microbatch: int, device: int
) -> tuple[list[Key], int]:
    """Returns the data of a message, and its destination."""
    world = len(plan.programs)
    if kind == OpKind.SEND_F:
        return [("F", name, virtual, microbatch)], (device + 1) % world
    if kind == OpKind.SEND_B:
        return [("I", name, virtual, microbatch)], (device - 1) % world
    if kind == OpKind.SEND_SEAM:
        return [("F", name, 0, microbatch)], 0
    module = plan.modules[name]
    return [("I", LLM, 0, microbatch // module.microbatches_per_llm_microbatch)], module.pipelines[microbatch]
