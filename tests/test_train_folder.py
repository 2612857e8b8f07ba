"""`optimus train --model FOLDER --save FOLDER`: weights in and out of our own layers, over layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_families import OwnCase, save_folder
from own_worker import LAYOUTS
from safetensors.torch import load_file

from optimus.cli.run_ranks import train
from optimus.errors import UserError
from optimus.hf.export_checkpoint import export_checkpoint
from optimus.ir.binding import flatten_and_hash_parts, list_bound_parts
from optimus.ir.plan import Plan


def plan_of(case: OwnCase) -> Plan:
    """Returns the plan of a case, bound to its job as the planner binds it."""
    bound_to, hashes = flatten_and_hash_parts(list_bound_parts(case.job))
    return replace(case.plan, bound_to=bound_to, hashes=hashes)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.ci("own layers")
@pytest.mark.timeout(300)
def test_weights_pass_through_two_plans_and_are_trained(tmp_path: Path) -> None:
    """Folders are byte-equal after two plans without a step; after a step, weights differ in value alone."""
    folder = tmp_path / "model"
    save_folder("qwen3_vl_tied", folder, torch.bfloat16)
    first = OwnCase(
        name="a", model="qwen3_vl_tied", folder=folder, ranks=4, microbatches=5, **LAYOUTS["recompute"]
    )
    second = OwnCase(name="b", model="qwen3_vl_tied", folder=folder, ranks=2, pp=2, microbatches=5)
    train(first.job, plan_of(first), steps=0, model=folder, save=tmp_path / "a")
    checkpoints: dict[str, Any] = {"run_dir": tmp_path / "run", "checkpoint_every": 1}
    train(second.job, plan_of(second), steps=1, model=tmp_path / "a", save=tmp_path / "b", **checkpoints)
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000001", tmp_path / "a", tmp_path / "d")
    assert files(tmp_path / "d") == files(tmp_path / "b")
    assert files(tmp_path / "a") == files(folder)
    train(second.job, plan_of(second), steps=0, model=tmp_path / "a", save=tmp_path / "c")
    assert files(tmp_path / "c") == files(folder)
    assert files(tmp_path / "b").keys() == files(folder).keys()
    equal, tensors = 0, 0
    for path in folder.glob("*.safetensors"):
        before, after = load_file(path), load_file(tmp_path / "b" / path.name)
        assert {n: (t.shape, t.dtype) for n, t in before.items()} == {
            n: (t.shape, t.dtype) for n, t in after.items()
        }
        tensors += len(before)
        equal += sum(torch.equal(before[name], after[name]) for name in before)
    assert equal < tensors / 2  # a step of 1e-4 is less than half a bit of norms around one


def test_folders_are_checked_before_anything_is_planned(tmp_path: Path) -> None:
    folder, saved = tmp_path / "model", tmp_path / "saved"
    save_folder("llava_siglip_llama", folder, torch.float32)
    job = OwnCase(name="a", model="llava_siglip_llama", folder=folder, ranks=2, pp=2, microbatches=5).job
    other = replace(job.model.llm, stack=replace(job.model.llm.stack, norm_eps=0.5))
    with pytest.raises(UserError, match=r"model\.llm\.stack\.norm_eps = 0\.5 is 0\.001 in the model folder"):
        train(replace(job, model=replace(job.model, llm=other)), model=folder)
    with pytest.raises(UserError, match=r"--save = .* needs --model"):
        train(job, save=saved)
    with pytest.raises(UserError, match=r"--save = .* is the folder of the weights"):
        train(job, model=folder, save=folder)
    with pytest.raises(UserError, match="does not exist"):
        train(job, model=tmp_path / "nowhere")
