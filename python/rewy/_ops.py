"""What PyTorch must know of the operators in ``rewy._C`` besides their kernels: shapes of results and derivatives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _C

CHUNK = _C.chunk  # tokens
DTYPE_NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

forward = torch.ops.rewy.forward.default
backward = torch.ops.rewy.backward.default


def _dtype_name(op: str, argument: str, t: Tensor) -> str:
    if t.dtype not in DTYPE_NAMES:
        got = str(t.dtype).removeprefix("torch.")
        raise TypeError(f"{op} forward: argument '{argument}': expected dtype f64, f32, bf16 or f16, got {got}")
    return DTYPE_NAMES[t.dtype]


def _saved_bytes(op: str, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, options: str) -> int | torch.SymInt:
    """As many as the forward allocates; lengths may be symbols, widths are numbers."""
    batch, tokens = q.shape[0], q.shape[1]
    chunks: int | torch.SymInt
    if cu_seqlens is None:
        chunks = batch * ((tokens + CHUNK - 1) // CHUNK)
    else:
        chunks = tokens // CHUNK + torch.sym_min(cu_seqlens.shape[0] - 1, tokens)
    device = -1 if q.device.type != "cuda" else q.device.index or 0
    widths = int(q.shape[3]), int(v.shape[3])
    of_chunk = _C.saved_bytes_of_chunk(op, *widths, _dtype_name(op, "q", q), device, options)
    return chunks * v.shape[2] * of_chunk


def _activated_bytes(
    op: str, q: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, options: str
) -> int | torch.SymInt:
    """Of what activations made."""
    widths = int(q.shape[2]), int(v.shape[2]), int(q.shape[3])
    types = (_dtype_name(op, name, q if t is None else t) for name, t in (("q", q), ("g", g), ("beta", beta)))
    return q.shape[0] * q.shape[1] * _C.activated_bytes_of_token(op, *widths, *types, options)


def check_tensors(op: str, direction: str, named: dict[str, Any]) -> None:
    """The library's own refusals, where PyTorch asks for the shapes of results alone. A single tensor on "meta" brings
    a call here, whose result would be an empty one."""
    device = named["q"].device
    for name, t in named.items():
        if isinstance(t, Tensor) and t.device != device:
            name, expected, got = (name, device, t.device) if device.type != "meta" else ("q", t.device, device)
            raise ValueError(f"{op} {direction}: argument '{name}': expected a tensor on {expected}, got one on {got}")
    for name, axes, text in (("q", 4, "4 axes"), ("v", 4, "4 axes"), ("cu_seqlens", 1, "1 axis")):
        t = named[name]
        if t is not None and t.dim() != axes:
            raise ValueError(f"{op} {direction}: argument '{name}': expected {text}, got {t.dim()}")
    packed = named["cu_seqlens"]
    if packed is not None and isinstance(packed.shape[0], int) and packed.shape[0] == 0:  # a symbol may not be known
        raise ValueError(f"{op} {direction}: argument 'cu_seqlens': expected at least 1 entry, got 0")


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
    initial_state: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_tensors(op, "forward", locals())
    heads, width = v.shape[2], v.shape[3]
    o = q.new_empty((q.shape[0], q.shape[1], heads, width))
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    words = options.split()
    state = (width, q.shape[3]) if "state_v_first" in words else (q.shape[3], width)
    state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    final_state = q.new_empty((sequences, heads, *state) if "output_final_state" in words else (0,), dtype=state_dtype)
    keeps_saved, keeps_activated = _C.keeps(op, options)
    saved = _saved_bytes(op, q, v, cu_seqlens, options) if keeps_saved else 0
    activated = _activated_bytes(op, q, v, g, beta, options) if keeps_activated else 0
    return o, final_state, q.new_empty((saved,), dtype=torch.uint8), q.new_empty((activated,), dtype=torch.uint8)


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
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    activated: Tensor,
    needed: int,
    scale: float | None = None,
    lower_bound: float | None = None,
    options: str = "",
) -> list[Tensor]:
    check_tensors(op, "backward", locals())
    inputs = (q, k, v, g, beta, b, w, initial_state, A_log, dt_bias)
    return [t.new_empty(t.shape) for bit, t in enumerate(inputs) if needed >> bit & 1 and t is not None]


@torch.library.register_vmap("rewy::backward")
def _(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[list[Tensor], list[int]]:
    """Call by call, as PyTorch by itself runs the forward: torch.func.vmap over torch.autograd.grad."""
    if info.batch_size == 0:
        raise ValueError(f"{arguments[0]} backward: expected at least one loss under vmap, got 0")
    calls = (
        [a if dim is None else a.select(dim, i) for a, dim in zip(arguments, in_dims, strict=True)]
        for i in range(info.batch_size)
    )
    gradients = [torch.stack(of_calls) for of_calls in zip(*(backward(*call) for call in calls), strict=True)]
    return gradients, [0] * len(gradients)


NAMES = tuple(argument.name for argument in forward._schema.arguments)
# Positions in the schema of forward.
_Q, _CU_SEQLENS, _SCALE, OPTIONS = 1, 11, 12, 14
_INPUTS = slice(_Q, _CU_SEQLENS)  # q to dt_bias: those that can have a gradient

_is_batched = torch._C._functorch.is_legacy_batchedtensor
_OUT_OF_MEMORY = re.compile("out of memory|rewy: PyTorch has no memory on cuda")


def out_of_memory(error: Exception) -> torch.OutOfMemoryError | None:
    """PyTorch's own kind of error, which its stable interface does not let through."""
    return torch.OutOfMemoryError(str(error)) if _OUT_OF_MEMORY.search(str(error)) else None


def refuse_tangents(tensors: Iterable[Any]) -> None:
    """Forward-mode derivatives. PyTorch would leave them out without a word where no tensor requires a gradient."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("rewy: forward-mode derivatives (torch.func.jvp, forward_ad) are not supported")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[_Q : _CU_SEQLENS + 1], *output[2:])
    ctx.operator = inputs[0]
    ctx.options = inputs[_SCALE:]


def _gradients_of(
    run: Callable[..., list[Tensor]],
    ctx: Any,
    bits: Sequence[int],
    wanted: Sequence[bool],
    d_o: Tensor | None,
    d_final_state: Tensor | None,
) -> list[Tensor | None]:
    """Those of the inputs at `bits`, of q to dt_bias; None where not wanted. `run` is the operator ``backward``."""
    if "output_final_state" not in ctx.options[-1]:
        d_final_state = None  # of the empty tensor in its place; tracing may invent one
    if d_o is None and d_final_state is None:
        return [None] * len(wanted)
    if not torch.compiler.is_compiling():  # which does not trace the question
        if (d_o is not None and _is_batched(d_o)) or (d_final_state is not None and _is_batched(d_final_state)):
            raise NotImplementedError(
                "rewy: is_grads_batched=True is not supported, torch.func.vmap over torch.autograd.grad is"
            )
        refuse_tangents((d_o, d_final_state))
    needed = 0
    for bit, want in zip(bits, wanted, strict=False):  # arguments left out have no `wanted`
        if want:
            needed |= 1 << bit
    saved = ctx.saved_tensors
    try:
        gradients = run(ctx.operator, d_o, d_final_state, *saved, needed, *ctx.options)
    except RuntimeError as error:
        raise out_of_memory(error) or error from None
    given = iter(gradients)
    return [next(given) if want else None for want in wanted]


def _gradients(ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None, *_d_kept: None) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad
    gradients: list[Tensor | None] = [None] * len(wanted)
    gradients[_INPUTS] = _gradients_of(backward, ctx, range(_CU_SEQLENS - _Q), wanted[_INPUTS], d_o, d_final_state)
    return tuple(gradients)


torch.library.register_autograd("rewy::forward", _gradients, setup_context=_keep)


def _below_autograd(*arguments: Any) -> list[Tensor]:
    """The operator ``backward`` alone: what is unpacked of the saved tensors before, a checkpointed block that runs
    again, has autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return backward(*arguments)


class Differentiable(torch.autograd.Function):
    """(o, final_state) of `call`, the arguments of the operator ``forward``. Those of its tensors q to dt_bias that are
    given, at `bits`, follow once more for PyTorch, which looks at every argument: so they are few."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], bits: tuple[int, ...], *_given: Tensor) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            output = forward(*call)
        _keep(ctx, call, output)
        ctx.bits = bits
        return output[0], output[1]

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None) -> tuple[Tensor | None, ...]:
        # With gradients of gradients it is recorded, to be refused where they are used. While the backward alone is
        # being compiled, nothing may switch autograd off.
        run = backward if torch.is_grad_enabled() or torch.compiler.is_compiling() else _below_autograd
        return None, None, *_gradients_of(run, ctx, ctx.bits, ctx.needs_input_grad[2:], d_o, d_final_state)


def eager(call: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """(o, final_state) of the operator ``forward`` outside a compiled program.

    The registration above says the same of the operator itself, for whoever traces a program or calls it directly. It
    costs more host time (bench/host_time.py prints both), and so does PyTorch's look for it without gradients.
    """
    if torch.jit.is_tracing():  # what is not handed over as an argument would become a constant
        return forward(*call)[:2]
    if torch._C._are_functorch_transforms_active():
        levels = torch._C._functorch.get_interpreter_stack() or ()
        if any(level.key() == torch._C._functorch.TransformType.Grad for level in levels):
            raise NotImplementedError("rewy: torch.func.grad and vjp are not supported, torch.autograd.grad is")
        return forward(*call)[:2]
    if "policy=none" not in call[OPTIONS]:
        inputs = call[_INPUTS]
        bits = tuple(bit for bit, t in enumerate(inputs) if t is not None)
        return Differentiable.apply(call, bits, *[inputs[bit] for bit in bits])
    if torch.is_grad_enabled():  # a tensor that requires no gradient may hold one that does
        return forward(*call)[:2]
    with torch._C._AutoDispatchBelowAutograd():
        return forward(*call)[:2]


def _refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "rewy: the gradients have no gradients of their own: double backward (create_graph=True) is not supported"
    )


torch.library.register_autograd("rewy::backward", _refuse_second_derivative)
