"""Which rows of a layout always run, and which a policy may choose from."""

from dataclasses import dataclass

import torch

from chunkcache.fusion.layout import Layout


@dataclass(frozen=True)
class PromptRows:
    """The rows of one prompt by their role.

    Attributes:
        fixed: int64, ascending: template, question, and chunks that have no entry; the opening
            only if no entry of it was placed.
        candidates: int64, ascending: tokens of placed chunks that are not exact.
        chunk_of: int64, beside ``candidates``: index of the chunk segment.
        offset_in_chunk: int64, beside ``candidates``.
    """

    fixed: torch.Tensor
    candidates: torch.Tensor
    chunk_of: torch.Tensor
    offset_in_chunk: torch.Tensor


def rows_by_role(
    layout: Layout,
    placed: list[bool],
    exact: list[bool],
    *,
    opening_is_placed: bool,
    device: torch.device,
) -> PromptRows:
    """Split a layout's positions into fixed rows and candidates.

    Args:
        layout: The prompt.
        placed: Per chunk segment, whether an entry was placed for it.
        exact: Per chunk segment, whether that entry is exact where it stands.
        opening_is_placed: Whether an entry was placed for the template text in front of the
            first chunk.
        device: Where the tensors go.
    """
    fixed: list[int] = []
    candidates: list[int] = []
    chunk_of: list[int] = []
    offsets: list[int] = []
    chunk_index = -1
    for segment in layout.segments:
        positions = range(segment.start, segment.end)
        if segment.kind != "chunk":
            if segment.start > 0 or not opening_is_placed:
                fixed += positions
            continue
        chunk_index += 1
        if not placed[chunk_index]:
            fixed += positions
        elif not exact[chunk_index]:
            candidates += positions
            chunk_of += [chunk_index] * len(positions)
            offsets += range(len(positions))

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return PromptRows(tensor(fixed), tensor(candidates), tensor(chunk_of), tensor(offsets))
