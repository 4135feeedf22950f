"""What help() shows of a call is what the settings class has: names, defaults and meaning."""

import inspect
from dataclasses import dataclass, fields

import pytest

from autop_ac import ACConfig, AutoParallel, backend
from autop_ac.config import OPTIMIZER_COPIES, CommConfig, CompileConfig, setting_names
from autop_ac.documented import takes_fields
from autop_ac.graph.devices import DEVICES


def keywords(call):
    return {
        name: p.default
        for name, p in inspect.signature(call).parameters.items()
        if p.default is not p.empty
    }


def listed(doc):
    """Names that a docstring's section of arguments or attributes is about."""
    lines = inspect.cleandoc(doc).splitlines()
    parts = (line.strip().partition(":")[0] for line in lines if line.startswith("    "))
    return {name.strip() for part in parts for name in part.split(",")}


@pytest.mark.parametrize(
    ("call", "settings"),
    [
        (AutoParallel.configure_ac, ACConfig),
        (backend, ACConfig),
        (AutoParallel.configure_comm, CommConfig),
        (AutoParallel.configure_compile, CompileConfig),
    ],
    ids=lambda x: x.__name__,
)
def test_a_call_shows_every_setting_with_its_default(call, settings):
    shown = keywords(call)
    own = {f.name: f.default for f in fields(settings) if f.init}
    assert {name: shown.get(name, "missing") for name in own} == own
    assert own.keys() <= listed(call.__doc__)


def test_the_settings_class_tells_of_each_of_its_fields_and_of_each_word_it_takes():
    assert set(setting_names()) <= listed(ACConfig.__doc__)
    for word in (*OPTIMIZER_COPIES, "auto", "device"):
        assert f'"{word}"' in AutoParallel.configure_ac.__doc__
    for name in DEVICES:
        assert f'"{name}"' in AutoParallel.configure_device.__doc__


def test_what_is_shown_is_put_between_the_arguments_and_the_errors():
    @dataclass
    class Two:
        """Settings.

        Attributes:
            one: the first,
                in two lines.
            two: the second.

        Raises:
            ValueError: of the class, not of the call.
        """

        one: int = 1
        two: str = "x"

    @takes_fields(Two)
    def call(first, **settings):
        """Do it.

        Args:
            first: what comes first.

        Raises:
            KeyError: of the call.
        """
        return first, settings

    assert str(inspect.signature(call)) == "(first, *, one: int = 1, two: str = 'x')"
    assert call.__doc__ == (
        "Do it.\n\nArgs:\n    first: what comes first.\n    one: the first,\n        in two lines.\n"
        "    two: the second.\n\nRaises:\n    KeyError: of the call."
    )
    assert call(0, one=5, three=3) == (0, {"one": 5, "three": 3})
