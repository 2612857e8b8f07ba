"""Reads Gemma 4 of a config.json: layers of several kinds, per-layer embeddings, its tower and conformer."""

from __future__ import annotations

from dataclasses import replace

from optimus.job.attention import Attention
from optimus.job.hf_file import HfConfig
from optimus.job.hf_rope import read_rope
from optimus.job.model import (
    Encoder,
    Experts,
    LayerVariant,
    Linear,
    Llm,
    Mlp,
    PerLayerInputs,
    Projector,
    Stack,
)
from optimus.job.typed import Amount, Count, Whole

PATTERN = 6  # every sixth layer has full attention where the file names no types
GLOBAL_HEAD_DIM = 512
IMAGE_TOKENS = 280
CONFORMER_NORMS = 5  # of a layer, besides the four around attention and the first MLP
MEL_BINS, MEL_REDUCTION = 128, 4
SHARED_NOTE = "keys and values that a later stage shares are not sent in the plan"
CONFORMER_NOTE = (
    "of the convolutions before the audio encoder only the linear layer is priced; matrices of its layers "
    "besides attention and the first MLP run replicated over a TP group"
)


def read_gemma4_llm(text: HfConfig, tied: bool) -> Llm:
    """Reads the LLM: windows and full attention of another width; last layers share keys and values."""
    hidden, layers = text.count("hidden_size"), text.count("num_hidden_layers")
    attention = Attention(
        heads=text.count("num_attention_heads"),
        kv_heads=text.count("num_key_value_heads"),
        head_dim=text.count("head_dim"),
        bias=text.read(bool, "attention_bias"),
        qk_norm=True,
        window_tokens=text.count("sliding_window"),
        rope=read_rope(text),
        softmax_scale=1.0,
    )
    mlp = Mlp(width=text.count("intermediate_size"), activation=text.read(str, "hidden_activation"))
    width = text.read(Whole, "hidden_size_per_layer_input")
    sides = (Linear(inputs=hidden, outputs=width), Linear(inputs=width, outputs=hidden)) if width else ()
    experts = _experts(text, mlp) if text.read(bool, "enable_moe_block") else None
    extra = hidden if width else 0  # the norm behind per-layer inputs
    extra += 4 * hidden + experts.count if experts else 0  # norms and scales of the router and of experts
    stack = Stack(
        hidden=hidden,
        layers=layers,
        attention=attention,
        mlp=mlp,
        experts=experts,
        norm_eps=text.read(Amount, "rms_norm_eps"),
        post_norms=True,
        variants=_variants(text, attention, mlp, layers),
        linears=sides,
        extra_parameters=extra,
    )
    softcap = "final_logit_softcapping"
    table = PerLayerInputs(vocab=text.count("vocab_size_per_layer_input"), width=width) if width else None
    return Llm(
        stack=stack,
        vocab=text.count("vocab_size"),
        tied=tied,
        source=f"{text.file} (gemma4_text)",
        embedding_scale=hidden**0.5,
        logit_softcap=text.read(Amount, softcap) if text.has(softcap) else None,
        per_layer_inputs=table,
    )


def _experts(text: HfConfig, mlp: Mlp) -> Experts:
    """Returns the experts; the MLP that runs along with them is a shared one."""
    return Experts(
        count=text.count("num_experts"),
        active=text.count("top_k_experts"),
        width=text.count("moe_intermediate_size"),
        shared_width=mlp.width,
    )


def _variants(text: HfConfig, attention: Attention, mlp: Mlp, layers: int) -> tuple[LayerVariant, ...]:
    """Returns layers with full attention, those that share keys and values, and those with both."""
    full = _full_layers(text, layers)
    shared = text.read(Whole, "num_kv_shared_layers")
    if shared >= layers:
        problem = f"is not less than num_hidden_layers = {layers}"
        raise text["num_kv_shared_layers"].error(problem, "correct the file", shared)
    if shared:
        text.derived.append(SHARED_NOTE)
    wide = replace(mlp, width=2 * mlp.width) if text.read(bool, "use_double_wide_mlp") else None
    wider = _full_attention(text, attention, full)
    variants = []
    for is_full, is_shared in ((True, False), (False, True), (True, True)):
        kind = wider if is_full else attention
        kind = replace(kind, kv_projection="none") if is_shared else kind
        members = tuple(
            i for i in range(layers) if ((i in full), (i >= layers - shared)) == (is_full, is_shared)
        )
        if members:
            variants.append(LayerVariant(layers=members, attention=kind, mlp=wide if is_shared else None))
    return tuple(variants)


def _full_attention(text: HfConfig, attention: Attention, full: set[int]) -> Attention:
    """Returns full attention: heads of another width, and keys for values where the file says so."""
    place = text.node["per_layer_config"][str(min(full, default=0))]
    written = HfConfig(place, text.derived, {}) if place.value is not None else text
    key = "head_dim" if written is not text else "global_head_dim"
    kv_heads, merged = attention.kv_heads, text.read(bool, "attention_k_eq_v")
    if merged and written is not text and written.has("num_key_value_heads"):
        kv_heads = written.count("num_key_value_heads")
    elif merged and text.has("num_global_key_value_heads"):
        kv_heads = text.count("num_global_key_value_heads")
    return replace(
        attention,
        window_tokens=None,
        head_dim=written.read_or(GLOBAL_HEAD_DIM, Count, key),
        kv_heads=kv_heads,
        kv_projection="keys" if merged else "both",
    )


def _full_layers(text: HfConfig, layers: int) -> set[int]:
    if not text.has("layer_types"):
        return {i for i in range(min(layers, 10_000)) if (i + 1) % PATTERN == 0 or i == layers - 1}
    names = text.read(tuple[str, ...], "layer_types")
    if len(names) != layers:
        problem = f"names {len(names)} layers, not num_hidden_layers = {layers}"
        raise text["layer_types"].error(problem, "correct the file")
    return {i for i, name in enumerate(names) if name == "full_attention" or i == layers - 1}


def read_gemma4_vision(config: HfConfig, llm: Llm) -> Encoder:
    """Reads the vision tower: gated layers with norms on both sides, average pooling, one matrix."""
    vision = config.inner("vision_config")
    attention = Attention(
        heads=vision.count("num_attention_heads"),
        kv_heads=vision.count("num_key_value_heads"),
        head_dim=vision.count("head_dim"),
        bias=vision.read(bool, "attention_bias"),
        qk_norm=True,
        causal=False,
        rotary=True,
        softmax_scale=1.0,
    )
    activation = vision.read(str, "hidden_activation")
    stack = Stack(
        hidden=vision.count("hidden_size"),
        layers=vision.count("num_hidden_layers"),
        attention=attention,
        mlp=Mlp(width=vision.count("intermediate_size"), activation=activation),
        norm_eps=vision.read(Amount, "rms_norm_eps"),
        post_norms=True,
    )
    merge, tokens = vision.count("pooling_kernel_size") ** 2, "vision_soft_tokens_per_image"
    return Encoder(
        name="vision",
        stack=stack,
        projector=Projector(widths=(llm.stack.hidden,), merge=merge, concatenates=False, bias=False),
        patch_inputs=3 * vision.count("patch_size") ** 2,
        positions=2 * vision.count("position_embedding_size"),
        source=f"{vision.file} (vision_config)",
        patch_bias=False,
        final_norm=False,
        tokens_per_item=config.count(tokens)
        if config.has(tokens)
        else config.derive(tokens, IMAGE_TOKENS, "default of its image processor"),
    )


def read_gemma4_audio(config: HfConfig, llm: Llm) -> Encoder:
    """Reads the conformer: two half MLPs, attention in chunks and a convolution in every layer."""
    audio = config.inner("audio_config")
    hidden, heads = audio.count("hidden_size"), audio.count("num_attention_heads")
    if hidden % heads:
        problem = f"is not a divisor of hidden_size = {hidden}"
        raise audio["num_attention_heads"].error(problem, "correct the file", heads)
    span = audio.count("attention_chunk_size") + audio.count("attention_context_left") - 1
    span += audio.read(Whole, "attention_context_right")
    wide = 4 * hidden
    pairs = ((hidden, wide), (wide, hidden), (hidden, 2 * hidden), (hidden, hidden))
    attention = Attention(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, causal=False, window_tokens=span, rotary=False
    )
    channels = audio.read(tuple[Count, ...], "subsampling_conv_channels")
    if not channels:
        raise audio["subsampling_conv_channels"].error("is empty", "correct the file")
    audio.derived.append(CONFORMER_NOTE)
    stack = Stack(
        hidden=hidden,
        layers=audio.count("num_hidden_layers"),
        attention=attention,
        mlp=Mlp(width=wide, gated=False, activation=audio.read(str, "hidden_act")),
        norm_eps=audio.read(Amount, "rms_norm_eps"),
        post_norms=True,
        linears=tuple(Linear(inputs=inputs, outputs=outputs) for inputs, outputs in pairs),
        # Convolution, norms, scales of a head, and the projection of a few relative positions.
        extra_parameters=hidden * (audio.count("conv_kernel_size") + CONFORMER_NORMS + hidden)
        + hidden // heads,
    )
    return Encoder(
        name="audio",
        modality="audio",
        stack=stack,
        projector=Projector(widths=(audio.count("output_proj_dims"), llm.stack.hidden), bias=False),
        patch_inputs=channels[-1] * MEL_BINS // MEL_REDUCTION,
        source=f"{audio.file} (audio_config)",
        patch_bias=False,
        final_norm=False,
    )
