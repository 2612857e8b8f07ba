"""Exports a plan as a function over torchtitan's configuration, which is Python."""

from __future__ import annotations

from typing import Any

from optimus.exporters.exported_plan import (
    EMPTY_ENDS,
    ExportedPlan,
    UnsupportedFeature,
    build_export,
    describe_limitations,
    format_comment_lines,
    format_python_dict,
    list_unsupported_encoder_features,
)
from optimus.exporters.plan_facts import PlanFacts
from optimus.ir.plan import Span

VERSION = "torchtitan 0.3.0"
CONFIG = "torchtitan_plan.py"
SYSTEMS = ("stage0", "fsdp")
SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble"}
POLICIES = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
ENCODER = "vision_encoder"  # the one encoder of its models, by their name for it

USE = (
    "Use: in a config_registry of yours, `return planned(qwen35_27b())` or whichever configuration is yours;",
    "then train with its module and function. Yours: the model's shape, data, optimizer, learning rate.",
    "torchtitan then runs the encoder in the first pipeline stage. It shards parameters by FSDP2; kept",
    "gathered within a step, as here, they come nearest to the plan.",
)
BODY = '''
from dataclasses import replace

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

LAYERS = {layers}
PARALLELISM = {parallelism}
TRAINING = {training}
ACTIVATION_CHECKPOINT = {policy}


def planned(config):
    """A `Trainer.Config` of a model of {layers} layers, laid out as planned."""
    found = len(config.model_spec.model.layers)
    if found != LAYERS:
        raise ValueError(f"the plan is for {{LAYERS}} layers, the model has {{found}}")
    return replace(
        config,
        parallelism=replace(config.parallelism, **PARALLELISM),
        training=replace(config.training, **TRAINING),
        activation_checkpoint=ACTIVATION_CHECKPOINT,
    )
'''


def export_torchtitan(facts: PlanFacts) -> ExportedPlan:
    """Returns a Python file that sets parallelism, batch and recomputation, rank groups, and the limits."""
    plan = facts.plan
    unsupported = _list_unsupported(facts)
    head = [f"{plan.name}: the LLM of this plan, for {VERSION}, on {plan.ranks.world} GPUs."]
    head += [*USE, *describe_limitations(plan, "torchtitan", unsupported, SYSTEMS)]
    body = BODY.format(
        layers=facts.layers,
        parallelism=format_python_dict(build_parallelism_fields(facts)),
        training=format_python_dict(build_training_fields(facts)),
        policy=POLICIES[facts.recompute],
    )
    return build_export(
        plan,
        target="torchtitan",
        version=VERSION,
        systems=SYSTEMS,
        files={CONFIG: "\n".join(format_comment_lines(head)) + "\n" + body},
        unsupported=unsupported,
    )


def build_parallelism_fields(facts: PlanFacts) -> dict[str, Any]:
    """Returns fields of `ParallelismConfig`."""
    layout, plan = facts.layout, facts.plan
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": layout.dp,
        "fsdp_reshard_after_forward": "always" if facts.gathered_per > Span.STEP else "never",
        "tensor_parallel_degree": layout.tp,
        "enable_sequence_parallel": True,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.pp > 1:
        nearest = "interleaved" if layout.chunks > 1 else "1f1b"
        fields["pipeline_parallel_schedule"] = SCHEDULES.get(plan.order, SCHEDULES[nearest])
        fields["pipeline_parallel_microbatch_size"] = facts.microbatch_sequences
        fields["module_fqns_per_model_part"] = list_modules_per_stage(facts)
    return fields


def list_modules_per_stage(facts: PlanFacts) -> list[list[str]]:
    """Returns torchtitan's module names of every virtual stage; the encoder precedes the embedding."""
    layers, next_layer, stages = facts.layers_of_virtual_stages(), 0, list[list[str]]()
    for count in layers:
        stages.append([f"layers.{layer}" for layer in range(next_layer, next_layer + count)])
        next_layer += count
    stages[0][:0] = [*([ENCODER] if facts.plan.encoders else []), "tok_embeddings"]
    stages[-1] += ["norm", "lm_head"]
    return stages


def build_training_fields(facts: PlanFacts) -> dict[str, Any]:
    """Returns fields of `TrainingConfig`; without a pipeline, microbatches are gradient accumulation."""
    sequences, pipelined = facts.microbatch_sequences, facts.layout.pp > 1
    fields: dict[str, Any] = {
        "local_batch_size": sequences * facts.plan.microbatches if pipelined else sequences,
        "global_batch_size": facts.sequences_per_step,
        "seq_len": facts.sequence_tokens,
    }
    if pipelined:
        fields["disable_cuda_graphs"] = True  # torchtitan refuses them with a pipeline
    return fields


def _list_unsupported(facts: PlanFacts) -> list[UnsupportedFeature]:
    """Returns the features of the plan that torchtitan cannot run."""
    plan = facts.plan
    unsupported = list_unsupported_encoder_features(
        facts,
        stages="its encoder is one module, in the first stage",
        layout=f"one mesh holds all modules: the encoder gets the LLM's tp{facts.layout.tp}",
    )
    for name, module in plan.encoders.items():
        if module.recompute != facts.recompute:
            what = f"recompute {module.recompute} in {name} with {facts.recompute} in the LLM"
            unsupported.append(
                UnsupportedFeature(what=what, why="one policy of checkpointing holds for all modules")
            )
        if facts.encoder_field(name, "modality") not in (None, "vision", "video"):
            what = f"the encoder {name}"
            unsupported.append(UnsupportedFeature(what=what, why="its models have vision encoders only"))
    if len(plan.encoders) > 1:
        what = f"{len(plan.encoders)} encoders"
        unsupported.append(UnsupportedFeature(what=what, why=f"its models have one, {ENCODER}"))
    return unsupported + _not_supported_of_pipeline(facts)


def _not_supported_of_pipeline(facts: PlanFacts) -> list[UnsupportedFeature]:
    plan, llm, unsupported = facts.plan, facts.layout, list[UnsupportedFeature]()
    if llm.pp > 1 and plan.order not in SCHEDULES:
        what = f"the LLM's order {plan.order}"
        unsupported.append(UnsupportedFeature(what=what, why="the nearest of torch's schedules runs instead"))
    rounds = max(1, plan.microbatches // llm.pp)
    if llm.pp > 1 and plan.order != "1f1b" and plan.microbatches % rounds:
        why = f"torch asks for a multiple of {rounds} rounds of its schedule"
        unsupported.append(UnsupportedFeature(what=f"{plan.microbatches} microbatches", why=why))
    if facts.has_empty_ends:
        unsupported.append(EMPTY_ENDS)
    if facts.model("precision.gradients") != "fp32":
        unsupported.append(
            UnsupportedFeature(what="gradients reduced in bf16", why="it reduces them in float32")
        )
    return unsupported
