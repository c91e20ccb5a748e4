"""Tables of what was timed here; `render_tables.py` puts them into the pages."""

import collections
import statistics
from collections.abc import Callable
from typing import Any, Final

from markdown_tables import (
    NOT_MEASURED,
    Cells,
    Results,
    find_row,
    show_machine,
    show_processor,
    show_time,
    table,
)
from peers_picture import PICTURE
from sides import OURS, SERVERS, SIDES


def _peers(results: Results) -> str:
    head = ("setting", "library", "optimizer", "train step, ms", "this / peer")
    rows: list[Cells] = [(*head, "forward pass, ms", "this / peer")]
    last = None
    for row in results["peers"]["results"]:
        name = row["setting"]
        cells = ("" if name == last else f"{name}: {_shape(row['shape'])}",)
        last = name
        cells += (SIDES[row["peer"]].title, row["optimizer"].replace("_", " "))
        if "left_out" in row:
            rows.append((*cells, f"left out: {row['left_out']}", "", "", ""))
            continue
        for method in ("train", "forward"):
            ratio = row.get(f"{method}_ratio")
            cells += (_with_quartiles(row, method),)
            cells += ("" if ratio is None else f"{ratio:.2f}",)
        rows.append(cells)
    return table(rows)


def _with_quartiles(row: dict[str, Any], name: str) -> str:
    low, high = map(show_time, row[f"{name}_quartiles_ms"])
    return f"{show_time(row[f'{name}_ms'])} ({low} to {high})"


def _shape(shape: dict[str, Any]) -> str:
    rows = f"{shape['rows']:,}"
    text = f"{shape['tables']} x {rows} x {shape['dim']}, batch {shape['batch']:,}"
    return f"{text}, {shape['valence']} ids" if shape["valence"] > 1 else text


def _peers_picture(results: Results) -> str:
    del results
    return f"![Times of a step and of a lookup, beside other libraries]({PICTURE})\n"


def _initialization(results: Results) -> str:
    rows: list[Cells] = [("tables", "by", "time", "CPU time", "peak / size")]
    for row in results["initialization"]["results"]:
        by = {
            "init_tables": "`te.functional.init_tables`",
            "uniform": "`jax.random.uniform`",
        }
        size = f"{row['tables']} x {row['rows']:,} x {row['dim']}"
        cells = (size, by[row["by"]], f"{row['seconds']:.2f} s")
        peak = f"{row['peak_ratio']:.2f}x" if _is_large(row) else "-"
        rows.append((*cells, f"{row['cpu_seconds']:.2f} s", peak))
    return table(rows)


def _is_large(row: dict[str, Any]) -> bool:
    """Returns True if the tables weigh more than the compiler that makes them."""
    return row["tables"] * row["rows"] * row["dim"] > 1e8


def _compile_time(results: Results) -> str:
    rows: list[Cells] = [("tables", "features", "tracing", "compilation", "ratio")]
    for row in results["compile_time"]["results"]:
        cells = (str(row["tables"]), str(row["features"]))
        cells += (f"{row['trace_seconds']:.1f} s", f"{row['compile_seconds']:.1f} s")
        rows.append((*cells, f"{row['ratio']:.2f}"))
    return table(rows)


def _prepare_speed(results: Results) -> str:
    rows: list[Cells] = [("form of the ids", "a batch", "million ids/s")]
    for row in results["prepare_speed"]["results"]:
        rate = row["ids_per_second"] / 1e6
        rows.append((row["form"], f"{show_time(row['median_ms'])} ms", f"{rate:.1f}"))
    return table(rows)


def _checkpoint_speed(results: Results) -> str:
    found = results["checkpoint_speed"]["results"]
    has_cpu = all("cpu_seconds" in row for row in found)
    head = ("work", "by", "devices", "size", "time", "ratio")
    rows: list[Cells] = [(*head, *(("CPU time", "ratio") if has_cpu else ()), "memory")]
    by = {
        "tpu_embedding": "`te.save`, `te.restore`",
        "without_digests": "the same without checksums",
        "orbax": "plain orbax",
    }
    for row in sorted(found, key=lambda row: (row["work"] != "save", row["devices"])):
        cells = (row["work"], by[row["side"]], str(row["devices"]), f"{row['gb']:g} GB")
        cells += (f"{row['seconds']:.1f} s", f"{row['ratio']:.2f}")
        if has_cpu:
            cells += (f"{row['cpu_seconds']:.1f} s", f"{row['cpu_ratio']:.2f}")
        rows.append((*cells, f"{row['extra_bytes'] / 1e6:,.0f} MB"))
    return table(rows)


def _input_speed(results: Results) -> str:
    rows: list[Cells] = [
        (
            "format",
            "memory after a fifth, at the end",
            "shuffled (of the peer)",
            "in file order (of the peer)",
            "peer, in file order",
            "CPU s per million: each",
        )
    ]
    for row in results["input_speed"]["results"]:
        memory = (
            f"{_megabytes(row['early_peak_bytes'])}, {_megabytes(row['peak_bytes'])}"
        )
        cells = [row["format"], memory]
        for order in ("", "file_order_"):
            rate = row[f"{order}samples_per_second"] / 1e3
            cells.append(f"{rate:,.0f} ({row[f'{order}ratio']:.2f})")
        cells.append(f"{row['peer']}: {row['peer_samples_per_second'] / 1e3:,.0f}")
        seconds = (
            row[f"{side}cpu_seconds_per_million"]
            for side in ("", "file_order_", "peer_")
        )
        cells.append(", ".join(f"{each:.2f}" for each in seconds))
        rows.append(tuple(cells))
    return table(rows)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def _dlrm_speed(results: Results) -> str:
    rows: list[Cells] = [("library", "a step, ms", "samples/s")]
    titles = {"ours": SIDES[OURS].title, "torch": "PyTorch"}
    for row in results["dlrm_speed"]["results"]:
        rate = f"{row['samples_per_second']:,.0f}"
        rows.append((titles[row["side"]], _with_quartiles(row, "step"), rate))
    return table(rows)


def _device_count(results: Results) -> str:
    rows: list[Cells] = [
        ("setting", "devices", "train step, ms", "ratio", "forward pass, ms", "ratio")
    ]
    for row in results["device_count"]["results"]:
        cells = (row["setting"], str(row["devices"]))
        for method in ("train", "forward"):
            cells += (show_time(row[f"{method}_ms"]), f"{row[f'{method}_ratio']:.2f}")
        rows.append(cells)
    return table(rows)


def _step_profile(results: Results) -> str:
    rows: list[Cells] = [
        ("setting", "part of the step", "operation", "core-ms", "of all")
    ]
    found = results["step_profile"]["results"]
    last = None
    for row in found:
        name = row["setting"]
        total = sum(r["ms"] for r in found if r["setting"] == name)
        cells = ("" if name == last else name, row["part"], row["operation"])
        last = name
        rows.append((*cells, show_time(row["ms"]), f"{100 * row['ms'] / total:.0f} %"))
    return table(rows)


def _peak_memory(results: Results) -> str:
    rows: list[Cells] = [("setting", "tables and slots", "peak", "ratio")]
    for row in results["peak_memory"]["results"]:
        sizes = (f"{row[n] / 1e9:.2f} GB" for n in ("state_bytes", "peak_bytes"))
        rows.append((row["setting"], *sizes, f"{row['ratio']:.2f}"))
    return table(rows)


def _unique_rows(results: Results) -> str:
    rows: list[Cells] = [
        ("setting", "with", "train step, ms", "samples/s", "ratio", "memory of a step")
    ]
    last = None
    for row in results["unique_rows"]["results"]:
        name = row["setting"]
        cells = ("" if name == last else name, row["side"])
        last = name
        rate = f"{row['samples_per_second']:,.0f}"
        memory = f"{row['temporary_bytes'] / 1e6:,.0f} MB"
        cells += (_with_quartiles(row, "step"), rate, f"{row['ratio']:.2f}", memory)
        rows.append(cells)
    return table(rows)


def _dynamic_stream(results: Results) -> str:
    head = ("users, items alive", "tables", "rows", "memory", "rate of the tables")
    head += ("log loss, second half", "over unlimited, by seed", "held-out log loss")
    rows: list[Cells] = [(*head, "teacher's")]
    last = None
    for row in results["dynamic_stream"]["results"]:
        name = f"{row['users']:,}, {row['items']:,}"
        cells = ("" if name == last else name, row["kind"], f"{row['rows']:,}")
        last = name
        cells += (f"{row['bytes'] / 1e6:.2f} MB", f"{row['rate']:g}")
        shares = ", ".join(f"{100 * share:+.2f} %" for share in row["over_unlimited"])
        cells += (f"{row['loss']:.4f}", "" if row["kind"] == "unlimited" else shares)
        rows.append((*cells, f"{row['held_out']:.4f}", f"{row['teacher']:.4f}"))
    return table(rows)


def _dynamic_ids(results: Results) -> str:
    rows: list[Cells] = [("ids", "load", "without a place", "expected", "mixed up")]
    for row in results["dynamic_ids"]["results"]:
        shares = (row["without_place"], row["expected_without_place"])
        cells = (f"{row['ids']:,}", f"{row['load']:g}")
        rows.append((*cells, *(f"{100 * share:.4f} %" for share in shares), "0"))
    return table(rows)


def _dynamic_steps(results: Results) -> str:
    rows: list[Cells] = [("setting", "tables", "train step, ms", "ratio")]
    for row in results["dynamic_steps"]["results"]:
        cells = (row["setting"], row["side"], _with_quartiles(row, "step"))
        rows.append((*cells, f"{row['ratio']:.2f}"))
    return table(rows)


def _host_memory(results: Results) -> str:
    head = ("setting", "devices", "freed memory")
    rows: list[Cells] = [
        (*head, "train step, ms", "ratio", "forward pass, ms", "ratio")
    ]
    for row in results["host_memory"]["results"]:
        cells: list[str] = [row["setting"], str(row["devices"]), row["memory"]]
        for method in ("train", "forward"):
            cells += [_with_quartiles(row, method), f"{row[f'{method}_ratio']:.2f}"]
        rows.append(tuple(cells))
    return table(rows)


def _first_step(results: Results) -> str:
    head = ("program", "start", "imports", "until the run starts", "first step")
    head += ("evaluation", "compiler", "programs", "process to first step")
    rows: list[Cells] = [(*head, "ratio")]
    titles = {"command": "`tpu-embedding train`", "model": "26 features"}
    phases = ("imports", "checks", "first_step", "evaluation", "compile")
    for row in results["first_step"]["results"]:
        cells = (titles[row["program"]], row["start"])
        cells += tuple(f"{row[f'{name}_ms'] / 1e3:.2f} s" for name in phases)
        low, high = (time / 1e3 for time in row["until_step_quartiles_ms"])
        whole = f"{row['until_step_ms'] / 1e3:.2f} s ({low:.2f} to {high:.2f})"
        rows.append((*cells, f"{row['programs']:.0f}", whole, f"{row['ratio']:.2f}"))
    return table(rows)


def _serving_latency(results: Results) -> str:
    head = ("setting", "rows", "batch", "served by", "p50, ms", "p99, ms", "calls")
    rows: list[Cells] = [(*head, "StableHLO / this, p50")]
    last = None
    for row in results["serving_latency"]["results"]:
        case = (row["setting"], row["dtype"], f"{row['batch']:,}")
        cells = ("", "", "") if case == last else case
        last = case
        cells += (SERVERS[row["side"]].title,)
        cells += tuple(show_time(row[name]) for name in ("p50_ms", "p99_ms"))
        rows.append((*cells, f"{row['calls']:,}", f"{row['ratio']:.2f}"))
    return table(rows)


def _processors(results: Results) -> str:
    rows: list[Cells] = [("benchmark", "machine", "results", "CPU, instruction sets")]
    for name, benchmark in results.items():
        if benchmark["device"] == "compiled only":
            continue
        counts = collections.Counter(map(show_processor, benchmark["results"]))
        for processor, count in counts.items():
            rows.append((name, benchmark["machine"], str(count), processor))
    return table(rows)


def dlrm_summary(results: Results) -> list[Cells]:
    """Returns the row of the README that compares a whole model with PyTorch's."""
    try:
        ours = find_row(results, "dlrm_speed", side=OURS)
        peer = find_row(results, "dlrm_speed", side="torch")
    except KeyError:
        return []
    ratio = ours["samples_per_second"] / peer["samples_per_second"]
    return [
        (
            f"Trains a DLRM {_times(ratio)} PyTorch does",
            show_machine(results["dlrm_speed"]),
            "`python benchmarks/dlrm_speed.py`",
        )
    ]


def peers_summary(results: Results) -> list[Cells]:
    """Returns the row of the README about steps on tables; none if unmeasured.

    The ratios are medians over the three settings.
    """
    ratios: dict[str, list[float]] = {"torch": [], "fbgemm": []}
    for peer, found in ratios.items():
        for setting in ("S1", "S2", "S3"):
            try:
                row = find_row(results, "peers", setting=setting, peer=peer)
                found.append(1 / row["train_ratio"])
            except KeyError:
                return []
    torch, fbgemm = (statistics.median(found) for found in ratios.values())
    return [
        (
            f"Trains tables {_times(torch)} PyTorch's EmbeddingBag, and "
            f"{_times(fbgemm)} FBGEMM, the kernels below TorchRec",
            f"{show_machine(results['peers'])}, median of three settings",
            "`python benchmarks/peers.py`",
        )
    ]


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times as fast as"


def _if_measured(
    benchmark: str, render: Callable[[Results], str]
) -> Callable[[Results], str]:
    return lambda r: render(r) if benchmark in r else NOT_MEASURED


MEASURED_TABLES: Final[dict[str, Callable[[Results], str]]] = {
    "peers": _if_measured("peers", _peers),
    "peers_picture": _if_measured("peers", _peers_picture),
    "initialization": _if_measured("initialization", _initialization),
    "compile_time": _if_measured("compile_time", _compile_time),
    "prepare_speed": _if_measured("prepare_speed", _prepare_speed),
    "checkpoint_speed": _if_measured("checkpoint_speed", _checkpoint_speed),
    "input_speed": _if_measured("input_speed", _input_speed),
    "dlrm_speed": _if_measured("dlrm_speed", _dlrm_speed),
    "device_count": _if_measured("device_count", _device_count),
    "peak_memory": _if_measured("peak_memory", _peak_memory),
    "unique_rows": _if_measured("unique_rows", _unique_rows),
    "dynamic_stream": _if_measured("dynamic_stream", _dynamic_stream),
    "dynamic_ids": _if_measured("dynamic_ids", _dynamic_ids),
    "dynamic_steps": _if_measured("dynamic_steps", _dynamic_steps),
    "host_memory": _if_measured("host_memory", _host_memory),
    "first_step": _if_measured("first_step", _first_step),
    "serving_latency": _if_measured("serving_latency", _serving_latency),
    "step_profile": _if_measured("step_profile", _step_profile),
    "processors": _processors,
}
"""Name of a block in a page to the function that renders it."""
