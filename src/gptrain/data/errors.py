"""What is raised when data is there but cannot be trained on."""


class DataError(ValueError):
    """Empty, damaged or ill-fitting data; the message names the file and both sides."""
