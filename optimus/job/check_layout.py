"""Checks stated layouts against the model, the GPUs, the batch and each other."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from optimus.errors import UserError, one_of
from optimus.job.job import Job
from optimus.job.layout import LayoutChoice
from optimus.job.model import Encoder, Llm
from optimus.job.nodes import Node

RANK_AXES = ("dp", "pp", "cp", "tp")
CHOICES_SHOWN = 6


def check_layouts(job: Job, root: Node) -> None:
    """Every stated layout can run; what is left out is not checked."""
    llm = job.model.llm
    for module in job.model.modules:
        stated = Stated(job=job, root=root, module=module, choice=job.layout.of(module.name))
        stated.check()
        if module is not llm:
            stated.check_divides(job.layout.of(llm.name))
    most = job.layout.limits.max_pp
    pp = job.layout.of(llm.name).pp
    if most is not None and pp is not None and pp > most:
        problem, hint = f"is less than layout.llm.pp = {pp}", f"use {pp} or more, or a smaller pp"
        raise root.at("layout.limits.max_pp").error(problem, hint, most)
    if job.today is not None:
        Stated(job=job, root=root, module=llm, choice=job.today.llm, prefix="today.layout").check()
        memory, peak = job.cluster.gpu.memory_bytes, job.today.measured_memory_bytes
        if peak is not None and peak > memory:
            problem = f"is more than cluster.gpu.memory_gb = {memory / 1e9:g}"
            field, hint = "today.measured.peak_memory_gb", "measure the peak of one GPU"
            raise root.at(field).error(problem, hint, f"{peak / 1e9:g}")


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A layout as far as it is stated, and where it is stated."""

    job: Job
    root: Node
    module: Encoder | Llm
    choice: LayoutChoice
    prefix: str = "layout"

    def field(self, axis: str = "") -> str:
        return f"{self.prefix}.{self.module.name}" + (f".{axis}" if axis else "")

    @property
    def model_field(self) -> str:
        if isinstance(self.module, Llm):
            return "model.llm.stack"
        return f"model.encoders[{self.job.model.encoders.index(self.module)}].stack"

    def error(self, axis: str, problem: str, hint: str) -> UserError:
        return self.root.at(self.field(axis)).error(
            problem, hint, getattr(self.choice, axis) if axis else None
        )

    def check(self) -> None:
        """In the order a reader would: ranks, tensor, pipeline, experts, batch."""
        self._check_ranks()
        self._check_tensor()
        self._check_pipeline()
        self._check_experts()
        self._check_batch()

    def _check_ranks(self) -> None:
        stated, gpus = self.choice.stated(), self.job.cluster.gpus
        for axis in RANK_AXES:
            if gpus % stated.get(axis, 1):
                problem = f"does not divide cluster.gpus = {gpus}"
                raise self.error(axis, problem, f"use {choices(gpus, stated[axis])}")
        axes = [axis for axis in RANK_AXES if axis in stated]
        ranks = prod(stated[axis] for axis in axes)
        complete = all(axis in stated for axis in ("dp", "pp", "tp"))  # cp left out is 1
        if (ranks == gpus) if complete else (gpus % ranks == 0):
            return
        shown = " x ".join(f"{axis} {stated[axis]}" for axis in axes)
        verb = "is not" if complete else "does not divide"
        problem = f"= {shown} = {ranks} GPUs, which {verb} cluster.gpus = {gpus}"
        others = prod(stated[axis] for axis in axes if axis != "dp")
        hint = f"use dp {gpus // others}" if gpus % others == 0 else "use factors of the number of GPUs"
        raise self.error("", problem, hint)

    def _check_tensor(self) -> None:
        tp, stack = self.choice.tp, self.module.stack
        if tp is None:
            return
        heads, kv_heads = stack.attention.heads, stack.attention.kv_heads
        if isinstance(self.module, Encoder) and tp <= heads == kv_heads and stack.mlp.width % tp == 0:
            return  # heads are padded
        valid = gcd(heads, stack.mlp.width)
        for name, width in (("attention.heads", heads), ("mlp.width", stack.mlp.width)):
            if width % tp:
                problem = f"does not divide {self.model_field}.{name} = {width}"
                raise self.error("tp", problem, f"use {choices(valid, tp)}")
        if tp % kv_heads and kv_heads % tp:
            problem = (
                f"neither divides nor is a multiple of {self.model_field}.attention.kv_heads = {kv_heads}"
            )
            raise self.error("tp", problem, f"use {choices(gcd(valid, kv_heads), tp)}")

    def _check_pipeline(self) -> None:
        pp, chunks, layers = self.choice.pp, self.choice.chunks, self.module.stack.layers
        if pp is not None and pp > layers:
            problem = f"is more than {self.model_field}.layers = {layers}"
            raise self.error("pp", problem, f"use {layers} or less")
        if chunks is not None and chunks * (pp or 1) > layers:
            problem = (
                f"times {self.field('pp')} = {pp or 1} is more than {self.model_field}.layers = {layers}"
            )
            raise self.error("chunks", problem, f"use {layers // (pp or 1)} or less")

    def _check_experts(self) -> None:
        choice, experts = self.choice, self.module.stack.experts
        if choice.ep is None or choice.ep == 1:
            return
        if experts is None:
            raise self.error("ep", f"needs experts, and {self.model_field}.experts is not given", "use 1")
        if experts.count % choice.ep:
            problem = f"does not divide {self.model_field}.experts.count = {experts.count}"
            raise self.error("ep", problem, f"use {choices(experts.count, choice.ep)}")
        if choice.dp is None or choice.tp is None:
            return
        ranks = choice.dp * (choice.cp or 1) * choice.tp
        if ranks % choice.ep:
            problem = f"does not divide dp x cp x tp = {ranks}"
            raise self.error("ep", problem, f"use {choices(gcd(ranks, experts.count), choice.ep)}")

    def _check_batch(self) -> None:
        dp, workload = self.choice.dp, self.job.workload
        cp, tokens = self.choice.cp, workload.sequence_tokens
        if cp is not None and tokens % cp:
            problem = f"does not divide workload.sequence_tokens = {tokens}"
            raise self.error("cp", problem, f"use {choices(tokens, cp)}")
        if dp is None or not isinstance(self.module, Llm):
            return
        sequences, sizes = workload.sequences_per_step, self.job.layout.limits.microbatch_sequences
        if sequences % dp:
            near = max(1, round(sequences / dp)) * dp
            problem = f"does not divide workload.sequences_per_step = {sequences}"
            hint = f"use {choices(gcd(sequences, self.job.cluster.gpus), dp)}, or sequences_per_step: {near}"
            raise self.error("dp", problem, hint)
        share = sequences // dp
        fitting = [share // size for size in sizes if share % size == 0]
        sizes_field = "layout.limits.microbatch_sequences"
        if not fitting:
            problem = f"= {list(sizes)}: none divides the {share} sequences of a replica"
            raise self.root.at(sizes_field).error(problem, f"use {choices(share, sizes[0])}")
        pp, chunks = self.choice.pp, self.choice.chunks
        if chunks is not None and chunks > 1 and pp is not None and all(count % pp for count in fitting):
            problem = f"> 1 needs a multiple of pp = {pp} microbatches, not {one_of(fitting)}"
            near = max(1, round(share / pp)) * pp * dp
            raise self.error("chunks", problem, f"use chunks: 1, or sequences_per_step: {near}")

    def check_divides(self, llm: LayoutChoice) -> None:
        """An encoder's pp and tp divide the LLM's, so that its shards lie inside the LLM's."""
        for axis in ("pp", "tp"):
            own, outer = getattr(self.choice, axis), getattr(llm, axis)
            if own is not None and outer is not None and outer % own:
                problem = f"does not divide {self.prefix}.llm.{axis} = {outer}"
                raise self.error(axis, problem, f"use {choices(outer, own)}")


def choices(number: int, wanted: int) -> str:
    """The divisors of `number` nearest to `wanted`: `1, 2, 4 or 8`."""
    divisors: set[int] = set()
    for low in range(1, min(int(number**0.5) + 1, 100_000) + 1):
        if number % low == 0:
            divisors.update((low, number // low))
    return one_of(sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:CHOICES_SHOWN]))
