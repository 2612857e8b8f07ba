"""A filled pipeline in torchtitan's trainer trains as torchtitan trains in one process without a pipeline."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "torchtitan.md"
METRICS = ("loss_metrics/global_avg_loss", "grad_norm")
VALIDATION = "validation_metrics/loss"
CLOSE = 1e-6  # relative, in float32
CLOSE_IN_BFLOAT16 = 2e-4
LINE = re.compile(r"step:\s+(\d+)\s+loss:\s+(-?[\d.]+)\s+grad_norm:\s+([\d.]+)")
COLOURS = re.compile(r"\x1b\[[\d;]*m")

pytestmark = pytest.mark.skipif(
    find_spec("torchtitan") is None and "CI" not in os.environ, reason="torchtitan is not installed"
)

# What the adapter relies on. A line that differs names what moved: change the adapter, then this table.
CONTRACT = {
    "pipeline_parallel._get_pipeline_metadata": "parallel_dims, parallelism, model_config",
    "pipeline_parallel._generate_llm_fqn_per_model_part": (
        "num_stages, num_layers, input_weight, output_weight"
    ),
    "pipeline_parallel._split_module": "whole_model, module_names",
    "pipeline_parallel.pipeline_llm": (
        "model, parallel_dims, training, parallelism, compile_config, ac_config, dump_folder, device, "
        "model_config, parallelize_fn, loss_fn"
    ),
    "stages of rank 1 of 2, interleaved": "(1, 3)",
    "utils.clip_grad_norm_": (
        "parameters, max_norm, norm_type, error_if_nonfinite, foreach, pp_mesh, ep_enabled"
    ),
    "Trainer.train_step: clip_grad_norm_": "foreach, pp_mesh, ep_enabled",
    "Trainer.pp_forward_backward_step: step": (
        "arg_mbs, kwarg_mbs, target_mbs, losses, loss_kwargs, return_outputs"
    ),
    "Trainer.__init__: pipelining_fn": (
        "parallel_dims, training, parallelism, compile_config, ac_config, dump_folder, device, "
        "model_config, parallelize_fn, loss_fn"
    ),
    "Trainer._forward_backward_body: loss_fn": "None",
    "Validator.validate: eval": "arg_mbs, kwarg_mbs, target_mbs, losses",
    "ModelSpec": (
        "name, flavor, model, parallelize_fn, pipelining_fn, post_optimizer_build_fn, state_dict_adapter"
    ),
    "BaseLoss.__call__": "self, pred, labels, global_valid_tokens, kwargs",
    "ChunkedLossWrapper": "BaseLoss",
    "ActivationCheckpointing.apply": "self, model",
    "TrainingConfig": (
        "dtype, mixed_precision_param, mixed_precision_reduce, enable_cpu_offload, local_batch_size, seq_len"
    ),
    "ParallelismConfig": (
        "spmd_backend, pipeline_parallel_schedule, pipeline_parallel_schedule_csv, "
        "module_fqns_per_model_part, pipeline_parallel_microbatch_size, fsdp_reshard_after_forward, "
        "enable_fsdp_symm_mem"
    ),
    "CompileConfig": "enable",
    "ParallelDims": "pp, dp_shard, dp_replicate, tp, cp, ep, get_mesh",
    "TORCH_DTYPE_MAP": "float16, float32, bfloat16",
}
REFUSED = {
    "": "",
    "ZBVZeroBubble": "parallelism.pipeline_parallel_schedule",
    "csv": "parallelism.pipeline_parallel_schedule",
    "spmd_types": "parallelism.spmd_backend",
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "replicate": "parallelism.data_parallel_replicate_degree",
    "reshard": "parallelism.fsdp_reshard_after_forward",
    "symmetric memory": "parallelism.enable_fsdp_symm_mem",
    "bfloat16": "training.mixed_precision_param",
    "offload": "training.enable_cpu_offload",
    "compile": "compile.enable",
    "chunked loss": "loss: ChunkedLossWrapper",
    "experts": "model: mixture of experts",
    "no encoders": "encoders: none",
    "module list": "encoders.images.blocks",
    "projector in no stage": ("has parameters in no stage of the LLM and no encoder, projector.weight first"),
}


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "examples"), str(ROOT / "tests")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@pytest.fixture(scope="module")
def interfaces() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "torchtitan_worker.py")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.ci("torchtitan")
def test_what_the_adapter_uses_of_torchtitan_has_not_moved(interfaces: dict[str, Any]) -> None:
    moved = {
        name: (expected, interfaces["contract"].get(name))
        for name, expected in CONTRACT.items()
        if interfaces["contract"].get(name) != expected
    }
    assert not moved, f"torchtitan moved: {moved}"


@pytest.mark.ci("torchtitan")
def test_what_is_not_compared_is_refused_by_name(interfaces: dict[str, Any]) -> None:
    assert interfaces["refusals"] == REFUSED


def run(arguments: list[str], folder: Path) -> dict[int, tuple[str, str]]:
    """Runs torchrun and returns the printed loss and norm of every step, on a rank that has the loss."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = COLOURS.sub("", done.stdout + done.stderr)
    assert done.returncode == 0, output[-4000:]
    lines = [match.groups() for match in LINE.finditer(output)]
    norms = {(step, norm) for step, _, norm in lines}
    assert len(norms) == len({step for step, _ in norms}), f"norms differ between ranks: {norms}"
    return {int(step): (loss, norm) for step, loss, norm in lines if float(loss) > 0}


def read_metrics(folder: Path, names: Sequence[str] = METRICS) -> dict[str, dict[int, float]]:
    """The values that torchtitan wrote for TensorBoard, which have all digits."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events.out.*")
    accumulator = EventAccumulator(str(events)).Reload()
    return {name: {each.step: each.value for each in accumulator.Scalars(name)} for name in names}


def assert_same_training(
    folder: Path, name: str, steps: list[int], reference: str = "one", rel: float = CLOSE
) -> None:
    expected, actual = (read_metrics(folder / each) for each in (reference, name))
    for metric, values in actual.items():
        assert sorted(values) == steps, (name, metric)
        for step, value in values.items():
            assert value == pytest.approx(expected[metric][step], rel=rel), (name, metric, step)


@pytest.mark.ci("torchtitan")
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard
def test_every_command_of_the_page_trains_as_one_process(tmp_path: Path) -> None:
    """The page goes from one process to two ranks, and from their checkpoint to other layouts."""
    text = PAGE.read_text().replace("\\\n", " ").replace("$PWD", str(tmp_path))
    commands = [shlex.split(line[2:]) for line in text.splitlines() if line.startswith("$ torchrun")]
    folders = {words[words.index("--dump_folder") + 1]: words[1:] for words in commands}
    printed = {folder: run(arguments, tmp_path) for folder, arguments in folders.items()}
    assert list(printed) == ["one", "pp2", "pp2_dp2", "interleaved"]
    for folder, first in {"one": 1, "pp2": 3, "pp2_dp2": 5, "interleaved": 5}.items():
        assert_same_training(tmp_path, folder, list(range(first, 7)))
    for folder, steps in printed.items():
        equal = all(steps[step] == printed["one"][step] for step in steps)
        sys.stdout.write(f"{folder}: {steps}, equal in all printed digits: {equal}\n")
    shown = re.findall(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [int(step) for step, *_ in shown] == list(printed["one"])
    for step, *values in shown:  # of another machine
        assert [*map(float, values)] == pytest.approx([*map(float, printed["one"][int(step)])], rel=1e-3)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard
def test_variants_train_as_one_process(tmp_path: Path) -> None:
    """Covers accumulation, activation checkpointing, validation, plan files and mixed precision."""
    alone = "--training.local_batch_size 1 --training.global_batch_size 8"
    pipeline = "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size"
    mixed = "--training.mixed_precision_param bfloat16"

    def train(name: str, ranks: int, config: str, options: str) -> None:
        launch = ["-m", "torchtitan_vlm.train_on_cpu", "--module", "torchtitan_variants", "--config", config]
        words = ["--nproc-per-node", str(ranks), *launch, "--dump_folder", name, *options.split()]
        if name != "seed":
            words += ["--checkpoint.initial_load_path", f"{tmp_path}/seed/checkpoint/step-0"]
        run(words, tmp_path)

    def assert_equal(name: str, reference: str = "one", rel: float = CLOSE) -> None:
        assert_same_training(tmp_path, name, list(range(1, 7)), reference, rel)

    train("seed", 1, "recomputed", "--checkpoint.create_seed_checkpoint")
    train("one", 1, "recomputed", f"{alone} --validator.steps 8")
    expected = read_metrics(tmp_path / "one", [VALIDATION])[VALIDATION]
    assert list(expected) == [1, 2, 4, 6]
    train("accumulated", 2, "recomputed", f"{pipeline} 4 --training.global_batch_size 8 --validator.steps 2")
    train("sharded", 4, "recomputed", f"{pipeline} 4 --validator.steps 1")
    for name in ("accumulated", "sharded"):
        assert_equal(name)
        assert read_metrics(tmp_path / name, [VALIDATION])[VALIDATION] == pytest.approx(expected, rel=CLOSE)
    plans = []
    for name in ("planned", "planned_again"):
        train(name, 2, "planned", f"{pipeline} 8")
        assert_equal(name)
        plans.append((tmp_path / "plan.json").stat().st_mtime_ns)
    assert plans[0] == plans[1]
    train("one_mixed", 1, "recomputed", f"{alone} {mixed}")
    train("sharded_mixed", 4, "recomputed", f"{pipeline} 4 {mixed}")
    assert_equal("sharded_mixed", "one_mixed", rel=CLOSE_IN_BFLOAT16)
    with pytest.raises(AssertionError):  # float32 is another training
        assert_equal("one_mixed", rel=CLOSE_IN_BFLOAT16)
