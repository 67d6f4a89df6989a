"""What the package's functions share: their options and documentation, the call of the operator, its refusals."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import _ops

# The functions' switches by the operator's words for them (python/csrc/options.h).
_SWITCHES = {
    "output_final_state": "output_final_state",
    "state_v_first": "state_v_first",
    "normalise": "use_qk_l2norm_in_kernel",
    "activate_gate": "use_gate_in_kernel",
    "activate_beta": "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval": "allow_neg_eigval",
}
_ALL_SWITCHES = (*_SWITCHES.values(), "disable_recompute")
# The library's refusals of an element type, or of a tensor that is not there.
_ABOUT_TYPES = re.compile(r": expected (a )?dtype |, got none$")

Function = TypeVar("Function", bound=Callable[..., tuple[Tensor, Tensor | None]])

_STATES = """
    Options, all by keyword:
        scale: factor on the queries; K^-0.5 if None.
        initial_state: [N, HV, K, V], zero if None; N is B, or the number of packed sequences. FP32, other types are
            converted. It has a gradient.
        output_final_state: whether to return the final state [N, HV, K, V], in FP32.
        state_v_first: both states are [N, HV, V, K] instead.
        cu_seqlens: [N + 1] int32 or int64, 0 = c_0 <= c_1 <= ... <= c_N <= T: sequence n is rows c_n to c_(n+1) - 1 of
            the tensors, whose B is 1. Empty sequences are fine; rows after the last get zeros. On a GPU the offsets
            stay there, nothing waits for them.
"""
_TRAINING = """\
        cu_seqlens_cpu: accepted and not needed.
        disable_recompute: keep what the backward would compute again: faster, more memory. Same gradients, to the bit.
        safe_gate, where there is a gate: accepted, and changes nothing: results are exact for gates of any size.
"""
_REST = """
    What a layer projects may go in as it is, by those of these options that the signature has; the activations run
    inside the call, in FP32, and gradients go through:
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum_k x_k^2 + 1e-6).
        use_gate_in_kernel: g is raw, and with x = g + dt_bias the log decay is -exp(A_log) softplus(x), or
            lower_bound sigmoid(exp(A_log) x) where a lower_bound is given.
        A_log: HV numbers of any shape, only with a lower_bound optional. dt_bias: as many numbers as g has for a token,
            of any shape; optional. lower_bound: below 0. The three are ignored without use_gate_in_kernel.
        use_beta_sigmoid_in_kernel: the strength is sigmoid(beta), with allow_neg_eigval twice that.

{tensors}
    With FP64 all tensors are FP64. Under autocast q, k, v, b and w are cast to its type. States, A_log, dt_bias and a g
    that is not raw are converted to FP32 where they are not.

    Returns:
        (o, final_state): o is [B, T, HV, V] in the type of v; final_state is None unless asked for.

    Raises:
        ValueError: a shape, a device, a width or an offset is wrong. Nothing has been computed.
        TypeError: an argument is not a tensor, or its element type is wrong.
"""
_TENSORS_BY_CHUNKS = """\
    q, k and v have one type: BF16 or FP16, on a CPU FP32 and FP64 too. On a CPU K and V are any numbers, and tensors
    have any strides. On a GPU K and V are multiples of 8 up to 256, and the rows of v, b, w and of q, k and g that are
    not activated are contiguous and 16-byte aligned."""
_TENSORS_BY_TOKENS = """\
    q, k and v have one type: FP32, BF16 or FP16, on a CPU FP64 too; b and w one of FP32, BF16 and FP16, whatever q has.
    Tensors have any strides, K and V are any numbers, on a GPU K up to 256. Where gradients are needed, what the
    function by chunks asks for holds instead."""

_TOKENS = """
    The state goes in and comes out, and on a GPU nothing needs memory but the results. Any number of tokens is served;
    for more than about 64 a sequence the function by chunks is faster. Gradients, where they are asked for, are
    computed by chunks.
"""

# The tensors of a call that are not options; a function has those its signature has.
TENSORS = ("q", "k", "v", "g", "beta", "b", "w")
_OPERATORS: dict[Callable[..., Any], tuple[str, str]] = {}
_EQUATIONS: dict[str, str] = {}  # by operator: its equation and tensors, as its function by chunks describes them


def public(op: str, schedule: str = "chunks") -> Callable[[Function], Function]:
    """Makes a function one of the package's: known to `explain`, its options documented."""

    def decorate(function: Function) -> Function:
        _OPERATORS[function] = op, schedule
        title, _, equation = (function.__doc__ or "").partition("\n\n")
        if schedule == "chunks":
            _EQUATIONS[op] = equation.rstrip() + "\n"
            parts = (_STATES, _TRAINING, _REST.format(tensors=_TENSORS_BY_CHUNKS))
        else:
            parts = (_TOKENS, _STATES, _REST.format(tensors=_TENSORS_BY_TOKENS))
        function.__doc__ = f"{title}\n\n{_EQUATIONS[op]}" + "".join(parts)
        return function

    return decorate


def _refusal(error: Exception) -> Exception | None:
    """The library's own "op direction: argument 'x': expected ...", which PyTorch passes on as the one or the other."""
    text = str(error)
    if ": argument '" not in text:
        return None
    return TypeError(text) if _ABOUT_TYPES.search(text) else ValueError(text)


def _refuse_foreign(call: tuple[Any, ...], devices: tuple[str, ...] = ("cpu", "cuda", "meta")) -> None:
    """Tensors for which PyTorch finds no operator of ours; its own text is about dispatch keys."""
    for name, t in zip(_ops.NAMES, call, strict=True):
        if not isinstance(t, Tensor):
            continue
        expected, got = "a tensor on cpu or cuda", f"one on {t.device}"
        if t.device.type in devices:
            expected, got = "a dense tensor", "a nested one" if t.is_nested else f"one of {t.dtype}, {t.layout}"
            if t.layout == torch.strided and not t.is_nested and not t.is_quantized:
                continue
        raise ValueError(f"{call[0]} forward: argument '{name}': expected {expected}, got {got}")


def _not_a_tensor(op: str, **given: object) -> TypeError:
    """About the first that is none; q, k and v must be there."""
    wrong = (
        name for name, t in given.items() if not isinstance(t, Tensor) and (t is not None or name in ("q", "k", "v"))
    )
    name = next(wrong)
    return _wrong_type(op, name, "a tensor", given[name])


@functools.cache
def _words(policy: str, schedule: str, switches: tuple[bool, ...]) -> str:
    """The operator's options; what it does by itself is not said."""
    words = [word for word, on in zip(_SWITCHES, switches, strict=True) if on]
    if policy != "recompute":
        words.append("policy=" + policy)
    if schedule != "chunks":
        words.append("schedule=" + schedule)
    return " ".join(words)


def _number(op: str, name: str, value: Any) -> Any:
    """As the operator takes it. Not of a tensor: it would get no gradient, and a GPU would be waited for."""
    if value is None or isinstance(value, (float, torch.SymInt, torch.SymFloat)):
        return value
    if not isinstance(value, numbers.Real):
        raise _wrong_type(op, name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{op} forward: argument '{name}': expected a finite number, got one beyond the range of FP64"
        ) from None


def is_switch(value: object) -> bool:
    """None, 0, 1 and NumPy's own do for a bool."""
    return value is None or isinstance(value, (int, torch.SymBool)) or type(value).__name__ in ("bool", "bool_")


def _wrong_type(op: str, name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{op} forward: argument '{name}': expected {expected}, got {type(value).__name__}")


def _converted(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return t if t is None or t.dtype == dtype or not t.is_floating_point() else t.to(dtype)


def _vector(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A layer's parameter, of whatever shape the layer gives it."""
    return t if t is None or t.is_nested else _converted(t if t.dim() == 1 else t.reshape(-1), dtype)


def arguments(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    b: Tensor | None,
    w: Tensor | None,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    disable_recompute: bool = False,
    schedule: str = "chunks",
    differentiated: bool | None = None,
) -> tuple[Any, ...]:
    """The arguments of the operator ``forward``, in the order of its schema. Whether there will be a backward is seen
    by the tensors, unless said."""
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    for t in (q, k, v):
        if not isinstance(t, Tensor):
            raise _not_a_tensor(op, q=q, k=k, v=v)
    for t in (g, beta, b, w, initial_state, A_log, dt_bias, cu_seqlens):
        if t is not None and not isinstance(t, Tensor):
            raise _not_a_tensor(op, g=g, beta=beta, b=b, w=w, initial_state=initial_state, A_log=A_log,
                                dt_bias=dt_bias, cu_seqlens=cu_seqlens)  # fmt: skip
    scale, lower_bound = _number(op, "scale", scale), _number(op, "lower_bound", lower_bound)
    switches = (
        output_final_state, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )  # fmt: skip
    for name, switch in zip(_ALL_SWITCHES, (*switches, disable_recompute), strict=True):
        if switch is not True and switch is not False and not is_switch(switch):
            raise _wrong_type(op, name, "bool", switch)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            f"{op} forward: argument 'allow_neg_eigval': expected False without use_beta_sigmoid_in_kernel, got True"
        )
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    device = q.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device) and wide != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        q, k, v, b, w = (_converted(t, dtype) for t in (q, k, v, b, w))
    if initial_state is not None:
        initial_state = _converted(initial_state, wide)
    if use_gate_in_kernel:
        A_log, dt_bias = _vector(A_log, wide), _vector(dt_bias, wide)
    if g is not None and (not use_gate_in_kernel or wide == torch.float64):
        g = _converted(g, wide)
    if differentiated is None and torch.is_grad_enabled():
        for t in (q, k, v, g, beta, b, w, initial_state, A_log, dt_bias):
            if t is not None and t.requires_grad:
                differentiated = True
                break
    policy = "none" if not differentiated else "save" if disable_recompute else "recompute"
    # What traces a program looks through a cache, with a warning.
    words = (_words.__wrapped__ if torch.compiler.is_compiling() else _words)(policy, schedule, switches)
    return op, q, k, v, g, beta, b, w, initial_state, A_log, dt_bias, cu_seqlens, scale, lower_bound, words


def run(call: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """(o, final_state) of the operator ``forward``, from its arguments; final_state is None unless asked for."""
    _ops.refuse_tangents(call)
    if torch.compiler.is_compiling():
        o, final_state = _ops.forward(*call)[:2]
    else:
        try:
            o, final_state = _ops.eager(call)
        except (RuntimeError, ValueError) as error:
            refusal = _refusal(error) or _ops.out_of_memory(error)
            if refusal is None:
                if isinstance(error, NotImplementedError):
                    _refuse_foreign(call)
                raise
            raise refusal from None
    return o, final_state if "output_final_state" in call[_ops.OPTIONS] else None


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
        ValueError, TypeError: as the call would.
    """
    if not callable(function) or function not in _OPERATORS:
        raise ValueError(f"rewy.explain: expected one of {', '.join(f.__name__ for f in _OPERATORS)}, got {function!r}")
    op, schedule = _OPERATORS[function]
    try:
        call = inspect.signature(function).bind(*tensors, **options)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None
    call.apply_defaults()
    given = {name: value for name, value in call.arguments.items() if name not in ("safe_gate", "cu_seqlens_cpu")}
    named = [given.pop(name, None) for name in TENSORS]
    asked = arguments(op, *named, **given, schedule=schedule, differentiated=True)
    _ops.check_tensors(op, "forward", dict(zip(_ops.NAMES, asked, strict=True)))
    _refuse_foreign(asked, ("cpu", "cuda"))
    try:
        return torch.ops.rewy.explain(*asked)
    except (RuntimeError, ValueError) as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        raise refusal from None
