"""`optimus deal`: says what each way of dealing images over ranks is worth for a data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from optimus.cli.console import print_result
from optimus.cli.flags import OK, JsonFlag, describe_option
from optimus.cli.text import align_columns, wrap_remark, wrap_text
from optimus.errors import UserError

if TYPE_CHECKING:
    from optimus.data.compare_dealing import DealingResult

SCHEMA = "optimus.deal/1"


@dataclass(frozen=True)
class DealCommand:
    """Say what dealing images over ranks is worth, for a file of lengths."""

    lengths: Annotated[
        tyro.conf.Positional[Path],
        describe_option(metavar="LENGTHS", help='JSONL, a sequence a line: {"text": 4710, "vision": [1024]}'),
    ]
    replicas: Annotated[int, describe_option(metavar="N", help="replicas, or ranks of FSDP or DDP")] = 32
    microbatches: Annotated[int, describe_option(metavar="N", help="of each replica in a step")] = 16
    sequences: Annotated[int, describe_option(metavar="N", help="of a microbatch")] = 1
    pieces: Annotated[int, describe_option(metavar="N", help="encoder pipelines of a replica")] = 1
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.data.compare_dealing import compare_dealing
        from optimus.job.workload import read_sequence_lengths

        counts = {"replicas": self.replicas, "microbatches": self.microbatches}
        counts |= {"sequences": self.sequences, "pieces": self.pieces}
        _check_counts(counts)
        sequences = read_sequence_lengths(self.lengths)
        costs = [[float(n) for _, lengths in each.items for n in lengths] for each in sequences]
        ways = compare_dealing(costs, **counts)
        result = {"schema": SCHEMA, **counts, "ways": {name: asdict(way) for name, way in ways.items()}}
        print_result(result, format_ways(ways, len(costs), counts), as_json=self.json)
        return OK


def _check_counts(counts: dict[str, int]) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UserError(field=f"--{name}", value=value, problem="is not positive", hint="use 1 or more")


def format_ways(ways: dict[str, DealingResult], sequences: int, counts: dict[str, int]) -> list[str]:
    """Returns a table of the ways, and what its columns mean."""
    from optimus.data.compare_dealing import BATCHES, WAYS

    rows = [
        [name, f"{way.fullest_rank:.3f}", f"{way.fullest_pipeline:.3f}", f"{way.padding:.2f}"]
        for name, way in ways.items()
    ]
    size = counts["replicas"] * counts["microbatches"] * counts["sequences"]
    best = min(ways, key=lambda name: ways[name].fullest_rank)
    saved = 1 - ways[best].fullest_rank / ways["drawn"].fullest_rank
    return [
        *wrap_remark(f"{BATCHES} batches of {size:,} sequences, drawn from {sequences:,}."),
        "",
        *align_columns(["dealt", "rank", "pipeline", "padding"], rows),
        "",
        *(line for name, text in WAYS.items() for line in wrap_text(f"  {name}", text, indent=13)),
        "",
        *wrap_remark(
            "rank: encoder time of FSDP or DDP, whose ranks wait for the fullest in every microbatch, over"
            " the mean; pipeline: of encoder pipelines, which wait at the end of a step; padding: tokens that"
            " bins of one capacity run, over real ones. Costs are linear in tokens."
        ),
        *wrap_remark(
            f"Best for FSDP or DDP: {best}, {saved:.0%} less encoder time than sequences as they come."
        ),
    ]
