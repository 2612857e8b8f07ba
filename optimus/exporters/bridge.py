"""Exports a plan as settings of Megatron Bridge: on top of its recipe for the model, if it has one."""

from __future__ import annotations

from typing import Any

from optimus.exporters.exported_plan import (
    ExportedPlan,
    UnsupportedFeature,
    build_export,
    describe_limitations,
    format_comment_lines,
    format_python_dict,
    list_unsupported_encoder_features,
)
from optimus.exporters.megatron_config import (
    build_ddp_fields,
    build_parallel_fields,
    build_recompute_fields,
    find_pipeline_layout,
    list_approximations,
    list_unsupported_orders,
)
from optimus.exporters.plan_facts import PlanFacts
from optimus.job.bridge_models import MODELS, VERSION, BridgeModel

CONFIG = "bridge_plan.py"
OVERRIDES = "bridge.overrides"
# Encoders inside the first pipeline stage, and Megatron-FSDP. Its MIMO gives every module a layout, but on
# GPUs of its own; there is no pipeline with encoder layers in several stages.
SYSTEMS = ("stage0", "fsdp")
FREEZE_MODALITY = {"vision": "vision", "video": "vision", "audio": "audio"}

USE_CONFIG = (
    "Use: `from bridge_plan import planned_config`; then Megatron Bridge's finetune(planned_config(), step),",
    "or planned(config) for a ConfigContainer of yours.",
)
YOURS = "Yours: data, learning rates, checkpoints. The encoder runs in the first pipeline stage."
OVERLAP = (
    "Overlapped reduction fails in a step whose last microbatch has no image on some replica: for such data",
    "set ddp.overlap_grad_reduce and ddp.overlap_param_gather to False, as the recipes do.",
)
BODY = '''
{base}
LAYERS = {layers}
SETTINGS = {settings}


def planned(config):
    """Sets the plan's values in a `ConfigContainer` of a model of {layers} layers."""
    if config.model.num_layers != LAYERS:
        raise ValueError(f"the plan is for {{LAYERS}} layers, the model has {{config.model.num_layers}}")
    for path, value in SETTINGS.items():
        section, _, name = path.partition(".")
        fields = getattr(config, section)
        if not hasattr(fields, name):
            raise AttributeError(f"{{path}} is in {version}, not in this one")
        setattr(fields, name, value)
    return config
'''
RECIPE = '''from megatron.bridge.recipes.{package} import {recipe}


def planned_config():
    """The recipe for {checkpoint}, laid out as planned."""
    return planned({recipe}())

'''
AUTO_BRIDGE = '''from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _sft_common_vlm


def planned_config(checkpoint{default}, **options):
    """What recipes start from, with the model of a Hugging Face checkpoint, laid out as planned.

    `options` are those of `from_hf_pretrained`, e.g. trust_remote_code.
    """
    config = _sft_common_vlm()
    bridge = AutoBridge.from_hf_pretrained(checkpoint, **options)
    config.model = bridge.to_megatron_provider(load_weights=False)
    config.dataset.hf_processor_path = checkpoint
    return planned(config)

'''


def export_bridge(facts: PlanFacts) -> ExportedPlan:
    """Returns the settings in Python and as overrides, rank groups, and what Megatron Bridge cannot run."""
    plan, model = facts.plan, find_model(facts)
    unsupported = _list_unsupported(facts, model)
    title = f"{plan.name}: this plan, for {VERSION}, on {plan.ranks.world} GPUs."
    limits = describe_limitations(plan, "Megatron Bridge", unsupported, SYSTEMS)
    settings = build_settings(facts, model)
    overlaps = settings["ddp.overlap_grad_reduce"] and plan.encoders and not facts.is_fsdp

    def commented(*use: str) -> str:
        lines = [title, *use, YOURS, *(OVERLAP if overlaps else ()), *limits]
        return "\n".join(format_comment_lines(lines)) + "\n"

    body = BODY.format(
        base=_format_base(model), layers=facts.layers, settings=format_python_dict(settings), version=VERSION
    )
    overrides = "\n".join(format_override(path, value) for path, value in settings.items())
    return build_export(
        plan,
        target="bridge",
        version=VERSION,
        systems=SYSTEMS,
        files={
            CONFIG: commented(*USE_CONFIG) + body,
            OVERRIDES: commented(_describe_run(model)) + overrides + "\n",
        },
        unsupported=unsupported,
    )


def find_model(facts: PlanFacts) -> BridgeModel | None:
    """Returns the model of Megatron Bridge that has the shape of the plan's, or None."""

    def encoder(field: str) -> Any:
        return facts.get("model", f"encoders[0].{field}")

    if len(facts.plan.encoders) != 1:
        return None
    tower = (encoder("stack.layers"), encoder("stack.hidden"), encoder("stack.mlp.gated"))
    experts = facts.get("model", "llm.stack.experts.count") or 0
    hidden, vocab = facts.count("llm.stack.hidden"), facts.count("llm.vocab")
    return MODELS.get((facts.layers, hidden, vocab, experts, tower))


def _format_base(model: BridgeModel | None) -> str:
    if model is None:
        return AUTO_BRIDGE.format(default="")
    if model.recipe is None:
        return AUTO_BRIDGE.format(default=f'="{model.checkpoint}"')
    return RECIPE.format(package=model.family.package, recipe=model.recipe, checkpoint=model.checkpoint)


def _describe_run(model: BridgeModel | None) -> str:
    recipe = "YOUR_RECIPE" if model is None or model.recipe is None else model.recipe
    step = "" if model is None or model.recipe else f" --step-func {model.family.step}"
    return f"Use: set -f; torchrun ... run_recipe.py --recipe {recipe}{step} $(grep -v '^#' {OVERRIDES})"


# ---------------------------------------------------------------------------- settings


def build_settings(facts: PlanFacts, model: BridgeModel | None) -> dict[str, Any]:
    """Returns fields of `ConfigContainer` by path; a recipe's own values of all of them are replaced."""
    sections = {
        "model": {
            **build_parallel_fields(facts),
            **_build_pipeline_fields(facts),
            **_build_recompute_fields(facts),
            **_build_freeze_fields(facts, model),
            **_build_context_fields(facts, model),
            "seq_length": facts.sequence_tokens,
        },
        "train": {
            "micro_batch_size": facts.microbatch_sequences,
            "global_batch_size": facts.sequences_per_step,
        },
        "dataset": {"seq_length": facts.sequence_tokens},
        "ddp": build_ddp_fields(facts),
    }
    if facts.microbatch_sequences == 1:  # of which there is nothing to pack: refused otherwise
        sections["dataset"]["enable_in_batch_packing"] = False
    if facts.layout.cp > 1:  # what fine-tuning with context parallelism requires
        sections["ddp"]["average_in_collective"] = False
    if facts.is_fsdp:
        sections["checkpoint"] = {"ckpt_format": "fsdp_dtensor"}
    return {
        f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()
    }


def _build_pipeline_fields(facts: PlanFacts) -> dict[str, Any]:
    """Returns the cut of the layers; a plan has no layers for the prediction of further tokens."""
    layout = facts.layout
    virtual = layout.chunks if layout.pp > 1 and layout.chunks > 1 else None
    return {
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_model_parallel_layout": find_pipeline_layout(facts),
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "mtp_num_layers": None,
    }


def _build_recompute_fields(facts: PlanFacts) -> dict[str, Any]:
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    return {**dict.fromkeys(names), **build_recompute_fields(facts)}


def _build_freeze_fields(facts: PlanFacts, model: BridgeModel | None) -> dict[str, Any]:
    """Returns what is frozen; a model that is not known need not have the other flags."""
    fields = {"freeze_language_model": not facts.model("llm.train")}
    for name in facts.plan.encoders:
        modality = FREEZE_MODALITY.get(facts.encoder_field(name, "modality"), "vision")
        fields[f"freeze_{modality}_model"] = not facts.encoder_field(name, "train")
        if modality == "vision":
            fields["freeze_vision_projection"] = not facts.encoder_field(name, "projector.train")
    return fields if model else {name: frozen for name, frozen in fields.items() if frozen}


def _build_context_fields(facts: PlanFacts, model: BridgeModel | None) -> dict[str, Any]:
    """Returns what context parallelism needs: a loss per token, images split over its ranks."""
    if facts.layout.cp == 1:
        return {}
    fields = {"calculate_per_token_loss": True}
    return {**fields, "vision_dp_when_cp": True} if _splits_images_over_cp(model) else fields


def _splits_images_over_cp(model: BridgeModel | None) -> bool:
    return model is not None and model.family.encoder_tp and model.family.context_parallel


def format_override(path: str, value: Any) -> str:
    """Returns an override in Hydra's grammar; none needs quotes."""
    if isinstance(value, list):
        return f"{path}=[{','.join(map(str, value))}]"
    if value is None:
        return f"{path}=null"
    return f"{path}={str(value).lower() if isinstance(value, bool) else value}"


# ---------------------------------------------------------------------------- what it cannot run


def _list_unsupported(facts: PlanFacts, model: BridgeModel | None) -> list[UnsupportedFeature]:
    """Returns the features of the plan that Megatron Bridge cannot run."""
    unsupported = list_unsupported_encoder_features(
        facts,
        stages="its encoders are in the first stage; MIMO has stages for an encoder on GPUs of its own only",
        layout="an encoder gets the LLM's process groups; MIMO has layouts per module for encoders on GPUs "
        "of their own only",
        splits_over_cp=_splits_images_over_cp(model),
    )
    unsupported += list_unsupported_orders(facts)
    if model is None:
        what = f"the model {facts.model('name')} by a recipe"
        why = "none has its shape: give planned_config a checkpoint whose architecture AutoBridge supports"
        unsupported.append(UnsupportedFeature(what=what, why=why))
    else:
        unsupported += _list_unsupported_of_family(facts, model)
    if facts.model("precision.gradients") != "fp32":
        why = "the recipes' bf16_mixed reduces them in float32; change its grad_reduce_in_fp32"
        unsupported.append(UnsupportedFeature(what="gradients reduced in bf16", why=why))
    return unsupported + list_approximations(facts)


def _list_unsupported_of_family(facts: PlanFacts, model: BridgeModel) -> list[UnsupportedFeature]:
    family, unsupported = model.family, list[UnsupportedFeature]()
    if facts.layout.cp > 1 and not family.context_parallel:
        why = f"its {family.name} does not split sequences that hold image features"
        unsupported.append(UnsupportedFeature(what=f"context parallelism (cp{facts.layout.cp})", why=why))
    for name, module in facts.plan.encoders.items():
        tp = module.layout.tp
        if tp > 1 and not family.encoder_tp:
            why = f"its {family.name} has Hugging Face's encoder, replicated on {tp} ranks: it takes longer"
            unsupported.append(UnsupportedFeature(what=f"{name} in tp{tp}", why=why))
        recomputed = facts.recompute if family.encoder_tp else "none"
        if module.recompute != recomputed:
            why = f"its {family.name} runs it with {recomputed}"
            unsupported.append(UnsupportedFeature(what=f"recompute {module.recompute} in {name}", why=why))
        feeds = facts.encoder_field(name, "feeds") or [0]
        if max(feeds) > facts.layers_of_virtual_stages()[0]:
            what = f"{name} feeding {max(feeds)} layers from the first virtual stage"
            why = f"it asks for all of them there, and there are {facts.layers_of_virtual_stages()[0]}"
            unsupported.append(UnsupportedFeature(what=what, why=why))
    return unsupported
