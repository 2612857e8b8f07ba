"""Counts the bytes that kernels besides products and attention move in a layer, of plain torch and of ours.

`python tests/memory_traffic.py` prints them over those of fused kernels, which the cost model prices: the
factors of the presets `eager` and `ours`. Bytes of a kernel are those of its arguments and results.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, SiglipVisionConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from optimus.cost.layer_shape import NORM_BACKWARD_TENSORS, NORM_TENSORS
from optimus.job.attention import Attention
from optimus.job.model import BF16_BYTES, Llm, Mlp, Stack
from optimus.models.build import build_layers
from optimus.models.microbatch_inputs import build_llm_inputs
from optimus.models.sample import Sample
from optimus.models.segment import WeightGradStore

TOKENS, HIDDEN, HEADS, KV_HEADS = 4096, 64, 4, 1  # so many tokens that weights do not count
WIDTHS = 2.0, 4.0  # of the MLP, over the hidden one
MOVES_NOTHING = (
    "view", "_unsafe_view", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze", "permute",
    "alias", "detach", "as_strided", "split", "unbind", "split_with_sizes", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided",
)  # fmt: skip
IS_PRODUCT = ("mm", "addmm", "bmm", "baddbmm")


class CountBytes(TorchDispatchMode):  # type: ignore[misc]
    """Adds up the bytes of kernels by name, without products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in MOVES_NOTHING and name not in IS_PRODUCT and "dot_product" not in name:
            tensors = [each for each in tree_leaves((args, kwargs, results)) if isinstance(each, Tensor)]
            self.bytes[name] += sum(map(_stored_bytes, tensors))
        return results


def _stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, of which expanded dimensions are stored once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return int(count * tensor.element_size())


def count_plain(layer: nn.Module, *shape: int, **arguments: Any) -> CountBytes:
    """Counts forward and backward of a layer of torch under autograd."""
    state = torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
    layer = layer.to(torch.bfloat16)
    counted = CountBytes()
    with counted:
        output = layer(state, **arguments)
    output = output[0] if isinstance(output, tuple) else output
    gradient = torch.randn_like(output)
    with counted:
        output.backward(gradient)
    return counted


def count_llama(width: float) -> CountBytes:
    """Counts a layer of transformers' Llama."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=round(width * HIDDEN),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        attn_implementation="sdpa",
    )
    angles = torch.randn(1, TOKENS, HIDDEN // HEADS, dtype=torch.bfloat16)
    return count_plain(
        LlamaDecoderLayer(config, 0), 1, TOKENS, HIDDEN, position_embeddings=(angles, angles.clone())
    )


def count_siglip(width: float) -> CountBytes:
    """Counts a layer of transformers' SigLIP."""
    config = SiglipVisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=round(width * HIDDEN),
        num_attention_heads=HEADS,
        attn_implementation="sdpa",
    )
    return count_plain(SiglipEncoderLayer(config), 1, TOKENS, HIDDEN, attention_mask=None)


def count_own(width: float, *, gated: bool) -> CountBytes:
    """Counts a layer of our own under its hand-written backward."""
    kv_heads = KV_HEADS if gated else HEADS
    stack = Stack(
        hidden=HIDDEN,
        layers=1,
        attention=Attention(heads=HEADS, kv_heads=kv_heads, head_dim=HIDDEN // HEADS),
        mlp=Mlp(width=round(width * HIDDEN), gated=gated),
        norm="rmsnorm" if gated else "layernorm",
    )
    llm = Llm(stack=stack, vocab=8, positions=0 if gated else TOKENS)
    segments = build_layers(llm, dtype=torch.bfloat16)[1]
    sample = Sample(
        number=0,
        tokens=torch.zeros(TOKENS, dtype=torch.int64),
        labels=torch.zeros(TOKENS, dtype=torch.int64),
    )
    _, context = build_llm_inputs(llm, [sample], [], 1.0, seed=0, step=None, dtype=torch.bfloat16)
    state: tuple[Tensor, ...] = (torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16),)
    saved = []
    counted = CountBytes()
    with counted:
        for segment in segments:
            needs = tuple(True for _ in state)
            state, kept = segment.run_forward(state, needs, context, WeightGradStore())
            saved.append((segment, kept))
    gradients: Any = tuple(torch.randn_like(each) for each in state)
    with counted:
        for segment, kept in reversed(saved):
            assert kept is not None
            gradients = segment.run_backward(kept, gradients, split=False)
    return counted


@dataclass(frozen=True, kw_only=True)
class BytesFactors:
    """Counted over fused bytes, of what the cost model prices as norms and as the non-linearity."""

    norm: float  # with residuals and rotary embeddings: all that does not grow with the MLP's width
    mlp: float


COUNTED: dict[tuple[str, str], Callable[[float], CountBytes]] = {
    ("eager", "rmsnorm"): count_llama,
    ("eager", "layernorm"): count_siglip,
    ("ours", "rmsnorm"): partial(count_own, gated=True),
    ("ours", "layernorm"): partial(count_own, gated=False),
}


def count_factors(preset: str, norm: str) -> BytesFactors:
    """Counts at two widths of the MLP, over the tensors of two norms and of the non-linearity, both ways."""
    narrow, wide = (
        sum(COUNTED[preset, norm](width).bytes.values()) / (TOKENS * HIDDEN * BF16_BYTES) for width in WIDTHS
    )
    by_width = (wide - narrow) / (WIDTHS[1] - WIDTHS[0])
    fused_mlp = 3 * (3 if norm == "rmsnorm" else 2)  # gated ones have two inputs
    return BytesFactors(
        norm=(narrow - by_width * WIDTHS[0]) / (2 * (NORM_TENSORS + NORM_BACKWARD_TENSORS)),
        mlp=by_width / fused_mlp,
    )


def main() -> int:
    for preset, norm in COUNTED:
        factors = count_factors(preset, norm)
        print(f"{preset}, {norm}: norms {factors.norm:.2f}, MLP {factors.mlp:.2f}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
