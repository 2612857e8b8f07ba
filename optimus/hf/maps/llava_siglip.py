"""Names of LLaVA with a SigLIP tower; layers behind the selected one have no effect."""

from __future__ import annotations

from optimus.hf.maps.weight_names import FamilyMap, llm_names, pairs

_TOWER = "model.vision_tower"
_LAYER, _OURS = f"{_TOWER}.encoder.layers.{{}}", "vision.layers.{}"
LLAVA_SIGLIP = FamilyMap(
    names={
        **llm_names("model.language_model", head="lm_head"),
        **pairs("vision.patches", f"{_TOWER}.embeddings.patch_embedding"),
        "vision.patches.positions": (f"{_TOWER}.embeddings.position_embedding.weight",),
        **pairs(f"{_OURS}.qkv.norm", f"{_LAYER}.layer_norm1"),
        **pairs(f"{_OURS}.qkv", *(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv")),
        **pairs(f"{_OURS}.out", f"{_LAYER}.self_attn.out_proj"),
        **pairs(f"{_OURS}.up.norm", f"{_LAYER}.layer_norm2"),
        **pairs(f"{_OURS}.up", f"{_LAYER}.mlp.fc1"),
        **pairs(f"{_OURS}.down", f"{_LAYER}.mlp.fc2"),
        **pairs("vision.projector.linears.0", "model.multi_modal_projector.linear_1"),
        **pairs("vision.projector.linears.1", "model.multi_modal_projector.linear_2"),
    },
    unused=(f"{_TOWER}.post_layernorm.", f"{_TOWER}.head."),
    layers=f"{_TOWER}.encoder.layers.",
)
