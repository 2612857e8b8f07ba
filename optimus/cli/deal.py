"""`optimus deal`: says what each way of dealing images over ranks is worth for a data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from optimus.cli.console import print_result, progress_bar
from optimus.cli.flags import OK, JsonFlag, describe_option
from optimus.cli.text import align_columns, wrap_remark, wrap_text
from optimus.errors import UserError

if TYPE_CHECKING:
    from optimus.data.compare_dealing import DealingResult

SCHEMA = "optimus.deal/1"
CLOSE = 0.02  # of the mean: a way that is so much worse than another is as good


@dataclass(frozen=True)
class DealCommand:
    """Say what dealing images over ranks is worth, for a file of lengths."""

    lengths: Annotated[
        tyro.conf.Positional[Path],
        describe_option(
            metavar="LENGTHS",
            help='written by optimus data index: a sequence a line, {"text": 4710, "vision": [1024]}',
        ),
    ]
    replicas: Annotated[
        int, describe_option(metavar="N", help="data-parallel replicas, or ranks of FSDP or DDP")
    ] = 32
    microbatches: Annotated[
        int, describe_option(metavar="N", help="of each replica in a step (gradient accumulation)")
    ] = 16
    sequences: Annotated[int, describe_option(metavar="N", help="of a microbatch")] = 1
    pieces: Annotated[int, describe_option(metavar="N", help="encoder pipelines of a replica")] = 1
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.data.compare_dealing import compare_dealing, count_batches
        from optimus.job.workload import MAX_SEQUENCES, read_sequence_lengths

        counts = {"replicas": self.replicas, "microbatches": self.microbatches}
        counts |= {"sequences": self.sequences, "pieces": self.pieces}
        size = self.replicas * self.microbatches * self.sequences
        _check_counts(counts, size, MAX_SEQUENCES)
        costs = [
            [float(n) for _, lengths in sequence.items for n in lengths]
            for sequence in read_sequence_lengths(self.lengths)
        ]
        batches = count_batches(size)
        with progress_bar("dealing") as progress:
            ways = compare_dealing(costs, **counts, batches=batches, progress=progress)
        result = {
            "schema": SCHEMA,
            **counts,
            "batches": batches,
            "ways": {name: asdict(way) for name, way in ways.items()},
        }
        drawn_from = f"{batches} batches of {size:,} sequence{'s' * (size > 1)}, drawn from {len(costs):,}."
        print_result(result, format_ways(ways, drawn_from, any(costs)), as_json=self.json)
        return OK


def _check_counts(counts: dict[str, int], size: int, most: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UserError(field=f"--{name}", value=value, problem="is not positive", hint="use 1 or more")
    if size > most:
        problem = f"make {size:,} sequences a step with the other counts, more than {most:,}"
        raise UserError(field="--replicas", value=counts["replicas"], problem=problem, hint="use fewer")


def format_ways(ways: dict[str, DealingResult], drawn_from: str, has_items: bool) -> list[str]:
    """Returns a table of the ways, and what its columns mean."""
    from optimus.data.compare_dealing import WAYS

    rows = [
        [name, f"{way.fullest_rank:.3f}", f"{way.fullest_pipeline:.3f}", f"{way.padding:.2f}"]
        for name, way in ways.items()
    ]
    return [
        *wrap_remark(drawn_from),
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
        *wrap_remark(_advise(ways) if has_items else "No sequence has images: there is nothing to deal."),
    ]


def _advise(ways: dict[str, DealingResult]) -> str:
    """Says what is worth it for FSDP or DDP: the simplest way that is close to the best."""
    drawn, best = ways["drawn"].fullest_rank, min(way.fullest_rank for way in ways.values())
    name = next(name for name, way in ways.items() if way.fullest_rank - best <= CLOSE)
    if name == "drawn":
        return "For FSDP or DDP, sequences as they come are as good."
    saved = f"{1 - ways[name].fullest_rank / drawn:.0%} less encoder time than sequences as they come"
    close = "" if ways[name].fullest_rank == best else f", {best:.3f} at best"
    return f"For FSDP or DDP: {name}, {saved} ({ways[name].fullest_rank:.3f} of the mean{close})."
