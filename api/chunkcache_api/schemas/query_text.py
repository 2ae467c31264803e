"""Texts of a prompt, as several bodies hold them."""

from typing import Annotated

from pydantic import Field

MAX_PROMPT_TEXT_CHARS = 1 << 18
"""Longer than any context; tokenising much more would hold up every other request."""

PromptText = Annotated[str, Field(max_length=MAX_PROMPT_TEXT_CHARS)]
