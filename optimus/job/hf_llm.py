"""Reads the language model of a released config.json: grouped-query or latent attention, dense or experts."""

from __future__ import annotations

from collections.abc import Callable

from optimus.errors import one_of
from optimus.job.attention import Attention, LatentAttention, LinearAttention, Rope
from optimus.job.hf_file import HfConfig
from optimus.job.hf_gemma import read_gemma4_llm
from optimus.job.hf_rope import read_rope
from optimus.job.model import Experts, LayerVariant, Llm, Mlp, Stack
from optimus.job.typed import Amount, Count, Whole

QWEN2_VL = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text")
QKV_BIAS = ("qwen2", "glm4v_text", *QWEN2_VL)  # by their architecture
QK_NORM = ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "gemma3_text")
QWEN_EXPERTS = ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text")
LATENT = ("deepseek_v3", "kimi_k2")
GLM_EXPERTS = ("glm4v_moe_text",)
QWEN3_5 = ("qwen3_5_text", "qwen3_5_moe_text")  # linear attention in most layers
MISTRAL = ("mistral", "ministral3")
PHI4 = "phi4_multimodal"
GEMMA = ("gemma", "gemma3_text")
NORM_OFFSET = (*GEMMA, *QWEN3_5)
FLOORED_HEADS = ("qwen3_omni_moe_text", *GLM_EXPERTS)  # classes that round the width of heads down
POST_NORMS = ("gemma3_text", "glm4v_text")
TEXT_TYPES = (
    "llama", "llama4_text", "gemma", "internlm2", *MISTRAL, *QKV_BIAS, *QK_NORM, *LATENT, *GLM_EXPERTS,
    *QWEN3_5, "gemma4_text", PHI4,
)  # fmt: skip
CHUNK_NOTE = (
    "attention in chunks is priced as a window of as many tokens, which has up to twice the scores in "
    "sequences longer than a chunk"
)
# Rotary embeddings that a class has whatever its file says, and its sections where the file has none.
ROPES = {
    **dict.fromkeys(
        ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text"),
        Rope(sections=(24, 20, 20), interleaved_sections=True),
    ),
    **dict.fromkeys(QWEN3_5, Rope(sections=(11, 11, 10), interleaved_sections=True, partial_factor=0.25)),
    **dict.fromkeys((*LATENT, "llama4_text", "glm4v_text"), Rope(interleaved=True)),
}


def read_hf_llm(text: HfConfig, tied: HfConfig) -> Llm:
    """Reads the LLM of the object `text`; `tied` is the object that states tie_word_embeddings."""
    kind = text.read(str, "model_type")
    if kind not in TEXT_TYPES:
        hint = f"supported: {one_of(sorted(TEXT_TYPES))}; or write dimensions by hand in a job file"
        raise text["model_type"].error("is not a supported language model", hint)
    stated = tied if tied.knows("tie_word_embeddings") else text  # transformers reads the outer one
    tied_flag = stated.read(bool, "tie_word_embeddings")
    if kind == "gemma4_text":
        return read_gemma4_llm(text, tied_flag)
    hidden = text.count("hidden_size")
    layers = text.count("num_hidden_layers")
    stack = Stack(
        hidden=hidden,
        layers=layers,
        attention=_stack_attention(text, kind, hidden, layers),
        mlp=Mlp(
            width=text.count("intermediate_size_mlp", "intermediate_size", "moe_intermediate_size"),
            bias=_optional_flag(text, "mlp_bias", kind == "llama"),
            activation=_activation(text, kind),
        ),
        experts=_experts(text, kind),
        norm_eps=text.read_or(1e-6, Amount, "rms_norm_eps"),
        norm_offset=kind in NORM_OFFSET,
        post_norms=kind in POST_NORMS,
        variants=_variants(text, kind, layers),
        extra_parameters=hidden if kind == "qwen3_5_moe_text" else 0,  # gate of the shared expert
    )
    if text["num_nextn_predict_layers"].value or text["mtp_num_hidden_layers"].value:
        text.derived.append("multi-token-prediction layers are left out")
    source = f"{text.file} ({kind})"
    softcap = "final_logit_softcapping"
    return Llm(
        stack=stack,
        vocab=text.count("vocab_size"),
        tied=tied_flag,
        source=source,
        embedding_scale=hidden**0.5 if kind in GEMMA else 1.0,
        logit_softcap=text.read(Amount, softcap) if text.has(softcap) else None,
    )


def _activation(text: HfConfig, kind: str) -> str:
    keys = ("hidden_activation", "hidden_act") if kind in GEMMA else ("hidden_act",)
    return text.read_or("silu", str, *keys)


def _optional_flag(text: HfConfig, key: str, expected: bool) -> bool:
    """Returns a flag that older files leave out because it did not exist: then false, and noted."""
    if text.knows(key):
        return text.read(bool, key)
    return text.derive(key, False, "left out") if expected else False


def _head_dim(text: HfConfig, hidden: int, heads: int) -> int:
    if text.knows("head_dim"):
        return text.count("head_dim")
    if hidden % heads and text.read(str, "model_type") not in FLOORED_HEADS:
        hint = "add head_dim to a copy of the file"
        raise text["num_attention_heads"].error(f"does not divide hidden_size = {hidden}", hint)
    return text.derive("head_dim", hidden // heads, "hidden_size / num_attention_heads")


def _stack_attention(text: HfConfig, kind: str, hidden: int, layers: int) -> Attention:
    """Returns the attention of most layers."""
    if kind in LATENT:
        return _latent_attention(text)
    return _linear_attention(text) if kind in QWEN3_5 else _attention(text, kind, hidden, layers)


def _attention(text: HfConfig, kind: str, hidden: int, layers: int) -> Attention:
    heads = text.count("num_attention_heads")
    if kind in (*QKV_BIAS, PHI4):
        bias = kind != PHI4
    else:
        bias = _optional_flag(text, "bias" if kind == "internlm2" else "attention_bias", True)
    window, full = _window(text, kind, layers)
    return Attention(
        heads=heads,
        kv_heads=text.count("num_key_value_heads") if text.knows("num_key_value_heads") else heads,
        head_dim=_head_dim(text, hidden, heads),
        bias=bias,
        output_bias=False if kind in (*QKV_BIAS, *GLM_EXPERTS) else None,
        output_gate=kind in QWEN3_5,
        qk_norm=kind in (*QK_NORM, *QWEN3_5)
        or (kind == "llama4_text" and text.read_or(True, bool, "use_qk_norm")),
        qk_norm_kind="l2" if kind == "llama4_text" else "rmsnorm",
        window_tokens=window,
        full_layers=full,
        rope=_rope(text, kind),
        softmax_scale=_softmax_scale(text),
        softcap=text.read(Amount, "attn_logit_softcapping") if text.has("attn_logit_softcapping") else None,
    )


def _rope(text: HfConfig, kind: str) -> Rope:
    return read_rope(text, ROPES.get(kind))


def _softmax_scale(text: HfConfig) -> float | None:
    """Returns Gemma's scale of attention scores, which it states as a width."""
    key = "query_pre_attn_scalar"
    return float(text.read(Amount, key)) ** -0.5 if text.knows(key) else None


def _window(text: HfConfig, kind: str, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Returns the attention window and the full layers; Qwen's `use_sliding_window` must be off."""
    if kind == "gemma3_text":
        pattern = 6 if text.has("layer_types") else text.read_or(6, Count, "sliding_window_pattern")
        full = _layers_of_type(text, layers, "full_attention", lambda layer: (layer + 1) % pattern == 0)
        return text.count("sliding_window"), full
    if kind == "llama4_text" and text.knows("attention_chunk_size"):
        return _chunk(text, layers)
    if kind in (*MISTRAL, PHI4) and text.has("sliding_window"):
        return text.count("sliding_window"), ()
    if text["use_sliding_window"].value:
        hint = "write dimensions by hand in a job file (attention.window_tokens and full_layers)"
        raise text["use_sliding_window"].error("is not supported", hint)
    return None, ()


def _chunk(text: HfConfig, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Returns Llama 4's chunks of tokens as a window; layers without rotation have full attention."""
    text.derived.append(CHUNK_NOTE)
    every = text.read_or(4, Count, "no_rope_layer_interval")
    rotates = text.read(tuple[Whole, ...], "no_rope_layers") if text.has("no_rope_layers") else ()
    if rotates and len(rotates) != layers:
        problem = f"names {len(rotates)} layers, not num_hidden_layers = {layers}"
        raise text["no_rope_layers"].error(problem, "correct the file")
    rotates = rotates or tuple((layer + 1) % every for layer in _indices(layers))
    full = _layers_of_type(text, layers, "full_attention", lambda layer: not rotates[layer])
    return text.count("attention_chunk_size"), full


def _variants(text: HfConfig, kind: str, layers: int) -> tuple[LayerVariant, ...]:
    """Returns the layers that differ: those without experts, those with full instead of linear attention."""
    if kind in QWEN3_5:
        every = text.read_or(4, Count, "full_attention_interval")
        full = _layers_of_type(text, layers, "full_attention", lambda layer: (layer + 1) % every == 0)
        attention = _attention(text, kind, text.count("hidden_size"), layers)
        return (LayerVariant(layers=full, attention=attention),) if full else ()
    if kind == "llama4_text" and text.has("moe_layers"):
        mixed = set(text.read(tuple[Whole, ...], "moe_layers"))
    elif kind in (*QWEN_EXPERTS, "llama4_text"):
        key = "interleave_moe_layer_step" if kind == "llama4_text" else "decoder_sparse_step"
        step = text.read_or(1, Count, key)
        mixed = {layer for layer in _indices(layers) if (layer + 1) % step == 0}
        if text.has("mlp_only_layers"):
            mixed -= set(text.read(tuple[Whole, ...], "mlp_only_layers"))
    else:
        return ()
    dense = tuple(layer for layer in _indices(layers) if layer not in mixed)
    return (LayerVariant(layers=dense, experts=False),) if dense else ()


def _indices(layers: int) -> range:
    return range(min(layers, 10_000))  # a check of the model refuses more


def _layers_of_type(
    text: HfConfig, layers: int, name: str, otherwise: Callable[[int], bool]
) -> tuple[int, ...]:
    """Returns the layers that `layer_types` names so, or the class's pattern where the file has none."""
    if not text.has("layer_types"):
        return tuple(layer for layer in _indices(layers) if otherwise(layer))
    names = text.read(tuple[str, ...], "layer_types")
    if len(names) != layers:
        problem = f"names {len(names)} layers, not num_hidden_layers = {layers}"
        raise text["layer_types"].error(problem, "correct the file")
    return tuple(layer for layer, kind in enumerate(names) if kind == name)


def _linear_attention(text: HfConfig) -> Attention:
    heads, keys = text.count("linear_num_value_heads"), text.count("linear_num_key_heads")
    if heads % keys:
        problem = f"does not divide linear_num_value_heads = {heads}"
        raise text["linear_num_key_heads"].error(problem, "correct the file", keys)
    text.derived.append("linear attention is priced as the products of its chunks, which were not measured")
    return Attention(
        heads=heads,
        kv_heads=keys,
        head_dim=text.count("linear_key_head_dim"),
        rotary=False,
        linear=LinearAttention(
            value_head_dim=text.count("linear_value_head_dim"),
            kernel=text.count("linear_conv_kernel_dim"),
        ),
    )


def _latent_attention(text: HfConfig) -> Attention:
    heads, kind = text.count("num_attention_heads"), text.read(str, "model_type")
    nope, rope = text.count("qk_nope_head_dim"), text.count("qk_rope_head_dim")
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=nope + rope,
        rope=_rope(text, kind),
        latent=LatentAttention(
            query_rank=text.count("q_lora_rank") if _has_query_rank(text) else 0,
            key_value_rank=text.count("kv_lora_rank"),
            nope_head_dim=nope,
            rope_head_dim=rope,
            value_head_dim=text.count("v_head_dim"),
        ),
    )


def _has_query_rank(text: HfConfig) -> bool:
    """Returns whether queries are compressed: a file that states `null` says that they are not."""
    return text.has("q_lora_rank") or "q_lora_rank" not in text.node


def _experts(text: HfConfig, kind: str) -> Experts | None:
    if kind in (*QWEN_EXPERTS, "qwen3_5_moe_text"):
        shared = "shared_expert_intermediate_size"
        return Experts(
            count=text.count("num_experts", "num_local_experts"),
            active=text.count("num_experts_per_tok"),
            width=text.count("moe_intermediate_size"),
            shared_width=text.count(shared) if kind in QWEN3_5 else 0,
        )
    if kind == "llama4_text":
        width = text.count("intermediate_size")
        count, active = text.count("num_local_experts"), text.count("num_experts_per_tok")
        return Experts(count=count, active=active, width=width, shared_width=width)
    if kind in (*LATENT, *GLM_EXPERTS):
        _only(text, "moe_layer_freq", 1)
        width = text.count("moe_intermediate_size")
        return Experts(
            count=text.count("n_routed_experts"),
            active=text.count("num_experts_per_tok"),
            width=width,
            shared_width=width * text.read(Whole, "n_shared_experts"),
            leading_dense_layers=text.read(Whole, "first_k_dense_replace"),
        )
    return None


def _only(text: HfConfig, key: str, value: object) -> None:
    """Raises if a mixture has another pattern of dense layers, which is not modelled."""
    if key in text.node and text[key].value != value:
        hint = "write dimensions by hand in a job file (experts.leading_dense_layers)"
        raise text[key].error(f"is not {value}, the only pattern supported", hint)
