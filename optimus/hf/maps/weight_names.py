"""Defines the type of a family's map, and the names of the language models that families share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Names = Mapping[str, tuple[str, ...]]  # by our name: theirs, in the order of rows; {} is the layer's number
_LAYER = re.compile(r"(?:(?<=\.layers\.)|(?<=\.deepstack\.))\d+(?=\.)")


@dataclass(frozen=True, kw_only=True)
class FamilyMap:
    """Parameters of a family: `names` maps ours to theirs, `unused` are prefixes of theirs without effect.

    `layers` is the prefix of a tower's layers, of which the last may be without effect.
    """

    names: Names
    unused: tuple[str, ...] = ()
    layers: str | None = None

    def has_no_effect(self, theirs: str, layers: int) -> bool:
        """Tells whether a tower of which `layers` layers are used reads no tensor of this name."""
        if self.layers is not None and theirs.startswith(self.layers):
            return int(theirs.removeprefix(self.layers).partition(".")[0]) >= layers
        return theirs.startswith(self.unused)

    def theirs(self, name: str) -> tuple[str, ...]:
        """Returns the names of the tensors whose rows, one after another, are a parameter of ours."""
        layer = _LAYER.search(name)
        if layer is None:
            return self.names[name]
        return tuple(their.format(layer[0]) for their in self.names[_LAYER.sub("{}", name, 1)])


def pairs(ours: str, *theirs: str, kinds: tuple[str, ...] = ("weight", "bias")) -> dict[str, tuple[str, ...]]:
    """Returns the entries of a linear map or norm."""
    return {f"{ours}.{kind}": tuple(f"{their}.{kind}" for their in theirs) for kind in kinds}


def llm_names(prefix: str, *, head: str) -> dict[str, tuple[str, ...]]:
    """Returns the entries of a Llama-like language model, also of parameters that some have not."""
    layer, attention = f"{prefix}.layers.{{}}", f"{prefix}.layers.{{}}.self_attn"
    ours, weight = "llm.layers.{}", ("weight",)
    return {
        "llm.embedding.weight": (f"{prefix}.embed_tokens.weight",),
        **pairs("llm.head.norm", f"{prefix}.norm", kinds=weight),
        **pairs("llm.head", head, kinds=weight),
        **pairs(f"{ours}.qkv.norm", f"{layer}.input_layernorm", kinds=weight),
        **pairs(f"{ours}.qkv", *(f"{attention}.{part}_proj" for part in "qkv")),
        **pairs(f"{ours}.qkv.query_norm", f"{attention}.q_norm", kinds=weight),
        **pairs(f"{ours}.qkv.key_norm", f"{attention}.k_norm", kinds=weight),
        **pairs(f"{ours}.out", f"{attention}.o_proj"),
        **pairs(f"{ours}.up.norm", f"{layer}.post_attention_layernorm", kinds=weight),
        **pairs(f"{ours}.up", f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
        **pairs(f"{ours}.down", f"{layer}.mlp.down_proj"),
    }
