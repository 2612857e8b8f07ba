"""Optimus plans multimodal LLM training: where time goes, and encoder work in the LLM's idle time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from optimus.cli.train import train as train
    from optimus.ir.planfile import load_plan as load_plan
    from optimus.ir.planfile import save_plan as save_plan
    from optimus.job.read import find_job as find_job
    from optimus.job.read import load_job as load_job
    from optimus.job.read import make_job as make_job
    from optimus.planner.compare import compare_systems as simulate
    from optimus.planner.planning import check_planned as check
    from optimus.planner.planning import make_plan as plan
    from optimus.render.report import write_report as report
    from optimus.sensitivity.assess import assess_plan as assess
    from optimus.sensitivity.sweep import sweep_job as sweep
    from optimus.sensitivity.why_not import explain_layout as why

# Public verbs and where they live. They are loaded on first use: importing `optimus` costs nothing.
_VERBS = {
    "find_job": ("optimus.job.read", "find_job"),
    "load_job": ("optimus.job.read", "load_job"),
    "make_job": ("optimus.job.read", "make_job"),
    "load_plan": ("optimus.ir.planfile", "load_plan"),
    "save_plan": ("optimus.ir.planfile", "save_plan"),
    "report": ("optimus.render.report", "write_report"),
    "assess": ("optimus.sensitivity.assess", "assess_plan"),
    "simulate": ("optimus.planner.compare", "compare_systems"),
    "check": ("optimus.planner.planning", "check_planned"),
    "plan": ("optimus.planner.planning", "make_plan"),
    "why": ("optimus.sensitivity.why_not", "explain_layout"),
    "sweep": ("optimus.sensitivity.sweep", "sweep_job"),
    "train": ("optimus.cli.train", "train"),
}

__all__ = [
    "assess",
    "check",
    "find_job",
    "load_job",
    "load_plan",
    "make_job",
    "plan",
    "report",
    "save_plan",
    "simulate",
    "sweep",
    "train",
    "why",
]


def __getattr__(name: str) -> Any:
    if name not in _VERBS:
        raise AttributeError(f"module 'optimus' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _VERBS[name]
    return getattr(import_module(module), attribute)
