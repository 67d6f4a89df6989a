"""The operators as functions, with the arguments of Flash Linear Attention's ``fla.ops.*.chunk_*``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import _ops

_UNBUILT = (
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "A_log",
    "dt_bias",
    "lower_bound",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
)

# Refusals of an element type, or of a tensor that is not there.
_ABOUT_TYPES = re.compile(r"dtype': expected |: expected (a )?dtype |, got none$")

Function = TypeVar("Function", bound=Callable[..., tuple[Tensor, Tensor | None]])

_OPTIONS = """
    Options, all by keyword:
        scale: factor on the queries; K^-0.5 if None.
        initial_state: [N, HV, K, V], zero if None; N is B, or the number of packed sequences. FP32, other types are
            converted. It has a gradient.
        output_final_state: whether to return the final state [N, HV, K, V], in FP32.
        state_v_first: both states are [N, HV, V, K] instead.
        cu_seqlens: [N + 1] int32 or int64, 0 = c_0 <= c_1 <= ... <= c_N <= T: sequence n is rows c_n to c_(n+1) - 1 of
            the tensors, whose B is 1. Empty sequences are fine; rows after the last get zeros. On a GPU the offsets
            stay there, nothing waits for them.
        cu_seqlens_cpu: accepted and not needed.
        disable_recompute: keep what the backward would compute again: faster, more memory. Same gradients, to the bit.
        safe_gate: accepted, and changes nothing: results are exact for gates of any size.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel,
            allow_neg_eigval: not built yet; NotImplementedError where one is set. Apply them before the call.

    Tensors may have any strides on a CPU; on a GPU the rows of q, k, v, g, b and w are contiguous and 16-byte aligned.
    q, k and v have one type: BF16 or FP16, on a CPU FP32 and FP64 too. Under autocast they, b and w are cast to its
    type. g is converted to FP32 where it is not, and so is the state (FP64 with FP64 tensors).

    Returns:
        (o, final_state): o is [B, T, HV, V] in the type of v; final_state is None unless asked for.

    Raises:
        ValueError: a shape, a device, a width or an offset is wrong. Nothing has been computed.
        TypeError: an argument is not a tensor, or its element type is wrong.
        NotImplementedError: an option that is not built yet.
"""


def _with_options(function: Function) -> Function:
    function.__doc__ = (function.__doc__ or "").rstrip() + "\n" + _OPTIONS
    return function


def _refuse_unbuilt(function: str, **options: Any) -> None:
    names = [name for name, value in options.items() if value is not None and value is not False]
    if names:
        raise NotImplementedError(
            f"rewy.{function}: {', '.join(names)} inside the call is not built yet; apply it before the call"
        )


def _refusal(error: Exception) -> Exception | None:
    """The library's own "op direction: argument 'x': expected ...", which PyTorch passes on as the one or the other."""
    text = str(error)
    if ": argument '" not in text:
        return None
    return TypeError(text) if _ABOUT_TYPES.search(text) else ValueError(text)


def _converted(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return t if t is None or t.dtype == dtype or not t.is_floating_point() else t.to(dtype)


def _prepared(
    op: str,
    tensors: tuple[Any, ...],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    disable_recompute: bool,
) -> tuple[tuple[Tensor | None, ...], str]:
    """The tensors as the operator takes them - q, k, v, g, beta, b, w, initial_state, cu_seqlens - and the policy."""
    q, k, v, g, beta, b, w = tensors
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op} forward: argument '{name}': expected a tensor, got {type(t).__name__}")
    for name, t in (("g", g), ("beta", beta), ("b", b), ("w", w), ("initial_state", initial_state),
                    ("cu_seqlens", cu_seqlens)):  # fmt: skip
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{op} forward: argument '{name}': expected a tensor, got {type(t).__name__}")
    device = q.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        q, k, v, b, w = (_converted(t, dtype) for t in (q, k, v, b, w))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    g, initial_state = _converted(g, wide), _converted(initial_state, wide)
    policy = "none"
    if torch.is_grad_enabled():
        for t in (q, k, v, g, beta, b, w, initial_state):
            if t is not None and t.requires_grad:
                policy = "save" if disable_recompute else "recompute"
    return (q, k, v, g, beta, b, w, initial_state, cu_seqlens), policy


def _run(
    op: str,
    *tensors: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    disable_recompute: bool,
) -> tuple[Tensor, Tensor | None]:
    inputs, policy = _prepared(op, tensors, initial_state, cu_seqlens, disable_recompute)
    call = (op, *inputs, scale, output_final_state, state_v_first, policy, "auto")
    if torch.compiler.is_compiling():
        o, final_state, _ = _ops.forward(*call)
    else:
        try:
            o, final_state = _ops.forward(*call)[:2] if policy == "none" else _ops.Differentiable.apply(*call)
        except (RuntimeError, ValueError) as error:
            refusal = _refusal(error)
            if refusal is None:
                raise
            raise refusal from None
    return o, final_state if output_final_state else None


@_with_options
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet: the delta rule without decay.

    For each token i of a sequence and each value head, from a state S [K, V]::

        S_i = S_(i-1) + k_i (beta_i (v_i - S_(i-1)^T k_i))^T
        o_i = scale S_i^T q_i

    Args:
        q, k: [B, T, H, K] queries and keys. Keys are normalised as a rule: beta k.k must not exceed 2.
        v: [B, T, HV, V] values. HV is a multiple of H, value head h reads query and key head h // (HV / H).
        beta: [B, T, HV] strength in [0, 2]; FP32, BF16 or FP16.
    """
    _refuse_unbuilt(
        "chunk_delta_rule",
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    return _run(
        "deltanet",
        q,
        k,
        v,
        None,
        beta,
        None,
        None,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        disable_recompute=disable_recompute,
    )


@_with_options
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet (GDN): the delta rule with one decay a token and head.

    For each token i of a sequence and each value head, from a state S [K, V]::

        S-_i = exp(g_i) S_(i-1)
        S_i  = S-_i + k_i (beta_i (v_i - S-_i^T k_i))^T
        o_i  = scale S_i^T q_i

    Args:
        q, k: [B, T, H, K] queries and keys. Keys are normalised as a rule: beta k.k must not exceed 2.
        v: [B, T, HV, V] values. HV is a multiple of H, value head h reads query and key head h // (HV / H).
        g: [B, T, HV] natural log of the decay, g <= 0; -inf forgets the state.
        beta: [B, T, HV] strength in [0, 2]; FP32, BF16 or FP16.
    """
    _refuse_unbuilt(
        "chunk_gated_delta_rule",
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    return _run(
        "gdn",
        q,
        k,
        v,
        g,
        beta,
        None,
        None,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        disable_recompute=disable_recompute,
    )


@_with_options
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention (KDA): the delta rule with a decay of its own for each key feature.

    For each token i of a sequence and each value head, from a state S [K, V]::

        S-_i = diag(exp g_i) S_(i-1)
        S_i  = S-_i + k_i (beta_i (v_i - S-_i^T k_i))^T
        o_i  = scale S_i^T q_i

    Args:
        q, k: [B, T, H, K] queries and keys. Keys are normalised as a rule: beta k.k must not exceed 2.
        v: [B, T, HV, V] values. HV is a multiple of H, value head h reads query and key head h // (HV / H).
        g: [B, T, HV, K] natural log of the decay, g <= 0; -inf forgets the state.
        beta: [B, T, HV] strength in [0, 2]; FP32, BF16 or FP16.
    """
    _refuse_unbuilt(
        "chunk_kda",
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    return _run(
        "kda",
        q,
        k,
        v,
        g,
        beta,
        None,
        None,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        disable_recompute=disable_recompute,
    )


@_with_options
def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2 (GDN2): KDA with independent vectors of erase and write strengths.

    For each token i of a sequence and each value head, from a state S [K, V]::

        S-_i = diag(exp g_i) S_(i-1)
        S_i  = S-_i + k_i (w_i * v_i - S-_i^T (b_i * k_i))^T
        o_i  = scale S_i^T q_i

    Args:
        q, k: [B, T, H, K] queries and keys. Keys are normalised as a rule: beta k.k must not exceed 2.
        v: [B, T, HV, V] values. HV is a multiple of H, value head h reads query and key head h // (HV / H).
        g: [B, T, HV, K] natural log of the decay, g <= 0; -inf forgets the state.
        b: [B, T, HV, K] erase strength, in the type of w; on a GPU the type of q.
        w: [B, T, HV, V] write strength, in the type of b.
    """
    _refuse_unbuilt(
        "chunk_gdn2",
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    return _run(
        "gdn2",
        q,
        k,
        v,
        g,
        None,
        b,
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        disable_recompute=disable_recompute,
    )


_OPERATORS: dict[Callable[..., Any], str] = {
    chunk_delta_rule: "deltanet",
    chunk_gated_delta_rule: "gdn",
    chunk_kda: "kda",
    chunk_gdn2: "gdn2",
}


def explain(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> str:
    """What would run: which backend serves a call and its backward, and why those before it decline.

    ::

        print(rewy.explain(rewy.chunk_kda, q, k, v, g, beta, cu_seqlens=offsets))

    Args:
        function: one of the functions of this package.
        tensors, options: as for the function itself. Nothing is computed.

    Returns:
        One line a backend that was asked: "kda forward: cpu serves it".

    Raises:
        ValueError, TypeError, NotImplementedError: as the call would, where its arguments do not make a problem.
    """
    if function not in _OPERATORS:
        raise ValueError(f"rewy.explain: expected one of {', '.join(f.__name__ for f in _OPERATORS)}, got {function!r}")
    op = _OPERATORS[function]
    call = inspect.signature(function).bind(*tensors, **options)
    call.apply_defaults()
    given = call.arguments
    _refuse_unbuilt(function.__name__, **{name: given[name] for name in _UNBUILT if name in given})
    inputs, _ = _prepared(
        op,
        tuple(given.get(name) for name in ("q", "k", "v", "g", "beta", "b", "w")),
        given["initial_state"],
        given["cu_seqlens"],
        given["disable_recompute"],
    )
    policy = "save" if given["disable_recompute"] else "recompute"
    try:
        return torch.ops.rewy.explain(op, *inputs, given["scale"], given["state_v_first"], policy, "auto")
    except (RuntimeError, ValueError) as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        raise refusal from None
