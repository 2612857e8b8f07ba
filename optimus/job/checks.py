"""Checks that model, cluster, workload and layouts of a job fit each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import gcd, prod

from optimus.errors import UserError, nearest, one_of
from optimus.job.attention import Attention
from optimus.job.catalog_files import list_gpu_curves
from optimus.job.job import Job
from optimus.job.layout import PartialLayout
from optimus.job.model import Encoder, Llm, Model, Stack
from optimus.job.nodes import NO_FILE, DocumentNode

MAX_LAYERS = 10_000
MAX_WIDTH = 10_000_000
MAX_MERGE = 10_000
MAX_ENCODERS = 8
MAX_GPUS = 1_000_000
RESERVED = ("llm", "limits", "text")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


def check_job(job: Job, root: DocumentNode = NO_FILE) -> None:
    """Raises at the first value that does not fit, with both numbers and the nearest valid choice.

    `root` is the job file, whose lines errors name.
    """
    check_model(job.model, root)
    _check_cluster(job, root)
    _check_workload(job, root)
    _check_layouts(job, root)


def check_model(model: Model, root: DocumentNode) -> None:
    """Checks names, stacks and projectors of a model."""
    if len(model.encoders) > MAX_ENCODERS:
        problem, hint = f"is more than {MAX_ENCODERS}", f"use at most {MAX_ENCODERS}"
        raise root.at("model.encoders").error(f"has {len(model.encoders)} encoders, which {problem}", hint)
    _check_stack(model.llm.stack, "model.llm.stack", root)
    _check_merges(model.llm, "model.llm", root)
    names: list[str] = []
    for index, encoder in enumerate(model.encoders):
        field = f"model.encoders[{index}]"
        name = encoder.name
        if name in RESERVED:
            hint = "use for example vision, audio or video"
            raise root.at(f"{field}.name").error("has a meaning of its own in job files", hint, name)
        if not _NAME.fullmatch(name):
            hint = "use small letters, digits, - and _, beginning with a letter"
            raise root.at(f"{field}.name").error("cannot be the name of an encoder", hint, name)
        if name in names:
            problem = f"is also the name of model.encoders[{names.index(name)}]"
            raise root.at(f"{field}.name").error(problem, f"use for example {name}2", name)
        names.append(name)
        _check_stack(encoder.stack, f"{field}.stack", root)
        _check_merges(encoder, field, root)
        _check_seam(encoder, model.llm, field, root)


def _check_stack(stack: Stack, field: str, root: DocumentNode) -> None:
    experts = stack.experts
    if stack.layers > MAX_LAYERS:
        raise root.at(f"{field}.layers").error(f"is more than {MAX_LAYERS}", "use fewer", stack.layers)
    for name, width in (("hidden", stack.hidden), ("mlp.width", stack.mlp.width)):
        if width > MAX_WIDTH:
            raise root.at(f"{field}.{name}").error(f"is more than {MAX_WIDTH:,}", "use less", width)
    _check_attention(stack.attention, stack, f"{field}.attention", root)
    _check_variants(stack, field, root)
    if experts and experts.active > experts.count:
        problem = f"is more than {field}.experts.count = {experts.count}"
        hint = f"use {experts.count} or less"
        raise root.at(f"{field}.experts.active").error(problem, hint, experts.active)
    if experts and experts.leading_dense_layers > stack.layers:
        problem, hint = f"is more than {field}.layers = {stack.layers}", f"use {stack.layers} or less"
        raise root.at(f"{field}.experts.leading_dense_layers").error(
            problem, hint, experts.leading_dense_layers
        )


def _check_attention(attention: Attention, stack: Stack, field: str, root: DocumentNode) -> None:
    if attention.heads % attention.kv_heads:
        problem = f"does not divide {field}.heads = {attention.heads}"
        hint = f"use {format_nearest_divisors(attention.heads, attention.kv_heads)}"
        raise root.at(f"{field}.kv_heads").error(problem, hint, attention.kv_heads)
    if attention.latent and attention.linear:
        raise root.at(f"{field}.linear").error(f"is given with {field}.latent", "use one of them")
    _check_layers(attention.full_layers, stack, f"{field}.full_layers", root)
    _check_rope(attention, field, root)


def _check_layers(layers: tuple[int, ...], stack: Stack, field: str, root: DocumentNode) -> None:
    for index, layer in enumerate(layers):
        if layer >= stack.layers:
            problem = f"is not a layer: {field.partition('.stack')[0]}.stack.layers = {stack.layers}"
            hint = f"use 0 to {stack.layers - 1}"
            raise root.at(f"{field}[{index}]").error(problem, hint, layer)


def _check_variants(stack: Stack, field: str, root: DocumentNode) -> None:
    """Checks that a layer has one variant at most, and each variant as the stack's own parts."""
    seen: set[int] = set()
    for place, variant in enumerate(stack.variants):
        at = f"{field}.variants[{place}]"
        _check_layers(variant.layers, stack, f"{at}.layers", root)
        if twice := sorted(seen & set(variant.layers)):
            problem = f"has layer {twice[0]}, which another variant has too"
            raise root.at(f"{at}.layers").error(problem, "state a layer once")
        seen |= set(variant.layers)
        if variant.attention:
            _check_attention(variant.attention, stack, f"{at}.attention", root)


def _check_merges(module: Encoder | Llm, field: str, root: DocumentNode) -> None:
    """Checks that layers merge tokens only where the tokens of every output are counted."""
    stack, at = module.stack, f"{field}.stack.mlp.merge"
    merge = stack.merge_before(stack.layers)
    place = next(
        (n for n, variant in enumerate(stack.variants) if variant.mlp and variant.mlp.merge > 1), None
    )
    if place is not None:
        at = f"{field}.stack.variants[{place}].mlp.merge"
    if merge > 1 and isinstance(module, Llm):
        raise root.at(at).error("merges tokens of an LLM, which has a loss for each", "leave it out")
    if merge > 1 and isinstance(module, Encoder) and module.deepstack_layers:
        problem = f"is given with {field}.deepstack_layers, whose rows would be of several lengths"
        raise root.at(at).error(problem, "use one of them")
    if merge > MAX_MERGE:
        problem = f"makes one token of more than {MAX_MERGE:,} over all layers"
        raise root.at(at).error(problem, "state the layers that merge as a variant")


def _check_rope(attention: Attention, field: str, root: DocumentNode) -> None:
    """Checks that sections of a rotary embedding cover its frequencies."""
    sections, total = attention.rope.sections, sum(attention.rope.sections)
    width = attention.latent.rope_head_dim if attention.latent else attention.head_dim
    frequencies = int(width * attention.rope.partial_factor) // 2
    if sections and total != frequencies:
        problem = f"add up to {total}, and half of the rotated head is {frequencies}"
        raise root.at(f"{field}.rope.sections").error(problem, f"use {frequencies} in all", list(sections))


def _check_seam(encoder: Encoder, llm: Llm, field: str, root: DocumentNode) -> None:
    widths, hidden = encoder.projector.widths, llm.stack.hidden
    if not widths or widths[-1] != hidden:
        ends = f"ends at {widths[-1]}" if widths else "is empty"
        problem = f"{ends}, but model.llm.stack.hidden = {hidden}"
        hint = f"use {[*widths[:-1], hidden]}"
        raise root.at(f"{field}.projector.widths").error(problem, hint)
    if not encoder.feeds:
        raise root.at(f"{field}.feeds").error("is empty", "use [0]: the LLM's first layer")
    for index, layer in enumerate(encoder.feeds):
        if layer >= llm.stack.layers:
            problem = f"is not a layer of the LLM: model.llm.stack.layers = {llm.stack.layers}"
            hint = f"use 0 to {llm.stack.layers - 1}"
            raise root.at(f"{field}.feeds[{index}]").error(problem, hint, layer)
        if layer in encoder.feeds[:index]:
            raise root.at(f"{field}.feeds[{index}]").error("is given twice", "keep one", layer)


def _check_cluster(job: Job, root: DocumentNode) -> None:
    cluster = job.cluster
    gpus, per_node = cluster.gpus, cluster.gpus_per_node
    if gpus > MAX_GPUS:
        raise root.at("cluster.gpus").error(f"is more than {MAX_GPUS:,}", f"use at most {MAX_GPUS:,}", gpus)
    if gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        problem = f"is not a multiple of cluster.gpus_per_node = {per_node}"
        raise root.at("cluster.gpus").error(problem, f"use {below} or {below + per_node}", gpus)
    if cluster.gpu.curves not in list_gpu_curves():
        hint = nearest(cluster.gpu.curves, list_gpu_curves())
        raise root.at("cluster.gpu.curves").error("is not in the catalog of curves", hint, cluster.gpu.curves)
    if cluster.reserve_bytes >= cluster.gpu.memory_bytes:
        problem = f"is not less than cluster.gpu.memory_gb = {cluster.gpu.memory_bytes / 1e9:g}"
        value = f"{cluster.reserve_bytes / 1e9:g}"
        raise root.at("cluster.reserve_gb_per_gpu").error(problem, "use for example 4", value)


def _check_workload(job: Job, root: DocumentNode) -> None:
    workload, sizes = job.workload, job.layout.limits.microbatch_sequences
    if not sizes:
        raise root.at("layout.limits.microbatch_sequences").error("is empty", "use for example [1, 2]")
    for index, size in enumerate(sizes):
        if size > workload.sequences_per_step:
            problem = f"is more than workload.sequences_per_step = {workload.sequences_per_step}"
            field = f"layout.limits.microbatch_sequences[{index}]"
            raise root.at(field).error(problem, f"use {workload.sequences_per_step} or less", size)


RANK_AXES = ("dp", "pp", "cp", "tp")
CHOICES_SHOWN = 6


def _check_layouts(job: Job, root: DocumentNode) -> None:
    """Checks that every stated layout can run; axes that are left out are not checked."""
    llm = job.model.llm
    for module in job.model.modules:
        stated = _StatedLayout(job=job, root=root, module=module, choice=job.layout.of(module.name))
        stated.check()
        if module is not llm:
            stated.check_divides(job.layout.of(llm.name))
    most = job.layout.limits.max_pp
    pp = job.layout.of(llm.name).pp
    if most is not None and pp is not None and pp > most:
        problem, hint = f"is less than layout.llm.pp = {pp}", f"use {pp} or more, or a smaller pp"
        raise root.at("layout.limits.max_pp").error(problem, hint, most)
    if job.today is not None:
        _StatedLayout(job=job, root=root, module=llm, choice=job.today.llm, prefix="today.layout").check()
        memory, peak = job.cluster.gpu.memory_bytes, job.today.measured_memory_bytes
        if peak is not None and peak > memory:
            problem = f"is more than cluster.gpu.memory_gb = {memory / 1e9:g}"
            field, hint = "today.measured.peak_memory_gb", "measure the peak of one GPU"
            raise root.at(field).error(problem, hint, f"{peak / 1e9:g}")


@dataclass(frozen=True, kw_only=True)
class _StatedLayout:
    """A layout as far as it is stated, and the field that states it."""

    job: Job
    root: DocumentNode
    module: Encoder | Llm
    choice: PartialLayout
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
        """Checks ranks, tensor, pipeline and expert parallelism, then the batch."""
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
                raise self.error(axis, problem, f"use {format_nearest_divisors(gpus, stated[axis])}")
        axes = [axis for axis in RANK_AXES if axis in stated]
        ranks = prod(stated[axis] for axis in axes)
        complete = all(axis in stated for axis in ("dp", "pp", "tp"))  # cp left out is 1
        if (ranks == gpus) if complete else (gpus % ranks == 0):
            return
        shown = " x ".join(f"{axis} {stated[axis]}" for axis in axes)
        verb = "is not" if complete else "does not divide"
        problem = f"= {shown} = {ranks} GPUs, which {verb} cluster.gpus = {gpus}"
        model_ranks = prod(stated[axis] for axis in axes if axis != "dp")
        hint = (
            f"use dp {gpus // model_ranks}"
            if gpus % model_ranks == 0
            else "use factors of the number of GPUs"
        )
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
                raise self.error("tp", problem, f"use {format_nearest_divisors(valid, tp)}")
        if tp % kv_heads and kv_heads % tp:
            problem = (
                f"neither divides nor is a multiple of {self.model_field}.attention.kv_heads = {kv_heads}"
            )
            raise self.error("tp", problem, f"use {format_nearest_divisors(gcd(valid, kv_heads), tp)}")

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
            raise self.error("ep", problem, f"use {format_nearest_divisors(experts.count, choice.ep)}")
        if choice.dp is None or choice.tp is None:
            return
        ranks = choice.dp * (choice.cp or 1) * choice.tp
        if ranks % choice.ep:
            problem = f"does not divide dp x cp x tp = {ranks}"
            raise self.error(
                "ep", problem, f"use {format_nearest_divisors(gcd(ranks, experts.count), choice.ep)}"
            )

    def _check_batch(self) -> None:
        dp, workload = self.choice.dp, self.job.workload
        cp, tokens = self.choice.cp, workload.sequence_tokens
        if cp is not None and cp > 1 and tokens % (2 * cp):
            problem = f"does not cut workload.sequence_tokens = {tokens} into two equal chunks for each rank"
            hint = "use 1" if tokens % 2 else f"use {format_nearest_divisors(tokens // 2, cp)}"
            raise self.error("cp", problem, hint)
        if dp is None or not isinstance(self.module, Llm):
            return
        sequences, sizes = workload.sequences_per_step, self.job.layout.limits.microbatch_sequences
        if sequences % dp:
            near = max(1, round(sequences / dp)) * dp
            problem = f"does not divide workload.sequences_per_step = {sequences}"
            divisors = format_nearest_divisors(gcd(sequences, self.job.cluster.gpus), dp)
            hint = f"use {divisors}, or sequences_per_step: {near}"
            raise self.error("dp", problem, hint)
        share = sequences // dp
        fitting = [share // size for size in sizes if share % size == 0]
        sizes_field = "layout.limits.microbatch_sequences"
        if not fitting:
            problem = f"= {list(sizes)}: none divides the {share} sequences of a replica"
            raise self.root.at(sizes_field).error(problem, f"use {format_nearest_divisors(share, sizes[0])}")
        pp, chunks = self.choice.pp, self.choice.chunks
        if chunks is not None and chunks > 1 and pp is not None and all(count % pp for count in fitting):
            problem = f"> 1 needs a multiple of pp = {pp} microbatches, not {one_of(fitting)}"
            near = max(1, round(share / pp)) * pp * dp
            raise self.error("chunks", problem, f"use chunks: 1, or sequences_per_step: {near}")

    def check_divides(self, llm: PartialLayout) -> None:
        """Checks that an encoder's pp and tp divide the LLM's, so that its shards lie inside the LLM's."""
        for axis in ("pp", "tp"):
            degree, llm_degree = getattr(self.choice, axis), getattr(llm, axis)
            if degree is not None and llm_degree is not None and llm_degree % degree:
                problem = f"does not divide {self.prefix}.llm.{axis} = {llm_degree}"
                raise self.error(axis, problem, f"use {format_nearest_divisors(llm_degree, degree)}")


def format_nearest_divisors(number: int, wanted: int) -> str:
    """Formats the divisors of `number` nearest to `wanted`: `1, 2, 4 or 8`."""
    divisors: set[int] = set()
    for low in range(1, min(int(number**0.5) + 1, 100_000) + 1):
        if number % low == 0:
            divisors.update((low, number // low))
    return one_of(sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:CHOICES_SHOWN]))
