"""The Triton kernels of the ``triton`` backend: attention over a token tree, and a merge of splits.

Importing this needs triton. Whether it then compiles for a GPU or interprets in Python is decided
by ``TRITON_INTERPRET`` at that moment.

Shapes: B batch, H query heads, K kv heads, G = H / K, R rows, P prefix, S keys, D head dim,
C splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "attend_kernel", "merge_kernel"]


@triton.jit
def _tanh(x):
    # There is no tanh that both a GPU and the interpreter have. Near 0 the quotient would lose the
    # digits that a softcap of 30 or 50 multiplies; the series has an error of 1e-8 there.
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    fade = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - fade) / (1.0 + fade)
    return tl.where(square < 0.04, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def _accumulate(
    start,
    stop,
    q,
    k_base,
    v_base,
    k_stride,
    v_stride,
    dims,
    width,
    row_in,
    row_position,
    times_base,
    prefix,
    n_rows,
    top,
    total,
    acc,
    scale,
    softcap,
    window,
    TAIL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the keys from ``start`` to before ``stop`` to the online softmax of each pair.

    ``start`` and ``stop`` need not lie on borders of blocks. ``top`` [BLOCK_M] is the largest score
    so far, ``total`` the sum of exponentials over that one's, ``acc`` [BLOCK_M, BLOCK_D] the
    values, weighted by them.
    """
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        there = keys < stop
        inside = there[:, None] & (dims[None, :] < width)
        k = tl.load(k_base + keys[:, None] * k_stride + dims[None, :], mask=inside, other=0.0)
        if WIDE:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAPPED:
            scores = softcap * _tanh(scores / softcap)
        # A row sees the prefix, and of the tail what lies on its path.
        position = keys
        seen = (row_in >= 0)[:, None] & there[None, :]
        if TAIL:
            tail = keys - prefix
            key_in = tl.load(times_base + tail, mask=there, other=0)
            key_out = tl.load(times_base + n_rows + tail, mask=there, other=0)
            position = tl.load(times_base + 2 * n_rows + tail, mask=there, other=0)
            seen &= (key_in[None, :] <= row_in[:, None]) & (row_in[:, None] < key_out[None, :])
        if WINDOWED:
            seen &= row_position[:, None] - position[None, :] < window
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen nothing yet: minus infinity minus itself would be NaN.
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - safe_top[:, None])
        fade = tl.exp(top - safe_top)
        v = tl.load(v_base + keys[:, None] * v_stride + dims[None, :], mask=inside, other=0.0)
        if WIDE:
            v = v.to(tl.float32)
        total = total * fade + tl.sum(weights, axis=1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    log_ptr,
    sink_ptr,
    times_ptr,
    shape_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_r,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    kv_heads,
    n_rows,
    width,
    scale,
    softcap,
    window,
    chunk,
    GROUPS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend with BLOCK_M pairs of a row and a head of one kv head over one split of the keys.

    Grid: (blocks of R x G pairs, B x K, C). Query heads that share a kv head are rows of one
    product, so that every key is read once for all of them.

    Args:
        q_ptr: [B, H, R, D], the last stride 1; as for keys and values.
        k_ptr: [B, K, S, D].
        v_ptr: [B, K, S, D].
        out_ptr: [B, R, H, D], or [C, B, R, H, D] in float32 with SPLIT.
        log_ptr: [C, B, R, H] in float32 with SPLIT: the log-sum-exp of each output.
        sink_ptr: [H] with SINKS.
        times_ptr: [B, 3, R] in int32: entry time, exit time, position; a row that only pads has
            the entry time -1.
        shape_ptr: [B, 2] in int32: prefix and rows of each sequence.
        q_stride_b: And so on: strides in elements.
        kv_heads: K.
        n_rows: R.
        width: D.
        scale: Factor on the scores.
        softcap: With SOFTCAPPED.
        window: With WINDOWED.
        chunk: Keys of a split, a multiple of BLOCK_N.
        GROUPS: G.
        WIDE: Products in float32 rather than in the dtype of the states.
    """
    block, head_of, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = (head_of // kv_heads).to(tl.int64)
    kv_head = (head_of % kv_heads).to(tl.int64)  # of a long cache, heads lie far apart
    heads = kv_heads * GROUPS

    pairs = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pairs // GROUPS
    head = kv_head * GROUPS + pairs % GROUPS
    real = row < n_rows
    dims = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (dims[None, :] < width)

    q_base = q_ptr + sequence * q_stride_b
    q = tl.load(
        q_base + head[:, None] * q_stride_h + row[:, None] * q_stride_r + dims[None, :],
        mask=inside,
        other=0.0,
    )
    if WIDE:
        q = q.to(tl.float32)
    times_base = times_ptr + sequence * 3 * n_rows
    row_in = tl.load(times_base + row, mask=real, other=-1)
    row_position = tl.load(times_base + 2 * n_rows + row, mask=real, other=0)
    prefix = tl.load(shape_ptr + sequence * 2)
    keys = prefix + tl.load(shape_ptr + sequence * 2 + 1)

    first = split * chunk
    last = tl.minimum(first + chunk, keys)
    if WINDOWED:
        # Whole blocks that lie behind the window of every row of this block are left out.
        early = tl.min(tl.where(row_in >= 0, row_position, 2147483647), axis=0) - window + 1
        early = tl.minimum(tl.maximum(early, 0), prefix)
        first = tl.maximum(first, early // BLOCK_N * BLOCK_N)

    k_base = k_ptr + sequence * k_stride_b + kv_head * k_stride_h
    v_base = v_ptr + sequence * v_stride_b + kv_head * v_stride_h
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The prefix needs no tree; its last block ends where the tail begins.
    border = tl.minimum(last, prefix)
    top, total, acc = _accumulate(
        first, border, q, k_base, v_base, k_stride_s, v_stride_s, dims, width, row_in,
        row_position, times_base, prefix, n_rows, top, total, acc, scale, softcap, window,
        False, WINDOWED, SOFTCAPPED, WIDE, BLOCK_N,
    )  # fmt: skip
    top, total, acc = _accumulate(
        tl.maximum(first, prefix), last, q, k_base, v_base, k_stride_s, v_stride_s, dims,
        width, row_in, row_position, times_base, prefix, n_rows, top, total, acc, scale, softcap,
        window, True, WINDOWED, SOFTCAPPED, WIDE, BLOCK_N,
    )  # fmt: skip

    place = (sequence * n_rows + row) * heads + head
    if SPLIT:
        batch = tl.num_programs(1) // kv_heads
        place += split * batch * n_rows * heads
        log = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(log_ptr + place, log, mask=real)
    elif SINKS:
        sink = tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, sink)
        fade = tl.exp(top - new_top)
        total = total * fade + tl.exp(sink - new_top)
        acc = acc * fade[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out_ptr + place[:, None] * width + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def merge_kernel(
    parts_ptr,
    log_ptr,
    sink_ptr,
    out_ptr,
    heads,
    width,
    places,
    splits,
    SINKS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the C splits of BLOCK_P rows and heads; ``decodekit.backends.merge`` says how.

    Grid: (blocks of B x R x H places,).

    Args:
        parts_ptr: [C, B, R, H, D] in float32.
        log_ptr: [C, B, R, H] in float32.
        sink_ptr: [H] with SINKS.
        out_ptr: [B, R, H, D].
        heads: H.
        width: D.
        places: B x R x H.
        splits: C.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    real = place < places
    dims = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (dims < width)[None, :]
    top = tl.full([BLOCK_P], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sink_ptr + place % heads, mask=real, other=0.0).to(tl.float32)
        top = tl.maximum(top, sink)
    for split in range(splits):
        log = tl.load(log_ptr + split * places + place, mask=real, other=float("-inf"))
        top = tl.maximum(top, log)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_P], tl.float32)
    if SINKS:
        total += tl.exp(sink - top)
    merged = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for split in range(splits):
        here = split * places + place
        log = tl.load(log_ptr + here, mask=real, other=float("-inf"))
        weight = tl.exp(log - top)
        part = tl.load(parts_ptr + here[:, None] * width + dims[None, :], mask=inside, other=0.0)
        total += weight
        merged += part * weight[:, None]
    merged = merged / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out_ptr + place[:, None] * width + dims[None, :],
        merged.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


INTERPRETED = not isinstance(attend_kernel, triton.runtime.JITFunction)
"""Whether the kernels run in Python, on any device, rather than compiled, on a GPU."""
