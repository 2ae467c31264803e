"""Weight-only int8: every matrix of a loaded model as int8 rows with one fp32 scale each.

For the CPU, where an answer's next token waits for the weights to come from memory. torch's own
product of bf16 rows with int8 columns is used (``_weight_int8pack_mm``); it adds each output up in
one order, whatever the number of rows, so that a row has the same bits in any company. Its inputs
are rounded to bf16, so a model in int8 is as exact as one in bf16 is.
"""

from typing import Any, Final

import torch
from torch import nn

from chunkcache.errors import InvalidValueError, UnsupportedModelError

FORMAT: Final = "int8-rows-1"
"""Names the rounding in a model's identity: another way of rounding takes another name."""
ROUNDING_DTYPE: Final = torch.bfloat16
"""What the rows of a product are rounded to."""

_LARGEST: Final = 127
_COLUMNS_MULTIPLE: Final = 64
"""The product reads whole vectors of columns, and beyond the end of shorter rows."""
_product = torch.ops.aten._weight_int8pack_mm  # noqa: SLF001 - torch gives it no public name


class Int8Linear(nn.Module):
    """A linear layer over int8 rows, symmetric around zero.

    Attributes:
        rows: int8 ``[out, in]``, with columns of zeros up to a multiple of 64.
        scales: fp32 ``[out]``; a weight is its int8 times the row's scale.
        bias: ``[out]``, or None.
        num_columns: Inputs of the layer, without the columns of zeros.
    """

    rows: torch.Tensor
    scales: torch.Tensor
    _ones: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(dim=1) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        rows = (weight / scales[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
        self.num_columns = rows.shape[1]
        self._num_padded = -self.num_columns % _COLUMNS_MULTIPLE
        rows = nn.functional.pad(rows.to(torch.int8), (0, self._num_padded))
        self.register_buffer("rows", rows)
        self.register_buffer("scales", scales)
        self.register_buffer("_ones", torch.ones_like(scales, dtype=ROUNDING_DTYPE))
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``, in the dtype that came in."""
        flat = hidden.reshape(-1, hidden.shape[-1]).to(ROUNDING_DTYPE)
        if self._num_padded:
            flat = nn.functional.pad(flat, (0, self._num_padded))
        # Scaled in fp32 behind the product: the product's own scales would be rounded to bf16.
        out = _product(flat, self.rows, self._ones).float().mul_(self.scales)
        out = out.to(hidden.dtype)
        if self.bias is not None:
            out += self.bias
        return out.reshape(*hidden.shape[:-1], len(self.scales))


def check_int8(device: str, *, has_experts: bool) -> None:
    """Refuse int8 where it is not for, before weights are read.

    Raises:
        InvalidValueError: The device is not the CPU.
        UnsupportedModelError: The family has blocks of experts.
    """
    if torch.device(device).type != "cpu":
        raise InvalidValueError(
            f"quantisation int8 is for the CPU, not for device {device!r}", param="quantisation"
        )
    if has_experts:
        raise UnsupportedModelError("quantisation int8 does not reach blocks of experts")


def quantise_linears(model: Any) -> None:
    """Replace every linear layer of a model, the head included; embeddings stay as they are."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
