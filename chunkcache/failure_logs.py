"""How a failure goes into the log. Knows no logger.

A log library that prints a traceback may print what the variables held, and here these hold
documents and questions; the default of structlog does.
"""

import traceback


def traceback_text(error: BaseException) -> str:
    """A traceback and its causes: files, lines, and what the exceptions say; no variables.

    For a log line's field ``exception``, which renderers put behind the line as it is.
    """
    return "".join(traceback.format_exception(error)).rstrip()
