"""What the library says about loaded weights, and when that is a refusal."""

from typing import Any

from chunkcache.errors import ModelFilesError


def check_loading_info(info: dict[str, Any], name: str) -> None:
    """Refuse weights that do not fill the model: the library would make the rest up at random.

    Args:
        info: What ``from_pretrained(..., output_loading_info=True)`` says.
        name: Of the model, for the message.

    Raises:
        ModelFilesError: Tensors are missing or have another shape; names some.
    """
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        found = sorted(str(k) for k in info.get(kind) or ())
        if found:
            raise ModelFilesError(f"{name}: {kind.replace('_', ' ')} {', '.join(found[:4])}")
