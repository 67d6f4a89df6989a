"""The operators as functions, with the arguments of Flash Linear Attention's ``fla.ops.*.chunk_*``."""

from __future__ import annotations

from torch import Tensor

from ._call import arguments, public, run


@public("deltanet")
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
    call = arguments(
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
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        disable_recompute=disable_recompute,
    )
    return run(call)


@public("gdn")
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
    call = arguments(
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
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        disable_recompute=disable_recompute,
    )
    return run(call)


@public("kda")
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
    call = arguments(
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
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        disable_recompute=disable_recompute,
    )
    return run(call)


@public("gdn2")
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
        q, k: [B, T, H, K] queries and keys. Keys are normalised as a rule: (b * k).k must not exceed 2.
        v: [B, T, HV, V] values. HV is a multiple of H, value head h reads query and key head h // (HV / H).
        g: [B, T, HV, K] natural log of the decay, g <= 0; -inf forgets the state.
        b: [B, T, HV, K] erase strength; FP32, BF16 or FP16, on a GPU the type of q.
        w: [B, T, HV, V] write strength, in the type of b.
    """
    call = arguments(
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
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        disable_recompute=disable_recompute,
    )
    return run(call)
