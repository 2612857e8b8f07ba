"""Whatever a user names becomes one checked job, or an error that says what to do."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_cases import HAND, JOB
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import allowed_s

from optimus.errors import OptimusError, UserError
from optimus.ir.binding import flatten_and_hash_parts, list_bound_parts
from optimus.job.job import Job
from optimus.job.layout import PartialLayout
from optimus.job.read import find_job, load_cluster, load_job, load_model, make_job
from optimus.job.write import format_job_yaml

EXAMPLE = """\
format: optimus.job/1
name: vl72b-stage2
model:
  use: qwen2.5-vl-72b
  modules:
    vision: {train: true, recompute: auto}
    llm:    {train: true, recompute: auto}
  precision: {compute: bf16, gradients: fp32, optimizer: adamw-fp32}
cluster:
  use: h100-sxm-80gb
  gpus: 512
  gpus_per_node: 8
  reserve_gb_per_gpu: 6
  between_nodes: {gb_per_s_per_gpu: 46, source: "nccl-tests 2026-11-02, 64 nodes"}
workload:
  sequence_tokens: 8192
  sequences_per_step: 1024
  lengths: ./lengths.jsonl
layout:
  llm: {tp: 8}
  vision: {}
  limits: {microbatch_sequences: [1, 2], max_pp: 8, allow: [fill, three-phase, balanced, fsdp, separate-gpus]}
today:
  framework: megatron-core 0.19
  layout: {llm: {dp: 16, pp: 4, tp: 8, chunks: 5}, vision: stage0}
  measured: {step_s: 17.9, peak_memory_gb: 71}
run:
  data: {energon: /data/vl-mix}
  init: {hf_weights: ./Qwen2.5-VL-72B}
  optimizer: {lr: 2.0e-5, warmup_steps: 500, schedule: cosine, clip: 1.0}
  steps: 20000
  checkpoint: {dir: /ckpt/vl72b, every_steps: 250, keep: 3}
  log: {jsonl: true, wandb: offline}
  launch: {slurm: {partition: h100, time: "72:00:00", requeue: true}}
"""


def saved(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_example_of_the_design_is_read(tmp_path: Path) -> None:
    rows = [{"text": 4710, "vision": [1024, 1610]}, {"text": 8192}, {"text": 100, "vision": []}]
    (tmp_path / "lengths.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    job = load_job(saved(tmp_path, EXAMPLE))
    assert job.name == "vl72b-stage2" and job.cluster.gpus == 512
    assert job.cluster.reserve_bytes == 6e9
    assert job.cluster.between_nodes.bandwidth_bytes_per_s == 46e9
    assert job.cluster.between_nodes.latency_s == pytest.approx(10e-6)  # kept from the catalog
    assert job.cluster.between_nodes.source.startswith("nccl-tests")
    assert [sequence.tokens for sequence in job.workload.sequences] == [7344, 8192, 100]
    assert job.layout.of("llm") == PartialLayout(tp=8) and job.layout.of("vision") == PartialLayout()
    assert job.layout.limits.max_pp == 8
    assert job.today is not None and job.today.llm.chunks == 5 and job.today.placement == "stage0"
    assert job.today.measured_step_s == 17.9 and job.today.measured_memory_bytes == 71e9
    assert job.run["optimizer"]["lr"] == 2e-5
    assert job.run["launch"]["slurm"]["time"] == "72:00:00"
    assert job.notes == ()


def test_percentiles_are_a_distribution_of_packed_sequences(tmp_path: Path) -> None:
    workload = load_job(saved(tmp_path, JOB)).workload
    totals = sorted(sum(sequence.lengths("vision")) for sequence in workload.sequences)
    assert all(sequence.tokens == 8192 for sequence in workload.sequences)
    assert totals[len(totals) // 2] == pytest.approx(2600, rel=0.02) and totals[-1] == 8000


def test_modules_are_switched_off_and_on(tmp_path: Path) -> None:
    switches = "{vision: {train: false, train_projector: true, recompute: none}, llm: {recompute: full}}"
    text = JOB.replace("use: qwen2.5-vl-72b", f"use: qwen2.5-vl-72b\n  modules: {switches}")
    model = load_job(saved(tmp_path, text)).model
    vision = model.encoder("vision")
    assert not vision.train and vision.projector.train and vision.recompute == "none"
    assert model.llm.train and model.llm.recompute == "full"


def test_dimensions_by_hand(tmp_path: Path) -> None:
    job = load_job(saved(tmp_path, HAND))
    assert job.name == "job" and job.model.llm.stack.experts is not None
    assert job.model.encoders[0].projector.merge == 4
    assert any("vision tokens" in note for note in job.notes)  # no lengths stated: assumed, and said


def test_a_module_of_the_catalog_is_changed_where_the_job_says_so(tmp_path: Path) -> None:
    text = HAND.replace(
        "  llm:\n    stack",
        "    - name: more\n      use: vit-3b\n      stack: {layers: 12}\n      projector: {widths: [2048]}\n"
        "  llm:\n    stack",
    )
    stack = load_job(saved(tmp_path, text)).model.encoder("more").stack
    assert (stack.layers, stack.hidden) == (12, 2304)


@pytest.mark.parametrize("on", ["h100:512", "h100-sxm-80gb:512", "b200:8", "a100:4"])
def test_a_model_and_a_cluster_make_a_job(on: str) -> None:
    job = find_job("qwen2.5-vl-72b", on=on)
    gpus = int(on.split(":")[1])
    assert job.cluster.gpus == gpus == load_cluster(on).gpus
    assert (
        job.workload.sequences_per_step >= max(256, 2 * gpus) and job.workload.sequences_per_step % gpus == 0
    )
    assert job.workload.share_of_tokens("vision") == pytest.approx(0.42, abs=0.03)
    assert len(job.notes) == 2 and all("assumed" in note for note in job.notes)
    assert (
        make_job(model="qwen2.5-vl-72b", on=on) == make_job(model=load_model("qwen2.5-vl-72b"), on=on) == job
    )


def test_names_of_the_catalog_are_read_in_any_letter_case(tmp_path: Path) -> None:
    job = find_job("qwen2.5-vl-72b", on="h100:64")
    for model, on in (("Qwen2.5-VL-72B", "H100:64"), ("QWEN2.5-vl-72b", "H100-SXM-80GB:64")):
        assert find_job(model, on=on) == make_job(model=model, on=on) == job
        assert load_model(model) == job.model and load_cluster(on) == job.cluster
        assert load_job(saved(tmp_path, format_job_yaml(model, on))) == job
    assert find_job("Paper/d") == find_job("paper/D") and find_job("PAPER/D").name == find_job("paper/D").name
    text = JOB.replace("use: qwen2.5-vl-72b", "use: Qwen2.5-VL-72B").replace("use: h100", "use: H100")
    assert load_job(saved(tmp_path, text)) == load_job(saved(tmp_path, JOB))
    curves = job.cluster.gpu.curves
    text = text.replace("use: H100", f"use: H100\n  gpu: {{curves: {curves.upper()}}}")
    assert curves.upper() != curves and load_job(saved(tmp_path, text)).cluster.gpu.curves == curves


def test_a_job_file_moves_to_another_cluster(tmp_path: Path) -> None:
    text = JOB.replace("  llm: {dp: 16, pp: 4, tp: 8}\n", "  llm: {tp: 8}\n")
    text = text[: text.index("today:")]
    job = find_job(saved(tmp_path, text), on="b200:64")
    assert (job.cluster.name, job.cluster.gpus) == ("b200-sxm-180gb", 64)


def hashes(job: Job) -> dict[str, str]:
    """Hashes that bind a plan to the job."""
    return flatten_and_hash_parts(list_bound_parts(job))[1]


def test_run_and_sources_never_change_the_hashes(tmp_path: Path) -> None:
    job = load_job(saved(tmp_path, JOB))
    other = load_job(saved(tmp_path, JOB.replace("steps: 20000", "steps: 7")))
    assert hashes(other) == hashes(job) and other != job
    assert hashes(replace(job, model=replace(job.model, source="elsewhere"))) == hashes(job)
    assert hashes(job.replace(gpus=256)) != hashes(job)
    moved = load_job(saved(tmp_path, JOB.replace("p50: 2600", "p50: 2601")))
    assert hashes(moved) != hashes(job)


def test_context_parallelism_left_out_counts_as_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which is not cluster"):
        load_job(saved(tmp_path, JOB.replace("{dp: 16, pp: 4, tp: 8}\n", "{dp: 8, pp: 4, tp: 8}\n")))
    job = load_job(saved(tmp_path, JOB.replace("{dp: 16, pp: 4, tp: 8}\n", "{dp: 8, pp: 4, cp: 2, tp: 8}\n")))
    assert job.layout.of("llm").cp == 2


def test_init_of_a_catalog_model_loads_again(tmp_path: Path) -> None:
    path = saved(tmp_path, format_job_yaml("omni-3", "b200:64"))
    assert load_job(path) == find_job("omni-3", on="b200:64")


@pytest.mark.ci
def test_large_lengths_files_are_read_in_time(tmp_path: Path) -> None:
    rows = "".join(f'{{"text": {4000 + n % 97}, "vision": [1024, {n % 1000 + 1}]}}\n' for n in range(20_000))
    (tmp_path / "lengths.jsonl").write_text(rows, encoding="utf-8")
    text = JOB.replace("vision_tokens: {p50: 2600, p95: 7400, max: 8000}", "lengths: lengths.jsonl")
    begin = time.perf_counter()
    assert len(load_job(saved(tmp_path, text)).workload.sequences) == 20_000
    assert time.perf_counter() - begin < allowed_s(5)


# Mutated files: a job or a typed error, never anything else --------------------------------


def expect_job_or_typed_error(path: Path) -> None:
    begin, refused = time.process_time(), None
    try:
        job = load_job(path)
        assert job.model.parameters() > 0 and hashes(job)
    except OptimusError as error:
        refused = error
    assert refused is None or (str(refused).startswith("error: ") and "\nhint: " in str(refused))
    assert time.process_time() - begin < 2


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.sampled_from(["", "auto", "h100", "vit-3b", "gpt-11b", "..", "/", "a\tb", "null", "1e400", "\x85"]),
    st.text(max_size=6),
    st.lists(st.integers(0, 99), max_size=3),
    st.dictionaries(st.sampled_from(["tp", "pp", "use", "name"]), st.integers(0, 9), max_size=2),
)


@pytest.mark.ci
@settings(max_examples=250, deadline=None)
@given(text=st.sampled_from([JOB, HAND]), pick=st.integers(0, 10_000), value=VALUES, drop=st.booleans())
def test_mutated_values_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, pick: int, value: object, drop: bool
) -> None:
    tree = yaml.safe_load(text)
    spots = _spots(tree)
    block, key = spots[pick % len(spots)]
    if drop:
        del block[key]
    else:
        block[key] = value
    mutated = yaml.safe_dump(tree, allow_unicode=True)
    expect_job_or_typed_error(saved(tmp_path_factory.mktemp("fuzz"), mutated))


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a tree where something can be replaced."""
    found: list[tuple[Any, Any]] = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found.append((tree, key))
        found += _spots(value)
    return found


@settings(max_examples=250, deadline=None)
@given(text=st.sampled_from([JOB, HAND]), seed=st.integers(0, 2**32))
def test_flipped_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, seed: int
) -> None:
    dice, content = random.Random(seed), bytearray(text, "utf-8")
    for _ in range(dice.randint(1, 5)):
        at = dice.randrange(len(content))
        match dice.randrange(3):
            case 0:
                content[at] ^= 1 << dice.randrange(8)
            case 1:
                del content[at : at + dice.randint(1, 20)]
            case _:
                content[at:at] = content[dice.randrange(len(content)) :][: dice.randint(1, 30)]
    path = tmp_path_factory.mktemp("fuzz") / "job.yaml"
    path.write_bytes(content)
    expect_job_or_typed_error(path)
