"""Tiny models of every kind, built, and random samples for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from optimus.job.attention import Attention, Rope
from optimus.job.model import Encoder, Llm, Mlp, Model, Projector, Stack
from optimus.models.build import build_layers
from optimus.models.sample import IGNORE_INDEX, PlacedItem, Sample, SampleItem
from optimus.models.segment import Segment

DTYPE = torch.float64
Layers = Sequence[Sequence[Segment]]
HIDDEN, HEAD_DIM = 16, 8
VOCAB = 29
_GATED = Mlp(width=24)
_PLAIN = Mlp(width=24, gated=False, bias=True)


def _stack(
    *,
    hidden: int = HIDDEN,
    layers: int = 2,
    mlp: Mlp = _GATED,
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm",
    dropout: bool = False,
    **attention: Any,
) -> Stack:
    heads = {"heads": hidden // HEAD_DIM, "kv_heads": hidden // HEAD_DIM, "head_dim": HEAD_DIM}
    return Stack(
        hidden=hidden,
        layers=layers,
        attention=Attention(**{**heads, **attention}),
        mlp=mlp,
        norm=norm,
        dropout=dropout,
    )


LLMS: Mapping[str, Llm] = {
    "llama": Llm(stack=_stack(hidden=32, kv_heads=2), vocab=VOCAB),
    "qwen": Llm(
        stack=_stack(
            hidden=32,
            kv_heads=1,
            bias=True,
            output_bias=False,
            qk_norm=True,
            rope=Rope(theta=500.0, sections=(2, 1, 1)),
        ),
        vocab=VOCAB,
    ),
    "gpt": Llm(
        stack=_stack(
            bias=True,
            norm="layernorm",
            dropout=True,
            mlp=replace(_PLAIN, activation="gelu_pytorch_tanh"),
        ),
        vocab=VOCAB,
        tied=True,
        positions=64,
    ),
}

ENCODERS: Mapping[str, Encoder] = {
    "windows": Encoder(
        name="vision",
        stack=_stack(layers=3, bias=True, causal=False, window_tokens=16, full_layers=(1,)),
        projector=Projector(widths=(20, HIDDEN), merge=4),
        patch_inputs=6,
    ),
    "learned": Encoder(
        name="vision",
        stack=_stack(layers=2, norm="layernorm", bias=True, causal=False, dropout=True, mlp=_PLAIN),
        projector=Projector(widths=(HIDDEN,), merge=4, concatenates=False, bias=False),
        patch_inputs=6,
        positions=100,
    ),
    "sound": Encoder(
        name="audio",
        modality="audio",
        stack=_stack(layers=2, norm="layernorm", bias=True, causal=False, mlp=_PLAIN),
        projector=Projector(widths=(HIDDEN, HIDDEN), merge=2),
        patch_inputs=5,
    ),
    "windowed sound": Encoder(
        name="audio",
        modality="audio",
        stack=_stack(layers=1, norm="layernorm", causal=False, dropout=True, window_tokens=4, mlp=_PLAIN),
        projector=Projector(widths=(HIDDEN,), merge=2),
        patch_inputs=5,
        positions=40,
    ),
}
GRIDS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "vision": ((4, 4), (6, 4), (2, 10), (2, 4, 4)),
    "audio": ((6,), (10,), (4,)),
}


def tiny_model(
    llm: str = "llama", encoders: Sequence[str] = ("windows", "sound"), *, trained: bool = True
) -> Model:
    """Returns an LLM of `LLMS` with encoders of `ENCODERS` that feed it; or with frozen trunks."""
    of_llm = LLMS[llm]
    found = []
    for name in encoders:
        encoder = ENCODERS[name]
        widths = (*encoder.projector.widths[:-1], of_llm.stack.hidden)
        found.append(replace(encoder, projector=replace(encoder.projector, widths=widths), train=trained))
    return Model(name="tiny", encoders=tuple(found), llm=of_llm)


def random_samples(
    model: Model, count: int, *, seed: int = 0, length: int = 40, first: int = 0, documents: bool = False
) -> list[Sample]:
    """Returns samples with zero to two items per encoder; the first sample has none."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, size: tuple[int, ...] = ()) -> torch.Tensor:
        return torch.randint(high, size, generator=generator)

    samples = []
    for number in range(first, first + count):
        labels = draw(VOCAB, (length,))
        labels[draw(length, (5,))] = IGNORE_INDEX
        items: dict[str, tuple[SampleItem, ...]] = {}
        at = 1
        for encoder in model.encoders:
            mine = []
            for _ in range(0 if number == 0 else int(draw(3))):
                grids = GRIDS[encoder.name]
                grid = grids[int(draw(len(grids)))]
                rows = prod(grid) // encoder.projector.merge
                if at + rows >= length // 2 + (0 if documents else length // 2):
                    break
                size = (rows * encoder.projector.merge, encoder.patch_inputs)
                inputs = torch.randn(size, generator=generator, dtype=torch.float64)
                mine.append(SampleItem(offset=at, grid=grid, inputs=inputs))
                labels[at - 1 : at + rows - 1] = IGNORE_INDEX
                at += rows + 1
            items[encoder.name] = tuple(mine)
        spans = (length // 2, length - length // 2) if documents else ()
        tokens = draw(VOCAB, (length,))
        samples.append(Sample(number=number, tokens=tokens, labels=labels, items=items, documents=spans))
    return samples


def build(name: str, **where: Any) -> tuple[Encoder | Llm, Layers]:
    module: Encoder | Llm
    if name in LLMS:
        module = LLMS[name]
    elif name == "frozen llm":
        module = replace(LLMS["llama"], train=False)
    elif name == "frozen trunk":
        module = replace(ENCODERS["windows"], train=False)
    elif name == "frozen projector":
        windows = ENCODERS["windows"]
        module = replace(windows, projector=replace(windows.projector, train=False))
    else:
        module = ENCODERS[name]
    return module, build_layers(module, dtype=DTYPE, **where)


def images(encoder: Encoder, count: int = 3) -> list[PlacedItem]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for number, grid in enumerate(GRIDS[encoder.name][:count]):
        size = (int(torch.tensor(grid).prod()), encoder.patch_inputs)
        inputs = torch.randn(size, generator=generator, dtype=DTYPE)
        found.append((7 + number // 2, number % 2, SampleItem(offset=0, grid=grid, inputs=inputs)))
    return found


def close(first: Tensor, second: Tensor, error: float = 1e-13) -> bool:
    """Compares within an error relative to the second tensor's scale."""
    first, second = first.detach(), second.detach()
    assert first.shape == second.shape
    scale = max(float(second.abs().max()), 1e-300) if second.numel() else 1.0
    return float((first - second).abs().max() if second.numel() else 0.0) <= error * scale
