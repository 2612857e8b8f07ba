"""Names of Qwen3-VL (dense)."""

from __future__ import annotations

from optimus.hf.maps.weight_names import FamilyMap, llm_names, pairs

_BLOCK, _OURS = "model.visual.blocks.{}", "vision.layers.{}"
_DEEP, _OUR_DEEP = "model.visual.deepstack_merger_list.{}", "vision.projector.deepstack.{}"
QWEN3_VL = FamilyMap(
    names={
        **llm_names("model.language_model", head="lm_head"),
        **pairs("vision.patches", "model.visual.patch_embed.proj"),
        "vision.patches.positions": ("model.visual.pos_embed.weight",),
        **pairs(f"{_OURS}.qkv.norm", f"{_BLOCK}.norm1"),
        **pairs(f"{_OURS}.qkv", f"{_BLOCK}.attn.qkv"),
        **pairs(f"{_OURS}.out", f"{_BLOCK}.attn.proj"),
        **pairs(f"{_OURS}.up.norm", f"{_BLOCK}.norm2"),
        **pairs(f"{_OURS}.up", f"{_BLOCK}.mlp.linear_fc1"),
        **pairs(f"{_OURS}.down", f"{_BLOCK}.mlp.linear_fc2"),
        **pairs("vision.projector.norm", "model.visual.merger.norm"),
        **pairs("vision.projector.linears.0", "model.visual.merger.linear_fc1"),
        **pairs("vision.projector.linears.1", "model.visual.merger.linear_fc2"),
        **pairs(f"{_OUR_DEEP}.norm", f"{_DEEP}.norm"),
        **pairs(f"{_OUR_DEEP}.linears.0", f"{_DEEP}.linear_fc1"),
        **pairs(f"{_OUR_DEEP}.linears.1", f"{_DEEP}.linear_fc2"),
    }
)
