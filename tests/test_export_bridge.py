"""The files for Megatron Bridge: names that its source has, and megatron-core's classes take the values."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from bridge_source import assigned_in_recipes, fields_of, find_recipe, find_source
from export_cases import FORMS, export_unproven, fsdp_plan, job_of, stage0_plan, uneven_plan, with_llm

from optimus.exporters import bridge
from optimus.exporters.plan_facts import PlanFacts
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.bridge_models import (
    GEMMA3_VL,
    GEMMA4_VL,
    GLM_VL,
    KIMI_VL,
    MODELS,
    QWEN3_VL,
    QWEN25_VL,
    VERSION,
    BridgeFamily,
    find_bridge_model,
)
from optimus.job.layout import Layout
from optimus.planner.systems.colocated_plan import Sharding

# Of these two the test data have no config.json.
NOT_IN_DATA = {"Qwen/Qwen2.5-VL-32B-Instruct", "google/gemma-3-12b-it"}
PROVIDERS = {
    QWEN25_VL: ("Qwen25VLModelProvider",),
    QWEN3_VL: (
        "Qwen3VLModelProvider",
        "Qwen3VLMoEModelProvider",
        "Qwen35VLModelProvider",
        "Qwen35VLMoEModelProvider",
    ),
    GEMMA3_VL: ("Gemma3VLModelProvider",),
    GEMMA4_VL: ("Gemma4VLModelProvider",),
    GLM_VL: ("GLM45VModelProvider",),
    KIMI_VL: ("KimiK25VLModelProvider",),
}
SECTIONS = {"ddp": "DistributedDataParallelConfig", "dataset": "DirectHFSFTDatasetConfig"}
MODELING = {
    QWEN25_VL: "qwen_vl/modeling_qwen25_vl.py",
    QWEN3_VL: "qwen_vl/modelling_qwen3_vl/model.py",
    GEMMA3_VL: "gemma_vl/gemma3_vl_provider.py",
    GEMMA4_VL: "gemma_vl/modeling_gemma4_vl.py",
    GLM_VL: "glm_vl/modeling_glm_45v.py",
    KIMI_VL: "kimi_vl/modeling_kimi_k25_vl.py",
}


def settings_of(plan: Plan) -> dict[str, Any]:
    facts = PlanFacts(plan=plan)
    return bridge.build_settings(facts, bridge.find_model(facts))


CASES = {
    "uneven virtual stages": stage0_plan(
        "Qwen3-VL-8B-Instruct", Layout(dp=2, pp=4, tp=2, chunks=3), recompute="selective", uneven=True
    ),
    "even virtual stages": stage0_plan(
        "Qwen3-VL-8B-Instruct", Layout(dp=2, pp=4, tp=2, chunks=3), recompute="full"
    ),
    "context": stage0_plan("Qwen3-VL-8B-Instruct", Layout(dp=2, pp=2, tp=2, cp=2)),
    "experts": stage0_plan("Qwen3-VL-30B-A3B-Instruct", Layout(dp=4, pp=2, ep=4), recompute="selective"),
    "no recipe": stage0_plan("Qwen3-VL-32B-Instruct", Layout(dp=2, pp=2, tp=4)),
    "uneven stages": stage0_plan("Qwen2.5-VL-7B", Layout(dp=2, pp=4), uneven=True),
    "gemma": stage0_plan("Gemma-3-4B", Layout(dp=2, pp=2)),
    "glm": stage0_plan("GLM-4.5V", Layout(dp=8, pp=2, ep=8)),
    "parameters sharded": fsdp_plan(Sharding.PARAMETERS),
    "gradients sharded": fsdp_plan(Sharding.GRADIENTS),
}


# ---------------------------------------------------------------------------- against the package's source


def test_the_source_is_of_the_version_that_is_named() -> None:
    assert f"megatron-bridge {find_source()[1]}" == VERSION


@pytest.mark.parametrize(
    "model", [model for model in MODELS.values() if model.recipe], ids=lambda m: m.recipe
)
def test_a_recipe_is_there_and_takes_no_arguments(model: Any) -> None:
    function, text = find_recipe(model.family.package, model.recipe)
    assert not function.args.args and not function.args.kwonlyargs
    assert function.returns is not None and "ConfigContainer" in text
    assert f'"{model.checkpoint}"' in text


@pytest.mark.parametrize("case", CASES)
def test_every_setting_is_a_field(case: str) -> None:
    plan = CASES[case]
    model = bridge.find_model(PlanFacts(plan=plan))
    families = list(PROVIDERS) if model is None else [model.family]
    for path in settings_of(plan):
        section, _, name = path.partition(".")
        if section == "model":
            providers = [provider for family in families for provider in PROVIDERS[family]]
            assert all(name in fields_of(provider) for provider in providers), path
        else:
            assert path in assigned_in_recipes() or name in fields_of(SECTIONS[section]), path


def test_flags_of_all_families_are_fields() -> None:
    for providers in PROVIDERS.values():
        for provider in providers:
            assert {"freeze_language_model", "freeze_vision_model", "seq_length"} <= fields_of(provider)
    assert "no_such_field" not in fields_of("Qwen3VLModelProvider")
    assert "train.micro_batch_size" in assigned_in_recipes()


@pytest.mark.parametrize("family", MODELING, ids=lambda family: family.name)
def test_what_the_code_of_a_family_can_run(family: BridgeFamily) -> None:
    root, _ = find_source()
    text = (root / "models" / MODELING[family]).read_text()
    splits = "slice_batch_for_context_parallel" in text or "cp_size" in text
    assert splits == family.context_parallel
    assert ("TEColumnParallelLinear" in text) == family.encoder_tp
    step = f"models/qwen_vl/{family.step}.py" if family is QWEN3_VL else f"training/{family.step}.py"
    assert "def forward_step(" in (root / step).read_text()
    assert (root / "recipes" / family.package / "__init__.py").exists()


def test_what_a_model_without_a_recipe_starts_from() -> None:
    root, _ = find_source()
    assert "def _sft_common_vlm() -> ConfigContainer:" in (root / "recipes/common.py").read_text()
    text = (root / "models/conversion/auto_bridge.py").read_text()
    assert "def from_hf_pretrained(" in text and "def to_megatron_provider(" in text
    assert "dataset.hf_processor_path" in assigned_in_recipes()


# ---------------------------------------------------------------------------- models by their shape


def test_shapes_are_those_of_the_released_models() -> None:
    models = {form: find_bridge_model(job_of(form).model) for form in (*FORMS, "qwen2.5-vl-72b")}
    found = {form: model.checkpoint for form, model in models.items() if model}
    assert {model.checkpoint for model in MODELS.values()} - set(found.values()) == NOT_IN_DATA

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]|instruct|it$", "", name.lower())

    assert all(plain(form) == plain(name.partition("/")[2]) for form, name in found.items())


def test_the_documentation_names_every_recipe() -> None:
    text = (Path(__file__).parents[1] / "docs" / "export.md").read_text()
    recipes = {model.recipe for model in MODELS.values() if model.recipe}
    assert set(re.findall(r"`(\w+_sft_config)`", text)) == recipes


# ---------------------------------------------------------------------------- the files


def load_file(text: str, model: Any) -> Any:
    """Runs bridge_plan.py beside recipes that return a container of stand-ins."""
    config = SimpleNamespace(
        model=model,
        train=SimpleNamespace(micro_batch_size=0, global_batch_size=0),
        dataset=SimpleNamespace(seq_length=0, enable_in_batch_packing=True, hf_processor_path=None),
        ddp=SimpleNamespace(**dict.fromkeys(fields_of("DistributedDataParallelConfig"))),
        checkpoint=SimpleNamespace(ckpt_format="torch_dist"),
    )
    provider = SimpleNamespace(to_megatron_provider=lambda load_weights: model)
    auto = SimpleNamespace(from_hf_pretrained=lambda checkpoint, **options: provider)
    modules: dict[str, dict[str, Any]] = {"megatron.bridge": {"AutoBridge": auto}}
    modules["megatron.bridge.recipes.common"] = {"_sft_common_vlm": lambda: config}
    for known in MODELS.values():
        package = modules.setdefault(f"megatron.bridge.recipes.{known.family.package}", {})
        package[known.recipe or ""] = lambda: config
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in {"megatron.bridge.recipes": {}, **modules}.items():
            patch.setitem(sys.modules, name, _module(name, contents))
        namespace: dict[str, Any] = {}
        exec(text, namespace)
        return SimpleNamespace(**namespace)


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def core_model(plan: Plan) -> Any:
    """megatron-core's configuration of the plan's LLM, with the fields that providers add."""
    core = pytest.importorskip("megatron.core.transformer.transformer_config", exc_type=ImportError)
    import torch

    @dataclass
    class Provider(core.TransformerConfig):  # type: ignore[misc, name-defined]
        seq_length: int = 0
        freeze_language_model: bool = True
        freeze_vision_model: bool = True
        freeze_vision_projection: bool = True
        vision_dp_when_cp: bool = False

    facts = PlanFacts(plan=plan)
    shape: dict[str, Any] = {
        "num_layers": facts.layers,
        "hidden_size": facts.count("llm.stack.hidden"),
        "num_attention_heads": facts.count("llm.stack.attention.heads"),
    }
    if facts.has_experts:
        shape |= {
            "num_moe_experts": facts.count("llm.stack.experts.count"),
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
        }
    return Provider(**shape, bf16=True, pipeline_dtype=torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")  # megatron-core's, of its own defaults
def test_megatron_core_takes_the_settings_and_cuts_the_layers_as_the_plan_does(case: str) -> None:
    plan, settings = CASES[case], settings_of(CASES[case])
    file = load_file(export_unproven(plan, "bridge").files["bridge_plan.py"], core_model(plan))
    known = bridge.find_model(PlanFacts(plan=plan))
    config = file.planned_config() if known else file.planned_config("a/checkpoint")
    for path, value in settings.items():
        section, _, name = path.partition(".")
        assert getattr(getattr(config, section), name) == value, path
    config.model.__post_init__()  # as the provider's finalize() does
    own = plan.modules[LLM].layout
    layers = PlanFacts(plan=plan).layers_of_virtual_stages()
    assert (config.model.virtual_pipeline_model_parallel_size or 1) == (own.chunks if own.pp > 1 else 1)
    if config.model.pipeline_model_parallel_layout is None:
        assert own.pp == 1 or len(set(layers)) == 1
    else:
        held = config.model.pipeline_model_parallel_layout.layout  # by stage, then by chunk
        stages = [held[stage][chunk] for chunk in range(own.chunks) for stage in range(own.pp)]
        assert [[kind.name for kind in stage].count("decoder") for stage in stages] == layers
    batch = config.train.micro_batch_size * own.dp * plan.microbatches
    assert config.train.global_batch_size == batch


def test_a_model_of_another_size_or_version_is_refused() -> None:
    plan = CASES["uneven stages"]
    text = export_unproven(plan, "bridge").files["bridge_plan.py"]
    with pytest.raises(ValueError, match="the plan is for 28 layers, the model has 80"):
        load_file(text, SimpleNamespace(num_layers=80)).planned_config()
    with pytest.raises(AttributeError, match=r"model.tensor_model_parallel_size is in megatron-bridge 0.6.2"):
        load_file(text, SimpleNamespace(num_layers=28)).planned_config()


@pytest.mark.parametrize("case", CASES)
def test_overrides_say_the_same(case: str) -> None:
    """A value is what YAML reads of it, in the characters that Hydra's grammar leaves unquoted."""
    plan = CASES[case]
    lines = export_unproven(plan, "bridge").files["bridge.overrides"].splitlines()
    overrides = dict(line.split("=") for line in lines if not line.startswith("#"))
    assert {path: yaml.safe_load(text) for path, text in overrides.items()} == settings_of(plan)
    assert all(re.fullmatch(r"[\w|]+|\[[\w,]+\]", text) for text in overrides.values())


def test_every_file_starts_from_its_recipe_or_its_checkpoint() -> None:
    def file(case: str, name: str) -> str:
        return export_unproven(CASES[case], "bridge").files[name]

    assert "from megatron.bridge.recipes.qwen_vl import qwen3_vl_8b_sft_config\n" in file(
        "context", "bridge_plan.py"
    )
    assert "--recipe glm_45v_sft_config $(grep" in file("glm", "bridge.overrides")
    assert 'planned_config(checkpoint="Qwen/Qwen3-VL-32B-Instruct", **options)' in file(
        "no recipe", "bridge_plan.py"
    )
    assert "--recipe YOUR_RECIPE --step-func qwen3_vl_step $(grep" in file("no recipe", "bridge.overrides")
    assert "planned_config(checkpoint, **options)" in file("parameters sharded", "bridge_plan.py")
    assert "Overlapped reduction fails" in file("gemma", "bridge_plan.py")
    assert "Overlapped reduction fails" not in file("parameters sharded", "bridge_plan.py")


# ---------------------------------------------------------------------------- values


def test_settings_follow_the_plan() -> None:
    context = settings_of(CASES["context"])
    assert context["model.calculate_per_token_loss"] and context["model.vision_dp_when_cp"]
    assert context["ddp.average_in_collective"] is False
    sharded = settings_of(CASES["parameters sharded"])
    assert sharded["ddp.use_megatron_fsdp"] and sharded["checkpoint.ckpt_format"] == "fsdp_dtensor"
    assert sharded["ddp.data_parallel_sharding_strategy"] == "optim_grads_params"
    gradients = settings_of(CASES["gradients sharded"])
    assert gradients["ddp.data_parallel_sharding_strategy"] == "optim_grads"
    replicated = settings_of(CASES["even virtual stages"])
    assert replicated["ddp.use_megatron_fsdp"] is False and "checkpoint.ckpt_format" not in replicated
    assert replicated["model.sequence_parallel"] and replicated["ddp.overlap_grad_reduce"]
    assert replicated["model.recompute_granularity"] == "full"
    none = settings_of(CASES["no recipe"])
    assert none["model.recompute_granularity"] is None and none["model.recompute_modules"] is None
    experts = settings_of(CASES["experts"])
    assert experts["model.expert_model_parallel_size"] == 4
    assert experts["model.recompute_modules"] == ["layernorm", "moe_act"]


def with_fields(plan: Plan, **model: Any) -> Plan:
    """The plan with other fields of its model: `llm__train` is llm.train, `enc__train` the encoder's."""
    names = {name.replace("__", ".").replace("enc.", "encoders[0]."): value for name, value in model.items()}
    return replace(plan, bound_to={**plan.bound_to, "model": {**plan.bound_to["model"], **names}})


def test_what_is_frozen_and_single_sequences() -> None:
    plan = CASES["even virtual stages"]
    frozen = settings_of(with_fields(plan, llm__train=False, enc__train=False))
    assert frozen["model.freeze_language_model"] and frozen["model.freeze_vision_model"]
    assert frozen["model.freeze_vision_projection"] is False
    unknown = settings_of(CASES["parameters sharded"])
    assert not [path for path in unknown if "freeze" in path]
    frozen = settings_of(with_fields(CASES["parameters sharded"], enc__train=False))
    assert frozen["model.freeze_vision_model"] and "model.freeze_language_model" not in frozen
    workload = {**plan.bound_to["workload"], "sequences_per_step": 16}
    single = settings_of(replace(plan, bound_to={**plan.bound_to, "workload": workload}))
    assert single["train.micro_batch_size"] == 1 and single["dataset.enable_in_batch_packing"] is False
    assert "dataset.enable_in_batch_packing" not in settings_of(plan)


# ---------------------------------------------------------------------------- what it cannot run


def whats(plan: Plan) -> list[str]:
    return [feature.what for feature in export_unproven(plan, "bridge").not_supported]


def test_what_a_family_cannot_run_is_said() -> None:
    assert whats(CASES["even virtual stages"]) == [] == whats(CASES["context"])
    assert whats(stage0_plan("Qwen2.5-VL-7B", Layout(dp=2, tp=2, cp=2))) == [
        "vision in a layout of its own (dp4 pp1 tp2)", "context parallelism (cp2)", "vision in tp2",
    ]  # fmt: skip
    assert whats(stage0_plan("Gemma-3-4B", Layout(dp=2), recompute="full")) == ["recompute full in vision"]
    plan = CASES["even virtual stages"]
    assert whats(with_llm(plan, recompute="none")) == ["recompute full in vision"]
    short = stage0_plan("Qwen3-VL-8B-Instruct", Layout(pp=6, tp=2, chunks=3))
    assert whats(short)[-1] == "vision feeding 3 layers from the first virtual stage"
    assert whats(CASES["parameters sharded"])[0].endswith("by a recipe")
    assert whats(with_fields(plan, precision__gradients="bf16")) == ["gradients reduced in bf16"]
    odd = replace(plan, microbatches=6, order="greedy")
    facts = PlanFacts(plan=odd)
    assert [feature.what for feature in bridge._list_unsupported(facts, bridge.find_model(facts))] == [
        "the LLM's order greedy", "6 microbatches in virtual stages",
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", ["optimus", "paper", "balanced", "balanced-best", "three-phase"])
def test_other_systems_are_refused_by_name(strategy: str) -> None:
    found = whats(replace(uneven_plan(), strategy=strategy))
    assert found[0] == "encoder work in the LLM's idle time"
    assert "vision in a layout of its own (dp8 pp1 tp1)" in found
