"""Runs one rank on this host: `python -m optimus.engine.rank_main FOLDER`, from inputs checked beforehand.

Whoever starts the ranks reads the job and proves the plan once, and hands both over in a folder of its own
that nobody else can write to; so ranks need neither the command line nor the planner.
"""

from __future__ import annotations

import pickle
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from optimus.engine.config import TrainingConfig, TrainingSummary
from optimus.errors import OptimusError
from optimus.ir.plan import Plan
from optimus.job.job import Job

ENTRY = "optimus.engine.rank_main"
USER_ERROR = 2


@dataclass(frozen=True, kw_only=True)
class RankInputs:
    """What a rank needs."""

    job: Job
    plan: Plan
    plan_hash: str
    training: TrainingConfig

    def save(self, folder: Path) -> None:
        """Into a folder that only this user can write to: reading it again can run code."""
        (folder / "handed").write_bytes(pickle.dumps(self))

    @staticmethod
    def load(folder: Path) -> RankInputs:
        found = pickle.loads((folder / "handed").read_bytes())
        assert isinstance(found, RankInputs)
        return found


def load_summary(folder: Path) -> TrainingSummary:
    """What rank 0 of a run that ended well has left."""
    return TrainingSummary.load(folder / "summary.json")


def main(folder: Path) -> int:
    """Trains as one rank; rank 0 leaves its summary."""
    handed = RankInputs.load(folder)
    from optimus.engine.rendezvous import first_to_report
    from optimus.engine.trainer import train_rank

    try:
        summary = train_rank(handed.job, handed.plan, handed.plan_hash, handed.training, lambda metrics: None)
    except OptimusError as error:
        if first_to_report(str(error)):
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        else:
            time.sleep(0.3)  # until it is said: the first rank to end ends all
        return USER_ERROR
    if summary.rank == 0:
        summary.save(folder / "summary.json")
    return 0


if __name__ == "__main__":
    from optimus.engine.rank_main import main as importable_main  # the class that was pickled, not __main__'s

    sys.exit(importable_main(Path(sys.argv[1])))
