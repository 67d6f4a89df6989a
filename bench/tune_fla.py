#!/usr/bin/env python3
"""Tunes FLA's Triton kernels for bench/models.py and bench/compare_fla.py before anything is timed, on an NVIDIA GPU.

    PYTHONPATH=<fla-core and flash-linear-attention> bench/tune_fla.py --choices FOLDER [--for models] [--processes 16]

Left alone FLA compiles and times every configuration of every kernel at its first call, one after the other. Here many
processes first compile a share of the configurations each and time nothing; then this process, alone on the GPU, times
them all, as Triton does, and finds them compiled, as a benchmark that follows finds what was chosen. Choices are kept
twice: by Triton beside the compiled kernels (TRITON_CACHE_DIR; a later process on this machine tunes nothing), and in
FOLDER, for other machines, where FLA_CACHE_MODE=strict FLA_CONFIG_DIR=FOLDER takes each choice for exactly the
arguments that it was made for. The few kernels that FLA tunes without its configuration files are in the former only.

Both variables are honoured here as well: what they serve is not tuned again.
"""

import argparse
import functools
import gc
import json
import os
import pathlib
import subprocess
import sys
import time

import host_time
import models
import time_fla


def model_calls(names, lengths):
    """One step of each model, two layers deep, at each length: kernels depend on widths and lengths, not on depth."""
    def step(name, length):
        trial = models.Trial(name, layers=2)
        trial.draw(length)
        with trial.torch.cuda.stream(trial.stream):
            trial.step()
    return [(f"model {name}, T = {length}", functools.partial(step, name, length))
            for length in lengths for name in names]


def operator_calls(large):
    """Each form of each operator for each batch and number of heads that bench/compare_fla.py times, and what it calls
    for the host's time."""
    def timed(*about):
        call = time_fla.Call(*about)
        call.keep_graph()
        call.backward()
        call.forward()

    def eager(op):
        import torch
        inputs = [t.requires_grad_() for t in host_time.tensors(op, 64, 4, 128, "cuda").values() if t is not None]
        o = time_fla.operator(op)(*inputs)[0]
        torch.autograd.grad(o, inputs, torch.ones_like(o))

    forms = {(op, B, H, HV, policy, safe): (op, B, T, H, HV, policy, safe)
             for op, B, T, H, HV, policy, safe in reversed(time_fla.plan(large))}
    out = [(" ".join(map(str, about)), functools.partial(timed, *about)) for about in forms.values()]
    return out + [(f"{op}, host", functools.partial(eager, op)) for op in time_fla.OPERATORS]


def calls(a):
    """[(title, function)]; where many processes compile, each begins with another one."""
    out = model_calls(a.models, a.lengths) if a.what in ("models", "all") else []
    out += operator_calls(not a.no_large) if a.what in ("operators", "all") else []
    first = (a.share or 0) * len(out) // max(a.processes, 1)
    return out[first:] + out[:first]


def tuners():
    from triton.runtime.autotuner import Autotuner
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), Autotuner)]


def compile_share(share, shares):
    """Makes Triton run each configuration of this process's share once, and believe that all are equally fast."""
    import torch
    from triton.runtime.autotuner import Autotuner
    pruned = Autotuner.prune_configs

    def some(self, kwargs):
        configs = pruned(self, kwargs)
        return configs[share::shares] or configs[:1]

    def once(kernel_call, quantiles):
        kernel_call()
        torch.cuda.synchronize()
        return [0.0] * len(quantiles)

    Autotuner.prune_configs = some
    Autotuner.do_bench = property(lambda self: once)


def run_calls(a, start, quiet):
    import torch
    for title, call in calls(a):
        before = time.monotonic()
        try:
            call()
            torch.cuda.synchronize()
            said = f"{time.monotonic() - before:.1f} s"
        except Exception as error:  # FLA's and Triton's are of many kinds; what can be tuned is
            said = time_fla.one_line(error)
        if not quiet:
            print(f"[{time.monotonic() - start:5.0f} s] {title}: {said}", flush=True)
        torch.cuda.empty_cache()


def keep(folder):
    """The choices of all kernels that read FLA's configuration files, one file a kernel; returns how many."""
    import triton
    from fla.ops.utils.cache import AutotuneKey, CachedAutotuner
    files = {}
    for tuner in tuners():
        if isinstance(tuner, CachedAutotuner):
            for key, config in tuner.cache.items():
                chosen = {"kwargs": config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages,
                          "num_ctas": config.num_ctas, "maxnreg": config.maxnreg, "ir_override": config.ir_override}
                files.setdefault(tuner.kernel_name, {})[AutotuneKey.key_hash(key)] = {"autotune_key": list(key),
                                                                                      "config": chosen}
    folder.mkdir(parents=True, exist_ok=True)
    for kernel, entries in files.items():
        path = folder / f"{kernel}.json"
        old = json.loads(path.read_text())["autotune_entries"] if path.exists() else {}
        path.write_text(json.dumps({"kernel_name": kernel, "triton_version": triton.__version__,
                                    "autotune_entries": old | entries}, indent=1) + "\n")
    return sum(map(len, files.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--choices", required=True, type=pathlib.Path, help="folder that takes the choices")
    parser.add_argument("--for", dest="what", choices=("models", "operators", "all"), default="models")
    parser.add_argument("--models", type=models.listed(models.OPERATORS), default=list(models.OPERATORS))
    parser.add_argument("--lengths", type=models.listed(None, int), default=list(models.LENGTHS))
    parser.add_argument("--no-large", action="store_true", help="operators: only the six shapes of the comparison")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile; 0: leave it to the tuning")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)  # which share this process compiles
    a = parser.parse_args()
    start = time.monotonic()
    if a.share is not None:
        compile_share(a.share, a.processes)
        run_calls(a, start, quiet=a.share > 0)
        return
    if a.processes:
        environment = os.environ | {"FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}  # choices of these are none
        command = [sys.executable, *sys.argv, "--processes", str(a.processes)]
        compilers = [subprocess.Popen([*command, "--share", str(share)], env=environment,
                                      stderr=subprocess.DEVNULL if share else None) for share in range(a.processes)]
        failed = sum(one.wait() != 0 for one in compilers)
        print(f"[{time.monotonic() - start:5.0f} s] compiled" + (f", {failed} processes failed" if failed else ""),
              flush=True)
    run_calls(a, start, quiet=False)
    print(f"[{time.monotonic() - start:5.0f} s] {keep(a.choices)} choices in {a.choices}")


if __name__ == "__main__":
    sys.exit(main())
