"""Compares chained stages and blocks with one process of unmodified transformers, in float64."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from torch import Tensor, nn

from optimus.hf.inputs import EncoderInputs, MicrobatchInputs, count_labels, pack_documents
from optimus.hf.split import SplitModel, split_model

CLOSE = 1e-12  # of the largest gradient
BLOCKS = {"vision": [1, 2, 1], "audio": [1, 2, 1]}


class Boundary:
    """Runs one part after another with detached states between them, and backward the other way."""

    def __init__(self, split: SplitModel) -> None:
        self.split = split
        self.calls: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []

    def call(self, name: str, index: int, inputs: tuple[Tensor, ...], batch: Any) -> tuple[Tensor, ...]:
        parts = self.split.stages if name == "llm" else self.split.encoders[name]
        outputs = parts[index](*inputs, **batch.kwargs)
        expected = self.split.shapes[name](index, batch.args, batch.kwargs)
        assert [tuple(output.shape) for output in outputs] == expected, f"{name} {index}"
        detached = tuple(output.detach().requires_grad_() for output in outputs)
        self.calls.append((outputs, detached))
        return detached

    def backward(self) -> None:
        for outputs, detached in reversed(self.calls):
            pairs = [
                (output, leaf.grad)
                for output, leaf in zip(outputs, detached, strict=True)
                if leaf.grad is not None and output.requires_grad
            ]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def no_rows(split: SplitModel, name: str) -> tuple[Tensor, ...]:
    width = split.model.config.get_text_config().hidden_size
    levels = sum(len(block.deepstack) for block in split.encoders[name])
    return tuple(torch.zeros(0, width, dtype=split.model.dtype) for _ in range(1 + levels))


def run_encoder(chain: Boundary, name: str, batch: EncoderInputs | None) -> tuple[Tensor, ...]:
    if batch is None:
        return no_rows(chain.split, name)
    state = batch.args
    for index in range(len(chain.split.encoders[name])):
        state = chain.call(name, index, state, batch)
    return state


def run_step(split: SplitModel, batches: list[MicrobatchInputs]) -> float:
    """Runs forward and backward of all microbatches; returns the batch's loss."""
    loss_fn = split.loss(count_labels(batches), len(batches))
    total = 0.0
    for batch in batches:
        chain = Boundary(split)
        rows = [row for name in split.encoders for row in run_encoder(chain, name, batch.encoders[name])]
        state = (*batch.args, *rows)
        for index in range(len(split.stages)):
            state = chain.call("llm", index, state, batch)
        assert batch.target is not None
        loss = loss_fn(*state, batch.target)
        loss.backward()
        chain.backward()
        total += float(loss.detach())
    return total


def gradients(split: SplitModel) -> dict[str, Tensor]:
    parts: list[nn.Module] = [*split.stages, *(b for blocks in split.encoders.values() for b in blocks)]
    named: dict[Any, str] = {}  # a tied parameter has the name of its embedding
    for part in parts:
        for name, parameter in part.named_parameters():
            named.setdefault(parameter, name.removeprefix("hf."))
    return {name: p.grad for p, name in named.items() if p.grad is not None}


def compare(loss: float, grads: dict[str, Tensor], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert loss == pytest.approx(expected[0], rel=CLOSE)
    assert set(grads) == set(expected[1])
    scale = max(float(grad.abs().max()) for grad in expected[1].values())
    errors = {name: float((grads[name] - grad).abs().max()) / scale for name, grad in expected[1].items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < CLOSE, f"{worst}: {errors[worst]}"


def check_split(case: str, stages: list[int], blocks: dict[str, list[int]], **options: Any) -> None:
    split = split_model(hf_models.build(case, **options), stages=stages, blocks=blocks)
    loss = run_step(split, [split.inputs(batch) for batch in hf_models.microbatches(case)])
    expected = hf_models.reference(case, hf_models.build(case, **options), packed="attention" in options)
    compare(loss, gradients(split), expected)


def blocks_of(case: str) -> dict[str, list[int]]:
    names = {"qwen2_audio": ["audio"]}.get(case, ["vision"])
    return {name: BLOCKS[name] for name in names}


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", hf_models.CASES)
def test_stages_and_blocks_give_the_gradients_of_one_process(case: str) -> None:
    check_split(case, [1, 2, 1], blocks_of(case))


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", hf_models.CASES)
def test_whole_towers_with_eager_attention_do_too(case: str) -> None:
    check_split(case, [3, 1], {}, attention="eager")


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", hf_models.PACKED)
def test_packed_documents_do_not_see_each_other(case: str) -> None:
    split = split_model(hf_models.build(case), stages=[2, 2], router_loss=False)
    documents = next(docs for docs in hf_models.documents(case) if len(docs) > 1)
    packed = run_forward(split, pack_documents(split.model, documents))
    alone = torch.cat([run_forward(split, document) for document in documents], 1)
    assert float((packed - alone).abs().max()) < 1e-6 * float(alone.abs().max())  # norms sum in float32


def run_forward(split: SplitModel, document: dict[str, Any]) -> Tensor:
    batch, chain = split.inputs(document), Boundary(split)
    state = (
        *batch.args,
        *(row for name in split.encoders for row in run_encoder(chain, name, batch.encoders[name])),
    )
    for index in range(len(split.stages)):
        state = chain.call("llm", index, state, batch)
    return state[0].detach()
