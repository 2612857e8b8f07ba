"""The oracle of training: one process, one sample or item at a time, ordinary autograd.

No bins, no padding, no detached boundaries, no deferred gradients. It shares with the engine the layers and
positions, which `test_models_reference.py` compares with released implementations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from optimus.engine.build_rank import count_deepstack
from optimus.engine.optimizer_config import OptimizerConfig
from optimus.job.model import Encoder, Llm, Model
from optimus.models.build import build_layers, named_parameters
from optimus.models.microbatch_inputs import build_encoder_inputs, build_llm_inputs, find_llm_row_targets
from optimus.models.sample import PlacedItem, Sample, list_placed_items
from optimus.models.segment import Segment


def whole(
    layers: Sequence[Sequence[Segment]], state: tuple[Tensor, ...], context: object
) -> tuple[Tensor, ...]:
    """Runs all layers as one graph."""
    for segment in chain.from_iterable(layers):
        state = segment(state, context)
    return state


def parameters_by_name(
    module: Encoder | Llm, layers: Sequence[Sequence[Segment]], *, first: int = 0
) -> dict[str, nn.Parameter]:
    """Returns the parameters of a range of layers by their names in checkpoints."""
    return {name: parameter for name, parameter, _ in named_parameters(module, layers, first=first)}


def loss_scale(samples: Iterable[Sample]) -> float:
    """Returns one over the number of labels of all samples of a step."""
    return 1.0 / max(1, sum(int((sample.labels >= 0).sum()) for sample in samples))


def plain_adamw(
    named: Mapping[str, Tensor], config: OptimizerConfig
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Makes torch's AdamW with one group for each parameter, constant or with a cosine."""
    groups = []
    for name, parameter in named.items():
        module = ".".join(name.split(".")[: 2 if ".projector." in name else 1])
        own = config.modules.get(module)
        is_vector = parameter.ndim == 1
        groups.append(
            {
                "params": [parameter],
                "lr": config.lr if own is None or own.lr is None else own.lr,
                "weight_decay": 0.0 if is_vector else config.weight_decay,
            }
        )
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)
    assert not config.warmup_steps
    low = 1.0 if config.schedule == "constant" else config.min_lr / config.lr
    return adamw, LambdaLR(
        adamw, lambda step: low + (1 - low) * (1 + math.cos(math.pi * step / max(1, config.decay_steps))) / 2
    )


class OneProcess:
    """All modules of a model in one process."""

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        self.model, self.dtype, self.seed = model, dtype, seed
        self.layers = {
            module.name: build_layers(module, dtype=dtype, seed=seed, deepstack=count_deepstack(model))
            for module in model.modules
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns all parameters by global name, frozen ones too."""
        return {
            name: parameter
            for module in self.model.modules
            for name, parameter in parameters_by_name(module, self.layers[module.name]).items()
        }

    def encode(self, encoder: Encoder, placed: PlacedItem, step: int | None) -> Tensor:
        """Returns the LLM rows of one item."""
        inputs, context = build_encoder_inputs(
            encoder,
            [placed],
            placed[2].tokens,
            seed=self.seed,
            step=step,
            dtype=self.dtype,
        )
        (rows,) = whole(self.layers[encoder.name], (inputs,), context)
        return rows

    def loss(self, sample: Sample, scale: float, step: int | None) -> Tensor:
        """Returns the loss of one sample, a tensor of one element."""
        rows, targets = [], []
        for encoder in self.model.encoders:
            items = list_placed_items(sample, encoder.name)
            if items:
                rows.append(torch.cat([self.encode(encoder, placed, step) for placed in items]))
                tokens = sum(item.tokens for _, _, item in items)
                targets.append(
                    find_llm_row_targets(encoder, items, tokens, {sample.number: 0}, sample.length)
                )
        ids, context = build_llm_inputs(
            self.model.llm,
            [sample],
            targets,
            scale,
            seed=self.seed,
            step=step,
            dtype=self.dtype,
            encoders=self.model.encoders,
        )
        (loss,) = whole(self.layers["llm"], (ids, *rows), context)
        return loss

    def loss_and_gradients(self, samples: Sequence[Sample], step: int = 0) -> tuple[float, dict[str, Tensor]]:
        """Returns the loss of a step, and gradients of all trained parameters: zeros where none arrived."""
        parameters = self.parameters()
        for parameter in parameters.values():
            parameter.grad = None
            parameter.grad_dtype = torch.promote_types(self.dtype, torch.float32)
        scale, total = loss_scale(samples), 0.0
        for sample in samples:
            loss = self.loss(sample, scale, step)
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
        return total, {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in parameters.items()
            if parameter.requires_grad
        }

    def evaluate(self, samples: Sequence[Sample]) -> float:
        """Returns the mean loss of a label, without dropout."""
        with torch.no_grad():
            return sum(float(self.loss(sample, loss_scale(samples), None)) for sample in samples)

    def train(
        self,
        batches: Sequence[Sequence[Sample]],
        steps: int | None = None,
        /,
        *,
        clip: float = 0.0,
        config: OptimizerConfig,
        left_out: Sequence[int] = (),
    ) -> list[float]:
        """Runs steps of torch's AdamW over the batches in turn, by default one each; returns the losses.

        Steps that are `left_out` change nothing but the rate.
        """
        named = {name: parameter for name, parameter in self.parameters().items() if parameter.requires_grad}
        trained, (optimizer, schedule) = list(named.values()), plain_adamw(named, config)
        losses = []
        for step in range(len(batches) if steps is None else steps):
            loss, gradients = self.loss_and_gradients(batches[step % len(batches)], step)
            for name, parameter in self.parameters().items():
                parameter.grad = gradients.get(name)
            if clip:
                torch.nn.utils.clip_grad_norm_(trained, clip)
            if step not in left_out:
                optimizer.step()
            schedule.step()
            losses.append(loss)
        return losses
