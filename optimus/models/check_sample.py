"""Refuses samples that a model cannot be trained on, before they reach a device."""

from __future__ import annotations

from optimus.errors import UserError, nearest
from optimus.job.model import Model
from optimus.models.sample import Sample
from optimus.models.token_order import output_rows


def check_sample(model: Model, sample: Sample) -> None:
    """Ids inside the vocabulary, documents that fill the sample, items inside a document and side by side."""
    vocab, length = model.llm.vocab, sample.length
    for name, ids, least in (("tokens", sample.tokens, 0), ("labels", sample.labels, None)):
        if tuple(ids.shape) != (length,):
            raise _error(sample, name, tuple(ids.shape), f"do not have the shape ({length},) of the tokens")
        if length and (int(ids.max()) >= vocab or (least is not None and int(ids.min()) < least)):
            worst = int(ids.max()) if int(ids.max()) >= vocab else int(ids.min())
            raise _error(sample, name, worst, f"is outside the vocabulary of {vocab}")
    if sum(sample.spans) != length or min(sample.spans) < 1:
        raise _error(sample, "documents", sample.spans, f"do not add up to its {length} tokens")
    _check_items(model, sample)


def _check_items(model: Model, sample: Sample) -> None:
    known = {encoder.name: encoder for encoder in model.encoders}
    places: list[tuple[int, int]] = []
    for name, items in sample.items.items():
        if name not in known:
            problem = "names an encoder that the model does not have"
            raise UserError(
                field=f"items of sample {sample.number}",
                value=name,
                problem=problem,
                hint=nearest(name, known),
            )
        places += [(item.offset, item.offset + output_rows(known[name], item.grid)) for item in items]
    places.sort()
    ends = [sum(sample.spans[: number + 1]) for number in range(len(sample.spans))]
    for place, (start, end) in enumerate(places):
        if start < 0 or end > sample.length or any(start < stop < end for stop in ends):
            raise _error(sample, "items", (start, end), "are rows that do not lie inside one document")
        if place and start < places[place - 1][1]:
            raise _error(sample, "items", (start, end), "are rows of two items")


def _error(sample: Sample, what: str, value: object, problem: str) -> UserError:
    return UserError(
        field=f"{what} of sample {sample.number}",
        value=value,
        problem=problem,
        hint="correct the data set or what reads it",
    )
