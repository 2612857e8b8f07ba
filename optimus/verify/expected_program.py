"""Derives the lines that a plan's header requires and finds each of them in the programs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from optimus.ir.op import COMPUTE_OPS, Ints, OpKind
from optimus.ir.plan import Bucket, Plan, Program, Span
from optimus.ir.ranks import LLM

Problems = Iterator[tuple[str, str]]  # where, problem
_ONE = np.zeros(1, np.int64)


class LineBlockKey(NamedTuple):
    """Key of a block: the lines of one kind of one chunk of a module on a device class."""

    device: int
    module: str
    kind: OpKind
    chunk: int


class _LineBlock(NamedTuple):
    """Expected lines of a key: one per microbatch and place."""

    key: LineBlockKey
    microbatches: Ints
    places: Ints


def input_grad_kind(plan: Plan, module: str, virtual: int) -> OpKind | None:
    """Returns the kind of op that computes a virtual stage's input gradient; None if it has no backward."""
    kinds = plan.modules[module].chunks[virtual].templates
    return (
        OpKind.BACKWARD
        if OpKind.BACKWARD in kinds
        else OpKind.INPUT_GRAD
        if OpKind.INPUT_GRAD in kinds
        else None
    )


def _bucket_chunk(bucket: Bucket) -> int:
    """Returns the chunk that lines of a bucket carry: 0 for a bucket of the whole stage."""
    return max(bucket.chunk, 0)


def bucket_span(bucket: Bucket, kind: OpKind) -> Span:
    """Returns for how much work there is one line of this kind of traffic."""
    if kind == OpKind.REDUCE_GRAD:
        return bucket.reduced_per
    if kind == OpKind.UNSHARD_B:
        return Span.OP if bucket.gathered_per == Span.OP else Span.NEVER
    return bucket.gathered_per


class ExpectedProgram:
    """Lines that the header of a plan requires."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.ranks = plan, plan.ranks
        every = np.arange(plan.microbatches)
        self._by_pipeline = {LLM: [every]}
        for name, module in plan.encoders.items():
            owner = np.array(module.pipelines, np.int64)
            count = self.ranks.num_pipelines(name)
            self._by_pipeline[name] = [np.flatnonzero(owner == number) for number in range(count)]
        self._needs_grad = {name: self._gradients(name) for name in plan.modules}

    def _gradients(self, name: str) -> list[bool]:
        """Returns, per virtual stage, whether the gradient of its output is needed."""
        needs_grad: list[bool] = []
        for virtual in range(len(self.plan.modules[name].chunks)):
            here = input_grad_kind(self.plan, name, virtual) is not None
            needs_grad.append(here or bool(needs_grad and needs_grad[-1]))
        return needs_grad

    def microbatches(self, name: str, device: int) -> Ints:
        """Returns the microbatches of a module that a device class computes."""
        return self._by_pipeline[name][self.ranks.pipeline_of(name, device)]

    def arriving(self, name: str, device: int) -> list[tuple[int, Ints]]:
        """Returns the classes that send an encoder's rows to a class of the LLM's entry, by microbatch.

        The class itself is one of them if an encoder pipeline ends on it.
        """
        if not self.is_entry(device):
            return []
        senders = self.ranks.exit_classes(name, device)
        return [(sender, self.microbatches(name, sender)) for sender in senders]

    def is_entry(self, device: int) -> bool:
        """Returns whether a class is on the stage of the LLM that takes encoder outputs."""
        return self.ranks.coordinates(device)[0] == self.ranks.entry_stage

    def blocks(self) -> Iterator[_LineBlock]:
        """Yields all blocks in order of device class, module, kind and chunk."""
        for device in range(self.ranks.num_classes):
            for name in self.plan.modules:
                yield from self._ops(device, name)
                yield from self._transfers(device, name)
                yield from self._seam(device, name)
                yield from self._buckets(device, name)
            yield _LineBlock(LineBlockKey(device, self.plan.names[-1], OpKind.OPTIMIZER, 0), _ONE, _ONE)

    def _ops(self, device: int, name: str) -> Iterator[_LineBlock]:
        module, stage = self.plan.modules[name], self.ranks.stage_of(name, device)
        mine = self.microbatches(name, device)
        for kind in COMPUTE_OPS:
            for chunk in range(module.layout.chunks):
                phases = len(self.plan.template_of(name, kind, stage, chunk))
                if phases:
                    yield _LineBlock(LineBlockKey(device, name, kind, chunk), mine, np.arange(phases))

    def _transfers(self, device: int, name: str) -> Iterator[_LineBlock]:
        """Yields transfers between virtual stages; none where both are on the same class."""
        layout, stage = self.plan.modules[name].layout, self.ranks.stage_of(name, device)
        if layout.pp == 1:
            return
        needs_grad, mine = self._needs_grad[name], self.microbatches(name, device)
        virtual = [chunk * layout.pp + stage for chunk in range(layout.chunks)]
        filled = self.plan.modules[name].virtual_stages
        has_next = [v in filled[:-1] for v in virtual]
        follows = [v in filled[1:] for v in virtual]
        for kind, needed in (
            (OpKind.SEND_F, has_next),
            (OpKind.RECV_F, follows),
            (OpKind.SEND_B, [follows[c] and needs_grad[v - 1] for c, v in enumerate(virtual)]),
            (OpKind.RECV_B, [has_next[c] and needs_grad[v] for c, v in enumerate(virtual)]),
        ):
            for chunk in range(layout.chunks):
                if needed[chunk]:
                    yield _LineBlock(LineBlockKey(device, name, kind, chunk), mine, _ONE)

    def _seam(self, device: int, name: str) -> Iterator[_LineBlock]:
        """Yields transfers between an encoder's last stage and the LLM's entry; all carry chunk 0."""
        if name == LLM:
            return
        ends_here = self.ranks.stage_of(name, device) == self.ranks.exit_stage(name)
        sent = self.microbatches(name, device) if ends_here and not self.is_entry(device) else None
        remote = [rows for sender, rows in self.arriving(name, device) if sender != device]
        received = np.sort(np.concatenate(remote)) if remote else None
        back = self._needs_grad[name][self.plan.modules[name].virtual_stages[-1]]
        for kind, rows in (
            (OpKind.SEND_SEAM, sent),
            (OpKind.RECV_SEAM, received),
            (OpKind.SEND_SEAM_B, received if back else None),
            (OpKind.RECV_SEAM_B, sent if back else None),
        ):
            if rows is not None:
                yield _LineBlock(LineBlockKey(device, name, kind, 0), rows, _ONE)

    def _buckets(self, device: int, name: str) -> Iterator[_LineBlock]:
        module, stage = self.plan.modules[name], self.ranks.stage_of(name, device)
        mine, buckets = self.microbatches(name, device), module.buckets[stage]
        for kind in (OpKind.UNSHARD, OpKind.REDUCE_GRAD, OpKind.UNSHARD_B):
            spans = [bucket_span(bucket, kind) for bucket in buckets]
            for chunk in sorted({_bucket_chunk(bucket) for bucket in buckets}):
                places = [
                    place
                    for place, bucket in enumerate(buckets)
                    if _bucket_chunk(bucket) == chunk and spans[place] != Span.NEVER
                ]
                if places:
                    # Replicas meet by turn: each may run another encoder microbatch.
                    each = _ONE if spans[places[0]] == Span.STEP else np.arange(len(mine))
                    yield _LineBlock(LineBlockKey(device, name, kind, chunk), each, np.array(places))


class PlanLines:
    """Programs of all device classes as columns; a line is identified by its row."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        programs = plan.programs or (Program.of([]),)
        sizes = [len(program) for program in plan.programs]
        self.first = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self.device: Ints = np.repeat(np.arange(len(sizes)), sizes)
        rows = np.concatenate([program.rows for program in programs]).astype(np.int64)
        self.module, self.kind, self.chunk, self.microbatch, self.place = rows.T
        self._blocks: dict[LineBlockKey, tuple[Ints, Ints]] = {}

    def __len__(self) -> int:
        return len(self.device)

    def text(self, line: int) -> str:
        """Returns `class 3 line 120: llm.F 3 12 4`, counting lines of a class from 1."""
        device, module = int(self.device[line]), int(self.module[line])
        names = self.plan.names
        name = names[module] if 0 <= module < len(names) else f"module {module}"
        columns = self.chunk, self.microbatch, self.place
        what = " ".join(str(column[line]) for column in columns)
        row = line - int(self.first[device]) + 1
        return f"class {device} line {row}: {name}.{OpKind(int(self.kind[line])).word} {what}"

    @cached_property
    def identity(self) -> Ints:
        """Keys of lines, equal on all device classes: module, kind, chunk, microbatch and place."""
        identity: Ints = np.zeros(len(self), np.int64)
        for column in (self.module, self.kind, self.chunk, self.microbatch, self.place):
            identity = identity * (1 + column.max(initial=0)) + column
        return identity

    def locate(self, blocks: list[_LineBlock], order: Ints) -> None:
        """Records that the lines of the blocks, one after another, are at rows `order`."""
        at = 0
        for key, microbatches, places in blocks:
            size = len(microbatches) * len(places)
            rows = order[at : at + size].reshape(len(microbatches), len(places))
            self._blocks[key] = (microbatches, rows)
            at += size

    def at(self, device: int, module: str, kind: OpKind, chunk: int = 0) -> Ints:
        """Returns the rows of a block, microbatches by places; empty if there is no such block."""
        block = self._blocks.get(LineBlockKey(device, module, kind, chunk))
        return np.zeros((0, 0), np.int64) if block is None else block[1]

    def all_blocks(self) -> Iterator[tuple[LineBlockKey, Ints, Ints]]:
        """Yields every block with its microbatches and the rows of its lines."""
        return ((key, *block) for key, block in self._blocks.items())


def check_line_coverage(lines: PlanLines, expected: ExpectedProgram) -> Problems:
    """Yields missing, repeated and unexpected lines; if there are none, records where the blocks are."""
    plan, blocks = lines.plan, list(expected.blocks())
    wanted = sum(len(block.microbatches) * len(block.places) for block in blocks)
    if wanted > 4 * len(lines) + 10_000:
        yield "programs", f"{len(lines)} lines where the header requires {wanted}"
        return
    size = _sizes(plan, blocks)
    columns = (lines.module, lines.kind, lines.chunk, lines.microbatch, lines.place)
    known = np.ones(len(lines), bool)
    for column, limit in zip(columns, size, strict=True):
        known &= (column >= 0) & (column < limit)
    for line in np.flatnonzero(~known).tolist():
        yield lines.text(line), "is unexpected: out of range"
    rows = np.flatnonzero(known)
    keys = lines.device[rows]
    for column, limit in zip(columns, size, strict=True):
        keys = keys * limit + column[rows]
    order = np.argsort(keys, kind="stable")
    required = _keys(plan, blocks, size)
    if len(rows) == len(lines) and np.array_equal(keys[order], required):
        lines.locate(blocks, order)
        return
    present, first = np.unique(keys, return_index=True)
    for line in rows[first[~np.isin(present, required)]].tolist():
        yield lines.text(line), "is unexpected: another class's, or no such op"
    for at in (np.flatnonzero(np.diff(keys[order]) == 0) + 1).tolist():
        yield lines.text(int(rows[order[at]])), "is repeated"
    for key in required[~np.isin(required, present)].tolist():
        yield _name(plan, key, size), "is missing"


def _sizes(plan: Plan, blocks: list[_LineBlock]) -> tuple[int, ...]:
    """Returns upper bounds of module, kind, chunk, microbatch and place."""
    return (
        len(plan.names),
        len(OpKind),
        1 + max(block.key.chunk for block in blocks),
        1 + max((int(block.microbatches[-1]) for block in blocks if len(block.microbatches)), default=0),
        1 + max((int(block.places[-1]) for block in blocks if len(block.places)), default=0),
    )


def _keys(plan: Plan, blocks: list[_LineBlock], size: tuple[int, ...]) -> Ints:
    """Returns every expected line as one number; ascending, because blocks come in this order."""
    modules, kinds, chunks, microbatches, places = size
    number = {name: index for index, name in enumerate(plan.names)}
    parts = []
    for (device, name, kind, chunk), rows, columns in blocks:
        first = ((device * modules + number[name]) * kinds + kind) * chunks + chunk
        parts.append((((first * microbatches + rows) * places)[:, None] + columns).ravel())
    keys: Ints = np.concatenate(parts)
    return keys


def _name(plan: Plan, key: int, size: tuple[int, ...]) -> str:
    """Returns the text of a line that is in no program."""
    words = []
    for limit in reversed(size):
        key, value = divmod(key, limit)
        words.append(value)
    place, microbatch, chunk, kind, module = words
    return f"class {key}: {plan.names[module]}.{OpKind(kind).word} {chunk} {microbatch} {place}"
