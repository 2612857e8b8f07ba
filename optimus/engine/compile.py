"""Compiles the lines of one rank's program into actions, once before the first step.

A plan cuts an op into phases by the kernels of its cost model; a chunk may be cut more coarsely, down to one
phase. A phase of a forward runs at the last line that it covers, when all parameters it reads are gathered; a
phase of a backward at the first, so that gradients are complete when a later line reduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.buckets import RankBuckets
from optimus.engine.p2p import Key, MessageSpecs, P2PMailbox, SideStream, TensorSpec
from optimus.engine.process_groups import (
    ProcessGroups,
    find_seam_peer,
    find_stage_peer,
    receives_encoder_rows,
)
from optimus.engine.resharding import Resharding
from optimus.ir.op import COMPUTE_OPS, RECVS, SEAMS, SENDS, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.models.phase_order import ChunkPhase, place_phases
from optimus.models.segment import Gradients, State
from optimus.protocols import Batch, Chunk, MovedBucket

Run = Callable[[], None]
FORWARD, BACKWARD, ROWS = "forward", "backward", "rows"  # payloads of messages
FORWARD_KINDS = (
    OpKind.FORWARD,
    OpKind.SEND_F,
    OpKind.RECV_F,
    OpKind.SEND_SEAM,
    OpKind.RECV_SEAM,
    OpKind.UNSHARD,
)  # of evaluation


@dataclass(kw_only=True, slots=True)
class Action:
    """The effect of a line, and the ranks that it may wait for."""

    line: int
    kind: OpKind
    run: Run
    waits_for: tuple[int, ...] = ()


@dataclass(kw_only=True)
class StepState:
    """Data of the step that runs."""

    batch: Batch | None = None
    needs_backward: bool = True
    loss_grad: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)
    outputs: dict[int, State] = field(default_factory=dict)  # of the LLM's last stage, besides the loss


class ProgramCompiler:
    """Binds the program of one rank to its chunks, process groups and mailbox."""

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        chunks: Mapping[str, tuple[Chunk, ...]],
        buckets: RankBuckets,
        specs: MessageSpecs,
        mailbox: P2PMailbox,
        side_stream: SideStream,
        step_state: StepState,
        finish: Run,
    ) -> None:
        self.plan, self.groups, self.chunks, self.specs = plan, groups, chunks, specs
        self.buckets, self._gathered = buckets, set[MovedBucket](buckets.unplanned)
        self.mailbox, self.side_stream = mailbox, side_stream
        self.step_state, self.finish = step_state, finish
        # Ops launched on the side stream, and the ranks that the launch waits for.
        self._side_ops: dict[tuple[str, OpKind, int, int], list[int]] = {}
        self.device = plan.ranks.class_of(groups.rank)
        self.program = plan.programs[self.device]
        # Every rank of a tensor-parallel group computes the same loss; one counts it.
        self._counts_loss = plan.ranks.place(LLM, groups.rank).tp == 0
        self.senders: dict[Key, tuple[int, ...]] = {}  # by the key of their message
        self._placed: dict[tuple[str, OpKind, int, int], list[list[ChunkPhase]]] = {}

    def actions(self) -> list[Action]:
        """Returns one action per line that has an effect on this rank."""
        actions = []
        names = self.plan.names
        rows = self.program.rows.tolist()
        resharding = Resharding(self.plan, self.device, self.buckets, self._placed_phases)
        for line, (module, kind, chunk, microbatch, place) in enumerate(rows):
            action = self._action(names[module], OpKind(kind), chunk, microbatch, place)
            if action is None:
                continue
            run, waits_for = action
            if line in resharding.waits_for_gather:
                waits_for = self._other_ranks([*waits_for, *self.groups.members[f"{names[module]}.dp"]])
            runs = [*resharding.before.get(line, ()), run, *resharding.behind.get(line, ())]
            actions.append(Action(line=line, kind=OpKind(kind), run=_sequence(runs), waits_for=waits_for))
        return actions

    def _action(
        self, module: str, kind: OpKind, chunk: int, microbatch: int, place: int
    ) -> tuple[Run, tuple[int, ...]] | None:
        if kind in COMPUTE_OPS:
            return self._phase(module, kind, chunk, microbatch, place)
        if kind in SENDS or kind in RECVS:
            return self._transfer(module, kind, chunk, microbatch), ()
        if kind == OpKind.OPTIMIZER:
            return self.finish, self._partners()
        moves = [
            bucket.reduce if kind == OpKind.REDUCE_GRAD else bucket.gather
            for bucket in self.buckets.at(module, place)
        ]
        return (_sequence(moves), ()) if moves else None

    def _partners(self) -> tuple[int, ...]:
        """Returns all ranks that this one communicates with: the last line waits for all of it."""
        return self._other_ranks(sorted(chain.from_iterable(self.groups.members.values())))

    # ------------------------------------------------------------------------ phases

    def _phase(
        self, module: str, kind: OpKind, chunk: int, microbatch: int, place: int
    ) -> tuple[Run, tuple[int, ...]] | None:
        """Binds the phases of a chunk that run at a line, with the inputs and outputs of its op."""
        placed = self._placed_phases(module, kind, chunk, microbatch)
        phases, busy = placed[place], [at for at, phases in enumerate(placed) if phases]
        if not phases:
            return None
        runs: list[Run] = [phase.run for phase in phases]
        waits, op, members = list[int](), (module, kind, chunk, microbatch), self.groups.members
        for axis in dict.fromkeys(phase.waits_for for phase in phases if phase.waits_for):
            waits += members[f"{module}.{axis}"]
        if kind == OpKind.FORWARD:
            gathers = self._gathers_needed(module, chunk, [phase.layer for phase in phases])
            runs = [*(bucket.wait_gathered for bucket in gathers), *runs]
            if any(bucket.is_sharded for bucket in gathers):
                waits += members[f"{module}.dp"]  # last: there may be many
        virtual = chunk * self.plan.modules[module].layout.pp + self.plan.ranks.stage_of(module, self.device)
        if place == busy[0] and kind != OpKind.WEIGHT_GRAD:
            begin, keys = self._bind_begin(module, kind, virtual, microbatch)
            senders = [rank for key in keys for rank in self.senders.get(key, ())]
            waits = senders + waits
            runs.insert(0, begin)
            if senders and phases[-1].kind == OpKind.LAUNCH and op in self._side_launchable:
                # The side stream runs launches in order: this one waits for all that are in flight.
                self._side_ops[op] = [*waits, *chain.from_iterable(self._side_ops.values())]
                return partial(self.side_stream.launch, op, _sequence(runs)), self._other_ranks(waits)
        if op in self._side_ops and place == busy[1]:
            runs.insert(0, partial(self.side_stream.wait, op))
            waits = self._side_ops.pop(op) + waits  # the launch may still wait
        if place == busy[-1] and kind != OpKind.WEIGHT_GRAD:
            runs.append(self._bind_end(module, kind, virtual, microbatch))
        return _sequence(runs), self._other_ranks(waits)

    def _other_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Removes this rank and duplicates; the order is that in which the watchdog reads statuses."""
        return tuple(rank for rank in dict.fromkeys(ranks) if rank != self.groups.rank)

    @cached_property
    def _side_launchable(self) -> set[tuple[str, OpKind, int, int]]:
        """Ops that begin with a launch before whose wait their module launches nothing else.

        Only these may launch on the side stream: all ranks of a group must launch in the same order.
        """
        names, launchable = self.plan.names, set()
        open_ops: dict[str, tuple[str, OpKind, int, int]] = {}
        for module, kind, chunk, microbatch, place in self.program.rows.tolist():
            if kind not in COMPUTE_OPS:
                continue
            name = names[module]
            op = name, OpKind(kind), chunk, microbatch
            stage = self.plan.ranks.stage_of(name, self.device)
            launches = self.plan.template_of(name, OpKind(kind), stage, chunk)[place].kind == OpKind.LAUNCH
            if open_ops.get(name) == op:
                launchable.add(open_ops.pop(name))
            elif launches:
                open_ops.pop(name, None)
                if place == 0:
                    open_ops[name] = op
        return launchable

    def _gathers_needed(self, module: str, chunk: int, layers: Sequence[int]) -> list[MovedBucket]:
        """Returns the buckets of some layers that no earlier line has waited for."""
        needed = chain.from_iterable(self.buckets.needed_by(module, chunk, layer) for layer in layers)
        first = [bucket for bucket in dict.fromkeys(needed) if bucket not in self._gathered]
        self._gathered |= set(first)
        return first

    def _placed_phases(
        self, module: str, kind: OpKind, chunk: int, microbatch: int
    ) -> list[list[ChunkPhase]]:
        key = module, kind, chunk, microbatch
        if key not in self._placed:
            stage = self.plan.ranks.stage_of(module, self.device)
            template = self.plan.template_of(module, kind, stage, chunk)
            phases = self.chunks[module][chunk].phases(kind, microbatch)
            self._placed[key] = place_phases(f"{module}.{kind.word} chunk {chunk}", template, phases)
        return self._placed[key]

    def _bind_begin(self, module: str, kind: OpKind, virtual: int, microbatch: int) -> tuple[Run, list[Key]]:
        chunk = self.chunks[module][virtual // self.plan.modules[module].layout.pp]
        if kind != OpKind.FORWARD:
            key: Key = (BACKWARD, module, virtual, microbatch)
            if module == LLM and virtual == self._last_virtual(LLM):
                return partial(self._begin_at_loss, chunk, microbatch), []
            return partial(self._begin_backward, chunk, key, microbatch), [key]
        keys = self._input_keys(module, virtual, microbatch)
        needs = tuple(self._needs_grad(key) for key in keys)
        return partial(self._begin_forward, chunk, module, virtual, microbatch, keys, needs), keys

    def _input_keys(self, module: str, virtual: int, microbatch: int) -> list[Key]:
        """Returns the keys of the messages that a forward takes, in the order of its inputs."""
        if virtual != self.plan.modules[module].virtual_stages[0]:
            return [(FORWARD, module, virtual, microbatch)]
        if module != LLM:
            return []
        return [
            (ROWS, name, 0, encoder_microbatch)
            for name, encoder in self.plan.encoders.items()
            for encoder_microbatch in encoder.microbatches_of(microbatch)
            if receives_encoder_rows(self.plan, self.groups.rank, name, encoder_microbatch)
        ]

    def _needs_grad(self, key: Key) -> bool:
        """Returns whether the chunk that produces a message runs a backward."""
        payload, module, virtual, _ = key
        virtual = self._last_virtual(module) if payload == ROWS else virtual - 1
        producer = self.plan.modules[module].chunks[virtual]
        return OpKind.BACKWARD in producer.templates or OpKind.INPUT_GRAD in producer.templates

    def _begin_forward(
        self,
        chunk: Chunk,
        module: str,
        virtual: int,
        microbatch: int,
        keys: list[Key],
        keys_need_grad: tuple[bool, ...],
    ) -> None:
        batch = self.step_state.batch
        assert batch is not None
        first = virtual == self.plan.modules[module].virtual_stages[0]
        inputs = list(batch.inputs(module, microbatch) if first else ())
        needs_grad = [False] * len(inputs)
        for key, key_needs_grad in zip(keys, keys_need_grad, strict=True):
            tensors = self.mailbox.take(key)
            inputs += tensors
            needs_grad += [key_needs_grad and tensor.is_floating_point() for tensor in tensors]
        needs = tuple(needs_grad) if self.step_state.needs_backward else None
        chunk.begin_forward(microbatch, tuple(inputs), needs, batch.context(module, microbatch))

    def _begin_at_loss(self, chunk: Chunk, microbatch: int) -> None:
        """Begins a backward with gradient 1 for the loss and none for other outputs."""
        assert self.step_state.loss_grad is not None
        no_grads = (None,) * len(self.step_state.outputs.get(microbatch, ()))
        chunk.begin_backward(microbatch, (self.step_state.loss_grad, *no_grads))

    def _begin_backward(self, chunk: Chunk, key: Key, microbatch: int) -> None:
        chunk.begin_backward(microbatch, self.mailbox.take(key))

    def _bind_end(self, module: str, kind: OpKind, virtual: int, microbatch: int) -> Run:
        chunk = self.chunks[module][virtual // self.plan.modules[module].layout.pp]
        if kind == OpKind.FORWARD:
            if virtual < self._last_virtual(module):
                return partial(
                    self._put_output, chunk, microbatch, (FORWARD, module, virtual + 1, microbatch)
                )
            if module != LLM:
                return partial(self._put_output, chunk, microbatch, (ROWS, module, 0, microbatch))
            return partial(self._store_loss, chunk, microbatch)
        parts: list[tuple[int, int, Key]] = []  # slices of the gradients, counted from the end
        at = 0
        for key in reversed(self._input_keys(module, virtual, microbatch)):
            begin = at - len(self._specs_under(key))
            if self._needs_grad(key):
                parts.append((begin, at, self._backward_key(key)))
            at = begin
        return partial(self._put_input_grads, chunk, microbatch, tuple(reversed(parts)))

    def _backward_key(self, key: Key) -> Key:
        """Returns the key under which the gradient of a message goes back to its producer."""
        payload, module, virtual, microbatch = key
        producer = self._last_virtual(module) if payload == ROWS else virtual - 1
        return BACKWARD, module, producer, microbatch

    def _last_virtual(self, module: str) -> int:
        return self.plan.modules[module].virtual_stages[-1]

    def _put_output(self, chunk: Chunk, microbatch: int, key: Key) -> None:
        self.mailbox.put(key, chunk.output(microbatch))

    def _store_loss(self, chunk: Chunk, microbatch: int) -> None:
        output = chunk.output(microbatch)
        if self._counts_loss:
            self.step_state.losses.append(output[0])
        if self.step_state.loss_grad is None:
            self.step_state.loss_grad = torch.ones_like(output[0])
        if len(output) > 1:
            self.step_state.outputs[microbatch] = output[1:]

    def _put_input_grads(
        self, chunk: Chunk, microbatch: int, parts: tuple[tuple[int, int, Key], ...]
    ) -> None:
        """Leaves the gradients of received inputs for their producers."""
        gradients = chunk.input_gradients(microbatch)
        for begin, end, key in parts:
            grads = gradients[begin : end or None]
            self.mailbox.put(key, _zeros_if_missing(grads, self._specs_under(key), self.mailbox.device))

    def _specs_under(self, key: Key) -> tuple[TensorSpec, ...]:
        """Returns the specs of the message under a key."""
        payload, module, virtual, microbatch = key
        last = self._last_virtual(module)
        if payload == ROWS or (payload == BACKWARD and module != LLM and virtual == last):
            return self.specs.encoder_rows(module, microbatch)
        receiver = virtual if payload == FORWARD else virtual + 1
        return self.specs.stage_input(module, receiver, microbatch)

    # ------------------------------------------------------------------------ transfers

    def _transfer(self, module: str, kind: OpKind, chunk: int, microbatch: int) -> Run:
        rank = self.groups.rank
        if kind in SEAMS:
            axis, peer = find_seam_peer(self.plan, rank, module, kind, microbatch)
        else:
            axis, peer = find_stage_peer(self.plan, rank, module, kind)
        group = self.groups.get(axis)
        assert group is not None, axis
        key = self._message_key(module, kind, chunk, microbatch)
        if kind in SENDS:
            return partial(self.mailbox.send, key, peer, group)
        self.senders[key] = (peer,)
        return partial(self._receive, key, peer, group)

    def _receive(self, key: Key, peer: int, group: dist.ProcessGroup) -> None:
        self.mailbox.receive(key, self._specs_under(key), peer, group)

    def _message_key(self, module: str, kind: OpKind, chunk: int, microbatch: int) -> Key:
        """Returns the key of the message that a line sends or receives."""
        layout = self.plan.modules[module].layout
        virtual = chunk * layout.pp + self.plan.ranks.stage_of(module, self.device)
        last = self._last_virtual(module)
        return {
            OpKind.SEND_F: (FORWARD, module, virtual + 1, microbatch),
            OpKind.RECV_F: (FORWARD, module, virtual, microbatch),
            OpKind.SEND_B: (BACKWARD, module, virtual - 1, microbatch),
            OpKind.RECV_B: (BACKWARD, module, virtual, microbatch),
            OpKind.SEND_SEAM: (ROWS, module, 0, microbatch),
            OpKind.RECV_SEAM: (ROWS, module, 0, microbatch),
            OpKind.SEND_SEAM_B: (BACKWARD, module, last, microbatch),
            OpKind.RECV_SEAM_B: (BACKWARD, module, last, microbatch),
        }[kind]


def _sequence(runs: Sequence[Run]) -> Run:
    return runs[0] if len(runs) == 1 else partial(_run_all, tuple(runs))


def _run_all(runs: tuple[Run, ...]) -> None:
    for run in runs:
        run()


def _zeros_if_missing(
    gradients: Gradients, specs: tuple[TensorSpec, ...], device: torch.device
) -> tuple[Tensor, ...]:
    """Replaces missing gradients, of inputs that no output depends on, by zeros."""
    return tuple(
        torch.zeros(spec.shape, dtype=spec.dtype, device=device) if gradient is None else gradient
        for gradient, spec in zip(gradients, specs, strict=True)
    )


def describe_line(plan: Plan, device: int, line: int) -> str:
    """Describes a line: `llm.F chunk 0 microbatch 5`."""
    module, kind, chunk, microbatch, _ = plan.programs[device].rows[line].tolist()
    return f"{plan.names[module]}.{OpKind(kind).word} chunk {chunk} microbatch {microbatch}"


def select_forward_actions(actions: list[Action]) -> list[Action]:
    """Returns the actions of a program without a backward."""
    return [action for action in actions if action.kind in FORWARD_KINDS]
