"""Keeping the model library quiet where its bars and reports say nothing, or say it again."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_library() -> Iterator[None]:
    """No bars and no warnings inside.

    Loading mapped weights takes less time than a bar takes to draw; what is wrong with weights is
    refused in one line, where the library prints a table and goes on.
    """
    from transformers.utils import logging

    was_enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_enabled:
            logging.enable_progress_bar()
