"""Pages with a part that a command writes, between two marks."""

import re

FIGURE_MARKS = re.compile(r"(<!-- figures\b[^>]*-->\n).*?(<!-- /figures -->)", re.DOTALL)


def between_marks(text: str, table: str) -> str:
    """A text with the table between its two marks. Raises ValueError where they are not."""
    found, count = FIGURE_MARKS.subn(lambda marks: f"{marks[1]}\n{table}\n{marks[2]}", text)
    if count != 1:
        raise ValueError(
            f"text must have one pair of marks <!-- figures ... /figures -->, got {count}"
        )
    return found
