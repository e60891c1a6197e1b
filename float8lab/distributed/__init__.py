"""What runs across processes: FP8 all-gather of sharded weights."""

__all__: list[str] = []
