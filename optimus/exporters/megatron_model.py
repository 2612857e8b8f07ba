"""The LLM's shape as Megatron-LM's arguments."""

from __future__ import annotations

from optimus.exporters.facts import Facts

Flag = tuple[str, ...]


def model_flags(facts: Facts) -> list[Flag]:
    """Sizes of the LLM, as far as the plan is bound to them."""
    return [
        *_stack(facts),
        *_attention(facts),
        *_latent(facts),
        *_experts(facts),
        *_ends(facts),
        *_numbers(facts),
    ]


def _size(flag: str, facts: Facts, field: str) -> Flag:
    return flag, str(facts.count(field))


def _stack(facts: Facts) -> list[Flag]:
    found = [
        _size("--num-layers", facts, "llm.stack.layers"),
        _size("--hidden-size", facts, "llm.stack.hidden"),
        _size("--ffn-hidden-size", facts, "llm.stack.mlp.width"),
    ]
    norm = facts.model("llm.stack.norm")
    found.append(("--normalization", "LayerNorm" if norm == "layernorm" else "RMSNorm"))
    if facts.model("llm.stack.mlp.gated"):
        found.append(("--swiglu",))
    if not facts.model("llm.stack.mlp.bias"):
        found.append(("--disable-bias-linear",))
        if facts.model("llm.stack.attention.bias"):
            found.append(("--add-qkv-bias",))
    if not facts.model("llm.stack.dropout"):  # if there is one, its rate is not in the plan
        found += [("--attention-dropout", "0.0"), ("--hidden-dropout", "0.0")]
    return found


def _attention(facts: Facts) -> list[Flag]:
    heads, groups = facts.count("llm.stack.attention.heads"), facts.count("llm.stack.attention.kv_heads")
    found: list[Flag] = [("--num-attention-heads", str(heads))]
    if facts.given("model", "llm.stack.attention.latent.query_rank") is None:
        found.append(_size("--kv-channels", facts, "llm.stack.attention.head_dim"))
        if groups != heads:
            found += [("--group-query-attention",), ("--num-query-groups", str(groups))]
    if facts.model("llm.stack.attention.qk_norm"):
        found.append(("--qk-layernorm",))
    return found


def _latent(facts: Facts) -> list[Flag]:
    latent = "llm.stack.attention.latent"
    if facts.given("model", f"{latent}.query_rank") is None:
        return []
    return [
        ("--multi-latent-attention",),
        _size("--q-lora-rank", facts, f"{latent}.query_rank"),
        _size("--kv-lora-rank", facts, f"{latent}.key_value_rank"),
        _size("--qk-head-dim", facts, f"{latent}.nope_head_dim"),
        _size("--qk-pos-emb-head-dim", facts, f"{latent}.rope_head_dim"),
        _size("--v-head-dim", facts, f"{latent}.value_head_dim"),
    ]


def _experts(facts: Facts) -> list[Flag]:
    experts = "llm.stack.experts"
    if facts.given("model", f"{experts}.count") is None:
        return []
    found = [
        _size("--num-experts", facts, f"{experts}.count"),
        _size("--moe-router-topk", facts, f"{experts}.active"),
        _size("--moe-ffn-hidden-size", facts, f"{experts}.width"),
    ]
    if facts.model(f"{experts}.shared_width"):
        found.append(_size("--moe-shared-expert-intermediate-size", facts, f"{experts}.shared_width"))
    dense = facts.model(f"{experts}.leading_dense_layers")
    if dense:
        found.append(("--moe-layer-freq", f"[0]*{dense}+[1]*{facts.layers - dense}"))
    return found


def _ends(facts: Facts) -> list[Flag]:
    positions = facts.model("llm.positions")
    found: list[Flag] = [
        ("--seq-length", str(facts.sequence_tokens)),
        ("--max-position-embeddings", str(max(positions, facts.sequence_tokens))),
        ("--position-embedding-type", "learned_absolute" if positions else "rope"),
        _size("--vocab-size", facts, "llm.vocab"),
    ]
    if not facts.model("llm.tied"):
        found.append(("--untie-embeddings-and-output-weights",))
    return found


def _numbers(facts: Facts) -> list[Flag]:
    in_fp32 = facts.model("precision.gradients") == "fp32"
    return [("--bf16",), ("--accumulate-allreduce-grads-in-fp32",) if in_fp32 else ("--grad-reduce-in-bf16",)]
