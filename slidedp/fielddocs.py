"""Makes what stands under a dataclass's fields a part of its docstring, so that `Config?` tells all of it."""

import ast
import inspect
import textwrap
from typing import TypeVar

T = TypeVar("T")


def with_field_docs(cls: type[T]) -> type[T]:
    """Appends every field with its type, default and text to the class's docstring."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:  # a distribution without sources
        return cls
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    lines = [inspect.getdoc(cls) or "", ""]
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign):
            continue
        lines.append(ast.unparse(node))
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            lines.append(textwrap.indent(inspect.cleandoc(str(following.value.value)), "    "))
    cls.__doc__ = "\n".join(lines)
    return cls
