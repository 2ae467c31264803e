"""Help texts in one form: what a command does, then how it is typed."""


def help_text(text: str, *examples: str, notes: str = "") -> str:
    """A help text with examples.

    Args:
        text: Paragraphs, parted by blank lines; the first one stands in the list of commands.
        examples: Command lines, 76 characters at most, so that a narrow terminal keeps them whole.
        notes: What stands at the end.
    """
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    assert all(len(example) <= 76 for example in examples), examples
    paragraphs += ["[bold]Examples[/bold]", *(f"  {example}" for example in examples)]
    if notes:
        paragraphs.append(" ".join(notes.split()))
    return "\n\n".join(paragraphs)
