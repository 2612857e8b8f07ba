"""A toy vision-language model in plain PyTorch: encoder blocks, and an LLM in two stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, TOKENS, PATCHES, VOCABULARY = 64, 32, 16, 128


class Block(nn.Module):
    """A residual MLP over tokens."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def encoder_blocks() -> list[nn.Module]:
    """Patches of 12 numbers to rows of the LLM's width."""
    return [nn.Linear(12, WIDTH), Block(), Block(), Block()]


class FirstStage(nn.Module):
    """Embeds tokens, puts image rows in front, runs half of the LLM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(Block(), Block())

    def forward(self, tokens: Tensor, rows: Tensor) -> Tensor:
        return self.blocks(torch.cat([rows, self.embedding(tokens)], dim=1))


class LastStage(nn.Module):
    """The other half of the LLM, and logits of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)[:, PATCHES:])


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the text."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_batch(step: int, samples: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, images and labels; the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (samples, TOKENS), generator=generator)
    images = torch.randn(samples, PATCHES, 12, generator=generator)
    return tokens, images, torch.randint(VOCABULARY, (samples, TOKENS), generator=generator)
