"""Cuts images into patches with the image processor of a model, and finds their grids from sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import isqrt
from typing import Any

from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from optimus.data.jsonl_file import SkippedSample, SkipReason
from optimus.data.token_counts import PROBES
from optimus.job.model import Encoder

CHANNELS = 3
MIN_SIDE = 8  # pixels; processors may take a shorter side for the channels

Grid = tuple[int, ...]  # height and width in patches


class ImagePatches:
    """Patches of images, as one encoder reads them."""

    def __init__(self, encoder: Encoder, processor: Any) -> None:
        self._encoder, self._processor = encoder, processor

    def cut(self, images: Sequence[Image.Image]) -> list[tuple[Grid, Tensor]]:
        """Returns grid and patches of every image; raises SkippedSample if the processor refuses one."""
        if not images:
            return []
        try:
            output = self._processor(images=list(images), return_tensors="pt")
        except Exception as error:  # of the processor, on hostile pixels
            raise SkippedSample(SkipReason.PROCESSOR, f"{type(error).__name__}: {error}") from None
        return list(split_patches(self._encoder, output))

    def find_grid(self, height: int, width: int) -> Grid | None:
        """Returns the grid of an image of this size; None where only the processor itself knows it."""
        if min(height, width) < MIN_SIDE or not self._has_known_sizes:
            return None
        try:
            return self._compute_grid(height, width)
        except ValueError:  # a size that the processor refuses
            return None

    @cached_property
    def _has_known_sizes(self) -> bool:
        """Tells whether the processor resizes images as `_compute_grid` expects, at all probes."""
        try:
            return all(
                self.cut([Image.new("RGB", (width, height))])[0][0] == self._compute_grid(height, width)
                for height, width in PROBES
            )
        except (SkippedSample, AttributeError, KeyError, TypeError, ValueError):
            return False

    def _compute_grid(self, height: int, width: int) -> Grid:
        size = self._processor.size
        if hasattr(self._processor, "merge_size"):  # of Qwen: about as many pixels as the image has
            side = self._processor.patch_size
            factor = side * self._processor.merge_size
            resized = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
        else:
            side = isqrt(self._encoder.patch_inputs // CHANNELS)
            resized = size["height"], size["width"]
        return resized[0] // side, resized[1] // side


def split_patches(encoder: Encoder, output: Any) -> Iterator[tuple[Grid, Tensor]]:
    """Yields grid and patches, in raster order, of every image that an image processor has prepared."""
    pixels: Tensor = output["pixel_values"]
    if "image_grid_thw" not in output:  # (images, channels, rows, columns)
        side = isqrt(encoder.patch_inputs // pixels.shape[1])
        for image in pixels:
            patches = image.unflatten(1, (-1, side)).unflatten(3, (-1, side)).permute(1, 3, 0, 2, 4)
            yield tuple(patches.shape[:2]), patches.flatten(2).flatten(0, 1)
        return
    side, begin = isqrt(encoder.projector.merge), 0
    for frames, height, width in output["image_grid_thw"].tolist():  # rows of a merge group are adjacent
        assert frames == 1, "an image has one frame"
        rows = pixels[begin : begin + height * width]
        groups = rows.reshape(height // side, width // side, side, side, -1)
        yield (height, width), groups.transpose(1, 2).reshape(height * width, -1)
        begin += height * width
