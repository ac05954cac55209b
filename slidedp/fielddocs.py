"""Makes what stands under a dataclass's fields a part of its docstring, so that `Config?` tells all of it."""

import ast
import inspect
import textwrap
from typing import TypeVar

T = TypeVar("T")


def with_field_docs(cls: type[T]) -> type[T]:
    """Appends every field with its type, default and text to the class's docstring."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        (body,) = (node.body for node in source.body if isinstance(node, ast.ClassDef))
    except (OSError, SyntaxError, ValueError):  # no sources, or others than those that are running
        return cls
    lines = [inspect.getdoc(cls) or "", ""]
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign):
            continue
        lines.append(ast.unparse(node))
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            lines.append(textwrap.indent(inspect.cleandoc(str(following.value.value)), "    "))
    cls.__doc__ = "\n".join(lines)
    return cls
