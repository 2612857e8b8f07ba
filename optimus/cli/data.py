"""`optimus data index`: writes the lengths of a data set's samples, and draws their distribution."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from optimus.cli.console import announce, check_writable, print_result, progress_bar
from optimus.cli.flags import NO, OK, JsonFlag, describe_option, import_extra
from optimus.cli.text import align_columns, wrap_closing_line, wrap_text
from optimus.errors import UserError, show_value
from optimus.job.data_source import find_index_file, find_lengths_file
from optimus.render.format_numbers import format_percent

if TYPE_CHECKING:
    from optimus.data.index_lengths import LengthsTable
    from optimus.data.sample_index import SampleIndex

SCHEMA = "optimus.data-index/1"
BAR = 20  # characters of the longest bar
QUANTILES = (50, 95, 99, 100)


@dataclass(frozen=True)
class DataCommand:
    """Count the tokens of a chat data set from file headers, for planning."""

    action: Annotated[tyro.conf.Positional[Literal["index"]], describe_option(help="count tokens per sample")]
    path: Annotated[
        tyro.conf.Positional[Path],
        describe_option(
            metavar="DATA",
            help="samples in the chat forms of ms-swift or LLaMA-Factory: a .jsonl file, a folder of"
            " WebDataset shards, or one of save_to_disk of Hugging Face datasets",
        ),
    ]
    model: Annotated[
        Path, describe_option(metavar="FOLDER", help="a model folder: config.json, tokenizer and processor")
    ]
    output: Annotated[
        Path | None,
        describe_option(
            aliases=["-o"],
            metavar="LENGTHS.jsonl",
            help="the file to write; default: the data set's name and .lengths.jsonl",
        ),
    ] = None
    sequence_tokens: Annotated[
        int | None,
        describe_option(metavar="N", help="pack samples into sequences of N tokens; longer ones are skipped"),
    ] = None
    media_dir: Annotated[
        Path | None,
        describe_option(
            metavar="FOLDER", help="where paths begin, and which none may leave; default: that of DATA"
        ),
    ] = None
    decode: Annotated[
        bool, describe_option(help="decode files too, and skip those whose contents are broken")
    ] = False
    max_pixels: Annotated[
        int | None, describe_option(metavar="N", help="skip larger images; default: 89,478,485")
    ] = None
    max_audio_s: Annotated[
        int | None, describe_option(metavar="N", help="skip longer sounds; default: 1,800")
    ] = None
    workers: Annotated[int | None, describe_option(metavar="N", help="processes; default: one per core")] = (
        None
    )
    json: JsonFlag = False

    def __call__(self) -> int:
        for name in ("sequence_tokens", "workers", "max_pixels", "max_audio_s"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(
                    field=f"--{name.replace('_', '-')}",
                    value=value,
                    problem="is too small",
                    hint="use 1 or more",
                )
        output = self.output or find_lengths_file(find_index_file(self.path))
        check_writable("--output", output, ".jsonl")
        announce(f"loading transformers, for the processor of {self.model}")
        chat_source = import_extra("optimus.data.chat_source", "data")
        media_headers = import_extra("optimus.data.media_headers", "data")
        sample_index = import_extra("optimus.data.sample_index", "data")
        file = chat_source.open_chat_source(self.path)
        folder = media_headers.MediaFolder(
            root=self.media_dir or self.path.parent,
            decode=self.decode,
            max_pixels=self.max_pixels or media_headers.MAX_PIXELS,
            max_audio_s=self.max_audio_s or media_headers.MAX_AUDIO_S,
        )
        key = sample_index.IndexKey.make(
            file, model=self.model, folder=folder, sequence_tokens=self.sequence_tokens
        )
        with progress_bar("indexing") as progress:
            index: SampleIndex = sample_index.build_index(
                file,
                key,
                model=self.model,
                folder=folder,
                workers=self.workers or os.cpu_count() or 1,
                progress=progress,
            )
        result = _index_json(self, output, index)
        lines = _index_text(result, index.lengths)
        if not len(index):
            print_result({**result, "lengths": None, "index": None}, lines, as_json=self.json)
            return NO
        sample_index.save_index(index, Path(result["index"]), output)
        lines += ["", *wrap_closing_line("wrote", f"{result['index']}, for `data:` of a job file")]
        lines += wrap_closing_line("wrote", f"{output}, for `workload: {{lengths: {output}}}`")
        print_result(result, lines, as_json=self.json)
        return OK


def _index_json(command: DataCommand, output: Path, index: SampleIndex) -> dict[str, Any]:
    """Returns the object of `optimus data index --json`."""
    import numpy as np

    modules: dict[str, Any] = {}
    for name, tokens in index.lengths.totals().items():
        items = {} if name == "text" else {"items": len(index.lengths.items[name])}
        values = (
            [int(value) for value in np.percentile(tokens, QUANTILES, method="higher")] if len(tokens) else []
        )
        quantiles = {
            "max" if q == 100 else f"p{q}": value for q, value in zip(QUANTILES, values, strict=False)
        }
        modules[name] = {"tokens": int(tokens.sum()), "per_sample": quantiles, **items}
    tokens = sum(module["tokens"] for module in modules.values())
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "data": str(command.path),
        "lengths": str(output),
        "index": str(find_index_file(output)),
        "samples": len(index),
        "tokens": tokens,
        "labels": sum(index.lengths.labels),
        "skipped": index.skipped.total(),
        "modules": modules,
        "reasons": build_skipped_json(index),
    }
    if command.sequence_tokens is not None and len(index):
        result["sequences"] = len(index.sequences)
        result["sequence_tokens"] = command.sequence_tokens
        result["fill"] = tokens / (len(index.sequences) * command.sequence_tokens)
    return result


def build_skipped_json(index: SampleIndex) -> dict[str, Any]:
    """Returns how many samples of a data set were skipped by reason, the most first, with examples."""
    return {
        str(reason): {
            "count": count,
            "examples": [
                {"line": line, "detail": show_value(detail)} for line, detail in index.examples[reason]
            ],
        }
        for reason, count in sorted(index.skipped.items(), key=lambda pair: (-pair[1], pair[0]))
    }


def format_skipped(reasons: dict[str, Any]) -> list[str]:
    """Returns a line for each reason of `build_skipped_json`."""
    lines = []
    for reason, entry in reasons.items():
        shown = "; ".join(f"line {example['line']}: {example['detail']}" for example in entry["examples"])
        more = entry["count"] - len(entry["examples"])
        lines += wrap_text(
            f"skipped {entry['count']:,}", f"{reason} ({shown}{f'; and {more:,} more' if more else ''})"
        )
    return lines


def _index_text(result: dict[str, Any], samples: LengthsTable) -> list[str]:
    """Returns totals, the distribution as bars, and why samples were skipped."""
    words = f"{result['samples']:,} samples, {result['tokens']:,} tokens, {result['labels']:,} of them labels"
    if "fill" in result:
        words += f", in {result['sequences']:,} sequences of {result['sequence_tokens']:,}"
        words += f", {format_percent(result['fill'], 1)} full"
    lines = wrap_text("data", f"{words}; {result['skipped']:,} skipped")
    if len(samples):
        header = ["module", "items", "tokens", "per sample: p50", "p95", "p99", "max"]
        rows = [
            [name, f"{module['items']:,}" if "items" in module else "-", f"{module['tokens']:,}"]
            + [f"{value:,}" for value in module["per_sample"].values()]
            for name, module in result["modules"].items()
        ]
        lines += ["", *align_columns(header, rows), "", *_histogram(samples)]
    return [*lines, "", *format_skipped(result["reasons"])] if result["reasons"] else lines


def _histogram(samples: LengthsTable) -> list[str]:
    """Draws how many samples have how many tokens, in powers of two: one column of bars per module."""
    import numpy as np

    totals = samples.totals()
    counts = {}
    for name, tokens in totals.items():
        places = np.where(tokens > 0, np.floor(np.log2(np.maximum(tokens, 1))) + 1, 0).astype(int)
        counts[name] = np.bincount(places, minlength=1)
    filled = [place for of_module in counts.values() for place in np.flatnonzero(of_module)]
    lines = [f"  {'tokens':>15}" + "".join(f"  {name + ' samples':<{BAR + 8}}" for name in counts).rstrip()]
    for place in range(min(filled), max(filled) + 1):
        label = "0" if place == 0 else f"{2 ** (place - 1):,}-{2**place - 1:,}" if place > 1 else "1"
        line = f"  {label:>15}"
        for of_module in counts.values():
            count = int(of_module[place]) if place < len(of_module) else 0
            bar = "█" * round(BAR * count / of_module.max()) or ("▏" if count else "")
            line += "  " + (f"{bar} {count:,}" if count else "").ljust(BAR + 8)
        lines.append(line.rstrip())
    return lines
