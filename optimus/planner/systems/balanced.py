"""All modules in one pipeline with stages of even cost: by the paper's dynamic program, and by our search."""

from __future__ import annotations

from collections.abc import Sequence

from optimus.cost.priced_layer import PricedLayer
from optimus.planner.context import PlanningContext
from optimus.planner.systems.base import BaseSystem
from optimus.planner.systems.layer_partition import minimize_largest_stage
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.planner.systems.stage0 import FixedCutSystem
from optimus.schedule.stage_costs import Cut


class BalancedSystem(FixedCutSystem):
    """The paper's dynamic program over virtual stages, at the job's V."""

    name = "balanced"
    allowed_as = "balanced"

    def cut(self, context: PlanningContext, layers: Sequence[PricedLayer], parts: int) -> Cut:
        """Minimizes the largest FLOPs of a virtual stage, since the paper takes layer times from FLOPs."""
        return minimize_largest_stage([layer.flops * (3 if layer.trained else 1) for layer in layers], parts)


class BalancedBestSystem(BaseSystem):
    """The strongest pipeline of all layers: every V, op order and microbatch size, then local search."""

    name = "balanced-best"
    allowed_as = "balanced"

    def candidates(self, pipelines: LlmPipelines) -> list[PipelineCandidate]:
        """Returns the fastest pipelines of all modules."""
        return pipelines.all_modules
