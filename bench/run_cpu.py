#!/usr/bin/env python3
"""Measures everything in the CPU speed table in one run and prints it; `make bench-cpu`.

    bench/run_cpu.py --build build [--json results/cpu.json] [--write docs/performance.md]

Runs `rewy bench`, `rewy grad` and `cpu_bench` as they are. --write puts the tables between the markers of the document.
The comparison with PyTorch needs its packages and has a script of its own (bench/compare_transformers.py); its results
are taken in with --transformers FILE.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPE = "B=1 T={T} H=4 K=128 V=128 dtype=f32 gate=mild policy=recompute"
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
BEGIN, END = "<!-- cpu: written by bench/run_cpu.py -->", "<!-- cpu: end -->"


def run_json(command, environment=None):
    """Runs a command that takes --json FILE; returns what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "out.json"
        flag = [f"--benchmark_out={path}"] if "cpu_bench" in command[0] else ["--json", str(path)]
        print("+", " ".join(command), flush=True)
        subprocess.run(command + flag, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
                       env={**os.environ, **(environment or {})})
        return json.loads(path.read_text())


def best_openblas_core():
    """OpenBLAS takes generic kernels on processors younger than itself: name the best it has, as a fair yardstick."""
    flags = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""
    if "avx512vl" in flags:
        return {"OPENBLAS_CORETYPE": "SKYLAKEX"}
    return {"OPENBLAS_CORETYPE": "HASWELL"} if "avx2" in flags else {}


def bench(build, problem, direction, threads, repeats):
    report = run_json([f"{build}/rewy", "bench", problem, "--direction", direction, "--threads", str(threads),
                       "--repeats", str(repeats)])
    return report["problems"][0]


def measure(build, quick):
    repeats = 3 if quick else 15
    out = {"date": datetime.date.today().isoformat(),
           "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                                    text=True).stdout.strip(),
           "machine": run_json([f"{build}/rewy", "bench", "op=gdn T=64 H=1 K=16 V=16"])["machine"]}
    google = {b["name"]: b for b in run_json([f"{build}/bench/cpu_bench", "--benchmark_out_format=json",
                                              "--benchmark_repetitions=5", "--benchmark_report_aggregates_only=true"],
                                             best_openblas_core())["benchmarks"] if b["aggregate_name"] == "median"}
    out["sgemm"] = {str(n): {"operations_per_s": google[f"sgemm_2048/threads:{n}/real_time_median"]["op/s"],
                             "kernels": google[f"sgemm_2048/threads:{n}/real_time_median"]["label"]} for n in (1, 2)}
    out["local_pullback"] = {g: {"ns": google[f"local_pullback/{g}_median"]["real_time"],
                                 "products": google[f"local_pullback/{g}_median"]["products"],
                                 "dense_Mop": google[f"local_pullback/{g}_median"]["dense_Mop"],
                                 "executed_Mop": google[f"local_pullback/{g}_median"]["executed_Mop"]}
                             for g in ("rewy", "expanded")}
    out["calls"] = []
    for op in ("deltanet", "gdn", "kda", "gdn2"):
        for threads in (2, 1):
            row = {"op": op, "threads": threads}
            gate = SHAPE.replace("gate=mild ", "") if op == "deltanet" else SHAPE
            for direction in ("fwd", "bwd"):
                b = bench(build, f"op={op} " + gate.format(T=2048), direction, threads, repeats)
                row[direction] = {"s": b["median_s"], "operations_per_s": b["operations_per_s"]}
            out["calls"].append(row)
    out["graphs"] = {}
    for graph in ("rewy", "expanded"):
        b = bench(build, "op=kda " + SHAPE.format(T=2048) + f" graph={graph}", "bwd", 2, repeats)
        out["graphs"][graph] = b["median_s"]
    out["lengths"] = []
    for T in LENGTHS[:2] if quick else LENGTHS:
        b = bench(build, "op=kda " + SHAPE.format(T=T), "both", 2, 5)
        out["lengths"].append({"T": T, "s": b["median_s"], "workspace_bytes": b["workspace_bytes"]})
    out["layers"] = []
    for op in ("gdn", "kda", "gdn2"):
        layer = run_json([f"{build}/rewy", "grad", f"examples/layers/{op}.safetensors", "--threads", "2", "--repeats",
                          str(4 * repeats)])["files"][0]
        mild = bench(build, f"op={op} T=600 H=2 K=128 V=128 dtype=f32 gate=mild dht=0", "both", 2, 4 * repeats)
        out["layers"].append({"op": op, "trained_s": layer["forward_s"] + layer["backward_s"],
                              "mild_s": mild["median_s"],
                              "pairs": (layer["forward_work"]["pairwise_exponentials"] + layer["backward_work"]["pairwise_exponentials"])
                              / layer["forward_work"]["chunks"]})
    return out


def tables(r):
    ms = lambda s: f"{s * 1e3:.2f}"
    m = r["machine"]
    lines = [f"{m['cpu']}, {m['instruction_set']}, {r['date']}, commit {r['commit']}. Command: `make bench-cpu`. FP32, "
             "K = V = 128, mild gates (log sigmoid(x) / 16), policy recompute, medians, two threads unless said "
             "otherwise. Operations are those executed.", ""]
    sgemm = r["sgemm"]
    lines += [f"OpenBLAS `sgemm` at 2048^3 ({sgemm['2']['kernels']} kernels): "
              f"{sgemm['1']['operations_per_s'] / 1e9:.0f} GFLOP/s on one thread, "
              f"{sgemm['2']['operations_per_s'] / 1e9:.0f} on two.", "",
              "### Whole calls, (B, T, H) = (1, 2048, 4)", "",
              "| operator | forward ms | backward ms | backward GFLOP/s | of sgemm | backward, 1 thread, ms | "
              "gain of 2 threads |", "|---|---|---|---|---|---|---|"]
    calls = {(c["op"], c["threads"]): c for c in r["calls"]}
    for op in ("deltanet", "gdn", "kda", "gdn2"):
        two, one = calls[op, 2], calls[op, 1]
        rate = two["bwd"]["operations_per_s"]
        lines.append(f"| {op} | {ms(two['fwd']['s'])} | {ms(two['bwd']['s'])} | {rate / 1e9:.0f} | "
                     f"{100 * rate / sgemm['2']['operations_per_s']:.0f}% | {ms(one['bwd']['s'])} | "
                     f"{one['bwd']['s'] / two['bwd']['s']:.2f}x |")
    local = r["local_pullback"]
    lines += ["", "### The derivative graphs", "",
              "Local pullback of one chunk and head alone (n = 64, one thread), and the whole KDA backward:", "",
              "| graph | products | dense Mop | executed Mop | local us | whole backward ms |", "|---|---|---|---|---|---|"]
    for g in ("rewy", "expanded"):
        lines.append(f"| {g} | {local[g]['products']:.0f} | {local[g]['dense_Mop']:.2f} | "
                     f"{local[g]['executed_Mop']:.2f} | {local[g]['ns'] / 1e3:.1f} | {ms(r['graphs'][g])} |")
    lines += ["", f"Local gain {local['expanded']['ns'] / local['rewy']['ns']:.2f}x.", "",
              "### Length: KDA, forward + backward, B = 1, H = 4", "",
              "| T | ms | us a token | workspace MiB | bytes a token |", "|---|---|---|---|---|"]
    for row in r["lengths"]:
        lines.append(f"| {row['T']} | {ms(row['s'])} | {row['s'] / row['T'] * 1e6:.2f} | "
                     f"{row['workspace_bytes'] / 2**20:.0f} | {row['workspace_bytes'] / row['T']:.0f} |")
    lines += ["", "### Trained gates: `examples/layers` against mild gates, (1, 600, 2), forward + backward", "",
              "| operator | trained ms | mild ms | ratio | single-pair exponentials a chunk and head |",
              "|---|---|---|---|---|"]
    for row in r["layers"]:
        lines.append(f"| {row['op']} | {ms(row['trained_s'])} | {ms(row['mild_s'])} | "
                     f"{row['trained_s'] / row['mild_s']:.2f} | {row['pairs']:.0f} |")
    if "transformers" in r:
        t = r["transformers"]
        versions = ", ".join(f"{k} {v}" for k, v in t["versions"].items())
        lines += ["", "### GDN against PyTorch autograd, (1, 2048, 4), two threads", "",
                  "Autograd through transformers' `torch_chunk_gated_delta_rule`, the two alternating; command: "
                  f"`bench/compare_transformers.py --rewy build/rewy --json FILE` ({versions}).", "",
                  "| | forward ms | backward ms | both ms |", "|---|---|---|---|"]
        for side in ("autograd", "rewy"):
            lines.append(f"| {side} | " + " | ".join(ms(t["median_s"][side][d]) for d in ("fwd", "bwd", "both")) + " |")
        lines.append("| ratio | " + " | ".join(f"{t['ratio'][d]:.1f}x" for d in ("fwd", "bwd", "both")) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--json", help="write, or with --render read, the measurements here")
    parser.add_argument("--render", action="store_true", help="measure nothing, render --json")
    parser.add_argument("--write", help="document that takes the tables between its markers")
    parser.add_argument("--transformers", help="results of bench/compare_transformers.py")
    parser.add_argument("--quick", action="store_true", help="few repeats, to try the script")
    a = parser.parse_args()
    build = str(pathlib.Path(a.build).resolve())
    results = json.loads(pathlib.Path(a.json).read_text()) if a.render else measure(build, a.quick)
    if a.transformers:
        results["transformers"] = json.loads(pathlib.Path(a.transformers).read_text())
        del results["transformers"]["observations_s"]
    text = tables(results)
    print(text)
    if a.json:
        pathlib.Path(a.json).write_text(json.dumps(results, indent=1) + "\n")
    if a.write:
        document = pathlib.Path(a.write)
        old = document.read_text()
        new = re.sub(re.escape(BEGIN) + ".*" + re.escape(END), lambda _: f"{BEGIN}\n{text}{END}", old, flags=re.S)
        document.write_text(new)


if __name__ == "__main__":
    sys.exit(main())
