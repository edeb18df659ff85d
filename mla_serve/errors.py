"""The one base class of errors that are the user's to mend."""


class UserError(Exception):
    """One sentence that says what is wrong and how to mend it. The CLI prints it and exits 1; the server answers 4xx."""
