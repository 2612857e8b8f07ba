"""What a header must hold so that its programs train the model: layers, buckets, the seam, capacity."""

from __future__ import annotations

from collections.abc import Iterator

from optimus.ir.kernel_names import REGATHERS
from optimus.ir.op import Communicator, OpKind
from optimus.ir.plan import WHOLE_STAGE, Bucket, Plan, Template
from optimus.ir.ranks import LLM

SearchResult = Iterator[tuple[str, str]]  # where, problem


def check_layers(plan: Plan) -> SearchResult:
    """Templates name layers of their chunk, and no others."""
    for name, module in plan.modules.items():
        for virtual, chunk in enumerate(module.chunks):
            where = f"{name} virtual stage {virtual}"
            for kind, template in chunk.templates.items():
                layers = {phase.layer for phase in plan.templates[template]}
                if not layers <= set(range(max(chunk.layers, 1))):
                    yield where, f"{kind.word} names a layer that is none of its {chunk.layers}"


def check_recomputation(plan: Plan) -> SearchResult:
    """Modules state the kernels that their templates recompute, and whether they gather inputs again."""
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


def check_parameters(plan: Plan) -> SearchResult:
    """Where ranks hold the same weights, what is trained is gathered before its forward and reduced."""
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


def check_seam(plan: Plan) -> SearchResult:
    """Rows that reach other TP or CP ranks of LLM stage 0 are gathered before anything else of a forward."""
    needed = {Communicator.TP} if plan.ranks.positions > 1 else set()
    needed |= {Communicator.CP} if plan.ranks.llm.cp > 1 else set()
    if not needed or not any(module.seam_bytes for module in plan.encoders.values()):
        return
    leading = _leading_launches(plan.template_of(LLM, OpKind.FORWARD, 0, 0))
    for communicator in sorted(needed - leading):
        word = communicator.name.lower()
        yield "llm virtual stage 0", f"F does not begin with a gather of the seam's rows over {word}"


def _leading_launches(template: Template) -> set[Communicator]:
    """Groups whose collectives come before all compute."""
    found = set()
    for phase in template:
        if phase.kind not in (OpKind.LAUNCH, OpKind.WAIT):
            break
        if phase.kind == OpKind.LAUNCH:
            found.add(Communicator(phase.communicator))
    entries = [phase for phase in template if not phase.after]
    return found if all(phase.kind == OpKind.LAUNCH for phase in entries) else set()


def check_capacity(plan: Plan) -> SearchResult:
    """The memory that a plan is checked against is that of the GPU it is bound to."""
    bound = plan.bound_to.get("cluster", {}).get("gpu.memory_bytes")
    if isinstance(bound, int | float) and plan.capacity_bytes > bound:
        yield "capacity_bytes", f"{plan.capacity_bytes} are more than the GPU's {bound:.0f}"
