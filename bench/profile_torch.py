#!/usr/bin/env python3
"""What the GPU runs in one eager forward and backward of the Python package, kernel by kernel.

    bench/profile_torch.py [--json results/profile_h200.json]              # on a GPU
    bench/profile_torch.py --render results/profile_h200.json --write docs/performance.md   # no GPU: the table

Shows that the package adds nothing to what the library launches: no copies, no fills, no conversions. PyTorch's profiler
gives names, counts and times; each operator runs with its tensors prepared by the caller, and once more from raw
projections, activations inside the call. Kernels run one after the other here as in any program; no graph is involved.
"""

import argparse
import collections
import datetime
import json
import pathlib

import render_cuda
from run_cuda import ROOT, command_line, commit_of_tree

LIBRARY = "rewy::"
BEGIN, END = "<!-- profile: written by bench/profile_torch.py -->", "<!-- profile: end -->"


def call(op, shape, raw):
    """One forward and backward, as a function without arguments."""
    import torch
    from host_time import FUNCTIONS, tensors
    named = {name: t for name, t in tensors(op, *shape, "cuda").items() if t is not None}
    options = {}
    if raw:
        options["use_qk_l2norm_in_kernel"] = True
        heads, width = shape[1:]
        if "g" in named:
            named["g"] = named["g"].bfloat16()
            options |= {"use_gate_in_kernel": True}
            parameters = {"A_log": heads, "dt_bias": heads * (1 if op == "gdn" else width)}
            options |= {name: torch.zeros(n, device="cuda", requires_grad=True) for name, n in parameters.items()}
        if "beta" in named:
            options["use_beta_sigmoid_in_kernel"] = True
    inputs = [t.requires_grad_() for t in named.values()]
    variables = inputs + [t for t in options.values() if isinstance(t, torch.Tensor)]
    d_o = torch.ones_like(named["v"])
    return lambda: torch.autograd.grad(FUNCTIONS[op](*inputs, **options)[0], variables, d_o)


def short(name):
    """void rewy::cuda::(anonymous namespace)::scan<...>(...) -> scan"""
    if LIBRARY not in name:
        return name
    plain, depth = "", 0
    for letter in name.replace("(anonymous namespace)", ""):
        depth += letter == "<"
        if depth == 0 and letter != "(":
            plain += letter
        elif depth == 0:
            break
        depth -= letter == ">"
    return plain.split("::")[-1]


def profile(op, shape, raw, calls):
    """[{kernel, launches a call, us a call, ours}] in the order in which a call launches them first."""
    import torch
    run = call(op, shape, raw)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    launches, us = collections.Counter(), collections.Counter()
    for e in sorted(events, key=lambda e: e.time_range.start):
        launches[e.name] += 1
        us[e.name] += e.device_time
    return [{"kernel": short(name), "launches": n / calls, "us": us[name] / calls, "ours": LIBRARY in name}
            for name, n in launches.items()]


def measure(options):
    import torch
    from host_time import FUNCTIONS
    rows = [{"op": op, "raw": raw, "kernels": profile(op, options.shape, raw, options.calls)}
            for op in FUNCTIONS for raw in (False, True)]
    return {"date": datetime.date.today().isoformat(), "commit": options.commit or commit_of_tree(),
            "command": command_line("bench/profile_torch.py", ("--shape", "--calls"), ()),
            "machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__},
            "shape": [1, *options.shape], "rows": rows}


def render(results):
    machine, (B, T, H, K) = results["machine"], results["shape"]
    rows = []
    for row in results["rows"]:
        ours = [k for k in row["kernels"] if k["ours"]]
        others = [f"{k['kernel']} {k['launches']:g} x" for k in row["kernels"] if not k["ours"]]
        rows.append([render_cuda.NAMES[row["op"]], "raw" if row["raw"] else "activated",
                     ", ".join(f"{k['kernel']} {k['launches']:g} x {k['us'] / k['launches']:.0f}" for k in ours),
                     f"{sum(k['us'] for k in ours):.0f}", ", ".join(others) or "none"])
    head = ["operator", "tensors", "kernels of a forward and a backward, launches x us, by their first launch", "us",
            "others"]
    return "\n".join([
        f"{machine['gpu']}, torch {machine['torch']}, {results['date']}, commit {results['commit']}. Command: "
        f"`{results['command']}`. (B, T, H) = ({B}, {T}, {H}), K = V = {K}, BF16, policy recompute.", "",
        *render_cuda.table(head, rows), ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, default=(8192, 16, 128), metavar=("T", "H", "K"))
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--commit", help="what was built, where this is no git checkout")
    parser.add_argument("--render", type=pathlib.Path, metavar="JSON", help="measure nothing: the table of this file")
    parser.add_argument("--write", type=pathlib.Path, help="document that takes the table between its markers")
    options = parser.parse_args()
    results = json.loads(options.render.read_text()) if options.render else measure(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    text = render(results)
    print(text)
    if options.write:
        render_cuda.write(text, {}, options.write, ROOT / "docs/figures", BEGIN, END)


if __name__ == "__main__":
    main()
