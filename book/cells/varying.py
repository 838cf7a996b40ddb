# @title Mark values as varying
def cast(tree, axes: str | tuple[str, ...]):
    """Mark values that are equal along mesh axes as varying along them: free forward,
    a sum over these axes on the way back."""
    if hasattr(jax.lax, "pcast"):  # JAX 0.8.2 or newer
        return jax.tree.map(lambda v: jax.lax.pcast(v, axes, to="varying"), tree)
    return jax.tree.map(lambda v: jax.lax.pvary(v, axes), tree)
