"""Reads vision towers of a config.json, one function a kind of tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from optimus.job.attention import Attention
from optimus.job.hf_file import HfConfig
from optimus.job.hf_rope import read_rope
from optimus.job.model import Encoder, Llm, Mlp, Projector, Stack
from optimus.job.typed import Amount, Count, Whole

RGB = 3
HEADS = ("num_heads", "num_attention_heads", "vt_num_attention_heads")


def build_stack(
    vision: HfConfig,
    *,
    hidden: int,
    layers: int,
    heads: int,
    width: int,
    gated: bool = False,
    bias: bool = True,
    qk_norm: bool = False,
    norm: Literal["layernorm", "rmsnorm"] = "layernorm",
    window_tokens: int | None = None,
    full_layers: tuple[int, ...] = (),
    activation: str = "gelu",
    eps: float = 1e-6,
    layer_scale: bool = False,
    rotary: bool | None = None,
    qk_norm_over: Literal["head", "hidden"] = "head",
) -> Stack:
    """Returns a bidirectional transformer whose head width is hidden / heads."""
    if hidden % heads:
        problem = f"is not a divisor of hidden_size = {hidden}"
        key = next((key for key in HEADS if vision.knows(key)), HEADS[0])
        raise vision[key].error(problem, "correct the file", heads)
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        bias=bias,
        output_bias=None if bias else True,
        qk_norm=qk_norm,
        causal=False,
        window_tokens=window_tokens,
        full_layers=full_layers,
        rotary=rotary,
        qk_norm_over=qk_norm_over,
    )
    mlp = Mlp(width=width, gated=gated, bias=True, activation=activation)
    return Stack(
        hidden=hidden,
        layers=layers,
        attention=attention,
        mlp=mlp,
        norm=norm,
        norm_eps=eps,
        layer_scale=layer_scale,
    )


def count_channels(vision: HfConfig) -> int:
    """Returns the colours of a pixel."""
    keys = ("in_channels", "in_chans", "num_channels")
    return vision.count(*keys) if vision.knows(*keys) else vision.derive("in_channels", RGB, "images are RGB")


def read_side(vision: HfConfig, *keys: str) -> int:
    """Returns a side of an image or patch in pixels, which some files state as a pair."""
    key = next((key for key in keys if vision.has(key)), keys[0])
    value = vision[key].value if vision.has(key) else vision.defaults.get(key)
    if not isinstance(value, list):
        return vision.count(*keys)
    sides: tuple[int, ...] = vision.read(tuple[Count, ...], key)
    if len(set(sides)) != 1:
        raise vision[key].error("is not a square", "write dimensions by hand in a job file")
    return sides[0]


def count_patches(vision: HfConfig) -> int:
    """Returns the patches of a square image of `image_size` pixels."""
    image, patch = read_side(vision, "image_size"), read_side(vision, "patch_size")
    if patch > image:
        raise vision["patch_size"].error(f"is more than image_size = {image}", "correct the file", patch)
    return (image // patch) ** 2


def _shuffled(config: HfConfig, key: str, patches: int) -> int:
    """Returns the patches that a pixel shuffle makes one, of a ratio such as 0.5 (one of 2 x 2)."""
    ratio: float = config.read(Amount, key)
    side = round(1 / ratio)
    if abs(side * ratio - 1) > 1e-6 or side**2 > patches:
        problem = f"is not one over a whole number of patches, of {patches} in an image"
        raise config[key].error(problem, "use for example 0.5", ratio)
    return side**2


def _qwen_encoder(vision: HfConfig, stack: Stack, *, outputs: int) -> Encoder:
    """Returns Qwen's patch embedding over two frames, without a bias, and its 2x2 merger."""
    patch, merge = read_side(vision, "patch_size"), vision.count("spatial_merge_size") ** 2
    if vision.has("rope_parameters"):
        attention = replace(stack.attention, rope=read_rope(vision))
        stack = replace(stack, attention=attention)
    return Encoder(
        name="vision",
        stack=stack,
        projector=Projector(widths=(stack.hidden * merge, outputs), merge=merge),
        patch_inputs=count_channels(vision) * vision.count("temporal_patch_size") * patch**2,
        source=f"{vision.file} (vision_config)",
        patch_bias=False,
    )


def read_qwen2_vl(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Qwen2-VL's encoder: LayerNorm, plain MLP."""
    vision = config.inner("vision_config")
    hidden = vision.count("embed_dim")
    stack = build_stack(
        vision,
        hidden=hidden,
        layers=vision.count("depth"),
        heads=vision.count("num_heads"),
        width=round(vision.read(Amount, "mlp_ratio") * hidden),
        activation=vision.read_or("quick_gelu", str, "hidden_act"),
    )
    return _qwen_encoder(vision, stack, outputs=vision.count("hidden_size"))


def read_qwen2_5_vl(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Qwen2.5-VL's: RMSNorm, gated MLP, windows of `window_size` pixels except in a few layers."""
    vision = config.inner("vision_config")
    side = vision.count("window_size") // read_side(vision, "patch_size")
    stack = build_stack(
        vision,
        hidden=vision.count("hidden_size"),
        layers=vision.count("depth"),
        heads=vision.count("num_heads"),
        width=vision.count("intermediate_size"),
        gated=True,
        norm="rmsnorm",
        window_tokens=max(1, side**2),
        full_layers=vision.read(tuple[Whole, ...], "fullatt_block_indexes"),
        activation=vision.read_or("silu", str, "hidden_act"),
    )
    encoder = _qwen_encoder(vision, stack, outputs=vision.count("out_hidden_size"))
    return replace(encoder, tokens_per_second=vision.read_or(4.0, Amount, "tokens_per_second"))


def read_qwen3_vl(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Qwen3-VL's: deepstack features are added to outputs of LLM layers 0, 1, ...; Qwen3.5 has none."""
    vision = config.inner("vision_config")
    stack = build_stack(
        vision,
        hidden=vision.count("hidden_size"),
        layers=vision.count("depth"),
        heads=vision.count("num_heads"),
        width=vision.count("intermediate_size"),
        activation=vision.read_or("gelu_pytorch_tanh", str, "hidden_act"),
        rotary=True,
    )
    encoder = _qwen_encoder(vision, stack, outputs=vision.count("out_hidden_size"))
    deepstack, projector = "deepstack_visual_indexes", encoder.projector
    layers: tuple[int, ...] = ()
    if vision.knows(deepstack):
        layers = vision.read(tuple[Whole, ...], deepstack)
    return replace(
        encoder,
        projector=replace(projector, norm="layernorm", deepstack_norm=True) if layers else projector,
        positions=vision.count("num_position_embeddings"),
        feeds=tuple(range(1 + len(layers))),
        patch_bias=True,
        interpolates_positions=True,
        deepstack_layers=layers,
    )


def read_internvl(config: HfConfig, llm: Llm) -> Encoder:
    """Reads InternVL's encoder: InternViT, pixel shuffle, two linear layers."""
    vision = config.inner("vision_config")
    layers = vision.count("num_hidden_layers")
    norm = vision.read(Literal["rms_norm", "layer_norm"], "norm_type")
    stack = build_stack(
        vision,
        hidden=vision.count("hidden_size"),
        layers=count_layers_used(config, layers, "select_layer", "vision_feature_layer"),
        heads=vision.count("num_attention_heads"),
        width=vision.count("intermediate_size"),
        bias=vision.read(bool, "qkv_bias", "attention_bias"),
        qk_norm=vision.read(bool, "qk_normalization", "use_qk_norm"),
        norm="rmsnorm" if norm == "rms_norm" else "layernorm",
        activation=vision.read_or("gelu", str, "hidden_act"),
        eps=vision.read_or(1e-6, Amount, "layer_norm_eps"),
        layer_scale=True,
        qk_norm_over="hidden",
    )
    patch, width = read_side(vision, "patch_size"), llm.stack.hidden
    patches = count_patches(vision)
    merge = _shuffled(config, "downsample_ratio", patches)
    return Encoder(
        name="vision",
        stack=stack,
        projector=Projector(widths=(width, width), merge=merge, norm="layernorm", norm_eps=1e-5),
        patch_inputs=count_channels(vision) * patch**2,
        positions=patches + 1,
        source=f"{vision.file} (vision_config)",
        class_token=True,
        tokens_per_item=patches // merge,
        final_norm=not vision.read_or(True, bool, "use_mean_pooling"),
        interpolates_positions=True,
    )


def read_kimi(config: HfConfig, llm: Llm) -> Encoder:
    """Reads the encoder of Kimi-VL and Kimi-K2.5: MoonViT and a patch merger."""
    vision = config.inner("vision_config")
    stack = build_stack(
        vision,
        hidden=vision.count("vt_hidden_size", "hidden_size"),
        layers=vision.count("vt_num_hidden_layers", "num_hidden_layers"),
        heads=vision.count("vt_num_attention_heads", "num_attention_heads"),
        width=vision.count("vt_intermediate_size", "intermediate_size"),
        activation="gelu_pytorch_tanh",
        eps=1e-5,
        rotary=True,
    )
    merge = 1
    for side in vision.read(tuple[Whole, ...], "merge_kernel_size"):
        merge *= side
    outputs = llm.stack.hidden
    return Encoder(
        name="vision",
        stack=stack,
        projector=Projector(widths=(stack.hidden * merge, outputs), merge=max(1, merge)),
        patch_inputs=count_channels(vision) * read_side(vision, "patch_size") ** 2,
        positions=vision.count("init_pos_emb_height", "pos_emb_height")
        * vision.count("init_pos_emb_width", "pos_emb_width"),
        source=f"{vision.file} (vision_config)",
        interpolates_positions=True,
    )


def read_glm4v(config: HfConfig, llm: Llm) -> Encoder:
    """Reads GLM-4V's: a gated tower without biases; its merger ends in a gated MLP."""
    vision = config.inner("vision_config")
    outputs, width = vision.count("out_hidden_size"), vision.count("intermediate_size")
    stack = build_stack(
        vision,
        hidden=vision.count("hidden_size"),
        layers=vision.count("depth"),
        heads=vision.count("num_heads"),
        width=outputs,
        gated=True,
        bias=vision.read_or(False, bool, "attention_bias"),
        norm="rmsnorm",
        activation=vision.read_or("silu", str, "hidden_act"),
        eps=vision.read_or(1e-5, Amount, "rms_norm_eps"),
        rotary=True,
    )
    no_bias = replace(stack.attention, output_bias=stack.attention.bias)
    stack = replace(stack, attention=no_bias, mlp=replace(stack.mlp, bias=False))
    patch, merge = read_side(vision, "patch_size"), vision.count("spatial_merge_size") ** 2
    vision.derived.append("the gated MLP of the merger counts as two linear layers of its parameters")
    return Encoder(
        name="vision",
        stack=stack,
        projector=Projector(
            widths=(outputs, outputs, max(1, 3 * width // 2), outputs), merge=merge, bias=False
        ),
        patch_inputs=count_channels(vision) * vision.count("temporal_patch_size") * patch**2,
        positions=count_patches(vision),
        source=f"{vision.file} (vision_config)",
        pre_norm=True,
        interpolates_positions=True,
    )


def _require(vision: HfConfig, key: str, width: int, name: str) -> None:
    """Raises if a width is not the one that transformers' module multiplies it with."""
    if vision.count(key) != width:
        problem = f"is not {name} = {width}: transformers' own projector cannot run"
        raise vision[key].error(problem, f"state {width}", vision.count(key))


def read_llama4(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Llama 4's: a tower with rotary positions, pixel shuffle, two linear layers and a third."""
    vision = config.inner("vision_config")
    stack = build_stack(
        vision,
        hidden=vision.count("hidden_size"),
        layers=vision.count("num_hidden_layers"),
        heads=vision.count("num_attention_heads"),
        width=vision.count("intermediate_size"),
        activation=vision.read_or("gelu", str, "hidden_act"),
        eps=vision.read_or(1e-5, Amount, "norm_eps"),
        rotary=True,
    )
    patch = read_side(vision, "patch_size")
    merge = _shuffled(vision, "pixel_shuffle_ratio", count_patches(vision))
    middle = vision.count("projector_input_dim")
    _require(vision, "intermediate_size", stack.hidden * merge, "hidden_size / pixel_shuffle_ratio^2")
    _require(vision, "projector_output_dim", middle, "projector_input_dim")
    _require(vision, "vision_output_dim", middle, "projector_input_dim")
    widths = middle, middle, llm.stack.hidden
    return Encoder(
        name="vision",
        stack=stack,
        projector=Projector(widths=widths, merge=merge, bias=False),
        patch_inputs=count_channels(vision) * patch**2,
        positions=count_patches(vision) + 1,
        source=f"{vision.file} (vision_config)",
        patch_bias=False,
        class_token=True,
        pre_norm=True,
        tokens_per_item=count_patches(vision) // merge,
    )


def count_layers_used(config: HfConfig, layers: int, *keys: str) -> int:
    """Returns the layers up to an index: -1 is the output of the last layer, -2 of the one before it."""
    layer = config.read(int, *keys)
    if not -layers <= layer <= -1:
        key = next((key for key in keys if config.has(key)), keys[0])
        raise config[key].error(f"is not one of -{layers} to -1", "write dimensions by hand in a job file")
    return layers + layer + 1
