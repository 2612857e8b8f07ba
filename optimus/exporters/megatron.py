"""Exports a plan as Megatron-LM's arguments."""

from __future__ import annotations

from typing import Any

from optimus.exporters.exported_plan import (
    ExportedPlan,
    UnsupportedFeature,
    build_export,
    describe_limitations,
    format_comment_lines,
    list_unsupported_encoder_features,
)
from optimus.exporters.megatron_config import (
    build_ddp_fields,
    build_parallel_fields,
    build_recompute_fields,
    find_pipeline_layout,
    list_approximations,
    list_unsupported_orders,
)
from optimus.exporters.plan_facts import PlanFacts

VERSION = "megatron-core 0.16.1"
ARGUMENTS = "megatron.args"
# Encoders inside the first pipeline stage, and Megatron-FSDP. All layers as one pipeline are not there (its
# pipeline layout refuses encoder layers), nor three phases, nor encoders on GPUs of their own.
SYSTEMS = ("stage0", "fsdp")
OTHER_LAYERS = tuple(  # fields of layers that the arguments do not state
    f"llm.{field}"
    for field in (
        "stack.variants", "stack.linears", "stack.extra_parameters", "per_layer_inputs",
        "stack.attention.linear", "stack.attention.output_gate", "stack.attention.kv_projection",
    )
)  # fmt: skip
UNSTATED = (  # constants of an LLM that the arguments do not state either
    "embedding_scale", "logit_softcap", "stack.norm_offset", "stack.post_norms", "stack.layer_scale",
    "stack.attention.window_tokens", "stack.attention.qk_norm_kind", "stack.attention.softcap",
    "stack.attention.softmax_scale",
)  # fmt: skip
Flag = tuple[str, ...]

USE = (
    "Use: set -f; torchrun ... YOUR_PRETRAIN_SCRIPT.py $(grep -v '^#' megatron.args) ...",
    "Yours to add: data, tokenizer, optimizer, rotary base and scaling; the encoders, in your model's code.",
    "Megatron-LM then runs the encoders in the first pipeline stage.",
)


def export_megatron(facts: PlanFacts) -> ExportedPlan:
    """Returns the arguments for the plan's LLM layout, the rank groups, and what Megatron-LM cannot run."""
    plan = facts.plan
    unsupported = _list_unsupported(facts)
    head = [f"{plan.name}: the LLM of this plan, for Megatron-LM ({VERSION}), on {plan.ranks.world} GPUs."]
    head += [*USE, *describe_limitations(plan, "Megatron-LM", unsupported, SYSTEMS)]
    lines = [*format_comment_lines(head), *(" ".join(flag) for flag in _list_flags(facts))]
    return build_export(
        plan,
        target="megatron",
        version=VERSION,
        systems=SYSTEMS,
        files={ARGUMENTS: "\n".join(lines) + "\n"},
        unsupported=unsupported,
    )


def _list_flags(facts: PlanFacts) -> list[Flag]:
    """Returns all arguments, each with its values; none needs quotes."""
    return [
        *_parallel(facts),
        *_pipeline(facts),
        *_batch(facts),
        *_recompute(facts),
        *list_model_flags(facts),
    ]


def _to_flags(fields: dict[str, Any]) -> list[Flag]:
    """Returns fields as flags; a True is a flag without a value, a False none."""
    flags = list[Flag]()
    for name, value in fields.items():
        if value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            flags.append((f"--{name.replace('_', '-')}", *map(str, values)))
    return flags


def _parallel(facts: PlanFacts) -> list[Flag]:
    return _to_flags({**build_parallel_fields(facts), **build_ddp_fields(facts)})


def _pipeline(facts: PlanFacts) -> list[Flag]:
    """Returns no flag for even stages without virtual ones, a layout string where stages are unequal."""
    layout, cut = facts.layout, find_pipeline_layout(facts)
    if cut is not None:
        return [("--pipeline-model-parallel-layout", cut)]
    if layout.pp == 1 or layout.chunks == 1:
        return []
    return [("--num-layers-per-virtual-pipeline-stage", str(facts.layers_of_virtual_stages()[0]))]


def _batch(facts: PlanFacts) -> list[Flag]:
    return [
        ("--micro-batch-size", str(facts.microbatch_sequences)),
        ("--global-batch-size", str(facts.sequences_per_step)),
    ]


def _recompute(facts: PlanFacts) -> list[Flag]:
    return _to_flags(build_recompute_fields(facts))


# ---------------------------------------------------------------------------- shape of the LLM


def list_model_flags(facts: PlanFacts) -> list[Flag]:
    """Returns the flags of the LLM's shape, from the fields that the plan is bound to."""
    return [
        *_stack(facts),
        *_attention(facts),
        *_latent(facts),
        *_experts(facts),
        *_ends(facts),
        *_precision(facts),
    ]


def _size(flag: str, facts: PlanFacts, field: str) -> Flag:
    return flag, str(facts.count(field))


def _stack(facts: PlanFacts) -> list[Flag]:
    arguments = [
        _size("--num-layers", facts, "llm.stack.layers"),
        _size("--hidden-size", facts, "llm.stack.hidden"),
        _size("--ffn-hidden-size", facts, "llm.stack.mlp.width"),
    ]
    norm = facts.model("llm.stack.norm")
    arguments.append(("--normalization", "LayerNorm" if norm == "layernorm" else "RMSNorm"))
    if facts.model("llm.stack.mlp.gated"):
        arguments.append(("--swiglu",))
    if not facts.model("llm.stack.mlp.bias"):
        arguments.append(("--disable-bias-linear",))
        if facts.model("llm.stack.attention.bias"):
            arguments.append(("--add-qkv-bias",))
    if not facts.model("llm.stack.dropout"):  # the rate of a dropout is not in the plan
        arguments += [("--attention-dropout", "0.0"), ("--hidden-dropout", "0.0")]
    return arguments


def _attention(facts: PlanFacts) -> list[Flag]:
    heads, groups = facts.count("llm.stack.attention.heads"), facts.count("llm.stack.attention.kv_heads")
    arguments: list[Flag] = [("--num-attention-heads", str(heads))]
    if facts.get("model", "llm.stack.attention.latent.query_rank") is None:
        arguments.append(_size("--kv-channels", facts, "llm.stack.attention.head_dim"))
        if groups != heads:
            arguments += [("--group-query-attention",), ("--num-query-groups", str(groups))]
    if facts.model("llm.stack.attention.qk_norm"):
        arguments.append(("--qk-layernorm",))
    return arguments


def _latent(facts: PlanFacts) -> list[Flag]:
    latent = "llm.stack.attention.latent"
    if facts.get("model", f"{latent}.query_rank") is None:
        return []
    compressed = facts.model(f"{latent}.query_rank") != 0
    return [
        ("--multi-latent-attention",),
        *([_size("--q-lora-rank", facts, f"{latent}.query_rank")] if compressed else []),
        _size("--kv-lora-rank", facts, f"{latent}.key_value_rank"),
        _size("--qk-head-dim", facts, f"{latent}.nope_head_dim"),
        _size("--qk-pos-emb-head-dim", facts, f"{latent}.rope_head_dim"),
        _size("--v-head-dim", facts, f"{latent}.value_head_dim"),
    ]


def _experts(facts: PlanFacts) -> list[Flag]:
    experts = "llm.stack.experts"
    if not facts.has_experts:
        return []
    arguments = [
        _size("--num-experts", facts, f"{experts}.count"),
        _size("--moe-router-topk", facts, f"{experts}.active"),
        _size("--moe-ffn-hidden-size", facts, f"{experts}.width"),
    ]
    if facts.model(f"{experts}.shared_width"):
        arguments.append(_size("--moe-shared-expert-intermediate-size", facts, f"{experts}.shared_width"))
    dense = facts.model(f"{experts}.leading_dense_layers")
    if dense:
        arguments.append(("--moe-layer-freq", f"[0]*{dense}+[1]*{facts.layers - dense}"))
    return arguments


def _ends(facts: PlanFacts) -> list[Flag]:
    positions = facts.model("llm.positions")
    arguments: list[Flag] = [
        ("--seq-length", str(facts.sequence_tokens)),
        ("--max-position-embeddings", str(max(positions, facts.sequence_tokens))),
        ("--position-embedding-type", "learned_absolute" if positions else "rope"),
        _size("--vocab-size", facts, "llm.vocab"),
    ]
    if not facts.model("llm.tied"):
        arguments.append(("--untie-embeddings-and-output-weights",))
    return arguments


def _precision(facts: PlanFacts) -> list[Flag]:
    in_fp32 = facts.model("precision.gradients") == "fp32"
    return [("--bf16",), ("--accumulate-allreduce-grads-in-fp32",) if in_fp32 else ("--grad-reduce-in-bf16",)]


# ---------------------------------------------------------------------------- what it cannot run


def _list_unsupported(facts: PlanFacts) -> list[UnsupportedFeature]:
    """Returns the features of the plan that Megatron-LM cannot run."""
    plan = facts.plan
    unsupported = list_unsupported_encoder_features(
        facts,
        stages="its pipeline layout refuses encoder layers; MIMO refuses pp above 1 for an encoder "
        "on the LLM's GPUs",
        layout=f"it gives an encoder the LLM's tensor parallelism (tp{facts.layout.tp}); layouts per "
        "module are in MIMO's later, experimental versions only",
    )
    unsupported += list_unsupported_orders(facts)
    if any(name.startswith(OTHER_LAYERS) for name in plan.bound_to.get("model", {})):
        why = "the arguments state one kind of layer, with attention and MLP or experts alone"
        unsupported.append(UnsupportedFeature(what="the LLM's layers of other kinds", why=why))
    constants = [field for field in UNSTATED if facts.get("model", f"llm.{field}") is not None]
    if facts.get("model", "llm.stack.mlp.activation") not in (None, "silu", "gelu"):
        constants.append("stack.mlp.activation")
    if constants:
        what = f"the LLM's constants {', '.join(constants)}"
        unsupported.append(UnsupportedFeature(what=what, why="the arguments do not state them: add them"))
    return unsupported + list_approximations(facts)
