"""A Llama 3 of torchtitan with a vision encoder, whose rows take the places of image tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _LINEAR_INIT,
    _NORM_INIT,
    _build_llama3_layers,
    _output_linear_init,
)
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.module import Module, ModuleDict

DIM, HEADS, LAYERS, BLOCKS = 64, 4, 6, 4
VOCAB, IMAGE_TOKEN = 256, 255
PATCH = 48  # values of an image patch


class VisionBlock(Module):
    """A residual MLP; the first one also embeds patches."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        norm: RMSNorm.Config
        up: Linear.Config
        down: Linear.Config
        embed: Linear.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = None if config.embed is None else config.embed.build()
        self.norm, self.up, self.down = config.norm.build(), config.up.build(), config.down.build()

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x.to(self.embed.weight.dtype))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class VLM(Llama3Model):
    """In a pipeline the first stage gets `rows` of the encoder; without one the model encodes pixels."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        vision: list = field(default_factory=list)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.vision = ModuleDict({str(at): block.build() for at, block in enumerate(config.vision)})

    def encode(self, rows: Tensor) -> Tensor:
        for block in self.vision.values():
            rows = block(rows)
        return rows

    def forward(self, tokens, rows=None, positions=None, attention_masks=None, pixel_values=None):
        h = tokens
        if self.tok_embeddings is not None:
            h = self.tok_embeddings(tokens)
            if pixel_values is not None:
                rows = self.encode(pixel_values)
            if rows is not None:
                h = h.masked_scatter((tokens == IMAGE_TOKEN).unsqueeze(-1), rows.to(h.dtype))
        for layer in self.layers.values():
            h = layer(h, attention_masks, positions)
        h = h if self.norm is None else self.norm(h)
        return h if self.lm_head is None else self.lm_head(h)


def _linear(in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features, param_init=_LINEAR_INIT)


def _norm() -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=DIM, param_init=_NORM_INIT)


def _vision_block(number: int) -> VisionBlock.Config:
    embed = _linear(PATCH, DIM) if number == 0 else None
    return VisionBlock.Config(norm=_norm(), up=_linear(DIM, 4 * DIM), down=_linear(4 * DIM, DIM), embed=embed)


def vlm_config() -> VLM.Config:
    """Returns the configuration of the whole model."""
    layers = _build_llama3_layers(
        n_layers=LAYERS,
        dim=DIM,
        n_heads=HEADS,
        hidden_dim=4 * DIM,
        attn_backend="varlen",
        rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=4096, theta=500000, scaling="none"),
    )
    for layer in layers:  # torchtitan refuses "sdpa" by name, and its other backends do not train on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return VLM.Config(
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=_EMBEDDING_INIT),
        norm=_norm(),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=_output_linear_init(DIM)),
        layers=layers,
        vision=[_vision_block(number) for number in range(BLOCKS)],
    )
