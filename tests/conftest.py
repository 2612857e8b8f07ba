"""Keeps the tests marked `ci` within the minutes granted to their area."""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median

import pytest
from hypothesis import settings
from service_user import as_nobody as as_nobody
from service_user import installed as installed

# Sums of the durations of an area's tests; `make test-ci` runs two tests at a time, so it takes about half.
MINUTES = {
    "foundation": 8,
    "plan file": 7,
    "engine": 8,
    "survival": 8,
    "search": 6,
    "tensor parallelism": 2,
    "context parallelism": 1,
    "torchtitan": 5,
    "hf": 8,
    "own layers": 6,
    "data": 5,
}
SLOWEST = 4  # tests named of an area that is over its minutes
FAR_OVER = 3.0  # times its minutes, as they are on this machine: an area that takes more fails
LOOP, LOOP_S = 200_000, 0.009  # a loop of Python, and its seconds where the minutes were granted
LOOP_EVERY = 20  # tests

settings.register_profile("any-machine", deadline=None)  # a slow example is no counterexample
settings.load_profile("any-machine")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences of the output are in one line, whatever terminal runs the tests."""
    monkeypatch.setenv("COLUMNS", "400")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ci-budget", action="store_true", help="complain of areas over their minutes, fail if far over"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--ci-budget") and not hasattr(config, "workerinput"):  # workers only run tests
        config.pluginmanager.register(Budget(), "ci-budget")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if marker := item.get_closest_marker("ci"):
            area = marker.args[0] if marker.args else marker.kwargs.get("area", "foundation")
            item.user_properties.append(("area", area))  # travels in the test's reports


def time_loop() -> float:
    begin, total = time.perf_counter(), 0
    for number in range(LOOP):
        total += number
    return time.perf_counter() - begin


class Budget:
    """Adds up the seconds of each area, says who is over its minutes, and fails a run that is far over."""

    def __init__(self) -> None:
        self.used_s: dict[str, float] = defaultdict(float)
        self.tests_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.reports, self.loops_s = 0, [time_loop()]

    @property
    def slowness(self) -> float:
        """How much longer this machine takes, now, than that where the minutes were granted."""
        return max(1.0, median(self.loops_s) / LOOP_S)

    def complaint(self, area: str) -> str:
        if area not in MINUTES:
            return f"no such area; use one of {', '.join(MINUTES)}"
        if self.used_s[area] > 60 * MINUTES[area]:
            return "over: make its tests faster or mark some heavy"
        return ""

    def is_too_much(self, area: str) -> bool:
        return self.used_s[area] > FAR_OVER * self.slowness * 60 * MINUTES.get(area, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports += 1
        if self.reports % LOOP_EVERY == 0:
            self.loops_s.append(time_loop())
        for name, value in report.user_properties:
            if name == "area":
                self.used_s[str(value)] += report.duration
                self.tests_s[str(value)][report.nodeid] += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and any(map(self.is_too_much, self.used_s)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("minutes of test-ci")
        terminalreporter.line(f"this machine takes {self.slowness:.2f} times as long for a loop of Python")
        for area, seconds in sorted(self.used_s.items()):
            granted = MINUTES.get(area, 0)
            terminalreporter.line(
                f"{area:<20}{seconds / 60:6.2f} of {granted}  {self.complaint(area)}".rstrip()
            )
            if self.complaint(area):
                tests = self.tests_s[area]
                for name in sorted(tests, key=tests.__getitem__, reverse=True)[:SLOWEST]:
                    terminalreporter.line(f"{tests[name]:24.0f} s  {name}")
