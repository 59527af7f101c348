"""The one exception that reaches a user."""


class OmniDraftError(Exception):
    """Something the user can mend. Its text is one line that names the file or option, and the fix."""
