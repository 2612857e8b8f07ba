"""Checks the header of a plan: layouts, templates, layers, buckets, the seam, recomputation, capacity."""

from __future__ import annotations

from math import isfinite

from optimus.ir.kernel_names import REGATHERS
from optimus.ir.op import Communicator, OpKind
from optimus.ir.plan import WHOLE_STAGE, Bucket, Plan, Template
from optimus.ir.ranks import LLM
from optimus.verify.expected_lines import Problems, backward_kind

_MAX_BYTES = 2**53  # sums stay exact in float64


def check_header(plan: Plan) -> Problems:
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
        elif name != LLM and (layout.cp, layout.ep, layout.chunks) != (1, 1, 1):
            yield name, f"layout {layout}: an encoder has cp, ep and chunks of 1"
        elif len(module.chunks) != layout.virtual_stages or len(module.buckets) != layout.pp:
            yield name, f"has {len(module.chunks)} chunks and buckets of {len(module.buckets)} stages"


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
    for virtual, chunk in enumerate(module.chunks):
        kinds = {kind for kind, template in chunk.templates.items() if plan.templates[template]}
        if OpKind.FORWARD not in kinds or len(kinds) != len(chunk.templates):
            yield f"{name} virtual stage {virtual}", "has no forward or a template without phases"
        if (OpKind.BACKWARD in kinds and len(kinds) > 2) or (
            OpKind.WEIGHT_GRAD in kinds and OpKind.INPUT_GRAD not in kinds
        ):
            yield f"{name} virtual stage {virtual}", "has another backward than B, I, or I and W"
        backward = backward_kind(plan, name, virtual) is not None
        if needs_grad and not backward:
            yield (
                f"{name} virtual stage {virtual}",
                "has no backward, but an earlier stage needs its gradient",
            )
        needs_grad = needs_grad or backward
    if name != LLM and needs_grad and backward_kind(plan, LLM, 0) is None:
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
            sizes += [chunk.saved_activation_bytes, chunk.recomputed_bytes]
        for bucket in (bucket for stage in module.buckets for bucket in stage):
            seconds += [bucket.gather_s, bucket.reduce_s]
    if not all(isfinite(value) and value >= 0 for value in seconds):
        yield "header", "a duration is negative or not finite"
    if not all(0 <= value <= _MAX_BYTES for value in sizes):
        yield "header", "a size in bytes is negative or too large"
    for name, template in plan.templates.items():
        if any(not 0 <= dep < place for place, phase in enumerate(template) for dep in phase.after):
            yield f"template {name}", "a phase waits for one that does not precede it"


def check_layers(plan: Plan) -> Problems:
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
        gathers = any(phase.kind == OpKind.LAUNCH and phase.name in REGATHERS for phase in phases)
        if module.regather != gathers:
            yield name, f"states regather = {module.regather}; its templates say {gathers}"


def check_parameters(plan: Plan) -> Problems:
    """Checks that replicated weights that are trained are gathered before their forward and reduced."""
    for name, module in plan.modules.items():
        if module.layout.replica_ranks == 1:
            continue
        for virtual, chunk in enumerate(module.chunks):
            number, stage = divmod(virtual, module.layout.pp)
            kinds = [kind for kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD) if kind in chunk.templates]
            trained = {
                phase.layer
                for kind in kinds
                for phase in plan.templates[chunk.templates[kind]]
                if phase.kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD)
            }
            for layer in sorted(trained) if chunk.layers else ():
                mine = [bucket for bucket in module.buckets[stage] if _holds(bucket, number, layer)]
                if not any(bucket.gates for bucket in mine):
                    problem = "is in no bucket" if not mine else "does not wait for its parameters"
                    yield f"{name} stage {stage} chunk {number} layer {layer}", f"is trained and {problem}"


def _holds(bucket: Bucket, chunk: int, layer: int) -> bool:
    inside = bucket.first_layer <= layer < bucket.end_layer
    return bucket.chunk == WHOLE_STAGE or (bucket.chunk == chunk and inside)


def check_seam(plan: Plan) -> Problems:
    """Checks that seam rows of other TP or CP ranks are gathered before the compute of an LLM forward."""
    needed = {Communicator.TP} if plan.ranks.positions > 1 else set()
    needed |= {Communicator.CP} if plan.ranks.llm.cp > 1 else set()
    if not needed or not any(module.seam_bytes for module in plan.encoders.values()):
        return
    leading = _leading_launches(plan.template_of(LLM, OpKind.FORWARD, 0, 0))
    for communicator in sorted(needed - leading):
        word = communicator.name.lower()
        yield "llm virtual stage 0", f"F does not begin with a gather of the seam's rows over {word}"


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


def check_capacity(plan: Plan) -> Problems:
    """Checks that the capacity does not exceed the GPU's that the plan is bound to."""
    bound = plan.bound_to.get("cluster", {}).get("gpu.memory_bytes")
    if isinstance(bound, int | float) and plan.capacity_bytes > bound:
        yield "capacity_bytes", f"{plan.capacity_bytes} are more than the GPU's {bound:.0f}"
