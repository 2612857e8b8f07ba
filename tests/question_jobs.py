"""Jobs behind docs/questions.md that the catalog does not have: more encoders, other sizes, other images."""

from __future__ import annotations

from dataclasses import replace

from optimus.job.job import Job
from optimus.job.layout import Constraints, LayoutChoice, Limits
from optimus.job.model import Encoder, Llm
from optimus.job.read import find_job
from optimus.job.workload import PackedSequence
from optimus.planner.context import PlanningContext

MERGE = 4  # encoder tokens per LLM token, as in the paper's jobs of the catalog
IMAGE_TOKENS = 512  # LLM tokens of an image there

RATIOS = (0.01, 0.03, 0.07, 0.15, 0.3, 0.5)  # encoder's parameters over the LLM's
TOKENS = (256, 1024, 2048, 4096, 8192, 16384)  # of the encoder in a sequence
SWEEP_SEQUENCE = 8192  # LLM tokens, whatever share of them are images
SWEEP_IMAGE = 1024  # encoder tokens of an image at most
SWEEP_LAYOUT = LayoutChoice(dp=8, pp=8, tp=8)
SWEEP_BATCH = 128
DEPTHS = (24, 32, 40, 48)  # of a swept encoder
HEAD_DIM = 128


def triple() -> Job:
    """Three encoders of the paper's before its LLM: `dual-22-11` and ViT-5B, with an image for each."""
    job, other = find_job("paper/dual-22-11"), find_job("paper/dual-11-5")
    third = replace(other.model.encoders[1], name="vision3")
    names = [*(encoder.name for encoder in job.model.encoders), third.name]
    model = replace(job.model, name="vit-22b+vit-11b+vit-5b+gpt-175b", encoders=(*job.model.encoders, third))
    job = replace(job, name="triple-22-11-5", model=model)
    return _with_items(job, dict.fromkeys(names, (IMAGE_TOKENS,)))


def omni() -> Job:
    """Text, images, sound and video: three small encoders before a 32B LLM."""
    return _omni("omni-3", ("vision", "audio", "video"))


def image_and_sound() -> Job:
    """The same without video."""
    return _omni("omni-3 without video", ("vision", "audio"))


def _omni(name: str, encoders: tuple[str, ...]) -> Job:
    job = find_job("omni-3", "h100:256", ["llm=pp4,tp4"])
    kept = tuple(encoder for encoder in job.model.encoders if encoder.name in encoders)
    sequences = tuple(
        replace(
            each,
            text=each.text + sum(sum(n) for e, n in each.items if e not in encoders),
            items=tuple((e, n) for e, n in each.items if e in encoders),
        )
        for each in job.workload.sequences
    )
    workload = replace(job.workload, sequences=sequences)
    return replace(job, name=name, model=replace(job.model, encoders=kept), workload=workload)


def vit_3b_gpt_11b() -> Job:
    """The paper's small job, with a pipeline."""
    return replace(find_job("paper/small-a100", layouts=["llm=pp4,tp2"]), name="ViT-3B + GPT-11B")


def vit_6b_gpt_11b() -> Job:
    """InternViT-6B in place of ViT-3B, on twice the GPUs with twice the batch."""
    job = vit_3b_gpt_11b().replace(gpus=16, sequences_per_step=32)
    projector = job.model.encoders[0].projector
    encoder = replace(
        find_job("internvl3-78b", "h100:64").model.encoders[0], name="vision", projector=projector
    )
    return _with_modules(job, "ViT-6B + GPT-11B", encoder, job.model.llm)


def vit_11b_gpt_33b() -> Job:
    """The paper's job A with a GPT of 33B parameters, made by hand: GPT-11B's shape, wider and less deep."""
    job, gpt = find_job("paper/A"), find_job("paper/small-a100").model.llm
    hidden, layers = 6144, 72
    attention = replace(gpt.stack.attention, heads=hidden // HEAD_DIM, kv_heads=hidden // HEAD_DIM)
    stack = replace(
        gpt.stack,
        hidden=hidden,
        layers=layers,
        attention=attention,
        mlp=replace(gpt.stack.mlp, width=4 * hidden),
    )
    encoder = job.model.encoders[0]
    encoder = replace(encoder, projector=replace(encoder.projector, widths=(hidden,)))
    job = replace(job, layout=replace(job.layout, modules={"llm": LayoutChoice(dp=2, pp=4, tp=8)}))
    return _with_modules(job, "ViT-11B + GPT-33B", encoder, replace(gpt, stack=stack))


def swept(ratio: float, tokens: int) -> Job:
    """GPT-175B on 512 GPUs with an encoder of `ratio` times its parameters and `tokens` tokens a sequence."""
    job = find_job("paper/D")
    encoder = sized(job.model.encoders[0], ratio * job.model.llm.parameters())
    llm = replace(job.model.llm, positions=SWEEP_SEQUENCE)
    job = _with_modules(job, f"{ratio:g} of GPT-175B, {tokens} tokens", encoder, llm)
    workload = replace(job.workload, sequence_tokens=SWEEP_SEQUENCE, sequences_per_step=SWEEP_BATCH)
    layout = Constraints(modules={"llm": SWEEP_LAYOUT}, limits=Limits(microbatch_sequences=(1,)))
    image = min(tokens, SWEEP_IMAGE)
    items = {encoder.name: (image // MERGE,) * (tokens // image)}
    return _with_items(replace(job, workload=workload, layout=layout), items)


def sized(encoder: Encoder, parameters: float) -> Encoder:
    """The encoder with the width (eight heads at a time) and depth whose parameters come closest."""
    stack, found = encoder.stack, []
    for layers in DEPTHS:
        for heads in range(8, 161, 8):
            hidden = heads * HEAD_DIM
            attention = replace(stack.attention, heads=heads, kv_heads=heads)
            mlp = replace(stack.mlp, width=4 * hidden)
            made = replace(stack, hidden=hidden, layers=layers, attention=attention, mlp=mlp)
            found.append(replace(encoder, stack=made))
    return min(found, key=lambda each: abs(each.parameters() / parameters - 1))


def with_capacity(context: PlanningContext, gigabytes: float) -> PlanningContext:
    """As if every GPU had so much memory."""
    free = context.job.cluster.gpu.memory_bytes - gigabytes * 1e9
    return replace(context, kept_free_bytes=free)


def _with_modules(job: Job, name: str, encoder: Encoder, llm: Llm) -> Job:
    return replace(job, name=name, model=replace(job.model, name=name, encoders=(encoder,), llm=llm))


def _with_items(job: Job, items: dict[str, tuple[int, ...]]) -> Job:
    """Every sequence with these images, and text up to its length."""
    text = job.workload.sequence_tokens - sum(map(sum, items.values()))
    sequence = PackedSequence(text=text, items=tuple(items.items()))
    return replace(job, workload=replace(job.workload, sequences=(sequence,)))
