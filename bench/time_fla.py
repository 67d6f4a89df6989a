#!/usr/bin/env python3
"""Times the chunked operators of Flash Linear Attention (fla-core) on an NVIDIA GPU; bench/run_cuda.py runs it.

    PYTHONPATH=<where fla-core, torch, triton and einops are> bench/time_fla.py --json fla.json

What is timed is what a user of FLA calls: chunk_delta_rule, chunk_gated_delta_rule, chunk_kda and chunk_gdn2, the
forward without gradients and the backward through torch.autograd.grad. Measured as `rewy bench --device cuda` measures:
CUDA graphs of two calls, warm replays, events around each of 60 replays, medians. Inputs are of the same kind too: q
and k normalised, gates log sigmoid(x) / 16, strengths in [0.1, 0.9] in BF16, initial state and final state's gradient
given.

For chunk_kda and chunk_gdn2 four forms: policy recompute and save (disable_recompute=True), each without and with
safe_gate=True, FLA's faster path for gates in [-5, 0).

FLA tunes each kernel at first use, ten minutes and more for all of these. With FLA_CACHE_MODE=full and FLA_CONFIG_DIR
at a folder of choices made before nothing is tuned; both are taken from the environment.

Where an operator raises, its row says "refused" and why. FLA refuses the backward of chunk_gated_delta_rule on Hopper
with Triton 3.4.0 to 3.7.0, whose code gives wrong dk, dg and dbeta there. --times-only takes that check out, in this
process and for the time it runs: the kernels launched, their memory and their products are those of a working version,
so the times are usable. The gradients are wrong and are not looked at. Such rows say "unchecked".
"""

import argparse
import gc
import importlib.metadata
import json
import pathlib
import statistics
import sys
import time

SHAPES = ((1, 2048, 4), (1, 8192, 4), (1, 2048, 16), (4, 2048, 16), (1, 8192, 16), (2, 8192, 16))  # B, T, heads
LARGE = ((1, 8192, 32), (1, 32768, 32))
OPERATORS = ("deltanet", "gdn", "kda", "gdn2")
CALLS, WARMUPS = 2, 5


def plan(large):
    """(operator, B, T, query heads, value heads, policy, safe gate), the shapes of the comparison first."""
    def forms(op):
        vector = op in ("kda", "gdn2")
        return [(policy, safe) for safe in ((False, True) if vector else (False,))
                for policy in (("recompute", "save") if vector else ("recompute",))]
    rows = [(op, B, T, H, H, policy, safe) for op in OPERATORS for policy, safe in forms(op) for B, T, H in SHAPES]
    if large:
        rows += [(op, B, T, H, H, "recompute", False) for op in OPERATORS for B, T, H in LARGE]
        rows.append(("gdn", 1, 8192, 16, 32, "recompute", False))
    return rows


def operator(op):
    if op == "deltanet":
        from fla.ops.delta_rule import chunk_delta_rule
        return chunk_delta_rule
    if op == "gdn":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        return chunk_gated_delta_rule
    if op == "kda":
        from fla.ops.kda import chunk_kda
        return chunk_kda
    from fla.ops.gdn2 import chunk_gdn2
    return chunk_gdn2


def accept_triton():
    """Takes the check of Triton's version out of FLA's chunk_bwd_dqkwg, in this process."""
    from fla.ops.common import chunk_o
    if hasattr(chunk_o, "TRITON_ABOVE_3_7_1"):
        chunk_o.TRITON_ABOVE_3_7_1 = True
    elif hasattr(chunk_o, "TRITON_ABOVE_3_4_0"):  # before 3.7.1 was known to be right
        chunk_o.TRITON_ABOVE_3_4_0 = False


class Call:
    """One operator with its inputs, on a stream of its own; FLA's, or a function with FLA's arguments."""

    def __init__(self, op, B, T, H, HV, policy, safe, K=128, V=128, function=None):
        import torch
        self.torch = torch
        make = torch.Generator(device="cuda").manual_seed(1)
        gauss = lambda *shape: torch.randn(*shape, device="cuda", generator=make)
        unit = lambda *shape: torch.nn.functional.normalize(gauss(*shape), dim=-1).to(torch.bfloat16)
        gate = lambda *shape: torch.nn.functional.logsigmoid(gauss(*shape)) / 16
        strength = lambda *shape: (0.1 + 0.8 * torch.rand(*shape, device="cuda", generator=make)).to(torch.bfloat16)
        self.inputs = {"q": unit(B, T, H, K), "k": unit(B, T, H, K), "v": gauss(B, T, HV, V).to(torch.bfloat16)}
        if op == "gdn":
            self.inputs["g"] = gate(B, T, HV)
        if op in ("kda", "gdn2"):
            self.inputs["g"] = gate(B, T, HV, K)
        if op == "gdn2":
            self.inputs |= {"b": strength(B, T, HV, K), "w": strength(B, T, HV, V)}
        else:
            self.inputs["beta"] = strength(B, T, HV)
        self.inputs["initial_state"] = 0.1 * gauss(B, HV, K, V)
        for tensor in self.inputs.values():
            tensor.requires_grad_(True)
        self.gradients = (gauss(B, T, HV, V).to(torch.bfloat16), 0.1 * gauss(B, HV, K, V))
        self.options = {"output_final_state": True}
        if policy == "save":
            self.options["disable_recompute"] = True
        if safe:
            self.options["safe_gate"] = True
        self.function = function or operator(op)
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.outputs = None

    def forward(self):
        with self.torch.no_grad():
            return self.function(**self.inputs, **self.options)

    def backward(self):
        return self.torch.autograd.grad(self.outputs, tuple(self.inputs.values()), self.gradients, retain_graph=True)

    def keep_graph(self):
        """The forward whose graph the backwards use. Autograd runs them on its stream."""
        with self.torch.cuda.stream(self.stream):
            self.outputs = self.function(**self.inputs, **self.options)
        self.torch.cuda.synchronize()

    def peak_bytes(self):
        """What a backward adds to the memory that inputs and the forward's graph take."""
        cuda = self.torch.cuda
        with cuda.stream(self.stream):
            self.backward()  # compiles, and is tuned
            cuda.synchronize()
            before = cuda.memory_allocated()
            cuda.reset_peak_memory_stats()
            self.backward()
            cuda.synchronize()
        return cuda.max_memory_allocated() - before

    def seconds(self, call, observations):
        replay = captured(call, self.stream)
        return [replay() for _ in range(observations)]


def captured(call, stream):
    """A CUDA graph of CALLS calls, replayed until warm, as a function: one more replay, in seconds a call."""
    from torch import cuda
    with cuda.stream(stream):
        for _ in range(3):
            call()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    for _ in range(WARMUPS):
        graph.replay()
    cuda.synchronize()

    def replay():
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / CALLS

    return replay


def timed(times):
    return {"median_us": statistics.median(times) * 1e6, "min_us": min(times) * 1e6, "max_us": max(times) * 1e6,
            "observations": len(times)}


def one_line(error):
    return " ".join(str(error).split())[:300] or type(error).__name__


def measure(op, B, T, H, HV, policy, safe, observations, unchecked):
    """Two rows: forward and backward."""
    about = {"op": op, "B": B, "T": T, "H": H, "HV": HV, "K": 128, "V": 128, "policy": policy, "safe_gate": safe}
    rows = []

    def add(direction, work):
        row = {**about, "direction": direction}
        try:
            row |= work()
        except Exception as error:  # FLA's and Triton's are of many kinds
            row["refused"] = one_line(error)
        if unchecked and op == "gdn" and direction == "bwd" and "refused" not in row:
            row["unchecked"] = True
        rows.append(row)

    try:
        call = Call(op, B, T, H, HV, policy, safe)
    except Exception as error:
        return [{**about, "direction": d, "refused": one_line(error)} for d in ("fwd", "bwd")]

    def backward():
        call.keep_graph()
        peak = call.peak_bytes()
        return {**timed(call.seconds(call.backward, observations)), "peak_mib": peak / 2**20}

    add("bwd", backward)
    add("fwd", lambda: timed(call.seconds(call.forward, observations)))
    return rows[::-1]


def versions():
    import torch
    out = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "torch_cuda": torch.version.cuda}
    for package in ("triton", "fla-core", "flash-linear-attention"):
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    import triton
    import fla
    out.setdefault("triton", triton.__version__)
    out.setdefault("fla-core", getattr(fla, "__version__", "unknown"))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", required=True, help="written anew after each shape")
    parser.add_argument("--observations", type=int, default=60)
    parser.add_argument("--no-large", action="store_true", help="only the six shapes of the comparison")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="starts nothing after this long")
    parser.add_argument("--times-only", action="store_true", help="time what FLA refuses to compute with this Triton")
    a = parser.parse_args()
    start = time.monotonic()
    out = {"versions": versions(), "unchecked": a.times_only, "rows": []}
    if a.times_only:
        accept_triton()
    import torch
    work = plan(not a.no_large)
    for i, (op, B, T, H, HV, policy, safe) in enumerate(work):
        if time.monotonic() - start > a.seconds:
            out["stopped"] = f"after {a.seconds:.0f} s, {len(work) - i} of {len(work)} left"
            print(out["stopped"], flush=True)
            break
        rows = measure(op, B, T, H, HV, policy, safe, a.observations, a.times_only)
        gc.collect()
        torch.cuda.empty_cache()
        out["rows"] += rows
        shown = [r.get("refused") or f"{r['direction']} {r['median_us']:.1f} us" for r in rows]
        print(f"[{time.monotonic() - start:5.0f} s] fla {op} ({B}, {T}, {H}{'' if H == HV else f' of {HV}'}) {policy}"
              f"{' safe_gate' if safe else ''}: {', '.join(shown)}", flush=True)
        pathlib.Path(a.json).write_text(json.dumps(out, indent=1) + "\n")
    pathlib.Path(a.json).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
