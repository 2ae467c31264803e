"""What the library says about loaded weights, and when that is a refusal."""

from typing import Any

from chunkcache.errors import ModelFilesError

_SHOWN = 4


def check_loading_info(info: dict[str, Any], name: str) -> None:
    """Refuse weights that are not those of the model that the configuration describes.

    The library would make missing tensors up at random, and leave out those it has no place for:
    a configuration that forgets half of the layers gives a model that runs.

    Args:
        info: What ``from_pretrained(..., output_loading_info=True)`` says.
        name: Of the model, for the message.

    Raises:
        ModelFilesError: Tensors are missing, are too many or have another shape; names some.
    """
    for kind, text in (
        ("missing_keys", "the weights lack"),
        ("mismatched_keys", "config.json describes other shapes than the weights have:"),
        ("unexpected_keys", "config.json describes a model without"),
        ("error_msgs", "the weights cannot be loaded:"),
    ):
        found = sorted(_in_words(key) for key in info.get(kind) or ())
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise ModelFilesError(f"{name}: {text} {', '.join(found[:_SHOWN])}{more}")


def _in_words(key: Any) -> str:
    if isinstance(key, tuple) and len(key) == 3:
        tensor, in_file, in_model = key
        return f"{tensor} ({list(in_file)} in the file, {list(in_model)} in the model)"
    return str(key)
