"""Our models against those that released weights are run with: same values, same outputs, same gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_process import OneProcess, loss_scale, parameters_by_name, whole
from reference_names import (
    DTYPE,
    ERROR,
    VOCAB,
    Get,
    Named,
    assert_close,
    copied,
    drawn,
    getters,
    gpt2_names,
    llama_names,
    normal,
    qwen_vision_names,
    randomised,
    reference_module,
    siglip_names,
    whisper_names,
)
from torch import Tensor, nn

from optimus.job.attention import Attention, Rope
from optimus.job.model import Encoder, Llm, Mlp, Model, Projector, Stack
from optimus.models.build import build_layers
from optimus.models.microbatch_inputs import build_encoder_inputs, build_llm_inputs
from optimus.models.sample import IGNORE_INDEX, Sample, SampleItem, compute_encoder_token_order

pytestmark = [pytest.mark.ci("engine"), pytest.mark.filterwarnings("ignore")]  # warnings of the reference


@pytest.fixture(autouse=True)
def _all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference falls back to float32 inside norms, rotary tables and softmax: here that is float64."""
    reference_module()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


# ------------------------------------------------------------------------ language models


def text_case(name: str) -> tuple[Any, Llm, Callable[..., Named]]:
    transformers = reference_module()
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "attn_implementation": "eager",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }
    stack = Stack(
        hidden=32,
        layers=2,
        attention=Attention(heads=4, kv_heads=2, head_dim=8),
        mlp=Mlp(width=24),
        norm_eps=1e-5,
    )
    llm = Llm(stack=stack, vocab=VOCAB)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common)), llm, llama_names
    if name == "qwen2":
        biased = replace(stack.attention, bias=True, output_bias=False)
        llm = replace(llm, stack=replace(stack, attention=biased))
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common)), llm, llama_names
    if name == "qwen3":
        wide = replace(stack.attention, qk_norm=True, head_dim=16)
        llm = replace(llm, stack=replace(stack, attention=wide))
        config = transformers.Qwen3Config(**common, head_dim=16)
        return transformers.Qwen3ForCausalLM(config), llm, llama_names
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=20, n_embd=32, n_layer=2, n_head=4, attn_implementation="eager"
    )
    stack = replace(
        stack,
        attention=Attention(heads=4, kv_heads=4, head_dim=8, bias=True),
        mlp=Mlp(width=128, gated=False, bias=True, activation="gelu_new"),
        norm="layernorm",
    )
    llm = Llm(stack=stack, vocab=VOCAB, tied=True, positions=20)
    return transformers.GPT2LMHeadModel(config), llm, gpt2_names


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
def test_language_models_equal_the_reference(name: str) -> None:
    """Two packed documents here are two sequences there."""
    reference, llm, names = text_case(name)
    reference = randomised(reference)
    values, gradients = getters(reference)
    model = Model(name="reference", encoders=(), llm=llm)
    ours = OneProcess(model)
    copied(ours.parameters(), names(values, llm.stack.layers, llm))
    lengths = (11, 6)
    ids, labels = drawn(sum(lengths)), drawn(sum(lengths), seed=3)
    labels[4] = IGNORE_INDEX
    sample = Sample(number=0, tokens=ids, labels=labels, documents=lengths)

    _, context = build_llm_inputs(llm, [sample], [], 1.0, seed=0, step=0, dtype=DTYPE)
    state = whole(ours.layers["llm"][:-1], (ids,), context)
    logits = ours.layers["llm"][-1][0].logits(state)
    expected = torch.cat([reference(part[None]).logits[0] for part in ids.split(lengths)])
    assert_close(logits, expected, "logits")

    loss = nn.functional.cross_entropy(expected, labels)
    loss.backward()
    found_loss, found = ours.loss_and_gradients([sample])
    assert found_loss == pytest.approx(float(loss.detach()), rel=ERROR)
    for parameter, gradient in names(gradients, llm.stack.layers, llm).items():
        assert_close(found[parameter], gradient, parameter, 0.01)


# ------------------------------------------------------------------------ vision and multimodal rotary


def vision_config(**fields: Any) -> dict[str, Any]:
    return {
        "depth": 3,
        "num_heads": 4,
        "patch_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 1,
        "spatial_merge_size": 2,
        "attn_implementation": "eager",
        **fields,
    }


QWEN25_VISION = vision_config(
    hidden_size=32,
    intermediate_size=24,
    out_hidden_size=32,
    window_size=8,
    fullatt_block_indexes=[1],
    hidden_act="silu",
)


def qwen25_encoder() -> Encoder:
    attention = Attention(
        heads=4, kv_heads=4, head_dim=8, bias=True, causal=False, window_tokens=16, full_layers=(1,)
    )
    return Encoder(
        name="vision",
        stack=Stack(hidden=32, layers=3, attention=attention, mlp=Mlp(width=24, bias=True)),
        projector=Projector(widths=(128, 32), merge=4),
        patch_inputs=8,
        patch_bias=False,
    )


def merge_order(inputs: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Theirs from raster order: groups of 2 x 2, in every frame."""
    height, width = grid[-2:]
    blocks = inputs.reshape(-1, height // 2, 2, width // 2, 2, inputs.shape[-1])
    return blocks.transpose(2, 3).reshape(inputs.shape)


def images(grids: list[tuple[int, ...]]) -> tuple[list[SampleItem], Tensor, Tensor]:
    """Items, and what the reference takes: inputs and grids."""
    items = []
    for number, grid in enumerate(grids):
        tokens = int(torch.tensor(grid).prod())
        items.append(SampleItem(offset=0, grid=grid, inputs=normal(tokens, 8, seed=number)))
    inputs = torch.cat([merge_order(item.inputs, item.grid) for item in items])
    return items, inputs, torch.tensor([grid if len(grid) == 3 else (1, *grid) for grid in grids])


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
def test_vision_towers_equal_the_reference(name: str) -> None:
    older = reference_module("models.qwen2_vl.modeling_qwen2_vl")
    newer = reference_module("models.qwen2_5_vl.modeling_qwen2_5_vl")
    encoder = qwen25_encoder()
    if name == "qwen2-vl":
        config = older.Qwen2VLVisionConfig(
            **vision_config(embed_dim=32, hidden_size=32, mlp_ratio=2, hidden_act="gelu")
        )
        reference = randomised(older.Qwen2VisionTransformerPretrainedModel(config))
        plain = Attention(heads=4, kv_heads=4, head_dim=8, bias=True, causal=False)
        mlp = Mlp(width=64, gated=False, bias=True)
        encoder = replace(
            encoder, stack=Stack(hidden=32, layers=3, attention=plain, mlp=mlp, norm="layernorm")
        )
    else:
        reference = randomised(
            newer.Qwen2_5_VisionTransformerPretrainedModel(newer.Qwen2_5_VLVisionConfig(**QWEN25_VISION))
        )
    layers = build_layers(encoder, dtype=DTYPE)
    copied(parameters_by_name(encoder, layers), qwen_vision_names(getters(reference)[0], encoder))

    items, theirs, grids = images([(6, 10), (4, 4), (2, 6, 4), (2, 2)])
    expected = reference(theirs, grid_thw=grids).pooler_output
    placed = [(0, number, item) for number, item in enumerate(items)]
    inputs, context = build_encoder_inputs(encoder, placed, len(theirs) + 12, seed=0, step=0, dtype=DTYPE)
    (rows,) = whole(layers, (inputs,), context)
    start = 0
    for item in items:
        tokens = compute_encoder_token_order(encoder, item.grid).output_index
        end = start + len(tokens)
        assert_close(rows[start:end], expected[start:end][tokens], str(item.grid))
        start = end


def test_learned_positions_of_an_image_equal_the_reference() -> None:
    siglip = reference_module("models.siglip.modeling_siglip")
    config = siglip.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_channels=2,
        image_size=8,
        patch_size=2,
        vision_use_head=False,
        attn_implementation="eager",
    )
    reference = randomised(siglip.SiglipVisionModel(config))
    encoder = Encoder(
        name="vision",
        stack=Stack(
            hidden=32,
            layers=2,
            attention=Attention(heads=4, kv_heads=4, head_dim=8, bias=True, causal=False),
            mlp=Mlp(width=24, gated=False, bias=True, activation="gelu_pytorch_tanh"),
            norm="layernorm",
        ),
        projector=Projector(widths=(32,), bias=False),
        patch_inputs=8,
        positions=16,
    )
    layers = build_layers(encoder, dtype=DTYPE)
    parameters = parameters_by_name(encoder, layers)
    copied(parameters, siglip_names(getters(reference)[0], encoder))

    image = normal(1, 2, 8, 8)
    patches = nn.functional.unfold(image, 2, stride=2)[0].T
    item = SampleItem(offset=0, grid=(4, 4), inputs=patches)
    inputs, context = build_encoder_inputs(encoder, [(0, 0, item)], 20, seed=0, step=0, dtype=DTYPE)
    (rows,) = whole(layers, (inputs,), context)
    assert_close(rows[:16], reference(image).last_hidden_state[0])


def test_a_vision_language_model_with_multimodal_rotary_equals_the_reference() -> None:
    """Loss and all gradients of the whole, through the merger into the windows."""
    transformers = reference_module()
    sections, image = (1, 2, 1), VOCAB - 1
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 10_000.0},
    }
    special = {"image_token_id": image, "video_token_id": image - 1, "vision_start_token_id": image - 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=QWEN25_VISION,
        tie_word_embeddings=False,
        attn_implementation="eager",
        **special,
    )
    reference = randomised(transformers.Qwen2_5_VLForConditionalGeneration(config))
    encoder = qwen25_encoder()
    rope = Rope(sections=sections)
    attention = Attention(heads=4, kv_heads=2, head_dim=8, bias=True, output_bias=False, rope=rope)
    llm = Llm(stack=Stack(hidden=32, layers=2, attention=attention, mlp=Mlp(width=24)), vocab=VOCAB)
    ours = OneProcess(Model(name="reference", encoders=(encoder,), llm=llm))

    def names(get: Get) -> Named:
        found = llama_names(get, 2, llm, inner="model.language_model.")
        return found | qwen_vision_names(get, encoder, inner="model.visual.")

    values, gradients = getters(reference)
    copied(ours.parameters(), names(values))

    items, pixels, grids = images([(6, 10), (4, 4)])
    items = [replace(items[0], offset=3), replace(items[1], offset=22)]
    ids, labels = drawn(30, high=VOCAB - 4), drawn(30, seed=3)
    labels[[3, 9, 29]] = IGNORE_INDEX
    sample = Sample(number=0, tokens=ids, labels=labels, items={"vision": tuple(items)})
    theirs = ids.clone()
    for item in items:
        theirs[item.offset : item.offset + item.tokens // 4] = image
    logits = reference(
        input_ids=theirs[None],
        pixel_values=pixels,
        image_grid_thw=grids,
        mm_token_type_ids=(theirs == image).int()[None],
    ).logits[0]
    loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
    loss.backward()
    found_loss, found = ours.loss_and_gradients([sample])
    assert loss_scale([sample]) == 1 / 27
    assert found_loss == pytest.approx(float(loss.detach()), rel=ERROR)
    for name, gradient in names(gradients).items():
        assert_close(found[name], gradient, name, 0.01)


# ------------------------------------------------------------------------ sound


def in_float64(make: Callable[[], Tensor]) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("learned", [False, True])
def test_a_whisper_encoder_equals_the_reference_behind_its_convolutions(learned: bool) -> None:
    modeling_whisper = reference_module("models.whisper.modeling_whisper")
    frames, hidden = 12, 32
    config = modeling_whisper.WhisperConfig(
        d_model=hidden,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        max_source_positions=frames,
        num_mel_bins=3,
        attn_implementation="eager",
    )
    reference = randomised(modeling_whisper.WhisperEncoder(config))
    table = in_float64(lambda: modeling_whisper.sinusoids(frames, hidden))
    reference.embed_positions.weight.data = normal(frames, hidden, seed=8) if learned else table
    attention = Attention(heads=4, kv_heads=4, head_dim=8, bias=True, causal=False)
    mlp = Mlp(width=48, gated=False, bias=True)
    encoder = Encoder(
        name="audio",
        modality="audio",
        stack=Stack(hidden=hidden, layers=2, attention=attention, mlp=mlp, norm="layernorm", norm_eps=1e-5),
        projector=Projector(widths=(hidden,), bias=False),
        patch_inputs=hidden,
        positions=frames if learned else 0,
    )
    layers = build_layers(encoder, dtype=DTYPE)
    copied(parameters_by_name(encoder, layers), whisper_names(getters(reference)[0], encoder))

    mel = normal(1, 3, 2 * frames)
    stem = nn.functional.gelu(reference.conv2(nn.functional.gelu(reference.conv1(mel))))[0].T
    item = SampleItem(offset=0, grid=(frames,), inputs=stem.detach())
    inputs, context = build_encoder_inputs(encoder, [(0, 0, item)], frames + 5, seed=0, step=0, dtype=DTYPE)
    (rows,) = whole(layers, (inputs,), context)
    assert_close(rows[:frames], reference(mel).last_hidden_state[0])
