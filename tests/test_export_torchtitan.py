"""The file for torchtitan: it sets fields that are there, and torchtitan's own classes take it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from export_cases import export_unproven, planned, uneven_plan, with_llm, words

from optimus.exporters import torchtitan
from optimus.exporters.plan_facts import PlanFacts
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.read import find_job
from optimus.planner.planning import make_plan

# Fields of torchtitan 0.3.0: torchtitan/config/configs.py.
TITAN_PARALLELISM = words(
    """data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward
    tensor_parallel_degree enable_sequence_parallel context_parallel_degree expert_parallel_degree
    pipeline_parallel_degree pipeline_parallel_schedule pipeline_parallel_microbatch_size
    module_fqns_per_model_part"""
)
TITAN_TRAINING = words("local_batch_size global_batch_size seq_len disable_cuda_graphs")


@pytest.fixture(scope="module")
def uneven() -> Plan:
    return uneven_plan()


@dataclass
class Whole:
    """A `Trainer.Config` as far as the exported file touches it."""

    parallelism: Any
    training: Any
    model_spec: Any
    activation_checkpoint: Any = None
    other: dict[str, int] = field(default_factory=lambda: {"steps": 7})


def run_file(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(text, "torchtitan_plan.py", "exec"), found)
    return found


def of_layers(count: int) -> Any:
    return SimpleNamespace(model=SimpleNamespace(layers=[None] * count))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one module of torchtitan that the exported file imports, where it is not installed."""
    for name in ("torchtitan", "torchtitan.distributed", "torchtitan.distributed.activation_checkpoint"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules["torchtitan.distributed.activation_checkpoint"]
    module.FullAC = SimpleNamespace(Config=lambda: "full")
    module.SelectiveAC = SimpleNamespace(Config=lambda: "selective")


@dataclass
class Fields:
    """All fields of a configuration class of torchtitan's that an exported file may set."""

    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    fsdp_reshard_after_forward: str = "default"
    tensor_parallel_degree: int = 1
    enable_sequence_parallel: bool = True
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_microbatch_size: int = 1
    module_fqns_per_model_part: list[list[str]] | None = None
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    disable_cuda_graphs: bool = False


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_file_for_torchtitan_sets_known_fields(uneven: Plan, recompute: str) -> None:
    plan = with_llm(uneven, recompute=recompute)
    made = run_file(export_unproven(plan, "torchtitan").files["torchtitan_plan.py"])
    assert set(made["PARALLELISM"]) <= TITAN_PARALLELISM and set(made["TRAINING"]) <= TITAN_TRAINING
    base = Whole(Fields(), Fields(), of_layers(80))
    config = made["planned"](base)
    assert config.activation_checkpoint == (None if recompute == "none" else recompute)
    parallelism, training = config.parallelism, config.training
    assert (parallelism.pipeline_parallel_degree, parallelism.tensor_parallel_degree) == (4, 2)
    assert parallelism.pipeline_parallel_schedule == "Interleaved1F1B"
    assert training.local_batch_size == 16 and training.global_batch_size == 16
    assert parallelism.pipeline_parallel_microbatch_size * plan.microbatches == training.local_batch_size
    assert training.disable_cuda_graphs and config.other == {"steps": 7}
    assert base.parallelism == Fields()  # what was given is left alone
    with pytest.raises(ValueError, match="80 layers"):
        made["planned"](Whole(Fields(), Fields(), of_layers(79)))


def test_modules_of_virtual_stages_are_the_plans(uneven: Plan) -> None:
    names = torchtitan.list_modules_per_stage(PlanFacts(plan=uneven))
    layers = [[name for name in stage if name.startswith("layers.")] for stage in names]
    assert [name for stage in layers for name in stage] == [f"layers.{n}" for n in range(80)]
    held = [chunk.layers for chunk in uneven.modules[LLM].chunks]
    assert [len(stage) for stage in layers] == [held[0] - 1, *held[1:-1], held[-1] - 1]
    assert names[0][:2] == ["vision_encoder", "tok_embeddings"] and names[-1][-2:] == ["norm", "lm_head"]


@pytest.mark.ci
def test_without_a_pipeline_torchtitan_accumulates() -> None:
    job = find_job("paper/small-a100", layouts=["llm=pp1,tp4"])
    limits = replace(job.layout.limits, allow=("fill",))
    plan = make_plan(replace(job, layout=replace(job.layout, limits=limits)), systems=()).plan
    facts = PlanFacts(plan=plan)
    assert torchtitan.build_training_fields(facts) == {
        "local_batch_size": 2,
        "global_batch_size": 16,
        "seq_len": 2048,
    }
    assert "pipeline_parallel_schedule" not in torchtitan.build_parallelism_fields(facts)


@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zero-bubble"])
def test_torch_has_the_schedules_that_are_named(order: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", exc_type=ImportError)
    assert schedules.get_schedule_class(torchtitan.SCHEDULES[order])


@pytest.mark.ci("plan file")
@pytest.mark.parametrize("layout", ["llm=pp4,tp2", "llm=pp1,tp4"])
def test_torchtitans_own_classes_take_the_file(layout: str) -> None:
    why = "torchtitan is not installed (or lacks a dependency); its fields are checked against a record"
    configs = pytest.importorskip("torchtitan.config.configs", reason=why, exc_type=ImportError)
    pytest.importorskip("torchtitan.distributed.activation_checkpoint", reason=why, exc_type=ImportError)
    plan = planned("paper/small-a100", layout)
    made = run_file(export_unproven(plan, "torchtitan").files["torchtitan_plan.py"])
    base = Whole(configs.ParallelismConfig(), configs.TrainingConfig(), of_layers(80))
    config, own = made["planned"](base), plan.modules[LLM].layout
    for name, value in made["PARALLELISM"].items():
        assert getattr(config.parallelism, name) == value
    dims = pytest.importorskip("torchtitan.distributed", reason=why, exc_type=ImportError).ParallelDims
    found = dims.from_config(config.parallelism, plan.ranks.world)
    assert (found.dp_shard, found.pp, found.cp, found.tp) == (own.dp, own.pp, own.cp, own.tp)


@pytest.mark.ci("plan file")
def test_torchtitans_trainer_takes_the_file(uneven: Plan) -> None:
    """Its own checks of a whole configuration, of pipelines beside CUDA graphs among them."""
    why = "torchtitan is not installed, or lacks a dependency"
    trainer = pytest.importorskip("torchtitan.trainer", reason=why, exc_type=ImportError).Trainer
    made = run_file(export_unproven(uneven, "torchtitan").files["torchtitan_plan.py"])
    base = trainer.Config()
    base.model_spec = of_layers(80)
    assert made["planned"](base).parallelism.pipeline_parallel_degree == 4
