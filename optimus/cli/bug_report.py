"""Finds what a machine has for planning and training, and packs it for a bug report, without secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import zipfile
from collections import deque
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from optimus import __version__
from optimus.environment import reported, usable_cores
from optimus.errors import UserError

PACKAGES = (
    "numba", "numpy", "rich", "tyro", "torch", "transformers", "safetensors", "peft", "datasets",
    "torchtitan", "tensorboard", "wandb",
)  # fmt: skip
PROGRAMS = ("torchrun", "sbatch", "nvidia-smi")
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
OPEN_FILES = 4096  # a rank holds sockets of all its groups
LAST_METRICS, LAST_DUMPS = 200, 16  # lines, and files
MAX_FILE_BYTES = 20_000_000
REMOVED = "(removed)"
SECRET_NAME = (
    r"[\w.-]*(?:token|secret|password|passwd|credentials?|api[_-]?key|access[_-]?key|secret[_-]?key)"
)
SECRETS = (  # values of keys that sound like one, credentials in addresses, and tokens of known form
    (rf"(?i)([\"']?{SECRET_NAME}[\"']?\s*[:=]\s*)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,}}\]]+)", rf'\1"{REMOVED}"'),
    (r"(\w+://)[^/\s:@]+:[^/\s@]+@", rf"\1{REMOVED}@"),
    (r"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}", REMOVED),
    (r"\b[0-9a-f]{40}\b", REMOVED),
)


def list_facts() -> dict[str, str]:
    """Returns what this machine has, each in one line."""
    versions = (f"{name} {_version_of(name) or 'is not installed'}" for name in PACKAGES)
    programs = [name for name in PROGRAMS if shutil.which(name)]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return {
        "optimus": __version__,
        "python": f"{platform.python_version()} on {system}",
        "packages": ", ".join(versions),
        "programs": ", ".join(programs) or "none of " + ", ".join(PROGRAMS),
        "gpus": _describe_gpus(),
        "host": f"{usable_cores()} usable cores, {_memory_gb():.0f} GB, {files} open files allowed",
    }


def list_problems() -> list[str]:
    """Returns what keeps this machine from planning or training well."""
    problems = []
    if _version_of("torch") is None:
        problems.append(
            "torch is not installed: it plans, but does not train (pip install 'optimus-mllm[train]')"
        )
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < OPEN_FILES:
        problems.append(
            f"{files} open files are few for a rank in large groups: ulimit -n {min(most, 65536)}"
        )
    return problems


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe_gpus() -> str:
    try:
        done = subprocess.run(GPU_QUERY, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "none that nvidia-smi shows"
    names = done.stdout.strip().splitlines()
    return f"{len(names)}: {'; '.join(dict.fromkeys(names))}"


def _memory_gb() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


# ---------------------------------------------------------------------------- the bundle


def collect_files(run_dir: Path, job: Path | None, shown: list[str]) -> dict[str, str]:
    """Returns the files of a bundle by name, without secrets and with a short home."""
    from optimus.engine.config import METRICS, PLAN

    files = {
        "doctor.txt": "\n".join(shown) + "\n",
        "environment.json": json.dumps(reported(), indent=2) + "\n",
    }
    if job is not None:
        files["job.yaml"] = _read_text("--job", job)
    if (plan := run_dir / PLAN).is_file():
        files[PLAN] = _read_text("--run-dir", plan)
    if (metrics := run_dir / METRICS).is_file():
        with metrics.open(errors="replace") as lines:
            files[METRICS] = "".join(deque(lines, LAST_METRICS))
    dumps = [path for path in run_dir.glob("ring-*.json") if path.is_file() and not path.is_symlink()]
    for path in sorted(dumps, key=lambda path: path.stat().st_mtime)[-LAST_DUMPS:]:
        files[path.name] = _read_text("--run-dir", path)
    clean = make_cleaner(str(Path.home()))
    return {name: clean(text) for name, text in files.items()}


def _read_text(field: str, path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise UserError(field=field, value=str(path), problem=problem, hint="name a file of yours") from None


def make_cleaner(home: str) -> Callable[[str], str]:
    """Returns a function that removes secrets from a text and shortens the home directory."""
    patterns = [(re.compile(pattern), replacement) for pattern, replacement in SECRETS]

    def clean(text: str) -> str:
        for pattern, replacement in patterns:
            text = pattern.sub(replacement, text)
        return text if home in ("", "/") else re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)

    return clean


def write_bundle(path: Path, files: dict[str, str]) -> None:
    """Writes the files as one archive."""
    from optimus.ir.files import write_file_atomically

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    write_file_atomically(path, packed.getvalue())
