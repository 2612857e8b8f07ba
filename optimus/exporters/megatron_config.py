"""Names a plan's layout, sharding and recomputation by the fields of megatron-core's configuration."""

from __future__ import annotations

from typing import Any

from optimus.exporters.exported_plan import EMPTY_ENDS, UnsupportedFeature
from optimus.exporters.plan_facts import PlanFacts
from optimus.ir.plan import Span

ORDERS = ("1f1b", "interleaved")


def build_parallel_fields(facts: PlanFacts) -> dict[str, Any]:
    """Returns the parallel sizes, fields of `ModelParallelConfig`."""
    layout = facts.layout
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
    }
    if facts.has_experts:  # an expert is never tensor-parallel
        fields |= {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": 1}
    return {**fields, "sequence_parallel": layout.tp > 1}


def build_ddp_fields(facts: PlanFacts) -> dict[str, Any]:
    """Returns how states are sharded and reduced, fields of `DistributedDataParallelConfig`."""
    overlapped = facts.layout.replica_ranks > 1
    fields: dict[str, Any] = {"use_distributed_optimizer": True, "use_megatron_fsdp": facts.is_fsdp}
    if facts.is_fsdp:
        gathered = facts.gathered_per > Span.STEP
        fields["data_parallel_sharding_strategy"] = "optim_grads_params" if gathered else "optim_grads"
    return {**fields, "overlap_grad_reduce": overlapped, "overlap_param_gather": overlapped}


def build_recompute_fields(facts: PlanFacts) -> dict[str, Any]:
    """Returns the recomputation, fields of `TransformerConfig`; none where nothing is recomputed.

    Selective recomputes attention scores where they are stored, else norms and MLPs: megatron-core has no
    module for non-linearities alone.
    """
    if facts.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if facts.recompute != "selective":
        return {}
    fields: dict[str, Any] = {"recompute_granularity": "selective"}
    if not facts.fused_attention:
        return {**fields, "recompute_modules": ["core_attn"]}
    if not facts.has_experts:
        return {**fields, "recompute_modules": ["layernorm", "mlp"]}
    # Without grouped GEMMs moe_act is refused.
    return {**fields, "recompute_modules": ["layernorm", "moe_act"], "moe_grouped_gemm": True}


def find_pipeline_layout(facts: PlanFacts) -> str | None:
    """Returns the layout string where virtual stages are unequal, else None."""
    layers = facts.layers_of_virtual_stages()
    return format_pipeline_layout(layers) if facts.layout.pp > 1 and len(set(layers)) > 1 else None


def format_pipeline_layout(layers: list[int]) -> str:
    """Returns e.g. `Ettt|tttt|ttL` (E embedding, t layer, L head); no shell expands it."""
    stages = ["t" * count for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return "|".join(stages)


def list_unsupported_orders(facts: PlanFacts) -> list[UnsupportedFeature]:
    """Returns what megatron-core's pipeline schedules cannot run of the LLM's."""
    plan, layout, unsupported = facts.plan, facts.layout, list[UnsupportedFeature]()
    if plan.order not in ORDERS:
        fallback = "interleaved 1F1B" if layout.chunks > 1 else "1F1B"
        unsupported.append(
            UnsupportedFeature(what=f"the LLM's order {plan.order}", why=f"it runs {fallback} instead")
        )
    if layout.pp > 1 and layout.chunks > 1 and plan.microbatches % layout.pp:
        unsupported.append(
            UnsupportedFeature(
                what=f"{plan.microbatches} microbatches in virtual stages",
                why=f"it refuses a number that is not a multiple of pp = {layout.pp}",
            )
        )
    return unsupported


def list_approximations(facts: PlanFacts) -> list[UnsupportedFeature]:
    """Returns what the fields state only nearly: the ends of the pipeline, selective recomputation."""
    unsupported = [EMPTY_ENDS] if facts.has_empty_ends else []
    if facts.recompute == "selective" and facts.fused_attention:
        if facts.has_experts:
            why = "the files recompute norms and the experts' non-linearities, not those of dense MLPs"
        else:
            why = "the files recompute norms and whole MLPs: as little memory, more time"
        unsupported.append(UnsupportedFeature(what="recomputing only norms and non-linearities", why=why))
    return unsupported
