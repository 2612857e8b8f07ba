"""Reads fields, recipes and imports in the source of Megatron Bridge, which this Python need not import."""

from __future__ import annotations

import ast
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

# Where the classes of its configuration are; megatron-core has the ones that these derive from.
FILES = (
    "data/base.py",
    "data/builders/direct_hf_sft.py",
    "models/gpt_provider.py",
    "models/mla_provider.py",
    "models/transformer_config.py",
    "training/config.py",
)
PROVIDERS = ("qwen_vl", "gemma", "gemma_vl", "glm_vl", "kimi_vl")
CORE = {
    "MCoreTransformerConfig": ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    "MCoreMLATransformerConfig": ("megatron.core.transformer.transformer_config", "MLATransformerConfig"),
    "MCoreDistributedDataParallelConfig": ("megatron.core.distributed", "DistributedDataParallelConfig"),
}


def find_source() -> tuple[Path, str]:
    """The folder megatron/bridge and its version."""
    try:
        found = distribution("megatron-bridge")
    except PackageNotFoundError:
        pytest.skip("megatron-bridge is not installed")
    return Path(str(found.locate_file("megatron/bridge"))), found.version


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def classes() -> dict[str, ast.ClassDef]:
    """The classes of its configuration and model providers, by name."""
    root, _ = find_source()
    paths = [root / file for file in FILES]
    for package in PROVIDERS:
        paths += sorted((root / "models" / package).glob("*_provider.py"))
    nodes = (node for path in paths for node in parse(path).body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def fields_of(name: str) -> set[str]:
    """The dataclass fields of a class, with those that it inherits, also from megatron-core's classes."""
    if name in CORE:
        module, core_name = CORE[name]
        core = getattr(pytest.importorskip(module, exc_type=ImportError), core_name)
        assert is_dataclass(core)
        return {field.name for field in fields(core)}
    node = classes().get(name)
    if node is None:  # e.g. of megatron.training, which megatron-core 0.16.1 does not ship
        return set()
    targets = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
    own = {target.id for target in targets if isinstance(target, ast.Name)}
    return own.union(*(fields_of(base.id) for base in node.bases if isinstance(base, ast.Name)))


@cache
def assigned_in_recipes() -> frozenset[str]:
    """The settings `section.field` that its recipes for multimodal models assign themselves."""
    root, _ = find_source()
    paths = [root / "recipes/common.py", *sorted((root / "recipes").glob("*_vl/h100/*.py"))]
    targets = [
        target
        for path in paths
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    texts = (ast.unparse(target) for target in targets if isinstance(target, ast.Attribute))
    return frozenset(text.removeprefix("cfg.") for text in texts if text.startswith("cfg."))


def find_recipe(package: str, name: str) -> tuple[ast.FunctionDef, str]:
    """The function that `megatron.bridge.recipes.PACKAGE` exports by this name, and the text of its file."""
    root, _ = find_source()
    path = root / "recipes" / package / "__init__.py"
    while True:
        tree = parse(path)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node, path.read_text()
        path, name = _follow_import(tree, path, name, root)


def _follow_import(tree: ast.Module, path: Path, name: str, root: Path) -> tuple[Path, str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    relative = node.module.removeprefix("megatron.bridge.").replace(".", "/")
                    start = path.parent if node.level else root
                    return start / f"{relative}.py", alias.name
    raise AssertionError(f"{path} has no {name}")
