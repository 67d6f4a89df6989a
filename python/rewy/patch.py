"""Calls of FLA's and transformers' functions served by this package: those functions are replaced where they are bound.

What replaces one takes the call as its package defines it and hands it to the function here that has its FLA name.
What that one does not serve runs as before, and a warning says once why.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import importlib.util
import inspect
import operator
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from ._call import TENSORS, explain, is_switch
from ._ops import CHUNK

Function = Callable[..., Any]

# These tell FLA how to compute, not what.
_HINTS = frozenset({"cu_seqlens_cpu", "chunk_indices", "safe_gate"})
# These change what FLA returns or promises. transformers hands arguments on by name, where FLA's function has the name.
_NOT_HERE = frozenset({"cp_context", "return_intermediate_states", "use_graph"})
_ROW_ALIGNMENT = 16  # bytes, of the tensors that a GPU copies in rows
_ROWS = ("q", "k", "v", "g", "b", "w")


def _ours(name: str) -> Function | None:
    return getattr(sys.modules[__package__], name, None)


# ---- whether a call is served --------------------------------------------------------------------------------------


def _miniature(
    function: str,
    device: torch.device,
    sizes: tuple[int, int, int, int],
    dtypes: tuple[tuple[str, torch.dtype], ...],
    settings: tuple[tuple[str, Any], ...],
) -> dict[str, Any]:
    """Arguments of a call of one token with the heads, widths, types and settings of another."""
    heads, value_heads, key_width, value_width = sizes
    keys, values = (1, 1, heads, key_width), (1, 1, value_heads, value_width)
    scalar_gate = function.endswith("gated_delta_rule")
    state = (value_width, key_width) if ("state_v_first", True) in settings else (key_width, value_width)
    shapes = {
        "q": keys,
        "k": keys,
        "v": values,
        "g": (1, 1, value_heads) if scalar_gate else (1, 1, value_heads, key_width),
        "beta": (1, 1, value_heads),
        "b": (1, 1, value_heads, key_width),
        "w": values,
        "initial_state": (1, value_heads, *state),
        "A_log": (value_heads,),
        "dt_bias": (value_heads,) if scalar_gate else (value_heads * key_width,),
    }
    tensors = {name: torch.empty(shapes[name], dtype=dtype, device=device) for name, dtype in dtypes}
    return {**tensors, **dict(settings)}


@functools.lru_cache(maxsize=4096)
def _why_not(function: str, differentiated: bool, device: torch.device, *described: Any) -> str | None:
    """Why a call is not served, backward included where it is differentiated; None if it is."""

    def ask() -> str:
        return explain(_ours(function), **_miniature(function, device, *described))

    # PyTorch's modes belong to a thread: in one of its own autocast casts nothing, and nobody traces the miniature.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        try:
            text = thread.submit(ask).result()
        except (NotImplementedError, TypeError, ValueError) as refusal:
            return str(refusal)
    lines = [line.partition(": ") for line in text.splitlines()]
    for call, _, answer in lines:
        if answer == "no backend serves it" and (differentiated or not call.endswith("backward")):
            reasons = [a for c, _, a in lines if c == call and a != answer and not a.endswith("tensors only")]
            return f"{call}: {'; '.join(reasons) or answer}"
    return None


_warned: set[tuple[str, str]] = set()


def _warn(name: str, reason: str) -> None:
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(f"rewy does not serve a call of {name}, which runs as without it: {reason}", stacklevel=4)


# torch.compile calls these two while it traces, with constants, and keeps what they return: it traces no warning.


def _declined(name: str, *described: Any) -> bool:
    reason = _why_not(*described)
    if reason is not None:
        _warn(name, reason)
    return reason is not None


def _decline(name: str, reason: str) -> bool:
    _warn(name, reason)
    return True


# ---- one call ------------------------------------------------------------------------------------------------------


def _with_rows(t: Tensor) -> Tensor:
    """`t`, copied where its rows are not as a GPU reads them here. FLA copies whatever is not contiguous."""
    if t.device.type != "cuda" or t.dim() < 2:
        return t
    if torch.compiler.is_compiling():  # which cannot trace where a tensor begins
        return t if t.is_contiguous() else t.clone(memory_format=torch.contiguous_format)
    step = _ROW_ALIGNMENT // t.element_size()
    fits = t.stride(-1) == 1 and t.storage_offset() % step == 0
    for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True):
        fits = fits and (size == 1 or stride % step == 0)
    return t if fits else t.clone(memory_format=torch.contiguous_format)


class _Translation:
    """From calls of `original`, a function with FLA's arguments, to calls of the function of this package.

    Args:
        original: FLA's function, or one of transformers' that stands for it.
        function: name of the function here.
        keywords: what `original` understands besides its signature.
        renamed: its names of arguments that are called otherwise here.
        forgives: keywords that `original` does not know change nothing; else nobody here can tell what they change.
    """

    def __init__(
        self,
        original: Function,
        function: str,
        keywords: Iterable[str] = (),
        renamed: Mapping[str, str] | None = None,
        forgives: bool = False,
    ) -> None:
        self.name = f"{original.__module__}.{original.__qualname__}"
        self.function = function
        self.renamed = dict(renamed or {})
        self.forgives = forgives
        theirs = inspect.signature(original).parameters
        ours = inspect.signature(_ours(function)).parameters
        positional = [p for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.positional = tuple(p.name for p in positional)
        self.required = tuple(p.name for p in positional if p.default is p.empty)
        self.tensors = tuple(name for name in TENSORS if name in ours)
        self.switches = frozenset(name for name, p in ours.items() if p.default is False)
        known = {self.renamed.get(name, name) for name in theirs} | set(keywords)
        self.taken = frozenset(ours) if forgives else frozenset(ours) & known
        self.has_old_layout_name = "transpose_state_layout" in known

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments by our names. None where Python would refuse them, which is left to `original`."""
        given = dict(zip(self.positional, args, strict=False))
        if len(args) > len(self.positional) or any(name in given for name in kwargs):
            return None
        given.update(kwargs)
        if any(name not in given for name in self.required):
            return None
        return {self.renamed.get(name, name): value for name, value in given.items()}

    def translate(self, given: dict[str, Any]) -> str | None:
        """Makes bound arguments those of our function, in place. Returns why they cannot be, None where they are."""
        if self.has_old_layout_name and "transpose_state_layout" in given:
            if given.get("state_v_first"):
                return "transpose_state_layout and state_v_first are both given"
            if not torch.compiler.is_compiling():
                text = "`transpose_state_layout` is now `state_v_first`"
                warnings.warn(text, DeprecationWarning, stacklevel=3)
            given["state_v_first"] = given.pop("transpose_state_layout")
        if given.get("chunk_size") == CHUNK:  # FLA's default, and the only one here
            del given["chunk_size"]
        if given.get("use_gate_in_kernel") and given.get("A_log") is None and given.get("lower_bound") is None:
            return "use_gate_in_kernel is set and A_log is not"
        if "head_first" in given:  # FLA has functions that refuse it whatever it is
            return "argument 'head_first'"
        for name, value in list(given.items()):
            if value is None or value is False or name in _HINTS:
                del given[name]
            elif name in self.switches and not is_switch(value):
                return f"argument '{name}' is {type(value).__name__}, not bool"
            elif name not in self.taken:
                if not self.forgives or name in _NOT_HERE:
                    return f"argument '{name}'"
                del given[name]
        if "beta" in self.tensors and "beta" not in given and "beta" not in self.required:
            given["beta"] = torch.ones_like(given["v"][..., 0])
        for name in self.tensors:
            if name not in given:
                return f"no {name} is given"
        beta = given.get("beta")
        if self.function.startswith("fused_recurrent") and isinstance(beta, Tensor) and beta.dim() == 4:
            return "beta has a strength for each value feature"
        return None

    def described(self, given: dict[str, Any]) -> tuple[Any, ...] | None:
        """What decides whether a call is served, and is the same for calls of other lengths: constants all.

        None where a tensor is none, or q or v has not four axes, which the call itself says better; and where there are
        shapes alone.
        """
        q, v = given["q"], given["v"]
        if not (all(isinstance(given[name], Tensor) for name in self.tensors) and q.dim() == v.dim() == 4) or q.is_meta:
            return None
        dtypes, settings, differentiated = [], [], False
        for name, value in given.items():
            if name in self.switches:
                settings.append((name, value))
            elif name == "lower_bound":
                settings.append((name, -1.0))  # any number below 0 is served alike
            elif isinstance(value, Tensor) and name not in ("scale", "cu_seqlens"):
                dtypes.append((name, value.dtype))
                differentiated = differentiated or value.requires_grad
        differentiated = differentiated and torch.is_grad_enabled()
        # index(): while tracing, a symbol becomes the number it stands for.
        sizes = tuple(operator.index(n) for n in (q.shape[2], v.shape[2], q.shape[3], v.shape[3]))
        return self.function, differentiated, q.device, sizes, tuple(dtypes), tuple(settings)

    def run(self, given: dict[str, Any]) -> Any:
        raw = ("q", "k") if "use_qk_l2norm_in_kernel" in given else ()  # what is activated has any strides
        raw = (*raw, "g") if "use_gate_in_kernel" in given else raw
        for name in _ROWS:
            if name not in raw and isinstance(given.get(name), Tensor):
                given[name] = _with_rows(given[name])
        tensors = [given.pop(name) for name in self.tensors]
        kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
        if kind != "meta" and torch.is_autocast_enabled(kind):  # which does not change types inside FLA's functions
            with torch.autocast(kind, enabled=False):
                return _ours(self.function)(*tensors, **given)
        return _ours(self.function)(*tensors, **given)


def _replacement(patch: _Patch, original: Function, translation: _Translation) -> Function:
    """A function that does what `original` does, by way of this package where that serves the call."""

    # Not the attributes of `original`: with them torch.compile would take it for a function not to be traced.
    @functools.wraps(original, updated=())
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not patch.active or (translation.forgives and torch.compiler.is_exporting()):
            return original(*args, **kwargs)
        given = translation.bind(args, kwargs)
        if given is None:
            return original(*args, **kwargs)
        reason = translation.translate(given)
        if reason is not None:
            _decline(translation.name, reason)
            return original(*args, **kwargs)
        described = translation.described(given)
        if described is not None and _declined(translation.name, *described):
            return original(*args, **kwargs)
        return translation.run(given)

    return replacement


# ---- where functions are bound -------------------------------------------------------------------------------------


class _Patch:
    """A set of functions, what replaces them, and whether it does now."""

    def __init__(self, *packages: str) -> None:
        self.active = False
        self.owner: Patched | None = None  # whose end undoes it
        self.packages = packages
        self.lock = threading.RLock()
        # By the id of an original: it, and what replaces it.
        self.replacements: dict[int, tuple[Function, Function]] = {}
        self.layers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def modules(self) -> Iterator[ModuleType]:
        prefixes = tuple(name + "." for name in self.packages)
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and (name in self.packages or name.startswith(prefixes)):
                yield module

    def knows(self, function: Any) -> bool:
        return any(function is f for pair in self.replacements.values() for f in pair)

    def add(self, original: Function, translation: _Translation) -> None:
        self.replacements[id(original)] = original, _replacement(self, original, translation)

    def rebind(self, table: dict[int, Function]) -> None:
        for owner in (*self.modules(), *self.layers):
            for name, value in list(vars(owner).items()):
                if id(value) in table:
                    setattr(owner, name, table[id(value)])

    def apply(self) -> Patched:
        with self.lock:
            for constant in (_declined, _decline):  # marks them; not at import, as it imports the compiler
                torch.compiler.assume_constant_result(constant)
            patched = Patched(self)
            self.rebind({key: replacement for key, (_, replacement) in self.replacements.items()})
            if not self.active:
                self.active, self.owner = True, patched
            return patched

    def remove(self) -> None:
        with self.lock:
            self.active, self.owner = False, None  # for those who hold a replacement elsewhere
            self.rebind({id(replacement): original for original, replacement in self.replacements.values()})
            self.layers.clear()
            _warned.clear()
            _why_not.cache_clear()


class Patched(contextlib.AbstractContextManager["Patched"]):
    """What a call of `patch_fla` or `patch_transformers` has patched; leaving it as a context undoes that, once."""

    def __init__(self, patch: _Patch) -> None:
        self._patch = patch

    def __enter__(self) -> Patched:
        if not self._patch.active:
            raise RuntimeError("rewy: what this call patched has been undone; a new block begins with a new call")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._patch.lock:
            if self._patch.owner is self:
                self._patch.remove()


# ---- FLA -----------------------------------------------------------------------------------------------------------

_GATE_KEYWORDS = ("use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "transpose_state_layout")
# Where FLA has its functions, and what they read from **kwargs. disable_recompute means nothing to two of them; what it
# asks for here changes no result.
_FLA_FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "chunk_delta_rule": ("fla.ops.delta_rule", ("chunk_size", "disable_recompute")),
    "chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", (*_GATE_KEYWORDS, "disable_recompute")),
    "chunk_kda": ("fla.ops.kda", _GATE_KEYWORDS),
    "chunk_gdn2": ("fla.ops.gdn2", _GATE_KEYWORDS),
    "fused_recurrent_delta_rule": ("fla.ops.delta_rule", ()),
    "fused_recurrent_gated_delta_rule": ("fla.ops.gated_delta_rule", ("transpose_state_layout",)),
    "fused_recurrent_kda": ("fla.ops.kda", ("transpose_state_layout",)),
    "fused_recurrent_gdn2": ("fla.ops.gdn2", ("transpose_state_layout",)),
}

_fla = _Patch("fla", "transformers_modules")  # the second: models whose code came with their weights


def patch_fla() -> Patched:
    """Makes FLA use this package: its layers, models and operators, whether they have been imported yet or not.

    ::

        rewy.patch_fla()             # until rewy.unpatch_fla()

        with rewy.patch_fla():       # until the end of the block
            loss = model(tokens).loss

    Calls of FLA's ``chunk_delta_rule``, ``chunk_gated_delta_rule``, ``chunk_kda``, ``chunk_gdn2`` and of their
    ``fused_recurrent_*`` companions go to the functions of this package; arguments, results and types stay FLA's. A
    call that is not served (``cp_context``, a type, a width, ...) is FLA's as before, and a warning says why, once for
    each reason. A wrong argument of one that is served otherwise raises the ValueError or TypeError of this package.

    Replaced are names in FLA's own modules and in those of models whose code came with their weights
    (``trust_remote_code``). A program that has imported a function by name keeps what it has: let it import after
    patching, or use the functions of this package.

    Patching again changes nothing, and the inner one of two nested blocks ends without effect. It holds for all threads
    of the process: patch before starting those that compute.

    Returns:
        A context whose end undoes the patching; it holds until then, or until `unpatch_fla`.

    Raises:
        ImportError: FLA is not installed, or cannot be imported.
    """
    with _fla.lock:
        for name, (where, keywords) in _FLA_FUNCTIONS.items():
            try:
                original = getattr(importlib.import_module(where), name, None)
            except ImportError as error:
                if error.name == where:  # an FLA without that operator
                    continue
                raise ImportError(
                    f"rewy.patch_fla: {where} cannot be imported ({error}); FLA is installed by: "
                    "pip install flash-linear-attention"
                ) from error
            if original is not None and not _fla.knows(original):
                _fla.add(original, _Translation(original, name, keywords))
        return _fla.apply()


def unpatch_fla() -> None:
    """Ends what `patch_fla` began: FLA's names are bound to FLA's functions. Does nothing where nothing is patched.

    Whoever imported a replacement by name keeps it; it does from then on what FLA's function does.
    """
    _fla.remove()


# ---- transformers --------------------------------------------------------------------------------------------------

_RENAMED = {"query": "q", "key": "k", "value": "v"}
# What transformers calls the functions of its models, and those here: its own, which are FLA's where that is installed,
# and FLA's, which earlier versions import.
_TRANSFORMERS_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "chunk_kda",
    "recurrent_kimi_delta_attention": "fused_recurrent_kda",
    "chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "chunk_kda": "chunk_kda",
    "fused_recurrent_kda": "fused_recurrent_kda",
}
_TRANSFORMERS_MODELS = (
    "bailing_hybrid",
    "glm5_next",
    "kimi_linear",
    "lara_mini",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
)

_transformers = _Patch("transformers.models")


def patch_transformers(*models: torch.nn.Module) -> Patched:
    """Makes the delta-rule layers of transformers' models use this package, as `patch_fla` does with FLA.

    These are the layers of Qwen3-Next, Qwen3.5 (dense and mixture of experts), Kimi Linear, OLMo Hybrid and the other
    models there with a gated delta rule or KDA. A call that is not served goes where it went before: to FLA's function
    where that is installed, else to transformers' own in PyTorch.

    Args:
        models: made before, by a version of transformers whose layers keep the functions as attributes. Versions from
            5.17 on look them up when they run, and need none.

    Returns:
        A context whose end undoes the patching; it holds until then, or until `unpatch_transformers`.

    Raises:
        ImportError: transformers is not installed, or cannot be imported.
    """
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"rewy.patch_transformers: transformers cannot be imported ({error}); it is installed by: "
            "pip install transformers"
        ) from error
    with _transformers.lock:
        for model in _TRANSFORMERS_MODELS:
            where = f"transformers.models.{model}"
            if importlib.util.find_spec(where) is not None:
                with contextlib.suppress(ImportError):  # of what only that model needs: it cannot be made either
                    importlib.import_module(f"{where}.modeling_{model}")
        for module in _transformers.modules():
            for name, function in _TRANSFORMERS_FUNCTIONS.items():
                original = vars(module).get(name)
                if original is None or _transformers.knows(original):
                    continue
                _transformers.add(original, _Translation(original, function, renamed=_RENAMED, forgives=True))
        _transformers.layers.update(layer for model in models for layer in model.modules())
        return _transformers.apply()


def unpatch_transformers() -> None:
    """Ends what `patch_transformers` began. Does nothing where nothing is patched."""
    _transformers.remove()
