"""Writes the batch file of a Slurm job: torchrun on every node, requeued when a node or the time is gone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimus.engine.config import METRICS
from optimus.environment import NCCL_VARIABLES
from optimus.errors import UserError

SCRIPT, LOG = "launch.sbatch", "slurm-{job}.out"
SIGNAL_S = 120  # before the time limit, for a checkpoint
SHUTDOWN_S = 90  # between SIGTERM and SIGKILL of a rank; torchrun's default is 30
FIRST_PORT, PORTS = 20_000, 10_000  # of the rendezvous: the job's number chooses one
ATTEMPT = ".attempt"  # a file whose time is the start of the job, the first or after a requeue
SBATCH_OPTION = re.compile(r"[a-z][a-z-]*(=.*)?")

SCRIPT_TEXT = """\
#!/bin/bash
# Written by `optimus launch --slurm`; `sbatch {script}` submits it again.
{options}

{exports}
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{shutdown_s}}}"
export TORCH_FR_DUMP_TEMP_FILE={dumps}
{setup}
run_dir={run_dir}
: > "$run_dir/{attempt}"

# Waits for a process, and sets `stopped` if SIGTERM arrives meanwhile.
wait_for() {{
  stopped=
  trap "stopped=yes; $2" TERM
  while kill -0 "$1" 2>/dev/null; do
    wait "$1"
    code=$?
  done
}}

# The agent of a node. After SIGTERM it succeeds, or srun would end the other nodes within their checkpoint.
agent() {{
  "$@" --rdzv-conf "is_host=$((SLURM_NODEID == 0))" {torchrun} -m {command} &
  wait_for $! :
  [ -n "$stopped" ] || return "$code"
}}
export -f agent wait_for

# This script runs on the first node, where the agents of torchrun meet.
srun --kill-on-bad-exit=1 --label bash -c 'agent "$@"' agent \
  {python} -m torch.distributed.run --rdzv-backend c10d \
  --rdzv-endpoint "$(hostname):$(({first_port} + SLURM_JOB_ID % {ports}))" \
  --rdzv-id "$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" &

# Before the time limit Slurm signals this script, which signals the agents, and they the ranks.
wait_for $! 'scancel --signal=TERM "$SLURM_JOB_ID"'

# A job that somebody has cancelled is not running any more; one that failed before a step would again.
trained() {{ [ "$run_dir/{metrics}" -nt "$run_dir/{attempt}" ]; }}
running() {{ [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; }}
if [ -n "$stopped" ] || {{ [ "$code" -ne 0 ] && trained; }}; then
  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_requeues} ] && running; then
    echo "requeued after ${{stopped:+SIGTERM and }}code $code" >&2
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
[ -z "$stopped" ] || exit 143
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """Holds what the batch file of a run depends on."""

    name: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int  # 0 asks Slurm for none
    run_dir: Path  # absolute
    work_dir: Path  # absolute: paths of the command start here
    python: str
    command: Sequence[str]  # a module and its arguments
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    options: Sequence[str] = ()  # of sbatch, without dashes: qos=high
    setup: Sequence[str] = ()  # lines of shell
    max_restarts: int = 3
    max_requeues: int = 10

    @property
    def script(self) -> Path:
        return self.run_dir / SCRIPT

    def log(self, job_id: str) -> Path:
        """Returns the file that the job prints to."""
        return self.run_dir / LOG.format(job=job_id)

    def text(self) -> str:
        """Returns the batch file. Every value is quoted; only `setup` is shell."""
        run_dir = str(self.run_dir)
        exports = [f'export {name}="${{{name}:-{value}}}"' for name, value in NCCL_VARIABLES.items()]
        return SCRIPT_TEXT.format(
            script=shlex.quote(str(self.script)),
            options="\n".join(f"#SBATCH {_quote_option(option)}" for option in self._options()),
            exports="\n".join(exports),
            shutdown_s=SHUTDOWN_S,
            dumps=shlex.quote(f"{run_dir}/nccl-"),
            setup="".join(f"{_one_line('--setup', line)}\n" for line in self.setup),
            run_dir=shlex.quote(_one_line("--run-dir", run_dir)),
            attempt=ATTEMPT,
            metrics=METRICS,
            first_port=FIRST_PORT,
            ports=PORTS,
            python=shlex.quote(self.python),
            torchrun=f"--nnodes {self.nodes} --nproc-per-node {self.ranks_per_node} "
            f"--max-restarts {self.max_restarts}",
            max_requeues=self.max_requeues,
            command=shlex.join(_one_line("optimus train", word) for word in self.command),
        )

    def _options(self) -> list[str]:
        given = {"time": self.time, "partition": self.partition, "account": self.account}
        for option in self.options:
            if SBATCH_OPTION.fullmatch(option) is None:
                raise UserError(
                    field="--sbatch",
                    value=option,
                    problem="is not an option of sbatch",
                    hint="write it without dashes, e.g. --sbatch qos=high mail-type=END",
                )
        output = str(self.run_dir / LOG).replace("%", "%%").format(job="%j")
        return [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            "--exclusive",
            *(f"--{name}={value}" for name, value in given.items() if value is not None),
            f"--chdir={self.work_dir}",
            f"--output={output}",
            "--open-mode=append",
            "--requeue",
            f"--signal=B:TERM@{SIGNAL_S}",
            *(f"--{option}" for option in self.options),
        ]


def _quote_option(option: str) -> str:
    """Quotes an option for sbatch, which reads quotes as a shell does, and backslashes within them too."""
    name, equals, value = option.partition("=")
    escaped = _one_line(name, value).replace("\\", "\\\\")
    return f"{name}{equals}{shlex.quote(escaped)}" if equals else name


def _one_line(field: str, value: str) -> str:
    """Raises if a value would end its line, or cannot be passed to a program."""
    if not value.isprintable():
        raise UserError(
            field=field,
            value=value,
            problem="has a line break or another character that a batch file cannot hold",
            hint="use printable characters",
        )
    return value
