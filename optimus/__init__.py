"""Optimus plans and runs multimodal LLM training with encoder work inside the LLM's idle time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from optimus.cli.run_ranks import train as train
    from optimus.data.dealt_encoder import DealtEncoder as DealtEncoder
    from optimus.engine.fill_schedule import FillSchedule as FillSchedule
    from optimus.engine.process_groups import replica_mesh as replica_mesh
    from optimus.engine.stage_profile import StageInputs as StageInputs
    from optimus.engine.stage_profile import profile_stages as profile_stages
    from optimus.exporters.targets import export_plan as export
    from optimus.ir.plan import EncoderBlocks as EncoderBlocks
    from optimus.ir.plan import Seconds as Seconds
    from optimus.ir.planfile import load_plan as load_plan
    from optimus.ir.planfile import save_plan as save_plan
    from optimus.job.read import find_job as find_job
    from optimus.job.read import load_job as load_job
    from optimus.job.read import make_job as make_job
    from optimus.planner.compare import compare_systems as simulate
    from optimus.planner.planning import check_plan_or_result as check
    from optimus.planner.user_modules import plan_modules as plan_modules
    from optimus.render.html_report import write_report as report
    from optimus.sensitivity.job_sweep import sweep_job as sweep
    from optimus.sensitivity.recommend import plan_job as plan
    from optimus.sensitivity.why_not import explain_layout as why

# Public names and their modules, imported on first use: `import optimus` costs nothing, and torch is imported
# only by what is in `optimus.engine`, and by the ranks that `train` starts.
_PUBLIC = {
    "find_job": ("optimus.job.read", "find_job"),
    "load_job": ("optimus.job.read", "load_job"),
    "make_job": ("optimus.job.read", "make_job"),
    "load_plan": ("optimus.ir.planfile", "load_plan"),
    "save_plan": ("optimus.ir.planfile", "save_plan"),
    "report": ("optimus.render.html_report", "write_report"),
    "simulate": ("optimus.planner.compare", "compare_systems"),
    "check": ("optimus.planner.planning", "check_plan_or_result"),
    "plan": ("optimus.sensitivity.recommend", "plan_job"),
    "why": ("optimus.sensitivity.why_not", "explain_layout"),
    "sweep": ("optimus.sensitivity.job_sweep", "sweep_job"),
    "export": ("optimus.exporters.targets", "export_plan"),
    "EncoderBlocks": ("optimus.ir.plan", "EncoderBlocks"),
    "Seconds": ("optimus.ir.plan", "Seconds"),
    "plan_modules": ("optimus.planner.user_modules", "plan_modules"),
    "train": ("optimus.cli.run_ranks", "train"),
    "DealtEncoder": ("optimus.data.dealt_encoder", "DealtEncoder"),
    "FillSchedule": ("optimus.engine.fill_schedule", "FillSchedule"),
    "StageInputs": ("optimus.engine.stage_profile", "StageInputs"),
    "profile_stages": ("optimus.engine.stage_profile", "profile_stages"),
    "replica_mesh": ("optimus.engine.process_groups", "replica_mesh"),
}

__all__ = [
    "DealtEncoder",
    "EncoderBlocks",
    "FillSchedule",
    "Seconds",
    "StageInputs",
    "check",
    "export",
    "find_job",
    "load_job",
    "load_plan",
    "make_job",
    "plan",
    "plan_modules",
    "profile_stages",
    "replica_mesh",
    "report",
    "save_plan",
    "simulate",
    "sweep",
    "train",
    "why",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'optimus' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)
