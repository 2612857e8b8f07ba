"""Turns a released config.json into a model, family by family, with json alone (no transformers)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from optimus.errors import one_of
from optimus.job.hf_file import HfConfig, load_hf_config
from optimus.job.hf_llm import TEXT_TYPES, read_hf_llm
from optimus.job.model import Attention, Encoder, Llm, Mlp, Model, Projector, Stack
from optimus.job.typed import Amount, Whole

RGB = 3
SIGLIP, CLIP = "siglip_vision_model", "clip_vision_model"


def _stack(
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
        problem = f"is not a divisor of the hidden size {hidden}"
        raise vision["num_heads"].error(problem, "correct the file", heads)
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


def _channels(vision: HfConfig) -> int:
    for key in ("in_channels", "in_chans", "num_channels"):
        if vision.has(key):
            return vision.count(key)
    return vision.derive("in_channels", RGB, "images are RGB")


def _qwen_encoder(vision: HfConfig, stack: Stack, *, outputs: int) -> Encoder:
    """Returns Qwen's patch embedding over two frames, without a bias, and its 2x2 merger."""
    patch, merge = vision.count("patch_size"), vision.count("spatial_merge_size") ** 2
    return Encoder(
        name="vision",
        stack=stack,
        projector=Projector(widths=(stack.hidden * merge, outputs), merge=merge),
        patch_inputs=_channels(vision) * vision.count("temporal_patch_size") * patch**2,
        source=f"{vision.file} (vision_config)",
        patch_bias=False,
    )


def _read_qwen2_vl(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Qwen2-VL's encoder: LayerNorm, plain MLP."""
    vision = config.inner("vision_config")
    hidden = vision.count("embed_dim")
    stack = _stack(
        vision,
        hidden=hidden,
        layers=vision.count("depth"),
        heads=vision.count("num_heads"),
        width=round(vision.read(Amount, "mlp_ratio") * hidden),
        activation=vision.read_or("quick_gelu", str, "hidden_act"),
    )
    return _qwen_encoder(vision, stack, outputs=vision.count("hidden_size"))


def _read_qwen2_5_vl(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Qwen2.5-VL's: RMSNorm, gated MLP, windows of `window_size` pixels except in a few layers."""
    vision = config.inner("vision_config")
    side = vision.count("window_size") // vision.count("patch_size")
    stack = _stack(
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
    return _qwen_encoder(vision, stack, outputs=vision.count("out_hidden_size"))


def _read_qwen3_vl(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Qwen3-VL's encoder: deepstack features are added to outputs of LLM layers 0, 1, ..."""
    vision = config.inner("vision_config")
    stack = _stack(
        vision,
        hidden=vision.count("hidden_size"),
        layers=vision.count("depth"),
        heads=vision.count("num_heads"),
        width=vision.count("intermediate_size"),
        activation=vision.read_or("gelu_pytorch_tanh", str, "hidden_act"),
        rotary=True,
    )
    encoder = _qwen_encoder(vision, stack, outputs=vision.count("out_hidden_size"))
    layers = vision.read(tuple[Whole, ...], "deepstack_visual_indexes")
    return replace(
        encoder,
        projector=replace(encoder.projector, norm="layernorm", deepstack_norm=True),
        positions=vision.count("num_position_embeddings"),
        feeds=tuple(range(1 + len(layers))),
        patch_bias=True,
        interpolates_positions=True,
        deepstack_layers=layers,
    )


def _read_internvl(config: HfConfig, llm: Llm) -> Encoder:
    """Reads InternVL's encoder: InternViT, pixel shuffle, two linear layers."""
    vision = config.inner("vision_config")
    layers = vision.count("num_hidden_layers")
    norm = vision.read(Literal["rms_norm", "layer_norm"], "norm_type")
    stack = _stack(
        vision,
        hidden=vision.count("hidden_size"),
        layers=_layers_used(config, "select_layer", layers),
        heads=vision.count("num_attention_heads"),
        width=vision.count("intermediate_size"),
        bias=vision.read(bool, "qkv_bias"),
        qk_norm=vision.read(bool, "qk_normalization"),
        norm="rmsnorm" if norm == "rms_norm" else "layernorm",
        activation=vision.read_or("gelu", str, "hidden_act"),
        eps=vision.read_or(1e-6, Amount, "layer_norm_eps"),
        layer_scale=True,
        qk_norm_over="hidden",
    )
    patch, width = vision.count("patch_size"), llm.stack.hidden
    merge = round(1 / config.read(Amount, "downsample_ratio") ** 2)
    return Encoder(
        name="vision",
        stack=stack,
        projector=Projector(widths=(width, width), merge=max(1, merge), norm="layernorm", norm_eps=1e-5),
        patch_inputs=_channels(vision) * patch**2,
        positions=(vision.count("image_size") // patch) ** 2 + 1,
        source=f"{vision.file} (vision_config)",
        class_token=True,
        final_norm=False,
        interpolates_positions=True,
    )


def _read_kimi(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Kimi-K2.5's encoder: MoonViT and a patch merger."""
    vision = config.inner("vision_config")
    stack = _stack(
        vision,
        hidden=vision.count("vt_hidden_size"),
        layers=vision.count("vt_num_hidden_layers"),
        heads=vision.count("vt_num_attention_heads"),
        width=vision.count("vt_intermediate_size"),
        activation="gelu_pytorch_tanh",
        eps=1e-5,
        rotary=True,
    )
    merge = 1
    for side in vision.read(tuple[Whole, ...], "merge_kernel_size"):
        merge *= side
    outputs = vision.count("text_hidden_size")
    return Encoder(
        name="vision",
        stack=stack,
        projector=Projector(widths=(stack.hidden * merge, outputs), merge=max(1, merge)),
        patch_inputs=_channels(vision) * vision.count("patch_size") ** 2,
        positions=vision.count("init_pos_emb_height") * vision.count("init_pos_emb_width"),
        source=f"{vision.file} (vision_config)",
        interpolates_positions=True,
    )


def _read_llava(config: HfConfig, llm: Llm) -> Encoder:
    """Reads LLaVA's and its successors': CLIP or SigLIP up to `vision_feature_layer`, two linear layers."""
    width = llm.stack.hidden
    activation = config.read_or("gelu", str, "projector_hidden_act")
    return _tower(config, "vision_feature_layer", Projector(widths=(width, width), activation=activation))


def _read_gemma3(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Gemma 3's encoder: SigLIP, average pooling to a fixed number of tokens, one matrix."""
    vision = config.inner("vision_config")
    patches = (vision.count("image_size") // vision.count("patch_size")) ** 2
    merge = max(1, patches // config.count("mm_tokens_per_image"))
    projector = Projector(widths=(llm.stack.hidden,), merge=merge, concatenates=False, bias=False)
    projector = replace(projector, norm="rmsnorm")
    return _tower(config, None, projector)


def _tower(config: HfConfig, select: str | None, projector: Projector) -> Encoder:
    vision = config.inner("vision_config")
    kind = vision.read(str, "model_type")
    if kind not in (SIGLIP, CLIP):
        hint = f"supported: {one_of((CLIP, SIGLIP))}; or write dimensions by hand in a job file"
        raise vision["model_type"].error("is not a supported vision tower", hint)
    layers = vision.count("num_hidden_layers")
    stack = _stack(
        vision,
        hidden=vision.count("hidden_size"),
        layers=layers if select is None else _layers_used(config, select, layers),
        heads=vision.count("num_attention_heads"),
        width=vision.count("intermediate_size"),
        activation=vision.read_or("quick_gelu" if kind == CLIP else "gelu_pytorch_tanh", str, "hidden_act"),
        eps=vision.read_or(1e-5 if kind == CLIP else 1e-6, Amount, "layer_norm_eps"),
    )
    patch = vision.count("patch_size")
    return Encoder(
        name="vision",
        stack=stack,
        projector=projector,
        patch_inputs=_channels(vision) * patch**2,
        positions=(vision.count("image_size") // patch) ** 2 + (1 if kind == CLIP else 0),
        source=f"{vision.file} (vision_config)",
        patch_bias=kind != CLIP,
        class_token=kind == CLIP,
        pre_norm=kind == CLIP,
        final_norm=select is None,
    )


def _layers_used(config: HfConfig, key: str, layers: int) -> int:
    """Returns the layers up to an index: -1 is the output of the last layer, -2 of the one before it."""
    layer = config.read(int, key)
    if not -layers <= layer <= -1:
        raise config[key].error(f"is not one of -{layers} to -1", "write dimensions by hand in a job file")
    return layers + layer + 1


# Readers of encoders by `model_type`.
ENCODER_READERS: dict[str, Callable[[HfConfig, Llm], Encoder]] = {
    "qwen2_vl": _read_qwen2_vl,
    "qwen2_5_vl": _read_qwen2_5_vl,
    "qwen3_vl": _read_qwen3_vl,
    "qwen3_vl_moe": _read_qwen3_vl,
    "internvl_chat": _read_internvl,
    "kimi_k25": _read_kimi,
    "llava": _read_llava,
    "llava_next": _read_llava,
    "llava_onevision": _read_llava,
    "gemma3": _read_gemma3,
}
TEXT_KEYS = {"internvl_chat": "llm_config"}  # key of the language model, if it is not `text_config`
FLAT = ("qwen2_vl", "qwen2_5_vl")  # older files hold the language model at the top


def read_hf_config(path: Path) -> Model:
    """Reads the model of a released config.json; a missing value is an error, not a class default."""
    config = load_hf_config(path)
    kind = config.read(str, "model_type")
    if kind in TEXT_TYPES and kind not in ENCODER_READERS:
        hint = "write a job file with model: {encoders: ..., llm: ...}, or use a multimodal config.json"
        raise config["model_type"].error("is a language model without an encoder", hint)
    if kind not in ENCODER_READERS:
        hint = f"supported: {one_of(sorted(ENCODER_READERS))}; or write dimensions by hand in a job file"
        raise config["model_type"].error("is not a supported model", hint)
    key = TEXT_KEYS.get(kind, "text_config")
    text = config if kind in FLAT and not config.has(key) else config.inner(key)
    llm = read_hf_llm(text, config)
    encoder = ENCODER_READERS[kind](config, llm)
    derived = f"; derived: {', '.join(config.derived)}" if config.derived else ""
    source = f"{path} ({kind}){derived}"
    return Model(name=_name(path), encoders=(encoder,), llm=llm, source=source, family=kind)


def _name(path: Path) -> str:
    if path.name == "config.json":
        return path.resolve().parent.name or "model"
    return path.stem.removesuffix("_config").rpartition("--")[2] or "model"
