"""Compares our parameter counts with transformers' on `meta`, for the table of docs/supported-models.md."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.docs.pages import (
    DOCS,
    GOLDEN,
    ROOT,
    Figures,
    fill_tables,
    markdown,
    read_figures,
    store_figures,
)
from optimus.errors import UserError
from optimus.job.hf_config import ENCODER_READERS, OPTIONAL, REFUSED, THINKERS, read_hf_config

PAGE = DOCS / "supported-models.md"
STORED = GOLDEN / "supported_models.json"
DATA = ROOT / "tests" / "data"
NO_CLASS = ("internvl_chat", "kimi_vl", "phi4mm")  # read, but transformers has no class of its own
SAME_CLASS = {"kimi_vl": "kimi_k25"}  # classes of other sizes of the same modules
RELEASED, WRITTEN = "released form", "as transformers writes it"
# Sizes where the defaults of a class are no model: Llama 4's projector takes other widths than its tower has.
RUNNABLE = {"llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}}}
# Parameters of transformers' classes that a description leaves out, by `model_type`, and why.
TOWER_END = r"vision_tower\.post_layernorm", "a norm that the LLM never reads"
NEWLINE = "image_newline", "a learned row behind each row of an image"
CLIP_END = r"vision_tower\.encoder\.layers\.23\.", "a layer that the LLM never reads"
MERGER = r"post_projection_norm|downsample\.bias", "a norm and a bias of the merger"
KIMI_NORM = r"mm_projector\.pre_norm", "a norm before the merge"
MARKERS = "audio_bos_eos_token|conv2.bias", "rows around a sound, and a bias"
LEFT_OUT: dict[str, tuple[tuple[str, str], ...]] = {
    "gemma3": ((r"vision_tower\.head\.", "a pooling head that the LLM never reads"),),
    "gemma4": ((r"subsample_conv.*(conv|norm)\.weight|audio.*output_proj\.bias", "convolutions, a bias"),),
    "glm4v": (MERGER,),
    "glm4v_moe": (MERGER,),
    "kimi_k25": (KIMI_NORM,),
    "kimi_vl": (KIMI_NORM,),
    "llava": (CLIP_END, TOWER_END),
    "llava_next": (CLIP_END, TOWER_END, NEWLINE),
    "llava_onevision": (TOWER_END, NEWLINE),
    "phi4_multimodal": (
        (
            r"img_processor\.(encoder\.layers\.26\.|post_layernorm|head\.)",
            "a layer, a norm and a pooling head",
        ),
        ("feature_extensor", "learned rows behind an image and its rows"),
        (r"audio_embed\.encoder\.(embed\.conv|relative_attention_bias)", "convolutions, relative positions"),
        ("proj_for_vision_speech", "the projector of sounds that come with images"),
    ),
    "qwen2_5_omni": (MARKERS,),
    "qwen2_5_omni_thinker": (MARKERS,),
    "qwen2_audio": (MARKERS,),
    "qwen3_omni_moe": ((r"audio_tower\.conv2d", "convolutions"),),
    "qwen3_omni_moe_thinker": ((r"audio_tower\.conv2d", "convolutions"),),
}


def list_configs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields name, form and contents of every configuration that is compared."""
    from transformers import CONFIG_MAPPING

    for path in sorted((DATA / "configs").glob("*_config.json")):
        config = json.loads(path.read_text())
        if config["model_type"] in ENCODER_READERS:
            yield path.stem.removesuffix("_config").rpartition("--")[2], RELEASED, config
    for name, config in json.loads((DATA / "released_forms.json").read_text()).items():
        yield name, RELEASED, config
    for kind in sorted({*ENCODER_READERS, *REFUSED, *THINKERS} - set(NO_CLASS)):
        arguments = RUNNABLE.get(kind) or {key: {} for key in OPTIONAL.get(kind, ())}
        with tempfile.TemporaryDirectory() as folder:
            CONFIG_MAPPING[kind](**arguments).save_pretrained(folder)
            yield kind, WRITTEN, json.loads((Path(folder) / "config.json").read_text())


def count_in_transformers(config: dict[str, Any]) -> dict[str, list[int]]:
    """Counts parameters by module of transformers' own model, built without memory: all, and LEFT_OUT."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    kind = config["model_type"]
    left_out = "|".join(names for names, _ in LEFT_OUT.get(kind, ()))
    if kind in SAME_CLASS:
        vision = config["vision_config"] | {"model_type": f"{SAME_CLASS[kind]}_vision"}
        tied = config["text_config"]["tie_word_embeddings"]
        config = config | {
            "model_type": SAME_CLASS[kind],
            "vision_config": vision,
            "tie_word_embeddings": tied,
        }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        read = AutoConfig.from_pretrained(folder)
    read = getattr(read, "thinker_config", read)
    for mapping in ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING"):
        kinds = getattr(modeling_auto, mapping)
        if type(read) in kinds:
            with torch.device("meta"):
                return _count_by_module(kinds[type(read)](read), left_out)
    raise AssertionError(f"no class for {config['model_type']}")


def _count_by_module(model: Any, left_out: str) -> dict[str, list[int]]:
    """Adds up the parameters of the LLM and of every encoder, each with its projector."""
    counts: dict[str, list[int]] = {}
    other = "vision" if hasattr(model.config, "vision_config") else "audio"  # projectors have no own name
    for name, parameter in model.named_parameters():
        own = re.search(
            "language_model|text_model|lm_head|^model\\.layers|^model\\.embed_tokens\\.|^model\\.norm", name
        )
        count = counts.setdefault("llm" if own else "audio" if "audio" in name else other, [0, 0])
        count[0] += parameter.numel()
        count[1] += parameter.numel() if left_out and re.search(left_out, name) else 0
    return counts


def figures(config: dict[str, Any]) -> Figures:
    """Returns our count, transformers' and what of it is left out, or why a configuration is refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        try:
            model = read_hf_config(path)
        except UserError as error:
            return {"model_type": config["model_type"], "refused": error.problem}
    theirs = count_in_transformers(config)
    ours = {module.name: module.parameters() for module in model.modules}
    return {
        "model_type": config["model_type"],
        "ours": sum(ours.values()),
        "transformers": sum(count for count, _ in theirs.values()),
        "left out": sum(count for _, count in theirs.values()),
        "encoders": [encoder.name for encoder in model.encoders],
        "modules": {name: [count, *theirs[name]] for name, count in ours.items()},
    }


def models(stored: Figures) -> str:
    """Shows our counts, what they leave out of transformers', and what differs beyond that."""
    header = ["configuration", "form", "`model_type`", "encoders", "ours, B", "left out, M"]
    header += ["transformers, B", "difference"]
    rows = []
    for key, row in stored.items():
        name, form = key.split(" | ")
        cells = [name, form, f"`{row['model_type']}`"]
        if "refused" in row:
            rows.append([*cells, f"refused: {row['refused']}", "", "", "", ""])
            continue
        left_out = row["left out"]
        cells += [", ".join(row["encoders"]), f"{row['ours'] / 1e9:.3f}"]
        cells += [f"{left_out / 1e6:.3f}" if left_out else "", f"{row['transformers'] / 1e9:.3f}"]
        rows.append([*cells, f"{(row['ours'] + left_out) / row['transformers'] - 1:+.2%}"])
    return markdown(header, rows)


def parameters_left_out() -> str:
    """Shows the parameters that descriptions leave out."""
    names: dict[tuple[str, str], list[str]] = {}
    for kind, parts in LEFT_OUT.items():
        for part in parts:
            names.setdefault(part, []).append(f"`{kind}`")
    rows = [[", ".join(kinds), f"`{name.replace('|', ' or ')}`", why] for (name, why), kinds in names.items()]
    return markdown(["`model_type`", "names (regular expression)", "parameters"], rows)


def compute_all() -> Figures:
    """Returns the figures of every configuration, by name and form."""
    return {f"{name} | {form}": figures(config) for name, form, config in list_configs()}


def fill(page: str, stored: Figures) -> str:
    """Returns the page with its tables."""
    return fill_tables(page, {"models": models(stored), "left-out": parameters_left_out()})


def read_stored() -> Figures:
    """Returns the stored figures."""
    return read_figures(STORED)


if __name__ == "__main__":
    if "--stored" not in sys.argv:
        store_figures(STORED, compute_all())
    PAGE.write_text(fill(PAGE.read_text(), read_stored()))
