"""Runs of the torchtitan example with more of torchtitan switched on, for `--module torchtitan_variants`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.components.validate import Validator
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan_vlm.config_registry import image_shapes, small
from torchtitan_vlm.data import PATCHES, SyntheticImages

from optimus.integrations.torchtitan import Encoder, fill_pipeline


class ValidationImages(SyntheticImages):  # type: ignore[misc]
    """Samples that all have images: torchtitan's validator moves every input to the device."""

    @dataclass(kw_only=True, slots=True)
    class Config(SyntheticImages.Config):  # type: ignore[misc]
        infinite: bool = True

    def sample(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        sample: tuple[Tensor, Tensor, Tensor] = super().sample(1000 + number * len(PATCHES))
        return sample


def recomputed() -> Any:
    """Returns a run with activation checkpointing and validation after every second step."""
    config = small()
    config.activation_checkpoint = FullAC.Config()
    config.validator = Validator.Config(enable=True, freq=2, steps=1, dataloader=ValidationImages.Config())
    return config


def planned() -> Any:
    """Returns a run that writes its plan, or uses the one that is there."""
    config = small()
    images = Encoder(blocks="vision", inputs=["pixel_values"], shapes=image_shapes)
    config.model_spec.pipelining_fn = fill_pipeline({"images": images}, plan="plan.json")
    return config
