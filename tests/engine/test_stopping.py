"""Stop strings: the answer ends in front of the first, whatever the pieces are."""

from hypothesis import given
from hypothesis import strategies as st

from chunkcache.engine.stopping import StopMatcher

letters = st.text(alphabet="abc", max_size=30)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def cut_by_hand(text: str, stop: list[str]) -> str:
    """Character by character; of the strings that end at one character, the longest."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@given(text=letters, stop=stops, data=st.data())
def test_any_cutting_of_the_text_gives_the_same(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    matcher = StopMatcher(stop)
    shown, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += matcher.push(rest[:size])
        rest = rest[size:]
        assert cut_by_hand(text, stop).startswith(shown)
    is_matched = matcher.is_matched
    shown += matcher.finish()
    assert shown == cut_by_hand(text, stop)
    assert is_matched == any(s in text for s in stop)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END", "\n\n"])
    assert [matcher.push(p) for p in ("a\n", "b E", "N", "x", "E", "ND", "late")] == [
        *("a", "\nb ", "", "ENx", "", "", "")
    ]
    assert matcher.is_matched
    assert matcher.finish() == ""
