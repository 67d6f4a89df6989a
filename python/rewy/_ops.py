"""What PyTorch must know of the operators in ``rewy._C`` besides their kernels: shapes of results and derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _C

CHUNK = 64
DTYPE_NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

forward = torch.ops.rewy.forward.default
backward = torch.ops.rewy.backward.default


def _saved_shape(
    op: str, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, policy: str, backend: str
) -> tuple[int | torch.SymInt, ...]:
    """[chunks, HV, bytes a chunk and head] as the forward allocates it; lengths may be symbols, widths are numbers."""
    if policy == "none":
        return (0,)
    batch, tokens = q.shape[0], q.shape[1]
    chunks: int | torch.SymInt
    if cu_seqlens is None:
        chunks = batch * ((tokens + CHUNK - 1) // CHUNK)
    else:
        chunks = tokens // CHUNK + torch.sym_min(cu_seqlens.shape[0] - 1, tokens)
    device = -1 if q.device.type != "cuda" else q.device.index or 0
    widths = int(q.shape[3]), int(v.shape[3])
    of_chunk = _C.saved_bytes_of_chunk(op, *widths, DTYPE_NAMES[q.dtype], policy, device, backend)
    return (chunks, v.shape[2], of_chunk)


@torch.library.register_fake("rewy::forward")
def _(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    b: Tensor | None,
    w: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    policy: str = "recompute",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    heads, width = v.shape[2], v.shape[3]
    o = q.new_empty((q.shape[0], q.shape[1], heads, width))
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (width, q.shape[3]) if state_v_first else (q.shape[3], width)
    state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    final_state = q.new_empty((sequences, heads, *state) if output_final_state else (0,), dtype=state_dtype)
    saved = q.new_empty(_saved_shape(op, q, v, cu_seqlens, policy, backend), dtype=torch.uint8)
    return o, final_state, saved


@torch.library.register_fake("rewy::backward")
def _(
    op: str,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    b: Tensor | None,
    w: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    scale: float | None,
    state_v_first: bool,
    policy: str,
    needed: int,
    backend: str = "auto",
) -> list[Tensor]:
    inputs = (q, k, v, g, beta, b, w, initial_state)
    return [t.new_empty(t.shape) for bit, t in enumerate(inputs) if needed >> bit & 1 and t is not None]


# Positions in the schema of forward.
_Q, _CU_SEQLENS, _SCALE, _OUTPUT_FINAL_STATE, _STATE_V_FIRST, _POLICY, _BACKEND = 1, 9, 10, 11, 12, 13, 14
_INPUTS = slice(_Q, _CU_SEQLENS)  # q, k, v, g, beta, b, w, initial_state: those that can have a gradient


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[_Q : _CU_SEQLENS + 1], output[2])
    ctx.has_final_state = inputs[_OUTPUT_FINAL_STATE]
    ctx.options = (inputs[0], inputs[_SCALE], inputs[_STATE_V_FIRST], inputs[_POLICY], inputs[_BACKEND])


def _gradients(
    ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None, _d_saved: None = None
) -> tuple[Tensor | None, ...]:
    *inputs, saved = ctx.saved_tensors
    op, scale, state_v_first, policy, backend = ctx.options
    wanted = ctx.needs_input_grad[_INPUTS]
    gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if not ctx.has_final_state:
        d_final_state = None  # of the empty tensor in its place; tracing may invent one
    if d_o is not None or d_final_state is not None:
        needed = sum(1 << bit for bit, want in enumerate(wanted) if want)
        given = iter(backward(op, d_o, d_final_state, *inputs, saved, scale, state_v_first, policy, needed, backend))
        gradients[_INPUTS] = [next(given) if want else None for want in wanted]
    return tuple(gradients)


class Differentiable(torch.autograd.Function):
    """(o, final_state) of the operator ``forward``, by its schema's arguments.

    What an eager call runs. The registration below says the same of the operator itself, for whoever traces a program
    or calls it directly; it costs more host time (bench/host_time.py prints both).
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = forward(*inputs)
        _keep(ctx, inputs, output)
        return output[0], output[1]

    backward = staticmethod(_gradients)


torch.library.register_autograd("rewy::forward", _gradients, setup_context=_keep)


def _refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "rewy: the gradients have no gradients of their own: double backward (create_graph=True) is not supported"
    )


torch.library.register_autograd("rewy::backward", _refuse_second_derivative)
