"""Our own layers with weights of transformers compute what unpatched transformers does, family by family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from engine_cases import Case
from one_process import OneProcess, loss_scale
from own_families import Documents, OwnCase, as_ours, read_model, save_folder, whole_tensors
from own_worker import LAYOUTS
from torch import Tensor
from worker_lines import run_worker

from optimus.engine.build_rank import build_message_specs
from optimus.errors import UserError
from optimus.hf.own_layers import FAMILY_MAPS, load_layers, save_layers
from optimus.job.attention import LinearAttention, RopeScaling
from optimus.job.model import Encoder, LayerVariant, Linear, Llm, Model, PerLayerInputs
from optimus.job.own_layers import COMPARED_FAMILIES, find_unsupported, find_untrainable
from optimus.models.microbatch_inputs import build_llm_inputs
from optimus.models.sample import Sample, SampleItem
from optimus.profiler import segments

CASES = ("qwen2_5_vl", "llava_siglip_qwen2", "llava_siglip_llama", "qwen3_vl", "qwen3_vl_tied")
TOLERANCE = {"float64": 1e-5, "float32": 2e-5}  # transformers computes norms and rotary tables in float32


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("dtype", "steps"),
    [
        pytest.param("float64", 20, marks=pytest.mark.heavy),
        pytest.param("float64", 3, marks=pytest.mark.ci("own layers")),
        pytest.param("float32", 1, marks=pytest.mark.ci("own layers")),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_four_ranks_compute_what_transformers_does(case: str, dtype: str, steps: int) -> None:
    (line,) = run_worker("own_worker.py", dtype, str(steps), case, timeout_s=290)
    assert "error" not in line, line["error"]
    assert line["loss"] <= TOLERANCE[dtype] and line["gradients"] <= TOLERANCE[dtype], line
    assert line["losses"] <= TOLERANCE[dtype], line
    assert line["slots"] and line["saved"] == [] and line["read"] <= 1.1, line
    if dtype == "float64":  # in float32 AdamW turns tiny gradients into steps of either sign
        assert line["parameters"] <= 1e-4 and line["fallen"] < (0.6 if steps == 20 else 1), line


@pytest.mark.ci("own layers")
@pytest.mark.timeout(300)
def test_deepstack_rows_travel_between_stages() -> None:
    """Rows leave encoder stages before the projector's, and LLM layers behind the first stage add them."""
    names = "qwen3_vl@stages", "qwen3_vl@recompute", "qwen3_vl@context"
    for line in run_worker("own_worker.py", "float64", "2", *names, timeout_s=290):
        assert "error" not in line, line["error"]
        assert max(line["loss"], line["gradients"], line["losses"]) <= TOLERANCE["float64"], line
        assert line["slots"] and line["saved"] == [], line


def test_plans_price_the_rows_that_travel(tmp_path: Path) -> None:
    """Messages of a plan and of the engine have the same bytes; planned encoder tokens are a mean."""
    save_folder("qwen3_vl", tmp_path, torch.bfloat16)
    layout = {"ranks": 4, "microbatches": 5, **LAYOUTS["stages"]}
    case = OwnCase(name="stages", model="qwen3_vl", folder=tmp_path, **layout)
    plan, tokens = case.plan, case.job.workload.sequence_tokens
    specs = build_message_specs(case.job.model, plan, llm_tokens=tokens, dtype=torch.bfloat16)
    state_bytes = {"llm": tokens * case.job.model.llm.stack.hidden * 2}
    for name, module in plan.modules.items():
        counts = [len(message) for message in specs.inputs[name][1:]]
        sent = [chunk.output_bytes for chunk in module.chunks[:-1]]
        each = state_bytes.get(name, sent[0] / counts[0])
        assert min(counts) < max(counts) and sent == pytest.approx([count * each for count in counts], abs=1)


def test_a_projector_with_deepstack_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "REPETITIONS", 2)
    save_folder("qwen3_vl", tmp_path, torch.float32)
    job = OwnCase(name="job", model="qwen3_vl", folder=tmp_path, ranks=2, pp=2, microbatches=5).job
    rows = segments.profile_job(job, tps=(1, 2)).segments
    projector = {(row.kind, row.tp) for row in rows if row.layers == "projector"}
    assert len(projector) == 4 + 3


def test_families_with_weights_are_those_compared() -> None:
    assert set(FAMILY_MAPS) == set(COMPARED_FAMILIES)
    assert set(COMPARED_FAMILIES) <= {case.partition("_siglip")[0].partition("_tied")[0] for case in CASES}


# ---------------------------------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("own")
    for case in CASES:
        save_folder(case, folder / case, torch.bfloat16)
        (folder / case / "preprocessor_config.json").write_text("{}")
    return {case: folder / case for case in CASES}


@pytest.mark.ci("own layers")
@pytest.mark.parametrize("case", CASES)
def test_weights_go_in_and_out_bit_for_bit(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = read_model(folders[case])
    parameters = OneProcess(model, dtype=torch.bfloat16).parameters()
    report = load_layers(model, whole_tensors(parameters), folders[case])
    assert report.read_bytes == report.own_bytes
    theirs = hf_models.build(case, dtype=torch.bfloat16).state_dict()
    for name, tensor in as_ours(model, theirs, list(parameters)).items():
        assert torch.equal(parameters[name], tensor), name
    save_layers(model, whole_tensors(parameters), folders[case], tmp_path / "saved")
    for path in folders[case].iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes(), path.name


def test_weights_of_another_dtype_are_cast_only_if_asked(folders: dict[str, Path]) -> None:
    model = read_model(folders["qwen2_5_vl"])
    tensors = whole_tensors(OneProcess(model, dtype=torch.float32).parameters())
    with pytest.raises(UserError, match="is not float32 as the model"):
        load_layers(model, tensors, folders["qwen2_5_vl"])
    load_layers(model, tensors, folders["qwen2_5_vl"], cast=True)


def test_a_tensor_without_a_place_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    model = read_model(folders["qwen2_5_vl"])
    tensors = whole_tensors(OneProcess(model, dtype=torch.bfloat16).parameters())
    missing = [tensor for tensor in tensors if tensor.name != "vision.layers.1.out.bias"]
    with pytest.raises(UserError, match=r"visual\.blocks\.1\.attn\.proj\.bias is a tensor that our own"):
        save_layers(model, missing, folders["qwen2_5_vl"], tmp_path / "saved")


# ---------------------------------------------------------------------------------------- constants


def changed(value: Any, path: str, new: object) -> Any:
    """Returns a copy of nested dataclasses with the field at `path` replaced."""
    name, _, rest = path.partition(".")
    return replace(value, **{name: changed(getattr(value, name), rest, new) if rest else new})


def list_constants(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields paths and values of the constants of nested dataclasses."""
    for each in fields(value):
        inner = getattr(value, each.name)
        if is_dataclass(inner):
            yield from list_constants(inner, f"{before}{each.name}.")
        elif each.metadata.get("constant"):
            yield before + each.name, inner


OTHERS: dict[str, object] = {  # values of constants whose type does not tell another
    "activation": "gelu_pytorch_tanh",
    "scaling": RopeScaling(type="llama3", factor=8.0),
    "local_theta": 1e4,
    "partial_factor": 0.5,
    "qk_norm_kind": "l2",
    "qk_norm_over": "hidden",
    "softmax_scale": 0.5,
    "softcap": 50.0,
    "logit_softcap": 30.0,
    "norm": "rmsnorm",
    "tokens_per_second": 3.0,
    "deepstack_layers": (1, 2),
    "sections": (2, 2, 0),  # (2, 1, 1) is (1, 2, 1) where axes take turns
    "linear": LinearAttention(value_head_dim=8),
    "kv_projection": "keys",
    "variants": (LayerVariant(layers=(1,), experts=False),),
    "linears": (Linear(inputs=8, outputs=8),),
    "extra_parameters": 8,
    "per_layer_inputs": PerLayerInputs(vocab=8, width=8),
}
# Fields that change no schedule are constants; these change schedules and results.
DIMENSIONS: dict[str, object] = {
    "stack.attention.causal": None,
    "stack.attention.window_tokens": 64,
    "stack.attention.full_layers": (0, 3),
}
# Constants of features that a model has not.
IDLE = {
    "stack.dropout_rate",
    "tokens_per_item",
}


def is_idle(model: Model, module: Encoder | Llm, path: str) -> bool:
    """Tells whether a constant belongs to a feature that a model has not."""
    no_rotary = ".rope." in path and not module.rotary
    rope = model.llm.stack.attention.rope  # where axes take turns, each frame is an image
    no_time = path == "tokens_per_second" and (not rope.sections or rope.interleaved_sections)
    no_qk_norm = ".qk_norm_" in path and not module.stack.attention.qk_norm
    no_norm = path == "projector.norm_eps" and isinstance(module, Encoder) and module.projector.norm is None
    # Images of one size have the grid for which positions were learned.
    one_size = path == "interpolates_positions" and model.family == "llava"
    return path in IDLE or no_rotary or no_time or no_qk_norm or no_norm or one_size


def another(module: Encoder | Llm, path: str, value: Any) -> object:
    name = path.rpartition(".")[2]
    if name == "rotary":
        return not module.rotary
    if name == "activation" and value in (None, "silu", "gelu_pytorch_tanh"):
        return "gelu"
    if name in OTHERS:
        return OTHERS[name]
    return not value if isinstance(value, bool) else value * (1e4 if name == "norm_eps" else 3)


def list_mutants(model: Model) -> Iterator[tuple[str, Model]]:
    """Yields the model with one constant of one module changed."""
    for module in model.modules:
        constants = [
            (path, another(module, path, value))
            for path, value in list_constants(module)
            if not is_idle(model, module, path)
        ]
        for path, new in DIMENSIONS.items():
            value: Any = module
            for name in path.split("."):
                value = getattr(value, name)
            if value not in (None, ()):
                constants.append((path, (not value) if isinstance(value, bool) else new))
        for path, new in constants:
            yield f"{module.name}.{path} = {new}", _with(model, module, changed(module, path, new))


def _with(model: Model, module: Encoder | Llm, other: Encoder | Llm) -> Model:
    if isinstance(other, Llm):
        return replace(model, llm=other)
    return replace(model, encoders=tuple(other if e is module else e for e in model.encoders))


@cache
def reference(case: str) -> tuple[float, dict[str, Tensor]]:
    return hf_models.reference(case)


def is_equal(
    case: str, model: Model, folder: Path, expected: tuple[float, dict[str, Tensor]] | None = None
) -> bool:
    """Tells whether a model with the weights of a folder computes what transformers does."""
    if any(find_unsupported(module) is not None for module in model.modules):
        return False
    one = OneProcess(model)
    try:
        load_layers(model, whole_tensors(one.parameters()), folder, cast=True)
    except (KeyError, UserError):  # a parameter that transformers has not, or of another shape
        return False
    documents = Documents(case)
    samples = [documents.sample(number) for number in range(len(documents.samples))]
    expected_loss, theirs = expected or reference(case)
    try:
        with torch.no_grad():
            loss = sum(float(one.loss(sample, loss_scale(samples), 0)) for sample in samples)
    except UserError:  # inputs that such a model does not take
        return False
    if abs(loss - expected_loss) / expected_loss > TOLERANCE["float64"]:
        return False
    gradients = one.loss_and_gradients(samples)[1]
    right = as_ours(model, theirs, list(gradients))
    scale = max(float(gradient.abs().max()) for gradient in right.values())
    wrong = max(float((gradients[name] - each).abs().max()) for name, each in right.items()) / scale
    return wrong <= TOLERANCE["float64"]


@pytest.mark.ci("own layers")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_every_constant_changed_alone_makes_the_comparison_fail(case: str, tmp_path: Path) -> None:
    save_folder(case, tmp_path / case, torch.float64)
    model = read_model(tmp_path / case)
    assert is_equal(case, model, tmp_path / case)
    mutants = list(list_mutants(model))
    assert len(mutants) > 35
    assert [name for name, mutant in mutants if is_equal(case, mutant, tmp_path / case)] == []


# ---------------------------------------------------------------------------------------- configurations

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# One field of a config.json changed; the value after it is the field that is refused, None if it is trained.
CONFIGURATIONS: list[tuple[str, str, object, str | None]] = [
    ("llava_siglip_llama", "text_config.attention_bias", True, None),
    ("llava_siglip_llama", "text_config.mlp_bias", True, None),
    ("llava_siglip_llama", "text_config.rope_parameters", LLAMA3, "llm.stack.attention.rope.scaling"),
    ("llava_siglip_llama", "tie_word_embeddings", True, None),
    ("llava_siglip_llama", "multimodal_projector_bias", False, None),
    ("llava_siglip_llama", "vision_feature_layer", -1, None),
    ("llava_siglip_llama", "projector_hidden_act", "silu", "vision.projector.activation"),
    ("llava_siglip_llama", "vision_config.hidden_act", "quick_gelu", "vision.stack.mlp.activation"),
    ("llava_clip_llama", "vision_config.hidden_act", "quick_gelu", "vision.stack.mlp.activation"),
    ("llava_clip_llama", "vision_config.hidden_act", "gelu", "vision.class_token"),
    ("qwen2_5_vl", "tie_word_embeddings", True, None),
    ("qwen3_vl", "text_config.attention_bias", True, None),
    ("qwen3_vl", "vision_config.hidden_act", "gelu", None),
    ("qwen3_vl", "vision_config.deepstack_visual_indexes", [0, 1, 2, 3], None),
    ("qwen3_vl", "vision_config.deepstack_visual_indexes", [2, 0], "vision.deepstack_layers"),
    ("qwen3_vl", "vision_config.num_position_embeddings", 50, "vision.interpolates_positions"),
]


def with_field(build: Callable[[], Any], path: str, value: object) -> Any:
    """Returns a model of transformers whose configuration differs in one field."""
    with torch.device("meta"):
        model = build()
    *objects, name = path.split(".")
    inner = model.config
    for each in objects:
        inner = getattr(inner, each)
    setattr(inner, name, value)
    return type(model)(model.config)


@pytest.mark.ci("own layers")
@pytest.mark.parametrize(("case", "path", "value", "refused"), CONFIGURATIONS)
def test_a_configuration_is_trained_equally_or_refused(
    case: str,
    path: str,
    value: object,
    refused: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed_model = partial(with_field, hf_models.MODELS[case], path, value)
    monkeypatch.setitem(hf_models.MODELS, case, changed_model)
    save_folder(case, tmp_path, torch.float64)
    model = read_model(tmp_path)
    error = find_untrainable(model)
    if refused is not None:
        assert error is not None and error.field == f"model.{refused}"
        return
    assert error is None
    assert is_equal(case, model, tmp_path, expected=hf_models.reference(case))


# ---------------------------------------------------------------------------------------- refusals


def test_a_tie_of_the_inner_configuration_alone_is_refused(tmp_path: Path) -> None:
    model = with_field(hf_models.MODELS["qwen2_5_vl"], "text_config.tie_word_embeddings", True)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"text_config\.tie_word_embeddings = True is not tie_word_embeddings"
    ):
        load_layers(read_model(tmp_path), [], tmp_path)


def test_deepstack_of_several_encoders_is_refused() -> None:
    model = Case(name="two encoders", ranks=2, pp=2, encoders=((1, 1), (1, 1))).job.model
    deep = replace(model.encoders[0], feeds=(0, 1), deepstack_layers=(0,))
    refused = find_untrainable(replace(model, encoders=(deep, model.encoders[1])))
    assert refused is not None and refused.field == "model.vision.deepstack_layers"


@pytest.mark.parametrize(
    ("case", "offsets", "problem"),
    [
        ("qwen3_vl", (), r"are 0, and its grid \(2, 4, 4\) has 2 frames"),
        ("qwen3_vl", (1, 6, 11), r"are 3, and its grid"),
        ("qwen2_5_vl", (1, 6), "frames of a video follow one another"),
    ],
)
def test_frames_have_offsets_where_text_is_between_them(
    case: str, offsets: tuple[int, ...], problem: str, tmp_path: Path
) -> None:
    save_folder(case, tmp_path, torch.float64)
    model = read_model(tmp_path)
    video = SampleItem(offset=1, grid=(2, 4, 4), inputs=torch.zeros(32, 24), frame_offsets=offsets)
    tokens = torch.ones(12, dtype=torch.int64)
    sample = Sample(number=0, tokens=tokens, labels=tokens, items={"vision": (video,)})
    with pytest.raises(UserError, match=problem):
        build_llm_inputs(model.llm, [sample], [], 1.0, seed=0, step=0, encoders=model.encoders)
