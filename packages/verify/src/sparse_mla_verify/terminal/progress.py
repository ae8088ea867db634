"""Progress bars on the terminal."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed


class Bars:
    """The collectors' progress as bars on the terminal."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def start(self, part: str, total: int) -> None:
        """A part begins: a bar of its own."""
        self._tasks[part] = self._bars.add_task(part, total=total)

    def advance(self, part: str, amount: int = 1) -> None:
        """Its bar grows."""
        self._bars.advance(self._tasks[part], amount)


def bars_on(console: Console) -> Progress:
    """Bars for a console, with counts and times."""
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    return Progress(*columns, console=console)
