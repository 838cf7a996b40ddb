# @title Tables
from IPython.display import Markdown


def table(*rows: list) -> Markdown:
    """Show rows as a table; the first row is its head."""
    head, *body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return Markdown("\n".join([head, "|---" * len(rows[0]) + "|", *body]))
