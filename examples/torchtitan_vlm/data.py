"""Synthetic samples with 0 to 8 image patches each. The loader's state is one number, for any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from .model import IMAGE_TOKEN, PATCH

PATCHES = (8, 3, 0, 5)  # of samples in turn: the third has no image


class NoTokenizer(BaseTokenizer):
    """Samples are token ids already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_) -> None:
        super().__init__()

    def encode(self, *args, **kwargs) -> list[int]:
        return []

    def decode(self, *args, **kwargs) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return IMAGE_TOKEN + 1


class SyntheticImages(BaseDataLoader):
    """Yields counting sequences; the stride is also the brightness of the image before the text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_) -> None:
        self.replicas, self.replica, self.seq_len = dp_world_size, dp_rank, seq_len
        self.batch_size, self.samples = local_batch_size, 0  # samples that all replicas have taken

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor | None], Tensor]]:
        while True:
            first = self.samples + self.replica * self.batch_size
            self.samples += self.replicas * self.batch_size
            samples = [self.sample(number) for number in range(first, first + self.batch_size)]
            tokens, labels, patches = (list(values) for values in zip(*samples, strict=True))
            pixels = torch.cat(patches)
            inputs = {"input": torch.stack(tokens), "pixel_values": pixels if len(pixels) else None}
            yield inputs, torch.stack(labels)

    def sample(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        patches = PATCHES[number % len(PATCHES)]
        start, stride = torch.randint(1, 8, (2,), generator=generator).tolist()
        sequence = (start + stride * torch.arange(self.seq_len + 1)) % IMAGE_TOKEN
        sequence[:patches] = IMAGE_TOKEN
        labels = sequence[1:].clone()
        labels[:patches] = -100
        return sequence[:-1], labels, torch.randn(patches, PATCH, generator=generator) + stride

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]

    def close(self) -> None:
        pass
