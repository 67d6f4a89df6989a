#!/usr/bin/env python3
"""Host time of one eager call of the Python package, forward and backward, and where it goes.

On a CPU a call of no tokens (T = 0) is all host time. On a GPU the host only launches: `--device cuda` gives the host
time of any length that keeps the queue of launches from filling.
"""

import argparse
import time

import torch
import torch.nn.functional as F

import rewy

FUNCTIONS = {
    "deltanet": rewy.chunk_delta_rule,
    "gdn": rewy.chunk_gated_delta_rule,
    "kda": rewy.chunk_kda,
    "gdn2": rewy.chunk_gdn2,
}
NAMES = ("q", "k", "v", "g", "beta", "b", "w")


def tensors(op, tokens, heads, width, device):
    """Those that the operator takes, by name; the others None."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (1, tokens, heads, width)
    made = {name: torch.rand(shape, device=device, dtype=dtype) for name in ("q", "k", "v")}
    made["k"] = F.normalize(made["k"], dim=-1)
    if op in ("gdn", "kda", "gdn2"):
        made["g"] = -torch.rand(shape[:3] if op == "gdn" else shape, device=device)
    for name in ("b", "w") if op == "gdn2" else ("beta",):
        made[name] = torch.rand(shape if op == "gdn2" else shape[:3], device=device, dtype=dtype)
    return {name: made.get(name) for name in NAMES}


def host_us(call, device, repeats):
    """Microseconds of the host a call: the least of `repeats` mean values over 20 calls."""
    calls = 20
    best = float("inf")
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


class Empty(torch.autograd.Function):
    """An autograd function that does nothing, on as many tensors."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return inputs[2].detach()

    @staticmethod
    def backward(ctx, gradient):
        return tuple(t.detach() for t in ctx.saved_tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch and the library, on a CPU")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("ops", nargs="*", default=list(FUNCTIONS), help="deltanet gdn kda gdn2")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"cpu, {options.threads} threads"
    print(f"torch {torch.__version__}, {where}, B=1 T={options.tokens} H={options.heads} K=V={options.width}")
    columns = ("forward and backward", "by registration", "operator forward", "backward", "empty function")
    print("us of the host".ljust(16) + "  ".join(columns))
    for op in options.ops:
        named = tensors(op, options.tokens, options.heads, options.width, options.device)
        inputs = [t.requires_grad_() for t in named.values() if t is not None]
        plain = [None if t is None else t.detach() for t in named.values()]
        variables = list(named.values())
        d_o = torch.ones_like(named["v"])
        needed = sum(1 << i for i, t in enumerate(plain) if t is not None)
        forward, backward = torch.ops.rewy.forward.default, torch.ops.rewy.backward.default
        kept = forward(op, *plain)[2:]

        def eager(op=op, inputs=inputs, d_o=d_o):
            torch.autograd.grad(FUNCTIONS[op](*inputs)[0], inputs, d_o)

        def registered(op=op, inputs=inputs, variables=variables, d_o=d_o):
            torch.autograd.grad(forward(op, *variables)[0], inputs, d_o)

        def alone(op=op, plain=plain):
            forward(op, *plain)

        def reverse(op=op, plain=plain, d_o=d_o, kept=kept, needed=needed):
            backward(op, d_o, None, *plain, None, None, None, None, *kept, needed)

        def empty(inputs=inputs, d_o=d_o):
            torch.autograd.grad(Empty.apply(*inputs), inputs, d_o)

        times = [host_us(call, options.device, options.repeats) for call in (eager, registered, alone, reverse, empty)]
        print(op.ljust(16) + "  ".join(f"{us:{len(c)}.0f}" for us, c in zip(times, columns)))


if __name__ == "__main__":
    main()
