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
NO_CLASS = ("internvl_chat", "kimi_vl")  # read, but transformers has no class of its own
SAME_CLASS = {"kimi_vl": "kimi_k25"}  # classes of other sizes of the same modules
RELEASED, WRITTEN = "released form", "as transformers writes it"


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
        with tempfile.TemporaryDirectory() as folder:
            CONFIG_MAPPING[kind](**{key: {} for key in OPTIONAL.get(kind, ())}).save_pretrained(folder)
            yield kind, WRITTEN, json.loads((Path(folder) / "config.json").read_text())


def count_in_transformers(config: dict[str, Any]) -> dict[str, int]:
    """Counts parameters by module of transformers' own model, which is built without memory."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    kind = config["model_type"]
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
                return _count_by_module(kinds[type(read)](read))
    raise AssertionError(f"no class for {config['model_type']}")


def _count_by_module(model: Any) -> dict[str, int]:
    """Adds up the parameters of the LLM and of every encoder, each with its projector."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        own = re.search(
            "language_model|text_model|lm_head|^model\\.layers|^model\\.embed_tokens|^model\\.norm", name
        )
        module = "llm" if own else "audio" if "audio" in name else "vision"
        counts[module] = counts.get(module, 0) + parameter.numel()
    if set(counts) == {"llm", "vision"} and not hasattr(model.config, "vision_config"):
        counts["audio"] = counts.pop("vision")  # its projector has no name of its own
    return counts


def figures(config: dict[str, Any]) -> Figures:
    """Returns our count and transformers', or why a configuration is refused."""
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
        "transformers": sum(theirs.values()),
        "encoders": [encoder.name for encoder in model.encoders],
        "modules": {name: [count, theirs[name]] for name, count in ours.items()},
    }


def models(stored: Figures) -> str:
    """Shows counts, their difference and what can be trained."""
    header = ["configuration", "form", "`model_type`", "encoders", "ours, B", "transformers, B", "difference"]
    rows = []
    for key, row in stored.items():
        name, form = key.split(" | ")
        cells = [name, form, f"`{row['model_type']}`"]
        if "refused" in row:
            rows.append([*cells, f"refused: {row['refused']}", "", "", ""])
            continue
        difference = row["ours"] / row["transformers"] - 1
        cells += [", ".join(row["encoders"]), f"{row['ours'] / 1e9:.3f}", f"{row['transformers'] / 1e9:.3f}"]
        rows.append([*cells, f"{difference:+.2%}"])
    return markdown(header, rows)


def compute_all() -> Figures:
    """Returns the figures of every configuration, by name and form."""
    return {f"{name} | {form}": figures(config) for name, form, config in list_configs()}


def fill(page: str, stored: Figures) -> str:
    """Returns the page with its table."""
    return fill_tables(page, {"models": models(stored)})


def read_stored() -> Figures:
    """Returns the stored figures."""
    return read_figures(STORED)


if __name__ == "__main__":
    if "--stored" not in sys.argv:
        store_figures(STORED, compute_all())
    PAGE.write_text(fill(PAGE.read_text(), read_stored()))
