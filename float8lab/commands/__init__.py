"""Commands of ``python -m float8lab`` that need more than a line each, and how they print."""
