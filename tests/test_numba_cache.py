"""Compiled loops work wherever Python runs, compile once, and say so only when they do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
from service_user import NOBODY, run

import optimus.compiled as subject
from optimus.compiled import announce_first_compilation, find_private_directory, njit_cached
from optimus.environment import cache_candidates

# A process that uses a compiled function: prints where a compilation will be kept, then what it computed.
SCRIPT = """
from optimus.compiled import announce_first_compilation, njit_cached

@njit_cached
def total(n):
    result = 0
    for i in range(n):
        result += i
    return result

with announce_first_compilation(lambda kept: print("compiling for", kept)):
    print(total(5), total(6))
"""


def add(a: float, b: float) -> float:
    return a + b


# ------------------------------------------------------------------ where the cache is


def test_the_users_word_comes_first_and_the_temporary_directory_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/t")
    chosen = {"OPTIMUS_CACHE_DIR": "/o", "XDG_CACHE_HOME": "/x", "HOME": "/h"}
    assert cache_candidates(chosen) == (
        Path("/o"),
        Path("/x/optimus"),
        Path("/h/.cache/optimus"),
        Path(f"/t/optimus-{os.geteuid()}"),
    )


def test_empty_and_relative_variables_are_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/t")
    variables = {"OPTIMUS_CACHE_DIR": "", "XDG_CACHE_HOME": "here", "HOME": "."}
    assert cache_candidates(variables) == (Path(f"/t/optimus-{os.geteuid()}"),)


def test_there_may_be_neither_a_home_nor_a_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)  # no such user
    assert cache_candidates({}) == ()


def test_a_directory_is_made_for_us_alone(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    assert find_private_directory([directory]) == directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert list(directory.iterdir()) == []


def in_the_way(path: Path) -> None:
    path.write_text("a file")


def others_may_write(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def others_may_enter(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def others_may_replace(path: Path) -> None:
    path.parent.chmod(0o777)
    path.mkdir(0o700)


def of_another_user(path: Path) -> None:
    path.mkdir(0o700)
    os.chown(path, NOBODY, NOBODY)


def a_link_of_another_user(path: Path) -> None:
    target = path.with_name("target")
    target.mkdir(0o700)
    path.symlink_to(target)
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


@pytest.mark.parametrize(
    "spoil",
    [
        in_the_way,
        others_may_write,
        others_may_enter,
        others_may_replace,
        of_another_user,
        a_link_of_another_user,
    ],
)
def test_a_directory_that_is_not_only_ours_is_passed_over(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    if "another" in spoil.__name__ and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    (tmp_path / "a").mkdir()
    spoil(tmp_path / "a" / "spoiled")
    assert find_private_directory([tmp_path / "a" / "spoiled", tmp_path / "good"]) == tmp_path / "good"
    assert find_private_directory([tmp_path / "a" / "spoiled"]) is None


def test_a_link_of_ours_to_a_directory_of_ours_is_fine(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    assert find_private_directory([tmp_path / "link"]) == tmp_path / "link"


# ------------------------------------------------------------------ compiling


def test_numba_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_cache_directory", lambda: tmp_path)
    before = numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES
    assert njit_cached(add)(1, 2) == 3
    after = numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES
    assert before == after
    assert [path.suffix for path in sorted(tmp_path.rglob("*.nb?"))] == [".nbc", ".nbi"]


@pytest.mark.parametrize("why", ["no directory", "directory gone"])
def test_without_a_cache_it_compiles_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        subject, "_cache_directory", lambda: None if why == "no directory" else tmp_path / "file"
    )
    kept: list[Path | None] = []
    function = njit_cached(add)
    with announce_first_compilation(kept.append):
        assert function(1, 2) == 3
        assert function(1.5, 2) == 3.5  # a second compilation: not announced again
    assert kept == [None]


def test_importing_it_does_not_import_numba(tmp_path: Path) -> None:
    lines = run("import sys, optimus.compiled; print('numba' in sys.modules)", tmp_path, {})
    assert lines == ["False"]


@pytest.mark.ci
def test_a_process_compiles_only_what_none_has_compiled_before(tmp_path: Path) -> None:
    cache = {"OPTIMUS_CACHE_DIR": str(tmp_path / "cache")}
    first = run(SCRIPT, tmp_path, cache)
    assert len(first) == 2 and first[0].startswith(f"compiling for {tmp_path / 'cache'}/")
    assert first[1:] == ["10 15"]
    assert run(SCRIPT, tmp_path, cache) == ["10 15"]
    assert run(SCRIPT.replace("+= i", "+= 2 * i"), tmp_path, cache)[1:] == ["20 30"]
    assert not list(tmp_path.glob("__pycache__/*.nb?"))


# ------------------------------------------------------------------ a service user


@pytest.mark.ci
@pytest.mark.parametrize("place", ["temporary directory", "squatted", "nothing can be written"])
def test_a_service_user_without_home_on_read_only_site_packages(
    as_nobody: list[str], installed: Path, place: str
) -> None:
    own = installed / "tmp" / f"optimus-{NOBODY}"
    limit = []
    if place == "squatted":
        others_may_write(own)
    if place == "nothing can be written":
        limit = ["prlimit", "--fsize=0"]
    variables = {"PYTHONPATH": str(installed / "site-packages"), "TMPDIR": str(installed / "tmp")}
    first, second = (run(SCRIPT, installed, variables, *as_nobody, *limit) for _ in range(2))
    assert first[-1] == second[-1] == "10 15"
    if place == "temporary directory":
        assert first[0].startswith(f"compiling for {own}/")
        assert len(second) == 1
        assert own.stat().st_mode & 0o777 == 0o700 and own.stat().st_uid == NOBODY
    else:
        assert first[0] == second[0] == "compiling for None"
        assert not list(installed.rglob("*.nb?"))
