"""Compares chained stages and blocks with one process of unmodified transformers, in float64."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from hf_chain import compare, gradients, run_forward, run_step

from optimus.errors import UserError
from optimus.hf.inputs import pack_documents
from optimus.hf.loss import causal_lm_loss
from optimus.hf.split import split_model

BLOCKS = {"vision": [1, 2, 1], "audio": [1, 2, 1]}


def check_split(case: str, stages: list[int], blocks: dict[str, list[int]], **options: Any) -> None:
    split = split_model(hf_models.build(case, **options), stages=stages, blocks=blocks)
    loss = run_step(split, [split.inputs(batch) for batch in hf_models.microbatches(case)])
    expected = hf_models.reference(case, hf_models.build(case, **options), packed="attention" in options)
    compare(loss, gradients(split), expected)


def blocks_of(case: str) -> dict[str, list[int]]:
    names = {"qwen2_audio": ["audio"]}.get(case, ["vision"])
    return {name: BLOCKS[name] for name in names}


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", hf_models.CASES)
def test_stages_and_blocks_give_the_gradients_of_one_process(case: str) -> None:
    check_split(case, [1, 2, 1], blocks_of(case))


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", hf_models.CASES)
def test_whole_towers_with_eager_attention_do_too(case: str) -> None:
    check_split(case, [3, 1], {}, attention="eager")


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl_moe", "llava_clip_llama", "gemma3", "qwen2_audio"])
def test_padding_on_the_left_changes_nothing_else(case: str) -> None:
    batch = hf_models.microbatches(case)[4]
    lengths = batch["attention_mask"].sum(-1).tolist()
    for name, value in batch.items():
        if value.shape == batch["input_ids"].shape:
            rows = zip(value, lengths, strict=True)
            batch[name] = torch.stack([row.roll(len(row) - length) for row, length in rows])
    split, model = split_model(hf_models.build(case), stages=[1, 3]), hf_models.build(case)
    total = run_step(split, [split.inputs(batch)])
    out = model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False)
    loss = hf_models.sum_of_labels(out.logits, batch["labels"]) / int((batch["labels"][:, 1:] != -100).sum())
    if "moe" in case:
        loss = loss + model.config.text_config.router_aux_loss_coef * out.aux_loss.double()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    compare(total, gradients(split), (float(loss.detach()), grads))


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", hf_models.PACKED)
def test_packed_documents_do_not_see_each_other(case: str) -> None:
    split = split_model(hf_models.build(case), stages=[2, 2], router_loss=False)
    documents = next(docs for docs in hf_models.documents(case) if len(docs) > 1)
    packed = run_forward(split, pack_documents(split.model, documents))[0]
    alone = torch.cat([run_forward(split, document)[0] for document in documents], 1)
    assert float((packed - alone).abs().max()) < 1e-6 * float(alone.abs().max())  # norms sum in float32


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl_moe", "qwen2_audio"])
def test_the_loss_is_the_one_of_transformers(case: str) -> None:
    model = hf_models.build(case, dtype=torch.float32)
    for document in hf_models.microbatches(case):
        document = {n: v.float() if v.is_floating_point() else v for n, v in document.items()}
        split = split_model(model, stages=[2, 2])
        batch = split.inputs(document)
        assert batch.target is not None
        count = int((batch.target[:, 1:] != -100).sum())
        out = model(**document, use_cache=False)
        state = run_forward(split, document)
        weight = split.router_weight(count, 1)
        loss = float(causal_lm_loss(*state, batch.target, router_weight=weight)) / count
        assert loss == pytest.approx(float(out.loss.detach()), rel=1e-6)


def test_losses_of_microbatches_add_up_to_the_mean_over_labels() -> None:
    logits, labels = torch.randn(3, 5, 7, dtype=torch.float64), torch.randint(0, 7, (3, 5))
    labels[0, 2:] = labels[1, 4] = -100
    count = int((labels[:, 1:] != -100).sum())
    parts = sum(float(causal_lm_loss(logits[i : i + 1], labels[i : i + 1])) for i in range(3)) / count
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert parts == pytest.approx(float(expected), rel=1e-12)


def build_on_meta(case: str) -> Any:
    with torch.device("meta"):
        return hf_models.MODELS[case]()


def refusal(function: Any) -> UserError:
    with pytest.raises(UserError) as raised:
        function()
    return raised.value


def test_splits_that_do_not_fit_are_refused_by_name() -> None:
    model = build_on_meta("qwen2_5_vl")
    assert "does not divide 4 layers" in str(refusal(lambda: split_model(model, stages=[2, 1])))
    assert "does not divide" in str(refusal(lambda: split_model(model, stages=[4, 0])))
    assert refusal(lambda: split_model(model, stages=[4], blocks={"audio": [4]})).field == "blocks.audio"
    assert refusal(lambda: split_model(model, stages=[4], router_loss=True)).field == "router_loss"
    omni = build_on_meta("qwen2_5_omni")
    assert refusal(lambda: split_model(omni, stages=[4], blocks={"audio": [2, 2]})).field == "blocks.audio"
    llava = build_on_meta("llava_clip_llama")
    llava.config.vision_feature_layer = -4
    problem = refusal(lambda: split_model(llava, stages=[4], blocks={"vision": [2, 2]}))
    assert "cuts behind layer 1" in str(problem)
    split_model(llava, stages=[4], blocks={"vision": [1, 3]})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mllama"}, "model_type"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_models_that_no_test_compares_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    model = build_on_meta("qwen2_5_vl")
    for name, value in change.items():
        setattr(model.config, name, value)
    assert refusal(lambda: split_model(model, stages=[4])).field == field


def test_dropout_is_refused_by_name() -> None:
    model = build_on_meta("qwen2_audio")
    model.config.audio_config.encoder_layerdrop = 0.1
    assert refusal(lambda: split_model(model, stages=[4])).field == "audio_config.encoder_layerdrop"
    model = build_on_meta("qwen2_5_vl")
    model.config.text_config.attention_dropout = 0.1
    assert refusal(lambda: split_model(model, stages=[4])).field == "text_config.attention_dropout"


def test_rotary_scaling_that_remembers_sequences_is_refused_by_name() -> None:
    model = build_on_meta("qwen2_5_vl")
    text = model.config.text_config
    text.rope_parameters = {**text.rope_parameters, "rope_type": "dynamic"}
    error = refusal(lambda: split_model(model, stages=[4]))
    assert error.field == "text_config.rope_parameters.rope_type"


def test_towers_and_texts_that_no_test_compares_are_refused_by_name() -> None:
    model = build_on_meta("llava_clip_llama")
    model.config.text_config.model_type = "mistral"
    assert refusal(lambda: split_model(model, stages=[4])).field == "text_config.model_type"
    model = build_on_meta("llava_clip_llama")
    model.config.vision_config.model_type = "pixtral"
    assert refusal(lambda: split_model(model, stages=[4])).field == "vision_config.model_type"


def test_inputs_that_are_not_carried_are_refused_by_name() -> None:
    split = split_model(build_on_meta("qwen2_5_vl"), stages=[4])
    batch = hf_models.microbatches("qwen2_5_vl")[0]
    cases = {
        "image_sizes": {**batch, "image_sizes": torch.ones(1)},
        "image_grid_thw": {name: value for name, value in batch.items() if name != "image_grid_thw"},
        "mm_token_type_ids": {name: value for name, value in batch.items() if name != "mm_token_type_ids"},
        "input_ids": {"input_ids": batch["input_ids"]},
    }
    for field, changed in cases.items():
        assert refusal(lambda changed=changed: split.inputs(changed)).field == field
    video = hf_models.microbatches("qwen2_5_vl")[2]
    ids = video["input_ids"].clone()
    ids[0, int((ids[0] == hf_models.VIDEO).nonzero()[0])] = hf_models.IMAGE  # as many rows as tokens in all
    problem = refusal(lambda: split.inputs({**video, "input_ids": ids}))
    assert "has 5 tokens for the 4 rows that pixel_values becomes" in str(problem)
    llava, one = split_model(build_on_meta("internvl"), stages=[4]), hf_models.microbatches("internvl")[0]
    problem = refusal(lambda: llava.inputs({**one, "pixel_values": one["pixel_values"][1:]}))
    assert "has 8 tokens for the 4 rows that pixel_values becomes" in str(problem)
    padded = {**batch, "attention_mask": torch.zeros_like(batch["input_ids"])}
    assert refusal(lambda: pack_documents(split.model, [batch, padded])).field == "attention_mask"


def test_other_numbers_of_encoder_outputs_are_refused() -> None:
    split = split_model(hf_models.build("qwen3_vl"), stages=[2, 2])
    batch = split.inputs(hf_models.microbatches("qwen3_vl")[1])
    problem = refusal(lambda: split.stages[0](*batch.args, torch.zeros(0, 32), **batch.kwargs))
    assert problem.field == "encoder rows"
