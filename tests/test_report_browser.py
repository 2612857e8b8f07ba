"""The report in a real browser: only its own script runs, and nothing is fetched."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from test_report import data, planned

from optimus.ir.op import Lane, OpKind
from optimus.render.html_report import render_report_page
from optimus.render.report_data import gather_report_data
from optimus.render.timeline_chart import pack_timelines

CHROMIUM = shutil.which("chromium")
POLICY = r"<meta http-equiv.*?>"
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: make browser"),
]


def opened(path: Path) -> tuple[str, str]:
    """The page after its script ran, and what the browser logged."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    done = subprocess.run(
        [CHROMIUM, *flags, f"--user-data-dir={path.parent / 'browser'}", "--virtual-time-budget=5000",
         "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_the_script_draws_and_knows_every_op(tmp_path: Path) -> None:
    scene = data().timelines[-1]
    schedule, timeline = scene.schedule, scene.timeline
    compute = np.flatnonzero(
        (schedule.device == 0) & (schedule.lane == Lane.COMPUTE) & (schedule.kind != OpKind.OPTIMIZER)
    )
    longest = compute[np.argmax((timeline.finish_s - timeline.start_s)[compute])]
    op, begin = schedule[int(longest)], float(timeline.start_s[longest])
    middle = float(begin + timeline.finish_s[longest]) / 2
    ask = (
        "<script>setTimeout(() => { const r = optimusReport, s = r.data.scenes.at(-1);\n"
        f"r.show({begin} / r.tick - 5000, {begin} / r.tick + 5000 + 2 * ({middle} - {begin}) / r.tick);\n"
        f"const found = r.itemAt(r.x({middle} / r.tick), s.top + 2);\n"
        "document.body.dataset.found = found ? r.describe(found).join('|') : 'nothing'; }, 1000)</script>"
    )
    path = tmp_path / "page.html"
    page = render_report_page(data()).replace("</body>", f"{ask}</body>")
    path.write_text(page)
    html, logged = opened(path)
    assert "data-found" not in html and "Content Security Policy" in logged, "the script of a stranger"
    path.write_text(re.sub(POLICY, "", page))
    html, logged = opened(path)
    assert not logged
    items = [sum(scene["counts"]) for scene in pack_timelines(data().timelines)[0]]
    assert 'data-script="drawn"' in html and f'data-items="{" ".join(map(str, items))}"' in html
    found = re.search(r'data-found="([^"]*)"', html)
    assert found is not None
    what, where, when, slack = found[1].split("|")
    assert what.startswith(f"{op.module} {op.kind.word} {op.label}") and f"chunk {op.chunk}" in what
    assert where == f"{schedule.device_name(0)}, compute lane, microbatch {op.microbatch}"
    assert f"starts {begin:.6f} s" in when and "takes" in when
    assert slack.startswith("slack ")


def test_a_malicious_name_runs_nothing(tmp_path: Path) -> None:
    evil = "</script><script>document.documentElement.dataset.evil = 1</script>"
    path = tmp_path / "page.html"
    path.write_text(render_report_page(gather_report_data(replace(planned().plan, name=evil))))
    html, logged = opened(path)
    assert 'data-script="drawn"' in html and "data-evil" not in html and not logged


# ---------------------------------------------------------------- scripts and requests of others

PLANTED = """
<script>document.documentElement.dataset.evil = 'inline'; fetch('HOST/fetch')</script>
<script src='HOST/script.js'></script>
<img src='HOST/image.png' onerror="document.documentElement.dataset.evil = 'handler'">
<link rel='stylesheet' href='HOST/style.css'>
<style>body { background: url(HOST/background.png) } @font-face { font-family: x; src: url(HOST/font) }
p { font-family: x }</style>
<iframe src='HOST/frame'></iframe><object data='HOST/object'></object><video src='HOST/video'></video>
<svg><image href='HOST/svg.png'/></svg>
<a id='link' href="javascript:document.documentElement.dataset.evil = 'link'; void 0">x</a>
<form id='form' action='HOST/form'></form><base href='HOST/base/'>
<script>link.click(); form.submit()</script>
"""


@contextmanager
def recorded_requests() -> Iterator[tuple[str, list[str]]]:
    """Serves any path on this host, and yields its address and the list of paths asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_planted_markup_runs_nothing_and_fetches_nothing(tmp_path: Path) -> None:
    """Without the policy the same page runs scripts and sends requests, so the browser would."""
    path = tmp_path / "page.html"
    with recorded_requests() as (host, asked):
        page = render_report_page(data()).replace("</body>", f"{PLANTED.replace('HOST', host)}</body>")
        path.write_text(page)
        html, logged = opened(path)
        assert "data-evil" not in html and 'data-script="drawn"' in html
        assert not asked and "Content Security Policy" in logged
        path.write_text(re.sub(POLICY, "", page).replace("form.submit()", ""))
        html, _ = opened(path)
        assert "data-evil" in html and {"/fetch", "/script.js", "/image.png", "/style.css"} <= set(asked)
