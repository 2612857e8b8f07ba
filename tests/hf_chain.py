"""Runs stages and blocks of a split model one after another in one process, and compares gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimus.engine.stage_profile import StageInputs
from optimus.hf import MicrobatchInputs, SplitModel, causal_lm_loss, count_labels

CLOSE = 1e-12  # of the largest gradient


class Boundary:
    """Runs one part after another with detached states between them, and backward the other way."""

    def __init__(self, split: SplitModel) -> None:
        self.split = split
        self.calls: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []

    def call(self, name: str, index: int, inputs: tuple[Tensor, ...], batch: Any) -> tuple[Tensor, ...]:
        parts = self.split.stages if name == "llm" else self.split.encoders[name]
        outputs = parts[index](*inputs, **batch.kwargs)
        expected = self.split.shapes[name](index, batch)
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


def run_encoder(chain: Boundary, name: str, batch: StageInputs | None) -> tuple[Tensor, ...]:
    if batch is None:
        return no_rows(chain.split, name)
    state = batch.args
    for index in range(len(chain.split.encoders[name])):
        state = chain.call(name, index, state, batch)
    return state


def run_step(split: SplitModel, batches: list[MicrobatchInputs]) -> float:
    """Runs forward and backward of all microbatches; returns the batch's loss."""
    count = count_labels(batches)
    weight = split.router_weight(count, len(batches))
    total = 0.0
    for batch in batches:
        chain = Boundary(split)
        rows = [row for name in split.encoders for row in run_encoder(chain, name, batch.encoders[name])]
        state = (*batch.args, *rows)
        for index in range(len(split.stages)):
            state = chain.call("llm", index, state, batch)
        assert batch.target is not None
        loss = causal_lm_loss(*state, batch.target, router_weight=weight) / count
        if loss.requires_grad:
            loss.backward()
            chain.backward()
        total += float(loss.detach())
    return total


def gradients(split: SplitModel) -> dict[str, Tensor]:
    named: dict[Any, str] = {}  # a tied parameter has the name of its embedding
    for part in parts_of(split):
        for name, parameter in part.named_parameters():
            named.setdefault(parameter, name.removeprefix("hf."))
    return {name: p.grad for p, name in named.items() if p.grad is not None}


def compare(loss: float, grads: dict[str, Tensor], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert loss == pytest.approx(expected[0], rel=CLOSE)
    unused = set(grads) - set(expected[1])  # that a pipeline gives zeros
    assert set(expected[1]) <= set(grads)
    assert not any(bool(grads[name].any()) for name in unused), unused
    scale = max(float(grad.abs().max()) for grad in expected[1].values())
    errors = {name: float((grads[name] - grad).abs().max()) / scale for name, grad in expected[1].items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < CLOSE, f"{worst}: {errors[worst]}"


def run_forward(split: SplitModel, document: dict[str, Any]) -> tuple[Tensor, ...]:
    batch, chain = split.inputs(document), Boundary(split)
    state = (
        *batch.args,
        *(row for name in split.encoders for row in run_encoder(chain, name, batch.encoders[name])),
    )
    for index in range(len(split.stages)):
        state = chain.call("llm", index, state, batch)
    return tuple(output.detach() for output in state)


def parts_of(split: SplitModel) -> list[nn.Module]:
    return [*split.stages, *(block for blocks in split.encoders.values() for block in blocks)]
