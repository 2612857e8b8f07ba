"""A plan as Megatron-LM's arguments."""

from __future__ import annotations

from optimus.exporters.encoders import not_supported_of_encoders
from optimus.exporters.facts import Facts
from optimus.exporters.megatron_model import model_flags
from optimus.exporters.rank_groups import ranks_document
from optimus.exporters.target import AS_WRITTEN, EMPTY_ENDS, Export, NotSupported, account, best_of, comment
from optimus.exporters.texts import json_text

VERSION = "megatron-core 0.16.1"
ARGUMENTS = "megatron.args"
# Encoders inside the first pipeline stage, and Megatron-FSDP. All layers as one pipeline are not there (its
# pipeline layout refuses encoder layers), nor three phases, nor encoders on GPUs of their own.
SYSTEMS = ("stage0", "fsdp")
ORDERS = ("1f1b", "interleaved")
Flag = tuple[str, ...]

USE = (
    "Use: set -f; torchrun ... YOUR_PRETRAIN_SCRIPT.py $(grep -v '^#' megatron.args) ...",
    "Yours to add: data, tokenizer, optimizer, rotary base and scaling; the encoders, in your model's code.",
    "Megatron-LM then runs the encoders in the first pipeline stage.",
)


def export_megatron(facts: Facts) -> Export:
    """Arguments that lay out the LLM as the plan does, rank groups, and what is lost."""
    plan = facts.plan
    found = not_supported(facts)
    head = [f"{plan.name}: the LLM of this plan, for Megatron-LM ({VERSION}), on {plan.ranks.world} GPUs."]
    head += [*USE, *account(plan, "Megatron-LM", found, SYSTEMS)]
    lines = [*comment(head), *(" ".join(flag) for flag in flags(facts))]
    return Export(
        plan=plan,
        target="megatron",
        version=VERSION,
        files={ARGUMENTS: "\n".join(lines) + "\n", "ranks.json": json_text(ranks_document(plan))},
        not_supported=tuple(found),
        as_written=best_of(plan, AS_WRITTEN),
        best_there=best_of(plan, SYSTEMS),
    )


def flags(facts: Facts) -> list[Flag]:
    """All arguments, each with its values; none needs quotes."""
    return [*_parallel(facts), *_pipeline(facts), *_batch(facts), *_recompute(facts), *model_flags(facts)]


def _parallel(facts: Facts) -> list[Flag]:
    layout = facts.layout
    found: list[Flag] = [
        ("--tensor-model-parallel-size", str(layout.tp)),
        ("--pipeline-model-parallel-size", str(layout.pp)),
        ("--context-parallel-size", str(layout.cp)),
    ]
    if facts.given("model", "llm.stack.experts.count") is not None:  # an expert is never divided
        found += [("--expert-model-parallel-size", str(layout.ep)), ("--expert-tensor-parallel-size", "1")]
    if layout.tp > 1:
        found.append(("--sequence-parallel",))
    found.append(("--use-distributed-optimizer",))
    if layout.replica_ranks > 1:
        found += [("--overlap-grad-reduce",), ("--overlap-param-gather",)]
    return found


def _pipeline(facts: Facts) -> list[Flag]:
    """Nothing for an even cut without virtual stages; a layout string where stages are unequal."""
    layout, layers = facts.layout, facts.layers_of_virtual_stages()
    if layout.pp == 1:
        return []
    if len(set(layers)) > 1:
        return [("--pipeline-model-parallel-layout", layout_string(layers))]
    return [("--num-layers-per-virtual-pipeline-stage", str(layers[0]))] if layout.chunks > 1 else []


def layout_string(layers: list[int]) -> str:
    """`Ettt|tttt|ttL`: E the embedding, t a layer, L the head; written out, so that no shell expands it."""
    stages = ["t" * count for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return "|".join(stages)


def _batch(facts: Facts) -> list[Flag]:
    return [
        ("--micro-batch-size", str(facts.microbatch_sequences)),
        ("--global-batch-size", str(facts.sequences_per_step)),
    ]


def _recompute(facts: Facts) -> list[Flag]:
    """Selective: scores where they are stored, else norms and, for want of non-linearities alone, MLPs."""
    if facts.recompute == "full":
        return [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", "1"),
        ]
    if facts.recompute != "selective":
        return []
    modules = ["layernorm", "mlp"] if facts.fused_attention else ["core_attn"]
    found: list[Flag] = []
    if facts.fused_attention and facts.given("model", "llm.stack.experts.count") is not None:
        modules = ["layernorm", "moe_act"]
        found = [("--moe-grouped-gemm",)]  # without which moe_act is refused
    return [("--recompute-granularity", "selective"), ("--recompute-modules", *modules), *found]


# ---------------------------------------------------------------------------- what it cannot run


def not_supported(facts: Facts) -> list[NotSupported]:
    """What the plan holds and Megatron-LM cannot run."""
    plan = facts.plan
    found = not_supported_of_encoders(
        facts,
        stages="its pipeline layout refuses encoder layers; MIMO refuses pp above 1 for an encoder "
        "on the LLM's GPUs",
        layout=f"it gives an encoder the LLM's tensor parallelism (tp{facts.layout.tp}); layouts per "
        "module are in MIMO's later, experimental versions only",
    )
    if plan.order not in ORDERS:
        played = "interleaved 1F1B" if facts.layout.chunks > 1 else "1F1B"
        found.append(NotSupported(what=f"the LLM's order {plan.order}", why=f"it plays {played} instead"))
    if facts.layout.pp > 1 and facts.layout.chunks > 1 and plan.microbatches % facts.layout.pp:
        found.append(
            NotSupported(
                what=f"{plan.microbatches} microbatches in virtual stages",
                why=f"it refuses a number that is not a multiple of pp = {facts.layout.pp}",
            )
        )
    if facts.has_empty_ends:
        found.append(EMPTY_ENDS)
    if facts.recompute == "selective" and facts.fused_attention:
        if facts.given("model", "llm.stack.experts.count") is None:
            why = "the arguments recompute norms and whole MLPs: as little memory, more time"
        else:
            why = "the arguments recompute norms and the experts' non-linearities, not those of dense MLPs"
        found.append(NotSupported(what="recomputing only norms and non-linearities", why=why))
    return found
