"""Every bench runs in a small form, and its record becomes a page.

Smoke runs only: no test checks a time or a size, because those are findings. Not covered: the GPU
paths, and whether a plot is readable.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
#: Packages outside of the extra `dev`; a bench does not run without its package.
NEEDS = {"bench_replicas": "ray", "bench_rollout": "trl"}
BENCHES = [
    path
    for path in sorted(BENCH.glob("bench_*.py"))
    if path.stem not in NEEDS or importlib.util.find_spec(NEEDS[path.stem])
]
MARKERS = "<!-- figures:start -->\n<!-- figures:end -->\n"

# The first test waits for all benches, some of which start servers.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(script: Path | str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script of the bench folder as a user would."""
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=880
    )


#: Runs all benches in one process, since a small run consists mostly of imports.
_RUN_ALL = """
import gc, pathlib, runpy, sys
bench, results, *names = map(pathlib.Path, sys.argv[1:])
sys.path.insert(0, str(bench))
for name in names:
    print(f"---- {name}", file=sys.stderr)
    gc.collect()
    gc.freeze()  # Many benches collect garbage: skip the objects of earlier imports.
    sys.argv = [str(name), "--smoke", "--json", str(results / f"{name.stem}-cpu.json")]
    try:
        runpy.run_path(str(bench / name), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of small runs of all benches."""
    folder = tmp_path_factory.mktemp("bench") / "results"
    done = run("-c", _RUN_ALL, BENCH, folder, *(bench.name for bench in BENCHES))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch):
    """The module that reads records."""
    monkeypatch.syspath_prepend(str(BENCH))
    import report

    return report


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch):
    """The module that writes records."""
    monkeypatch.syspath_prepend(str(BENCH))
    import harness

    return harness


@pytest.mark.parametrize("bench", BENCHES, ids=lambda path: path.stem)
def test_a_record_has_question_prediction_environment_and_rows(
    results: Path, report, bench: Path
) -> None:
    loaded = {result.stem: result for result in report.load(results)}
    result = loaded[f"{bench.stem}-cpu"]
    assert result.record["question"].endswith("?")
    assert result.record["prediction"]
    assert result.record["environment"]["torch"]
    assert "commit" in result.record["environment"]
    assert result.rows
    for row in result.rows:
        assert not any(isinstance(value, dict) for value in row.values())


def test_outdated_figures_are_marked(report, harness) -> None:
    """In the table of figures and on the record's page, with the reason."""
    figures = [
        harness.Figure("a", "one", 2.0, "ms", at_most=3),
        harness.Figure("b", "two", 4.0, "ms"),
    ]
    record = harness.make_record("Question. Why?", [{"n": 1}], figures)
    for outdated, met in (({}, "| yes |"), ({"outdated": "Gone."}, "| yes, of older code |")):
        result = report.Result("x-cpu", "x", {**record, **outdated})
        assert met in report.figures_table([result], "results")
        page = report.record_page(result, "README.md")
        assert ("**Outdated.** Gone." in page) == bool(outdated)


def test_a_share_that_was_not_measured_is_shown(harness) -> None:
    """A busy machine's small run may have none: it ended by a TypeError."""
    record = harness.make_record("Q", [{"n": 1}], [harness.Figure("a", "one", None, "%", 0.1)])
    assert record["figures"][0]["is_met"] is None
    assert harness.show_got(record["figures"][0]).strip() == "%"


def test_report_makes_reproducible_pages(results: Path, report, tmp_path: Path) -> None:
    """A page and a plot for each record, the same bytes each time; `--check` finds changes."""
    root = tmp_path / "ROOT.md"
    root.write_text(f"before\n{MARKERS}after\n")
    places = [
        "--results", results, "--readme", results.parent / "README.md", "--root-readme", root,
    ]  # fmt: skip
    places = [str(each) for each in places]
    assert report.main(["--check", *places]) == 1
    written = run(BENCH / "report.py", *places)
    assert written.returncode == 0, written.stderr

    front = (results.parent / "README.md").read_text()
    for bench in BENCHES:
        stem = f"{bench.stem}-cpu"
        assert f"(results/{stem}.md)" in front
        assert (results / f"{stem}.md").read_text().startswith(f"# {stem}\n")
        if bench.stem.removeprefix("bench_") in report.PLOTS:
            assert f"({stem}.png)" in (results / f"{stem}.md").read_text()
            assert (results / f"{stem}.png").stat().st_size > 1000
    assert root.read_text().startswith("before\n<!-- figures:start -->\n| on one")
    assert root.read_text().endswith("<!-- figures:end -->\nafter\n")
    plots = {path: path.read_bytes() for path in results.glob("*.png")}
    assert report.main(places) == 0
    assert plots == {path: path.read_bytes() for path in results.glob("*.png")}
    assert report.main(["--check", *places]) == 0
    (results / "gone-cpu.md").write_text("a page without a record")
    assert report.main(["--check", *places]) == 1
    assert report.main(places) == 0
    assert report.main(["--check", *places]) == 0

    path = results / "bench_waste-cpu.json"
    changed = json.loads(path.read_text())
    changed["rows"][0]["waste_share"] += 1
    path.write_text(json.dumps(changed))
    assert report.main(["--check", *places]) == 1


def test_the_summary_takes_its_numbers_from_records(report, harness) -> None:
    """A figure without a record is shown as not measured."""
    figure = harness.Figure("a", "one", 2.0, "ms", rival="vLLM 3 ms")
    record = harness.make_record("Question. Why?", [{"n": 1}], [figure])
    text = "{x-cpu:a} ({x-cpu:a:rival}), {x-cpu:b}"
    shown = report.summary(text, [report.Result("x-cpu", "x", record)], "results")
    assert shown == "[2 ms](results/x-cpu.md) (vLLM 3 ms), (not measured)"


def test_all_numbers_of_the_committed_summary_are_measured(report, harness) -> None:
    """Every placeholder of the summary, and every figure of the README's table, has a record."""
    results = report.load(harness.RESULTS)
    known = {(each.stem, figure["name"]) for each in results for figure in each.figures}
    assert {(stem, name) for stem, name, _ in report.HEADLINES} <= known
    text = report.summary((BENCH / "summary.md").read_text(), results, "results")
    assert "not measured)" not in text
    assert "{" not in text


#: Bench, figure, and its value, which depends neither on time nor on the machine.
EXACT_FIGURES = (
    ("sharing", "prefix_adopt_calls", 0),
    ("sharing", "shared_prefix_ratio", 1),
    ("sharing", "fork_new_mib", 1 / 8),  # An extent of 32 pages of 4 KiB.
    ("serve", "serve_idle_above_watermark_mib", 0),
    ("live", "live_failed", 0),
)


@pytest.mark.parametrize(("bench", "name", "expected"), EXACT_FIGURES)
def test_counted_figures_are_exact(
    results: Path, report, bench: str, name: str, expected: float
) -> None:
    """Calls and bytes are the same on every machine."""
    (result,) = (each for each in report.load(results) if each.bench == bench)
    (figure,) = (each for each in result.figures if each["name"] == name)
    assert figure["got"] == pytest.approx(expected)
    assert figure["is_met"] is not False


def test_the_idle_workload_is_measured(results: Path, report) -> None:
    """The engine shrinks from its peak to the watermark and keeps prefixes, which are hit again."""
    (result,) = (each for each in report.load(results) if each.bench == "serve")
    (row,) = (each for each in result.rows if each["workload"] == "idle")
    assert row["peak_bytes"] > row["watermark_bytes"] >= row["kept_bytes"] > 0
    assert 0 < row["cached_tokens_again"] < row["prompt_tokens"]
    assert row["idle_s"] >= 0.2
    assert row["cpu_share"] >= 0
    (figure,) = (each for each in result.figures if each["name"] == "serve_idle_cpu")
    assert figure["got"] == row["cpu_share"]


def test_the_live_bench_measures_all_servers_and_loads(results: Path, report) -> None:
    """With and without HTTP, all tokens arrive, and latencies are consistent."""
    (result,) = (each for each in report.load(results) if each.bench == "live")
    places = {(row["load"], row["server"]): row for row in result.rows}
    alone = "vmkv, engine alone"
    http = {"vmkv", "vmkv, host memory and files"}
    assert {server for _, server in places} == {*http, alone, f"{alone}, a quarter of the memory"}
    for each in http:
        assert {load for load, server in places if server == each} == {"chat 24/s", "chat, at once"}
    for row in result.rows:
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        # On a busy machine the tokens of a short answer may come in one event.
        assert 0 <= row["tpot_p50_ms"] <= row["gap_p99_ms"]
        assert 0 < row["events_per_token"] <= 1
    by_itself, served = (places["chat 24/s", who] for who in (alone, "vmkv"))
    assert by_itself["output_tokens"] == served["output_tokens"]
    assert by_itself["mixed_steps"] > 0
    [figure] = (each for each in result.figures if each["name"] == "live_quarter_plan_map_ms")
    assert figure["got"] > 0


def test_a_run_of_some_workloads_has_its_own_record(
    report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown workload is refused."""
    import bench_serve

    path = tmp_path / "serve_idle-cpu.json"
    assert bench_serve.main(["--smoke", "--only", "idle", "--json", str(path)]) == 0
    [result] = report.load(tmp_path)
    assert (result.bench, result.stem) == ("serve_idle", "serve_idle-cpu")
    assert [row["workload"] for row in result.rows] == ["idle"]
    assert result.record["question"].endswith("?")
    assert report.record_page(result, "README.md").startswith("# serve_idle-cpu\n")
    with pytest.raises(SystemExit, match="2"):
        bench_serve.main(["--smoke", "--only", "W9", "--json", str(tmp_path / "none.json")])
    assert "no workload called W9" in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_beam_search_finds_the_same_tokens(results: Path, report) -> None:
    """Both caches find the same tokens and are reordered for each new token."""
    (result,) = (each for each in report.load(results) if each.bench == "beams")
    assert {row["cache"] for row in result.rows} == {"VMKVCache", "DynamicCache"}
    for row in result.rows:
        assert row["same_tokens_share"] == 1
        assert row["reorderings"] == row["new_tokens"]


def test_committed_pages_are_up_to_date(report, capsys: pytest.CaptureFixture[str]) -> None:
    """bench/README.md, the records' pages and the README's table agree with the records."""
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_figure_knows_whether_it_is_met(harness) -> None:
    """A bound is met at equality; a figure without a bound is neither met nor missed."""
    assert harness.Figure("a", "a", 2.0, "ms", at_most=2.0).is_met
    assert not harness.Figure("a", "a", 2.1, "ms", at_most=2.0).is_met
    assert harness.Figure("a", "a", 1.08, "×", at_least=1.08).is_met
    assert harness.Figure("a", "a", 1.0, "×").is_met is None


def test_a_record_goes_on_with_the_same_sizes_and_device_only(harness, tmp_path: Path) -> None:
    bench = harness.Bench("x", "Question. Why?")
    rows, path = [{"n": 1}], tmp_path / "x.json"
    record = harness.make_record("Question. Why?", rows, [], {"size": 1})
    harness.write_result("x", record, path)
    assert bench.rows_before(None, {"size": 1}) == []
    assert bench.rows_before(path, {"size": 1}) == rows
    with pytest.raises(SystemExit):
        bench.rows_before(path, {"size": 2})
    record["environment"]["device"] = "another"
    harness.write_result("x", record, path)
    with pytest.raises(SystemExit):
        bench.rows_before(path, {"size": 1})


def test_servers_of_many_models_run_by_turns_where_one_device_cannot_hold_both(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench_many as many
    from models import llama_config, token_bytes_of

    options = argparse.Namespace(smoke=True, rates=None, phases=None)
    cache_bytes = many.SMALL.share_tokens * token_bytes_of(llama_config(smoke=True))
    needed_bytes = 3 * 1000 + 2 * 2 * cache_bytes  # Two models and one; two shares each.
    for factor, num_starts in ((0.99, 2), (1.01, 1)):
        device_bytes = factor * needed_bytes / many.HELD_SHARE
        monkeypatch.setattr(many, "device_bytes", lambda found=device_bytes: found)
        starts = many.parts_of(many.HOT, 2, options, weights_bytes=1000)
        assert len(starts) == num_starts
        parts = [part for start in starts for part in start]
        assert len(set(parts)) == len(parts) == 2 * many.NUM_ALTERNATIONS


def test_a_burst_at_a_higher_rate_begins_with_the_same_requests(harness) -> None:
    import bench_many as many

    def lengths(server: str, rate_per_s: float) -> list[tuple[int, int, int]]:
        arrivals = many.FULL.arrivals(many.Part(3, server, rate_per_s))
        return [(model, len(each.prompt), each.new_tokens) for model, each in arrivals]

    few, more = lengths(many.HOT, 0.2), lengths(many.HOT, 0.4)
    assert 0 < len(few) < len(more)
    assert more[: len(few)] == few
    assert lengths(many.SHARED, 0.1) == lengths(many.VLLM, 0.1)


def test_many_models_are_compared_over_rates_that_both_servers_had(harness) -> None:
    import bench_many as many

    def row(server: str, rate_per_s: float, *, is_served: bool = True) -> dict[str, object]:
        its = many.Part(2, server, rate_per_s)._asdict()
        return {**its, "ttft_p99_ms": 100.0, "is_served": is_served}

    left_out = {**many.Part(2, many.SHARED, 2.0)._asdict(), "stopped": "no time was left"}
    rows = [row(many.SHARED, 1.0), left_out, row(many.FIXED, 1.0), row(many.FIXED, 2.0)]
    figures = {figure.name: figure.got for figure in many.figures_of(rows)}
    assert figures == {"many_2_rate": 1.0, "many_2_rate_fixed": 1.0, "many_2_ttft_fixed": 1.0}


def test_rival_block_tables_are_right(report) -> None:
    """The rival's slots follow its block tables across many block ends, from any length."""
    import torch
    from rivals import BlockTables

    tables = BlockTables([1, 15, 16, 17, 40], max_tokens=120, device=torch.device("cpu"))
    for _ in range(64):
        tables.prepare_step()
        tables.check()
