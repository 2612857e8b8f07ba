"""Checks the header of a plan and the order of its lines, one function per condition."""

from __future__ import annotations

from math import isfinite

import numpy as np

from optimus.ir.op import REGATHER_NAMES, SEAMS, Communicator, Ints, OpKind
from optimus.ir.plan import Plan, PlannedModule, Template
from optimus.ir.ranks import LLM
from optimus.verify.buckets import list_span_problems
from optimus.verify.expected_program import PlanLines, Problems, input_grad_kind
from optimus.verify.waits import LineWaits, WaitDerivation

_MAX_BYTES = 2**53  # sums stay exact in float64


def check_plan_header(plan: Plan) -> Problems:
    """Yields problems of the tables from which the expected lines follow."""
    if LLM not in plan.modules or list(plan.modules)[-1] != LLM:
        yield "modules", f"the last module is not {LLM}"
        return
    layouts = list(_layout_problems(plan))
    yield from layouts
    if layouts:
        return
    for name in plan.modules:
        yield from _module_problems(plan, name)
    yield from _number_problems(plan)
    stages = plan.ranks.llm.pp
    if len(plan.finish_s) not in (0, stages):
        yield "finish_s", f"{len(plan.finish_s)} entries for {stages} LLM stages"
    if len(plan.programs) != plan.ranks.num_classes:
        yield "programs", f"{len(plan.programs)} programs for {plan.ranks.num_classes} device classes"


def _layout_problems(plan: Plan) -> Problems:
    llm = plan.modules[LLM].layout
    lines = sum(len(program) for program in plan.programs)
    if not 1 <= plan.microbatches <= max(lines, 1):  # so that tables of that size stay small
        yield "microbatches", f"{plan.microbatches} of them in {lines} lines"
    for name, module in plan.modules.items():
        layout = module.layout
        if min(layout.dp, layout.pp, layout.cp, layout.ep, layout.tp, layout.chunks) < 1:
            yield name, f"layout {layout} has an axis below 1"
        elif layout.gpus != llm.gpus:
            yield name, f"layout {layout} uses {layout.gpus} GPUs, the LLM {llm.gpus}"
        elif llm.pp % layout.pp or llm.tp % layout.tp:
            yield name, f"pp and tp of layout {layout} do not divide the LLM's, {llm}"
        elif name != LLM and (layout.cp, layout.ep) != (1, 1):
            yield name, f"layout {layout}: an encoder has cp and ep of 1"
        elif len(module.chunks) != layout.virtual_stages or len(module.buckets) != layout.pp:
            yield name, f"has {len(module.chunks)} chunks and buckets of {len(module.buckets)} stages"
        elif not module.virtual_stages:
            yield name, "has no virtual stage that runs anything"
        else:
            yield from _empty_stage_problems(name, module)


def _empty_stage_problems(name: str, module: PlannedModule) -> Problems:
    """Yields virtual stages that hold layers or activations and run nothing."""
    for virtual, chunk in enumerate(module.chunks):
        held = chunk.layers, chunk.saved_activation_bytes, chunk.recomputed_bytes, chunk.logits_bytes
        if virtual not in module.virtual_stages and any(held):
            yield f"{name} virtual stage {virtual}", f"holds {chunk.layers} layers and runs nothing"


def _module_problems(plan: Plan, name: str) -> Problems:
    module = plan.modules[name]
    if name != LLM:
        owners, pipelines = module.pipelines, plan.ranks.num_pipelines(name)
        if (
            module.microbatches_per_llm_microbatch < 1
            or len(owners) != plan.microbatches * module.microbatches_per_llm_microbatch
        ):
            count = plan.microbatches * module.microbatches_per_llm_microbatch
            yield name, f"{len(owners)} pipelines for {count} encoder microbatches"
        elif not all(0 <= owner < pipelines for owner in owners):
            yield name, f"a microbatch on a pipeline that is none of its {pipelines}"
    needs_grad = False  # of the previous virtual stage's output
    for virtual in module.virtual_stages:
        chunk = module.chunks[virtual]
        kinds = {kind for kind, template in chunk.templates.items() if plan.templates[template]}
        if OpKind.FORWARD not in kinds or len(kinds) != len(chunk.templates):
            yield f"{name} virtual stage {virtual}", "has no forward or a template without phases"
        if (OpKind.BACKWARD in kinds and len(kinds) > 2) or (
            OpKind.WEIGHT_GRAD in kinds and OpKind.INPUT_GRAD not in kinds
        ):
            yield f"{name} virtual stage {virtual}", "has another backward than B, I, or I and W"
        backward = input_grad_kind(plan, name, virtual) is not None
        if needs_grad and not backward:
            yield (
                f"{name} virtual stage {virtual}",
                "has no backward, but an earlier stage needs its gradient",
            )
        needs_grad = needs_grad or backward
    for stage in range(module.layout.pp):
        yield from list_span_problems(plan, name, stage)
    if name != LLM and needs_grad and input_grad_kind(plan, LLM, plan.entry) is None:
        yield name, "needs a gradient, but the LLM's first virtual stage has no backward"


def _number_problems(plan: Plan) -> Problems:
    """Yields durations and sizes that are negative, not finite or too large."""
    seconds = [plan.slowdown, plan.launch_s, *plan.finish_s]
    sizes = [plan.capacity_bytes]
    for template in plan.templates.values():
        seconds += [phase.duration_s for phase in template]
    for module in plan.modules.values():
        seconds.append(module.seam_s)
        sizes.append(module.seam_bytes)
        for chunk in module.chunks:
            seconds.append(chunk.send_s)
            sizes += [chunk.saved_activation_bytes, chunk.recomputed_bytes, chunk.logits_bytes]
        for bucket in (bucket for stage in module.buckets for bucket in stage):
            seconds += [bucket.gather_s, bucket.reduce_s]
    if not all(isfinite(value) and value >= 0 for value in seconds):
        yield "header", "a duration is negative or not finite"
    if not all(0 <= value <= _MAX_BYTES for value in sizes):
        yield "header", "a size in bytes is negative or too large"
    for name, template in plan.templates.items():
        if any(not 0 <= dep < place for place, phase in enumerate(template) for dep in phase.after):
            yield f"template {name}", "a phase waits for one that does not precede it"


def check_template_layers(plan: Plan) -> Problems:
    """Checks that templates name only layers of their chunk."""
    for name, module in plan.modules.items():
        for virtual, chunk in enumerate(module.chunks):
            where = f"{name} virtual stage {virtual}"
            for kind, template in chunk.templates.items():
                layers = {phase.layer for phase in plan.templates[template]}
                if not layers <= set(range(max(chunk.layers, 1))):
                    yield where, f"{kind.word} names a layer that is none of its {chunk.layers}"


def check_recomputation(plan: Plan) -> Problems:
    """Checks that modules state which kernels their templates recompute and whether they repeat gathers."""
    for name, module in plan.modules.items():
        templates = {template for chunk in module.chunks for template in chunk.templates.values()}
        phases = [phase for template in templates for phase in plan.templates[template]]
        recomputed = {phase.name for phase in phases if phase.kind == OpKind.RECOMPUTE}
        if sorted(module.recomputed) != sorted(recomputed):
            stated, needed = (
                ", ".join(sorted(names)) or "nothing" for names in (module.recomputed, recomputed)
            )
            yield name, f"states that it recomputes {stated}; its templates recompute {needed}"
        gathers = any(phase.kind == OpKind.LAUNCH and phase.name in REGATHER_NAMES for phase in phases)
        if module.regather != gathers:
            yield name, f"states regather = {module.regather}; its templates say {gathers}"


def check_seam_gathers(plan: Plan) -> Problems:
    """Checks that seam rows of other ranks are gathered before the compute of an LLM forward.

    They are those of other TP or CP ranks, and of other replicas with which images are dealt.
    """
    yield from _dealing_problems(plan)
    needed = {Communicator.TP} if plan.ranks.positions > 1 else set()
    needed |= {Communicator.CP} if plan.ranks.llm.cp > 1 else set()
    needed |= {Communicator.DEAL} if plan.dealing_replicas > 1 else set()
    if not needed or not any(module.seam_bytes for module in plan.encoders.values()):
        return
    leading = _leading_launches(
        plan.template_of(LLM, OpKind.FORWARD, plan.ranks.entry_stage, plan.entry_chunk)
    )
    for communicator in sorted(needed - leading):
        word = communicator.name.lower()
        yield (
            f"llm virtual stage {plan.entry}",
            f"F does not begin with a gather of the seam's rows over {word}",
        )


def _dealing_problems(plan: Plan) -> Problems:
    """Yields exchanges between replicas that are missing, or that no other replica takes part in.

    All replicas run the same lines, so each meets the others at its own exchange of a microbatch, behind
    the encoder microbatches that feed it.
    """
    if plan.ranks.llm.dp % plan.dealing_replicas:
        yield "dealing_replicas", f"{plan.dealing_replicas} do not divide dp = {plan.ranks.llm.dp}"
    trains = any(
        input_grad_kind(plan, name, module.virtual_stages[-1]) is not None
        for name, module in plan.encoders.items()
    )
    for name, module in plan.modules.items():
        for virtual, chunk in enumerate(module.chunks):
            entry = name == LLM and virtual == plan.entry
            deals = plan.dealing_replicas > 1 and entry and bool(plan.encoders)
            for kind, template in chunk.templates.items():
                backward = kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD)
                least = int(deals and (kind == OpKind.FORWARD or (backward and trains)))
                most = int(deals and (kind == OpKind.FORWARD or backward))
                count = sum(
                    phase.kind == OpKind.LAUNCH and phase.communicator == Communicator.DEAL
                    for phase in plan.templates[template]
                )
                if not least <= count <= most:
                    problem = f"{kind.word} exchanges rows with other replicas {count} times"
                    yield f"{name} virtual stage {virtual}", f"{problem}, not {least}"


def _leading_launches(template: Template) -> set[Communicator]:
    """Returns the communicators whose collectives precede all compute."""
    leading = set()
    for phase in template:
        if phase.kind not in (OpKind.LAUNCH, OpKind.WAIT):
            break
        if phase.kind == OpKind.LAUNCH:
            leading.add(Communicator(phase.communicator))
    entries = [phase for phase in template if not phase.after]
    return leading if all(phase.kind == OpKind.LAUNCH for phase in entries) else set()


def check_gpu_capacity(plan: Plan) -> Problems:
    """Checks that the capacity does not exceed the GPU's that the plan is bound to."""
    bound = plan.bound_to.get("cluster", {}).get("gpu.memory_bytes")
    if isinstance(bound, int | float) and plan.capacity_bytes > bound:
        yield "capacity_bytes", f"{plan.capacity_bytes} are more than the GPU's {bound:.0f}"


# ---------------------------------------------------------------------------- order of lines


def check_lines_after_inputs(derived: WaitDerivation, waits: LineWaits) -> Problems:
    """Checks that lines follow what they wait for on their class, and the rules of order."""
    lines = waits.lines
    for where, _, rows in lines.all_blocks():
        if where.kind <= OpKind.WEIGHT_GRAD and rows.shape[1] > 1 and (np.diff(rows, axis=1) <= 0).any():
            early = rows[:, 1:][np.diff(rows, axis=1) <= 0]
            for line in early.tolist():
                yield lines.text(line), "comes before the previous phase of its op"
    wrong = (lines.device[waits.before] == lines.device[waits.after]) & (waits.before >= waits.after)
    for before, after in zip(waits.before[wrong].tolist(), waits.after[wrong].tolist(), strict=True):
        yield lines.text(after), f"comes before what it waits for: {lines.text(before)}"
    for device, end in enumerate(lines.first[1:].tolist()):
        if end == lines.first[device] or lines.kind[end - 1] != OpKind.OPTIMIZER:
            yield f"class {device}", "the last line is not finish"
    for name, shape in derived.phases.items():
        for launch, wait in shape.wait_of.items():
            if wait < 0:
                yield f"template {name} phase {launch}", "is a launch that no phase of its op waits for"
    yield from _neighbours(derived, waits)


def _neighbours(derived: WaitDerivation, waits: LineWaits) -> Problems:
    """Checks lines that must directly follow a certain phase, or any phase of the LLM."""
    lines = waits.lines
    rows = np.arange(len(lines))
    latest = np.maximum.accumulate(np.where(lines.kind <= OpKind.WEIGHT_GRAD, rows, -1))
    previous = np.concatenate([[-1], latest[:-1]])  # latest phase before each line, on its class
    previous[previous < lines.first[:-1][lines.device]] = -1
    follows = _predecessors(derived, lines)
    for line in rows[(follows >= 0) & (previous != follows)].tolist():
        yield lines.text(line), f"does not directly follow {lines.text(int(follows[line]))}"
    llm = list(lines.plan.modules).index(LLM)
    receives = (lines.module == llm) & np.isin(lines.kind, (OpKind.RECV_F, OpKind.RECV_B))
    receives |= lines.kind == OpKind.RECV_SEAM
    for line in rows[receives & (previous >= 0) & (lines.module[previous] != llm)].tolist():
        yield lines.text(line), f"is posted behind filler, {lines.text(int(previous[line]))}"


def _predecessors(derived: WaitDerivation, lines: PlanLines) -> Ints:
    """Returns the phase that each LLM launch and each send must directly follow; -1 for the rest."""
    plan = lines.plan
    follows = np.full(len(lines), -1)
    for (device, name, kind, chunk), microbatches, rows in lines.all_blocks():
        virtual = derived.virtual(device, name, chunk) if name in plan.modules else 0
        if kind <= OpKind.WEIGHT_GRAD and name == LLM:
            launches = [place for place, _ in derived.shape(name, kind, virtual).launches if place]
            follows[rows[:, launches]] = rows[:, [place - 1 for place in launches]]
        elif kind in (OpKind.SEND_F, OpKind.SEND_SEAM):
            produced = plan.exit_chunk(name) if kind == OpKind.SEND_SEAM else chunk
            follows[rows] = lines.at(device, name, OpKind.FORWARD, produced)[:, -1:]
        elif kind in (OpKind.SEND_B, OpKind.SEND_SEAM_B):
            seam = kind == OpKind.SEND_SEAM_B
            producer, at, produced = (LLM, plan.entry, plan.entry_chunk) if seam else (name, virtual, chunk)
            backward = lines.at(
                device, producer, input_grad_kind(plan, producer, at) or OpKind.BACKWARD, produced
            )
            of = microbatches // plan.modules[name].microbatches_per_llm_microbatch if seam else slice(None)
            follows[rows] = backward[of, -1:]
    return follows


def check_transfer_order(waits: LineWaits) -> Problems:
    """Checks that two classes order their transfers of a module, pipeline or seam, in the same way."""
    lines = waits.lines
    sender, receiver = lines.device[waits.send], lines.device[waits.recv]
    low, high = np.minimum(sender, receiver), np.maximum(sender, receiver)
    at_low = np.where(sender < receiver, waits.send, waits.recv)
    at_high = np.where(sender < receiver, waits.recv, waits.send)
    seam = np.isin(lines.kind[waits.send], SEAMS)
    order_low = np.lexsort((at_low, seam, lines.module[waits.send], high, low))
    order_high = np.lexsort((at_high, seam, lines.module[waits.send], high, low))
    for at in np.flatnonzero(order_low != order_high).tolist():
        one, other = int(at_low[order_low[at]]), int(at_high[order_high[at]])
        yield lines.text(one), f"at the other end the transfer in this position is {lines.text(other)}"


def check_collective_order(waits: LineWaits) -> Problems:
    """Checks that two classes order the collectives of the groups they share in the same way."""
    lines, members = waits.lines, waits.group_members
    num_classes = len(lines.first) - 1
    groups_of: list[set[int]] = [set() for _ in range(num_classes)]
    for group, classes in enumerate(members):
        for device in classes if len(classes) > 1 else ():
            groups_of[device].add(group)
    cache: dict[tuple[int, frozenset[int]], Ints] = {}

    def issued(device: int, shared: frozenset[int]) -> Ints:
        """Returns the lines of a class that belong to one of the groups, in order."""
        if (device, shared) not in cache:
            first, end = lines.first[device], lines.first[device + 1]
            wanted = np.zeros(len(members) + 1, bool)  # the last is for lines of no group
            wanted[list(shared)] = True
            cache[device, shared] = first + np.flatnonzero(wanted[waits.group[first:end]])
        return cache[device, shared]

    for one in range(num_classes):
        for other in range(one + 1, num_classes):
            shared = frozenset(groups_of[one] & groups_of[other])
            if not shared:
                continue
            mine, theirs = issued(one, shared), issued(other, shared)
            if len(mine) != len(theirs):
                yield f"classes {one} and {other}", f"{len(mine)} collectives meet {len(theirs)}"
            elif (differ := np.flatnonzero(lines.identity[mine] != lines.identity[theirs])).size:
                at = int(differ[0])
                yield lines.text(int(mine[at])), f"meets {lines.text(int(theirs[at]))}"
