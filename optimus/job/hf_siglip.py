"""Reads models around towers of CLIP, SigLIP and Pixtral of a config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optimus.errors import one_of
from optimus.job.hf_file import HfConfig
from optimus.job.hf_towers import build_stack, count_channels, count_layers_used, count_patches, read_side
from optimus.job.model import Encoder, LayerVariant, Llm, Mlp, Projector, Stack
from optimus.job.typed import Amount, Count

SIGLIP, CLIP, PIXTRAL = "siglip_vision_model", "clip_vision_model", "pixtral"
# Kinds of towers by their model_type.
TOWERS = {SIGLIP: SIGLIP, "siglip": SIGLIP, "idefics3_vision": SIGLIP, "smolvlm_vision": SIGLIP,
          "idefics3": SIGLIP, "phi4_multimodal_vision": SIGLIP, "minicpmv4_6_vision": SIGLIP, CLIP: CLIP,
          "clip": CLIP, PIXTRAL: PIXTRAL}  # fmt: skip
MERGED = 4  # patches that a merger of MiniCPM-V makes one
POOLED = (SIGLIP, "siglip", "phi4_multimodal_vision")  # towers that may end in a pooling head


def read_tower(config: HfConfig, select: str | None, projector: Projector) -> Encoder:
    """Reads CLIP, SigLIP or Pixtral up to the layer of the key `select`."""
    vision = config.inner("vision_config")
    name = vision.read(str, "model_type")
    kind = TOWERS.get(name)
    if kind is None:
        hint = f"supported: {one_of(sorted(TOWERS))}; or write dimensions by hand in a job file"
        raise vision["model_type"].error("is not a supported vision tower", hint)
    if name in POOLED and vision.read_or(True, bool, "vision_use_head"):
        vision.derived.append("the pooling head of the vision tower is left out: the LLM never reads it")
    layers, options = vision.count("num_hidden_layers"), dict[str, Any]()
    if kind == PIXTRAL:
        options = {"gated": True, "bias": False, "norm": "rmsnorm", "eps": 1e-5, "rotary": True}
    else:
        options["eps"] = vision.read_or(1e-5 if kind == CLIP else 1e-6, Amount, "layer_norm_eps")
    stack = build_stack(
        vision,
        hidden=vision.count("hidden_size"),
        layers=layers if select is None else count_layers_used(config, layers, select),
        heads=vision.count("num_attention_heads"),
        width=vision.count("intermediate_size"),
        activation=vision.read_or("gelu", str, "hidden_act"),
        **options,
    )
    patch = read_side(vision, "patch_size")
    learned = 0 if kind == PIXTRAL else count_patches(vision) + (1 if kind == CLIP else 0)
    if kind == PIXTRAL:
        attention = replace(stack.attention, output_bias=False)
        stack = replace(stack, attention=attention, mlp=replace(stack.mlp, bias=False))
    return Encoder(
        name="vision",
        stack=stack,
        projector=projector,
        patch_inputs=count_channels(vision) * patch**2,
        positions=learned,
        source=f"{vision.file} (vision_config)",
        patch_bias=kind == SIGLIP,
        class_token=kind == CLIP,
        pre_norm=kind in (CLIP, PIXTRAL),
        final_norm=select is None,
    )


def read_llava(config: HfConfig, llm: Llm) -> Encoder:
    """Reads LLaVA's and its successors': CLIP or SigLIP up to `vision_feature_layer`, two linear layers."""
    width, bias = llm.stack.hidden, config.read_or(True, bool, "multimodal_projector_bias")
    activation = config.read_or("gelu", str, "projector_hidden_act")
    projector = Projector(widths=(width, width), bias=bias, activation=activation)
    encoder = read_tower(config, "vision_feature_layer", projector)
    strategy = config.read_or("default", str, "vision_feature_select_strategy")
    encoder = replace(encoder, drops_first_row=strategy == "default")
    return replace(encoder, tokens_per_item=max(0, encoder.positions - encoder.class_token))


def read_mistral3(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Mistral 3's: Pixtral, a norm, a merger of patches and two linear layers."""
    vision, width = config.inner("vision_config"), llm.stack.hidden
    projector = Projector(
        widths=(vision.count("hidden_size"), width, width),
        merge=config.count("spatial_merge_size") ** 2,
        bias=config.read(bool, "multimodal_projector_bias"),
        activation=config.read_or("gelu", str, "projector_hidden_act"),
    )
    return replace(read_tower(config, "vision_feature_layer", projector), final_norm=True)


def read_idefics3(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Idefics 3's and SmolVLM's: SigLIP, pixel shuffle, one matrix."""
    merge = config.count("scale_factor", "pixel_shuffle_factor") ** 2
    encoder = read_tower(config, None, Projector(widths=(llm.stack.hidden,), merge=merge, bias=False))
    return replace(encoder, tokens_per_item=encoder.positions // merge)


def read_paligemma(config: HfConfig, llm: Llm) -> Encoder:
    """Reads PaliGemma's: SigLIP and one linear layer."""
    encoder = read_tower(config, None, Projector(widths=(llm.stack.hidden,)))
    return replace(encoder, tokens_per_item=encoder.positions)


def read_gemma3(config: HfConfig, llm: Llm) -> Encoder:
    """Reads Gemma 3's encoder: SigLIP, average pooling to a fixed number of tokens, one matrix."""
    vision = config.inner("vision_config")
    patches = count_patches(vision)
    merge = max(1, patches // config.count("mm_tokens_per_image"))
    projector = Projector(widths=(llm.stack.hidden,), merge=merge, concatenates=False, bias=False)
    projector = replace(projector, norm="rmsnorm")
    return replace(read_tower(config, None, projector), tokens_per_item=config.count("mm_tokens_per_image"))


def read_minicpm(config: HfConfig, llm: Llm) -> Encoder:
    """Reads MiniCPM-V's: SigLIP that merges 2 x 2 patches between two layers, and a merger of 2 x 2."""
    vision = config.inner("vision_config")
    for block, key in ((vision, "window_kernel_size"), (config, "merge_kernel_size")):
        sides: tuple[int, ...] = block.read(tuple[Count, ...], key)
        if sides != (2, 2):
            problem = "is not [2, 2]: transformers' own class cannot run"
            raise block[key].error(problem, "state [2, 2]", list(sides))
    if config.count("merger_times") != 1:
        hint = "write dimensions by hand in a job file"
        raise config["merger_times"].error("is not 1: further rounds are not described", hint)
    width = MERGED * vision.count("hidden_size")
    projector = Projector(widths=(width, llm.stack.hidden), merge=MERGED, norm="layernorm")
    encoder = read_tower(config, None, projector)
    if config.read(str, "downsample_mode") == "4x":
        config.derived.append("the merger between the tower's layers is left out: downsample_mode skips it")
        return encoder
    return replace(encoder, stack=_insert_merger(config, encoder.stack))


def _insert_merger(config: HfConfig, stack: Stack) -> Stack:
    """Adds the merger as a layer: attention in windows of 2 x 2 patches, an MLP over their concatenation."""
    before = config.read(int, "insert_layer_id")
    if not 0 <= before < stack.layers:
        hint = f"use 0 to {stack.layers - 1}"
        raise config["insert_layer_id"].error("is not a layer of the vision tower", hint, before)
    config.derived.append(f"the merger behind layer {before} of the tower is a layer of its own")
    merger = LayerVariant(
        layers=(before + 1,),
        attention=replace(stack.attention, window_tokens=MERGED),
        mlp=Mlp(
            width=MERGED * stack.mlp.width,
            gated=False,
            bias=True,
            activation="gelu_pytorch_tanh",
            merge=MERGED,
        ),
    )
    return replace(stack, layers=stack.layers + 1, variants=(merger,))
