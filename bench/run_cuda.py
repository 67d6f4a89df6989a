#!/usr/bin/env python3
"""Measures everything in the GPU speed tables in one run and writes results/<gpu>.json; `make bench-cuda`.

    PYTHONPATH=<where fla-core is> bench/run_cuda.py [--rewy build/rewy] [--python PYTHON]   # both sides, on a GPU
    bench/run_cuda.py --only rewy                                          # one side, into the file that is there
    bench/run_cuda.py --render results/h200.json --write docs/performance.md   # no GPU: tables and charts

This library's times are `rewy bench --device cuda` on tests/cases/bench_cuda.txt, section by section, and once more
with --arch 80 for the kernels that every GPU from compute capability 8.0 on can run. FLA's times are
bench/time_fla.py's, in a process of its own run by --python, whose PYTHONPATH, FLA_CACHE_MODE and FLA_CONFIG_DIR are
this command's: see there for what it needs and what --fla-times-only means. The file is written after each section, so
that what was measured stays.

Times by kernel, of one forward and one backward call of (1, 8192, 16), are Nsight Compute's (`ncu`), where it is found
and may read the GPU's counters. The profiler runs kernels one by one, so that they add up to a little more than a call.
"""

import argparse
import csv
import datetime
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

import render_cuda
from time_fla import OPERATORS, SHAPES

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = "tests/cases/bench_cuda.txt"
PORTABLE = "The six shapes with the kernels of compute capability 8.0."
BARS = (1, 8192, 16)  # where peaks, trained gates and kernels are looked at


# What is measured.

def sections(text):
    """[(comment above it, its lines)] of a list of problems."""
    out = []
    for block in re.split(r"\n\s*\n", text):
        title = " ".join(line.lstrip("# ") for line in block.splitlines() if line.startswith("#"))
        lines = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith("#")]
        if lines:
            out.append((title, lines))
    return out


def run_rewy(rewy, lines, extra):
    with tempfile.TemporaryDirectory() as folder:
        problems, report = pathlib.Path(folder) / "problems.txt", pathlib.Path(folder) / "report.json"
        problems.write_text("\n".join(lines) + "\n")
        command = [rewy, "bench", "--device", "cuda", "--file", str(problems), "--json", str(report), *extra]
        subprocess.run(command, check=True, cwd=ROOT)
        return json.loads(report.read_text())


def rewy_row(row, section, arch):
    """A row as `rewy bench` writes it, times in microseconds and without the single observations."""
    out = {"section": section} | ({"arch": arch} if arch else {})
    words = dict(word.split("=", 1) for word in row["problem"].split() if "=" in word)
    out |= {key: row[key] for key in ("op", "B", "T", "H", "HV", "K", "V")}
    out |= {"gate": words.get("gate", "none" if row["op"] == "deltanet" else "mild"), "packed": words.get("packed")}
    out |= {key: row[key] for key in ("policy", "direction", "saved", "backend", "problem")}
    out |= {f"{name}_us": row[f"{name}_s"] * 1e6 for name in ("median", "min", "max", "floor")}
    out["observations"] = len(row["observations_s"])
    out |= {key: row[key] for key in ("bytes", "operations", "bytes_per_s", "operations_per_s", "fraction_of_floor",
                                      "workspace_bytes", "saved_bytes", "outputs_bytes", "peak_mib")}
    return out


def git(*arguments):
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit_of_tree():
    commit = git("rev-parse", "--short", "HEAD")
    return commit + ("+changes" if commit and git("status", "--porcelain", "--untracked-files=no") else "") or "unknown"


def command_line(script, valued, flags):
    """This command with the options that bear on what is measured, and without what only this machine has."""
    words = iter(sys.argv[1:])
    kept = [script]
    for word in words:
        if word.split("=")[0] in valued + flags:
            kept.append(word)
            if word in valued:
                kept.append(next(words))
    return shlex.join(kept)


def stamp(a):
    command = command_line("bench/run_cuda.py", ("--only", "--match", "--fla-seconds"),
                           ("--fla-times-only", "--no-large", "--quick"))
    return {"date": datetime.date.today().isoformat(), "commit": a.commit or commit_of_tree(), "command": command}


def measure_rewy(a, save):
    start = time.monotonic()
    plan = [(title, lines, None) for title, lines in sections((ROOT / LIST).read_text())]
    has_arch = "--arch" in subprocess.run([a.rewy, "bench", "--help"], capture_output=True, text=True).stdout
    out = {**stamp(a), "notes": [], "rows": []}
    if has_arch:
        plan.insert(2, (PORTABLE, plan[0][1], "80"))
    else:
        out["notes"].append("this rewy has no --arch: the portable kernels were not timed apart")
    extra = ["--repeats", "5"] if a.quick else []
    for title, lines, arch in plan:
        if a.match:
            lines = [line for line in lines if a.match in line]
        if not lines:
            continue
        print(f"[{time.monotonic() - start:5.0f} s] {title}", flush=True)
        try:
            report = run_rewy(a.rewy, lines, extra + (["--arch", arch] if arch else []))
        except subprocess.CalledProcessError as error:
            out["notes"].append(f"failed with status {error.returncode}: {title}")
            print(out["notes"][-1], flush=True)
            continue
        out["machine"] = report["machine"]
        out["rows"] += [rewy_row(row, title, arch) for row in report["problems"]]
        save(out)
    if not out["rows"]:
        raise SystemExit("rewy bench measured nothing: " + "; ".join(out["notes"]))
    out["seconds"] = round(time.monotonic() - start)
    save(out)


def driver():
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                              text=True)
    except FileNotFoundError:
        return None
    return done.stdout.split("\n")[0].strip() or None


def measure_fla(a, save):
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "fla.json"
        command = [a.python, str(ROOT / "bench/time_fla.py"), "--json", str(path), "--seconds", str(a.fla_seconds)]
        command += ["--observations", "5"] if a.quick else []
        command += ["--times-only"] if a.fla_times_only else []
        command += ["--no-large"] if a.no_large else []
        status = subprocess.run(command, cwd=ROOT).returncode
        if not path.exists():
            raise SystemExit(f"bench/time_fla.py measured nothing (status {status}): is fla-core on PYTHONPATH?")
        report = json.loads(path.read_text())
    notes = [f"ended with status {status}"] if status else []
    notes += [report["stopped"]] if "stopped" in report else []
    tuned = os.environ.get("FLA_CACHE_MODE", "disabled") == "disabled"
    save({**stamp(a), "driver": driver(), "versions": report["versions"], "unchecked": report["unchecked"],
          "tuning": "here" if tuned else "choices made before (FLA_CACHE_MODE=" + os.environ["FLA_CACHE_MODE"] + ")",
          "notes": notes, "seconds": round(time.monotonic() - start), "rows": report["rows"]})


# What follows from it.

def shape_of(row):
    return row["B"], row["T"], row["H"]


def rewy_find(results, op, shape, direction, policy="recompute", gate=None, arch=None):
    """The row of one problem at K = V = 128; the forward is the one that keeps nothing."""
    for row in results.get("rewy", {}).get("rows", []):
        if (row["op"] == op and shape_of(row) == shape and row["HV"] == row["H"] and row["K"] == row["V"] == 128
                and row["packed"] is None and row["direction"] == direction and row["policy"] == policy
                and row["saved"] == (direction == "bwd") and row.get("arch") == arch
                and (row["gate"] == gate if gate else row["gate"] != "trained")):
            return row
    return None


def fla_find(results, op, shape, direction, policy="recompute", safe=False, value_heads=None):
    for row in results.get("fla", {}).get("rows", []):
        if (row["op"] == op and shape_of(row) == shape and row["HV"] == (value_heads or row["H"])
                and row["direction"] == direction and row["policy"] == policy and row["safe_gate"] == safe
                and "refused" not in row):
            return row
    return None


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def ratios(results, op, direction, policy="recompute", safe=False):
    """{shape: FLA's time / this library's} where both were measured."""
    out = {}
    for shape in SHAPES:
        ours = rewy_find(results, op, shape, direction, policy)
        theirs = fla_find(results, op, shape, direction, policy, safe)
        if ours and theirs:
            out[shape] = theirs["median_us"] / ours["median_us"]
    return out


def summarise(results):
    summary = {}
    for op in OPERATORS:
        vector = op in ("kda", "gdn2")
        parts = {"forward": ratios(results, op, "fwd"), "backward_recompute": ratios(results, op, "bwd")}
        if vector:
            parts["backward_saved"] = ratios(results, op, "bwd", "save")
        mean = lambda part: geometric_mean(part.values()) if len(part) == len(SHAPES) else None
        one = {"backward_recompute": mean(parts["backward_recompute"]),
               "backward_saved": mean(parts["backward_saved"]) if vector else None}
        if vector:
            one["backward_recompute_safe"] = mean(ratios(results, op, "bwd", safe=True))
        one["forward"] = mean(parts["forward"])
        single = [(ratio, name, shape) for name, part in parts.items() for shape, ratio in part.items()]
        worst = min(single) if single and all(len(p) == len(SHAPES) for p in parts.values()) else (None, None, None)
        one |= {"min_shape": worst[0], "min_shape_at": worst[1] and {"call": worst[1], "shape": list(worst[2])}}
        peak = rewy_find(results, op, BARS, "bwd")
        fla_peak = fla_find(results, op, BARS, "bwd")
        one |= {"backward_peak_mib": peak and peak["peak_mib"], "fla_backward_peak_mib": fla_peak and fla_peak["peak_mib"]}
        if op != "deltanet":
            for name, direction in (("forward", "fwd"), ("backward", "bwd")):
                trained = rewy_find(results, op, BARS, direction, gate="trained")
                mild = rewy_find(results, op, BARS, direction)
                one[f"trained_over_mild_{name}"] = trained["median_us"] / mild["median_us"] if trained and mild else None
        summary[op] = one
    return summary


def file_name(gpu):
    """NVIDIA H200 -> h200"""
    words = re.sub(r"\b(NVIDIA|GeForce|Tesla|Quadro)\b", " ", gpu, flags=re.I)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") + ".json"


def assemble(results):
    """Orders the parts, and derives machine and summary from them."""
    rewy, fla = results.get("rewy", {}), results.get("fla", {})
    machine = dict(rewy.get("machine") or {"gpu": fla.get("versions", {}).get("gpu"), "driver": fla.get("driver")})
    machine |= {key: value for key, value in fla.get("versions", {}).items() if key != "gpu"}
    first = rewy or fla
    floors = (ROOT / "tools/floors.h").read_text()
    ceilings = {name: float(re.search(rf"{constant} = ([0-9.e]+);", floors)[1])
                for name, constant in (("bytes_per_s", "kH200BytesPerSecond"),
                                       ("operations_per_s", "kH200OperationsPerSecond"))}
    out = {"date": first.get("date"), "commit": first.get("commit"), "command": first.get("command"),
           "machine": machine, "floor": {"of": "NVIDIA H200", **ceilings}, "summary": summarise(results)}
    for name in ("kernels", "rewy", "fla"):
        if name in results:
            out[name] = results[name]
    return out


def short_kernel(name):
    """rewy::cuda::(anonymous namespace)::scan<...>(...) -> scan: the first name with arguments behind it."""
    return re.search(r"(\w+)\s*[<(]", name).group(1)


def measure_kernels(a, save):
    """Rows {op, direction, kernel, us}: the forward call before a backward, and the backward."""
    if shutil.which("ncu") is None:
        print("no ncu: times by kernel are left as they were")
        return
    B, T, H = BARS
    rows = []
    for op in OPERATORS:
        problem = f"op={op} B={B} T={T} H={H} K=128 V=128 dtype=bf16 strength_dtype=bf16 h0=1 dht=1"
        command = ["ncu", "--csv", "--clock-control", "none", "--metrics", "gpu__time_duration.sum", "--launch-count", "8",
                   a.rewy, "bench", problem, "--device", "cuda", "--direction", "bwd", "--repeats", "1"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        lines = done.stdout.splitlines()
        head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
        if head is None:
            print("ncu measured nothing: " + (lines[-1] if lines else f"status {done.returncode}"))
            return
        to_us = {"ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3}
        times = [(short_kernel(row["Kernel Name"]), float(row["Metric Value"].replace(",", "")) * to_us[row["Metric Unit"]])
                 for row in csv.DictReader(lines[head:])]
        # The forward call ends with its scan; the backward with the pullback and its sums, before kernels come again.
        names = [name for name, _ in times]
        forward = names.index("scan") + 1
        pullback = names.index("pullback", forward) + 1
        backward = pullback + (names[pullback:pullback + 1] == ["pullback_sums"])
        rows += [{"op": op, "direction": "fwd", "kernel": name, "us": us} for name, us in times[:forward]]
        rows += [{"op": op, "direction": "bwd", "kernel": name, "us": us} for name, us in times[forward:backward]]
    save(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rewy", default="build/rewy", help="the binary")
    parser.add_argument("--python", default=sys.executable, help="runs bench/time_fla.py; it needs torch and fla-core")
    parser.add_argument("--only", choices=("rewy", "fla", "kernels"), help="measure this, keep the rest of the file")
    parser.add_argument("--out", help="instead of results/<gpu>.json")
    parser.add_argument("--commit", help="what was built, where this is no git checkout")
    parser.add_argument("--match", help="to try something: only these problems, and the file then has only them")
    parser.add_argument("--fla-times-only", action="store_true", help="time what FLA refuses to compute here")
    parser.add_argument("--fla-seconds", type=float, default=200, help="start nothing of FLA's after this long")
    parser.add_argument("--no-large", action="store_true", help="FLA: only the six shapes of the comparison")
    parser.add_argument("--quick", action="store_true", help="five observations, to try the script")
    parser.add_argument("--render", metavar="JSON", help="measure nothing: the tables of this file")
    parser.add_argument("--write", help="document that takes the tables between its markers; writes the charts too")
    parser.add_argument("--figures", default=str(ROOT / "docs/figures"), help="folder of the charts")
    a = parser.parse_args()
    if a.render:
        results = json.loads(pathlib.Path(a.render).read_text())
    else:
        if os.sep in a.rewy:
            a.rewy = str(pathlib.Path(a.rewy).resolve())
        target = [pathlib.Path(a.out)] if a.out else []
        parts = {}

        def save(name, part):
            parts[name] = part
            if not target:
                gpu = (part.get("machine") or part["versions"])["gpu"]  # what comes first is never the kernels
                target.append(ROOT / "results" / file_name(gpu))
            old = json.loads(target[0].read_text()) if target[0].exists() else {}
            kept = {key: old[key] for key in ("rewy", "fla", "kernels") if key in old and key not in parts}
            target[0].parent.mkdir(parents=True, exist_ok=True)
            target[0].write_text(json.dumps(assemble(kept | parts), indent=1) + "\n")

        if a.only in (None, "rewy"):
            measure_rewy(a, lambda part: save("rewy", part))
        if a.only in (None, "rewy", "kernels") and not a.match:
            measure_kernels(a, lambda part: save("kernels", part))
        if a.only in (None, "fla"):
            measure_fla(a, lambda part: save("fla", part))
        print("wrote", target[0])
        results = json.loads(target[0].read_text())
    text, figures = render_cuda.render(results)
    print(text)
    if a.write:
        render_cuda.write(text, figures, pathlib.Path(a.write), pathlib.Path(a.figures))


if __name__ == "__main__":
    sys.exit(main())
