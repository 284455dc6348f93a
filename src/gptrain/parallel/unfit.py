"""The one error of this room that is the user's to mend."""


class Unfit(ValueError):
    """A net that lacks what was asked of it.

    Attributes:
        key: the option that asked, as in the config.
    """

    def __init__(self, key: str, wrong: str):
        super().__init__(wrong)
        self.key = key
