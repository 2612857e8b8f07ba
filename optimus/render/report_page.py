"""The page: one file that asks for nothing else, readable without its script and on paper."""

from __future__ import annotations

from importlib.resources import files

from optimus.render.colours import colour_css
from optimus.render.markup import note, percent, table, text
from optimus.render.memory_chart import memory_section
from optimus.render.report_data import ReportData, Source, Summary, Where
from optimus.render.time_bars import where_section
from optimus.render.timeline_chart import timeline_section
from optimus.render.tornado_chart import sure_section
from optimus.render.tried_chart import tried_section
from optimus.render.units import gigabytes, seconds

HERE = "optimus.render"


def report_html(data: ReportData) -> str:
    """The whole page; the same bytes for the same data."""
    style = colour_css() + _file("style.css")
    title = f"{data.summary.job}: {seconds(data.summary.step_s)} s a step"
    parts = [
        "<!doctype html>",
        "<html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width,initial-scale=1'>",
        "<meta name='color-scheme' content='light dark'>",
        f"<title>{text(title)}</title>",
        f"<style>\n{style}</style></head><body><main>",
        _head(data.summary, data.where),
        where_section(data.summary, data.where),
        timeline_section(data.scenes),
        memory_section(data.memory),
        sure_section(data.sure),
        tried_section(data.tries),
        _foot(data.source),
        f"</main><script>\n{_file('script.js')}</script></body></html>",
        "",
    ]
    return "\n".join(parts)


def _file(name: str) -> str:
    return (files(HERE) / name).read_text(encoding="utf-8")


def _head(summary: Summary, where: Where) -> str:
    """The verdict, the figures of the plan, and what was chosen."""
    figures = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(more)}</small></dd></div>"
        for name, value, more in _figures(summary)
    )
    chosen = table(["chosen", "layout", "", "", "", ""], summary.chosen, left=6, name="chosen")
    return (
        f"<header><p class='job'>{text(summary.job)}</p><h1>{text(headline(summary, where))}</h1>\n"
        f"<dl>{figures}</dl>\n{chosen}</header>"
    )


def headline(summary: Summary, where: Where) -> str:
    """`2.444 s a step on 3072 GPUs, 1.155 times the floor; balanced-best takes 2.382 s`."""
    words = f"{seconds(summary.step_s)} s a step on {summary.gpus} GPUs"
    if summary.floor_s:
        words += f", {summary.step_s / summary.floor_s:.3f} times the floor"
    others = [bar for bar in where.bars if not bar.own and bar.name != "llm-only" and bar.fits is not False]
    if not others:
        return words
    best = min(others, key=lambda bar: bar.step_s)
    ratio = best.step_s / summary.step_s
    fits = "" if best.fits else " (if it fits)"
    if ratio < 1:
        return f"{words}; {best.name} takes {seconds(best.step_s)} s{fits}, and is simpler"
    return f"{words}, {ratio:.3f} times the speed of {best.name}, the best of the others{fits}"


def _figures(summary: Summary) -> list[tuple[str, str, str]]:
    """Name, figure, and what stands small behind it."""
    step = seconds(summary.step_s)
    found = [("step", f"{step} s", f"estimate {seconds(summary.estimate_s)} s" if summary.estimate_s else "")]
    if summary.floor_s:
        over = f"{summary.step_s / summary.floor_s:.3f}"
        found.append(("over floor", over, f"floor {seconds(summary.floor_s)} s"))
    if summary.hidden_strict is not None:
        placed = "" if summary.hidden_placed is None else f"placed {percent(summary.hidden_placed)}"
        found.append(("hidden, strict", percent(summary.hidden_strict), placed))
    of = f"of {gigabytes(summary.capacity_bytes)} GB"
    found.append(("peak memory", f"{gigabytes(summary.peak_bytes)} GB", of))
    if summary.mfu is not None:
        found.append(("MFU", percent(summary.mfu, 1), ""))
    if summary.bound_s:
        over = f"{summary.step_s / summary.bound_s:.3f} times the bound"
        found.append(("bound", f"{seconds(summary.bound_s)} s", f"{summary.bound} binds; {over}"))
    return found


def _foot(source: Source) -> str:
    preset = f", preset {source.preset}" if source.preset else ""
    lines = [
        f"Seconds are simulated, not measured. Cost model: {source.cost_model}{preset}.",
        f"Not modelled: {'; '.join(source.not_modelled)}.",
        f"Optimus {source.version}; plan made by {source.tool}, sha256 {source.digest}.",
    ]
    return f"<footer>{''.join(note(line) for line in lines)}</footer>"
