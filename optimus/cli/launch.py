"""`optimus launch`: submits the training of a job to a cluster's scheduler."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from optimus.cli.console import print_result
from optimus.cli.flags import OK, describe_option, load_optional_profile
from optimus.cli.text import wrap_closing_line, wrap_text
from optimus.cli.train import TrainCommand
from optimus.cli.train_inputs import make_folder
from optimus.errors import UserError

if TYPE_CHECKING:
    from optimus.cli.sbatch import SlurmJob
    from optimus.ir.plan import Plan
    from optimus.job.job import Job

SCHEMA = "optimus.launch/1"
NO_CHECKPOINTS = "it saves no checkpoints (--checkpoint-every N), so that a job queued again begins at step 0"
NOT_FORWARDED = ("job", "plan", "resume", "dry_run", "rank", "json")


@dataclass(frozen=True)
class LaunchCommand(TrainCommand):
    """Submit the training of a job to Slurm, around torchrun.

    Plans what is recommended unless --plan names a plan.

    Plan and batch file go to --run-dir.

    Options of `optimus train` are passed on to the ranks.
    """

    slurm: Annotated[bool, describe_option(help="submit to Slurm, the only scheduler so far")] = False
    nodes: Annotated[
        int | None, describe_option(metavar="N", help="nodes to ask for; default: those of the job's cluster")
    ] = None
    gpus_per_node: Annotated[
        int | None,
        describe_option(
            metavar="N",
            help="GPUs to ask for on each node; default: its ranks, or none for a job on CPU cores",
        ),
    ] = None
    time: Annotated[
        str | None,
        describe_option(
            metavar="LIMIT",
            help="time limit as sbatch reads it, e.g. 24:00:00; 120 s before it the ranks get SIGTERM",
        ),
    ] = None
    partition: Annotated[str | None, describe_option(metavar="NAME", help="partition to submit to")] = None
    account: Annotated[str | None, describe_option(metavar="NAME", help="account to charge")] = None
    sbatch: Annotated[
        tuple[str, ...],
        describe_option(
            metavar="OPTION=VALUE ...", help="further options of sbatch, without dashes, e.g. qos=high"
        ),
    ] = ()
    setup: Annotated[
        tuple[str, ...],
        describe_option(
            metavar="LINE ...", help="lines of shell to run before training, e.g. 'module load cuda'"
        ),
    ] = ()
    max_restarts: Annotated[
        int, describe_option(metavar="N", help="restarts of the ranks by torchrun, on the same nodes")
    ] = 3
    max_requeues: Annotated[
        int,
        describe_option(
            metavar="N", help="times that the job is queued again after a failure or its time limit"
        ),
    ] = 10
    dry_run: Annotated[
        bool, describe_option(help="write the plan and the batch file, print the file, submit nothing")
    ] = False
    rank: tyro.conf.Suppress[None] = None
    restarts: tyro.conf.Suppress[int] = 0  # which torchrun does

    def __call__(self) -> int:
        if not self.slurm:
            raise UserError(
                field="--slurm",
                problem="is missing, and no other scheduler is known",
                hint="add --slurm; on this host use optimus train, on Kubernetes see docs/launch.md",
            )
        from optimus.engine.checkpoint_folder import refuse_other_run

        job, profile = self._job(), load_optional_profile(self.profile)
        training = self._training(job)
        saves = training.checkpoint.every > 0
        if saves and not self.resume:
            refuse_other_run(self.run_dir)
        nodes, ranks_per_node = self._count_nodes(job)
        make_folder("--run-dir", self.run_dir)
        plan = self._plan(job, profile)
        slurm_job = self._slurm_job(job, nodes, ranks_per_node, resumes=saves or self.resume)
        text = slurm_job.text()
        self._write(plan, slurm_job, text)
        job_id = None if self.dry_run else _submit(slurm_job.script)
        lines = text.splitlines()
        if job_id is not None:
            lines = _format_submitted(job, slurm_job, job_id)
            lines += [] if saves else wrap_closing_line("note", NO_CHECKPOINTS)
        print_result(_build_json(slurm_job, job_id), lines, as_json=self.json)
        return OK

    def _count_nodes(self, job: Job) -> tuple[int, int]:
        """Returns the nodes, and the ranks on each of them."""
        world = job.cluster.gpus
        for name in ("nodes", "gpus_per_node", "max_restarts", "max_requeues"):
            value, least = getattr(self, name), 1 if name == "nodes" else 0
            if value is not None and value < least:
                flag = f"--{name.replace('_', '-')}"
                hint = f"use {least} or more"
                raise UserError(field=flag, value=value, problem="is too few", hint=hint)
        usual = -(-world // job.cluster.gpus_per_node)
        nodes = self.nodes or usual
        if world % nodes:
            raise UserError(
                field="--nodes",
                value=nodes,
                problem=f"does not divide the {world} ranks of the plan, which nodes share equally",
                hint=f"use {usual}, or plan for another number of GPUs (--on)",
            )
        return nodes, world // nodes

    def _slurm_job(self, job: Job, nodes: int, ranks_per_node: int, *, resumes: bool) -> SlurmJob:
        """Describes the job. Whatever starts the ranks again, they go on; the first start finds nothing."""
        from optimus.cli.sbatch import SlurmJob
        from optimus.engine.config import PLAN

        run_dir = self.run_dir.absolute()
        gpus = 0 if job.cluster.gpu.is_cpu else ranks_per_node
        return SlurmJob(
            name=job.name,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            gpus_per_node=gpus if self.gpus_per_node is None else self.gpus_per_node,
            run_dir=run_dir,
            work_dir=Path.cwd(),
            python=sys.executable,
            command=[
                "optimus",
                "train",
                self.job,
                "--plan",
                str(run_dir / PLAN),
                *self._train_options(),
                *(["--resume"] if resumes else []),
            ],
            time=self.time,
            partition=self.partition,
            account=self.account,
            options=self.sbatch,
            setup=self.setup,
            max_restarts=self.max_restarts,
            max_requeues=self.max_requeues,
        )

    def _train_options(self) -> list[str]:
        """Returns the options of `optimus train` that are not at their defaults."""
        words: list[str] = []
        for field in fields(TrainCommand):
            value: Any = getattr(self, field.name)
            if field.name in NOT_FORWARDED or value == field.default:
                continue
            words.append(f"--{field.name.replace('_', '-')}")
            if isinstance(value, tuple):
                words += map(str, value)
            elif value is not True:
                words.append(str(value))
        return words

    def _write(self, plan: Plan, slurm_job: SlurmJob, text: str) -> None:
        from optimus.engine.config import METRICS, PLAN
        from optimus.ir.files import write_file_atomically
        from optimus.ir.planfile import save_plan

        if not self.resume:
            (slurm_job.run_dir / METRICS).unlink(missing_ok=True)
        save_plan(plan, slurm_job.run_dir / PLAN)
        write_file_atomically(slurm_job.script, text)


def _submit(script: Path) -> str:
    """Submits a batch file and returns the number of the job."""
    import subprocess

    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError(
            field="sbatch",
            problem="is not on PATH",
            hint=f"run this where Slurm is, or submit {script} there",
        ) from None
    if done.returncode:
        raise UserError(
            field="sbatch",
            value=str(script),
            problem=f"is refused: {' '.join(done.stderr.split())}",
            hint="change --partition, --account, --time, --nodes or --sbatch",
        )
    return done.stdout.strip().partition(";")[0]


def _build_json(slurm_job: SlurmJob, job_id: str | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "job_id": job_id,
        "nodes": slurm_job.nodes,
        "ranks_per_node": slurm_job.ranks_per_node,
        "script": str(slurm_job.script),
        "log": None if job_id is None else str(slurm_job.log(job_id)),
    }


def _format_submitted(job: Job, slurm_job: SlurmJob, job_id: str) -> list[str]:
    nodes = "1 node" if slurm_job.nodes == 1 else f"{slurm_job.nodes} nodes"
    ranks = "1 rank" if slurm_job.ranks_per_node == 1 else f"{slurm_job.ranks_per_node} ranks"
    title = f"{job.name} as Slurm job {job_id}: {nodes}, {ranks} on each"
    return [
        *wrap_text("submitted", title),
        *wrap_text("watch", f"squeue --jobs {job_id}"),
        *wrap_text("", f"tail -F {slurm_job.log(job_id)}"),
        *wrap_text("end", f"scancel {job_id}"),
        *wrap_closing_line("wrote", f"{slurm_job.script} and plan.json"),
    ]
