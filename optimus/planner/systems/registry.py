"""Lists every system by name; a system's module is imported when it is first used."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimus.job.job import Job
    from optimus.protocols import System

# The order in which systems are printed. Strings, so that the command line can list names without numpy.
SYSTEMS = {
    "llm-only": "llm_only.LlmOnlySystem",
    "stage0": "single_pipeline.Stage0System",
    "balanced": "single_pipeline.BalancedSystem",
    "balanced-best": "single_pipeline.BalancedBestSystem",
    "three-phase": "three_phase.ThreePhaseSystem",
    "separate-gpus": "separate_gpus.SeparateGpusSystem",
    "fsdp": "fsdp.FsdpSystem",
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
    systems = [load_system(name) for name in applicable_systems(SYSTEMS, job)]
    allowed = {None, *job.layout.limits.allow} - {"fill"}
    return [system.name for system in systems if system.allowed_as in allowed]
