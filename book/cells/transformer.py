# @title Parts of a transformer and its text, for one device and for mesh axes
import codecs
import contextlib
import io

with contextlib.redirect_stdout(io.StringIO()):
    import this  # prints the Zen of Python

text = codecs.decode(this.s, "rot13")
vocabulary = sorted(set(text))
letters = np.int32([vocabulary.index(letter) for letter in text])


def random_windows(rng, sequences: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return windows of letters and the letters that follow them, i32[n, length]."""
    starts = rng.integers(0, len(text) - length, sequences)
    windows = letters[starts[:, None] + np.arange(length + 1)]  # i32[n, length + 1]
    return windows[:, :-1], windows[:, 1:]


def normal(rng, *shape: int, terms: int) -> np.ndarray:
    """Return random weights, scaled for sums of so many terms."""
    return np.float32(rng.normal(size=shape) / np.sqrt(terms))


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Scale each token of f32[..., d] to root mean square 1, then by f32[d]."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def rotate(x: jax.Array, position: jax.Array) -> jax.Array:
    """Apply rotary embeddings to f32[b, s, heads, 8] at positions i32[s]."""
    angle = position[:, None, None] * 0.1 ** jnp.arange(4)  # f32[s, 1, 4]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


def attention(weights, h: jax.Array, position: jax.Array, attend) -> jax.Array:
    """Return the output f32[b, s, d] of the heads that this device stores, for h of
    that shape. attend maps queries, keys, values and positions to f32[b, s, heads, 8].
    """
    qkv = jnp.einsum("bsd,dkf->kbsf", h, weights.wqkv)  # f32[group + 2, b, s, f]
    qkv = qkv.reshape(*qkv.shape[:3], -1, 8)  # f32[group + 2, b, s, KV heads, 8]
    query = jnp.moveaxis(qkv[:-2], 0, 3).reshape(*h.shape[:2], -1, 8)
    key, value = rotate(qkv[-2], position), qkv[-1]
    out = attend(rotate(query, position), key, value, position)
    return out.reshape(*h.shape[:2], -1) @ weights.wo


def mlp(weights, h: jax.Array) -> jax.Array:
    """Return the output f32[b, s, d] of the features that this device stores."""
    return jax.nn.gelu(h @ weights.w1) @ weights.w2


def attend_on_one(query, key, value, position) -> jax.Array:
    """Return causal attention f32[b, s, heads, 8] for full sequences."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def find(ids: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the index of each id in this device's rows, and whether it is there."""
    row = ids - rows * jax.lax.axis_index("tensor")
    here = (0 <= row) & (row < rows)
    return jnp.where(here, row, 0), here


def embed(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return embeddings f32[b, s, d] of ids from a table with rows over tensor."""
    row, here = find(ids, len(table))
    return jax.lax.psum(jnp.where(here[..., None], table[row], 0), "tensor")


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return losses f32[b, s] from logits f32[b, s, v] that are sharded over tensor."""
    largest = jax.lax.stop_gradient(logits.max(axis=-1))
    top = jax.lax.pmax(largest, "tensor")
    total = jax.lax.psum(jnp.exp(logits - top[..., None]).sum(axis=-1), "tensor")
    row, here = find(labels, logits.shape[-1])
    picked = jnp.take_along_axis(logits, row[..., None], axis=-1)[..., 0]
    return jnp.log(total) + top - jax.lax.psum(jnp.where(here, picked, 0), "tensor")


def add_block(sums: tuple, query: jax.Array, block: tuple, seen: jax.Array) -> tuple:
    """Add a block of keys and values to the three sums of the softmax.

    query: f32[b, q, h, group, 8]; block: two f32[b, k, h, 8]; seen: bool[q, k]
    """
    values, total, top = sums  # f32[b, h, group, q, 8], f32[b, h, group, q] twice
    key, value = block
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key) / np.sqrt(8)
    scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    weights = jnp.exp(scores - new_top[..., None])
    decay = jnp.exp(top - new_top)
    added = jnp.einsum("bhgqk,bkhd->bhgqd", weights, value)
    values = decay[..., None] * values + added
    return values, decay * total + weights.sum(axis=-1), new_top


def to_next(value, axis: str):
    """Send a value to the next device along an axis, in a ring."""
    n = jax.lax.axis_size(axis)
    return jax.lax.ppermute(value, axis, [(d, (d + 1) % n) for d in range(n)])


def ring(query, key, value, position: jax.Array) -> jax.Array:
    """Return causal attention f32[b, q, KV heads, group, 8] of this device's queries to
    the keys of all devices along seq."""
    n, here = jax.lax.axis_size("seq"), jax.lax.axis_index("seq")
    query = query.reshape(*key.shape[:3], -1, 8)  # f32[b, q, h, group, 8]

    def step(carry: tuple, hop: jax.Array) -> tuple[tuple, None]:
        sums, block = carry[0], to_next(carry[1], "seq")
        key_position = position + ((here - hop) % n - here) * len(position)
        seen = position[:, None] >= key_position
        return (add_block(sums, query, block, seen), block), None

    zeros = jnp.moveaxis(jnp.zeros_like(query), 1, 3)
    sums = zeros, zeros[..., 0], zeros[..., 0] - jnp.inf
    own = position[:, None] >= position
    carry = add_block(sums, query, (key, value), own), (key, value)
    if n > 1:  # JAX 0.11.2 crashes while it compiles a scan of length 0 here
        carry = jax.lax.scan(step, carry, jnp.arange(1, n))[0]
    (values, total, _), _ = carry
    return jnp.moveaxis(values / total[..., None], 3, 1)


def pipeline(stage, x: jax.Array, microbatches: int) -> jax.Array:
    """Run x, f32[b, s, d], through the stages of all devices along pipe."""
    here, stages = jax.lax.axis_index("pipe"), jax.lax.axis_size("pipe")
    inputs = x.reshape(microbatches, -1, *x.shape[1:])

    def tick(arrived: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = inputs[jnp.minimum(t, microbatches - 1)]
        out = stage(jnp.where(here == 0, new, arrived))
        return to_next(out, "pipe"), out

    ticks = jnp.arange(microbatches + stages - 1)
    _, outputs = jax.lax.scan(tick, jnp.zeros_like(inputs[0]), ticks)
    return outputs[stages - 1 :].reshape(x.shape)


def experts(weights, h: jax.Array, dispatch, combine) -> jax.Array:
    """Replace the MLP by eight experts, one of which processes each token of h.

    dispatch: sends buffers f32[8, tokens, 64] to the devices that store the experts
    combine: its inverse
    """
    tokens = h.reshape(-1, 64)
    probabilities = jax.nn.softmax(tokens @ weights.router)  # f32[tokens, 8]
    chosen = jax.nn.one_hot(probabilities.argmax(axis=-1), 8)
    buffers = dispatch(jnp.einsum("se,sd->esd", chosen, tokens))
    hidden = jax.nn.gelu(jnp.einsum("esd,edf->esf", buffers, weights.w1))
    out = combine(jnp.einsum("esf,efd->esd", hidden, weights.w2))
    return jnp.einsum("esd,se->sd", out, chosen * probabilities).reshape(h.shape)
