"""`benchmarks shaped`: links that are slow and leave nothing behind; (heavy) figures on this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from benchmarks.__main__ import run
from benchmarks.shaped import COMPARISONS, JOB, Axis, ShapedSetup, bench_shaped, compare, predict
from benchmarks.shaped_net import enter_namespace, shaped_links
from benchmarks.timing import Timings
from benchmarks.without_tp_slots import remove_tp_slots
from optimus.errors import UserError
from optimus.ir.ranks import LLM
from optimus.job.read import find_job
from optimus.planner.planning import make_plan

pytestmark = pytest.mark.heavy  # checks the benchmark, no promise of the product

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="makes network namespaces"
)
PORT, BYTES, MBIT_PER_S = 29_876, 1_000_000, 40.0


def receive(name: str) -> int:
    """A process that takes all bytes inside a namespace, and then says so."""
    child = os.fork()
    if not child:
        enter_namespace(name)
        with socket.create_server(("10.213.0.1", PORT)) as server:
            taken, _ = server.accept()
            left = BYTES
            while left:
                left -= len(taken.recv(65_536))
            taken.sendall(b"!")
        os._exit(0)
    return child


def send(name: str) -> int:
    """A process that exits with the hundredths of a second that the bytes took."""
    child = os.fork()
    if not child:
        enter_namespace(name)
        for _ in range(50):
            try:
                link = socket.create_connection(("10.213.0.1", PORT))
                break
            except OSError:
                time.sleep(0.05)
        begin = time.monotonic()
        link.sendall(bytes(BYTES))
        link.recv(1)
        os._exit(min(250, round(100 * (time.monotonic() - begin))))
    return child


@needs_root
@pytest.mark.timeout(60)
def test_a_link_is_as_slow_as_it_is_told_to_be() -> None:
    """200 ms for a megabyte at 40 Mbit/s, less what may pass at once; more on a busy machine."""
    seconds = []
    with shaped_links(2, mbit_per_s=MBIT_PER_S) as names:
        for _ in range(3):
            children = receive(names[0]), send(names[1])
            received, sent = (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
            assert received == 0
            seconds.append(sent / 100)
    assert 0.18 <= min(seconds) <= 1.0


def namespaces_and_links() -> set[str]:
    """Returns those of this process: other runs may have theirs at the same time."""
    shown = [subprocess.run(words, capture_output=True, text=True, check=True).stdout for words in WORDS]
    return set(re.findall(rf"\bopt{os.getpid()}(?:[nv]\d+)?\b", "".join(shown)))


WORDS = (["ip", "netns"], ["ip", "-o", "link"])


@needs_root
def test_namespaces_are_gone_also_after_an_error() -> None:
    def fail() -> None:
        with shaped_links(2, mbit_per_s=MBIT_PER_S) as names:
            made = namespaces_and_links()
            assert made > set(names) and len(made) == 5  # namespaces, a link to each, and the bridge
            raise ZeroDivisionError

    assert not namespaces_and_links()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert not namespaces_and_links()


def test_a_user_without_rights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="may not"), shaped_links(2, mbit_per_s=1):
        pass


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["shaped", "--ranks", "4"], "--ranks"),
        (["shaped", "--against", "balanced ZBV"], "--against"),
        (["real", "--mbit", "100"], "--mbit"),
        (["shaped", "--mbit", "0"], "--mbit"),
        (["real", "--link", "tp"], "--link"),
    ],
)
def test_options_of_other_benchmarks_are_refused(
    words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words]) == 2
    assert f"error: {field}" in capsys.readouterr().err


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_prediction_fills_some_of_what_is_exposed(axis: Axis) -> None:
    job, comparison = find_job(JOB), COMPARISONS[axis]
    job = replace(job, layout=replace(job.layout, modules={LLM: comparison.layout}))
    plan = make_plan(job, systems=()).plan
    slotless = remove_tp_slots(plan).plan
    plans = {name: plan if each.has_slots else slotless for name, each in comparison.variants.items()}
    predicted_s = predict(comparison, plans)
    assert predicted_s[comparison.no_traffic] <= predicted_s[comparison.ours]
    assert predicted_s[comparison.ours] < predicted_s[comparison.unfilled]
    seconds = dict(zip(comparison.variants, ([2.0] * 3, [3.0] * 3, [1.0] * 3), strict=True))
    timings = Timings(seconds=seconds, losses={}, dropped=0, kept=0, foreign_share=0.0)
    setup = ShapedSetup(comparison=comparison, job=job, plans=plans, predicted_s=predicted_s)
    result = compare(setup, timings, rounds=3)
    assert (result.bound, result.bound_s, result.ours_over_bound) == (comparison.no_traffic, 1.0, 2.0)
    assert result.variants[comparison.unfilled].over_ours == 1.5
    assert any("50% are hidden" in note for note in result.notes)


@needs_root
@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("axis", "least"), [("dp", 1.10), ("tp", 1.12)])
def test_filled_bubbles_are_faster_over_a_slow_link(axis: Axis, least: float) -> None:
    result = bench_shaped(axis=axis)
    unfilled = result.variants[COMPARISONS[axis].unfilled]
    assert unfilled.over_ours >= least, result
    assert unfilled.over_ours_low is not None and unfilled.over_ours_low > 1.05
