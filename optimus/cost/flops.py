"""Counts model FLOPs of a step for MFU: no recomputation, frozen modules forward only."""

from __future__ import annotations

from optimus.job.attention import Attention
from optimus.job.model import Encoder, Llm, Model, Stack
from optimus.job.workload import TokenLoad, Workload

ITEM_COST_LENGTHS = 256.0, 4096.0  # encoder tokens of items


def forward_flops(module: Encoder | Llm, load: TokenLoad) -> float:
    """Returns the FLOPs of one forward pass over `load`."""
    stack = module.stack
    layers = sum(
        layer_flops(stack, layer, load.merged(stack.merge_before(layer))) for layer in range(stack.layers)
    )
    if isinstance(module, Llm):
        return layers + lm_head_flops(module, load) + embedding_flops(module, load)
    return layers + patch_embedding_flops(module, load) + projector_flops(module, load)


def layer_flops(stack: Stack, layer: int, load: TokenLoad) -> float:
    """Returns two FLOPs per active weight and token, and those of attention over attended pairs.

    `load` is that of the layer's attention; a merging MLP has fewer tokens.
    """
    here, merge = stack.at(layer), stack.merge_of(layer)
    attention = here.attention
    weights = stack.layer_parameters(layer, active=True) - (1 + merge) * stack.norm_parameters
    flops = 2.0 * (weights - here.mlp.parameters(stack.hidden) * (1 - 1 / merge)) * load.tokens
    if attention.linear:
        products = list_recurrence_products(attention, load.tokens, attention.heads)
        return flops + sum(2.0 * m * n * k for m, n, k in products)
    per_pair = 2.0 * attention.heads * (attention.score_dim + attention.value_dim)
    return flops + per_pair * count_attended_pairs(attention, layer, load)


def list_recurrence_products(
    attention: Attention, tokens: float, heads: float
) -> list[tuple[float, float, float]]:
    """Returns (rows, columns, depth) of the matrix products of a chunked gated delta rule.

    Inside a chunk: keys with keys, queries with keys, the system that both make applied to keys and to
    values, scores with values. Between chunks: the state read for keys, read for queries, and written.
    """
    assert attention.linear is not None
    rows, chunk = tokens * heads, float(attention.linear.chunk)
    keys, values = float(attention.score_dim), float(attention.value_dim)
    return (
        [(rows, chunk, keys)] * 2
        + [(rows, keys, chunk)]
        + [(rows, values, chunk)] * 2
        + [(rows, values, keys)] * 3
    )


def embedding_flops(llm: Llm, load: TokenLoad) -> float:
    """Returns the FLOPs of matrices before an LLM's first layer; the table itself has none."""
    return sum(2.0 * load.tokens * linear.inputs * linear.outputs for linear in llm.embedding_linears)


def count_attended_pairs(attention: Attention, layer: int, load: TokenLoad) -> float:
    """Returns the pairs of tokens that attend to each other; a causal window fills with its first tokens."""
    window = attention.window_of(layer)
    if window is None or window >= load.span:
        return load.squares * (0.5 if attention.causal else 1.0)
    pairs = load.tokens * window
    return pairs - 0.5 * window**2 * load.tokens / load.span if attention.causal else pairs


def lm_head_flops(llm: Llm, load: TokenLoad) -> float:
    """Returns the FLOPs of the logits."""
    return 2.0 * load.tokens * llm.vocab * llm.stack.hidden


def patch_embedding_flops(encoder: Encoder, load: TokenLoad) -> float:
    """Returns the FLOPs from patches, or mel frames, to hidden states."""
    return 2.0 * load.tokens * encoder.patch_inputs * encoder.stack.hidden


def projector_flops(encoder: Encoder, load: TokenLoad) -> float:
    """Returns the FLOPs from encoder tokens to LLM tokens, once per LLM layer fed."""
    rows = load.tokens / encoder.merge * len(encoder.feeds)
    return sum(2.0 * rows * k * n for k, n in encoder.projector.linears(encoder.stack.hidden))


def fit_item_cost(encoder: Encoder) -> tuple[float, float]:
    """Returns the FLOPs of an item per token and per square of its tokens, exact at two lengths."""
    short, long = (
        forward_flops(encoder, TokenLoad(tokens=tokens, squares=tokens**2)) / tokens
        for tokens in ITEM_COST_LENGTHS
    )
    squares = max(0.0, (long - short) / (ITEM_COST_LENGTHS[1] - ITEM_COST_LENGTHS[0]))
    return short - squares * ITEM_COST_LENGTHS[0], squares


def step_flops(model: Model, workload: Workload) -> float:
    """Returns the FLOPs of one step: three times the forward pass of trained modules, one of frozen ones."""
    total = 0.0
    for encoder in model.encoders:
        load = workload.encoder_load(encoder.name, encoder.merge)
        projector = projector_flops(encoder, load)
        total += (forward_flops(encoder, load) - projector) * (3 if encoder.train else 1)
        passes = encoder.train or encoder.projector.train  # gradients go through it
        total += projector * (1 + passes + encoder.projector.train)
    total += forward_flops(model.llm, workload.llm_load()) * (3 if model.llm.train else 1)
    return total * workload.sequences_per_step
