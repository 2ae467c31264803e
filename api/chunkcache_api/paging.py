"""Pages of lists in OpenAI's form: by time of creation, from an id on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from chunkcache.errors import InvalidValueError

ItemT = TypeVar("ItemT")
Order = Literal["asc", "desc"]


@dataclass(frozen=True)
class Page:
    """What part of a list is wanted.

    Attributes:
        limit: At most so many.
        order: The oldest or the newest first.
        after: Begin behind this id.
        before: End in front of this id: the last ones there.
    """

    limit: int
    order: Order = "desc"
    after: str | None = None
    before: str | None = None


def page_body(
    items: Sequence[ItemT],
    page: Page,
    key: Callable[[ItemT], tuple[float, str]],
    body: Callable[[ItemT], dict[str, Any]],
) -> dict[str, Any]:
    """One page.

    Args:
        items: The whole list, in any order.
        page: What is wanted of it.
        key: An item's time of creation and id.
        body: An item's JSON form.

    Raises:
        InvalidValueError: The page begins or ends at an id that is not in the list.
    """
    ordered = sorted(items, key=key, reverse=page.order == "desc")
    ids = [key(item)[1] for item in ordered]
    first = 0 if page.after is None else _index(ids, page.after, "after") + 1
    last = len(ids) if page.before is None else _index(ids, page.before, "before")
    found = ordered[first:last]
    is_from_the_end = page.before is not None and page.after is None
    shown = found[-page.limit :] if is_from_the_end else found[: page.limit]
    return {
        "object": "list",
        "data": [body(item) for item in shown],
        "first_id": key(shown[0])[1] if shown else None,
        "last_id": key(shown[-1])[1] if shown else None,
        "has_more": len(found) > len(shown),
    }


def _index(ids: Sequence[str], wanted: str, param: str) -> int:
    try:
        return ids.index(wanted)
    except ValueError:
        raise InvalidValueError(f"{param}: the list has no such id", param=param) from None
