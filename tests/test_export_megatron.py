"""Arguments for Megatron-LM: flags that it has, and megatron-core's own classes cut layers as planned."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
from export_cases import parsed, planned, uneven_plan, with_llm, words

from optimus.exporters import megatron, megatron_config
from optimus.exporters.megatron import list_model_flags
from optimus.exporters.plan_facts import PlanFacts
from optimus.exporters.targets import export_plan
from optimus.ir.binding import flatten_and_hash_parts, list_bound_parts
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.read import find_job

# Read in megatron/training/arguments.py of Megatron-LM at 000c4ac24f61159c138b0975def722c65245983c.
MEGATRON_FLAGS = words(
    """accumulate-allreduce-grads-in-fp32 add-qkv-bias attention-dropout bf16 context-parallel-size
    disable-bias-linear expert-model-parallel-size expert-tensor-parallel-size ffn-hidden-size
    global-batch-size grad-reduce-in-bf16 group-query-attention hidden-dropout hidden-size kv-channels
    kv-lora-rank max-position-embeddings micro-batch-size moe-ffn-hidden-size moe-grouped-gemm moe-layer-freq
    moe-router-topk moe-shared-expert-intermediate-size multi-latent-attention normalization
    num-attention-heads num-experts num-layers num-layers-per-virtual-pipeline-stage num-query-groups
    overlap-grad-reduce overlap-param-gather pipeline-model-parallel-layout pipeline-model-parallel-size
    position-embedding-type q-lora-rank qk-head-dim qk-layernorm qk-pos-emb-head-dim recompute-granularity
    recompute-method recompute-modules recompute-num-layers seq-length sequence-parallel swiglu
    tensor-model-parallel-size untie-embeddings-and-output-weights use-distributed-optimizer v-head-dim
    use-megatron-fsdp data-parallel-sharding-strategy vocab-size"""
)


@pytest.fixture(scope="module")
def uneven() -> Plan:
    return uneven_plan()


def of_model(plan: Plan, name: str, on: str) -> Plan:
    """Returns the plan as one for another model: for what depends on its shape alone."""
    fields, hashes = flatten_and_hash_parts(list_bound_parts(find_job(name, on)))
    return replace(plan, bound_to=fields, hashes=hashes)


SAME = words(
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size num_layers hidden_size "
    "expert_model_parallel_size expert_tensor_parallel_size ffn_hidden_size num_attention_heads kv_channels "
    "num_query_groups recompute_num_layers moe_router_topk moe_ffn_hidden_size q_lora_rank kv_lora_rank "
    "qk_head_dim qk_pos_emb_head_dim v_head_dim moe_shared_expert_intermediate_size"
)


def core_config(flags: dict[str, list[str]]) -> Any:
    """Returns what Megatron-LM makes of its arguments, as far as megatron-core's configuration goes."""
    core = pytest.importorskip("megatron.core.transformer.transformer_config", exc_type=ImportError)
    import torch

    given: dict[str, Any] = {
        name: int(flags[flag][0]) for name in SAME if (flag := name.replace("_", "-")) in flags
    }
    for name in ("recompute_granularity", "recompute_method", "normalization"):
        if name.replace("_", "-") in flags:
            given[name] = flags[name.replace("_", "-")][0]
    for name in ("sequence_parallel", "add_qkv_bias", "qk_layernorm", "moe_grouped_gemm", "bf16"):
        given[name] = name.replace("_", "-") in flags
    given["gated_linear_unit"] = "swiglu" in flags
    given["add_bias_linear"] = "disable-bias-linear" not in flags
    given["pipeline_dtype"] = torch.bfloat16
    if "num-experts" in flags:
        given["num_moe_experts"] = int(flags["num-experts"][0])
        given["moe_token_dispatcher_type"] = "alltoall"
    if "moe-layer-freq" in flags:
        given["moe_layer_freq"] = eval(flags["moe-layer-freq"][0])
    if "recompute-modules" in flags:
        given["recompute_modules"] = flags["recompute-modules"]
    if "pipeline-model-parallel-layout" in flags:
        given["pipeline_model_parallel_layout"] = flags["pipeline-model-parallel-layout"][0]
    if "num-layers-per-virtual-pipeline-stage" in flags:
        each = int(flags["num-layers-per-virtual-pipeline-stage"][0])
        stages = given["pipeline_model_parallel_size"]
        given["virtual_pipeline_model_parallel_size"] = given["num_layers"] // stages // each
    made = core.MLATransformerConfig if "multi-latent-attention" in flags else core.TransformerConfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own defaults
        return made(**given)


@pytest.mark.ci("plan file")
@pytest.mark.parametrize(
    ("job", "layout"),
    [
        ("cpu/tiny-vl", ()),
        pytest.param("paper/small-a100", (), marks=pytest.mark.heavy),
        ("paper/small-a100", ("llm=pp4,tp2",)),
        pytest.param("paper/small-a100", ("llm=pp2,tp4,chunks5",), marks=pytest.mark.heavy),
        pytest.param("paper/strong-3072", (), marks=pytest.mark.heavy),
    ],
)
def test_megatron_core_takes_the_arguments_and_cuts_the_layers_as_the_plan_does(
    job: str, layout: tuple[str, ...]
) -> None:
    plan = planned(job, *layout)
    flags = parsed(export_plan(plan, "megatron").files["megatron.args"])
    assert set(flags) <= MEGATRON_FLAGS
    config, own = core_config(flags), plan.modules[LLM].layout
    assert (own.tp, own.pp, own.cp) == (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    model = find_job(job, None, layout).model.llm.stack
    assert (config.hidden_size, config.num_layers) == (model.hidden, model.layers)
    assert int(flags["global-batch-size"][0]) == (
        int(flags["micro-batch-size"][0]) * own.dp * plan.microbatches
    )
    layers = [chunk.layers for chunk in plan.modules[LLM].chunks]  # with embedding and head
    layers[plan.entry] -= 1
    layers[-1] -= 1
    assert sum(layers) == model.layers
    if own.pp == 1:
        assert config.virtual_pipeline_model_parallel_size is None
    elif config.pipeline_model_parallel_layout is None:
        assert (config.virtual_pipeline_model_parallel_size or 1) == own.chunks
        assert layers == [model.layers // own.virtual_stages] * own.virtual_stages
    else:
        held = config.pipeline_model_parallel_layout.layout  # by stage, then by chunk
        decoder = pytest.importorskip("megatron.core.transformer.enums").LayerType.decoder
        theirs = [held[stage][chunk].count(decoder) for chunk in range(own.chunks) for stage in range(own.pp)]
        assert theirs == layers and len(set(layers)) > 1


def test_megatron_cores_data_parallelism_takes_the_flags(uneven: Plan) -> None:
    config = pytest.importorskip(
        "megatron.core.distributed", exc_type=ImportError
    ).DistributedDataParallelConfig
    plan = with_llm(uneven, layout=uneven.modules[LLM].layout.with_(dp=2))
    flags = {flag[0][2:] for flag in megatron._parallel(PlanFacts(plan=plan))}
    names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    assert all(getattr(config(**dict.fromkeys(names, True)), name) for name in names)
    assert {name.replace("_", "-") for name in names} <= flags
    assert "overlap-grad-reduce" not in {flag[0][2:] for flag in megatron._parallel(PlanFacts(plan=uneven))}


@pytest.mark.parametrize(("model", "on"), [("qwen3-vl-235b", "h100:256"), ("kimi-k2.5", "h200:1024")])
def test_shapes_of_experts_and_latent_attention(uneven: Plan, model: str, on: str) -> None:
    plan = with_llm(of_model(uneven, model, on), recompute="selective")
    facts, stack = PlanFacts(plan=plan), find_job(model, on).model.llm.stack
    made = [*megatron._parallel(facts), *megatron._recompute(facts), *list_model_flags(facts)]
    flags = parsed("\n".join(" ".join(flag) for flag in made))
    assert set(flags) <= MEGATRON_FLAGS
    flags["pipeline-model-parallel-size"] = ["1"]  # its layers are not cut for this model
    config = core_config(flags)
    assert stack.experts is not None
    assert (config.num_moe_experts, config.moe_router_topk) == (stack.experts.count, stack.experts.active)
    assert config.recompute_modules == ["layernorm", "moe_act"]
    if stack.attention.latent:
        assert config.kv_lora_rank == stack.attention.latent.key_value_rank
        dense = stack.experts.leading_dense_layers
        assert config.moe_layer_freq == [0] * dense + [1] * (stack.layers - dense)
    else:
        assert config.num_query_groups == stack.attention.kv_heads


@pytest.mark.parametrize(
    ("layers", "words"), [([3, 4, 2], "Ettt|tttt|ttL"), ([0, 2, 0], "E|tt|L"), ([2, 0, 0, 1], "Ett|||tL")]
)
def test_uneven_cuts_as_megatron_core_reads_them(layers: list[int], words: str) -> None:
    module = "megatron.core.transformer.pipeline_parallel_layer_layout"
    reader = pytest.importorskip(module, exc_type=ImportError).PipelineParallelLayerLayout
    assert megatron_config.format_pipeline_layout(layers) == words
    read = reader(words, pipeline_model_parallel_size=1)
    read.validate_layer_layout(num_layers=sum(layers), mtp_num_layers=0)
    assert [len([t for t in stage if t.name == "decoder"]) for stage in read.layout[0]] == layers


def test_what_megatron_recomputes(uneven: Plan) -> None:
    def flags(recompute: str, *, fused: bool = True) -> dict[str, list[str]]:
        notes = {**uneven.notes, "preset": {"fused_attention": fused}}
        plan = with_llm(replace(uneven, notes=notes), recompute=recompute)
        return parsed("\n".join(" ".join(flag) for flag in megatron._recompute(PlanFacts(plan=plan))))

    assert flags("none") == {}
    assert flags("full")["recompute-method"] == ["uniform"]
    assert flags("selective")["recompute-modules"] == ["layernorm", "mlp"]
    assert flags("selective", fused=False)["recompute-modules"] == ["core_attn"]
