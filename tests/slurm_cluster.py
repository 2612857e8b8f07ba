"""Runs a Slurm cluster of two nodes on this host, from Debian's slurm-wlm and munge, for one test.

`python tests/slurm_cluster.py FOLDER` starts it, prints the environment of its clients, and stops it on
Ctrl-C. All daemons are children of this process; their files are below FOLDER.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("optimus-a", "optimus-b")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun")
START_S = 30.0
NODE_TIMEOUT_S = 10  # until a node that does not answer is down
REQUEUE_S = 5  # until a requeued job may start

CONFIG = """\
ClusterName=optimus
SlurmctldHost={host}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_s}
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SlurmdParameters=config_overrides
SlurmdTimeout={timeout_s}
KillWait=5
SchedulerParameters=sched_interval=2
JobRequeue=1
ReturnToService=2
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Returns the programs of Slurm and munge that this host does not have."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@dataclass
class SlurmCluster:
    """Two nodes, a controller and munge, all on this host."""

    folder: Path
    stack: ExitStack
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of clients."""
        path = f"{os.environ['PATH']}:/usr/sbin"
        return {**os.environ, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self, name: str, *words: str) -> None:
        """Starts a daemon in the foreground, in a process group of its own."""
        log = self.stack.enter_context((self.folder / f"{name}.out").open("ab"))
        self.daemons[name] = subprocess.Popen(
            words, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def start_node(self, name: str) -> None:
        """Starts the daemon of a node."""
        self.start(name, "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """Kills a node's daemon and all that runs on it, as a power cut does."""
        self.kill_daemon(name)
        for pid in self._tasks_of(name):
            _kill(pid)

    def kill_daemon(self, name: str) -> None:
        """Kills a node's daemon, and leaves what runs on it to itself."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def ranks_of(self, name: str) -> list[int]:
        """Returns the processes of ranks on a node."""
        return [
            pid for pid in self._tasks_of(name) if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
        ]

    def _tasks_of(self, name: str) -> list[int]:
        """Returns the processes of jobs on a node, and the daemons of their steps."""
        marks = {f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.env['SLURM_CONF']}".encode()}
        tasks = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if marks <= set((process / "environ").read_bytes().split(b"\0")):
                    tasks.append(process)
        parents = {int((task / "stat").read_text().rpartition(")")[2].split()[1]) for task in tasks}
        steps = [pid for pid in parents if Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")]
        return [*steps, *(int(task.name) for task in tasks)]

    def run(self, *words: str) -> str:
        """Runs a client and returns its output."""
        return subprocess.run(
            words, env=self.env, capture_output=True, text=True, check=True, timeout=30
        ).stdout

    def job_field(self, job: str, name: str) -> str:
        """Returns a field of a job, as `scontrol show job` prints it."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait_for_nodes(self, names: Sequence[str] = NODES) -> None:
        """Waits until nodes are idle."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for name, daemon in self.daemons.items():
                assert daemon.poll() is None, f"{name} has ended: {self._log(name)}"
            try:
                states = self.run("sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%T").split()
            except subprocess.CalledProcessError:
                states = []
            if states == ["idle"] * len(names):
                return
            time.sleep(0.2)
        raise TimeoutError(f"nodes are not idle: {self.run('scontrol', 'show', 'nodes')}")

    def _log(self, name: str) -> str:
        logs = [self.folder / f"{name}.out", self.folder / f"{name}.log"]
        return "\n".join(log.read_text(errors="replace")[-2000:] for log in logs if log.exists())

    def stop(self) -> None:
        """Ends jobs, then the daemons that were started, each by its process id."""
        if "slurmctld" in self.daemons:
            subprocess.run(
                ["scancel", "--user", "root", "--signal", "KILL"], env=self.env, check=False, timeout=30
            )
        for name in [name for name in NODES if name in self.daemons]:
            self.kill_node(name)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Starts the daemons below `folder` and yields a cluster whose nodes are idle."""
    with ExitStack() as stack:
        for name in ("state", *NODES):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        controller, *ports = _free_ports(1 + len(NODES))
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=2000"
            for name, port in zip(NODES, ports, strict=True)
        )
        (folder / "slurm.conf").write_text(
            CONFIG.format(
                host=f"{host}(127.0.0.1)",
                port=controller,
                folder=folder,
                requeue_s=REQUEUE_S,
                timeout_s=NODE_TIMEOUT_S,
                user="root",
                nodes=nodes,
                names=",".join(NODES),
            )
        )
        cluster = SlurmCluster(folder, stack)
        stack.callback(cluster.stop)
        socket_file = folder / "munge.socket"
        cluster.start(
            "munged", "munged", "--foreground", "--force", f"--socket={socket_file}", f"--key-file={key}",
            f"--pid-file={folder / 'munged.pid'}", f"--log-file={folder / 'munged.log'}",
            f"--seed-file={folder / 'munged.seed'}",
        )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not socket_file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.start("slurmctld", "slurmctld", "-D", "-i")
        for name in NODES:
            cluster.start_node(name)
        cluster.wait_for_nodes()
        yield cluster


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Keeps a cluster until Ctrl-C."""
    with slurm_cluster(Path(sys.argv[1])) as cluster:
        sys.stdout.write(f"export SLURM_CONF={cluster.env['SLURM_CONF']}\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    main()
