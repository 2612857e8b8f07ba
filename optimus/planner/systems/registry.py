"""Lists every system by name; a system's module is imported when it is first used."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimus.job.job import Job
    from optimus.protocols import System

# From the simplest to run to the most involved: of systems that take about as long, the first is recommended.
# Strings, so that the command line can list names without numpy.
SYSTEMS = {
    "llm-only": "llm_only.LlmOnlySystem",
    "fsdp": "fsdp.FsdpSystem",
    "stage0": "single_pipeline.Stage0System",
    "balanced": "single_pipeline.BalancedSystem",
    "balanced-best": "single_pipeline.BalancedBestSystem",
    "three-phase": "three_phase.ThreePhaseSystem",
    "separate-gpus": "separate_gpus.SeparateGpusSystem",
    "paper": "paper.PaperSystem",
    "optimus": "optimus.OptimusSystem",
    "today": "today.TodaySystem",
}


@cache
def load_system(name: str) -> System:
    """Returns the system called `name`."""
    module, _, class_name = SYSTEMS[name].partition(".")
    system: System = getattr(import_module(f"optimus.planner.systems.{module}"), class_name)()
    return system


def plan_making_systems() -> list[str]:
    """Returns the names of systems that make a plan, which can be saved and run."""
    return [name for name in SYSTEMS if load_system(name).makes_plan]


def applicable_systems(names: Iterable[str], job: Job) -> list[str]:
    """Returns the names without known systems for which the job lacks a section."""
    return [name for name in names if name not in SYSTEMS or load_system(name).applies_to(job)]


def default_baselines(job: Job) -> list[str]:
    """Returns the systems that apply, that the job allows, and that fill no bubbles."""
    return [n for n in applicable_systems(SYSTEMS, job) if is_allowed(n, job) and not fills_bubbles(n)]


def is_allowed(name: str, job: Job) -> bool:
    """Returns whether the job's limits and its stated layout of the LLM leave room for a system."""
    system = load_system(name)
    return system.allowed_as in (None, *job.layout.limits.allow) and system.keeps_layout(job)


def fills_bubbles(name: str) -> bool:
    """Returns whether a system schedules encoder work into the LLM's idle time."""
    return load_system(name).allowed_as == "fill"
