"""Turns the lines of one rank's program into actions, bound once before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor

from optimus.engine.buckets import RankBuckets
from optimus.engine.encoder_llm_routing import receives_rows
from optimus.engine.p2p import Key, P2PMailbox, TensorSpec
from optimus.engine.placing import place_phases
from optimus.engine.process_groups import ProcessGroups, seam_edge, stage_edge
from optimus.engine.side_stream import SideStream
from optimus.ir.op import COMPUTE_OPS, RECVS, SEAMS, SENDS, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.models.chunk import ChunkPhase
from optimus.models.segment import Gradients, State
from optimus.protocols import Batch, Chunk, ParamBucket

Run = Callable[[], None]
FORWARD, BACKWARD, ROWS = "forward", "backward", "rows"  # what a key of the mail names
FORWARD_KINDS = (
    OpKind.FORWARD,
    OpKind.SEND_F,
    OpKind.RECV_F,
    OpKind.SEND_SEAM,
    OpKind.RECV_SEAM,
    OpKind.UNSHARD,
)


@dataclass(frozen=True, kw_only=True)
class MessageSpecs:
    """Tensors that travel: what each virtual stage of a module gets, and what goes over the seam."""

    inputs: Mapping[str, Sequence[tuple[TensorSpec, ...]]]  # of the first virtual stage: not looked at
    rows: Mapping[str, tuple[TensorSpec, ...]]


@dataclass(kw_only=True, slots=True)
class Action:
    """What a line does, and the ranks that it may wait for."""

    line: int
    kind: OpKind
    run: Run
    waits_for: tuple[int, ...] = ()


@dataclass(kw_only=True)
class StepState:
    """What changes from step to step."""

    batch: Batch | None = None
    needs_backward: bool = True
    loss_grad: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)
    outputs: dict[int, State] = field(default_factory=dict)  # of the LLM's last stage, where they are kept


class Compiler:
    """Binds the program of one rank to its chunks, groups and mail."""

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        chunks: Mapping[str, tuple[Chunk, ...]],
        buckets: RankBuckets,
        specs: MessageSpecs,
        mail: P2PMailbox,
        side: SideStream,
        moment: StepState,
        finish: Run,
    ) -> None:
        self.plan, self.groups, self.chunks, self.specs = plan, groups, chunks, specs
        self.buckets, self._gathered = buckets, set(buckets.unplanned)
        self.mail, self.side, self.moment, self.finish = mail, side, moment, finish
        # Ops that open beside the program, and the ranks for which what opens them waits.
        self._beside: dict[tuple[str, OpKind, int, int], list[int]] = {}
        self.device = plan.ranks.class_of(groups.rank)
        self.program = plan.programs[self.device]
        self._counts_loss = plan.ranks.place(LLM, groups.rank).tp == 0  # all of a group make the same
        self.senders: dict[Key, tuple[int, ...]] = {}  # whose message is taken under a key
        self._placed: dict[tuple[str, OpKind, int, int], list[list[ChunkPhase]]] = {}

    def actions(self) -> list[Action]:
        """One per line that does something."""
        found = []
        names = self.plan.names
        rows = self.program.rows.tolist()
        for line, (module, kind, chunk, microbatch, place) in enumerate(rows):
            action = self._action(names[module], OpKind(kind), chunk, microbatch, place)
            if action is not None:
                found.append(Action(line=line, kind=OpKind(kind), run=action[0], waits_for=action[1]))
        return found

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
            each.gather if kind == OpKind.UNSHARD else each.reduce for each in self.buckets.at(module, place)
        ]
        return (_in_turn(moves), ()) if moves else None

    def _partners(self) -> tuple[int, ...]:
        """Ranks that this one exchanges anything with: all of it ends with the step."""
        return self._others(sorted(chain.from_iterable(self.groups.members.values())))

    # ------------------------------------------------------------------------ phases

    def _phase(
        self, module: str, kind: OpKind, chunk: int, microbatch: int, place: int
    ) -> tuple[Run, tuple[int, ...]] | None:
        """The phases of the chunk that run at this line, with what comes in before and goes out after."""
        placed = self._phases_of(module, kind, chunk, microbatch)
        phases, busy = placed[place], [at for at, some in enumerate(placed) if some]
        if not phases:
            return None
        runs: list[Run] = [phase.run for phase in phases]
        waits, op, members = list[int](), (module, kind, chunk, microbatch), self.groups.members
        if any(phase.waits_for_tp for phase in phases):
            waits += members[f"{module}.tp"]
        if kind == OpKind.FORWARD:
            awaited = self._awaited(module, chunk, [phase.layer for phase in phases])
            runs = [*(bucket.wait_gathered for bucket in awaited), *runs]
            if any(bucket.is_sharded for bucket in awaited):
                waits += members[f"{module}.dp"]  # last: there may be many
        virtual = chunk * self.plan.modules[module].layout.pp + self.plan.ranks.stage_of(module, self.device)
        if place == busy[0] and kind != OpKind.WEIGHT_GRAD:
            begin, keys = self._begin(module, kind, virtual, microbatch)
            senders = [rank for key in keys for rank in self.senders.get(key, ())]
            waits = senders + waits
            runs.insert(0, begin)
            if senders and phases[-1].kind == OpKind.LAUNCH and op in self._undisturbed:
                # One after another: after all that was begun before and has not ended.
                self._beside[op] = [*waits, *chain.from_iterable(self._beside.values())]
                return partial(self.side.launch, op, _in_turn(runs)), self._others(waits)
        if op in self._beside and place == busy[1]:
            runs.insert(0, partial(self.side.wait, op))
            waits = self._beside.pop(op) + waits  # what was begun may still wait
        if place == busy[-1] and kind != OpKind.WEIGHT_GRAD:
            runs.append(self._end(module, kind, virtual, microbatch))
        return _in_turn(runs), self._others(waits)

    def _others(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Each once; who is named first is asked first."""
        return tuple(rank for rank in dict.fromkeys(ranks) if rank != self.groups.rank)

    @cached_property
    def _undisturbed(self) -> set[tuple[str, OpKind, int, int]]:
        """Ops that open with a launch before whose wait their module launches nothing else.

        Only these may open beside the program: all ranks of a group must launch in the same order.
        """
        names, found = self.plan.names, set()
        open_ops: dict[str, tuple[str, OpKind, int, int]] = {}
        for module, kind, chunk, microbatch, place in self.program.rows.tolist():
            if kind not in COMPUTE_OPS:
                continue
            name = names[module]
            op = name, OpKind(kind), chunk, microbatch
            stage = self.plan.ranks.stage_of(name, self.device)
            launches = self.plan.template_of(name, OpKind(kind), stage, chunk)[place].kind == OpKind.LAUNCH
            if open_ops.get(name) == op:
                found.add(open_ops.pop(name))
            elif launches:
                open_ops.pop(name, None)
                if place == 0:
                    open_ops[name] = op
        return found

    def _awaited(self, module: str, chunk: int, layers: Sequence[int]) -> list[ParamBucket]:
        """What some layers need gathered: at the first line of the program that needs it."""
        needed = chain.from_iterable(self.buckets.needed_by(module, chunk, layer) for layer in layers)
        first = [bucket for bucket in dict.fromkeys(needed) if bucket not in self._gathered]
        self._gathered |= set(first)
        return first

    def _phases_of(self, module: str, kind: OpKind, chunk: int, microbatch: int) -> list[list[ChunkPhase]]:
        key = module, kind, chunk, microbatch
        if key not in self._placed:
            stage = self.plan.ranks.stage_of(module, self.device)
            template = self.plan.template_of(module, kind, stage, chunk)
            phases = self.chunks[module][chunk].phases(kind, microbatch)
            self._placed[key] = place_phases(f"{module}.{kind.word} chunk {chunk}", template, phases)
        return self._placed[key]

    def _begin(self, module: str, kind: OpKind, virtual: int, microbatch: int) -> tuple[Run, list[Key]]:
        chunk = self.chunks[module][virtual // self.plan.modules[module].layout.pp]
        if kind != OpKind.FORWARD:
            key: Key = (BACKWARD, module, virtual, microbatch)
            if module == LLM and virtual == len(self.plan.modules[LLM].chunks) - 1:
                return partial(self._begin_at_loss, chunk, microbatch), []
            return partial(self._begin_backward, chunk, key, microbatch), [key]
        keys = self._inputs(module, virtual, microbatch)
        needs = tuple(self._needs(key) for key in keys)
        return partial(self._begin_forward, chunk, module, virtual, microbatch, keys, needs), keys

    def _inputs(self, module: str, virtual: int, microbatch: int) -> list[Key]:
        """Keys of what a forward takes from the mail, in the order of its state."""
        if virtual:
            return [(FORWARD, module, virtual, microbatch)]
        if module != LLM:
            return []
        return [
            (ROWS, name, 0, own)
            for name, encoder in self.plan.encoders.items()
            for own in encoder.microbatches_of(microbatch)
            if receives_rows(self.plan, self.groups.rank, name, own)
        ]

    def _needs(self, key: Key) -> bool:
        """Whether the maker of what a key names runs a backward."""
        what, module, virtual, _ = key
        chunks = self.plan.modules[module].chunks
        maker = chunks[-1] if what == ROWS else chunks[virtual - 1]
        return OpKind.BACKWARD in maker.templates or OpKind.INPUT_GRAD in maker.templates

    def _begin_forward(
        self,
        chunk: Chunk,
        module: str,
        virtual: int,
        microbatch: int,
        keys: list[Key],
        needed: tuple[bool, ...],
    ) -> None:
        batch = self.moment.batch
        assert batch is not None
        own = () if virtual else batch.inputs(module, microbatch)
        state, wanted = list(own), [False] * len(own)
        for key, need in zip(keys, needed, strict=True):
            taken = self.mail.take(key)
            state += taken
            wanted += [need and tensor.is_floating_point() for tensor in taken]
        needs = tuple(wanted) if self.moment.needs_backward else None
        chunk.begin_forward(microbatch, tuple(state), needs, batch.context(module, microbatch))

    def _begin_at_loss(self, chunk: Chunk, microbatch: int) -> None:
        """The loss has gradient 1; whatever else was made has none."""
        assert self.moment.loss_grad is not None
        others = (None,) * len(self.moment.outputs.get(microbatch, ()))
        chunk.begin_backward(microbatch, (self.moment.loss_grad, *others))

    def _begin_backward(self, chunk: Chunk, key: Key, microbatch: int) -> None:
        chunk.begin_backward(microbatch, self.mail.take(key))

    def _end(self, module: str, kind: OpKind, virtual: int, microbatch: int) -> Run:
        chunk = self.chunks[module][virtual // self.plan.modules[module].layout.pp]
        last = len(self.plan.modules[module].chunks) - 1
        if kind == OpKind.FORWARD:
            if virtual < last:
                return partial(self._hand_on, chunk, microbatch, (FORWARD, module, virtual + 1, microbatch))
            if module != LLM:
                return partial(self._hand_on, chunk, microbatch, (ROWS, module, 0, microbatch))
            return partial(self._keep_loss, chunk, microbatch)
        parts: list[tuple[int, int, Key]] = []  # where among the gradients, counted from the end
        at = 0
        for key in reversed(self._inputs(module, virtual, microbatch)):
            begin = at - len(self._specs_of(key))
            if self._needs(key):
                parts.append((begin, at, self._backward_key(key)))
            at = begin
        return partial(self._hand_back, chunk, microbatch, tuple(reversed(parts)))

    def _backward_key(self, key: Key) -> Key:
        """Under which the gradient of what `key` names goes to whoever made it."""
        what, module, virtual, microbatch = key
        maker = len(self.plan.modules[module].chunks) - 1 if what == ROWS else virtual - 1
        return BACKWARD, module, maker, microbatch

    def _hand_on(self, chunk: Chunk, microbatch: int, key: Key) -> None:
        self.mail.put(key, chunk.output(microbatch))

    def _keep_loss(self, chunk: Chunk, microbatch: int) -> None:
        output = chunk.output(microbatch)
        if self._counts_loss:
            self.moment.losses.append(output[0])
        if self.moment.loss_grad is None:
            self.moment.loss_grad = torch.ones_like(output[0])
        if len(output) > 1:
            self.moment.outputs[microbatch] = output[1:]

    def _hand_back(self, chunk: Chunk, microbatch: int, parts: tuple[tuple[int, int, Key], ...]) -> None:
        """Gradients of what came by mail, to those who made it."""
        gradients = chunk.input_gradients(microbatch)
        for begin, end, key in parts:
            found = gradients[begin : end or None]
            self.mail.put(key, _present(found, self._specs_of(key), self.mail.device))

    def _specs_of(self, key: Key) -> tuple[TensorSpec, ...]:
        """Of what travels under a key."""
        what, module, virtual, _ = key
        last = len(self.plan.modules[module].chunks) - 1
        if what == ROWS or (what == BACKWARD and module != LLM and virtual == last):
            return self.specs.rows[module]
        return self.specs.inputs[module][virtual if what == FORWARD else virtual + 1]

    # ------------------------------------------------------------------------ transfers

    def _transfer(self, module: str, kind: OpKind, chunk: int, microbatch: int) -> Run:
        rank = self.groups.rank
        if kind in SEAMS:
            axis, other = seam_edge(self.plan, rank, module, kind, microbatch)
        else:
            axis, other = stage_edge(self.plan, rank, module, kind)
        group = self.groups.get(axis)
        assert group is not None, axis
        key = self._key(module, kind, chunk, microbatch)
        if kind in SENDS:
            return partial(self.mail.send, key, other, group)
        self.senders[key] = (other,)
        return partial(self.mail.receive, key, self._specs_of(key), other, group)

    def _key(self, module: str, kind: OpKind, chunk: int, microbatch: int) -> Key:
        """What a transfer line sends or receives."""
        layout = self.plan.modules[module].layout
        virtual = chunk * layout.pp + self.plan.ranks.stage_of(module, self.device)
        last = len(self.plan.modules[module].chunks) - 1
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


def _in_turn(runs: Sequence[Run]) -> Run:
    return runs[0] if len(runs) == 1 else partial(_all, tuple(runs))


def _all(runs: tuple[Run, ...]) -> None:
    for run in runs:
        run()


def _present(gradients: Gradients, specs: tuple[TensorSpec, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Zeros where nothing depends on an input."""
    return tuple(
        torch.zeros(spec.shape, dtype=spec.dtype, device=device) if gradient is None else gradient
        for gradient, spec in zip(gradients, specs, strict=True)
    )


def describe(plan: Plan, device: int, line: int) -> str:
    """A line as people read it: `llm.F chunk 0 microbatch 5`."""
    module, kind, chunk, microbatch, _ = plan.programs[device].rows[line].tolist()
    return f"{plan.names[module]}.{OpKind(kind).word} chunk {chunk} microbatch {microbatch}"


def forward_actions(actions: list[Action]) -> list[Action]:
    """What is left of a program when nothing is learned."""
    return [action for action in actions if action.kind in FORWARD_KINDS]
