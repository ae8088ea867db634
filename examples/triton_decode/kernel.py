"""The kernel: one program attends, for 16 heads of one row, to the row's keys in blocks of 64.

Small on purpose, but not a toy: E4M3 queries, keys and values, an online softmax, P in E4M3, FP32
accumulation, a paged cache, BF16 output and a natural-log LSE, as serving kernels have them.
"""

# Triton reads annotations of its functions as compile-time constants: the others have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import triton
import triton.language as tl

LATENT, ROPE, HEAD_GROUP, BLOCK, NUM_WARPS, NUM_STAGES = 512, 64, 16, 64, 8, 1


@triton.jit
def decode_attention(
    query,  # [B, HEADS, 576] E4M3
    kv,  # [N, 576] E4M3: 512 columns are key and value, 64 more are key only
    rows,  # [B, WIDTH] int32: each row's cache rows
    valid,  # [B] int32: how many of them count
    latent,  # out [B, HEADS, 512] BF16
    lse,  # out [B, HEADS] float32
    trace,  # out [B, HEADS, WIDTH // BLOCK, 2 * BLOCK + 4] float32, or None
    scale_log2,
    out_scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend; with ``trace``, also store every block's logits, P, alpha, sum, total and max."""
    row = tl.program_id(1)
    head = row * HEADS + tl.program_id(0) * 16 + tl.arange(0, 16)
    latents = tl.arange(0, 512)
    ropes = 512 + tl.arange(0, 64)
    q_row = query + head[:, None] * 576
    q_latent = tl.load(q_row + latents[None, :])  # [16, 512]
    q_rope = tl.load(q_row + ropes[None, :])  # [16, 64]
    count = tl.load(valid + row)
    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, 512], tl.float32)
    for start in range(0, count, BLOCK):
        key = start + tl.arange(0, BLOCK)
        used = key < count
        ids = tl.load(rows + row * WIDTH + key, mask=used, other=0).to(tl.int64)
        k_row = kv + ids[:, None] * 576
        k_latent = tl.load(k_row + latents[None, :], mask=used[:, None], other=0.0)  # [BLOCK, 512]
        k_rope = tl.load(k_row + ropes[None, :], mask=used[:, None], other=0.0)  # [BLOCK, 64]
        s = tl.dot(q_latent, k_latent.T)
        s = tl.dot(q_rope, k_rope.T, acc=s)
        s = tl.where(used[None, :], s, float("-inf"))  # [16, BLOCK]
        new_top = tl.maximum(top, tl.max(s, 1) * scale_log2)
        alpha = tl.exp2(top - new_top)
        p = tl.exp2(s * scale_log2 - (new_top - 8.0)[:, None])  # 256 at the max
        block_sum = tl.sum(p, 1)
        total = total * alpha + block_sum
        acc = tl.dot(p.to(tl.float8e4nv), k_latent, acc=acc * alpha[:, None])
        top = new_top
        if trace is not None:
            t = trace + (head * (WIDTH // BLOCK) + start // BLOCK) * (2 * BLOCK + 4)
            tl.store(t[:, None] + tl.arange(0, BLOCK)[None, :], s)
            tl.store(t[:, None] + BLOCK + tl.arange(0, BLOCK)[None, :], p)
            tl.store(t + 2 * BLOCK, alpha)
            tl.store(t + 2 * BLOCK + 1, block_sum)
            tl.store(t + 2 * BLOCK + 2, total)
            tl.store(t + 2 * BLOCK + 3, top)
    inverse = tl.where(total == 0.0, 0.0, out_scale / total)
    out = (acc * inverse[:, None]).to(tl.bfloat16)
    tl.store(latent + head[:, None] * 512 + latents[None, :], out)
    tl.store(lse + head, (top - 8.0 + tl.log2(total)) * 0.6931471805599453)


def cross_compile(heads: int, width: int) -> Any:
    """Compile for sm_90 without a GPU, as a launch there does: a ``CompiledKernel``.

    Set ``TRITON_DISABLE_LINE_INFO=1`` so that the cubin doesn't hold this file's path.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"query": "*fp8e4nv", "kv": "*fp8e4nv", "rows": "*i32", "valid": "*i32"}
    pointers |= {"latent": "*bf16", "lse": "*fp32"}
    constants = {"trace": None, "HEADS": heads, "WIDTH": width, "BLOCK": BLOCK}
    types = {**pointers, "scale_log2": "fp32", "out_scale": "fp32"}
    signature = {name: types.get(name, "constexpr") for name in decode_attention.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    return triton.compile(
        ASTSource(decode_attention, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": NUM_WARPS, "num_stages": NUM_STAGES},
    )
