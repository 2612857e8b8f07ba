"""Reads the sizes that other trainers ask for from the fields that a plan is bound to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimus.errors import DoesNotFit, UserError
from optimus.ir.plan import Bucket, Plan, Span
from optimus.ir.ranks import LLM
from optimus.job.layout import Layout

END_LAYERS = 2  # embedding and head: the first and the last layer of the LLM's chunks


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """A plan with typed access to the fields of its model and workload."""

    plan: Plan
    file: str | None = None

    @property
    def layout(self) -> Layout:
        return self.plan.modules[LLM].layout

    @property
    def recompute(self) -> str:
        return self.plan.modules[LLM].recompute

    @property
    def gathered_per(self) -> Span:
        """For how much the LLM's layers are gathered: for less than a step, FSDP runs them."""
        return max((b.gathered_per for b in self._llm_buckets), default=Span.STEP)

    @property
    def is_fsdp(self) -> bool:
        """True if gradients are sharded in every microbatch, and parameters perhaps too."""
        return any(bucket.reduced_per == Span.MICROBATCH for bucket in self._llm_buckets)

    @property
    def _llm_buckets(self) -> list[Bucket]:
        return [bucket for stage in self.plan.modules[LLM].buckets for bucket in stage]

    # ------------------------------------------------------------------------ fields

    def get(self, part: str, name: str) -> Any:
        """Returns a field, or None where the plan does not have it."""
        return self.plan.bound_to.get(part, {}).get(name)

    def model(self, name: str) -> Any:
        """Returns a field of the model; a missing one is an error that names it."""
        value = self.get("model", name)
        if value is None:
            raise self._missing("model", name)
        return value

    def count(self, name: str, *, part: str = "model") -> int:
        """Returns a field that must be a positive integer."""
        value = self.get(part, name)
        if value is None:
            raise self._missing(part, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(
                field=f"bound_to.{part}.{name}",
                value=value,
                problem="is not a positive whole number",
                hint="give a file that `optimus plan` wrote",
                file=self.file,
            )
        return value

    def _missing(self, part: str, name: str) -> UserError:
        return UserError(
            field=f"bound_to.{part}.{name}",
            problem="is not in the plan",
            hint="plan the job again with this version",
            file=self.file,
        )

    # ------------------------------------------------------------------------ sizes

    @property
    def layers(self) -> int:
        return self.count("llm.stack.layers")

    @property
    def has_experts(self) -> bool:
        return self.get("model", "llm.stack.experts.count") is not None

    @property
    def sequence_tokens(self) -> int:
        return self.count("sequence_tokens", part="workload")

    @property
    def sequences_per_step(self) -> int:
        return self.count("sequences_per_step", part="workload")

    @property
    def microbatch_sequences(self) -> int:
        """Sequences in one microbatch of the LLM; other trainers need an integer, equal on all replicas."""
        replicas = self.layout.dp * self.plan.microbatches
        whole, rest = divmod(self.sequences_per_step, replicas)
        if rest:
            raise DoesNotFit(
                f"{self.sequences_per_step} sequences per step are not whole in {self.plan.microbatches} "
                f"microbatches on each of {self.layout.dp} replicas, which other trainers need",
                f"plan with a sequences_per_step that is a multiple of {replicas}",
            )
        return whole

    def layers_of_virtual_stages(self) -> list[int]:
        """Returns the LLM's transformer layers in every virtual stage, in the order of the forward."""
        layers = [chunk.layers for chunk in self.plan.modules[LLM].chunks]
        if sum(layers) != self.layers + END_LAYERS:
            raise UserError(
                field="modules.llm.chunks",
                problem=f"hold {sum(layers)} layers, and {self.layers} with embedding and head make "
                f"{self.layers + END_LAYERS}",
                hint="give a file that `optimus plan` wrote",
                file=self.file,
            )
        first, last = self._ends()
        layers[first] -= 1
        layers[last] -= 1
        return layers

    @property
    def has_empty_ends(self) -> bool:
        """True if the embedding is not in the first virtual stage, or the head not in the last."""
        return self._ends() != (0, len(self.plan.modules[LLM].chunks) - 1)

    def _ends(self) -> tuple[int, int]:
        """Returns the virtual stages of embedding and head."""
        filled = [place for place, chunk in enumerate(self.plan.modules[LLM].chunks) if chunk.layers]
        return filled[0], filled[-1]

    @property
    def fused_attention(self) -> bool:
        """True if attention scores are never stored; `selective` recomputes norms and non-linearities."""
        preset = self.plan.notes.get("preset")
        return not (isinstance(preset, dict) and preset.get("fused_attention") is False)

    def encoder_field(self, name: str, field: str) -> Any:
        """Returns a field of an encoder by the encoder's name, or None."""
        place = 0
        while (encoder := self.get("model", f"encoders[{place}].name")) is not None:
            if encoder == name:
                return self.get("model", f"encoders[{place}].{field}")
            place += 1
        return None
