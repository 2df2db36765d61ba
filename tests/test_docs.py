"""What users read: public names, and docstrings that name every parameter."""

import inspect

import pytest

import jax_fa

PUBLIC = {
    name: getattr(jax_fa, name)
    for name in vars(jax_fa)
    if not name.startswith("_")
    and inspect.isfunction(getattr(jax_fa, name))
    and getattr(jax_fa, name).__module__.startswith("jax_fa.")
}


def section(docstring, title):
    """Text of one Google-style section, or None."""
    lines = inspect.cleandoc(docstring).splitlines()
    if f"{title}:" not in lines:
        return None
    start = lines.index(f"{title}:") + 1
    rest = lines[start:]
    end = next((i for i, line in enumerate(rest) if line and not line.startswith(" ")), len(rest))
    return "\n".join(rest[:end])


def test_public_names_are_the_ones_of_the_contract():
    assert set(PUBLIC) >= {
        "attention",
        "attention_varlen",
        "attention_with_lse",
        "backward",
        "emulation",
        "explain",
        "export_disabled_checks",
        "forward",
        "lowering_for",
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_starts_with_a_sentence(name):
    first = inspect.cleandoc(PUBLIC[name].__doc__).split("\n\n")[0]
    assert first.endswith("."), first


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_documents_every_parameter(name):
    function = PUBLIC[name]
    parameters = inspect.signature(function).parameters.values()
    doc = inspect.cleandoc(function.__doc__)
    args = section(doc, "Args")
    if args is None:
        assert not parameters or "Takes the arguments of ``" in doc
        return
    for parameter in parameters:
        stars = "**" * (parameter.kind is parameter.VAR_KEYWORD)
        stars += "*" * (parameter.kind is parameter.VAR_POSITIONAL)
        assert f"    {stars}{parameter.name}: " in args, parameter.name


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_says_what_comes_back(name):
    doc = inspect.cleandoc(PUBLIC[name].__doc__)
    first = doc.split("\n\n")[0]
    assert section(doc, "Returns") or section(doc, "Raises") or first.startswith(("What", "The"))
