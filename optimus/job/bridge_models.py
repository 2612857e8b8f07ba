"""Lists the models that Megatron Bridge trains, by shape, and what its code of each family can run."""

from __future__ import annotations

from dataclasses import dataclass

from optimus.job.model import Model

VERSION = "megatron-bridge 0.6.2"


@dataclass(frozen=True, kw_only=True)
class BridgeFamily:
    """The models of Megatron Bridge that share their code."""

    name: str
    package: str  # of its recipes, in megatron.bridge.recipes
    step: str  # the forward step, by the name that run_recipe.py has for it
    encoder_tp: bool = False  # else the encoder is Hugging Face's module, replicated on every rank
    context_parallel: bool = False  # splits the sequence after image features are in it


@dataclass(frozen=True, kw_only=True)
class BridgeModel:
    """A model of Megatron Bridge, and its recipe for full fine-tuning."""

    family: BridgeFamily
    checkpoint: str  # on the Hugging Face hub
    recipe: str | None  # the function in the family's package, which takes no arguments


Encoder = tuple[int, int, bool]  # layers, hidden size, and whether its MLPs are gated
Shape = tuple[int, int, int, int, Encoder]  # the LLM's layers, hidden size, vocabulary and experts

QWEN25_VL = BridgeFamily(name="Qwen2.5-VL", package="qwen_vl", step="vlm_step")
QWEN3_VL = BridgeFamily(
    name="Qwen3-VL", package="qwen_vl", step="qwen3_vl_step", encoder_tp=True, context_parallel=True
)
GEMMA3_VL = BridgeFamily(name="Gemma 3", package="gemma3_vl", step="vlm_step")
GEMMA4_VL = BridgeFamily(name="Gemma 4", package="gemma4_vl", step="vlm_step", context_parallel=True)
GLM_VL = BridgeFamily(name="GLM-4.5V", package="glm_vl", step="vlm_step")
KIMI_VL = BridgeFamily(name="Kimi-K2.5", package="kimi_vl", step="vlm_step", context_parallel=True)

QWEN25_VIT = (32, 1280, True)
QWEN3_VIT = (27, 1152, False)
SIGLIP = (27, 1152, False)

# Shapes as in the checkpoints' config.json. Kimi's recipe is left out: its Muon refuses the distributed
# optimizer of the plan.
MODELS: dict[Shape, BridgeModel] = {
    shape: BridgeModel(family=family, checkpoint=checkpoint, recipe=stem and f"{stem}_sft_config")
    for family, checkpoint, stem, shape in (
        (QWEN25_VL, "Qwen/Qwen2.5-VL-3B-Instruct", "qwen25_vl_3b", (36, 2048, 151936, 0, QWEN25_VIT)),
        (QWEN25_VL, "Qwen/Qwen2.5-VL-7B-Instruct", "qwen25_vl_7b", (28, 3584, 152064, 0, QWEN25_VIT)),
        (QWEN25_VL, "Qwen/Qwen2.5-VL-32B-Instruct", "qwen25_vl_32b", (64, 5120, 152064, 0, QWEN25_VIT)),
        (QWEN25_VL, "Qwen/Qwen2.5-VL-72B-Instruct", "qwen25_vl_72b", (80, 8192, 152064, 0, QWEN25_VIT)),
        (QWEN3_VL, "Qwen/Qwen3-VL-2B-Instruct", None, (28, 2048, 151936, 0, (24, 1024, False))),
        (QWEN3_VL, "Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl_8b", (36, 4096, 151936, 0, QWEN3_VIT)),
        (QWEN3_VL, "Qwen/Qwen3-VL-32B-Instruct", None, (64, 5120, 151936, 0, QWEN3_VIT)),
        (QWEN3_VL, "Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_30b_a3b", (48, 2048, 151936, 128, QWEN3_VIT)),
        (QWEN3_VL, "Qwen/Qwen3-VL-235B-A22B-Instruct", "qwen3_vl_235b_a22b",
         (94, 4096, 151936, 128, QWEN3_VIT)),
        (QWEN3_VL, "Qwen/Qwen3.5-27B", "qwen35_vl_27b", (64, 5120, 248320, 0, QWEN3_VIT)),
        (QWEN3_VL, "Qwen/Qwen3.5-35B-A3B", "qwen35_vl_35b_a3b", (40, 2048, 248320, 256, QWEN3_VIT)),
        (GEMMA3_VL, "google/gemma-3-4b-it", "gemma3_vl_4b", (34, 2560, 262208, 0, SIGLIP)),
        (GEMMA3_VL, "google/gemma-3-12b-it", "gemma3_vl_12b", (48, 3840, 262208, 0, SIGLIP)),
        (GEMMA3_VL, "google/gemma-3-27b-it", "gemma3_vl_27b", (62, 5376, 262208, 0, SIGLIP)),
        (GEMMA4_VL, "google/gemma-4-26B-A4B-it", "gemma4_vl_26b", (30, 2816, 262144, 128, (27, 1152, True))),
        (GLM_VL, "zai-org/GLM-4.5V", "glm_45v", (46, 4096, 151552, 128, (24, 1536, True))),
        (KIMI_VL, "moonshotai/Kimi-K2.5", None, (61, 7168, 163840, 384, (27, 1152, False))),
    )
}  # fmt: skip


def find_bridge_model(model: Model) -> BridgeModel | None:
    """Returns the model of Megatron Bridge that has this shape, or None."""
    if len(model.encoders) != 1:
        return None
    llm, encoder = model.llm.stack, model.encoders[0].stack
    experts = llm.experts.count if llm.experts else 0
    tower = (encoder.layers, encoder.hidden, encoder.mlp.gated)
    return MODELS.get((llm.layers, llm.hidden, model.llm.vocab, experts, tower))
