"""help() of every public name explains every parameter."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import protoseam as ps


def public() -> Iterator[tuple[str, Any, str]]:
    """Every public function, class and method, with its documentation."""
    for module in (ps, ps.core, ps.theory, ps.theory.toy):
        for name in module.__all__:
            found, label = getattr(module, name), f"{module.__name__}.{name}"
            if inspect.isfunction(found):
                yield label, found, inspect.getdoc(found) or ""
            elif inspect.isclass(found) and not issubclass(found, Exception):
                documented = (inspect.getdoc(found) or "") + "\n" + (found.__init__.__doc__ or "")
                yield label, found, documented
                for method, function in inspect.getmembers(found, inspect.isfunction):
                    if not method.startswith("_") and function.__module__.startswith("protoseam"):
                        yield f"{label}.{method}", function, inspect.getdoc(getattr(found, method)) or ""


@pytest.mark.parametrize(("label", "found", "text"), [pytest.param(*p, id=p[0]) for p in public()])
def test_help_explains_every_parameter(label: str, found: Any, text: str) -> None:
    assert text.strip(), f"{label} has no documentation"
    if label == "protoseam.AbstractCovariance":  # its constructor takes nothing
        return
    for name in inspect.signature(found).parameters:
        if name != "self":
            assert re.search(rf"^\s*\**{name}(, \w+)*: ", text, re.MULTILINE), (
                f"{label} does not explain {name}"
            )


def test_help_of_lift_lists_the_options() -> None:
    import pydoc

    shown = pydoc.render_doc(ps.lift, renderer=pydoc.plaintext)
    assert "alpha: float = 2.0" in shown
    assert "alpha: rate at which" in shown
    assert "**options" not in shown
