"""A few lines to write HTML and SVG with: everything escaped, nothing clever."""

from __future__ import annotations

from html import escape


def text(value: object) -> str:
    """Text as markup."""
    return escape(str(value), quote=False)


def tag(name: str, /, *children: str, **attributes: str | float | None) -> str:
    """An element. Children are markup; ``class_`` is class, ``stroke_width`` is stroke-width; None leaves out."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{shown}>{''.join(children)}</{name}>"


def void(name: str, /, **attributes: str | float | None) -> str:
    """An element without an end tag."""
    return tag(name, **attributes).removesuffix(f"</{name}>")


def _value(value: str | float | None) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
