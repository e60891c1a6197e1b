"""Statistics, reports and checks; what is here changes nothing."""

__all__: list[str] = []
