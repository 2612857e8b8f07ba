"""Compares our parameter counts with transformers' on `meta`, for the table of docs/supported-models.md."""

from __future__ import annotations

import json
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
from optimus.job.hf_config import ENCODER_READERS, REFUSED, THINKERS, read_hf_config

PAGE = DOCS / "supported-models.md"
STORED = GOLDEN / "supported_models.json"
DATA = ROOT / "tests" / "data"
NO_CLASS = ("internvl_chat",)  # read, but transformers has no class of its own
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
            CONFIG_MAPPING[kind]().save_pretrained(folder)
            yield kind, WRITTEN, json.loads((Path(folder) / "config.json").read_text())


def count_in_transformers(config: dict[str, Any]) -> int:
    """Counts the parameters of transformers' own model, which is built without memory."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        read = AutoConfig.from_pretrained(folder)
    read = getattr(read, "thinker_config", read)
    for mapping in ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING"):
        kinds = getattr(modeling_auto, mapping)
        if type(read) in kinds:
            with torch.device("meta"):
                return sum(parameter.numel() for parameter in kinds[type(read)](read).parameters())
    raise AssertionError(f"no class for {config['model_type']}")


def figures(config: dict[str, Any]) -> Figures:
    """Returns our count and transformers', or why a configuration is refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        try:
            model = read_hf_config(path)
        except UserError as error:
            return {"model_type": config["model_type"], "refused": error.problem}
    return {
        "model_type": config["model_type"],
        "ours": model.parameters(),
        "transformers": count_in_transformers(config),
        "encoders": [encoder.name for encoder in model.encoders],
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
