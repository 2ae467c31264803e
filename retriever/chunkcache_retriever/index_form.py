"""Which FAISS index holds the vectors: every vector compared, or a part of them.

A flat index is exact, and fast enough to about a million vectors. Above, an inverted file compares a
query with the vectors of its nearest cells alone, and a graph (HNSW: Y. Malkov, D. Yashunin,
arXiv:1603.09320) walks from neighbour to neighbour; both may miss a near one. Vectors are always
held whole, so a score is the cosine itself in every form.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

import faiss
import numpy as np
import numpy.typing as npt

from chunkcache.errors import InvalidValueError

MAX_FLAT_VECTORS: Final = 1_000_000
"""Beyond so many, an inverted file takes the place of the flat index, where nothing else is set."""

_LARGE = "IVF1024,Flat"
_FORMS = re.compile(r"Flat|HNSW([1-9]\d{0,2})|IVF([1-9]\d{0,5}),Flat")
_VECTORS_PER_CELL = 39
"""Fewer, and FAISS says that its cells mean nothing."""
_MIN_WALKED = 64
_WALKED_PER_RESULT = 2
_PROBED_PART = 16
_MIN_PROBED = 8


@dataclass(frozen=True)
class IndexForm:
    """One form, by FAISS's factory string.

    Attributes:
        factory: ``Flat``, ``HNSW<links>`` or ``IVF<cells>,Flat``.
    """

    factory: str = "Flat"

    def __post_init__(self) -> None:
        """Check the string.

        Raises:
            InvalidValueError: It names another form.
        """
        if not _FORMS.fullmatch(self.factory):
            raise InvalidValueError(
                f"index_factory {self.factory!r} is none of Flat, HNSW<links> (HNSW32) and "
                "IVF<cells>,Flat (IVF1024,Flat)",
                param="index_factory",
            )

    @property
    def is_exact(self) -> bool:
        """Whether a search compares every vector."""
        return self.factory == "Flat"

    @property
    def num_cells(self) -> int:
        """Cells of an inverted file; 0 for other forms."""
        found = _FORMS.fullmatch(self.factory)
        return int(found[2]) if found and found[2] else 0

    def build(self, rows: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], dim: int) -> Any:
        """An index of vectors by their numbers.

        Args:
            rows: ``[n, dim]`` of length 1; enough to make cells of, if it has some.
            ids: ``[n]``.
            dim: Numbers per vector.
        """
        inner: Any = faiss.index_factory(dim, self.factory, faiss.METRIC_INNER_PRODUCT)
        if self.num_cells:
            inner.train(rows)
            inner.make_direct_map()  # to give vectors back by their numbers
        index: Any = faiss.IndexIDMap2(inner)
        if len(rows):
            index.add_with_ids(rows, ids)
        return index

    def parameters(self, num_asked: int, selector: Any) -> Any:
        """How a search of so many results goes about it.

        Args:
            num_asked: Results.
            selector: FAISS's, or None for all vectors.
        """
        given = {} if selector is None else {"sel": selector}
        if self.num_cells:
            probed = max(_MIN_PROBED, self.num_cells // _PROBED_PART)
            return faiss.SearchParametersIVF(nprobe=probed, **given)  # type: ignore[call-arg]
        if not self.is_exact:
            walked = max(_MIN_WALKED, _WALKED_PER_RESULT * num_asked)
            return faiss.SearchParametersHNSW(efSearch=walked, **given)  # type: ignore[call-arg]
        return faiss.SearchParameters(**given) if given else None  # type: ignore[call-arg]


def form_for(num_vectors: int, factory: str | None) -> IndexForm:
    """The form that so many vectors are held in.

    Args:
        num_vectors: How many there are.
        factory: What is set; None chooses by their number. While there are too few vectors to make
            cells of, they are held flat.

    Raises:
        InvalidValueError: There is no such form.
    """
    form = IndexForm(factory or ("Flat" if num_vectors <= MAX_FLAT_VECTORS else _LARGE))
    return form if num_vectors >= form.num_cells * _VECTORS_PER_CELL else IndexForm()
