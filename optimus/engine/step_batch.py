"""Splits a batch into microbatches, as torch's schedules do, and derives the specs of their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor

from optimus.engine.p2p import TensorSpec
from optimus.engine.stage_profile import ProfiledStages, StageInputs, make_inputs
from optimus.engine.stage_segments import DealtRows, MicrobatchContext
from optimus.errors import UserError
from optimus.ir.plan import Plan, PlannedModule
from optimus.ir.ranks import LLM
from optimus.models.segment import State

# Returns the shapes of a stage's or block's outputs, from its number and the inputs of a microbatch.
OutputShapes = Callable[[int, StageInputs], Sequence[Sequence[int]]]


class StepBatch:
    """The data of one step, split into microbatches, and the specs of outputs for them."""

    profiles: ProfiledStages

    def __init__(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        shapes: Mapping[str, OutputShapes],
        *,
        target: Any,
        num_items: float | Tensor | None,
        loss_kwargs: Mapping[str, Any],
        keeps_output: bool,
        deal: Sequence[Mapping[str, DealtRows]] = (),
    ) -> None:
        count, self._plan, self._shapes = plan.microbatches, plan, shapes
        self._inputs: dict[str, list[StageInputs | None]] = {
            name: _split_encoder_inputs(name, kwargs[name], count * module.microbatches_per_llm_microbatch)
            for name, module in plan.encoders.items()
        }
        llm_kwargs = {name: value for name, value in kwargs.items() if name not in plan.encoders}
        self._inputs[LLM] = list(_split_stage_inputs(args, llm_kwargs, count))
        self._targets = _split("target", target, count)
        self._loss_options = {
            "num_items": count * plan.ranks.llm.dp if num_items is None else num_items,
            "loss_kwargs": loss_kwargs,
            "keeps_output": keeps_output,
        }
        self._deal = deal
        self._specs: dict[tuple[str, int, int], tuple[TensorSpec, ...]] = {}

    def stage_inputs(self, module: str, microbatch: int) -> StageInputs | None:
        return self._inputs[module][microbatch]

    def inputs(self, module: str, microbatch: int) -> State:
        inputs = self._inputs[module][microbatch]
        return () if inputs is None else inputs.args

    def context(self, module: str, microbatch: int) -> MicrobatchContext:
        options: dict[str, Any] = {}
        if module == LLM:
            options = {"target": self._targets[microbatch], **self._loss_options}
            options["deal"] = self._find_dealt_rows(microbatch) if self._deal else ()
        specs = partial(self.output_specs, module, microbatch)
        return MicrobatchContext(inputs=self._inputs[module][microbatch], output_specs=specs, **options)

    def _find_dealt_rows(self, microbatch: int) -> list[tuple[DealtRows, tuple[TensorSpec, ...]]]:
        dealt = self._deal[microbatch]
        return [(dealt[name], self.profiles.encoders[name][-1].output) for name in self._plan.encoders]

    def find_complete_microbatch(self) -> int | None:
        """Returns the first LLM microbatch for which every encoder has inputs."""
        for number in range(self._plan.microbatches):
            if all(
                any(self._inputs[name][each] is not None for each in module.microbatches_of(number))
                for name, module in self._plan.encoders.items()
            ):
                return number
        return None

    def check_signatures(self) -> None:
        """Raises if microbatches differ in shape, and nothing says what shapes that leads to."""
        for module, microbatches in self._inputs.items():
            profiled = self.profiles.signatures[module]
            for number, inputs in enumerate(microbatches):
                if inputs is None or module in self._shapes or inputs.signature == profiled:
                    continue
                raise UserError(
                    field=f"step: {module} microbatch {number}",
                    problem=f"has shapes {inputs.signature}, and the first had {profiled}",
                    hint=f"give FillSchedule a function shapes[{module!r}], or pad to equal shapes",
                )

    def output_specs(self, module: str, microbatch: int, number: int) -> tuple[TensorSpec, ...]:
        """Returns the specs of the outputs of a stage or block."""
        key = module, microbatch, number
        if key not in self._specs:
            self._specs[key] = self._find_specs(*key)
        return self._specs[key]

    def _find_specs(self, module: str, microbatch: int, number: int) -> tuple[TensorSpec, ...]:
        profiles = self.profiles.stages if module == LLM else self.profiles.encoders[module]
        specs, inputs = profiles[number].output, self._inputs[module][microbatch]
        if inputs is None:
            return tuple(spec.with_rows(0) for spec in specs)
        if module not in self._shapes:
            return specs
        shapes = [tuple(shape) for shape in self._shapes[module](number, inputs)]
        if len(shapes) != len(specs):
            raise UserError(
                field=f"shapes[{module!r}]",
                problem=f"returned {len(shapes)} shapes for the {len(specs)} outputs of number {number}",
                hint="return one shape per output",
            )
        pairs = zip(shapes, specs, strict=True)
        return tuple(TensorSpec(shape=shape, dtype=spec.dtype) for shape, spec in pairs)


class StepSpecs:
    """Message specs of the step that runs."""

    batch: StepBatch

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def stage_input(self, module: str, virtual: int, microbatch: int) -> tuple[TensorSpec, ...]:
        first = virtual if module == LLM else find_block_range(self._plan.modules[module], virtual)[0]
        return self.batch.output_specs(module, microbatch, first - 1)

    def encoder_rows(self, module: str, microbatch: int) -> tuple[TensorSpec, ...]:
        last = find_block_range(self._plan.modules[module], self._plan.modules[module].layout.pp - 1)[1] - 1
        return self.batch.output_specs(module, microbatch, last)


def find_block_range(module: PlannedModule, stage: int) -> tuple[int, int]:
    """Returns the first and end block of an encoder stage."""
    ends = [0, *accumulate(chunk.layers for chunk in module.chunks)]
    return ends[stage], ends[stage + 1]


def _split_stage_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], microbatches: int, prefix: str = ""
) -> list[StageInputs]:
    """Splits arguments of a whole batch into those of its microbatches."""
    positional = [_split(f"{prefix}argument {at}", value, microbatches) for at, value in enumerate(args)]
    keywords = {name: _split(prefix + name, value, microbatches) for name, value in kwargs.items()}
    return [
        StageInputs(
            args=tuple(values[number] for values in positional),
            kwargs={name: values[number] for name, values in keywords.items()},
        )
        for number in range(microbatches)
    ]


def _split_encoder_inputs(name: str, value: Any, microbatches: int) -> list[StageInputs | None]:
    """Splits the inputs of an encoder: tensors of the whole batch, or a list of entries per microbatch."""
    if value is None or isinstance(value, list | Tensor):
        return [make_inputs(entry) for entry in _split(name, value, microbatches)]
    inputs = make_inputs(value)
    assert inputs is not None
    return list(_split_stage_inputs(inputs.args, inputs.kwargs, microbatches, prefix=f"{name} "))


def _split(name: str, value: Any, microbatches: int) -> list[Any]:
    """Splits a tensor along its first dimension; a list has one entry per microbatch; others are shared."""
    if isinstance(value, list):
        if len(value) != microbatches:
            raise UserError(
                field=f"step: {name}",
                value=len(value),
                problem=f"entries were given for {microbatches} microbatches",
                hint="give a list with one entry per microbatch, None for those without inputs",
            )
        return value
    if not isinstance(value, Tensor):
        return [value] * microbatches
    if value.ndim == 0 or value.shape[0] % microbatches:
        raise UserError(
            field=f"step: {name}",
            value=tuple(value.shape),
            problem=f"cannot be divided into {microbatches} microbatches of equal size",
            hint=f"give a multiple of {microbatches} rows, or a list with one entry per microbatch",
        )
    return list(value.chunk(microbatches))
