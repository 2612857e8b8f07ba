"""Names of Qwen2.5-VL."""

from __future__ import annotations

from optimus.hf.maps.weight_names import FamilyMap, llm_names, pairs

_BLOCK, _OURS = "model.visual.blocks.{}", "vision.layers.{}"
QWEN2_5_VL = FamilyMap(
    names={
        **llm_names("model.language_model", head="lm_head"),
        **pairs("vision.patches", "model.visual.patch_embed.proj", kinds=("weight",)),
        **pairs(f"{_OURS}.qkv.norm", f"{_BLOCK}.norm1", kinds=("weight",)),
        **pairs(f"{_OURS}.qkv", f"{_BLOCK}.attn.qkv"),
        **pairs(f"{_OURS}.out", f"{_BLOCK}.attn.proj"),
        **pairs(f"{_OURS}.up.norm", f"{_BLOCK}.norm2", kinds=("weight",)),
        **pairs(f"{_OURS}.up", f"{_BLOCK}.mlp.gate_proj", f"{_BLOCK}.mlp.up_proj"),
        **pairs(f"{_OURS}.down", f"{_BLOCK}.mlp.down_proj"),
        **pairs("vision.projector.norm", "model.visual.merger.ln_q", kinds=("weight",)),
        **pairs("vision.projector.linears.0", "model.visual.merger.mlp.0"),
        **pairs("vision.projector.linears.1", "model.visual.merger.mlp.2"),
    }
)
