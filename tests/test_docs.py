"""README and docs tell the truth: every command runs and prints what is shown, every name exists.

`python tests/test_docs.py` writes today's output and tables into the pages.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.__main__ import Bench
from optimus import cli
from optimus.cost.assumptions import PRESETS, STACK_ENDINGS, Assumptions
from optimus.cost.memory import NOT_MODELLED, RankMemory
from optimus.ir.op import Lane, OpKind
from optimus.job import attention, cluster, data_source, layout, model, read, workload
from optimus.job.catalog_files import list_catalog_names
from optimus.job.read import load_job
from optimus.planner.systems.registry import SYSTEMS
from optimus.schedule.bubbles import CAUSES
from optimus.verify.validator import RULES

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CONFIGS = ROOT / "tests" / "data" / "configs"
TABLES = ROOT / "docs" / "cost-model.md"
REFRESH = "run `python tests/test_docs.py` and look at what changed"
LEFT_OUT = "..."  # a line of its own: lines of the output that are not shown
MODULES = {"python": "", "optimus": "optimus", "optimus-mllm": "optimus", "torchrun": "torch.distributed.run"}
ELSEWHERE = ("pip", "make")  # commands that a test does not run but checks
RUN_BY_OTHERS = ("torchtitan",)  # pages whose commands tests/test_torchtitan.py runs
LONG = ("export", "report", "train-on-files", "why")  # pages that plan, compare or train for minutes
PROGRESS = re.compile(r"^\w+: .*, \d+ of \d+, \d+ s\n", re.MULTILINE)  # their number depends on the machine
HOSTS = ("arxiv.org", "keepachangelog.com", "semver.org")
COMMANDS = cli.COMMANDS
OPTIONS = {
    f"--{field.name.replace('_', '-')}"
    for command in (*COMMANDS.values(), Bench)
    for field in fields(command)
} | {
    "--stack",
    "--for",
    "--nproc-per-node",
    "--module",
    "--config",
    "--dump_folder",
    "--training",
    "--parallelism",
    "--checkpoint",
    "--ntasks-per-node",
    "--exclusive",
}
# of torchrun, torchtitan and sbatch

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass(frozen=True)
class Block:
    """A fenced block: where its contents begin and end, in lines of the page."""

    language: str
    begin: int
    end: int


@dataclass(frozen=True)
class Step:
    """A command and what the page shows of its output, or a file that the page shows."""

    words: tuple[str, ...]
    shown: tuple[str, ...]
    begin: int  # line where `shown` begins
    exit_code: int = 0


def blocks(lines: list[str]) -> Iterator[Block]:
    open_at: int | None = None
    for place, line in enumerate(lines):
        if line.startswith("```"):
            if open_at is None:
                open_at = place
            else:
                yield Block(lines[open_at][3:].strip(), open_at + 1, place)
                open_at = None
    assert open_at is None, "a fence is not closed"


def steps(page: Path) -> list[Step]:
    """Commands and job files of a page, in order; `$ echo $?` gives the exit code of the one before."""
    lines, found = page.read_text().split("\n"), list[Step]()
    for block in blocks(lines):
        body = lines[block.begin : block.end]
        if block.language in ("yaml", "csv") and re.fullmatch(r"# [\w.-]+\.(yaml|csv)", body[0]):
            found.append(Step(("file", body[0][2:]), tuple(body), block.begin))
        if block.language not in ("console", "bash"):
            continue
        assert body[0].startswith("$ "), f"{page.name}:{block.begin + 1} begins without a command"
        starts = [place for place, line in enumerate(body) if line.startswith("$ ")]
        for start, stop in zip(starts, [*starts[1:], len(body)], strict=True):
            command = body[start][2:]
            while command.endswith("\\"):  # goes on in the next line
                start += 1
                command = command[:-1] + body[start]
            shown = tuple(body[start + 1 : stop])
            if command == "echo $?":
                last = found.pop()
                found.append(Step(last.words, last.shown, last.begin, exit_code=int(shown[0])))
            else:
                found.append(Step(tuple(shlex.split(command)), shown, block.begin + start + 1))
    return found


def furnish(folder: Path, page: Path) -> None:
    """Writes what a reader of a page has: folders of released models with their config.json, a data set."""
    if page.stem == "data":
        from chat_data import write_data_set, write_folder  # imports transformers

        write_data_set(folder / "photos", 600)
        write_folder(folder / "Qwen2.5-VL-tiny", "qwen2_5_vl")
    if page.stem == "train-on-files":  # what its commands write, so that its job can be read before
        (folder / "photos").mkdir()
        (folder / "photos" / "train.lengths.jsonl").write_text('{"text": 100, "vision": [16]}\n')
        (folder / "tiny-qwen").mkdir()
        shutil.copy(next(CONFIGS.glob("*Qwen3-VL-32B*")), folder / "tiny-qwen" / "config.json")
    for path in CONFIGS.glob("*_config.json"):
        home = folder / path.stem.removesuffix("_config").rpartition("--")[2]
        home.mkdir()
        shutil.copy(path, home / "config.json")


def play(step: Step, folder: Path) -> list[str]:
    """Runs a command in `folder` and returns its output; writes a file."""
    if step.words[0] == "file":
        (folder / step.words[1]).write_text("\n".join(step.shown))
        return list(step.shown)
    if step.words[0] in ELSEWHERE:
        return list(step.shown)
    assert step.words[0] in MODULES, f"{step.words[0]} is not a command of ours"
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in step.words[1:]]
    module = MODULES[step.words[0]]
    ran = subprocess.run(
        [sys.executable, *(["-m", module] if module else []), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = ran.stdout + (PROGRESS.sub("", ran.stderr) if ran.returncode else "")
    assert ran.returncode == step.exit_code, f"{shlex.join(step.words)} ended with {ran.returncode}\n{shown}"
    return shown.removesuffix("\n").split("\n")


def parts_of(shown: tuple[str, ...]) -> list[list[str]]:
    """Lines between the places where something is left out."""
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == LEFT_OUT:
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def is_shown_truly(shown: tuple[str, ...], output: list[str]) -> bool:
    """Returns whether `shown` is the output with nothing changed and nothing left out in silence."""
    if not shown:
        return True
    first, *others = parts_of(shown)
    if output[: len(first)] != first:
        return False
    place = len(first)
    for number, part in enumerate(others):
        last = number == len(others) - 1
        starts = [len(output) - len(part)] if last and part else range(place, len(output) - len(part) + 1)
        fitting = [start for start in starts if start >= place and output[start : start + len(part)] == part]
        if not fitting:
            return False
        place = fitting[0] + len(part)
    return bool(others) or place == len(output)


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.heavy if page.stem in LONG else pytest.mark.ci, id=page.name)
        for page in PAGES
        if page.stem not in RUN_BY_OTHERS and any(step.words[0] in MODULES for step in steps(page))
    ],
)
@pytest.mark.timeout(480)  # a page of plans takes 90 s on a quiet machine
def test_every_command_runs_and_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    furnish(tmp_path, page)
    for step in steps(page):
        output = play(step, tmp_path)
        stale = f"{page.name}:{step.begin} shows another output than today's; {REFRESH}"
        assert is_shown_truly(step.shown, output), "\n".join([stale, *output])
    if page.stem == "train-on-files":
        lines = (tmp_path / "optimus-run" / "metrics.jsonl").read_text().splitlines()
        first, last = (json.loads(line)["loss"] for line in (lines[0], lines[-1]))
        assert last < first / 2, (first, last)


@by_page
def test_every_command_is_ours_or_can_be_checked(page: Path) -> None:
    for step in steps(page):
        command, *rest = step.words
        if command == "make":
            assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), rest
        elif command == "pip":
            assert rest[0] == "install" and len(rest) == 2, rest
            wanted = re.fullmatch(r"\.(?:\[(?P<extras>[\w,]+)\])?", rest[1])
            assert wanted, f"{rest[1]} is not this checkout"
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set((wanted["extras"] or "").split(",")) <= {"", *known}
        elif command != "file":
            assert command in MODULES, command


@pytest.mark.parametrize("where", ["README.md", "docs/index.md", "mkdocs.yml"])
def test_every_page_can_be_found(where: str) -> None:
    text = (ROOT / where).read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert not {page for page in pages if page not in text}


@by_page
def test_no_page_speaks_of_a_command_that_does_not_exist(page: Path) -> None:
    for command in re.findall(r"`optimus (\S+?)[` ]", page.read_text()):
        assert command in COMMANDS, f"{page.name} speaks of optimus {command}"
    for kind in re.findall(r"python -m benchmarks (\w+)", page.read_text()):
        assert (ROOT / "benchmarks" / f"{kind}.py").exists(), (
            f"{page.name} speaks of python -m benchmarks {kind}"
        )


@by_page
def test_no_page_speaks_of_an_option_that_does_not_exist(page: Path) -> None:
    found = set(re.findall(r"(?<![\w<!-])--[a-z][\w-]*", page.read_text()))
    assert found <= OPTIONS, f"{page.name} speaks of {found - OPTIONS}"


def test_the_columns_of_the_table_are_explained() -> None:
    shown = re.findall(r"^  system  .*$", (ROOT / "docs" / "start.md").read_text(), re.MULTILINE)
    explained = (ROOT / "docs" / "concepts.md").read_text()
    for column in {name for line in shown for name in re.split(r"\s{2,}", line.strip())[1:]}:
        assert f"| {column.removesuffix(' %')} |" in explained or f"| {column} |" in explained, column


@by_page
def test_job_files_shown_in_pages_are_jobs(page: Path, tmp_path: Path) -> None:
    furnish(tmp_path, page)
    shutil.copytree(tmp_path / "Qwen3-VL-32B-Instruct", tmp_path / "tiny-vl")  # a command makes another
    for step in steps(page):
        if step.words[0] == "file":
            play(step, tmp_path)
            if step.words[1].endswith(".yaml") and not step.words[1].startswith("broken"):
                load_job(tmp_path / step.words[1])


def test_lines_may_be_left_out_only_where_the_page_says_so() -> None:
    output = ["a", "b", "c", "d"]
    for shown in (("a", "b", "c", "d"), ("a", "...", "d"), ("...", "b", "c", "..."), ("a", "..."), ()):
        assert is_shown_truly(shown, output), shown
    for shown in (
        ("a", "b"),
        ("a", "d"),
        ("...", "c"),
        ("b", "..."),
        ("a", "...", "b", "d"),
        ("a", "...", "x"),
    ):
        assert not is_shown_truly(shown, output), shown


# ---------------------------------------------------------------- links, names, words


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if urlsplit(target).scheme:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.is_file(), f"{page.name} links to {target}"
        headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings}


@by_page
def test_pages_name_no_machine(page: Path) -> None:
    text = page.read_text()
    hosts = {urlsplit(url).hostname for url in re.findall(r"\w+://[^\s)>`'\"]+", text)}
    assert hosts <= set(HOSTS), f"{page.name} names {hosts - set(HOSTS)}"
    assert not re.findall(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|mnt)/\S+", text)
    assert not re.findall(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|localhost", text)


@by_page
def test_files_and_catalog_entries_that_pages_name_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"\b((?:optimus|benchmarks|tests)/[\w/]+(?:\.py|/))(?=[`\s])", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for name in re.findall(r"\bpaper/[\w-]+", text):
        assert name in list_catalog_names("jobs"), f"{page.name} names {name}"


@by_page
def test_presets_and_systems_that_pages_name_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"(?:--preset|preset) `?([a-z][\w.-]*)`?", text):
        known = name in PRESETS or name == "chooses" or name.endswith(STACK_ENDINGS)
        assert known, f"{page.name} names the preset {name}"
    for names in re.findall(r"--system ((?:[a-z][\w-]* ?)+)", text):
        assert set(names.split()) <= set(SYSTEMS), f"{page.name} names the systems {names}"


def test_every_system_has_a_heading_and_no_other_has() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "systems.md").read_text(), re.MULTILINE)
    assert headings == list(SYSTEMS)


def test_every_rule_of_a_check_is_explained_and_counted() -> None:
    text = (ROOT / "docs" / "plan-file.md").read_text().split("## What a check proves")[1]
    assert re.findall(r"^\| (\w+) \|", text.split("\n## ")[0], re.MULTILINE) == ["rule", *RULES]
    count = ("seven", "eight", "nine", "ten", "eleven")[len(RULES) - 7]
    assert f"is checked by {count} rules" in (ROOT / "README.md").read_text()
    assert f"`optimus check PLAN`: {count} rules" in (ROOT / "CHANGELOG.md").read_text()


def test_the_glossary_has_the_words_of_the_house() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text()
    entries = re.findall(r"^\| ([\w -]+) \|", text, re.MULTILINE)
    words = (
        "module layout stage chunk microbatch kernel segment phase op lane bubble slot seam system program"
    )
    assert {*words.split(), "plan", "profile", "preset", "floor", "bound", "hidden share"} <= set(entries)
    for cause in CAUSES:
        assert f"| `{cause}` |" in text
    for kind in OpKind:
        assert f"`{kind.word}`" in text
    assert f"occupies on a device: {', '.join(lane.name.lower() for lane in Lane)}" in text


def test_every_field_of_a_job_file_is_explained() -> None:
    text = (ROOT / "docs" / "jobs.md").read_text()
    explained = set(re.findall(r"`([\w]+)(?:: [\w-]+)?`", text))
    for block in (
        read.JobFile, read.ModuleOverrides, read.ModelBlock, cluster.GpuBlock, cluster.LinkBlock,
        cluster.ClusterBlock, workload.WorkloadBlock, read.MeasuredBlock, read.TodayBlock,
        model.Encoder, model.Llm, model.Stack, attention.Attention, attention.LatentAttention,
        attention.LinearAttention, model.LayerVariant, model.Linear, model.PerLayerInputs, model.Mlp,
        model.Experts, model.Projector, model.Precision, layout.PartialLayout, layout.SearchLimits,
        workload.TokenPercentiles, data_source.DataBlock,
    ):  # fmt: skip
        missing = {field.name for field in fields(block)} - explained
        assert not missing, f"docs/jobs.md says nothing of {missing} of {block.__name__}"


def test_every_assumption_and_component_of_memory_is_explained() -> None:
    text = TABLES.read_text()
    for name in (field.name for kind in (Assumptions, RankMemory) for field in fields(kind)):
        assert name == "name" or f"`{name}`" in text, name


def test_the_readme_says_whose_work_this_is() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "an independent implementation, not by the paper's authors" in text


# ---------------------------------------------------------------- tables made from code


def presets_table() -> list[str]:
    rows = [["assumption", *(f"`{name}`" for name in PRESETS)], ["---"] * (len(PRESETS) + 1)]
    columns = [asdict(preset) for preset in PRESETS.values()]
    names = [name for name in columns[0] if name != "name"]
    rows += [[f"`{name}`", *(_shown(column[name]) for column in columns)] for name in names]
    return [f"| {' | '.join(row)} |" for row in rows]


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def not_modelled_list() -> list[str]:
    return [f"- {item}" for item in NOT_MODELLED]


def with_tables(text: str) -> str:
    for name, made in (("presets", presets_table()), ("not modelled", not_modelled_list())):
        begin = re.search(rf"<!-- {name}: .* -->\n", text)
        assert begin, name
        end = text.index(f"<!-- /{name} -->")
        text = text[: begin.end()] + "\n" + "\n".join(made) + "\n\n" + text[end:]
    return text


def test_tables_made_from_code_are_those_of_the_code() -> None:
    assert TABLES.read_text() == with_tables(TABLES.read_text()), REFRESH


@pytest.mark.ci
def test_the_site_builds_and_asks_no_other_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(\w+:)?//|<link[^>]*rel=["']?(?:stylesheet|preconnect)[^>]*href=["']?\w+://""",
            page.read_text(),
        )
        assert not loaded, page.name


# ---------------------------------------------------------------- refreshing


def refreshed(shown: tuple[str, ...], output: list[str]) -> list[str]:
    """The same parts of today's output: each begins at the next line with the same first word.

    A page that leaves nothing out shows all of it.
    """
    if LEFT_OUT not in shown:
        return output
    result: list[str] = []
    place = 0
    for number, part in enumerate(parts_of(shown)):
        if number:
            result.append(LEFT_OUT)
        if part:
            first = part[0].split()[:1]
            start = next((at for at in range(place, len(output)) if output[at].split()[:1] == first), None)
            assert start is not None, f"nothing like `{part[0]}` in the output any more"
            place = start + len(part)
            result += output[start:place]
    return result


def refresh(page: Path) -> None:
    lines = page.read_text().split("\n")
    with tempfile.TemporaryDirectory() as folder:
        furnish(Path(folder), page)
        played = [(step, play(step, Path(folder))) for step in steps(page)]
    for step, output in reversed(played):
        if step.shown:
            lines[step.begin : step.begin + len(step.shown)] = refreshed(step.shown, output)
    if "\n".join(lines) != page.read_text():
        page.write_text("\n".join(lines))


if __name__ == "__main__":
    TABLES.write_text(with_tables(TABLES.read_text()))
    for each in PAGES:
        refresh(each)
