#!/usr/bin/env python3
"""Gated DeltaNet forward + backward on a CPU: this library against PyTorch autograd through transformers.

    python3 -m venv venv && venv/bin/pip install -r bench/requirements.txt
    venv/bin/python bench/compare_transformers.py --rewy build/rewy --json compare.json

The other side is `torch_chunk_gated_delta_rule` of transformers' Qwen3-Next, chunked PyTorch that runs when no GPU kernel
is installed: with FLA in the environment it would be FLA's. Its conventions, and how they meet this library's:

    query, key   [B, T, H, K]     q, k; use_qk_l2norm_in_kernel=False, so both sides get keys normalised beforehand
    value        [B, T, HV, V]    v
    g            [B, T, HV]       natural log of the decay, <= 0: the same
    beta         [B, T, HV]       in [0, 1]: the same
    scale        K ** -0.5, not an argument: the default here
    chunk_size   64: the same
    output       (o [B, T, HV, V], final state or None); no state goes in and none is asked for

Both get Gaussian q, k, v and do, gates log(sigmoid(x)) / 16 (gate=mild), beta in [0.1, 0.9], FP32, and the same number of
threads. One side runs at a time and they alternate, so that a slow phase of the machine meets both. One round is one
`rewy bench` process and a run of autograd calls in this process, both with a warm-up and as many observations. An
observation is one forward and one backward; medians are over all rounds.

Unless --no-check is given, `rewy grad` first computes one problem from a file, and every output and gradient is compared
with autograd's: a comparison of speed means nothing between different answers.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rewy", default="build/rewy", help="the tool (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="K and V (default: %(default)s)")
    parser.add_argument("--policy", default="recompute", choices=["recompute", "save"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="alternations (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="observations a round (default: %(default)s)")
    parser.add_argument("--no-check", action="store_true", help="do not compare the results first")
    parser.add_argument("--json", metavar="FILE", help="write all numbers to FILE")
    return parser.parse_args()


# torch's own thread pools read these once, at import.
ARGUMENTS = parse_arguments()
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(ARGUMENTS.threads)
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule  # noqa: E402

INPUTS = ("q", "k", "v", "g", "beta")
DIRECTIONS = ("fwd", "bwd", "both")  # as `rewy bench` names them


def make_inputs(batch, tokens, heads, width):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def unit(x):
        return torch.nn.functional.normalize(x, dim=-1)

    return {
        "q": unit(normal(batch, tokens, heads, width)),
        "k": unit(normal(batch, tokens, heads, width)),
        "v": normal(batch, tokens, heads, width),
        "g": torch.nn.functional.logsigmoid(normal(batch, tokens, heads)) / 16,
        "beta": 0.1 + 0.8 * torch.rand(batch, tokens, heads, generator=generator),
        "do": normal(batch, tokens, heads, width),
    }


def forward_autograd(inputs):
    output, _ = torch_chunk_gated_delta_rule(
        inputs["q"], inputs["k"], inputs["v"], g=inputs["g"], beta=inputs["beta"], chunk_size=64, initial_state=None,
        output_final_state=False, use_qk_l2norm_in_kernel=False)
    return output


def time_autograd(inputs, repeats):
    """Seconds of `repeats` forwards, backwards, and both, after a warm-up."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in INPUTS}
    seconds = {direction: [] for direction in DIRECTIONS}
    for i in range(-1, repeats):
        start = time.perf_counter()
        output = forward_autograd(leaves)
        between = time.perf_counter()
        torch.autograd.grad(output, list(leaves.values()), inputs["do"])
        end = time.perf_counter()
        if i < 0:
            continue
        seconds["fwd"].append(between - start)
        seconds["bwd"].append(end - between)
        seconds["both"].append(end - start)
    return seconds


def run_tool(arguments, *words):
    command = [arguments.rewy, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"compare_transformers: {' '.join(command)} failed:\n{done.stderr or done.stdout}")


def time_tool(arguments, problem):
    """The same, from one `rewy bench` process."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "bench.json"
        run_tool(arguments, "bench", problem, "--direction", "all", "--threads", str(arguments.threads), "--repeats",
                 str(arguments.repeats), "--json", str(report))
        rows = json.loads(report.read_text())["problems"]
    return {row["direction"]: row["observations_s"] for row in rows}


def check(arguments, inputs):
    """The relative L2 difference of every output and gradient between the two sides."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in INPUTS}
    output = forward_autograd(leaves)
    expected = dict(zip(("d" + name for name in INPUTS),
                        torch.autograd.grad(output, list(leaves.values()), inputs["do"])))
    expected["o"] = output.detach()
    with tempfile.TemporaryDirectory() as folder:
        source, result = pathlib.Path(folder) / "in.safetensors", pathlib.Path(folder) / "out.safetensors"
        save_file(inputs, source, metadata={"op": "gdn", "scale": repr(inputs["q"].shape[-1] ** -0.5)})
        run_tool(arguments, "grad", str(source), "--out", str(result))
        actual = load_file(result)
    return {name: float((actual[name].double() - value.double()).norm() / value.double().norm())
            for name, value in sorted(expected.items())}


def main():
    arguments = ARGUMENTS
    torch.set_num_threads(arguments.threads)
    problem = (f"op=gdn B={arguments.batch} T={arguments.tokens} H={arguments.heads} K={arguments.width} "
               f"V={arguments.width} dtype=f32 gate=mild policy={arguments.policy}")
    inputs = make_inputs(arguments.batch, arguments.tokens, arguments.heads, arguments.width)
    report = {
        "problem": problem,
        "threads": arguments.threads,
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
    }
    print(problem)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.threads} threads")

    if not arguments.no_check:
        differences = report["differences"] = check(arguments, inputs)
        print("relative differences: " + "  ".join(f"{name} {value:.1e}" for name, value in differences.items()))
        if not max(differences.values()) < 1e-3:
            sys.exit("compare_transformers: the two sides do not compute the same")

    time_autograd(inputs, 1)  # the first call takes seconds
    observations = {side: {direction: [] for direction in DIRECTIONS} for side in ("autograd", "rewy")}
    for _ in range(arguments.rounds):
        for side, seconds in (("rewy", time_tool(arguments, problem)),
                              ("autograd", time_autograd(inputs, arguments.repeats))):
            for direction in DIRECTIONS:
                observations[side][direction] += seconds[direction]

    medians = {side: {direction: statistics.median(values) for direction, values in times.items()}
               for side, times in observations.items()}
    ratios = {direction: medians["autograd"][direction] / medians["rewy"][direction] for direction in DIRECTIONS}
    report |= {"observations_s": observations, "median_s": medians, "ratio": ratios}

    print(f"{'median, ms':<22}" + "".join(f"{direction:>10}" for direction in DIRECTIONS))
    for side, label in (("autograd", "transformers autograd"), ("rewy", "rewy")):
        print(f"{label:<22}" + "".join(f"{1e3 * medians[side][direction]:>10.2f}" for direction in DIRECTIONS))
    print(f"{'ratio':<22}" + "".join(f"{ratios[direction]:>10.2f}" for direction in DIRECTIONS))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
