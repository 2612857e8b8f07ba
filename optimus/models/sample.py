"""What a model is trained on: token sequences, and the images and sounds that stand in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

from torch import Tensor

IGNORED = -100  # a label that nothing is asked of; every negative label is taken for it


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """One image, video or sound of a sample.

    `grid` is (height, width) in patches, (frames, height, width) for a video, or (frames,) for a sound.
    """

    offset: int  # place of its first LLM token in the sample
    grid: tuple[int, ...]
    inputs: Tensor  # (tokens, patch_inputs), in raster order

    @property
    def tokens(self) -> int:
        """Of the encoder."""
        return prod(self.grid)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One sequence of a batch. Row i is asked for `labels[i]`: labels are already shifted."""

    number: int  # of all samples of the run; dropout masks depend on it
    tokens: Tensor  # int64 (length,); what stands where an encoder's tokens go is not looked at
    labels: Tensor  # int64 (length,), IGNORED where nothing is asked
    items: Mapping[str, tuple[Item, ...]] = field(default_factory=lambda: MappingProxyType({}))
    documents: tuple[int, ...] = ()  # lengths of packed documents; none: the sample is one

    @property
    def length(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def spans(self) -> tuple[int, ...]:
        """Runs of rows that attend to themselves."""
        return self.documents or (self.length,)


Placed = tuple[int, int, Item]  # number of its sample, number of the item in it, the item


def placed_items(sample: Sample, encoder: str) -> list[Placed]:
    """The items of a sample that one encoder works on, as bins hold them."""
    return [(sample.number, number, item) for number, item in enumerate(sample.items.get(encoder, ()))]


def loss_scale(samples: Iterable[Sample]) -> float:
    """One over the number of labels that are asked for; of all samples of a step."""
    return 1.0 / max(1, sum(int((sample.labels >= 0).sum()) for sample in samples))
