"""Bytes alive and seconds of encoder compute, counted line by line: the oracle of what a plan claims."""

from __future__ import annotations

from slow_plan_replay import PHASES, Id, SlowPlan

from optimus.ir.op import OpKind
from optimus.ir.plan import REGIONS
from optimus.ir.ranks import LLM


def regions(slow: SlowPlan, played: dict[Id, tuple[float, float]]) -> dict[str, float]:
    """Seconds of encoder compute by where it stands among the LLM's phases."""
    found = dict.fromkeys(REGIONS, 0.0)
    for program in slow.programs:
        ours = [place for place, line in enumerate(program) if line.module == LLM and line.kind in PHASES]
        slots = []
        for place in ours:
            phase = slow.phase(program[place])
            if phase is not None and phase.kind == OpKind.WAIT:
                launches = [n for n in slow.needs[program[place]] if n.kind in PHASES and slow.group(n)]
                slots += [range(slow.at[launch], place) for launch in launches]
        for place, line in enumerate(program):
            phase = slow.phase(line)
            if line.module == LLM or phase is None or phase.kind in (OpKind.LAUNCH, OpKind.WAIT):
                continue
            region = "slots" if any(place in slot for slot in slots) else "between"
            region = "before" if place < ours[0] else "after" if place > ours[-1] else region
            found[region] += played[line][1] - played[line][0]
    return found


def bytes_alive(slow: SlowPlan, device: int) -> tuple[int, int, int]:
    """LLM's and encoders' activations and rows at the seam at the first line with the most of all."""
    plan = slow.plan
    alive, peak = [0, 0, 0], (-1, (0, 0, 0))
    for line in slow.programs[device]:
        freed = []
        if line.kind == OpKind.RECV_SEAM:
            alive[2] += plan.modules[line.module].seam_bytes
        if line.kind in PHASES:
            module, kind = plan.modules[line.module], int(line.module != LLM)
            chunk = module.chunks[slow.virtual(line)]
            first, last = line.place == 0, line.place == len(slow.template(line)) - 1
            final = max(chunk.templates)
            if first and line.kind == OpKind.FORWARD:
                alive[kind] += chunk.saved_activation_bytes
            if first and line.kind == OpKind.INPUT_GRAD:
                alive[kind] += chunk.recomputed_bytes
            if last and line.kind == final:
                freed.append(
                    (
                        kind,
                        chunk.saved_activation_bytes
                        + (OpKind.INPUT_GRAD in chunk.templates) * chunk.recomputed_bytes,
                    )
                )
            entry = plan.ranks.coordinates(device)[0] == 0
            if last and line.kind == OpKind.FORWARD and kind == 1 and module.layout.pp == 1 and entry:
                alive[2] += module.seam_bytes
            if last and line.kind == OpKind.FORWARD and kind == 0 and entry and line.chunk == 0:
                for name, encoder in plan.encoders.items():
                    count = encoder.microbatches_per_llm_microbatch
                    for piece in range(line.microbatch * count, (line.microbatch + 1) * count):
                        ops = (
                            slow.op(device, name, (OpKind.FORWARD,), 0, piece)
                            if encoder.layout.pp == 1
                            else []
                        )
                        if ops or Id(device, name, OpKind.RECV_SEAM, 0, piece, 0) in slow.at:
                            freed.append((2, encoder.seam_bytes))
        peak = max(peak, (sum(alive), (alive[0], alive[1], alive[2])), key=lambda found: found[0])
        for kind, size in freed:
            alive[kind] -= size
    assert alive == [0, 0, 0]
    return peak[1]
