"""Layers that merge tokens have the parameters and FLOPs of MiniCPM-V's class, and fewer bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimus.cost.assumptions import get_preset
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.flops import forward_flops, layer_flops
from optimus.cost.layer_shape import LayerShape
from optimus.cost.priced_layer import price_encoder_layers
from optimus.errors import UserError
from optimus.ir.binding import omit_default_constants
from optimus.ir.op import KernelName, OpKind
from optimus.job.checks import check_model
from optimus.job.hf_config import read_hf_config
from optimus.job.layout import Layout
from optimus.job.model import Encoder, Mlp, Model
from optimus.job.nodes import NO_FILE
from optimus.job.own_layers import find_untrainable
from optimus.job.read import find_job, load_job
from optimus.job.workload import TokenLoad
from optimus.job.write import format_job_yaml
from optimus.planner.planning import make_plan
from optimus.verify.validator import check_plan

VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}
VISION |= {"model_type": "minicpmv4_6_vision", "image_size": 128, "patch_size": 4}
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}
CONFIG = {"model_type": "minicpmv4_6", "text_config": TEXT, "vision_config": VISION, "insert_layer_id": 1}
GRIDS = (16, 24), (8, 8)  # patches of two images
LENGTHS = [height * width for height, width in GRIDS]
LOAD = TokenLoad(tokens=sum(LENGTHS), squares=sum(n * n for n in LENGTHS))
MERGER = 2  # the layer behind layer 1


def read(folder: Path, **values: Any) -> Model:
    (folder / "config.json").write_text(json.dumps(CONFIG | values))
    return read_hf_config(folder / "config.json")


def price(encoder: Encoder, folder: Path, layout: Layout, recompute: str = "none") -> Any:
    cluster = find_job(folder / "config.json", on="h100:64").cluster
    cost_model = ClusterCostModel(cluster=cluster, assumptions=get_preset("clean"))
    return cost_model, price_encoder_layers(encoder, LOAD, layout, cost_model, recompute)


@pytest.mark.ci("hf")
@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_parameters_and_flops_are_those_of_the_class(tmp_path: Path, mode: str) -> None:
    """The merger's parameters are left out, by name, where the configuration skips it."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.minicpmv4_6.modeling_minicpmv4_6")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig

    encoder = read(tmp_path, downsample_mode=mode).encoders[0]
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="eager")
    model = modeling.MiniCPMV4_6Model(config)
    sizes = {name: p.numel() for name, p in model.named_parameters() if not name.startswith("language_model")}
    skipped = sum(size for name, size in sizes.items() if "vit_merger" in name and mode == "4x")
    assert encoder.parameters() + skipped == sum(sizes.values())
    with FlopCounterMode(display=False) as counter:
        pixels = torch.zeros(1, 3, VISION["patch_size"], VISION["patch_size"] * sum(LENGTHS))
        output = model.get_image_features(pixels, torch.tensor(GRIDS))
    assert [len(rows) for rows in output.pooler_output] == [n // encoder.merge for n in LENGTHS]
    assert forward_flops(encoder, LOAD) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_kernels_of_a_merging_layer_are_its_flops(tmp_path: Path) -> None:
    encoder = read(tmp_path).encoders[0]
    cost_model, _ = price(encoder, tmp_path, Layout())
    shape = LayerShape(
        module="vision",
        stack=encoder.stack.at(MERGER),
        layer=MERGER,
        load=LOAD,
        layout=Layout(),
        cost_model=cost_model,
    )
    mlp, hidden = shape.stack.mlp, encoder.stack.hidden
    assert shape.up_gemm(mlp) == (LOAD.tokens / 4, 4 * 224, 4 * hidden)
    assert shape.down_gemm(mlp) == (LOAD.tokens / 4, hidden, 4 * 224)
    products = [*shape.qkv_gemms(), shape.out_gemm(), shape.up_gemm(mlp), shape.down_gemm(mlp)]
    flops = sum(2 * m * n * k for m, n, k in products) + 4 * hidden * shape.squares
    assert shape.squares == 4 * LOAD.tokens  # windows of 2 x 2
    assert layer_flops(encoder.stack, MERGER, LOAD) == pytest.approx(flops, rel=0.01)  # biases


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_layers_behind_the_merger_have_a_quarter_of_the_tokens(tmp_path: Path, recompute: str) -> None:
    encoder = read(tmp_path).encoders[0]
    _, priced = price(encoder, tmp_path, Layout(tp=2, cp=2), recompute)
    embedding, *layers, projector = priced
    state = LOAD.tokens / 4 * encoder.stack.hidden * 2
    assert [layer.output_bytes / state for layer in (embedding, *layers)] == [1, 1, 1] + [0.25] * 4
    assert projector.output_bytes == LOAD.tokens / 16 / 4 * 96 * 2
    for name in ("activation_bytes", "recomputed_bytes", "working_bytes"):
        assert getattr(layers[-1], name) == getattr(layers[0], name) / 4, name
    assert sum(layer.flops for layer in priced) == pytest.approx(forward_flops(encoder, LOAD))
    collectives = {kernel.name: kernel for kernel in layers[MERGER].kernels[OpKind.FORWARD]}
    gather, scatter = (collectives[name].size_bytes for name in (KernelName.GATHER2, KernelName.SCATTER2))
    assert gather == 4 * scatter


@pytest.mark.ci("search")
def test_a_model_with_a_merger_is_planned(tmp_path: Path) -> None:
    read(tmp_path)
    job = find_job(tmp_path / "config.json", "h100:2", ("llm=pp2,tp1,chunks1", "vision=pp2,tp1"))
    plan = make_plan(replace(job, workload=replace(job.workload, sequences_per_step=4)), systems=()).plan
    assert check_plan(plan).ok
    vision = plan.modules["vision"]
    assert vision.bin_tokens % 16 == 0
    tokens = vision.seam_bytes / (TEXT["hidden_size"] * 2) * 16
    merged = vision.chunks[0].layers - 1 > MERGER  # the first is the embedding
    sent = tokens / (4 if merged else 1) * VISION["hidden_size"] * 2
    assert vision.chunks[0].output_bytes == pytest.approx(sent, rel=1e-4)


def test_a_model_with_a_merger_is_written_and_not_trained(tmp_path: Path) -> None:
    model = read(tmp_path)
    assert "the merger behind layer 1 of the tower is a layer of its own" in model.derived
    path = tmp_path / "job.yaml"
    path.write_text(format_job_yaml(tmp_path / "config.json", "h100:8"), encoding="utf-8")
    assert load_job(path) == find_job(tmp_path / "config.json", on="h100:8")
    error = find_untrainable(model)
    assert error is not None and error.field == "model.family"
    error = find_untrainable(replace(model, family=""))
    assert error is not None and error.field == "model.vision.stack.variants"


def test_only_merges_that_are_described_are_read(tmp_path: Path) -> None:
    for key, value in (("insert_layer_id", 5), ("insert_layer_id", -1), ("merger_times", 2)):
        with pytest.raises(UserError) as caught:
            read(tmp_path, **{key: value})
        assert caught.value.field == key
    with pytest.raises(UserError, match="merge_kernel_size"):
        read(tmp_path, merge_kernel_size=[1, 2])
    with pytest.raises(UserError, match="window_kernel_size"):
        read(tmp_path, vision_config=VISION | {"window_kernel_size": [4, 4]})


def test_merges_where_rows_are_not_counted_are_refused(tmp_path: Path) -> None:
    model = read(tmp_path)
    check_model(model, NO_FILE)
    (encoder,), llm = model.encoders, model.llm
    merging = replace(llm.stack.mlp, merge=2)
    deep = replace(encoder, feeds=(0, 1), deepstack_layers=(0,))
    everywhere = replace(encoder, stack=replace(encoder.stack, mlp=merging, layers=20, variants=()))
    for broken, field in (
        (
            replace(model, llm=replace(llm, stack=replace(llm.stack, mlp=merging))),
            "model.llm.stack.mlp.merge",
        ),
        (replace(model, encoders=(deep,)), "model.encoders[0].stack.variants[0].mlp.merge"),
        (replace(model, encoders=(everywhere,)), "model.encoders[0].stack.mlp.merge"),
    ):
        with pytest.raises(UserError) as caught:
            check_model(broken, NO_FILE)
        assert caught.value.field == field


def test_an_mlp_that_does_not_merge_is_bound_as_before() -> None:
    assert "merge" not in omit_default_constants(Mlp(width=8))
    assert omit_default_constants(Mlp(width=8, merge=4))["merge"] == 4
