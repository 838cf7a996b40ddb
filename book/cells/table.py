# @title Tables
from IPython.display import Markdown


def table(*rows: list) -> Markdown:
    """Return a table. The first row is the header."""
    head, *body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return Markdown("\n".join([head, "|---" * len(rows[0]) + "|", *body]))
