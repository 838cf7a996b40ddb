# @title Mark values as varying
def mark_varying(tree, axes: str | tuple[str, ...]):
    """Return the tree with every leaf marked as varying over mesh axes.

    The values stay as they are. The transpose is an all-reduce over these axes, so the
    backward pass sums the gradients of all devices at this place.
    """
    if hasattr(jax.lax, "pcast"):  # JAX 0.8.2 or newer
        return jax.tree.map(lambda v: jax.lax.pcast(v, axes, to="varying"), tree)
    return jax.tree.map(lambda v: jax.lax.pvary(v, axes), tree)
