"""What is refused, in the library's own words, before anything is computed."""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
import pytest
import torch

import rewy
from recurrence import FUNCTIONS, NAMES, OPS, Case, tensors


def arguments(op: str, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return dict(zip(NAMES[op], tensors(op, Case(B=2), device, dtype), strict=True))


WRONG = {
    "axes of q": (lambda a: a.update(q=a["q"][0]), ValueError, "argument 'q': expected 4 axes, got 3"),
    "axes of v": (lambda a: a.update(v=a["v"][..., None]), ValueError, "argument 'v': expected 4 axes, got 5"),
    "shape of k": (
        lambda a: a.update(k=a["k"][:, :5]),
        ValueError,
        "argument 'k': expected shape [2, 64, 2, 32], got [2, 5, 2, 32]",
    ),
    "width of g": (
        lambda a: a.update(g=a["g"][..., :8]),
        ValueError,
        "argument 'g': expected shape [2, 64, 2, 32], got [2, 64, 2, 8]",
    ),
    "heads": (
        lambda a: a.update(v=torch.cat([a["v"], a["v"][:, :, :1]], 2)),
        ValueError,
        "argument 'HV': expected a multiple of H = 2, got 3",
    ),
    "no width": (lambda a: a.update(v=a["v"][..., :0]), ValueError, "argument 'V': expected at least 1, got 0"),
    "integers": (
        lambda a: a.update(q=a["q"].to(torch.int8)),
        TypeError,
        "argument 'q': expected dtype f64, f32, bf16 or f16, got Char",
    ),
    "complex gate": (
        lambda a: a.update(g=a["g"].to(torch.complex64)),
        TypeError,
        "argument 'g': expected dtype f64, f32, bf16 or f16, got ComplexFloat",
    ),
    "type of q": (
        lambda a: a.update(q=a["q"].to(torch.int32)),
        TypeError,
        "argument 'q': expected dtype f64, f32, bf16 or f16, got i32",
    ),
    "type of a strength": (
        lambda a: a.update(beta=a["beta"].double()),
        TypeError,
        "argument 'beta': expected dtype f32, bf16 or f16 with q of {dtype}, got f64",
    ),
    "mixed types": (
        lambda a: a.update(k=a["k"].half()),
        TypeError,
        "argument 'k': expected dtype {dtype}, got f16",
    ),
    "type of a gate": (
        lambda a: a.update(g=a["g"].to(torch.int64)),
        TypeError,
        "argument 'g': expected dtype f32, got i64",
    ),
    "no gate": (
        lambda a: a.update(g=None),
        TypeError,
        "argument 'g': expected a tensor of shape [2, 64, 2, 32], got none",
    ),
    "a number": (lambda a: a.update(k=1.0), TypeError, "argument 'k': expected a tensor, got float"),
    "no number": (
        lambda a: a.update(scale=torch.ones(())),
        TypeError,
        "argument 'scale': expected a number, got Tensor",
    ),
    "a list": (lambda a: a.update(beta=[1.0]), TypeError, "argument 'beta': expected a tensor, got list"),
    "state": (
        lambda a: a.update(initial_state=torch.zeros(2, 2, 24, 32, device=a["q"].device)),
        ValueError,
        "argument 'initial_state': expected shape [2, 2, 32, 24], got [2, 2, 24, 32]",
    ),
    "packed batch": (
        lambda a: a.update(cu_seqlens=torch.tensor([0, 64], device=a["q"].device)),
        ValueError,
        "argument 'B': expected 1 with packed sequences, got 2",
    ),
    "scale": (
        lambda a: a.update(scale=float("inf")),
        ValueError,
        "argument 'scale': expected a finite number, got inf",
    ),
    "scale of many digits": (
        lambda a: a.update(scale=10**400),
        ValueError,
        "argument 'scale': expected a finite number, got one beyond the range of FP64",
    ),
}


@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize("differentiated", [False, True], ids=["plain", "differentiated"])
def test_refused_with_the_library_s_text(change, differentiated, device, dtype):
    given = arguments("kda", device, dtype)
    if differentiated:
        for t in given.values():
            t.requires_grad_()
    alter, kind, text = WRONG[change]
    alter(given)
    with pytest.raises(kind) as caught:
        FUNCTIONS["kda"](**given)
    assert str(caught.value) == "kda forward: " + text.format(dtype="f32" if dtype == torch.float32 else "bf16")


@pytest.mark.parametrize("option", ["scale", "output_final_state", "state_v_first", "use_qk_l2norm_in_kernel"])
def test_types_of_options(option):
    with pytest.raises(TypeError, match=f"^kda forward: argument '{option}': expected (bool|a number), got str$"):
        rewy.chunk_kda(*tensors("kda", Case()), **{option: "x"})


def test_what_does_for_a_switch():
    """FLA's layers pass use_cache on, which may be None."""
    inputs = tensors("kda", Case())
    for off, on in ((False, True), (None, 1)):
        assert rewy.chunk_kda(*inputs, output_final_state=off)[1] is None
        assert rewy.chunk_kda(*inputs, output_final_state=on)[1] is not None
    with pytest.raises(TypeError, match=r"^kda forward: argument 'state_v_first': expected bool, got Tensor$"):
        rewy.chunk_kda(*inputs, state_v_first=torch.tensor(True))


@pytest.mark.parametrize("op", OPS)
def test_operators_name_themselves(op, device, dtype):
    given = arguments(op, device, dtype)
    given["k"] = given["k"][:, :1]
    with pytest.raises(ValueError, match=f"^{op} forward: argument 'k': expected shape"):
        FUNCTIONS[op](**given)


OFFSETS = {
    "first": ([1, 64], "argument 'cu_seqlens': expected entry 0 to be 0, got 1"),
    "order": ([0, 9, 8], "argument 'cu_seqlens': expected entry 2 of at least the 9 of entry 1, got 8"),
    "end": ([0, 65], "argument 'cu_seqlens': expected entry 1 of at most T = 64, got 65"),
    "axes": ([[0, 64]], "argument 'cu_seqlens': expected 1 axis, got 2"),
    "none": ([], "argument 'cu_seqlens': expected at least 1 entry, got 0"),
}


@pytest.mark.parametrize("wrong", OFFSETS)
def test_offsets_are_checked_on_a_cpu(wrong):
    values, text = OFFSETS[wrong]
    with pytest.raises(ValueError) as caught:
        rewy.chunk_kda(*tensors("kda", Case()), cu_seqlens=torch.tensor(values, dtype=torch.int64))
    assert str(caught.value) == "kda forward: " + text


def test_offsets_have_whole_numbers(device, dtype):
    with pytest.raises(TypeError, match=r"argument 'cu_seqlens': expected dtype i32 or i64, got f32$"):
        rewy.chunk_kda(*tensors("kda", Case(), device, dtype), cu_seqlens=torch.tensor([0.0, 64.0], device=device))


def test_tensors_on_two_devices(cuda):
    q, k, v, g, beta = tensors("kda", Case())
    with pytest.raises(ValueError, match="argument 'k': expected a tensor on cpu, got one on cuda:0"):
        rewy.chunk_kda(q, k.to(cuda), v, g, beta)


@pytest.mark.parametrize("place", range(5))
def test_one_tensor_without_memory(place):
    """PyTorch takes a call with a tensor on "meta" to what infers shapes."""
    inputs = tensors("kda", Case())
    inputs[place] = inputs[place].to("meta")
    name = NAMES["kda"][place]
    with pytest.raises(ValueError, match=f"^kda forward: argument '{name}': expected a tensor on cpu, got one on meta"):
        rewy.chunk_kda(*inputs)


@pytest.mark.parametrize("made", [torch.zeros(()), torch.zeros(0), torch.zeros(2, 2)], ids=["number", "empty", "table"])
def test_offsets_are_refused_where_shapes_are_inferred(made):
    """As the call refuses them."""
    inputs = tensors("kda", Case())
    with pytest.raises(ValueError, match=r"argument 'cu_seqlens': expected (1 axis|at least 1 entry), got") as called:
        rewy.chunk_kda(*inputs, cu_seqlens=made.int())
    with pytest.raises(ValueError) as inferred:
        rewy.chunk_kda(*(t.to("meta") for t in inputs), cu_seqlens=made.int().to("meta"), output_final_state=True)
    assert str(called.value) == str(inferred.value)


def test_a_backward_reads_only_what_was_kept():
    """The operator itself, with less than the forward gave: nothing is read behind it."""
    q, k, v, g, beta = tensors("kda", Case())
    inputs = (q, k, v, g, beta, *[None] * 6)
    options = {"options": "normalise policy=save"}
    o, _, saved, activated = torch.ops.rewy.forward("kda", *inputs, **options)

    def backward(saved, activated):
        return torch.ops.rewy.backward("kda", o, None, *inputs, saved, activated, 1, **options)

    assert backward(saved, activated)[0].shape == q.shape
    size = activated.numel()
    for kept, text in (
        ((saved, activated[3:]), f"'activated': expected at least {size} bytes, got {size - 3}"),
        ((saved, activated[::2]), "'activated': expected bytes without gaps, as the forward left them"),
        ((saved, activated.view(64, -1)), "'activated': expected bytes without gaps"),
        ((saved, activated.float()), "'activated': expected bytes without gaps"),
        ((saved[::2], activated), "'saved': expected bytes without gaps"),
        ((saved[:64], activated), "'saved': expected "),
    ):
        # The stable ABI passes the library's Error on, a std::invalid_argument: PyTorch 2.11 as ValueError.
        with pytest.raises((RuntimeError, ValueError), match=f"^kda backward: argument {text}"):
            backward(*kept)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("normalize", r"kda: argument 'options': expected words among .*, got 'normalize'"),
        ("policy", r"kda: argument 'options': expected words among .*, got 'policy'"),
        ("norm alise", r"kda: argument 'options': expected words among .*, got 'norm'"),
        ("policy=all", r"argument 'policy': expected .*, got \"all\""),
        ("schedule=", r"argument 'schedule': expected .*, got \"\""),
        ("backend=tpu", r"argument 'backend': expected .*, got \"tpu\""),
    ],
)
def test_words_that_the_operator_does_not_know(word, text):
    q, k, v, g, beta = tensors("kda", Case())
    with pytest.raises((RuntimeError, ValueError), match=text):
        torch.ops.rewy.forward("kda", q, k, v, g, beta, None, None, options="state_v_first " + word)


def test_unknown_and_positional_options():
    inputs = tensors("kda", Case())
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunksize'"):
        rewy.chunk_kda(*inputs, chunksize=64)
    with pytest.raises(TypeError, match="positional arguments"):
        rewy.chunk_kda(*inputs, 0.5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'safe_gate'"):
        rewy.chunk_delta_rule(*tensors("deltanet", Case()), safe_gate=True)


def test_explain(device, dtype):
    inputs = tensors("kda", Case(), device, dtype)
    lines = rewy.explain(rewy.chunk_kda, *inputs).splitlines()
    assert lines[-1].startswith(f"kda backward: {device} serves it")
    assert any(line.startswith(f"kda forward: {device} serves it") for line in lines)


def test_explain_says_why_a_backend_declines():
    text = rewy.explain(rewy.chunk_gdn2, *tensors("gdn2", Case(), dtype=torch.float64))
    assert "gdn2 forward: cpu declines: " in text and "gdn2 backward: reference serves it\n" in text
    with pytest.raises(ValueError, match="expected a multiple of H = 2, got 3"):
        rewy.explain(rewy.chunk_kda, *tensors("kda", Case(HV=3)))
    q, k, v, g, beta = tensors("kda", Case())
    with pytest.raises(TypeError, match=r"^kda forward: argument 'k': expected dtype f32, got bf16$"):
        rewy.explain(rewy.chunk_kda, q, k.bfloat16(), v, g, beta)
    with pytest.raises(ValueError, match=r"^kda forward: argument 'beta': expected shape \[1, 64, 2\], got"):
        rewy.explain(rewy.chunk_kda, q, k, v, g, beta[:, :3])
    with pytest.raises(ValueError, match=r"^kda forward: argument 'A_log': expected shape \[2\], got \[1\]"):
        rewy.explain(rewy.chunk_kda, q, k, v, g, beta, use_gate_in_kernel=True, A_log=torch.zeros(1))
    with pytest.raises(ValueError, match="argument 'k': expected a tensor on cpu, got one on meta"):
        rewy.explain(rewy.chunk_kda, q, k.to("meta"), v, g, beta)
    ignored = {"A_log": torch.zeros(1, device="meta"), "dt_bias": torch.zeros(1)}
    assert "serves it" in rewy.explain(rewy.chunk_kda, q, k, v, g, beta, **ignored)
    raw = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": torch.zeros(5)}
    for change in ({"v": v[:, :5]}, {"q": torch.cat([q, q], 2)}, {"q": q.bfloat16()}, {"g": g.double()}, {}):
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, **raw, **change}
        with pytest.raises((TypeError, ValueError)) as called:
            rewy.chunk_kda(**given)
        with pytest.raises((TypeError, ValueError)) as explained:
            rewy.explain(rewy.chunk_kda, **given)
        assert (type(called.value), str(called.value)) == (type(explained.value), str(explained.value))
    with pytest.raises(TypeError, match=r"^chunk_kda\(\) got an unexpected keyword argument 'chunk_size'$"):
        rewy.explain(rewy.chunk_kda, q, k, v, g, beta, chunk_size=64)
    with pytest.raises(TypeError, match=r"^kda forward: argument 'output_final_state': expected bool, got str$"):
        rewy.explain(rewy.chunk_kda, q, k, v, g, beta, output_final_state="yes")
    with pytest.raises(ValueError, match="argument 'q': expected a tensor on cpu or cuda, got one on meta"):
        rewy.explain(rewy.chunk_kda, *(t.to("meta") for t in tensors("kda", Case())))
    for function in (torch.add, "chunk_kda", []):
        with pytest.raises(ValueError, match=r"^rewy.explain: expected one of chunk_delta_rule, "):
            rewy.explain(function, torch.zeros(1))


def test_numbers_of_any_kind():
    inputs = tensors("kda", Case())
    expected = rewy.chunk_kda(*inputs, scale=0.5)[0]
    for scale in (Fraction(1, 2), np.float32(0.5), np.float64(0.5)):
        assert rewy.chunk_kda(*inputs, scale=scale)[0].equal(expected)
    assert rewy.chunk_kda(*inputs, scale=2)[0].equal(rewy.chunk_kda(*inputs, scale=2.0)[0])


@pytest.mark.parametrize("made", ["to_sparse", "quantized", "nested"])
def test_tensors_that_are_not_dense(made, device):
    make = {
        "to_sparse": lambda t: t.to_sparse(),
        "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        "nested": lambda t: torch.nested.as_nested_tensor(list(t)),
    }[made]
    inputs = [t.to(device) for t in tensors("kda", Case())]
    inputs[1] = make(inputs[1])
    for call in (rewy.chunk_kda, lambda *tensors: rewy.explain(rewy.chunk_kda, *tensors)):
        with pytest.raises(ValueError, match=r"^kda forward: argument 'k': expected a dense tensor, got "):
            call(*inputs)


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_parameters_that_are_nested(name):
    inputs = tensors("kda", Case())
    parameters = {"A_log": torch.zeros(2), name: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(1)])}
    for call in (rewy.chunk_kda, functools.partial(rewy.explain, rewy.chunk_kda)):
        with pytest.raises(ValueError, match=f"argument '{name}': expected a dense tensor, got a nested one$"):
            call(*inputs, use_gate_in_kernel=True, **parameters)


def test_out_of_memory(device, dtype):
    """PyTorch's own sentence where its stable interface gives it (2.13), and its own kind of error for a GPU."""
    kind = torch.OutOfMemoryError if device == "cuda" else RuntimeError
    tokens, heads = (2**26, 2**10) if device == "cuda" else (2**30, 2**12)  # results beyond any memory
    q = torch.zeros(1, 1, 1, 8, device=device, dtype=dtype).expand(1, tokens, 1, 8)
    v = torch.zeros(1, 1, 1, 256, device=device, dtype=dtype).expand(1, tokens, heads, 256)
    beta = torch.zeros(1, device=device).expand(1, tokens, heads)
    with pytest.raises(
        kind, match=r"out of memory|allocate memory|has no memory on (cpu|cuda:0) for a tensor of shape"
    ):
        rewy.chunk_delta_rule(q, q, v, beta)


def test_errors_about_memory_keep_their_kind(monkeypatch):
    """In the backward too, where a program makes its batch smaller."""

    def fail(text):
        def operator(*_):
            raise RuntimeError(text)

        return operator

    q, k, v, g, beta = tensors("kda", Case())
    o, _ = rewy.chunk_kda(q.requires_grad_(), k, v, g, beta)
    for text, kind in (
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", torch.OutOfMemoryError),
        ("rewy: PyTorch has no memory on cuda:1 for a tensor of shape [8]", torch.OutOfMemoryError),
        ("rewy: PyTorch has no memory on cpu for a tensor of shape [8]", RuntimeError),
        ("CUDA error: an illegal memory access was encountered", RuntimeError),
    ):
        for direction in ("forward", "backward"):
            monkeypatch.setattr(rewy._ops, direction, fail(text))
        for call in (lambda: rewy.chunk_kda(q, k, v, g, beta), lambda: o.sum().backward(retain_graph=True)):
            with pytest.raises(RuntimeError) as caught:
                call()
            assert type(caught.value) is kind and str(caught.value) == text


def test_a_program_s_other_errors_pass(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(rewy._ops, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        rewy.chunk_kda(*tensors("kda", Case()))
