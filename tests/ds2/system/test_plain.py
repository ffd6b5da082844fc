"""Plain containers become dataclasses, or the innermost field that does not fit is named."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ds2.system.plain import FieldError, UnknownField, counted, first_of, from_plain, grouped


@dataclass
class Inner:
    sizes: list[int]
    scale: float = 1.0


@dataclass
class Outer:
    name: str
    inner: Inner
    on: bool = False
    names: dict[str, str] = field(default_factory=dict)
    several: tuple[Inner, ...] = ()
    perhaps: dict[str, int] | None = None


def test_values_come_out_typed() -> None:
    given = {"name": "${oc.env:HOME}", "inner": {"sizes": [1, 2], "scale": 3}, "several": [{"sizes": []}]}
    made = from_plain(Outer, given, "top")
    assert made == Outer("${oc.env:HOME}", Inner([1, 2], 3.0), several=(Inner([]),))
    assert type(made.inner.scale) is float


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": 7}, "top.name: is 7, expected a string"),
        ({"on": 1}, "top.on: is 1, expected true or false"),
        ({"inner": []}, r"top.inner: is \[\], expected a mapping"),
        ({"inner": {}}, "top.inner.sizes: is missing"),
        ({"inner": {"sizes": [1, True]}}, r"top.inner.sizes\[1\]: is True, expected a whole number"),
        ({"inner": {"sizes": [2**70]}}, r"top.inner.sizes\[0\]: is 1180591620717411303424, expected a whole number"),
        ({"inner": {"sizes": [10**6000]}}, r"top.inner.sizes\[0\]: is a int, expected a whole number"),
        ({"inner": {"sizes": 1}}, "top.inner.sizes: is 1, expected a list"),
        ({"inner": {"sizes": [], "scale": "1"}}, "top.inner.scale: is '1', expected a number"),
        ({"names": {"a": None}}, "top.names.a: is None, expected a string"),
        ({"perhaps": {"a": 1.5}}, "top.perhaps.a: is 1.5, expected a whole number"),
        ({"other": 1}, "top.other: no such field"),
    ],
)
def test_wrong_values_are_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(FieldError, match=f"^{says}"):
        from_plain(Outer, {"name": "a", "inner": {"sizes": []}} | change, "top")


def test_an_unknown_field_can_be_told_apart() -> None:
    with pytest.raises(UnknownField):
        from_plain(Inner, {"sizes": [], "sclae": 1.0}, "inner")


def test_endless_nesting_is_shown_short() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(FieldError, match="name: is "):
        from_plain(Outer, {"name": deep, "inner": {"sizes": []}}, "top")


def test_one_thing_is_not_written_as_several() -> None:
    assert [counted(number, "more line") for number in (0, 1, 2)] == ["0 more lines", "1 more line", "2 more lines"]
    assert [counted(number, "hypothesis", "hypotheses") for number in (1, 2)] == ["1 hypothesis", "2 hypotheses"]


def test_a_message_names_the_first_of_many() -> None:
    assert first_of(["a", "b"], 2) == ["a", "b"]
    assert first_of(["a", "b", "c", "d"], 2, " of them") == ["a", "b", "... and 2 more of them"]
    assert first_of([], 2) == []


def test_groups_have_the_order_of_their_values() -> None:
    assert list(grouped([3, 1, 4, 1, 5], lambda number: number % 2).items()) == [(1, [3, 1, 1, 5]), (0, [4])]
