"""Tiny models of transformers as jobs of our own layers: folders, samples and gradients by our names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import hf_models
import torch
from engine_cases import Case
from hf_models import IMAGE, VIDEO
from torch import Tensor

from optimus.engine.batch_plan import SampleSizes
from optimus.hf.own_layers import FAMILY_MAPS, LayerTensor
from optimus.job.hf_config import read_hf_config
from optimus.job.job import Job
from optimus.job.model import Model
from optimus.job.workload import PackedSequence, Workload
from optimus.models.sample import IGNORE_INDEX, ItemKeys, Sample, SampleItem

ALIGNMENT = 8  # of lengths: two chunks for each of two cp ranks, on two tp ranks each


def save_folder(case: str, folder: Path, dtype: torch.dtype) -> None:
    """Writes a model as transformers does, in several files."""
    model = hf_models.build(case, dtype=dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size="60KB")


def read_model(folder: Path) -> Model:
    model = read_hf_config(folder / "config.json")
    encoders = tuple(replace(encoder, recompute="none") for encoder in model.encoders)
    return replace(model, encoders=encoders, llm=replace(model.llm, recompute="none"))


class Documents:
    """The microbatches of `hf_models` as samples of one length, over and over; ends are padding."""

    def __init__(self, case: str) -> None:
        self.samples = [_packed(docs) for docs in hf_models.documents(case)]
        self.length = -(-max(sample.length for sample in self.samples) // ALIGNMENT) * ALIGNMENT

    def sizes(self, number: int) -> SampleSizes:
        items = {name: tuple(i.tokens for i in items) for name, items in self.sample(number).items.items()}
        return SampleSizes(number=number, items=items)

    def labels(self, number: int) -> int:
        return int((self.sample(number).labels >= 0).sum())

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        sample = self.samples[number % len(self.samples)]
        rest = self.length - sample.length
        return Sample(
            number=number,
            tokens=torch.cat((sample.tokens, torch.zeros(rest, dtype=torch.int64))),
            labels=torch.cat((sample.labels, torch.full((rest,), IGNORE_INDEX))),
            items=sample.items,
            documents=(*sample.documents, *((rest,) if rest else ())),
        )

    def workload(self, merge: int) -> Workload:
        sequences = []
        for sample in self.samples:
            lengths = tuple(item.tokens // merge for item in sample.items["vision"])
            text = self.length - sum(lengths)
            sequences.append(PackedSequence(text=text, items=(("vision", lengths),)))
        count = len(self.samples)
        return Workload(sequence_tokens=self.length, sequences_per_step=count, sequences=tuple(sequences))


def _packed(documents: list[dict[str, Any]]) -> Sample:
    """Returns documents one after another; rows of a padded document are documents without padding."""
    items, tokens, labels, start = [], list[Tensor](), list[Tensor](), 0
    for document in documents:
        images, videos = iter(_images(document)), iter(_videos(document))
        frames = list[int]()  # first tokens of frames of a video with text between them
        mask = document.get("attention_mask", torch.ones_like(document["input_ids"])).bool()
        for ids, targets, kept in zip(document["input_ids"], document["labels"], mask, strict=True):
            tokens.append(ids[kept])
            labels.append(torch.cat((targets[kept][1:], torch.tensor([IGNORE_INDEX]))))
            for at in range(1, len(tokens[-1])):
                if int(ids[at]) not in (IMAGE, VIDEO) or ids[at - 1] == ids[at]:
                    continue
                if ids[at] == IMAGE or "second_per_grid_ts" in document:
                    item = next(images if ids[at] == IMAGE else videos)
                    items.append(replace(item, offset=start + at))
                    continue
                frames.append(start + at)
                if len(frames) == 1:
                    video = next(videos)
                if len(frames) == video.grid[0]:
                    items.append(replace(video, offset=frames[0], frame_offsets=tuple(frames)))
                    frames.clear()
            start += len(tokens[-1])
    return Sample(
        number=0,
        tokens=torch.cat(tokens),
        labels=torch.cat(labels),
        items={"vision": tuple(items)},
        documents=tuple(map(len, tokens)),
    )


def _images(document: dict[str, Any]) -> Iterator[SampleItem]:
    if "pixel_values" in document and "image_grid_thw" not in document:
        for image in document["pixel_values"]:  # channels, rows, columns; patches of 4 x 4
            patches = image.unflatten(1, (4, 4)).unflatten(3, (4, 4)).permute(1, 3, 0, 2, 4)
            yield SampleItem(offset=0, grid=(4, 4), inputs=patches.flatten(2).flatten(0, 1))
        return
    yield from _grids(document, "pixel_values", "image_grid_thw")


def _videos(document: dict[str, Any]) -> Iterator[SampleItem]:
    for video in _grids(document, "pixel_values_videos", "video_grid_thw"):
        seconds = document.get("second_per_grid_ts", [1.0])  # Qwen3-VL has times as text between frames
        yield replace(video, seconds_per_frame=float(seconds[0]))


def _grids(document: dict[str, Any], pixels: str, grids: str) -> Iterator[SampleItem]:
    """Yields items in raster order; transformers has merge groups one after another."""
    start = 0
    for frames, height, width in document[grids].tolist() if grids in document else ():
        count = frames * height * width
        rows = document[pixels][start : start + count]
        groups = rows.reshape(frames, height // 2, width // 2, 2, 2, -1)
        grid = (height, width) if grids == "image_grid_thw" else (frames, height, width)
        yield SampleItem(offset=0, grid=grid, inputs=groups.transpose(2, 3).reshape(count, -1))
        start += count


def as_ours(model: Model, tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Returns tensors of transformers under our names and in our shapes."""
    joined = {n: torch.cat([tensors[t] for t in FAMILY_MAPS[model.family].theirs(n)]) for n in names}
    return {
        name: tensor.flatten(1) if name == "vision.patches.weight" else tensor
        for name, tensor in joined.items()
    }


def whole_tensors(parameters: dict[str, Any]) -> list[LayerTensor]:
    """Returns all parameters of one process."""
    return [LayerTensor(name=name, tensor=p.detach()) for name, p in parameters.items()]


@dataclass(frozen=True, kw_only=True)
class OwnCase(Case):
    """A tiny model of transformers with its own batch, read from a folder."""

    model: str
    folder: Path

    @cached_property
    def documents(self) -> Documents:
        return Documents(self.model)

    @cached_property
    def job(self) -> Job:
        job: Job = Case.job.func(self)  # type: ignore[attr-defined]
        model = read_model(self.folder)
        workload = self.documents.workload(model.encoders[0].projector.merge)
        assert workload.sequences_per_step == self.microbatches
        return replace(job, model=model, workload=workload)
