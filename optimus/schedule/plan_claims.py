"""Computes what a lowered plan claims: live bytes, when encoders compute, and a step in which they lag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from optimus.ir.op import COMPUTE_PHASES, Ints, Lane, OpKind
from optimus.ir.plan import REGIONS, DeviceClassMemory, Plan, Program
from optimus.ir.ranks import LLM
from optimus.schedule.bucket_lines import BucketLines
from optimus.schedule.lower import LoweredPlan, simulate_plan
from optimus.schedule.program_table import PlanHeaderArrays, ProgramTable
from optimus.schedule.simulator import Timeline

LAG_BINS = 0.5  # mean encoder microbatches by which a dealt pipeline may be behind the plan
COMPONENTS = LLM_ACTIVATIONS, ENCODER_ACTIVATIONS, SEAM, GATHERED, LOGITS = range(5)


def compute_device_class_memory(
    plan: Plan, programs: Sequence[Program], fixed: Sequence[Mapping[str, int]]
) -> tuple[DeviceClassMemory, ...]:
    """Computes the peak of live bytes along every program, and adds the fixed components."""
    memory = []
    for device, alive in enumerate(live_bytes_by_line(plan, programs)):
        total = alive.sum(axis=1)
        most = (
            alive[int(total.argmax())]
            if len(total) and total.max() > 0
            else np.zeros(len(COMPONENTS), np.int64)
        )
        llm, encoders, seam, gathered, logits = (int(value) for value in most)
        memory.append(
            DeviceClassMemory(
                fixed=dict(fixed[device]),
                llm_activations=llm,
                encoder_activations=encoders,
                seam=seam,
                gathered=gathered,
                logits=logits,
            )
        )
    return tuple(memory)


def live_bytes_by_line(plan: Plan, programs: Sequence[Program]) -> Iterator[Ints]:
    """Yields, per device class, live bytes while each line runs: LLM, encoders, seam, gathered, logits."""
    lines = ProgramTable.of(PlanHeaderArrays(plan), programs)
    added, freed = _changes(lines)
    for device in range(len(programs)):
        mine = lines.device == device
        # Bytes that a line frees are live while it runs.
        yield np.cumsum(added[mine], axis=0) - np.cumsum(freed[mine], axis=0) + freed[mine]


def _changes(lines: ProgramTable) -> tuple[Ints, Ints]:
    """Returns the bytes that every line starts to keep, and those it stops to keep, by component."""
    header, ops = lines.header, lines.ops
    added: Ints = np.zeros((len(lines), len(COMPONENTS)), np.int64)
    freed: Ints = np.zeros((len(lines), len(COMPONENTS)), np.int64)
    added[:, GATHERED], freed[:, GATHERED] = BucketLines(lines).live_bytes()
    component = np.where(ops.module == header.llm, LLM_ACTIVATIONS, ENCODER_ACTIVATIONS)
    begin, end = ops.rows[ops.first], ops.last
    saved, recomputed, logits = _held(header)
    has = {
        kind: header.template[ops.module, kind, ops.virtual] >= 0
        for kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)
    }
    saved_bytes, recomputed_bytes = saved[ops.module, ops.virtual], recomputed[ops.module, ops.virtual]
    forward = ops.kind == OpKind.FORWARD
    frees = (ops.kind == OpKind.WEIGHT_GRAD) | ((ops.kind == OpKind.BACKWARD) & ~has[OpKind.WEIGHT_GRAD])
    frees |= (ops.kind == OpKind.INPUT_GRAD) & ~has[OpKind.WEIGHT_GRAD]
    frees |= forward & ~(has[OpKind.BACKWARD] | has[OpKind.INPUT_GRAD])
    split = has[OpKind.WEIGHT_GRAD]
    np.add.at(added, (begin[forward], component[forward]), saved_bytes[forward])
    np.add.at(freed, (end[frees], component[frees]), saved_bytes[frees])
    inputs, weights = (ops.kind == OpKind.INPUT_GRAD) & split, (ops.kind == OpKind.WEIGHT_GRAD) & split
    np.add.at(added, (begin[inputs], component[inputs]), recomputed_bytes[inputs])
    np.add.at(freed, (end[weights], component[weights]), recomputed_bytes[weights])
    logits_bytes = logits[ops.module, ops.virtual]
    reads_loss = (ops.kind == OpKind.BACKWARD) | (ops.kind == OpKind.INPUT_GRAD)
    reads_loss |= forward & ~(has[OpKind.BACKWARD] | has[OpKind.INPUT_GRAD])
    np.add.at(added[:, LOGITS], begin[forward], logits_bytes[forward])
    np.add.at(freed[:, LOGITS], end[reads_loss], logits_bytes[reads_loss])
    _add_seam(lines, added, freed)
    return added, freed


def _held(header: PlanHeaderArrays) -> Ints:
    """Returns saved and recomputed bytes, and those of logits, by module and virtual stage."""
    held: Ints = np.zeros((3, len(header.names), int(header.virtual_stages.max())), np.int64)
    for number, name in enumerate(header.names):
        for virtual, chunk in enumerate(header.plan.modules[name].chunks):
            held[:, number, virtual] = (
                chunk.saved_activation_bytes,
                chunk.recomputed_bytes,
                chunk.logits_bytes,
            )
    return held


def _add_seam(lines: ProgramTable, added: Ints, freed: Ints) -> None:
    """Adds rows that the LLM keeps from their receive to the end of the forward that they feed."""
    header, ops = lines.header, lines.ops
    size = np.array([header.plan.modules[name].seam_bytes for name in header.names], np.int64)
    received = np.flatnonzero(lines.kind == OpKind.RECV_SEAM)
    last = (ops.kind == OpKind.FORWARD) & (ops.module != header.llm)
    last &= ops.virtual == header.last_virtual[ops.module]
    local = np.flatnonzero(last & (header.entry[ops.device] == ops.device))
    module = np.append(lines.module[received], ops.module[local])
    device = np.append(lines.device[received], ops.device[local])
    microbatch = np.append(lines.microbatch[received], ops.microbatch[local])
    begin = np.append(received, ops.last[local])
    zeros = np.zeros(len(begin), np.int64)
    fed = microbatch // header.per_llm_microbatch[module]
    chunk = zeros + header.plan.entry_chunk
    end = lines.end_of(device, zeros + header.llm, zeros + OpKind.FORWARD, chunk, fed)
    np.add.at(added[:, SEAM], begin, size[module])
    np.add.at(freed[:, SEAM], end, size[module])


def simulate_lagging_encoders(plan: Plan, lowered: LoweredPlan) -> Timeline:
    """Simulates a step in which dealt images put every encoder pipeline half a bin behind the plan.

    Dealing makes the sum of a pipeline's loads even, not each of them: here its first encoder microbatch is
    half a mean one longer, and no later one makes up for it. Plans that deal no images have no such lag.
    """
    if plan.dealing_replicas == 1:
        return lowered.timeline
    schedule, duration_s = lowered.schedule, lowered.schedule.duration_s.copy()
    for name, module in plan.encoders.items():
        pipelines, load = np.array(module.pipelines), np.ones(len(module.pipelines))
        for pipeline in np.unique(pipelines):
            load[np.argmax(pipelines == pipeline)] += LAG_BINS
        of_encoder = schedule.module == plan.names.index(name)
        rows = np.flatnonzero(of_encoder & np.isin(schedule.kind, COMPUTE_PHASES))
        duration_s[rows] *= load[schedule.microbatch[rows]]
    return simulate_plan(plan, replace(schedule, duration_s=duration_s))


def encoder_seconds_by_region(plan: Plan, lowered: LoweredPlan) -> dict[str, float]:
    """Returns seconds of encoder compute before, in slots of, between and after a class's LLM phases."""
    schedule, timeline = lowered.schedule, lowered.timeline
    llm = plan.names.index(LLM)
    phase = np.isin(
        schedule.kind,
        (
            OpKind.FORWARD,
            OpKind.RECOMPUTE,
            OpKind.BACKWARD,
            OpKind.INPUT_GRAD,
            OpKind.WEIGHT_GRAD,
            OpKind.LAUNCH,
            OpKind.WAIT,
        ),
    )
    llm_phase = phase & (schedule.module == llm)
    filler = (
        phase & (schedule.module != llm) & (schedule.lane == Lane.COMPUTE) & (schedule.kind != OpKind.WAIT)
    )
    opened = np.cumsum(llm_phase & (schedule.kind == OpKind.LAUNCH)) - np.cumsum(
        llm_phase & (schedule.kind == OpKind.WAIT)
    )
    spent = timeline.finish_s - timeline.start_s
    seconds = dict.fromkeys(REGIONS, 0.0)
    for device in range(schedule.num_devices):
        here = np.flatnonzero(schedule.device == device)
        llm_lines = here[llm_phase[here]]
        mine = here[filler[here]]
        if not len(llm_lines):  # a stage of encoder layers alone
            seconds["before"] += float(spent[mine].sum())
            continue
        before, after = mine < llm_lines[0], mine > llm_lines[-1]
        base = opened[llm_lines[0] - 1] if llm_lines[0] > 0 else 0
        slots = ~before & ~after & (opened[mine] > base)
        region = np.select([before, after, slots], ["before", "after", "slots"], "between")
        for name in REGIONS:
            seconds[name] += float(spent[mine[region == name]].sum())
    return seconds
