"""The token recurrence in plain PyTorch and FP64, which autograd differentiates, and inputs to run it on.

It shares nothing with the package: what it says is docs/math.md, section 1.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

import rewy

FUNCTIONS = {
    "deltanet": rewy.chunk_delta_rule,
    "gdn": rewy.chunk_gated_delta_rule,
    "kda": rewy.chunk_kda,
    "gdn2": rewy.chunk_gdn2,
}
RECURRENT = {
    "deltanet": rewy.fused_recurrent_delta_rule,
    "gdn": rewy.fused_recurrent_gated_delta_rule,
    "kda": rewy.fused_recurrent_kda,
    "gdn2": rewy.fused_recurrent_gdn2,
}
OPS = tuple(FUNCTIONS)
NAMES = {
    "deltanet": ("q", "k", "v", "beta"),
    "gdn": ("q", "k", "v", "g", "beta"),
    "kda": ("q", "k", "v", "g", "beta"),
    "gdn2": ("q", "k", "v", "g", "b", "w"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem; `offsets` packs the T tokens into sequences."""

    B: int = 1
    T: int = 64
    H: int = 2
    HV: int = 2
    K: int = 32
    V: int = 24
    offsets: tuple[int, ...] | None = None

    @property
    def sequences(self) -> int:
        return self.B if self.offsets is None else len(self.offsets) - 1

    def __str__(self) -> str:
        packed = "" if self.offsets is None else "-packed" + ".".join(map(str, self.offsets))
        return f"B{self.B}T{self.T}H{self.H}.{self.HV}K{self.K}V{self.V}{packed}"


def tensors(
    op: str, case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """The tensor arguments of `op` in order, values exact in `dtype`; the gate in FP32, FP64 where dtype is FP64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    tokens = (case.B, case.T)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made = {
        "q": F.normalize(normal(*tokens, case.H, case.K), dim=-1),
        "k": F.normalize(normal(*tokens, case.H, case.K), dim=-1),
        "v": normal(*tokens, case.HV, case.V),
        "g": F.logsigmoid(normal(*tokens, case.HV, *(() if op == "gdn" else (case.K,))) + 1) / 4,
        "beta": uniform(*tokens, case.HV),
        "b": uniform(*tokens, case.HV, case.K),
        "w": uniform(*tokens, case.HV, case.V),
    }
    return [made[name].to(device, wide if name == "g" else dtype) for name in NAMES[op]]


def offsets(case: Case, device: str = "cpu", dtype: torch.dtype = torch.int64) -> Tensor | None:
    return None if case.offsets is None else torch.tensor(case.offsets, device=device, dtype=dtype)


def recurrence(
    op: str, case: Case, inputs: list[Tensor], initial_state: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(o, final_state [N, HV, K, V]) of FP64 tensors, token by token."""
    named = dict(zip(NAMES[op], inputs, strict=True))
    group = case.HV // case.H
    q, k = (named[name].repeat_interleave(group, dim=2) for name in ("q", "k"))
    q = q * (case.K**-0.5 if scale is None else scale)
    v = named["v"]
    if op == "gdn2":
        b, w = named["b"], named["w"]
    else:
        b = w = named["beta"].unsqueeze(-1)
    g = named.get("g", torch.zeros_like(v[..., 0]))
    g = g if g.dim() == 4 else g.unsqueeze(-1)

    outputs: list[list[Tensor]] = [[] for _ in range(case.B)]
    states = []
    for n in range(case.sequences):
        row, first, last = (n, 0, case.T) if case.offsets is None else (0, *case.offsets[n : n + 2])
        state = v.new_zeros(case.HV, case.K, case.V) if initial_state is None else initial_state[n]
        for i in range(first, last):
            state = g[row, i].exp().unsqueeze(-1) * state
            read = torch.einsum("hkv,hk->hv", state, b[row, i] * k[row, i])
            state = state + torch.einsum("hk,hv->hkv", k[row, i], w[row, i] * v[row, i] - read)
            outputs[row].append(torch.einsum("hkv,hk->hv", state, q[row, i]))
        states.append(state)
    for row in outputs:  # rows after the last offset
        row.extend([v.new_zeros(case.HV, case.V)] * (case.T - len(row)))
    o = torch.stack([torch.stack(row) if row else v.new_zeros(0, case.HV, case.V) for row in outputs])
    final = torch.stack(states) if states else v.new_zeros(0, case.HV, case.K, case.V)
    return o, final


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in inputs]


def in_fp64(inputs: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().cpu().requires_grad_() for t in inputs]


def assert_close(actual: Tensor, expected: Tensor, relative: float, what: str) -> None:
    """Relative L2 error at most `relative`; where the expected value is almost nothing, 1e-6 absolute."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    difference = (actual.detach().double().cpu() - expected.detach()).norm().item()
    size = expected.detach().norm().item()
    assert difference <= max(relative * size, 1e-6), f"{what}: relative error {difference / max(size, 1e-300):.2e}"


def assert_same_bits(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (e is None), f"tensor {i}"
        assert a is None or (a.dtype == e.dtype and torch.equal(a, e)), f"tensor {i} differs"
