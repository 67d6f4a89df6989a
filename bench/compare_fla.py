#!/usr/bin/env python3
"""This library's Python functions and FLA's in one process, in turn, on an NVIDIA GPU; results/compare_fla_<gpu>.json.

    PYTHONPATH=<where fla-core, torch, triton and einops are> bench/compare_fla.py [--write docs/performance.md]
    bench/compare_fla.py --render results/compare_fla_h200.json --write docs/performance.md   # no GPU: the tables

What is called is what a user of either imports: chunk_delta_rule, chunk_gated_delta_rule, chunk_kda and chunk_gdn2 with
the same tensors: those, shapes and forms of bench/time_fla.py. Forward without gradients, and backward through
torch.autograd.grad, in CUDA graphs of two calls; the replays of both sides alternate, who goes first too; events around
each, medians. safe_gate=True, FLA's path for gates in [-5, 0), is compared with this library's only one.

First comes the host's time of one eager call, forward and backward, at B = 1, T = 64, 4 heads: both sides in turn, the
least of the mean values over 20 calls, as bench/host_time.py measures it; beside them an autograd function that does
nothing on as many tensors, which is PyTorch's own part. On a GPU autograd runs a backward in a thread of its own, which
the caller waits for; both are measured once more under torch.autograd.set_multithreading_enabled(False), which runs it
in the caller's.

Before a form is timed, outputs and all gradients of both sides are compared. Each may be off the true value by 0.8% (o,
final state, dq, dk, dv and the initial state's gradient) or 2% (dg, dbeta, db, dw) in the L2 norm (docs/numerics.md),
so that the two may differ by the sum of both, 1.6% or 4%. A form that differs by more is "refused", not timed.

The file is written after each shape. Rows that are there already and are not measured again stay, unless they are of
another machine or other versions.

FLA tunes its kernels at first use: bench/time_fla.py says how it is avoided, bench/tune_fla.py does it beforehand; and
see the former for --fla-times-only.
"""

import argparse
import datetime
import gc
import json
import pathlib
import statistics
import sys
import time

import render_cuda
import time_fla
from models import SIDES, alternate, earlier, microseconds, relative, renewed
from render_cuda import NAMES, of_other_commits, shape_text, table
from run_cuda import ROOT, command_line, commit_of_tree, driver, file_name, geometric_mean

BEGIN, END = "<!-- compare: written by bench/compare_fla.py -->", "<!-- compare: end -->"
TIGHT, LOOSE = 2 * 8e-3, 2 * 2e-2
LOOSE_NAMES = ("g", "beta", "b", "w")
DIRECTIONS = ("forward", "backward")
THREADS = {"own": "a thread of its own", "caller": "the caller's thread"}  # where autograd runs a backward
KEY = ("op", "B", "T", "H", "HV", "policy", "safe_gate")


def differences(theirs, ours):
    """{name: relative difference} of outputs and gradients; the calls keep their graphs."""
    out = {}
    for name, one, other in zip(("o", "final_state"), theirs.outputs, ours.outputs):
        out[name] = relative(other.detach(), one.detach())
    for name, one, other in zip(theirs.inputs, theirs.backward(), ours.backward()):
        out["d" + name] = relative(other, one)
    return out


def too_far(found):
    limit = lambda name: LOOSE if name[1:] in LOOSE_NAMES else TIGHT
    return [f"{name} {value:.2e}" for name, value in found.items() if not value <= limit(name)]


def compare(op, B, T, H, HV, policy, safe, repeats, unchecked):
    import host_time
    import torch
    row = {"op": op, "B": B, "T": T, "H": H, "HV": HV, "K": 128, "V": 128, "policy": policy, "safe_gate": safe}
    try:
        calls = {"fla": time_fla.Call(op, B, T, H, HV, policy, safe),
                 "rewy": time_fla.Call(op, B, T, H, HV, policy, safe, function=host_time.FUNCTIONS[op])}
        for call in calls.values():
            call.keep_graph()
            with torch.cuda.stream(call.stream):
                call.backward()
                call.forward()  # both compile
        torch.cuda.synchronize()
        row["differences"] = differences(calls["fla"], calls["rewy"])
        torch.cuda.synchronize()
        if unchecked and op == "gdn":
            row["unchecked"] = True
        elif too_far(row["differences"]):
            raise ArithmeticError("results differ: " + ", ".join(too_far(row["differences"])))
        for direction in DIRECTIONS:
            work = {name: time_fla.captured(getattr(call, direction), call.stream) for name, call in calls.items()}
            times = alternate(work, repeats)
            row[direction] = {name: microseconds(observed) for name, observed in times.items()}
            row[direction]["ratio"] = row[direction]["fla"]["median_us"] / row[direction]["rewy"]["median_us"]
        row["observations"] = repeats
    except Exception as error:  # FLA's and Triton's are of many kinds
        row["refused"] = time_fla.one_line(error)
    return row


def host_row(op, repeats):
    """Microseconds of the host for one eager forward and backward."""
    import host_time
    import torch
    about = {"B": 1, "T": 64, "H": 4, "K": 128}
    inputs = [t.requires_grad_() for t in host_time.tensors(op, about["T"], about["H"], about["K"], "cuda").values()
              if t is not None]
    d_o = torch.ones_like(inputs[2])
    row = {"op": op, **about}
    name = None
    try:
        empty = lambda *inputs: [host_time.Empty.apply(*inputs)]
        work = {}
        for name, function in (("fla", time_fla.operator(op)), ("rewy", host_time.FUNCTIONS[op]), ("empty", empty)):
            def call(function=function):
                torch.autograd.grad(function(*inputs)[0], inputs, d_o)
            for _ in range(3):
                call()  # compiles
            work[name] = lambda call=call: host_time.host_us(call, "cuda", 1)
        name = "timing"
        for where in THREADS:
            with torch.autograd.set_multithreading_enabled(where == "own"):
                times = {f"{name}_us": min(observed) for name, observed in alternate(work, repeats).items()}
            row[where] = times | {"ratio": times["fla_us"] / times["rewy_us"]}
    except Exception as error:  # as above
        row["refused"] = f"{name}: {time_fla.one_line(error)}"
    return row


def form(row):
    return ("saved" if row["policy"] == "save" else "recompute") + (", safe_gate" if row["safe_gate"] else "")


def summarise(rows):
    """{operator: {form: {forward, backward: FLA's time / this library's}}}, geometric means of the six shapes."""
    summary = {}
    for op in time_fla.OPERATORS:
        of_op = [row for row in rows if row["op"] == op and "refused" not in row and row["H"] == row["HV"]
                 and (row["B"], row["T"], row["H"]) in time_fla.SHAPES]
        for one in dict.fromkeys(form(row) for row in of_op):
            found = [row for row in of_op if form(row) == one]
            if len(found) == len(time_fla.SHAPES):
                summary.setdefault(op, {})[one] = {direction: geometric_mean([row[direction]["ratio"] for row in found])
                                                   for direction in DIRECTIONS}
    return summary


def in_order(rows):
    """As bench/time_fla.py lists the shapes; rows of the host by operator."""
    places = {one: i for i, one in enumerate(time_fla.plan(large=True))}
    places |= {(op, 1, 64, 4, None, None, None): i for i, op in enumerate(time_fla.OPERATORS)}
    return sorted(rows, key=lambda row: places.get(tuple(row.get(key) for key in KEY), len(places)))


def render(results):
    us = lambda timed: f"{timed['median_us']:.1f}"
    v, machine = results["versions"], results["machine"]
    lines = ["### Function against function", "",
             "The operators' functions as users import them, in one process, in turn. "
             f"{machine['gpu']}, driver {machine['driver']}, {results['date']}, commit {results['commit']}. Command: "
             f"`{results['command']}`. torch {v['torch']}, Triton {v['triton']}, fla-core {v['fla-core']}. BF16, "
             "K = V = 128. Both sides through PyTorch's autograd, replayed from CUDA graphs in turn; medians. Largest "
             "difference: of the two sides' outputs and gradients, in the L2 norm.", ""]
    unchecked = any("unchecked" in row for row in results["rows"])
    notes = (["*: FLA refuses to compute this with this Triton; its time alone."] if unchecked else [])
    notes += results["notes"] + of_other_commits(results, results["rows"] + results["host"], lambda row: NAMES[row["op"]])
    lines += [*notes, ""] if notes else []
    means = [[NAMES[op], one, *(f"{found[direction]:.2f}x" for direction in DIRECTIONS)]
             for op, forms in results["summary"].items() for one, found in forms.items()]
    lines += ["#### Speed-up over FLA, geometric means of six shapes", "",
              *table(["operator", "form", *DIRECTIONS], means), ""]
    if results["host"]:
        shown = []
        for row in results["host"]:
            if "refused" in row:
                shown.append([NAMES[row["op"]], row["refused"]] + ["-"] * 4)
                continue
            for where, words in THREADS.items():
                us_of = {name: f"{row[where][name + '_us']:.0f}" for name in ("fla", "rewy", "empty")}
                shown.append([NAMES[row["op"]], words, us_of["fla"], us_of["rewy"], f"{row[where]['ratio']:.1f}x",
                              us_of["empty"]])
        lines += ["#### The host's time of one eager forward and backward, (B, T, H) = (1, 64, 4), K = V = 128", "",
                  "The least of the mean values over 20 calls, in turn. *Empty*: an autograd function that does "
                  "nothing, on as many tensors. On a GPU PyTorch runs a backward in a thread of its own, which the "
                  "caller waits for; under `torch.autograd.set_multithreading_enabled(False)` in the caller's.", "",
                  *table(["operator", "backward in", "FLA us", "rewy us", "", "empty us"], shown), ""]
    for op in time_fla.OPERATORS:
        rows = [row for row in results["rows"] if row["op"] == op]
        if not rows:
            continue
        shown = []
        for row in rows:
            shape = shape_text((row["B"], row["T"], row["H"])) + ("" if row["H"] == row["HV"] else f" of {row['HV']}")
            if "refused" in row:
                shown.append([shape, form(row), row["refused"]] + ["-"] * 6)
                continue
            cells = [cell for d in DIRECTIONS
                     for cell in (us(row[d]["fla"]), us(row[d]["rewy"]), f"{row[d]['ratio']:.2f}x")]
            worst = max(row["differences"], key=row["differences"].get)
            shown.append([shape, form(row) + ("*" if row.get("unchecked") else ""), *cells,
                          f"{worst} {row['differences'][worst]:.1e}"])
        lines += [f"#### {NAMES[op]}", "", *table(["(B, T, H)", "form", "forward us: FLA", "rewy", "",
                                                  "backward us: FLA", "rewy", "", "largest difference"], shown), ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ops", default=",".join(time_fla.OPERATORS), help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="observations a side")
    parser.add_argument("--seconds", type=float, default=150,
                        help="start no shape after this long")
    parser.add_argument("--no-large", action="store_true", help="only the six shapes of the comparison")
    parser.add_argument("--fla-times-only", action="store_true",
                        help="time what FLA refuses to compute with this Triton")
    parser.add_argument("--quick", action="store_true", help="five observations, to try the script")
    parser.add_argument("--out", help="instead of results/compare_fla_<gpu>.json")
    parser.add_argument("--commit", help="what was built, where this is no git checkout")
    parser.add_argument("--render", metavar="JSON", help="measure nothing: the tables of this file")
    parser.add_argument("--write", help="document that takes the tables between its markers")
    a = parser.parse_args()
    results = json.loads(pathlib.Path(a.render).read_text()) if a.render else measure(a, parser)
    text = render(results)
    print("\n" + text)
    if a.write:
        render_cuda.write(text, {}, pathlib.Path(a.write), ROOT / "docs/figures", BEGIN, END)


def measure(a, parser):
    """The results."""
    import rewy
    import torch
    ops = a.ops.split(",")
    if not set(ops) <= set(time_fla.OPERATORS):
        parser.error(f"--ops: of {', '.join(time_fla.OPERATORS)}, separated by commas")
    repeats = 5 if a.quick else a.repeats
    if a.fla_times_only:
        time_fla.accept_triton()
    gpu = torch.cuda.get_device_name()
    target = pathlib.Path(a.out or ROOT / "results" / f"compare_fla_{file_name(gpu)}")
    new = {"rows": [], "host": []}
    results = {"date": datetime.date.today().isoformat(), "commit": a.commit or commit_of_tree(),
               "command": command_line("bench/compare_fla.py", ("--ops", "--repeats", "--seconds"),
                                       ("--no-large", "--fla-times-only", "--quick")),
               "machine": {"gpu": gpu, "driver": driver()},
               "versions": time_fla.versions() | {"rewy": rewy.__version__},
               "notes": [], "summary": {}, "host": [], "rows": []}
    old = earlier(target, results)

    def write():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(results, indent=1) + "\n")

    def save(kind, row):
        new[kind].append({**row, "commit": results["commit"]})
        for one in new:
            results[one] = in_order(renewed(old.get(one, []), new[one], KEY))
        results["summary"] = summarise(results["rows"])
        write()

    for op in ops:
        save("host", host_row(op, 3 if a.quick else 50))
    start = time.monotonic()
    work = [one for one in time_fla.plan(not a.no_large) if one[0] in ops]
    for i, one in enumerate(work):
        if time.monotonic() - start > a.seconds:
            results["notes"].append(f"stopped after {a.seconds:.0f} s, {len(work) - i} of {len(work)} left")
            write()
            break
        row = compare(*one, repeats, a.fla_times_only)
        gc.collect()
        torch.cuda.empty_cache()
        save("rows", row)
        medians = lambda timed: " / ".join(f"{timed[name]['median_us']:.1f}" for name in SIDES)
        shown = row.get("refused") or ", ".join(f"{d} {medians(row[d])} us" for d in DIRECTIONS)
        shape = shape_text((row["B"], row["T"], row["H"]))
        print(f"[{time.monotonic() - start:5.0f} s] {row['op']} {shape} {form(row)}, FLA / rewy: {shown}", flush=True)
    print("wrote", target)
    return results


if __name__ == "__main__":
    sys.exit(main())
