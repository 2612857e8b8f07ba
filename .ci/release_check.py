"""Installs the wheel and the sdist of dist/ into fresh environments and runs the command that each brings."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_IN_THE_WHEEL = ("tests/", "tools/", "docs/", "benchmarks/", "examples/")


def main() -> None:
    """Checks what `make dist` built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-python", default=sys.executable, help="interpreter of the fresh environments")
    base = parser.parse_args().base_python
    (wheel,) = (ROOT / "dist").glob("*.whl")
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    check_contents(wheel)
    with ThreadPoolExecutor() as pool:
        for report in pool.map(partial(try_install, base), (wheel, sdist)):
            print(report)


def check_contents(wheel: Path) -> None:
    """Raises where the wheel lacks the catalog or carries what is only for a clone."""
    names = zipfile.ZipFile(wheel).namelist()
    strays = [name for name in names if name.startswith(NOT_IN_THE_WHEEL)]
    if strays or not any(name.startswith("optimus/catalog/") and name.endswith(".yaml") for name in names):
        raise SystemExit(f"{wheel.name} lacks the catalog or contains {strays[:3]}")


def try_install(base: str, distribution: Path) -> str:
    """Runs the commands of a distribution in an environment without torch and without the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        return _try_install(base, distribution, Path(folder))


def _try_install(base: str, distribution: Path, folder: Path) -> str:
    subprocess.run([base, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    environment = os.environ | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    environment.pop("PYTHONPATH", None)
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", distribution]
    subprocess.run(install, check=True, env=environment)

    def run(*command: str) -> str:
        call = [python.parent / command[0], *command[1:]]
        return subprocess.run(
            call, cwd=folder, env=environment, check=True, capture_output=True, text=True
        ).stdout

    run("optimus-mllm", "catalog", "--json")
    run("optimus", "--help")
    version = run("optimus", "--version").split()[-1]
    if f"-{version}" not in distribution.name:
        raise SystemExit(f"{distribution.name} says that it is version {version}")
    return f"{distribution.name}: installed and run, version {version}"


if __name__ == "__main__":
    main()
