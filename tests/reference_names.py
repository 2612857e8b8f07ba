"""Random weights of transformers' modules, and the names that our own layers have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimus.job.model import Encoder, Llm

DTYPE, VOCAB = torch.float64, 37
ERROR = 1e-10
Get = Callable[[str], Tensor]  # a parameter of the reference, or its gradient, by name
Named = dict[str, Tensor]


def reference_module(name: str = "") -> Any:
    return pytest.importorskip(f"transformers.{name}".rstrip("."))


def randomised(reference: nn.Module) -> Any:
    """Large enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(0)
    reference = reference.to(DTYPE).eval()
    for name, parameter in sorted(reference.named_parameters()):
        if parameter.requires_grad:
            values = torch.empty(parameter.shape, dtype=DTYPE).normal_(0.0, 0.3, generator=generator)
            parameter.data.copy_(values + (1.0 if "norm" in name and "weight" in name else 0.0))
    return reference


def getters(reference: nn.Module) -> tuple[Get, Get]:
    parameters = dict(reference.named_parameters(remove_duplicate=False))
    return (lambda name: parameters[name].data), (lambda name: parameters[name].grad)


def copied(parameters: Mapping[str, nn.Parameter], values: Named) -> None:
    assert set(parameters) == set(values)
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert parameter.shape == values[name].shape, name
            parameter.copy_(values[name])


def assert_close(found: Tensor, expected: Tensor, what: str = "", scale: float = 1.0) -> None:
    assert found.dtype == expected.dtype == DTYPE and found.shape == expected.shape, what
    scale = max(scale, float(expected.detach().abs().max()))
    assert float((found.detach() - expected.detach()).abs().max()) <= ERROR * scale, what


def drawn(*size: int, high: int = VOCAB, seed: int = 1) -> Tensor:
    return torch.randint(high, size, generator=torch.Generator().manual_seed(seed))


def normal(*size: int, seed: int = 2) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


# ------------------------------------------------------------------------ names: ours from theirs


def llama_names(
    get: Get, layers: int, llm: Llm, *, inner: str = "model.", head: str = "lm_head.weight"
) -> Named:
    """Llama, Qwen2, Qwen3 and the text of Qwen2-VL."""
    attention = llm.stack.attention
    found = {
        "llm.embedding.weight": get(f"{inner}embed_tokens.weight"),
        "llm.head.norm.weight": get(f"{inner}norm.weight"),
        "llm.head.weight": get(head),
    }
    for layer in range(layers):
        ours, theirs = f"llm.layers.{layer}.", f"{inner}layers.{layer}."
        kinds = ("weight", "bias") if attention.bias else ("weight",)
        for kind in kinds:
            parts = [get(f"{theirs}self_attn.{part}_proj.{kind}") for part in "qkv"]
            found[f"{ours}qkv.{kind}"] = torch.cat(parts)
        found[f"{ours}qkv.norm.weight"] = get(f"{theirs}input_layernorm.weight")
        if attention.qk_norm:
            found[f"{ours}qkv.query_norm.weight"] = get(f"{theirs}self_attn.q_norm.weight")
            found[f"{ours}qkv.key_norm.weight"] = get(f"{theirs}self_attn.k_norm.weight")
        found[f"{ours}out.weight"] = get(f"{theirs}self_attn.o_proj.weight")
        found[f"{ours}up.norm.weight"] = get(f"{theirs}post_attention_layernorm.weight")
        found[f"{ours}up.weight"] = torch.cat(
            [get(f"{theirs}mlp.{part}_proj.weight") for part in ("gate", "up")]
        )
        found[f"{ours}down.weight"] = get(f"{theirs}mlp.down_proj.weight")
    return found


def gpt2_names(get: Get, layers: int, llm: Llm) -> Named:
    found = {
        "llm.embedding.weight": get("transformer.wte.weight"),
        "llm.embedding.positions": get("transformer.wpe.weight"),
        "llm.head.norm.weight": get("transformer.ln_f.weight"),
        "llm.head.norm.bias": get("transformer.ln_f.bias"),
    }
    parts = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    for layer in range(layers):
        ours, theirs = f"llm.layers.{layer}.", f"transformer.h.{layer}."
        for mine, part in parts.items():
            found[f"{ours}{mine}.weight"] = get(f"{theirs}{part}.weight").T
            found[f"{ours}{mine}.bias"] = get(f"{theirs}{part}.bias")
        for kind in ("weight", "bias"):
            found[f"{ours}qkv.norm.{kind}"] = get(f"{theirs}ln_1.{kind}")
            found[f"{ours}up.norm.{kind}"] = get(f"{theirs}ln_2.{kind}")
    return found


def qwen_vision_names(get: Get, encoder: Encoder, *, inner: str = "") -> Named:
    """Qwen2-VL and Qwen2.5-VL."""
    kinds = ("weight", "bias") if encoder.stack.norm == "layernorm" else ("weight",)
    found = {"vision.patches.weight": get(f"{inner}patch_embed.proj.weight").flatten(1)}
    for kind in kinds:
        found[f"vision.projector.norm.{kind}"] = get(f"{inner}merger.ln_q.{kind}")
    for layer in range(encoder.stack.layers):
        ours, theirs = f"vision.layers.{layer}.", f"{inner}blocks.{layer}."
        for kind in kinds:
            found[f"{ours}qkv.norm.{kind}"] = get(f"{theirs}norm1.{kind}")
            found[f"{ours}up.norm.{kind}"] = get(f"{theirs}norm2.{kind}")
        gated = ("mlp.gate_proj", "mlp.up_proj") if encoder.stack.mlp.gated else ("mlp.fc1",)
        for kind in ("weight", "bias"):
            found[f"{ours}qkv.{kind}"] = get(f"{theirs}attn.qkv.{kind}")
            found[f"{ours}out.{kind}"] = get(f"{theirs}attn.proj.{kind}")
            found[f"{ours}up.{kind}"] = torch.cat([get(f"{theirs}{part}.{kind}") for part in gated])
            down = "mlp.down_proj" if encoder.stack.mlp.gated else "mlp.fc2"
            found[f"{ours}down.{kind}"] = get(f"{theirs}{down}.{kind}")
    for number, part in enumerate(("mlp.0", "mlp.2")):
        for kind in ("weight", "bias"):
            found[f"vision.projector.linears.{number}.{kind}"] = get(f"{inner}merger.{part}.{kind}")
    return found


def siglip_names(get: Get, encoder: Encoder) -> Named:
    """The projector is the identity here."""
    found = {
        "vision.patches.weight": get("embeddings.patch_embedding.weight").flatten(1),
        "vision.patches.bias": get("embeddings.patch_embedding.bias"),
        "vision.patches.positions": get("embeddings.position_embedding.weight"),
        "vision.projector.norm.weight": get("post_layernorm.weight"),
        "vision.projector.norm.bias": get("post_layernorm.bias"),
        "vision.projector.linears.0.weight": torch.eye(encoder.stack.hidden, dtype=DTYPE),
    }
    for layer in range(encoder.stack.layers):
        ours, theirs = f"vision.layers.{layer}.", f"encoder.layers.{layer}."
        for kind in ("weight", "bias"):
            parts = [get(f"{theirs}self_attn.{part}_proj.{kind}") for part in "qkv"]
            found[f"{ours}qkv.{kind}"] = torch.cat(parts)
            found[f"{ours}qkv.norm.{kind}"] = get(f"{theirs}layer_norm1.{kind}")
            found[f"{ours}out.{kind}"] = get(f"{theirs}self_attn.out_proj.{kind}")
            found[f"{ours}up.norm.{kind}"] = get(f"{theirs}layer_norm2.{kind}")
            found[f"{ours}up.{kind}"] = get(f"{theirs}mlp.fc1.{kind}")
            found[f"{ours}down.{kind}"] = get(f"{theirs}mlp.fc2.{kind}")
    return found


def whisper_names(get: Get, encoder: Encoder) -> Named:
    """Keys have no bias there; stem and projector are the identity here."""
    identity = torch.eye(encoder.stack.hidden, dtype=DTYPE)
    found = {
        "audio.patches.weight": identity,
        "audio.patches.bias": torch.zeros(len(identity), dtype=DTYPE),
        "audio.projector.norm.weight": get("layer_norm.weight"),
        "audio.projector.norm.bias": get("layer_norm.bias"),
        "audio.projector.linears.0.weight": identity,
    }
    if encoder.positions:
        found["audio.patches.positions"] = get("embed_positions.weight")
    for layer in range(encoder.stack.layers):
        ours, theirs = f"audio.layers.{layer}.", f"layers.{layer}."
        q, v = (get(f"{theirs}self_attn.{part}_proj.bias") for part in "qv")
        found[f"{ours}qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
        parts = [get(f"{theirs}self_attn.{part}_proj.weight") for part in "qkv"]
        found[f"{ours}qkv.weight"] = torch.cat(parts)
        for kind in ("weight", "bias"):
            found[f"{ours}qkv.norm.{kind}"] = get(f"{theirs}self_attn_layer_norm.{kind}")
            found[f"{ours}out.{kind}"] = get(f"{theirs}self_attn.out_proj.{kind}")
            found[f"{ours}up.norm.{kind}"] = get(f"{theirs}final_layer_norm.{kind}")
            found[f"{ours}up.{kind}"] = get(f"{theirs}fc1.{kind}")
            found[f"{ours}down.{kind}"] = get(f"{theirs}fc2.{kind}")
    return found
