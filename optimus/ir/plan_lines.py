"""Writes and reads lines of programs as text, in bulk: a plan has hundreds of thousands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimus.errors import nearest
from optimus.ir.op import COMPUTE_OPS, PARAMETER_TRAFFIC, Ints, OpKind
from optimus.ir.plan import ALL, Plan, Program
from optimus.ir.ranks import LLM
from optimus.job.nodes import DocumentNode
from optimus.job.typed import INT32, read_typed

_LINE = re.compile(r"\S++ \S++ \S++ \S++")
_LINES = re.compile(f"(?:{_LINE.pattern}\n)*+")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_EXAMPLE = "write module and kind, chunk, microbatch and place, such as llm.F 3 12 4"
_HEADS, _NEITHER = 2**40, 2**50  # offset of heads, above all numbers; mark of words that are neither


def format_program_lines(program: Program, names: Sequence[str]) -> list[str]:
    """Returns every line of a program as text: `llm.F 3 12 4`."""
    heads = [f"{name}.{kind.word}" for name in names for kind in OpKind]
    words = map(heads.__getitem__, _heads_of(program).tolist())
    columns = [column.tolist() for column in (program.chunk, program.microbatch, program.place)]
    return list(map("%s %d %d %d".__mod__, zip(words, *columns, strict=True)))


def format_program_title(plan: Plan, device: int) -> str:
    """Returns the text before a program's first line, which names its ranks."""
    stage, context, position = plan.ranks.coordinates(device)
    return f"class {device}: stage {stage}, context {context}, tp block {position}"


def _heads_of(program: Program) -> Ints:
    """Returns module and kind of every line as one number."""
    numbers: Ints = np.asarray(program.module, np.int64) * len(OpKind) + program.kind
    return numbers


def number_line_prefixes(names: Sequence[str]) -> dict[str, int]:
    """Returns the number of every prefix of a line: its module and kind, such as `llm.F`."""
    return {
        f"{name}.{kind.word}": module * len(OpKind) + kind
        for module, name in enumerate(names)
        for kind in OpKind
        if (name == ALL) == (kind == OpKind.OPTIMIZER)
    }


def parse_program_lines(node: DocumentNode, heads: dict[str, int]) -> Program:
    """Reads the lines after the title of a program."""
    lines = node.value[1:]
    if set(map(type, lines)) - {str}:
        read_typed(tuple[str, ...], node)
    text = "\n".join([*lines, ""])
    if not _LINES.fullmatch(text) or text.count("\n") != len(lines):
        bad = next(place for place, line in enumerate(lines) if not _LINE.fullmatch(line))
        raise node[1 + bad].error("is not a line of a program", _EXAMPLE)
    words = text.split()
    numbers = {word: _number(word, heads) for word in set(words)}
    cells = np.fromiter(map(numbers.__getitem__, words), np.int64, len(words)).reshape(-1, 4)
    _refuse_unknown(node, cells, heads)
    module, kind = np.divmod(cells[:, 0] - _HEADS, len(OpKind))
    return Program.of(np.column_stack([module, kind, cells[:, 1:]]))


def _number(word: str, heads: dict[str, int]) -> int:
    if word in heads:
        return _HEADS + heads[word]
    return int(word) if _NUMBER.fullmatch(word) and int(word) <= INT32 else _NEITHER


def _refuse_unknown(node: DocumentNode, cells: NDArray[Any], heads: dict[str, int]) -> None:
    """Raises if a line is not a known head and three numbers."""
    is_head = (cells >= _HEADS) & (cells < _NEITHER)
    wrong = np.argwhere(is_head != [True, False, False, False])
    wrong_numbers = np.argwhere(cells[:, 1:] >= _NEITHER)
    rows = [int(cells_at[0][0]) for cells_at in (wrong, wrong_numbers) if len(cells_at)]
    if not rows:
        return
    line = node[1 + min(rows)]
    head = line.value.split()[0]
    if head not in heads:
        module = head.rpartition(".")[0]
        alike = [known for known in heads if known.rpartition(".")[0] == module] or heads
        raise line.error("is of no known kind", nearest(head, alike))
    raise line.error("needs three whole numbers after its kind", _EXAMPLE)


# ---------------------------------------------------------------------------- what a line may name


def check_lines_in_range(plan: Plan, programs: DocumentNode) -> None:
    """Raises if a line names a chunk, microbatch or place that is out of range."""
    per_stage = plan.ranks.num_classes // plan.ranks.llm.pp
    limits = {
        column: np.repeat([_limit(plan, name, column) for name in plan.names], len(OpKind))
        for column in ("chunk", "microbatch")
    }
    for stage in range(plan.ranks.llm.pp):
        places = _places(plan, stage)
        for device in range(stage * per_stage, (stage + 1) * per_stage):
            _refuse_in_program(plan.programs[device], limits, places, programs[device])


def _refuse_in_program(
    program: Program, limits: dict[str, Ints], places: NDArray[np.int64], node: DocumentNode
) -> None:
    heads = _heads_of(program)
    for column in ("chunk", "microbatch", "place"):
        values = getattr(program, column)
        limit = places[heads, program.chunk] if column == "place" else limits[column][heads]
        wrong = values >= limit
        if wrong.any():
            first = int(np.argmax(wrong))
            problem = f"names {column} {values[first]}, and there are {limit[first]}, counted from 0"
            raise node[1 + first].error(problem, "correct the line, or plan again")


def _limit(plan: Plan, name: str, column: str) -> int:
    if name == ALL:
        return 1
    module = plan.modules[name]
    if column == "chunk":
        return module.layout.chunks
    return plan.microbatches * (1 if name == LLM else module.microbatches_per_llm_microbatch)


def _places(plan: Plan, llm_stage: int) -> NDArray[np.int64]:
    """Returns the number of places of every head and chunk: phases, or buckets of the stage."""
    most = max(module.layout.chunks for module in plan.modules.values())
    counts = np.ones((len(plan.names), len(OpKind), most), np.int64)
    for number, (name, module) in enumerate(plan.modules.items()):
        stage = llm_stage % module.layout.pp
        counts[number, PARAMETER_TRAFFIC] = len(module.buckets[stage])
        for kind in COMPUTE_OPS:
            for chunk in range(module.layout.chunks):
                counts[number, kind, chunk] = len(plan.template_of(name, kind, stage, chunk))
    return counts.reshape(-1, most)
