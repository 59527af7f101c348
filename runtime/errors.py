"""The one exception that reaches a user."""


class OmniDraftError(Exception):
    """Something the user can mend. Its text is one line that names the file or option, and the fix.

    What a stranger's file put into it can neither break the line nor steer the terminal.
    """

    def __init__(self, text: str) -> None:
        """What does not print becomes a space."""
        super().__init__(one_line(text))


def one_line(text: str) -> str:
    """Text with a space for each line break, escape, change of direction and half of a character."""
    return "".join(char if char.isprintable() else " " for char in text)
